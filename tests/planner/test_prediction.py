"""Predictions before the first step: every legal layout has one, and hopeless layouts are refused."""

import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny import SHAPE

from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.config.config import Config
from dtlayout.config.loading import parse_config
from dtlayout.config.sections import CheckpointConfig, ClusterConfig, DataConfig, TrainConfig
from dtlayout.costmodel.estimate import HOPELESS_SHARE, Estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.counting import count_parameters
from dtlayout.models.presets import PRESETS
from dtlayout.planner.prediction import (
    describe,
    own_scenario,
    predict,
    predicted_kernels,
    refuse_beyond_host,
    refuse_full_disk,
    refuse_hopeless,
    to_predicted,
)
from dtlayout.records.intervals import find_intervals
from dtlayout.records.run import Predicted, Run
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import find_gpu, gpu_named, known_gpus
from dtlayout.spec.kernels import Kernels, OpenKernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import Precision

A100 = find_gpu("a100-80g-sxm")


@st.composite
def runs(draw: st.DrawFn) -> tuple[Config, Layout]:
    """A config that training takes, and its layout."""
    pp, tp = draw(st.sampled_from((1, 2, 3, 4, 8, 16))), draw(st.sampled_from((1, 2, 4, 8)))
    schedule = draw(st.sampled_from(("1f1b", "gpipe", "interleaved-1f1b")))
    layout = Layout(
        pp=pp, tp=tp, dp_replicate=draw(st.integers(1, 5)), dp_shard=draw(st.integers(1, 70)),
        sequence_parallel=draw(st.booleans()), micro_batch=draw(st.integers(1, 9)), schedule=schedule,
        virtual_stages=draw(st.integers(2, 4)) if schedule == "interleaved-1f1b" else 1,
        zero=draw(st.sampled_from((1, 2, 3))),
        recompute=draw(
            st.sampled_from(("none", "full", "selective", "keep-attention", "keep-matmuls", "every-2", "every-7",
                             "2-of-5"))
        ),
    )  # fmt: skip
    num_microbatches = pp * draw(st.integers(1, 40))
    batch = Batch(
        global_batch=layout.dp * layout.micro_batch * num_microbatches, seq_len=8 * draw(st.integers(1, 20_000))
    )
    model = draw(st.sampled_from((SHAPE, *PRESETS.values())))
    assume(layout.is_legal(model, batch))
    try:
        precision = Precision(
            **{
                name: draw(st.sampled_from(("float64", "float32", "bfloat16")))
                for name in ("params", "compute", "reduce")
            }
        )
    except InvalidConfig:
        assume(False)
    config = Config(
        model=model, batch=batch, train=TrainConfig(steps=1), precision=precision,
        kernels=OpenKernels(
            attention=draw(st.sampled_from(("auto", "sdpa-flash", "sdpa-math"))),
            norm=draw(st.sampled_from(("eager", "fused"))),
        ),
        cluster=ClusterConfig(gpus_per_node=draw(st.integers(1, 17))),
    )  # fmt: skip
    return config, layout


@given(run=runs(), gpu=st.sampled_from((find_gpu("cpu"), *known_gpus().values())))
@settings(deadline=None, max_examples=200)
def test_every_legal_layout_has_a_prediction_of_finite_positive_numbers(run, gpu):
    config, layout = run
    found = predict(config, layout, gpu)
    parts = [*found.time.as_dict().values(), *(v for rank in found.memory for v in rank.as_dict().values())]
    assert all(math.isfinite(part) and part >= 0 for part in parts)
    for number in (found.step_time_s, found.mfu, found.capacity_bytes, *(rank.total for rank in found.memory)):
        assert math.isfinite(number) and number > 0
    assert len(found.memory) == layout.pp
    scenario = own_scenario(config, layout.world_size, gpu)
    assert describe(found, scenario).startswith("predicted: peak " if gpu.name == "cpu" else "predicted: step ")
    recorded = to_predicted(found, scenario)
    assert recorded.peak_memory_bytes == tuple(round(rank.total) for rank in found.memory)
    assert (recorded.memory, recorded.time) == (tuple(found.memory), None if gpu.name == "cpu" else found.time)
    assert_json_holds(scenario, found, recorded)


