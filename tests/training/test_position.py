"""Where a run goes on in its samples: after those that were seen, whatever size batches had."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from launching import read_lines
from tiny import TinyFiles, write_tiny

from dtlayout import cli, launch
from dtlayout.base.checkpoint_names import MANIFEST_NAME, list_checkpoints
from dtlayout.base.errors import CheckpointError
from dtlayout.checkpoint.manifest import read_manifest
from dtlayout.config.loading import load_config
from dtlayout.data import samples
from dtlayout.data.samples import Seen
from dtlayout.spec.batch import Batch, RampStage
from dtlayout.training.position import find_seen, note_seen

BATCH = Batch(global_batch=8, seq_len=16)
HERE = Path("run/step-5")


@pytest.fixture
def files(tmp_path: Path, no_torchrun: None) -> TinyFiles:
    return write_tiny(tmp_path, steps=2, num_layers=1)


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """Numbers of the samples that are read, in the order in which they are."""
    numbers: list[int] = []
    count = samples.number_samples

    def note(*args: object) -> samples.Ints:
        found = count(*args)
        numbers.extend(found.tolist())
        return found

    monkeypatch.setattr(samples, "number_samples", note)
    return numbers


def test_batches_of_other_sizes_there_and_back_read_each_sample_once(files, read, capsys):
    sizes, num_tokens = {2: 8, 4: 4, 5: 4, 6: 16, 8: 8}, []
    for steps, size in sizes.items():
        assert launch.main([str(files.config), f"--train.steps={steps}", f"--batch.global_batch={size}"]) == 0
    assert read == list(range(8 * 2 + 4 * 3 + 16 + 8 * 2))
    lines, seen = read_lines(files.run), 0
    for line in lines:
        seen += 16 * next(size for steps, size in sizes.items() if line["step"] <= steps)
        num_tokens.append(seen)
    assert [line["tokens"] for line in lines] == num_tokens and len(lines) == 8
    (*_, newest) = list_checkpoints(files.run / "checkpoints")
    assert (read_manifest(newest) or {})["samples"] == len(read)
    said = capsys.readouterr().out
    assert said.count("the last step had 8 samples, the next one has 4; it begins after the 16 samples that") == 1
    assert said.count("the last step had 4 samples, the next one has 16; it begins after the 28 samples that") == 1
    assert "another order" not in said and "does not count" not in said


RAMP = "--train.batch_ramp=[{until=3, global_batch=2}, {until=12, global_batch=4}]"
"""Batches of 2, 2, 4, 4 and then 8."""


def test_a_ramp_reads_what_a_run_without_one_reads_and_goes_on_where_it_was(files, read, capsys):
    (files.run.parent / "other.txt").write_text("1 plus 1 is 2. " * 40)
    held_out = (f"--validation.source={files.run.parent}/other.txt", "--validation.every=1", "--validation.batches=1")
    for steps in (1, 3, 6):
        assert launch.main([str(files.config), RAMP, f"--train.steps={steps}"]) == 0
    assert read == list(range(2 + 2 + 4 + 4 + 8 + 8))
    lines, said = read_lines(files.run), capsys.readouterr().out
    assert [line["tokens"] for line in lines] == [16 * n for n in (2, 4, 8, 12, 20, 28)]
    for line, size in zip(lines, (2, 2, 4, 4, 8, 8), strict=True):
        assert line["tokens_per_s"] == pytest.approx(16 * size / line["step_time_s"])
    assert said.count("samples until 3") == 0 and said.count("global batches of 2 until 3 samples, 4 until 12 sam") == 3
    assert "6 steps read 28 samples: " in said and "another order" not in said and "note: the last step had" not in said
    summary = json.loads((files.run / "summary.json").read_text())
    assert summary["step_time_s"] in [line["step_time_s"] for line in lines[4:]] or summary["step_time_s"] == (
        pytest.approx(sum(line["step_time_s"] for line in lines[4:]) / 2)
    )
    assert launch.main([str(files.config), RAMP, "--train.steps=7", "--batch.global_batch=16"]) == 0
    assert read == list(range(28 + 16))
    read.clear()
    again = f"--train.run_folder={files.run}-again"
    assert launch.main([str(files.config), RAMP, again, "--train.steps=2", *held_out]) == 0
    assert read == [0, 1, 2, 3, *range(8), *range(8), *range(8), *range(8)]  # held-out batches are whole, counted twice


def test_beside_a_ramp_the_batches_of_the_last_step_and_of_the_next_one_are_named(files, capsys):
    def go_on(steps: int, *options: str) -> list[str]:
        assert launch.main([str(files.config), f"--train.steps={steps}", *options]) == 0
        return [
            line
            for line in capsys.readouterr().out.splitlines()
            if line.startswith(("note: the last", "note: the next"))
        ]

    slower = "--train.batch_ramp=[{until=100, global_batch=2}]"
    assert go_on(2, RAMP) == go_on(3, RAMP) == []  # the next stage begins between them, as it was to
    (line,) = go_on(4)
    assert line.startswith("note: the last step had 4 samples, the next one has 8; it begins after the 8 samples that ")
    (line,) = go_on(5, slower)
    assert line.startswith("note: the last step had 8 samples, the next one has 2, by train.batch_ramp; it begins")
    (line,) = go_on(6, slower, "--batch.global_batch=16")
    assert line.startswith("note: the next step has 2 samples, as the last one had; later steps differ from what was")
    assert go_on(7, slower, "--batch.global_batch=16") == []


def test_a_ramp_counts_in_epochs_and_is_refused_where_it_is_none(files, capsys):
    ten_samples = (str(files.config), "--data.max_tokens=161", RAMP)
    assert launch.main([*ten_samples, "--train.epochs=2"]) == 0
    assert "5 steps read 20 samples: 2 epochs of 10 samples" in capsys.readouterr().out
    refused = {
        "[{until=3, global_batch=3}]": "train.batch_ramp until 3 samples: global_batch=3 is not a multiple of dp * mi",
        "[{until=9, global_batch=2}, {until=9, global_batch=4}]": "train.batch_ramp has until=9 after 9; let each be",
        "[{until=0, global_batch=2}]": "train.batch_ramp.until=0 must be at least 1",
        "[{until=4, global_batch=2}] --metrics.memory=true": "draws the first steps, which train.batch_ramp makes",
    }
    for ramp, why in refused.items():
        assert launch.main([str(files.config), *f"--train.batch_ramp={ramp}".split(" --")[:1],
                            *(f"--{each}" for each in ramp.split(" --")[1:])]) == 2  # fmt: skip
        assert why in capsys.readouterr().err, ramp


def test_what_is_predicted_of_a_ramp_is_said(files, capsys):
    assert cli.main(["explain", str(files.config), RAMP, "--gpu", "cpu"]) == 0
    assert (
        "note: train.batch_ramp: global batches of 2 until 3 samples, 4 until 12 samples, then 8; a step of 8 is "
        in (capsys.readouterr().err)
    )
    for number in (0, 5, 17):
        shown = []
        for ramp in ((), (RAMP,)):
            assert cli.main(["data", "show", str(files.config), *ramp, "--sample", str(number)]) == 0
            shown.append(capsys.readouterr().out)
        assert shown[0] == shown[1]


def test_epochs_are_whole_passes_also_after_a_resume_with_another_batch(files, read, capsys):
    ten_samples = (str(files.config), "--data.max_tokens=161", "--optimizer.warmup_steps=2")
    assert launch.main([*ten_samples, "--train.epochs=0.1"]) == 2
    assert "optimizer.warmup_steps=2 is more than train.steps=1, so that" in capsys.readouterr().err
    dist.destroy_process_group()  # that a refused run leaves to the end of its process
    assert launch.main([*ten_samples, "--train.epochs=2"]) == 0
    assert "3 steps read 24 samples: 2.4 epochs of 10 samples with 160 targets" in capsys.readouterr().out
    assert launch.main([*ten_samples, "--train.epochs=3", "--batch.global_batch=4"]) == 0
    assert "5 steps read 32 samples: 3.2 epochs of 10 samples with 160 targets" in capsys.readouterr().out
    assert read == list(range(24 + 8))
    assert [line["step"] for line in read_lines(files.run)] == [1, 2, 3, 4, 5]
    assert load_config(files.run / "config.toml").train.steps == 5
    assert launch.main([*ten_samples, "--train.epochs=3", "--batch.global_batch=4"]) == 0
    assert "has done its 5 steps; raise train.epochs (and" in capsys.readouterr().out
    (files.run / "summary.json").unlink()
    assert launch.main([*ten_samples, "--train.epochs=3", "--batch.global_batch=4"]) == 2
    assert "has done 5 steps, which are the 5 steps of train.epochs=3 or more; raise" in capsys.readouterr().err
    dist.destroy_process_group()


def test_samples_of_a_bad_step_are_those_that_it_had(files, tmp_path):
    assert launch.main([str(files.config)]) == 0
    bad = ("--train.steps=3", "--batch.global_batch=4", "--optimizer.lr=1e30", "--train.on_nonfinite=skip")
    assert launch.main([str(files.config), *bad, "--train.steps=5"]) == 0
    noted = {int(path.stem[-8:]): json.loads(path.read_text())["samples"] for path in files.run.glob("nonfinite-*")}
    assert noted, "a learning rate of 1e30 gives numbers that are not finite"
    straight = tmp_path / "straight"
    again = [str(files.config), f"--train.run_folder={straight}", "--batch.global_batch=4", "--optimizer.lr=1e30"]
    launch.main([*again, "--train.steps=9", "--train.on_nonfinite=skip"])
    in_fours = {int(path.stem[-8:]): json.loads(path.read_text())["samples"] for path in straight.glob("nonfinite-*")}
    for step, pairs in noted.items():  # two steps of eight are four of four
        assert in_fours[step + 2] == pairs


def test_a_checkpoint_that_counts_no_samples_goes_on_as_its_version_would_and_says_so(files, read, capsys):
    assert launch.main([str(files.config)]) == 0
    (path,) = list_checkpoints(files.run / "checkpoints")
    state = json.loads((path / "state.json").read_text())
    del state["origin"]["seen"], state["format"]
    (path / "state.json").write_text(json.dumps(state))
    (path / MANIFEST_NAME).unlink()
    assert launch.main([str(files.config), "--train.steps=3", "--batch.global_batch=4"]) == 0
    assert read == list(range(8 * 2 + 4))
    said = capsys.readouterr().out
    assert "this checkpoint does not count samples: 2 steps of global_batch=8 are taken for all that were seen" in said
    assert cli.main(["checkpoint", "show", str(files.run)]) == 0
    assert "samples: 20" in capsys.readouterr().out


def test_what_was_seen_is_what_was_kept_or_follows_from_steps():
    kept = Seen(5, 44, 704, 8)
    assert find_seen({**note_seen(kept), "global_batch": 8}, 5, BATCH, HERE) == (kept, [])
    assert find_seen({}, 0, BATCH, HERE) == (Seen(), [])  # weights that were converted
    assert find_seen({**note_seen(Seen()), "global_batch": 4}, 0, BATCH, HERE) == (Seen(), [])
    seen, (line,) = find_seen({}, 5, BATCH, HERE)
    assert seen == Seen(5, 40, 640, 8) and "5 steps of global_batch=8" in line
    seen, lines = find_seen({"global_batch": 4, "seq_len": 32}, 5, BATCH, HERE)
    assert seen == Seen(5, 20, 640, 4) and len(lines) == 2


def test_a_save_before_a_step_of_this_start_keeps_the_size_of_the_last_one_of_an_earlier_start():
    """As that of the state which met a spike: at a ramp's border the next step has another size."""
    ramp = (RampStage(until=8, global_batch=4),)
    before = Seen().after(2, BATCH, ramp)
    assert before == Seen(2, 8, 128, 4) and before.after(2, BATCH, ramp) == before
    origin = {**note_seen(before.after(2, BATCH, ramp), ramp), "global_batch": 8}
    assert find_seen(origin, 2, BATCH, HERE, ramp) == (before, [])
    _, (line,) = find_seen(origin, 2, Batch(global_batch=16, seq_len=16), HERE, ramp)
    assert line.startswith("the last step had 4 samples, the next one has 16; it begins after the 8 samples that were")


@pytest.mark.parametrize(
    "kept",
    [None, [], {}, {"samples": -1, "tokens": 0}, {"samples": 1.5, "tokens": 0}, {"samples": True, "tokens": 0},
     {"samples": 8, "tokens": "8"}],
)  # fmt: skip
def test_a_count_that_is_none_is_refused(kept):
    with pytest.raises(CheckpointError, match=r"run/step-5 cannot be read: its count of (samples|tokens) is"):
        find_seen({"seen": kept}, 5, BATCH, HERE)


@pytest.mark.parametrize("key", ["global_batch", "seq_len", "step_batch"])
@pytest.mark.parametrize("size", [None, 0, -4, 4.0, True, "4"])
def test_a_size_that_is_none_is_refused(key, size):
    with pytest.raises(CheckpointError, match=f"run/step-5 cannot be read: its {key} is {size!r}; use an older one"):
        find_seen({key: size, "seen": {"samples": 8, "tokens": 64}}, 5, BATCH, HERE)
