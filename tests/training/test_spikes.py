"""Spikes: which numbers are one, and what comes of a batch of noise in a whole run of one rank."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from launching import read_lines, read_summary
from planted import plant_noise
from tiny import TinyFiles, write_tiny

from dtlayout import cli, launch
from dtlayout.base.errors import InvalidConfig
from dtlayout.checkpoint.manifest import read_manifest
from dtlayout.config.loading import load_config
from dtlayout.config.sections import SpikesConfig
from dtlayout.training.result import NO_LIMITS, StepResult
from dtlayout.training.spikes import SpikeDetector

FINE = StepResult(loss=2.0, grad_norm=0.5, stop_requested=False)
SMALL = SpikesConfig(action="skip", window=20, min_steps=10)


def filled(settings: SpikesConfig, losses: list[float]) -> SpikeDetector:
    detector = SpikeDetector(settings)
    for step, loss in enumerate(losses, start=1):
        detector.add(step, replace(FINE, loss=loss))
    return detector


def test_a_limit_is_as_many_times_as_far_above_the_median_as_nine_tenths_of_recent_steps():
    losses = [2.0 + 0.1 * (step % 10) for step in range(40)]
    assert filled(SMALL, losses[:9]).limits == NO_LIMITS
    detector = filled(SMALL, losses)
    recent = sorted(losses[-20:])
    assert detector.limits.loss == pytest.approx(recent[9] + 10 * (recent[17] - recent[9]))
    assert detector.limits.grad_norm == pytest.approx(0.5 * 1.1)  # they are all alike: a hundredth counts
    twice = filled(replace(SMALL, factor=20.0), losses)
    assert twice.limits.loss - statistics.median_low(recent) == pytest.approx(
        2 * (detector.limits.loss - statistics.median_low(recent))
    )
    for number in ("loss", "grad_norm"):
        limit = getattr(detector.limits, number)
        assert not detector.is_spike(replace(FINE, **{number: limit}))
        assert detector.is_spike(replace(FINE, **{number: math.nextafter(limit, math.inf)}))
    assert not detector.is_spike(replace(FINE, loss=math.nan)) and not detector.is_spike(replace(FINE, loss=math.inf))


def test_a_level_that_stays_is_no_spike_for_longer_than_a_tenth_of_the_window():
    detector = filled(SMALL, [2.0] * 20)
    for step in range(21, 60):
        detector.add(step, replace(FINE, loss=9.0))
    assert detector.found == [21, 22, 23] and detector.num_left_out == 3


def test_one_that_is_off_or_only_warns_gives_the_step_no_limits():
    assert filled(replace(SMALL, action="off"), [2.0] * 20).limits == NO_LIMITS
    warns = filled(replace(SMALL, action="warn"), [2.0] * 20)
    assert warns.limits.loss == pytest.approx(2.2) and warns.step_limits == NO_LIMITS
    assert warns.is_spike(replace(FINE, loss=3.0))
    warns.add(21, replace(FINE, loss=3.0))
    assert (warns.found, warns.num_left_out) == ([21], 0)
    warns.add(22, replace(FINE, loss=math.nan))
    assert (warns.found, warns.num_left_out) == ([21], 1)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"min_steps": 200}, "spikes.min_steps=200 is more than spikes.window=128"),
        ({"quantile": 0.4}, "spikes.quantile=0.4 must lie between 0.5 and 1"),
        ({"factor": 0.0}, "spikes.factor=0.0 must be above 0 and finite"),
    ],
)
def test_settings_by_which_nothing_or_everything_would_be_a_spike_are_refused(table, problem):
    with pytest.raises(InvalidConfig, match=problem):
        SpikesConfig(**table)


@pytest.fixture
def files(tmp_path: Path, no_torchrun: None) -> TinyFiles:
    return write_tiny(tmp_path, steps=44, num_layers=1)


NOISY = 40
OPTIONS = ("--spikes.window=24", "--spikes.min_steps=24", "--checkpoint.keep=99")


def numbers(run: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_lines(run)]


@pytest.mark.parametrize("optimizer", ["--optimizer.name=adamw", "--optimizer.name=sgd --optimizer.lr=0.5"])
def test_a_batch_of_noise_is_left_out_shown_as_text_and_a_resume_is_the_same_to_the_bit(
    files, capsys, tmp_path, optimizer
):
    plant_noise(files, NOISY, tmp_path / "before")
    options = (*OPTIONS, "--checkpoint.every=13", *optimizer.split())  # after 39 steps, the last fine one
    assert launch.main([str(files.config), *options, "--spikes.action=save"]) == 0
    said = capsys.readouterr().out
    assert said.count("a spike: loss ") == said.count("; nothing is updated") == 1
    summary, whole = read_summary(files.run), numbers(files.run)
    assert (summary["spikes"], summary["skipped"], summary["steps"]) == ([NOISY], [], 44)
    assert [line["step"] for line in read_lines(files.run) if line["spike"]] == [NOISY]
    assert len(whole) == 44

    (noted,) = files.run.glob("spike-step-*")
    assert noted.name == f"spike-step-000000{NOISY}.json"
    assert cli.main(["data", "show", str(noted), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["samples"]) == 8 and all(each["text"][:16].isupper() for each in shown["samples"])

    # What is kept is the state that met the spike: as saved after 39 steps, and a run from there meets it at once.
    (kept,) = files.run.glob("spikes/step-*")
    saved = files.run / "checkpoints" / kept.name
    tensors = [read_manifest(path)["files"]["tensors/__0_0.distcp"]["sha256"] for path in (kept, saved)]
    assert tensors[0] == tensors[1]
    other = tmp_path / "other"
    (other / "checkpoints").mkdir(parents=True)
    kept.rename(other / "checkpoints" / kept.name)
    resumed = (*options, f"--train.run_folder={other}", "--spikes.action=skip")
    assert launch.main([str(files.config), *resumed, "--train.steps=42", "--optimizer.decay_steps=44"]) == 0
    assert read_summary(other)["spikes"] == [NOISY]
    assert launch.main([str(files.config), *resumed]) == 0  # and one that has left out a step before it was saved
    assert numbers(other) == whole[NOISY - 1 :]


def test_a_quiet_run_has_no_spike_and_one_that_only_warns_goes_on_as_if_nobody_looked(files, capsys, tmp_path):
    assert launch.main([str(files.config), *OPTIONS, "--spikes.action=skip"]) == 0
    assert read_summary(files.run)["spikes"] == [] and "a spike" not in capsys.readouterr().out
    plant_noise(files, NOISY, tmp_path / "before")
    runs = {}
    for action in ("warn", "off"):
        folder = tmp_path / action
        options = (*OPTIONS, f"--spikes.action={action}", f"--train.run_folder={folder}")
        assert launch.main([str(files.config), *options]) == 0
        runs[action] = numbers(folder), read_summary(folder)["spikes"], len(list(folder.glob("spike-*")))
    said = capsys.readouterr().out
    assert said.count("a spike: ") == said.count("; updated all the same") == 1
    assert runs["warn"][0] == runs["off"][0] and NOISY in runs["warn"][1]
    assert runs["off"][1:] == ([], 0)


def test_keeping_a_state_where_nothing_is_saved_is_refused(files, capsys):
    assert launch.main([str(files.config), "--spikes.action=save", "--checkpoint.save=false"]) == 2
    assert 'spikes.action="save" saves a state, but checkpoint.save=false' in capsys.readouterr().err
    assert load_config(files.config).spikes == SpikesConfig()
