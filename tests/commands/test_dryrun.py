"""dtlayout dryrun: what the ranks of an absent cluster hold and send, for people and for programs, or why not."""

import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import asdict

import pytest
from browser import CHROMIUM, check_readable

from dtlayout.cli import main
from dtlayout.commands.dryrun_tables import list_tables
from dtlayout.config.loading import load_config
from dtlayout.measure.ledger import Footprint, Highest
from dtlayout.planner.prediction import own_scenario, predicted_kernels
from dtlayout.records.run import Run
from dtlayout.spec.cluster import find_gpu
from dtlayout.training.metrics import MemoryCurves

DEBUG = ("dryrun", "configs/debug.toml", "--gpu", "cpu")


def test_a_person_reads_the_peak_its_parts_the_messages_and_how_far_the_formula_is_off(capsys):
    arguments = ("--world", "4", "--compare", "--ranks", "3")
    assert main([*DEBUG, *arguments]) == 0
    out, progress = capsys.readouterr()
    assert "rank 3 done, 1 of 1" in progress
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "debug as pp2·tp2+sp mb4 1f1b zero1 on 4 x cpu, dry"
    assert "rank 3 pp 1 of 2, tp 1 of 2" in lines
    assert "send pp 262,144 4 1.0 no" in lines and "all pp 2.1 no" in lines
    (peak,) = (line for line in lines if line.startswith("peak") and "%" in line)
    _, dry, predicted, difference = peak.split()
    assert float(difference.rstrip("%")) == pytest.approx(100 * (float(predicted) / float(dry) - 1), abs=0.06)
    assert abs(float(difference.rstrip("%"))) < 5
    assert [line.endswith("<") for line in lines if line.startswith("optimizer") and "+" in line] == [False]
    assert "a step, % of the predicted" not in " ".join(lines)  # the first stage was not run