def assert_json_holds(scenario: Scenario, found: Estimate, recorded: Predicted) -> None:
    """A run's JSON gives back the run, with its prediction and whatever was measured of the machine."""
    run = Run(
        table="t", row="0", scenario=scenario, layout=found.layout, kernels=found.kernels, outcome="skipped",
        predicted=recorded,
    )  # fmt: skip
    assert Run.from_dict(json.loads(json.dumps(run.to_dict(), allow_nan=False))) == run


def make_config(*, force: bool = False, **layout: object) -> Config:
    return parse_config(
        {
            "model": {"name": "llama-13b"}, "batch": {"global_batch": 64, "seq_len": 2048}, "layout": layout,
            "train": {"steps": 1, "force": force},
        }
    )  # fmt: skip


def test_an_unknown_gpu_has_no_prediction_and_refuses_nothing():
    config = make_config()
    scenario = own_scenario(config, 1, gpu_named("GeForce GTX 970"))
    assert predict(config, Layout(), None) is None and to_predicted(None, scenario) is None
    assert describe(None, scenario) == (
        "predicted: n/a, for GeForce GTX 970 is no GPU whose data sheet is known; name its type with cluster.gpu"
    )
    scenario = own_scenario(config, 1, gpu_named("NVIDIA H100 80GB HBM3 MIG 1g.10gb"))
    assert describe(None, scenario) == (
        "predicted: n/a, for NVIDIA H100 80GB HBM3 MIG 1g.10gb is a part of a GPU, whose peak is not known; give it a "
        "peak_bf16 in a cluster file"
    )
    refuse_hopeless(config, Layout(), None)


def test_a_layout_far_beyond_the_memory_is_refused_with_what_would_work():
    with pytest.raises(InvalidLayout) as caught:
        refuse_hopeless(make_config(), Layout(dp_shard=8, micro_batch=8), A100)
    (problem,) = caught.value.problems
    assert problem.startswith("layout dp8 mb8 zero1 is predicted to need ")
    assert re.search(r"rank 0 of the 7\d\.\d GiB of a100-80g-sxm, most of it activations; use --layout\.", problem)
    assert problem.endswith(" or --train.force=true to try it anyway")


def test_where_nothing_on_these_gpus_works_the_refusal_says_how_many_would():
    with pytest.raises(InvalidLayout, match=r"most of it optimizer; use \d+ GPUs with --layout\..* GiB\), or --train"):
        refuse_hopeless(make_config(), Layout(), replace(A100, host_link_bytes_per_s=None))


def test_a_layout_that_asks_more_of_the_host_than_it_has_is_refused():
    gpu, layout = (
        replace(A100, host_memory_bytes=2**33),
        Layout(dp_shard=8, zero=3, recompute="full", offload="optimizer"),
    )
    refuse_hopeless(make_config(), layout, A100)
    with pytest.raises(
        InvalidLayout, match=r"GiB of the host's memory for each GPU, of 7\.2 GiB that a100-80g-sxm has"
    ):
        refuse_hopeless(make_config(), layout, gpu)


def test_what_the_ranks_of_a_host_need_together_is_refused_where_it_has_less():
    cpu, layout = find_gpu("cpu"), Layout(dp_shard=8)
    peak = predict(make_config(), layout, cpu).peak_bytes
    refuse_beyond_host(make_config(), layout, cpu, 4, int(4 * peak) + 1)
    refuse_beyond_host(make_config(force=True), layout, cpu, 4, 1)
    with pytest.raises(InvalidLayout, match=r"for a rank, 5 of which share the [\d.]+ GiB of this host; use a smaller"):
        refuse_beyond_host(make_config(), layout, cpu, 5, int(4 * peak) + 1)


