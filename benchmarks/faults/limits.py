"""CPU ranks in control groups that leave them too little memory, by folders that stand in for those of Linux."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.faults.events import Amounts, Event, Kind
from benchmarks.faults.runs import ALONE, Late, say, started
from dtlayout.base.errors import EXIT_REFUSED

LIMIT = 4 << 20
"""Bytes: less than any run needs."""
LARGE = 9223372036854771712
JOB = "slurm/uid_1000/job_42/step_0/task_0"
V1 = ("4:memory:/{group}\n", "36 31 0:32 {mounted} /memory rw - cgroup cgroup rw,memory\n")
V2 = ("0::/{group}\n", "26 23 0:24 {mounted} /memory rw - cgroup2 cgroup2 rw\n")
CASES: dict[str, tuple[tuple[str, str], str, str, dict[str, object]]] = {
    "version 1, the group itself": (V1, JOB, "/", {f"{JOB}/memory.limit_in_bytes": LIMIT}),
    "version 1, the job around it": (
        V1, JOB, "/", {f"{JOB}/memory.limit_in_bytes": LARGE, "slurm/uid_1000/job_42/memory.limit_in_bytes": LIMIT},
    ),
    "version 1, a container in a job that it does not see": (
        V1, "docker/a", "/docker/a",
        {"memory.stat": f"hierarchical_memory_limit {LIMIT}", "memory.limit_in_bytes": LARGE},
    ),
    "version 2, the job around it": (
        V2, JOB, "/", {f"{JOB}/memory.max": "max", "slurm/uid_1000/job_42/memory.max": LIMIT},
    ),
    "version 2, a container": (V2, "", "/", {"memory.max": LIMIT}),
}  # fmt: skip
"""/proc/self/cgroup and mountinfo, the group's path, what is mounted, and files below the mount."""
PLUGIN = """
from functools import partial
from pathlib import Path
from dtlayout.spec import device
from dtlayout.base.cgroups import find_memory_limit
device.find_memory_limit = partial(find_memory_limit, Path({root!r}) / "proc", Path({root!r}))
"""


def provoke(folder: Path, amounts: Amounts, done: Sequence[Event]) -> Iterator[Event]:
    """Each case."""
    known = {event.what for event in done}
    for number, what in enumerate(CASES):
        if what not in known:
            yield start_inside(folder / str(number), what)


def start_inside(folder: Path, what: str) -> Event:
    """Start train.py where /proc and the groups say so, and look how it ends."""
    (groups, mounts), group, mounted, files = CASES[what]
    (folder / "proc").mkdir(parents=True, exist_ok=True)
    (folder / "proc" / "cgroup").write_text(groups.format(group=group))
    (folder / "proc" / "mountinfo").write_text(mounts.format(mounted=mounted))
    for name, text in files.items():
        path = folder / "memory" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (folder / "in_a_group.py").write_text(PLUGIN.format(root=str(folder)))
    environment = {"DTLAYOUT_PLUGINS": "in_a_group", "PYTHONPATH": f".:{folder}"}
    try:
        with started(
            folder / "run", *ALONE, "--train.steps=1", num_ranks=1, apart=True, environment=environment
        ) as start:
            codes, said = start.wait(), start.said
    except Late as error:
        return Event(kind="memory limits", what=what, problem=str(error))
    problem = say(
        "" if codes == [EXIT_REFUSED] else f"ended with {codes}: {said[-300:]}",
        "" if "is predicted to need" in said and "of this host" in said else f"does not say why: {said[-300:]}",
    )
    return Event(kind="memory limits", what=what, problem=problem, facts={"codes": codes})


KIND = Kind(
    name="memory limits",
    title="CPU ranks in control groups of versions 1 and 2 (stand-ins) with too little memory",
    promise="the run is refused with the numbers before it begins, and not killed by the kernel",
    provoke=provoke,
    expected=lambda amounts: len(CASES),
)
