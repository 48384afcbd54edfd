"""What a run writes down: exactly the promised keys, MFU by the study's formula, files that survive a kill."""

import json
import resource
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SHAPE

from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.counting import count_parameters
from dtlayout.models.presets import PRESETS
from dtlayout.records.run import Performance, Predicted, Run
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.training.metrics import (
    MetricsFile,
    Speed,
    StepMetrics,
    Summary,
    time_steps,
)

CONTRACT = [
    "step", "loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu",
    "model_tflops_per_gpu", "mfu", "peak_memory_bytes", "peak_reserved_bytes", "validation_loss", "data_wait_s",
    "spike", "loss_scale", "layout", "resumed", "fullest_expert", "fullest_expert_block", "expert_imbalance",
    "router_entropy", "router_square", "validation_losses",
]  # fmt: skip


def line(step: int, loss: float = 1.5) -> StepMetrics:
    speed = Speed(SHAPE, Batch(global_batch=2, seq_len=4), 1, None).describe(0.5)
    return StepMetrics(
        step=step, loss=loss, grad_norm=1.0, lr=0.1, tokens=8 * step, step_time_s=0.5, peak_memory_bytes=None, **speed
    )


def test_a_line_has_the_promised_keys_in_their_order(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(line(1))
    assert [list(json.loads(text)) for text in file.path.read_text().splitlines()] == [CONTRACT]
    assert [field.name for field in fields(StepMetrics)] == CONTRACT


@given(
    model=st.sampled_from([model for model in PRESETS.values() if model.experts is None]),
    global_batch=st.integers(1, 2048),
    seq_len=st.integers(1, 1 << 16),
    world_size=st.integers(1, 1 << 14),
    peak=st.floats(1e9, 1e16),
    step_time_s=st.floats(1e-3, 1e3),
)
@settings(deadline=None)
def test_mfu_is_the_studys_share_of_the_peak(model, global_batch, seq_len, world_size, peak, step_time_s):
    batch = Batch(global_batch=global_batch, seq_len=seq_len)
    numbers = Speed(model, batch, world_size, peak).describe(step_time_s)
    tokens_per_s = global_batch * seq_len / step_time_s
    flops = 6 * count_parameters(model) + 12 * model.num_layers * model.query_width * seq_len
    assert numbers["tokens_per_s"] == pytest.approx(tokens_per_s)
    assert numbers["tokens_per_s_per_gpu"] == pytest.approx(tokens_per_s / world_size)
    assert numbers["model_tflops_per_gpu"] == pytest.approx(tokens_per_s / world_size * flops / 1e12)
    assert numbers["mfu"] == pytest.approx(tokens_per_s / world_size * flops / peak)  # above 1 too: never clamped


def test_an_unknown_peak_has_no_mfu():
    assert line(1).mfu is None


@given(done=st.integers(0, 8), torn=st.sampled_from(["", '{"step": 9, "lo', '{"step": 9, "loss": 1.0}']))
@settings(deadline=None)
def test_a_resumed_run_keeps_the_whole_lines_up_to_its_step(tmp_path_factory, done, torn):
    file = MetricsFile(tmp_path_factory.mktemp("run") / "metrics.jsonl")
    for step in range(1, 7):
        file.append(line(step))
    with file.path.open("a") as raw:
        raw.write(torn)
    assert file.keep_until(done) == (9 if torn.endswith("\n") else 6)
    assert [entry["step"] for entry in file.read()] == list(range(1, min(done, 6) + 1))
    file.append(line(done + 1))
    assert file.read()[-1]["step"] == done + 1


def test_lines_for_which_there_is_no_room_come_with_the_next_one_for_which_there_is(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.append(line(1)) == ""
    whole, (soft, hard) = file.path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, hard))  # room for a part of a line, as on a full disk
    try:
        said = [file.append(line(2)), file.append(line(3))]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert said == [f"note: {file.path} cannot be written, its lines wait: File too large", ""]
    assert file.path.read_bytes() == whole
    assert file.append(line(4)) == ""
    assert [entry["step"] for entry in file.read()] == [1, 2, 3, 4]


def test_a_file_that_is_not_there_yet_has_no_lines_and_is_not_made(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.keep_until(3) == 0
    assert file.read() == []
    assert list(tmp_path.iterdir()) == []


def test_a_summary_makes_its_folder_and_is_one_json_document(tmp_path):
    Summary(outcome="refused", exit_code=2, problems=["tp=3"]).write(tmp_path / "a" / "run")
    written = json.loads((tmp_path / "a" / "run" / "summary.json").read_text())
    assert list(written) == [field.name for field in fields(Summary)]
    assert (written["outcome"], written["exit_code"], written["problems"]) == ("refused", 2, ["tp=3"])


def test_a_summary_holds_predicted_and_measured_under_the_same_keys(tmp_path):
    run = Run(
        table="runs", row="tiny", layout=Layout(pp=2), kernels=Kernels(), outcome="ok",
        scenario=Scenario(
            model=SHAPE, batch=Batch(global_batch=2, seq_len=4), engine=find_engine("dtlayout", "cpu"),
            cluster=Cluster(gpu=find_gpu("cpu"), num_gpus=2, gpus_per_node=2),
        ),
        predicted=Predicted(step_time_s=0.4, peak_memory_bytes=(2, 3), calibrated=False),
        measured=Performance(step_time_s=0.5, peak_memory_bytes=(3, 4)),
    )  # fmt: skip
    Summary(outcome="done", run=run).write(tmp_path)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["measured"] == {"step_time_s": 0.5, "mfu": None, "peak_memory_bytes": [3, 4]}
    assert written["predicted"] == {
        "step_time_s": 0.4, "mfu": None, "peak_memory_bytes": [2, 3], "gpu": "cpu", "calibrated": False,
    }  # fmt: skip
    assert list(written["predicted"])[:3] == list(written["measured"])
    assert (written["model"], written["world_size"], written["tokens_per_s"]) == ("tiny", 2, 16.0)
    assert Run.from_dict(written["run"]) == run


@pytest.mark.parametrize(
    ("times_s", "median"), [([], None), ([9.0], 9.0), ([9.0, 5.0], 7.0), ([9.0, 5.0, 1.0, 2.0, 3.0], 2.0)]
)
def test_the_median_leaves_out_the_first_two_steps_where_there_are_more(times_s, median):
    assert time_steps(times_s)[0] == median
