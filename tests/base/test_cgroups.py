"""Memory limits of control groups, in both versions, read from folders that stand in for /proc and /sys."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlayout.base.cgroups import find_memory_limit
from dtlayout.spec import device

GIB = 2**30
UNLIMITED = 9223372036854771712
"""What version 1 says of a group without a limit."""
V1 = "36 31 0:32 {mounted} {place} rw,relatime shared:9 - cgroup cgroup rw,memory"
V2 = "26 23 0:24 {mounted} {place} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
OTHERS = (
    "23 1 8:1 / / rw - ext4 /dev/sda1 rw\n32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\nodd line\n"
)
FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}


class Machine:
    """Folders as Linux has them, for a process in a group of one version."""

    def __init__(self, root: Path, version: int, *, group: str, mounted: str = "/", place: str = ""):
        self.root, self.version, self.proc = root, version, root / "proc" / "self"
        self.top = place or {1: "/sys/fs/cgroup/memory", 2: "/sys/fs/cgroup"}[version]
        self.proc.mkdir(parents=True)
        lines = {1: f"9:name=systemd:/x\n4:memory:{group}\n0::/x\n", 2: f"0::{group}\n"}[version]
        (self.proc / "cgroup").write_text(f"3:cpu,cpuacct:/elsewhere\n{lines}")
        mount = {1: V1, 2: V2}[version].format(mounted=mounted, place=self.top.replace(" ", "\\040"))
        (self.proc / "mountinfo").write_text(f"{OTHERS}{mount}\n")

    def limit(self, inside: str, text: object) -> None:
        """Give the group at this path below the mount a limit."""
        folder = self.root / self.top.strip("/") / inside.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILES[self.version]).write_text(f"{text}\n")

    def find(self) -> int | None:
        """What a process there finds."""
        return find_memory_limit(self.proc, self.root)


JOB = "/slurm/uid_1000/job_42/step_0/task_0"


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_job_is_found_from_a_step_inside_it(tmp_path, version):
    machine = Machine(tmp_path, version, group=JOB)
    machine.limit(JOB, UNLIMITED if version == 1 else "max")
    machine.limit("/slurm/uid_1000/job_42/step_0", 64 * GIB)
    machine.limit("/slurm/uid_1000/job_42", 32 * GIB)
    machine.limit("/slurm/uid_1000/job_43", GIB)  # somebody else's
    machine.limit("/slurm", 128 * GIB)
    assert machine.find() == 32 * GIB


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group", ["/docker/abc", "/", "/../../job_42"])
def test_in_a_container_whose_path_begins_above_its_mount_the_mount_is_the_group(tmp_path, version, group):
    mounted = "/docker/abc" if group == "/docker/abc" else "/"
    machine = Machine(tmp_path, version, group=group, mounted=mounted)
    machine.limit("/", 5 * GIB)
    assert machine.find() == 5 * GIB


def test_of_groups_that_are_not_to_be_seen_version_1_says_the_least_limit(tmp_path):
    machine = Machine(tmp_path, 1, group="/docker/abc", mounted="/docker/abc")
    machine.limit("/", UNLIMITED)
    stat = tmp_path / "sys" / "fs" / "cgroup" / "memory" / "memory.stat"
    stat.write_text(f"cache 0\nhierarchical_memory_limit {3 * GIB}\nhierarchical_memsw_limit {GIB}\n")
    assert machine.find() == 3 * GIB


def test_a_mount_may_lie_anywhere_and_have_a_blank_in_its_name(tmp_path):
    machine = Machine(tmp_path, 2, group="/a", place="/mnt/my groups")
    machine.limit("/a", 7)
    assert machine.find() == 7


def test_without_groups_limits_or_proc_there_is_none(tmp_path):
    assert find_memory_limit(tmp_path / "none", tmp_path) is None
    machine = Machine(tmp_path, 2, group="/a")
    assert machine.find() is None
    machine.limit("/a", "max")
    assert machine.find() is None


@given(
    limits=st.lists(st.one_of(st.none(), st.integers(1, 2**62)), min_size=1, max_size=6),
    version=st.sampled_from([1, 2]),
)
def test_the_least_limit_of_all_groups_around_a_process_counts(limits, version):
    names = [f"level{i}" for i in range(len(limits))]
    with TemporaryDirectory() as folder:
        machine = Machine(Path(folder), version, group="/" + "/".join(names))
        for i, limit in enumerate(limits):
            if limit is not None:
                machine.limit("/".join(names[: i + 1]), limit)
        assert machine.find() == min((limit for limit in limits if limit is not None), default=None)


def test_a_host_has_no_more_memory_than_its_group_and_none_beyond_its_own(monkeypatch):
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, found in ((None, whole), (GIB, GIB), (UNLIMITED, whole)):
        monkeypatch.setattr(device, "find_memory_limit", lambda limit=limit: limit)
        assert device.find_host_bytes() == found
