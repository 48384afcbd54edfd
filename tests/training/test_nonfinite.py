"""Steps whose loss is not finite in whole runs of one rank: skipped or the end, with their samples as text."""

import errno
import json
import math
from pathlib import Path

import pytest
from launching import read_lines, read_summary
from thorough import thorough
from tiny import TinyFiles, write_tiny

from dtlayout import cli, launch
from dtlayout.training import checkpoints
from dtlayout.training.observers.nonfinite import MAX_SKIPPED
from dtlayout.training.optimizer import LearningRate
from dtlayout.training.step import TrainStep


@pytest.fixture
def files(tmp_path: Path, no_torchrun: None) -> TinyFiles:
    return write_tiny(tmp_path, steps=5, num_layers=1)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch):
    """Makes a parameter NaN during these steps, which count from 1 on."""

    def poison_steps(*steps: int) -> None:
        launch_step, calls = TrainStep.launch, []

        def launch_poisoned(step, *rows, **options):
            calls.append(step)
            place = list(step.modules[-1].parameters())[-1].detach().view(-1)[:1]
            value = place.clone()
            if len(calls) in steps:
                place.fill_(math.nan)
            launched = launch_step(step, *rows, **options)
            if len(calls) in steps:
                assert place.isnan().all(), "an update"
                place.copy_(value)
            return launched

        monkeypatch.setattr(TrainStep, "launch", launch_poisoned)

    return poison_steps


