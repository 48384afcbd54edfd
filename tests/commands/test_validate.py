"""dtlayout validate: scores for people and for programs, fits as TOML, pictures, and refusals by name."""

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from engines import forget_engines
from tiny import ROOT

from benchmarks.validate import explain_row
from dtlayout.base import toml
from dtlayout.base.formatting import GIB
from dtlayout.cli import main
from dtlayout.costmodel.engine import find_engine, register_engine
from dtlayout.costmodel.engine_constants import BOUNDS
from dtlayout.validation import fit
from dtlayout.validation.predict import predict
from dtlayout.validation.tables import read_tables

COMMON = {
    "layers": 8, "vocab": 32000, "tied": False, "seq_len": 2048, "engine": "nanotron", "gpu": "h100-80g-sxm", "gpus": 8,
    "gpus_per_node": 8, "global_batch": 64, "cp": 1, "virtual_stages": 1, "sequence_parallel": True, "zero": 1,
    "recompute": "none", "kernel": "flash2+rmsnorm", "status": "ok", "step_time_s": "", "mfu": "", "peak_memory_gb": "",
}  # fmt: skip
MODELS = {
    "narrow": {"hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 5632},
    "wide": {"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 11008},
}
DOCUMENT = {"tables", "pooled", "groups", "rows", "unpredicted", "unpredicted_rows", "changed"}
KEYS = {"fit", "mape", "median_ape", "tau", "top1", "memory", "false_oom", "rows"}


def write_rows(path: Path, rows: list[dict]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in [*rows, *make_rows()] for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    return path


def make_rows(**cells) -> list[dict]:
    """Layouts of two models on 8 GPUs, a table each."""
    degrees = [(tp, pp, mb) for tp in (1, 2, 4) for pp in (1, 2) for mb in (1, 2)]
    return [
        COMMON | sizes | {"table": f"sweep/{name}", "row": row, "model": name, "micro_batch": mb}
        | {"dp": 8 // tp // pp, "tp": tp, "pp": pp} | cells
        for name, sizes in MODELS.items() for row, (tp, pp, mb) in enumerate(degrees)
    ]  # fmt: skip


def write_measured(path: Path, rows: list[dict], factor: float = 1.0) -> Path:
    """The rows with what is predicted for them as measured, MFU times `factor`."""
    for row, found in zip(rows, predict(read_tables([write_rows(path, rows)]).runs), strict=True):
        estimate = found.estimate
        row |= {"mfu": estimate.mfu * factor, "step_time_s": estimate.step_time_s / factor}
        row |= {"peak_memory_gb": estimate.memory[0].total / GIB}
    return write_rows(path, rows)


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    return write_measured(tmp_path / "runs.csv", make_rows(), factor=0.8)


@pytest.fixture
def few_constants(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Two fitted constants instead of all, which would take longer to fit."""
    names = ("matmul_efficiency", "logit_bytes")

    def fit_few(runs, starts):
        return refit(runs, [replace(start, fitted=names) for start in starts])

    refit = fit.refit
    monkeypatch.setattr(fit, "refit", fit_few)
    return names


def run_json(capsys, *arguments) -> dict:
    assert main(["validate", *map(str, arguments), "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def refuse(capsys, *arguments) -> str:
    assert main(["validate", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_json_has_the_scores_of_each_table_and_of_all(measured, capsys):
    document = run_json(capsys, measured)
    assert document.keys() == DOCUMENT
    assert list(document["tables"]) == ["sweep/narrow", "sweep/wide"]
    for scores in (document["pooled"], *document["tables"].values()):
        assert scores.keys() == KEYS
        assert scores["mape"] == pytest.approx(0.25)
        assert scores["median_ape"] == pytest.approx(0.25)
        assert scores["tau"] == pytest.approx(1.0)
        assert (scores["fit"], scores["top1"], scores["false_oom"]) == (None, 1.0, 0.0)
        assert scores["memory"] == pytest.approx(0.0, abs=1e-10)  # a measured peak is whole bytes
    assert [scores["rows"] for scores in document["tables"].values()] == [12, 12]
    assert document["pooled"]["rows"] == 24


def test_several_tables_are_pooled_and_a_score_without_rows_is_null(measured, tmp_path, capsys):
    failed = write_rows(tmp_path / "failed.csv", make_rows(table="failed", status="oom"))
    document = run_json(capsys, measured, failed)
    assert document["pooled"]["rows"] == 48
    assert document["pooled"]["fit"] is not None
    assert document["tables"]["failed"] == dict.fromkeys(KEYS, None) | {"rows": 24}


def test_leaving_out_adds_scores_of_each_model(measured, few_constants, capsys):
    document = run_json(capsys, measured, "--leave-one-out")
    assert document.keys() == DOCUMENT | {"left_out", "left_out_groups", "left_out_kept"}
    assert document["left_out_groups"]["engine"]["nanotron"]["rows"] == 24
    assert list(document["left_out"]) == ["narrow", "wide"]
    assert all(scores.keys() == KEYS for scores in document["left_out"].values())
    assert document["pooled"]["mape"] == pytest.approx(0.25)  # the shipped constants still


def test_the_only_model_is_not_left_out_and_told(tmp_path, capsys):
    path = write_measured(tmp_path / "runs.csv", make_rows()[:12])
    document = run_json(capsys, path, "--leave-one-out")
    assert document["left_out"] == {}
    assert list(document["left_out_kept"]) == ["nanotron on h100-80g-sxm"]
    assert main(["validate", str(path), "--leave-one-out"]) == 0
    line = "not left out, by constants that saw them: 12 rows of nanotron on h100-80g-sxm, all of narrow\n"
    assert line in capsys.readouterr().out


def test_leaving_out_gpu_types_adds_scores_of_each(measured, tmp_path, capsys):
    other = write_rows(tmp_path / "other.csv", make_rows(engine="torchtitan", gpu="a100-80g-sxm", mfu=0.4))
    document = run_json(capsys, measured, other, "--leave-gpu-out")
    assert document.keys() == DOCUMENT | {"left_out_gpu", "left_out_gpu_groups", "left_out_gpu_kept"}
    assert {gpu: scores["rows"] for gpu, scores in document["left_out_gpu"].items()} == {
        "nanotron, h100-80g-sxm": 24, "torchtitan, a100-80g-sxm": 24,
    }  # fmt: skip
    assert (
        document["left_out_gpu"]["nanotron, h100-80g-sxm"]["mape"]
        > document["groups"]["gpu"]["h100-80g-sxm"]["speed"]["absolute"]
    )
    assert document["left_out_gpu_groups"]["engine"].keys() == {"nanotron", "torchtitan"}
    assert main(["validate", str(measured), "--leave-gpu-out"]) == 0
    assert "\nGPU type left out " in capsys.readouterr().out


def test_errors_of_rows_left_out_are_written_and_tell_how_many_lie_inside(measured, few_constants, tmp_path, capsys):
    path = tmp_path / "errors.toml"
    document = run_json(capsys, measured, "--errors", path)
    assert document.keys() == DOCUMENT
    written = toml.loads(path.read_text(encoding="utf-8"))
    assert written["source"] == "rows left out: 24 of nanotron"
    (known,) = (entry for entry in written["step_time"] if entry["kind"] == "known")
    assert (known["engine"], known["gpu"], known["rows"]) == ("nanotron", "h100-80g-sxm", 22)
    assert {entry["kind"] for entry in written["peak_memory"]} == {"known", "new GPU", "new site", "new engine"}
    assert written["seen"] == [
        {"engine": "nanotron", "gpu": "h100-80g-sxm", "precision": "bfloat16", "model": "dense models",
         "site": "sweep", "nodes": 1},
    ]  # fmt: skip
    left_out = run_json(capsys, measured, "--leave-one-out")["left_out_groups"]["engine"]["nanotron"]
    assert left_out["speed"]["inside"] >= 0.8 and left_out["memory"]["rows"] == 24
    assert main(["validate", str(measured), "--leave-one-out", "--worst", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("median errors, model left out ") for line in lines)
    message = refuse(capsys, measured, "--errors", tmp_path / "none" / "errors.toml")
    assert message.endswith(f"cannot be written: there is no folder {tmp_path / 'none'}\n")


def test_people_see_scores_and_the_worst_rows_in_120_columns(measured, capsys):
    assert main(["validate", str(measured), "--worst", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith("nanotron on h100-80g-sxm, 24 rows: constants from ")
    (heading,) = (line for line in lines if line.startswith("table "))
    (pooled,) = (line for line in lines if line.startswith("all "))
    assert heading.split() == ["table", "rows", "fit", "MAPE", "median", "tau", "top-1", "memory", "false", "OOM"]
    assert pooled.split() == ["all", "24", "–", "25.0", "%", "25.0", "%", "1.000", "1.000", "0.0", "%", "0.0", "%"]
    assert len(heading) == len(pooled)
    text = "\n".join(lines)
    assert "worst by speed, of " in text and "worst by peak memory, of 24" in text
    assert text.count("(+25.0%)") == 4  # two rows of either kind
    assert "worst by outcome" not in text


def test_rows_of_a_wrong_outcome_are_shown_with_components(tmp_path, capsys):
    path = write_rows(tmp_path / "runs.csv", make_rows(status="oom", dp=2, gpus=2, tp=1, pp=1)[:1])
    assert main(["validate", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "worst by outcome, of 1 misjudged\n  sweep/narrow row 0: dp2 mb1 zero1 flash2+rmsnorm, oom\n" in printed
    assert "compute" in printed and "parameters" in printed and "optimizer" in printed


def test_no_rows_of_the_worst_are_shown_if_none_are_asked_for(measured, capsys):
    assert main(["validate", str(measured), "--worst", "0"]) == 0
    assert "worst" not in capsys.readouterr().out


def test_a_gpu_without_calibration_is_marked(measured, tmp_path, capsys):
    path = write_rows(tmp_path / "other.csv", make_rows(gpu="h200-141g-sxm"))
    assert main(["validate", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("nanotron on h200-141g-sxm, 24 rows: uncalibrated; ")
    assert main(["validate", str(measured), "--engine", "torchtitan"]) == 0
    assert capsys.readouterr().out.startswith("torchtitan on h100-80g-sxm, 24 rows: uncalibrated; ")


def test_a_table_without_rows_is_refused(tmp_path, capsys):
    path = write_rows(tmp_path / "empty.csv", [])
    assert refuse(capsys, path) == f"table {path} has columns and no rows\n"


def test_rows_that_cannot_be_predicted_are_counted_by_reason_and_the_others_scored(tmp_path, capsys):
    experts = {"experts": 8, "experts_per_token": 2, "expert_ffn": 256, "ep": 1}
    rows = make_rows(**dict.fromkeys(experts, ""), note="", source="a page")
    rows[0] |= {**experts, "gpu": "abacus"}
    rows[1] |= {**experts, "global_batch": 60}
    rows[5] |= {"global_batch": 60, "note": "a fan was slow", "mfu": 0.3}
    rows[3] |= {"table": "again", "note": "same layout as in sweep/narrow"}
    path = write_rows(tmp_path / "runs.csv", rows)
    document = run_json(capsys, path)
    assert document["rows"] == {"read": 24, "predicted": 21, "unpredicted": 2, "repeats": 1, "left_out": 0}
    assert document["unpredicted"] == {
        "engine nanotron has no experts or latent attention": 2,
        "GPU type abacus is not known": 1,
    }
    assert [row["row"] for row in document["unpredicted_rows"]] == ["0", "1"]
    assert document["unpredicted_rows"][1] == {
        "table": "sweep/narrow", "row": "1", "reasons": ["engine nanotron has no experts or latent attention"],
    }  # fmt: skip
    assert list(document["changed"].values()) == [1]
    assert document["groups"]["source"]["a page"]["rows"] == document["pooled"]["rows"] == 21
    assert main(["validate", str(path), "--worst", "30"]) == 0
    text = capsys.readouterr().out
    lacking = "     2 engine nanotron has no experts or latent attention\n"
    assert f"not predicted: 2 of 24 rows, each under all of its reasons\n{lacking}" in text
    assert "     1 GPU type abacus is not known\n       in sweep/narrow row 0\n" in text
    assert "not scored: 1 row measured again: by the note the same layout as in another of these tables\n" in text
    assert "\n    note: a fan was slow\n" in text
    changed = "predicted with a change: 1 row; global_batch is no multiple of dp * micro_batch: "
    assert f"{changed}the last microbatch counts as whole\n       in sweep/narrow row 5\n" in text


def test_rows_none_of_which_can_be_predicted_are_still_told(tmp_path, capsys):
    path = write_rows(tmp_path / "runs.csv", make_rows(engine=""))
    for arguments in ([], ["--leave-one-out"], ["--fit"], ["--plots", tmp_path / "plots"]):
        document = run_json(capsys, path, *arguments)
        assert document["unpredicted"] == {"engine is not stated, --engine names one": 24}
        assert (document["tables"], document["pooled"]["rows"]) == ({}, 0)
    assert main(["validate", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("no row can be scored\n\nnot predicted: 24 of 24 rows")
    assert text.endswith("\n       in sweep/narrow (12), sweep/wide (12)\n")
    assert main(["report", str(path)]) == 2
    assert capsys.readouterr().err.startswith("no row is left to report on; left out: 24 engine is not stated")


def test_people_see_which_way_each_engine_is_off(measured, capsys):
    assert main(["validate", str(measured)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line for line in lines if line.startswith("engine nanotron "))
    assert row.split()[2:] == ["24", "22", "+25.0", "%", "25.0", "%", "100", "24", "+0.0", "%", "0.0", "%", "100"]
    assert not [line for line in lines if line.startswith(("not predicted", "not scored", "predicted with"))]


def test_on_a_cpu_nothing_is_said_of_mfu_and_small_peaks_are_mebibytes(tmp_path, capsys):
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 256, "seq_len": 64}
    rows = make_rows(engine="dtlayout", gpu="cpu", step_time_s=1, peak_memory_gb=0.2, **sizes)
    assert main(["validate", str(write_rows(tmp_path / "runs.csv", rows)), "--worst", "1"]) == 0
    out = capsys.readouterr().out
    assert "MFU" not in out and "MAPE and median over steps a second of rows that ran" in out
    assert re.search(r"peak of pipeline rank 0 [\d.]+ MiB, measured 204\.8 MiB", out)


# Fits.


def test_a_fit_is_a_piece_of_an_engines_file(measured, few_constants, capsys):
    assert main(["validate", str(measured), "--fit", "--worst", "0"]) == 0
    printed = capsys.readouterr().out
    fragment = printed[printed.index("# nanotron: scores") :]
    (values,) = toml.loads(fragment)["fitted"].values()
    assert values.pop("source") == "24 runs of narrow, wide"
    assert (*values, "logit_bytes") == few_constants and "# left as they were by these runs: logit_bytes" in fragment
    assert all(type(value) is float and BOUNDS[name][0] <= value <= BOUNDS[name][1] for name, value in values.items())
    shipped = find_engine("nanotron", "h100-80g-sxm").constants.matmul_efficiency
    assert values["matmul_efficiency"] < shipped  # the runs were made slower
    assert "# mape              25.0 %" in fragment and "# error of speed after: p10 " in fragment


def test_a_fit_can_be_written_to_a_file(measured, few_constants, tmp_path, capsys):
    out = tmp_path / "fitted.toml"
    document = run_json(capsys, measured, "--fit", "--out", out)
    fitted = document["fitted"]["h100-80g-sxm"]
    assert fitted.keys() == {"engine", "constants", "at_bounds", "scores"}
    written = toml.loads(out.read_text(encoding="utf-8"))["fitted"]["h100-80g-sxm"]
    assert fitted["constants"] == {name: written[name] for name in few_constants if name != "logit_bytes"}
    assert fitted["scores"]["mape"] < document["pooled"]["mape"]
    assert main(["validate", str(measured), "--fit", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"written: {out}" in printed and "[fitted" not in printed


@pytest.fixture
def sharing_engine(tmp_path: Path):
    """An engine from outside with a constant of all GPU types and one of a single type; nobody has it afterwards."""
    file = tmp_path / "sharing.toml"
    file.write_text(
        'engine = "sharing"\n[fitted.any]\ngpus = ["h100-80g-sxm"]\nlink_efficiency = 0.5\n'
        "[fitted.h100-80g-sxm]\nmatmul_efficiency = 0.6\n",
        encoding="utf-8",
    )
    register_engine(file)
    yield "sharing"
    forget_engines()


def test_constants_of_all_gpu_types_and_of_one_are_printed_apart(sharing_engine, tmp_path, capsys):
    rows = make_rows(engine=sharing_engine)[:12] + make_rows(engine=sharing_engine, gpu="a100-80g-sxm")[:12]
    path = write_measured(tmp_path / "runs.csv", rows, factor=0.9)
    assert main(["validate", str(path), "--fit", "--ablate", "--leave-gpu-out", "--worst", "0"]) == 0
    printed = capsys.readouterr().out
    fitted = toml.loads(printed[printed.index("# sharing: scores") : printed.index("\nsharing on h100")])["fitted"]
    assert list(fitted) == ["any", "h100-80g-sxm"]
    assert fitted["any"].keys() == {"source", "gpus", "link_efficiency"}
    assert fitted["any"]["gpus"] == ["a100-80g-sxm", "h100-80g-sxm"] and fitted["any"]["source"].startswith("24 runs")
    assert fitted["h100-80g-sxm"].keys() == {"source", "matmul_efficiency"}
    assert fitted["h100-80g-sxm"]["source"] == "12 runs of narrow"
    assert "sharing on a100-80g-sxm, 12 rows: uncalibrated; " in printed
    assert "\nlink_efficiency any " in printed and "\nmatmul_efficiency h100-80g-sxm " in printed
    document = run_json(capsys, path, "--fit")["fitted"]
    assert {gpu: (*each["constants"],) for gpu, each in document.items()} == {
        "any": ("link_efficiency",), "h100-80g-sxm": ("matmul_efficiency",),
    }  # fmt: skip
    assert (document["any"]["scores"]["rows"], document["h100-80g-sxm"]["scores"]["rows"]) == (24, 12)


def test_ablation_shows_what_each_constant_is_worth(measured, few_constants, capsys):
    document = run_json(capsys, measured, "--ablate")
    names = [row["constant"] for row in document["ablations"]]
    assert names[: len(few_constants)] == list(few_constants) and "network_sharing" in names  # which the file sets
    assert all(row.keys() == KEYS | {"engine", "gpu", "constant", "neutral"} for row in document["ablations"])
    assert main(["validate", str(measured), "--ablate", "--worst", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if "without one constant" in line)
    assert [line.split()[0] for line in lines[start + 1 :]] == ["constant", "(all", *names]
    assert len({len(line) for line in lines[start + 1 :]}) == 1


def test_constants_of_two_engines_cannot_be_fitted_at_once(measured, tmp_path, capsys):
    other = write_rows(tmp_path / "other.csv", make_rows(engine="aa-scaling", gpu="a100-80g-sxm"))
    message = refuse(capsys, measured, other, "--fit")
    assert (
        message == "--fit takes runs of one engine, these are of aa-scaling, nanotron; pass fewer tables or --engine\n"
    )


def test_an_engine_without_constants_to_fit_is_refused(measured, capsys):
    assert "dtlayout has no constants to fit on h100-80g-sxm" in refuse(
        capsys, measured, "--engine", "dtlayout", "--fit"
    )


# Pictures.


def test_pictures_are_written_of_what_was_measured(measured, tmp_path, capsys):
    folder = tmp_path / "plots" / "here"
    run_json(capsys, measured, "--plots", folder)
    assert sorted(path.name for path in folder.iterdir()) == ["memory.png", "mfu.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())
    assert main(["validate", str(measured), "--plots", str(folder)]) == 0
    assert f"written: {folder / 'mfu.png'}" in capsys.readouterr().out


def test_there_is_no_picture_of_nothing(tmp_path, capsys):
    path = write_rows(tmp_path / "runs.csv", make_rows(status="oom"))
    assert main(["validate", str(path), "--plots", str(tmp_path / "plots")]) == 0
    assert "no picture: no row has a measured number" in capsys.readouterr().out
    assert list((tmp_path / "plots").iterdir()) == []


# Refusals.


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--worst", "-1"], "--worst=-1 must not be negative"),
        (["--out", "fitted.toml"], "--out names the file that --fit writes; add --fit"),
        (["--engine", "steam"], "--engine=steam is unknown; use one of aa-scaling, accelerate, automodel"),
        (["--plots", "{file}"], "--plots={file} cannot be made a folder: "),
    ],
)
def test_wrong_arguments_are_refused_by_name(measured, capsys, arguments, problem):
    arguments = [argument.format(file=measured) for argument in arguments]
    assert refuse(capsys, measured, *arguments).startswith(problem.format(file=measured))


def test_a_file_that_cannot_be_written_is_refused(measured, tmp_path, capsys):
    out = tmp_path / "none" / "fitted.toml"
    for command in (["validate", "--fit", "--out"], ["refit", "--into"]):
        assert main([*command, str(out), str(measured)]) == 2
        assert capsys.readouterr().err == f"{out} cannot be written: there is no folder {out.parent}\n"


def test_wrong_cells_are_refused_with_file_line_and_column(tmp_path, capsys):
    rows = make_rows()
    rows[1] |= {"tp": "two", "status": "fine"}
    path = write_rows(tmp_path / "runs.csv", rows)
    lines = refuse(capsys, path).splitlines()
    assert lines[0] == f"table {path}, line 3, column tp: 'two' must be a whole number of at least 1"
    assert lines[1].startswith(f"table {path}, line 3, column status: 'fine' is unknown; use ok, oom, ")
    assert len(lines) == 2
    assert main(["validate", str(path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"ok": False, "problems": lines}


def test_scoring_starts_without_torch_scipy_and_matplotlib(measured):
    code = (
        "import sys; from dtlayout.cli import main; code = main(sys.argv[1:]);"
        "print(sorted({'torch', 'scipy', 'numpy', 'matplotlib'} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "validate", str(measured), "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "[]\n")
    json.loads(done.stdout)


# The benchmark.


def run_benchmark(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.validate", "--out", str(tmp_path / "report.md"), *arguments], cwd=ROOT,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_the_benchmark_skips_without_tables(tmp_path):
    for arguments in ([], [str(tmp_path)]):
        done = run_benchmark(tmp_path, *arguments)
        assert done.returncode == 0
        assert done.stdout.startswith("skipped: no folder with tables")
    assert not (tmp_path / "report.md").exists()


def test_the_benchmark_writes_a_report_without_paths(tmp_path):
    folder = tmp_path / "tables"
    folder.mkdir()
    write_measured(folder / "small.csv", make_rows(engine="dtlayout"), factor=0.8)
    rows = make_rows(table="one")[:12]
    write_measured(folder / "one.csv", rows)
    write_rows(folder / "one.csv", [*rows, rows[0] | {"gpu": "abacus"}])
    (folder / "other.csv").write_text("name,value\na,1\n")
    done = run_benchmark(tmp_path, str(folder), "--errors", str(tmp_path / "errors.toml"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"left out: table {folder / 'other.csv'} has no column table, row, model")
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    off = r"\+25\.0 % \| 25\.0 % \|"
    assert re.search(rf"\| dtlayout \| h100-80g-sxm \| bfloat16 \| dense models \| \d+ \| {off} {off} ", report)
    assert "## small.csv" in report and "| left out: wide | 12 |" in report and "| shipped | 24 |" in report
    assert "12 rows of nanotron on h100-80g-sxm are all of one model, which cannot be left out." in report
    assert "| one.csv | GPU type abacus is not known | 1 |" in report
    assert re.search(r"## Worst 20 rows of \d+: speed", report) and "| not explained | +25.0 % |" in report
    assert "CPU cores" in report and "| nanotron | h100-80g-sxm | matmul_efficiency |" in report
    assert str(tmp_path) not in report and str(ROOT) not in report
    assert toml.loads((tmp_path / "errors.toml").read_text(encoding="utf-8"))["source"].startswith(
        "rows left out: 24 of dtlayout"
    )


def test_a_worst_rows_reason_is_its_own_or_that_of_its_table():
    reasons = {"bridge/25.09": "a release", "bridge/25.09 row 3": "dropped tokens"}
    assert explain_row("bridge/25.09 row 3", reasons) == "dropped tokens"
    assert explain_row("bridge/25.09 row 31", reasons) == "a release"
    assert explain_row("bridge/25 row 3", reasons) == "not explained"
