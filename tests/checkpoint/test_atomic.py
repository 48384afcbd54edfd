"""A save seen from the disk: in which order it changes files, and that it may end after any of them.

benchmarks/faults breaks that order on purpose, and shows that these tests then fail.
"""

from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from checkpoint_ranks import build, message_of, save, update
from tiny import SHAPE
from watched_disk import watched_disk

from dtlayout.base.checkpoint_names import MANIFEST_NAME, list_checkpoints
from dtlayout.base.process import name_process
from dtlayout.checkpoint.agreement import RepeatedPlanner
from dtlayout.checkpoint.folder import name_partial
from dtlayout.checkpoint.manifest import find_damage, read_manifest
from dtlayout.spec.layout import Layout

pytestmark = pytest.mark.usefixtures("one_rank")


class Killed(BaseException):
    """Ends a save where a kill would."""


class Failing:
    """Raises at the n-th operation, and what kills at every one after it; writes to a file in a row are one."""

    def __init__(self, number: int, error: BaseException):
        self.left, self.error = number, error
        self.last: tuple[str, Path] | None = None

    def __call__(self, operation: str, path: Path) -> None:
        self.left -= (operation, path) != self.last
        self.last = operation, path
        if self.left == 0 or (self.left < 0 and isinstance(self.error, Killed)):
            raise self.error


@pytest.fixture
def updated():
    """Modules and optimizer after an update."""
    assembly, optimizer = build(Layout(), SHAPE, seed=1)
    update(assembly, optimizer)
    return assembly, optimizer


def test_a_name_is_a_whole_checkpoints_wherever_a_kill_ends_its_save(tmp_path, updated):
    for number in count(1):
        folder = tmp_path / str(number)
        save(folder, 1, *updated, SHAPE, keep=1)
        disk = Failing(number, Killed())
        with suppress(Killed), watched_disk(disk):
            message_of(partial(save, folder, 2, *updated, SHAPE, keep=1))
        whole = list_checkpoints(folder)
        assert whole and not any(map(find_damage, whole)), f"operation {number}"
        if disk.left > 0:
            break
    assert number > 20, "a save has more operations than that"
    assert [path.name for path in whole] == ["step-00000002"]


def test_whichever_operation_fails_the_older_ones_stay_and_the_next_save_succeeds(tmp_path, updated):
    failed = 0
    for number in count(1):
        folder = tmp_path / str(number)
        planner = RepeatedPlanner()
        save(folder, 1, *updated, SHAPE, keep=2, planner=planner)
        disk = Failing(number, OSError(28, "No space left on device"))
        with watched_disk(disk):
            message = message_of(partial(save, folder, 2, *updated, SHAPE, keep=2, planner=planner))
        whole = list_checkpoints(folder)
        assert whole[0].name == "step-00000001" and not any(map(find_damage, whole)), f"operation {number}"
        if message is None:
            assert [path.name for path in whole[1:]] == ["step-00000002"], f"operation {number}"
        else:
            failed += 1
            assert "No space left on device" in message and not list(folder.glob("partial-*")), f"operation {number}"
        save(folder, 3, *updated, SHAPE, keep=2, planner=planner)
        assert find_damage(folder / "step-00000003") == []
        if disk.left > 0:
            break
    assert failed > 20, "most of them are needed"


def test_all_is_on_the_disk_before_the_manifest_and_the_manifest_before_the_name(tmp_path, updated):
    operations: list[tuple[str, Path]] = []
    with watched_disk(lambda operation, path: operations.append((operation, path))):
        path = save(tmp_path, 1, *updated, SHAPE, keep=1)
    unfinished = name_partial(tmp_path, 1, name_process())
    renamed = operations.index(("replace", path))
    began = operations.index(("open", unfinished / MANIFEST_NAME))
    for name in read_manifest(path)["files"]:
        changed = max(i for i, (what, which) in enumerate(operations) if which == unfinished / name and what != "fsync")
        assert ("fsync", unfinished / name) in operations[changed:began], name
    for folder in (unfinished, unfinished / "tensors"):
        assert ("fsync", folder) in operations[:renamed]
    assert began < operations.index(("fsync", unfinished / MANIFEST_NAME)) < renamed
    assert ("fsync", tmp_path) in operations[renamed:]