@pytest.mark.parametrize(("optimizer", "bad"), [("adamw", 1), ("sgd", 3), *map(thorough, [("adamw", 3), ("sgd", 1)])])
def test_a_step_is_skipped_counted_and_shown_as_text(files, poison, capsys, optimizer, bad):
    poison(bad)
    overrides = ("--train.on_nonfinite=skip", "--checkpoint.every=1", f"--optimizer.name={optimizer}")
    assert launch.main([str(files.config), *overrides]) == 0
    assert f"step {bad}: loss nan, grad_norm nan: nothing is updated; dtlayout data show " in capsys.readouterr().out
    assert [line["step"] for line in read_lines(files.run)] == [step for step in range(1, 6) if step != bad]
    summary = read_summary(files.run)
    assert (summary["outcome"], summary["steps"], summary["skipped"]) == ("done", 5, [bad])
    (noted,) = files.run.glob("nonfinite-*")
    assert noted.name == f"nonfinite-step-0000000{bad}.json"

    assert cli.main(["data", "show", str(noted), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["loss"], len(shown["samples"])) == (bad, "nan", 8)
    text = files.corpus.read_text()
    assert all(len(each["text"]) == 17 and each["text"] in text for each in shown["samples"])
    assert len({each["sample"] for each in shown["samples"]}) == 8
    assert cli.main(["data", "show", str(noted), "--first", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"step {bad}: loss nan, grad_norm nan, 8 samples"
    first = shown["samples"][0]
    assert lines[1:3] == [f"--- 0: sample {first['sample']} of {files.corpus}", first["text"]] and len(lines) == 5


def test_by_default_the_first_one_is_the_end_and_a_resume_begins_where_it_was(files, poison, capsys):
    poison(4)
    assert launch.main([str(files.config), "--checkpoint.every=3"]) == 4
    assert "stopped" in capsys.readouterr().out
    summary = read_summary(files.run)
    assert (summary["outcome"], summary["steps"], summary["skipped"]) == ("non_finite", 3, [4])
    assert launch.main([str(files.config)]) == 0
    assert "resumed from" in capsys.readouterr().out
    assert [line["step"] for line in read_lines(files.run)] == [1, 2, 3, 4, 5]


def test_skipping_ends_where_no_step_is_finite_any_more(files, poison, capsys):
    poison(*range(2, 40))
    assert launch.main([str(files.config), "--train.on_nonfinite=skip", "--train.steps=30"]) == 4
    summary = read_summary(files.run)
    assert summary["skipped"] == list(range(2, 2 + MAX_SKIPPED))
    assert "10 steps in a row were not finite: resume from an older checkpoint" in capsys.readouterr().out


@pytest.fixture
def leap(monkeypatch: pytest.MonkeyPatch):
    """Has steps learn at a rate of their own until it is undone; after 1e30 the next one's loss is not finite."""

    def leap_at(rates: dict[int, float]) -> pytest.MonkeyPatch:
        at = LearningRate.at
        monkeypatch.setattr(LearningRate, "at", lambda rate, index: rates.get(index + 1) or at(rate, index))
        return monkeypatch

    return leap_at


@pytest.mark.parametrize("skips", [False, True])
def test_a_checkpoint_that_holds_the_update_which_led_to_it_is_set_aside_and_the_one_before_resumes(
    files, leap, capsys, skips
):
    """A step from the third one was fine, and none from the fourth; skipped steps push out nothing."""
    options = [str(files.config), "--checkpoint.every=1", "--train.steps=16"]
    undone = leap({4: 1e30})
    assert launch.main([*options, f"--train.on_nonfinite={'skip' if skips else 'stop'}"]) == 4
    checkpoints = files.run / "checkpoints"
    assert read_summary(files.run)["skipped"] == (list(range(5, 15)) if skips else [5])
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "nonfinite-step-00000004", "step-00000003"]
    assert (checkpoints / "latest").resolve().name == "step-00000003"
    said = capsys.readouterr().out
    assert f"no step after {checkpoints / 'step-00000004'} was fine: it is set aside as nonfinite-step-00000004" in said
    undone.undo()  # as a smaller learning rate would
    assert launch.main(options) == 0
    assert [line["step"] for line in read_lines(files.run)] == list(range(1, 17))
    assert f"resumed from {checkpoints / 'step-00000003'} after 3 steps" in capsys.readouterr().out


def test_a_run_that_resumes_into_it_sets_that_checkpoint_aside_unless_it_is_the_only_one(files, leap, capsys):
    options = [str(files.config), "--optimizer.decay_steps=5", "--checkpoint.every=1"]
    checkpoints = files.run / "checkpoints"
    leap({4: 1e30})
    assert launch.main([*options, "--train.steps=4"]) == 0
    assert launch.main(options) == 4  # in its first step
    assert sorted(path.name for path in checkpoints.glob("*step-*")) == ["nonfinite-step-00000004", "step-00000003"]
    for _ in range(2):
        assert launch.main([*options, "--checkpoint.keep=1"]) == 4
        assert [path.name for path in checkpoints.glob("step-*")] == ["step-00000004"]
    assert capsys.readouterr().out.count("there is no older checkpoint to go back to: move it away to begin anew") == 2


def test_a_disk_on_which_nothing_can_be_noted_or_renamed_is_said(files, leap, capsys, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(checkpoints, "set_aside", refuse)
    leap({4: 1e30})
    (files.run / "nonfinite-step-00000005.json").mkdir(parents=True)
    assert launch.main([str(files.config), "--checkpoint.every=2", "--checkpoint.keep=9"]) == 4
    said = capsys.readouterr().out
    assert "nothing is updated; its samples were not noted: Is a directory; stopped" in said
    problem = (
        f"note: no step after {files.run / 'checkpoints' / 'step-00000004'} was fine, and it cannot be set aside: "
    )
    assert f"{problem}Read-only file system" in said


def test_a_step_that_is_a_spike_says_nothing_for_the_checkpoint_before_it(files, leap, capsys):
    leap({21: 0.5, 22: 1e30})  # so the loss of step 22 is finite, but far too large
    options = ("--checkpoint.every=1", "--checkpoint.keep=3", "--spikes.window=16", "--spikes.min_steps=16")
    assert launch.main([str(files.config), "--train.steps=30", *options]) == 4
    summary = read_summary(files.run)
    assert (summary["spikes"], summary["skipped"]) == ([22], [23]), capsys.readouterr().out
    names = ["nonfinite-step-00000021", "nonfinite-step-00000022", "step-00000020"]
    assert sorted(path.name for path in files.run.glob("checkpoints/*step-*")) == names


def test_what_is_no_list_of_samples_or_of_other_tokens_is_refused(files, poison, capsys, tmp_path):
    poison(1)
    assert launch.main([str(files.config), "--train.on_nonfinite=skip", "--train.steps=2"]) == 0
    (noted,) = files.run.glob("nonfinite-*")
    for wrong in ("{", '{"step": 1}'):
        (files.run / "other.json").write_text(wrong)
        assert cli.main(["data", "show", str(files.run / "other.json")]) == 2
    assert cli.main(["data", "show", str(files.run / "none.json")]) == 2
    assert cli.main(["data", "show", str(noted), "--first", "-1"]) == 2
    noted.write_text(noted.read_text().replace('"tokens": "', '"tokens": "0'))
    assert cli.main(["data", "show", str(noted)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.count("is not what a run writes") for line in said[:2]] == [1, 1]
    assert "cannot be read" in said[-3] and "--first=-1 must not be negative" in said[-2]
    assert said[-1] == f"{noted} is of other tokens than those that its run's config.toml names now"
