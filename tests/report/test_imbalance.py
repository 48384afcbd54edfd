"""Reports say how full the fullest of ep's ranks was beside what predictions took, and which key to set."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dtlayout.cli import main
from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.scenario import Scenario
from dtlayout.records.run import Performance, Run
from dtlayout.report.imbalance import find_imbalances
from dtlayout.report.page import Report
from dtlayout.report.rows import read_rows
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts, ModelShape
from dtlayout.training.metrics import Summary

MODEL = ModelShape(
    name="mixture", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4, ffn_size=64, vocab_size=100,
    experts=Experts(number=8, per_token=2, ffn_size=32),
)  # fmt: skip


def make_run(table: str, ep: int, measured: float | None, taken: float = 1.0) -> Run:
    scenario = Scenario(
        model=replace(MODEL, experts=replace(MODEL.experts, imbalance=taken)),
        batch=Batch(global_batch=16, seq_len=64), engine=find_engine("dtlayout", "h100-80g-sxm"),
        cluster=Cluster(gpu=find_gpu("h100-80g-sxm"), num_gpus=8, gpus_per_node=8),
    )  # fmt: skip
    return Run(
        table=table, row=f"ep{ep}", scenario=scenario, layout=Layout(dp_shard=8, ep=ep), kernels=Kernels(),
        outcome="ok", measured=Performance(step_time_s=0.1 / ep, mfu=0.01 * ep, expert_imbalance=measured),
    )  # fmt: skip


def test_an_imbalance_that_was_not_predicted_names_the_key_to_set():
    runs = [make_run("s", 2, 1.3), make_run("s", 4, 1.6), make_run("s", 8, 1.9), make_run("s", 1, 1.0)]
    [found] = find_imbalances(runs)
    assert found.describe() == (
        "s: the fullest of ep's ranks computed 1.60 times the mean, median of 3 layouts, and predictions took 1.00; "
        "--model.experts.imbalance=1.60 predicts so"
    )
    so = [replace(run, scenario=make_run("s", 2, None, 1.6).scenario) for run in runs]
    assert find_imbalances(so)[0].describe().endswith("median of 3 layouts, and predictions took 1.60")


@pytest.mark.parametrize(
    ("measured", "taken", "is_as_predicted"), [(1.09, 1.0, True), (1.12, 1.0, False), (1.0, 1.5, False), (2.0, 9, True)]
)
def test_only_what_differs_by_more_than_a_tenth_is_worth_another_prediction(measured, taken, is_as_predicted):
    [found] = find_imbalances([make_run("s", 2, measured, taken)])  # of two ranks one computes at most twice the mean
    assert found.is_as_predicted is is_as_predicted
    assert ("--model.experts.imbalance" in found.describe()) is not is_as_predicted


def test_rows_that_share_no_experts_or_measured_no_balance_say_nothing():
    assert find_imbalances([make_run("s", 1, 1.0), make_run("s", 4, None)]) == []
    text = Report([make_run("s", 4, None)]).to_markdown()
    assert "Balance" not in text and "imbalance" not in text


def test_each_sweep_has_a_sentence_and_each_layout_both_numbers(tmp_path: Path, capsys):
    files = []
    for run in (make_run("one", 4, 1.5), make_run("two", 8, 1.04), make_run("two", 2, 1.05)):
        Summary(outcome="done", run=run).write(tmp_path / f"{run.table}-{run.row}")
        files.append(str(tmp_path / f"{run.table}-{run.row}"))
    assert read_rows([Path(file) for file in files]).runs[0].measured.expert_imbalance == 1.5
    page = tmp_path / "page.html"
    assert main(["report", *files, "--page", str(page)]) == 0
    out = capsys.readouterr().out
    said = out.partition("## Balance of experts\n\n")[2].splitlines()
    assert len(said) == 2 and said[0].startswith("- one: ") and "imbalance=1.50 predicts so." in said[0]
    assert "1 layout," in said[0] and "2 layouts" in said[1] and said[1].endswith("took 1.00.")
    [header, _, *best] = [line for line in out.partition("## Fastest")[2].splitlines() if line.startswith("|")]
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    assert columns[-3:] == ["ep", "imbalance", "predicted imbalance"]
    assert [[cell.strip() for cell in line.strip("|").split("|")][-3:] for line in best] == [
        ["4", "1.50", "1.00"], ["8", "1.04", "1.00"],
    ]  # fmt: skip
    assert re.search(r"<h2[^>]*>Balance of experts", page.read_text()) and "--model.experts.imbalance=1.50" in (
        page.read_text()
    )
    assert main(["report", *files, "--json"]) == 0
    [first, second] = json.loads(capsys.readouterr().out)["balance"]
    assert (first["measured"], first["predicted"], second["num_rows"]) == (1.5, 1.0, 2)
