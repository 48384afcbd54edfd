"""The report over tables and sweeps: findings, plots and a table of every layout, in files that need no others."""

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from browser import check_readable, needs_browser
from tiny import write_tiny

from dtlayout.base.formatting import escape_markdown
from dtlayout.cli import main
from dtlayout.config.loading import load_config
from dtlayout.planner.prediction import own_scenario, predicted_kernels
from dtlayout.records.run import Performance, Run
from dtlayout.report.page import Report
from dtlayout.report.rows import ReportRows, read_rows
from dtlayout.spec.cluster import Cluster, find_gpu, gpu_named
from dtlayout.sweep.results import Journal, TrialResult
from dtlayout.training.metrics import Summary

HEADER = (
    "table,row,model,hidden,layers,heads,ffn,vocab,seq_len,gpu,gpus,global_batch,micro_batch,dp,tp,pp,kernel,status,"
    "step_time_s,mfu,peak_memory_gb"
)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Twelve rows, of which two ran out of memory."""
    path = tmp_path / "table.csv"
    rows = [
        f"sweep,{tp}{pp}{mb},tiny,512,4,8,1024,1000,256,a100-80g-sxm,8,64,{mb},{8 // (tp * pp)},{tp},{pp},flash2,"
        + ("oom,,," if tp == pp == 1 else f"ok,{0.1 * tp * pp},{0.4 / (tp * pp)},{10 / tp}")
        for tp in (1, 2, 4)
        for pp in (1, 2)
        for mb in (1, 2)
    ]
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return path


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two trials that ran, one that hung and one that was never possible."""
    files, folder = write_tiny(tmp_path), tmp_path / "my-sweep"
    folder.mkdir()
    outcomes = (("a", 1, "ok", 0.5), ("b", 2, "ok", 0.25), ("c", 4, "hung", None), ("d", 3, "refused", None))
    for key, tp, outcome, step_time_s in outcomes:
        config = load_config(files.config, [f"--layout.tp={tp}", "--train.device=cpu"] if tp != 3 else [])
        layout = config.layout.resolve(4)
        run = Run(
            table="my-sweep", row=key, scenario=own_scenario(config, 4, find_gpu("cpu")), layout=layout,
            kernels=predicted_kernels(config, layout, find_gpu("cpu")), outcome=outcome,
            measured=Performance(step_time_s=step_time_s, peak_memory_bytes=(1000 * tp,)),
        )  # fmt: skip
        cause = "tp=3 does not divide num_heads=4" if outcome == "refused" else ""
        Journal(folder).append(TrialResult(key=key, setting=key, overrides=(), run=None if cause else run, cause=cause))
    return folder


def test_the_page_has_findings_plots_and_every_row_and_loads_nothing(table, tmp_path, capsys):
    page, markdown = tmp_path / "report.html", tmp_path / "report.md"
    assert main(["report", str(table), "--page", str(page), "--markdown", str(markdown)]) == 0
    text = page.read_text()
    assert "12 layouts in 1 sweep, of which 10 ran" in text
    rows = re.search(r'<table id="all-layouts">.*?</table>', text, re.S)
    assert rows is not None and rows[0].count("<tr>") == 13
    shown = [float(cell) for cell in re.findall(r"<td class=t>ok</td><td>([\d.]+)</td>", rows[0])]
    assert shown == sorted(shown, reverse=True) and len(shown) == 10  # MFU, the best first
    assert text.count("<svg") == 1  # predictions: all else is drawn by HTML alone
    assert not re.search(r'(?:src|href)="(?!#|data:)', text)
    out = capsys.readouterr().out
    assert out == markdown.read_text()
    assert "| Larger micro-batches |" in out and "## Fastest" in out


@needs_browser
def test_the_page_can_be_read_on_a_desk_and_on_a_phone(table, tmp_path, capsys):
    assert main(["report", str(table), "--page", str(tmp_path / "report.html")]) == 0
    check_readable(tmp_path / "report.html")