def test_a_second_estimate_of_the_step_is_shown_beside_the_cost_models(capsys):
    assert main([*DEBUG, "--world", "4", "--compare"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert not any("ms" in line.split() for line in lines), "a CPU that nobody calibrated has no times"
    table = lines[lines.index("a step, % of the predicted dry run predicted difference <: over 5%") + 1 :]
    assert [row.split()[0] for row in table[-8:]] == [
        "compute,", "recompute", "tp", "pp", "bubble", "dp", "host", "step",
    ]  # fmt: skip
    dry, predicted = (float(cell) for cell in table[-1].split()[1:3])
    assert dry == pytest.approx(predicted, rel=0.5)  # eager operators of a CPU, priced as if they were few


def test_a_program_reads_the_default_ranks_with_the_curve_of_their_first_steps(capsys, tmp_path):
    page = tmp_path / "page.html"
    assert main([*DEBUG, "--world", "4", "--steps", "2", "--json", "--page", str(page)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in document["ranks"]] == [0, 3]
    run, (first, last) = Run.from_dict(document["run"]), document["ranks"]
    assert (run.outcome, run.layout.tp, run.step_time_s) == ("dry", 2, None)
    assert run.measured.peak_memory_bytes == (first["peak_bytes"], last["peak_bytes"])
    assert run.measured.memory[0].total == first["peak_bytes"]
    assert run.predicted.memory[1].total == pytest.approx(last["compared_bytes"]["peak"]["predicted"])
    first = document["ranks"][0]
    actions = [part["action"] for part in first["curve"]]
    assert actions[: len(actions) // 2] == actions[len(actions) // 2 :]  # two steps
    assert actions[0] == "0F0" and actions[-1] == "update"
    assert max(part["nbytes"] for part in first["curve"]) == first["peak_bytes"] == sum(first["parts"].values())
    if CHROMIUM:
        check_readable(page)
    text = page.read_text()
    assert text.count("<svg") == 2 and "reduce_<wbr>scatter" in text
    assert not re.search(r'(src|href)="[^#]', text)  # nothing is loaded
    # Adam's state is there from the end of the first step on.
    assert first["curve"][0]["nbytes"] < first["curve"][len(actions) // 2]["nbytes"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--ranks", "0,9"), "--ranks=0,9 has 9, and the ranks are 0 to 3"),
        (("--ranks", "last"), "--ranks=last is no list of ranks; use all, or numbers such as 0,3"),
        (("--gpu", "h100-80g-sxm", "--precision.compute=bfloat16", "--kernels.norm=liger"), "use --kernels.norm=fused"),
        (("--data.document_mask=true",), "use --data.document_mask=false"),
        (("--world", "3"), "start 4 or 8"),
        (("--steps", "-1"), "--steps=-1"),
        (("--steps", "2", "--run", "runs/none"), "leave --steps out"),
        (("--page", "nowhere/page.html"), "there is no folder nowhere"),
        (("--gpu", "Voodoo"), "GPU type 'Voodoo' is unknown; use one of a10-24g, "),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_in_one_line(capsys, arguments, reason):
    world = [] if "--world" in arguments else ["--world", "4"]
    assert main([*DEBUG, *world, *arguments]) == 2
    out, problem = capsys.readouterr()
    assert not out
    assert reason in problem and problem.count("\n") == 1


@pytest.mark.parametrize(
    ("dry", "predicted", "cell", "mark"),
    [(100.0, 104.0, "+4.0%", ""), (100.0, 94.0, "-6.0%", "<"), (0.0, 0.0, "+0.0%", ""), (0.0, 1.0, "+100.0%", "<")],
)
def test_a_difference_above_five_percent_is_marked(dry, predicted, cell, mark):
    rank = {
        "peak_bytes": 2**30, "parts": asdict(Footprint()), "traffic": [], "flops": {}, "measured": [],
        "compared_bytes": {"optimizer": {"dry": dry * 2**20, "predicted": predicted * 2**20}},
    }  # fmt: skip
    *_, table = list_tables(rank, compares=True)
    assert table[1][-2:] == [cell, mark]
    assert table[0][-1] == ("<: over 5%" if mark else "")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with the curves of a run that held what a dry run holds."""
    folder = tmp_path_factory.mktemp("run")
    with redirect_stdout(io.StringIO()) as out:
        assert main([*DEBUG, "--world", "4", "--steps", "2", "--whole", "--json"]) == 0
    ranks = json.loads(out.getvalue())["ranks"]
    curves = [[Highest(**highest) for highest in rank["curve"]] for rank in (ranks[0], ranks[1])]
    config = load_config("configs/debug.toml")
    layout = config.layout.resolve(4)
    about = Run(
        table="runs", row="debug", scenario=own_scenario(config, 4, find_gpu("cpu")), layout=layout,
        kernels=predicted_kernels(config, layout, find_gpu("cpu")), outcome="running",
    )  # fmt: skip
    MemoryCurves(num_steps=2, by_pp_rank=curves, run=about).write(folder)
    return folder


def test_a_real_run_is_drawn_and_compared_with(capsys, run):
    page = run / "page.html"
    assert main([*DEBUG, "--world", "4", "--run", str(run), "--ranks", "0,1", "--page", str(page)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines.count("first steps, MiB dry run measured difference") == 1
    assert "run the first 2 steps, each 4 microbatches" in lines
    assert "note: not measured: ranks 1; the run has measured 0, 2" in lines
    assert "note: no time of a step: that takes both ends of the pipeline, such as --ranks 0,2" in lines
    assert page.read_text().count("measured") >= 2


def test_a_run_of_something_else_is_refused_before_anything_is_run(capsys, run):
    others = ("--layout.zero=3", "--batch.seq_len=512", "--model.hidden_size=256", "--optimizer.name=sgd")
    assert main([*DEBUG, "--world", "4", *others, "--run", str(run)]) == 2
    problem = capsys.readouterr().err
    assert problem == (
        f"the run of {run} had model.hidden_size=128, batch.seq_len=256, layout.zero=1, "
        f"optimizer.name='adamw', optimizer.state={{'exp_avg': None, 'exp_avg_sq': None}}; dry-run that, or measure "
        f"this one\n"
    )


@pytest.mark.parametrize(
    "text", [None, "{", '{"num_steps": "a", "by_pp_rank": [], "run": {}}', '{"num_steps": 1}', "[]"]
)
def test_a_run_without_curves_is_refused_with_the_option_that_makes_them(capsys, tmp_path, text):
    if text is not None:
        (tmp_path / "memory.json").write_text(text)
    assert main([*DEBUG, "--world", "4", "--run", str(tmp_path)]) == 2
    problem = capsys.readouterr().err
    assert "--metrics.memory=true" in problem and problem.count("\n") == 1


def test_a_peak_above_the_capacity_is_said_to_be_one(capsys):
    arguments = ("--gpu", "rtx4090-24g", "--precision.compute=bfloat16", "--batch.seq_len=1_048_576", "--ranks", "0")
    assert main(["dryrun", "configs/debug.toml", "--world", "4", *arguments]) == 0
    (peak,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("peak"))
    assert re.match(r"peak  \d+\.\d+ GiB, which does not fit into 21.65 GiB, in ", peak)


def test_the_first_step_is_compared_without_what_adam_does_not_keep_yet(capsys):
    assert main([*DEBUG, "--world", "4", "--steps", "1", "--compare", "--ranks", "0"]) == 0
    out = capsys.readouterr().out
    assert "run   the first step, 4 microbatches" in out
    assert "<" not in "".join(line for line in out.splitlines() if line.startswith(("optimizer", "peak")))


def test_compiled_blocks_are_compared_with_the_formula_of_eager_ones(capsys):
    assert main([*DEBUG, "--world", "4", "--kernels.compile=blocks", "--compare", "--ranks", "0"]) == 0
    out = capsys.readouterr().out
    assert "kernels.compile=blocks is left out" in out
    assert not [line for line in out.splitlines() if line.endswith("<") and line.startswith(("activ", "peak"))]