@pytest.mark.parametrize("layout", [Layout(dp_shard=8), Layout(dp_shard=8, zero=3, offload="optimizer")], ids=str)
def test_beside_gpus_the_host_has_what_is_offloaded_and_the_copy_that_is_saved(layout):
    config = make_config()
    saved = replace(config, checkpoint=CheckpointConfig(every=1))
    assert saved.checkpoint.is_in_background and not config.checkpoint.is_in_background
    state_bytes = 12 * count_parameters(config.model) / 8  # masters and two moments in fp32, of an eighth of the model
    held_bytes = max(predict(config, layout, A100).host_bytes, default=0.0)
    for setting, needed_bytes in ((config, held_bytes), (saved, held_bytes + state_bytes)):
        refuse_beyond_host(setting, layout, A100, 8, int(8.1 * needed_bytes))
        if needed_bytes:
            with pytest.raises(InvalidLayout, match=r"GiB of its host's memory for a rank, 8 of which share"):
                refuse_beyond_host(setting, layout, A100, 8, int(7.9 * needed_bytes))
    with pytest.raises(InvalidLayout, match=r"use more hosts or --checkpoint.background=false, or --train.force"):
        refuse_beyond_host(saved, layout, A100, 8, 0)


def test_a_disk_that_has_less_than_the_ranks_of_a_host_need_together_is_refused(tmp_path, monkeypatch):
    cpu, layout = find_gpu("cpu"), Layout(dp_shard=8, zero=3, offload="disk", offload_folder=str(tmp_path))
    config = make_config()
    needed_bytes = 4 * round(predict(config, layout, cpu).disk_bytes[0])
    assert needed_bytes == pytest.approx(12 * count_parameters(config.model) / 2, rel=0.01)  # 4 ranks of 8
    free = [needed_bytes]
    monkeypatch.setattr("dtlayout.planner.prediction.find_free_bytes", lambda folder, key: free[0])
    refuse_full_disk(config, layout, cpu, 4)
    free[0] -= 1
    with pytest.raises(InvalidLayout) as caught:
        refuse_full_disk(config, layout, cpu, 4)
    (problem,) = caught.value.problems
    assert re.search(r"is predicted to need 7\d\.\d GiB on disk for 4 ranks, and layout\.offload_folder=/", problem)
    assert " GiB free: 1 bytes are missing; free them, name a folder on a larger disk, or use " in problem
    refuse_full_disk(config, replace(layout, offload="optimizer"), cpu, 4)
    refuse_full_disk(config, layout, None, 4)  # no prediction
    refuse_full_disk(make_config(force=True), layout, cpu, 4)
    monkeypatch.undo()
    with pytest.raises(InvalidConfig, match="cannot be used: No such file or directory; name a folder"):
        refuse_full_disk(config, replace(layout, offload_folder=str(tmp_path / "none")), cpu, 4)


def test_force_the_cpu_and_a_layout_that_is_nearly_small_enough_pass():
    refuse_hopeless(make_config(force=True), Layout(), A100)
    refuse_hopeless(make_config(), Layout(), find_gpu("cpu"))
    config, layout = make_config(), Layout(dp_shard=16)
    predicted = predict(config, layout, A100)
    for share, passes in ((HOPELESS_SHARE - 0.01, True), (HOPELESS_SHARE + 0.01, False)):
        context_bytes = A100.memory_bytes - predicted.capacity_bytes
        gpu = replace(A100, memory_bytes=int(predicted.peak_bytes / share + context_bytes))
        scenario = own_scenario(config, layout.world_size, gpu)
        surely = predicted.peak_bytes * find_intervals(scenario).peak_memory.low > predicted.peak_bytes / share
        said = describe(predict(config, layout, gpu), scenario)
        assert said.endswith(f": it {'does' if surely else 'may'} not fit")
        if passes:
            refuse_hopeless(config, layout, gpu)
        else:
            with pytest.raises(InvalidLayout, match="is predicted to need"):
                refuse_hopeless(config, layout, gpu)


