"""A state on disk: a kill in an update, a slow disk and a save in the background change no bit of a run."""

import json
import os
import warnings
from pathlib import Path
from threading import Event, Timer

import torch
import torch.distributed.checkpoint as dcp
from checkpoint_ranks import ADAMW, build, update
from launching import launch, read_lines
from tiny import SHAPE, write_tiny

from dtlayout.base.checkpoint_names import CHECKPOINTS
from dtlayout.checkpoint.agreement import RepeatedPlanner
from dtlayout.checkpoint.reader import Reader
from dtlayout.checkpoint.sharded import collect_state, load_checkpoint, save_checkpoint
from dtlayout.plans.disk import DiskState
from dtlayout.spec.layout import Layout

DELAY_S, NUM_UNITS = 0.01, 6
"""Seconds that each access of a slow disk takes; units of the tiny model: four blocks and both ends."""


def note_bits(run: Path) -> tuple[list[tuple[float, float]], dict[str, bytes]]:
    """Loss and norm of each step of a run, and the bytes of each tensor of its newest checkpoint."""
    folder = run / CHECKPOINTS / "step-00000006" / "tensors"
    kept = Reader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in kept.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(tensors, storage_reader=Reader(folder), no_dist=True)
    steps = [(line["loss"], line["grad_norm"]) for line in read_lines(run)]
    return steps, {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_a_kill_in_an_update_a_slow_disk_and_a_slow_save_leave_the_bits_of_a_run_in_memory(tmp_path):
    """The checkpoint that the second start takes was written while the third step wanted to update."""
    files, log, state = write_tiny(tmp_path, steps=6), tmp_path / "log", tmp_path / "state"
    state.mkdir()
    usual = ("--layout.zero=3", "--checkpoint.every=2")
    assert launch(1, files.config, *usual, log=log) == 0, log.read_text()
    straight = note_bits(files.run)

    run = tmp_path / "on_disk"
    on_disk = ("--layout.offload=disk", f"--layout.offload_folder={state}", f"--train.run_folder={run}")

    def start(**trouble: object) -> int:
        plugin = {"DTLAYOUT_PLUGINS": "tests.support.troubled_disk", "DISK_TROUBLE": json.dumps(trouble)}
        return launch(1, files.config, *usual, *on_disk, log=log, **plugin)

    assert start(save_s=0.3, killed_in=[4, 3]) == -9, log.read_text()
    assert [line["step"] for line in read_lines(run)] == [1, 2, 3]
    assert [path.name for path in (run / CHECKPOINTS).glob("step-*")] == ["step-00000002"]
    assert not os.listdir(state)

    assert start(delay_s=DELAY_S) == 0, log.read_text()
    assert "after 2 steps" in log.read_text() and not os.listdir(state)
    assert note_bits(run) == straight
    shortest_s = min(line["step_time_s"] for line in read_lines(run)[3:])
    assert shortest_s >= 2 * NUM_UNITS * DELAY_S  # an update waits for each unit's two files


def test_a_checkpoint_is_loaded_into_the_files_unit_after_unit(one_rank, tmp_path):
    """A state that came back in memory of its own would have the same bits, and not fit."""
    state = tmp_path / "state"
    state.mkdir()
    assembly, optimizer = build(Layout(zero=3, offload="disk", offload_folder=str(state)), SHAPE, 0)

    def note_places() -> list[int]:
        kept = [each for of in optimizer.state.values() for each in of.values() if each.dim()]
        tensors = [*kept, *(parameter for module in assembly.modules for parameter in module.parameters())]
        return [tensor._local_tensor.data_ptr() for tensor in tensors]

    def copy() -> dict[str, torch.Tensor]:
        found = collect_state(assembly.modules, optimizer, SHAPE, ADAMW)
        return {name: tensor.full_tensor().clone() for name, tensor in found.items()}

    before = note_places()
    update(assembly, optimizer)
    tensors, saved = collect_state(assembly.modules, optimizer, SHAPE, ADAMW), copy()
    disk, planner, left = assembly.disk, RepeatedPlanner(), []
    planner.use = disk.follow(left.append)
    path = save_checkpoint(tmp_path / "checkpoints", 1, tensors, SHAPE, ADAMW, keep=1, planner=planner)
    assert left == disk.units[:-1], "each unit is left when the next one is written"
    update(assembly, optimizer)
    left.clear()
    assert load_checkpoint(path, assembly.modules, optimizer, SHAPE, ADAMW, use=disk.follow(left.append)) == 1
    passes = 4  # DCP reads kind after kind, and then parts are compared with their copies
    assert set(left) == {*disk.units} and len(left) <= passes * (len(disk.units) + 1)
    assert note_places() == before
    assert all(torch.equal(tensor, saved[name]) for name, tensor in copy().items())
    assert {float(each["step"]) for each in optimizer.state.values()} == {1.0}


class NotedUnit:
    """In the place of a unit: notes what is done to it, and is read or written once it may be."""

    def __init__(self, number: int, done: list[str]):
        self.number, self.done, self.may_be_read, self.may_be_written = number, done, Event(), Event()

    def fetch(self) -> None:
        assert self.may_be_read.wait(10)
        self.done.append(f"read {self.number}")

    def write_out(self) -> None:
        assert self.may_be_written.wait(10)
        self.done.append(f"write {self.number}")


def test_an_update_waits_until_its_unit_is_read_and_all_but_the_last_one_are_written(tmp_path):
    disk, done = DiskState([], str(tmp_path)), list[str]()
    disk.units = units = [NotedUnit(number, done) for number in range(4)]  # type: ignore[assignment]
    for unit in units[:2]:
        unit.may_be_read.set()
    updates = disk.each_update(range(4))
    for number in range(2):
        done.append(f"update {next(updates)}")
        assert done[-2:] == [f"read {number}", f"update {number}"]
    Timer(0.05, units[2].may_be_read.set).start()
    Timer(0.1, units[0].may_be_written.set).start()
    done.append(f"update {next(updates)}")
    assert sorted(done[-3:-1]) == ["read 2", "write 0"] and done[-1] == "update 2"
    for unit in units:
        unit.may_be_read.set()
        unit.may_be_written.set()
    done.extend(f"update {number}" for number in updates)
    assert done.index("write 1") < done.index("update 3")
