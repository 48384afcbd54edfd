"""A finished sweep refits the constants of its machine, and what was predicted of it stays on record."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from machine import MACHINE, TRUTH, measure_machine, step_s

from dtlayout.base import toml
from dtlayout.calibrate.file import to_toml, update
from dtlayout.cli import main
from dtlayout.commands.refit import make_record
from dtlayout.config.loading import load_config
from dtlayout.costmodel.engine import OWN_ENGINE, find_engine_on
from dtlayout.planner.prediction import predict
from dtlayout.records.run import Performance
from dtlayout.spec.cluster import load_cluster
from dtlayout.sweep.results import Journal, TrialResult
from dtlayout.sweep.spec import make_trials, read_sweep

SWEEP = """
config = "config.toml"
world = 4
[axes.layout]
tp = [1, 2]
pp = [1, 2, 4]
micro_batch = [1, 2]
recompute = ["none", "full"]
"""
CONFIG = """
[model]
name = "unseen"
hidden_size = 192
num_layers = 6
num_heads = 6
num_kv_heads = 6
ffn_size = 512
vocab_size = 1024
[batch]
global_batch = 8
seq_len = 192
[precision]
compute = "float32"
[train]
device = "cpu"
steps = 12
[cluster]
file = "{file}"
"""


@pytest.fixture
def swept(tmp_path):
    """A cluster file whose constants are wrong, and a sweep that ran with it on the machine as it is."""
    lab, folder = tmp_path / "lab.toml", tmp_path / "out"
    wrong = {**TRUTH, "layer_host_s": 9e-3, "layer_host_tp_s": 20e-3, "matmul_efficiency": 0.9}
    cluster = replace(MACHINE, gpu=replace(MACHINE.gpu, achieved=tuple(wrong.items())))
    lab.write_text(to_toml(measure_machine(), cluster))
    (tmp_path / "config.toml").write_text(CONFIG.format(file=lab))
    (tmp_path / "sweep.toml").write_text(SWEEP)
    folder.mkdir()
    for trial in make_trials(read_sweep(tmp_path / "sweep.toml"), folder):
        if trial.config is None or trial.run is None:
            continue
        measured = Performance(step_time_s=step_s(trial.config.model, trial.config.batch, trial.run.layout))
        run = replace(trial.run, outcome="ok", measured=measured)
        Journal(folder).append(TrialResult(key=trial.key, setting=trial.setting, overrides=trial.overrides, run=run))
    return lab, folder


def errors_of(lab: Path, folder: Path) -> list[float]:
    """Of what is predicted now."""
    config, found = load_config(folder.parent / "config.toml"), []
    for result in Journal(folder).read().values():
        estimate = predict(config, result.run.layout, config.cluster.known_gpu)
        assert estimate is not None and result.run.step_time_s
        found.append(estimate.step_time_s / result.run.step_time_s - 1)
    return found


def test_a_sweep_puts_the_constants_right_and_itself_on_record(swept, capsys):
    lab, folder = swept
    before = max(map(abs, errors_of(lab, folder)))
    assert before > 0.2
    assert main(["refit", str(folder), "--into", str(lab), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["median_error_after"] < 0.02 < told["median_error_before"]
    assert max(map(abs, errors_of(lab, folder))) < 0.06
    for arguments, is_right in (([], False), (["--cluster", str(lab)], True)):
        assert main(["validate", str(folder), *arguments, "--json"]) == 0
        assert (json.loads(capsys.readouterr().out)["pooled"]["median_ape"] < 0.02) == is_right
    [record] = load_cluster(lab).records
    assert (record.sweep, record.hardware, record.runs) == ("out", "cpu", len(Journal(folder).read()))
    assert record.error > 0.05, "it says what was predicted before the sweep"
    assert load_cluster(lab).gpu.prediction_error == record.error
    update(lab, find_engine_on(OWN_ENGINE, load_cluster(lab).gpu), [record], "again")
    assert load_cluster(lab).records == (record,), "a sweep is on record once"
    capsys.readouterr()

    model = ["--model", str(folder.parent / "config.toml"), "--seq-len", "192", "--global-batch", "8"]
    assert main(["recommend", *model, "--cluster", str(lab), "--precision", "compute=float32"]) == 0
    assert f"track record: out, {record.date}" in capsys.readouterr().out


def test_a_cluster_file_keeps_what_people_wrote_into_it(swept):
    lab, _ = swept
    number = '[memory]\nvalue = 1e9\nunit = "byte"\nsource = "the label says 1 GB 😀"\n'
    lab.write_text('gpu = "cpu"\ngpus = 4\n' + number)
    update(lab, find_engine_on(OWN_ENGINE, load_cluster(lab).gpu), [], "a fit")
    assert toml.read(lab, "cluster")["memory"]["source"] == "the label says 1 GB 😀"
    assert load_cluster(lab).gpu.memory_bytes == 10**9


def test_a_sweep_that_was_not_predicted_by_a_calibrated_file_is_no_record(swept):
    _, folder = swept
    record, result = make_record(folder), next(iter(Journal(folder).read().values()))
    earlier = replace(result.run, measured=Performance(step_time_s=1e-3))
    Journal(folder).append(replace(result, key="shorter", steps=-1, run=earlier))  # an earlier round of the same
    assert record is not None and make_record(folder) == record
    journal = folder / "trials.jsonl"
    journal.write_text(journal.read_text().replace('"calibrated": true', '"calibrated": false'))
    assert make_record(folder) is None


def test_a_sweep_is_validated_alike_when_its_folder_and_its_cluster_file_are_gone(swept, capsys):
    lab, folder = swept
    journal = folder.parent / "kept.jsonl"
    assert main(["validate", str(folder), "--json"]) == 0
    before = json.loads(capsys.readouterr().out)["pooled"]
    lab.unlink()
    (folder / "trials.jsonl").rename(journal)
    folder.rmdir()
    assert main(["validate", str(journal), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pooled"] == before, "by the constants that it ran with"


def test_scores_of_a_sweep_on_cpus_are_those_of_its_steps(swept, capsys):
    _, folder = swept
    assert main(["validate", str(folder), "--json"]) == 0
    pooled = json.loads(capsys.readouterr().out)["pooled"]
    assert pooled["median_ape"] > 0.02 and 0.3 < pooled["tau"] < 1 and pooled["rows"] == len(Journal(folder).read())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["{lab}", "--into", "{lab}"], "refit takes folders of sweeps"),
        (["{folder}", "--into", "{plain}"], "has no measured constants to fit; dtlayout calibrate writes such a file"),
        (["{empty}", "--into", "{lab}"], "is no folder of a sweep"),
        (["{refused}", "--into", "{lab}"], "has no row that says how a layout ended"),
        (["{folder}", "--into", "{torn}"], "record[0].sweep is missing"),
    ],
)
def test_what_cannot_be_refitted_is_refused(swept, tmp_path, capsys, arguments, problem):
    lab, folder = swept
    (tmp_path / "plain.toml").write_text('gpu = "cpu"\ngpus = 4\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "refused").mkdir()
    Journal(tmp_path / "refused").append(TrialResult(key="a", setting="a", overrides=()))
    (tmp_path / "torn.toml").write_text('gpu = "cpu"\ngpus = 4\n[[record]]\nerror = "x"\n')
    names = {
        "torn": tmp_path / "torn.toml",
        "lab": lab,
        "folder": folder,
        "plain": tmp_path / "plain.toml",
        "empty": tmp_path / "empty",
        "refused": tmp_path / "refused",
    }
    before = lab.read_text()
    assert main(["refit", *(text.format(**names) for text in arguments)]) == 2
    assert problem in capsys.readouterr().err and lab.read_text() == before