def test_a_program_reads_numbers_and_what_is_supported(table, capsys):
    assert main(["report", str(table), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    micro_batches = document["findings"][0]
    assert (document["rows"], micro_batches["num_pairs"]) == (12, 5)
    assert micro_batches["factor"] == pytest.approx(1.0) and micro_batches["speed_supported"] is False


def test_a_sweeps_folder_gives_the_rows_that_were_tried(sweep):
    runs = read_rows([sweep]).runs
    assert [(run.table, run.row, run.outcome, run.layout.tp) for run in runs] == [
        (str(sweep), "a", "ok", 1), (str(sweep), "b", "ok", 2), (str(sweep), "c", "hung", 4),
    ]  # fmt: skip
    assert runs[0].peak_bytes == 1000 and runs[0].scenario.cluster.gpu.name == "cpu"
    (head, best) = Report(runs).list_best()
    assert dict(zip(head, best, strict=True))["tp"] == "2"


def test_trials_are_read_without_their_folder_and_those_that_say_nothing_are_counted_by_reason(sweep, tmp_path, capsys):
    journal, first = Journal(sweep), Journal(sweep).read()["a"]
    for key, changes in (
        ("e", {"run": None, "cause": "tp=3 does not divide num_heads=4"}),
        ("f", {"run": replace(first.run, outcome="skipped"), "cause": "predicted to need 90.0 GiB of 79.2"}),
        (
            "g",
            {
                "run": replace(
                    first.run,
                    scenario=replace(
                        first.run.scenario,
                        cluster=Cluster(gpu=gpu_named("GeForce GTX 970"), num_gpus=4, gpus_per_node=4),
                    ),
                )
            },
        ),
    ):
        journal.append(replace(first, key=key, setting=key, **changes))
    whole = read_rows([sweep])
    alone = tmp_path / "kept.jsonl"
    (sweep / "trials.jsonl").rename(alone)
    rows = read_rows([alone])
    assert [replace(run, table=str(sweep)) for run in rows.runs] == whole.runs and len(rows.runs) == 3
    left_out = {
        "refused: tp=3 does not divide num_heads=4": 2, "predicted not to fit": 1,
        "on a GPU type that is not known, GeForce GTX 970: set cluster.gpu in the config": 1,
    }  # fmt: skip
    assert rows.left_out == left_out
    assert main(["report", str(alone), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == left_out
    assert main(["report", str(alone), "--page", str(tmp_path / "page.html")]) == 0
    line = "left out: 2 refused: tp=3 does not divide num_heads=4; 1 "
    assert line in capsys.readouterr().out and line in (tmp_path / "page.html").read_text()


def test_a_run_and_a_dry_run_are_reported_and_validated_as_rows(sweep, tmp_path, capsys):
    ran = replace(Journal(sweep).read()["a"].run, table="runs", row="one")
    dry = replace(ran, table="dry runs", outcome="dry", measured=Performance(peak_memory_bytes=(2_000_000,)))
    Summary(outcome="done", run=ran).write(tmp_path / "runs" / "one")
    Summary(outcome="running").write(tmp_path / "runs" / "two")
    (tmp_path / "dry.json").write_text(json.dumps({"ok": True, "run": dry.to_dict(), "ranks": []}))
    folders = [tmp_path / "runs" / name for name in ("one", "two")]
    assert read_rows([*folders, tmp_path / "dry.json"]) == ReportRows([ran, dry], Counter(running=1))
    assert read_rows([folders[0] / "summary.json"]).runs == [ran]
    paths = [str(path) for path in (*folders, tmp_path / "dry.json")]
    assert main(["report", *paths]) == 0
    assert "2 layouts in 2 sweeps, of which 1 ran\n\nleft out: 1 running\n" in capsys.readouterr().out
    assert main(["validate", *paths, "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["tables"]
    assert scores["runs"]["mape"] > 0 and scores["dry runs"]["mape"] is None and scores["dry runs"]["memory"] > 0


def test_of_the_rounds_of_successive_halving_the_longest_counts(sweep):
    first = Journal(sweep).read()["a"]
    longer, crashed = (
        replace(first.run, row="a2", measured=Performance(step_time_s=0.4)),
        replace(first.run, row="a3", outcome="crashed", measured=Performance()),
    )
    Journal(sweep).append(replace(first, key="a2", steps=20, run=longer))
    Journal(sweep).append(replace(first, key="a3", steps=30, run=crashed))
    runs = read_rows([sweep]).runs
    assert [(run.row, run.step_time_s) for run in runs] == [("b", 0.25), ("c", None), ("a2", 0.4)]


def test_a_page_of_a_sweep_without_mfu_shows_tokens(sweep, tmp_path, capsys):
    page = tmp_path / "report.html"
    assert main(["report", str(sweep), "--page", str(page)]) == 0
    assert "Best tokens/s/GPU by tp and pp" in page.read_text()


def test_beside_rows_of_a_cpu_there_is_no_mfu(table, sweep):
    assert Report(read_rows([table]).runs)._unit == "MFU, %"
    assert Report(read_rows([table, sweep]).runs)._unit == "tokens/s/GPU"


@pytest.mark.parametrize("end", ["oom,,,79", "error,,0.9,79", "oom,,,", "ok,0.1,,"])
def test_rows_that_say_little_make_a_page_too(table, sweep, tmp_path, capsys, end):
    lines = table.read_text().splitlines()
    table.write_text("\n".join([lines[0], lines[1].rpartition("oom")[0] + end]) + "\n")
    assert main(["report", str(table), "--page", str(tmp_path / "one.html")]) == 0
    assert main(["report", str(table), str(sweep), "--page", str(tmp_path / "two.html")]) == 0


def test_rows_that_our_trainer_would_refuse_are_predicted_as_validate_does(table, tmp_path):
    rows = [
        "virtual_stages,engine",
        *("2,megatron" for _ in range(12)),  # 64 sequences make no whole rounds of microbatches everywhere
    ]
    lines = [f"{line},{more}" for line, more in zip(table.read_text().splitlines(), rows, strict=True)]
    table.write_text("\n".join(lines).replace(",8,64,", ",8,24,") + "\n")
    assert main(["report", str(table), "--page", str(tmp_path / "page.html")]) == 0


def test_the_speed_of_what_did_not_end_well_is_none(table):
    runs = [replace(run, outcome="crashed") for run in read_rows([table]).runs]
    assert {Report(runs)._measure(run) for run in runs} == {0.0}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nothing", "cannot be read"),
        ("nothing.json", "cannot be read"),
        ("nothing.jsonl", "cannot be read"),
        (".", "is no folder of a sweep or a run"),
        ("list.json", "has no record of a run; give a run's summary.json"),
        ("torn.json", "has no record of a run"),
        ("old.json", "old.json: run.format=0, and this version"),
    ],
)
def test_what_is_no_table_and_no_sweep_is_refused(tmp_path, name, problem, capsys):
    for file, text in (("list", "[]"), ("torn", "{"), ("old", '{"run": {"format": 0}}')):
        (tmp_path / f"{file}.json").write_text(text)
    assert main(["report", str(tmp_path / name)]) == 2
    assert problem in capsys.readouterr().err


NAMES = (
    "a|b",
    "`x`",
    "<img src=x onerror=y>",
    "[a](http://b)",
    "*bold* _it_",
    "x\x1b[31m",
    "www.a.b",
    "$x$",
    r"$\frac$",
    "a\\|b",
)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_names_in_markdown_on_the_page_and_on_the_terminal(table, tmp_path, capsys, name):
    text = table.read_text().replace("\nsweep,", f"\n{name},").replace(",tiny,", f",{name},")
    table.write_text(text)
    report, page = tmp_path / "report.md", tmp_path / "report.html"
    assert main(["report", str(table), "--markdown", str(report), "--page", str(page)]) == 0
    written = report.read_text()
    assert escape_markdown(name) in written and "\x1b" not in written + capsys.readouterr().out
    rows = [re.sub(r"\\.", "", line) for line in written.splitlines() if line.startswith("|")]
    tables = [list(group) for _, group in groupby(rows, key=lambda row: row.count("|"))]
    assert len(tables) == 2, "a row has other cells than those above it"
    plain = re.sub(r"\\.", "", written)
    assert not re.search(r"[`<*\[\]]|://|www\.", plain.replace(" < ", ""))
    assert "<img src" not in page.read_text()


def test_what_was_left_out_is_text_in_markdown_too(sweep, tmp_path):
    Journal(sweep).append(TrialResult(key="e", setting="e", overrides=(), cause="<b>`|\n# x"))
    report = tmp_path / "report.md"
    assert main(["report", str(sweep), "--markdown", str(report)]) == 0
    assert r"\<b>\`\| # x" in report.read_text()


def test_a_report_that_cannot_be_written_is_refused(table, capsys):
    for option in ("--page", "--markdown"):
        assert main(["report", str(table), option, "/nowhere/report"]) == 2
        assert "cannot be written" in capsys.readouterr().err


def test_rows_of_which_nothing_is_known_make_no_report(tmp_path, capsys):
    Journal(tmp_path).append(TrialResult(key="a", setting="a", overrides=(), cause="tp=3"))
    assert main(["report", str(tmp_path)]) == 2
    assert "has no row that says how a layout ended; left out: 1 refused: tp=3\n" in capsys.readouterr().err