def test_a_prediction_is_one_line_and_says_how_much_it_is_worth():
    config, layout = make_config(), Layout(dp_shard=64, micro_batch=1)
    scenario = own_scenario(config, 64, A100)
    line = describe(predict(config, layout, A100), scenario)
    state = "calibrated" if to_predicted(predict(config, layout, A100), scenario).calibrated else "uncalibrated"
    number = r"[\d.]+"
    step = rf"step {number} s \({number} to {number}, {state}: 90% of \d+ rows of [^()]+\)"
    peak = rf"peak {number} GiB \({number} to {number}\) on pipeline rank 0 of 7\d\.\d GiB"
    assert re.fullmatch(rf"predicted: {step}, MFU {number}%, [\d,]+ tokens/s/GPU, {peak}", line)


def test_on_a_cpu_a_step_is_predicted_once_it_is_calibrated_and_memory_always():
    config, layout, cpu = make_config(), Layout(dp_shard=64, micro_batch=1), find_gpu("cpu")
    measured = replace(cpu, achieved=(("layer_host_s", 1e-3),), prediction_error=0.1)
    for gpu, line in (
        (
            cpu,
            r"predicted: peak .* GiB on pipeline rank 0 "
            r"\(no step time: dtlayout calibrate has not measured this CPU\)",
        ),
        (
            measured,
            r"predicted: step .* s \(.* to .*, calibrated: 50% of the steps of the last sweep on these machines\), "
            r"peak .* GiB on pipeline rank 0",
        ),
    ):
        found, scenario = predict(config, layout, gpu), own_scenario(config, 64, gpu)
        recorded = to_predicted(found, scenario)
        assert re.fullmatch(line, describe(found, scenario))
        assert (recorded.step_time_s, recorded.mfu) == (found.step_time_s if gpu is measured else None, None)
        assert (recorded.step_time_interval is None) == (gpu is cpu) and recorded.peak_memory_interval
        assert_json_holds(scenario, found, recorded)


def test_documents_that_do_not_see_each_other_are_part_of_what_is_predicted():
    config, layout = replace(make_config(), kernels=OpenKernels(attention="sdpa-cudnn")), Layout(dp_shard=64)
    masked = replace(config, data=DataConfig(document_mask=True))
    assert predict(masked, layout, A100).peak_bytes == predict(config, layout, A100).peak_bytes + 2 * 2048**2


@pytest.mark.parametrize(
    ("gpu", "compute", "attention"),
    [
        ("h100-80g-sxm", "bfloat16", "sdpa-cudnn"),
        ("a100-80g-sxm", "bfloat16", "sdpa-flash"),
        ("a100-80g-sxm", "float32", "sdpa-efficient"),
        ("a100-80g-sxm", "float64", "sdpa-math"),
        ("cpu", "float32", "blockwise"),
    ],
)
def test_auto_is_predicted_as_the_kernels_that_it_stands_for(gpu, compute, attention):
    kernels = Kernels(attention=attention, compile="none" if gpu == "cpu" else "blocks")
    auto, named = (
        replace(make_config(), kernels=opened, precision=Precision(params="float64", compute=compute))
        for opened in (OpenKernels(), OpenKernels.of(kernels))
    )
    layout = Layout(dp_shard=8)
    found = predict(auto, layout, find_gpu(gpu))
    assert found == predict(named, layout, find_gpu(gpu)) and found.kernels == kernels


def test_what_a_run_has_to_repeat_is_predicted_with_kernels_that_do():
    config, h100 = make_config(), find_gpu("h100-80g-sxm")
    repeats = replace(config, train=replace(config.train, deterministic=True))
    found = [predicted_kernels(each, Layout(), h100).attention for each in (config, repeats)]
    assert found == ["sdpa-cudnn", "sdpa-flash"]
