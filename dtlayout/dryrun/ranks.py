"""Dry runs of several ranks, each in a process of its own, as many at a time as there are cores."""

import gc
import multiprocessing
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import forkserver
from typing import Any, NamedTuple

from dtlayout.base.interpreter import elsewhere
from dtlayout.config.config import Config
from dtlayout.dryrun.blocks import ActionMemory
from dtlayout.dryrun.report import RankReport
from dtlayout.dryrun.sampled_schedule import peak_of_step, sample_schedule
from dtlayout.models.families import FAMILIES, Family, register_family
from dtlayout.schedules.schedules import SCHEDULES, PipelineSchedule, find_schedule, register_schedule
from dtlayout.spec.kernel_records import Kernel
from dtlayout.spec.kernel_table import kernels_replaced
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

_LOOK_EVERY_S = 0.5
"""Seconds between two looks at the progress of the processes."""


class Subject(NamedTuple):
    """A config with layout and kernels, and the rank to run dry."""

    config: Config
    layout: Layout
    kernels: Kernels
    rank: int


def dry_run_ranks(
    config: Config,
    layout: Layout,
    kernels: Kernels,
    ranks: Sequence[int],
    *,
    on_progress: Callable[[float], None] = lambda share: None,
    **options: Any,
) -> Iterator[RankReport]:
    """Report of each of `ranks` as soon as it is there; `options` go to `dry_run`.

    `on_progress` gets the share of all work that is done, again and again while the caller waits for the next report.
    """
    tasks = [(Subject(config, layout, kernels, rank), options) for rank in ranks]
    for _, (report, _) in _run_all(tasks, on_progress):
        yield report


def find_peaks(
    subjects: Sequence[Subject], *, on_progress: Callable[[float], None] = lambda share: None, **options: Any
) -> Iterator[tuple[Subject, int]]:
    """Peak bytes of each subject, in the order in which they become known: less work than `dry_run_ranks`.

    Only a part of each step is run, see sampled_schedule.py. `on_progress` starts again from 0 where some subjects have
    to be run with all of their actions.
    """
    left = list(subjects)
    for leaves_out in (True, False):
        asked, left = left, list[Subject]()
        for subject, peak_bytes in _find_peaks(asked, on_progress, options, leaves_out=leaves_out) if asked else ():
            if peak_bytes is None:
                left.append(subject)
            else:
                yield subject, peak_bytes
    assert not left, "all actions of a step say its peak"


def _find_peaks(
    subjects: Sequence[Subject], on_progress: Callable[[float], None], options: dict[str, Any], *, leaves_out: bool
) -> Iterator[tuple[Subject, int | None]]:
    """Peak bytes of each subject from a sampled schedule; None where that does not tell the peak."""
    samples = [
        sample_schedule(s.config.model, s.config.batch, s.layout, s.rank, leaves_out=leaves_out) for s in subjects
    ]
    tasks: list[tuple[Subject, dict[str, Any]]] = []
    owners: list[int] = []
    for place, (subject, sample) in enumerate(zip(subjects, samples, strict=True)):
        tasks += [(subject, options | case) for case in sample.cases]
        owners += [place] * len(sample.cases)
    found = defaultdict[int, dict[int, ActionMemory]](dict)
    for task, (_, action_memory) in _run_all(tasks, on_progress):
        place = owners[task]
        assert action_memory is not None, "they were asked for"
        found[place][task] = action_memory
        if len(found[place]) == owners.count(place):
            yield subjects[place], peak_of_step(samples[place], [found[place][task] for task in sorted(found[place])])


def _run_all(
    tasks: Sequence[tuple[Subject, dict[str, Any]]], on_progress: Callable[[float], None]
) -> Iterator[tuple[int, tuple[RankReport, ActionMemory | None]]]:
    """Index of each task with the report and memory that it found, as each finishes."""
    processes = multiprocessing.get_context("forkserver")  # workers have torch already, and no thread of this process
    processes.set_forkserver_preload([f"{__package__}.rank", "torch._dynamo"])
    with elsewhere():
        forkserver.ensure_running()
    shares = processes.RawArray("d", len(tasks))
    schedules = {s.layout.schedule: find_schedule(s.layout.schedule) for s, _ in tasks}
    names = {s.config.model.family for s, _ in tasks} & FAMILIES.keys()  # not that of traced models, which all know
    families = {name: FAMILIES[name] for name in names}
    with ProcessPoolExecutor(
        min(len(tasks), os.cpu_count() or 1), processes, _begin, (shares, schedules, families), **_ONE_TASK_EACH
    ) as pool:
        places = {
            pool.submit(_dry_run, place, subject.kernels.records, subject, options): place
            for place, (subject, options) in enumerate(tasks)
        }
        waiting = set(places)
        try:
            while waiting:
                done, waiting = wait(waiting, _LOOK_EVERY_S, FIRST_COMPLETED)
                on_progress(sum(shares) / len(tasks))
                for future in done:
                    yield places[future], future.result()
        finally:
            for future in waiting:
                future.cancel()


_ONE_TASK_EACH: dict[str, Any] = {"max_tasks_per_child": 1} if sys.version_info >= (3, 11) else {}
"""One process for each rank, where Python can do so: what a dry run leaves in memory ends with its process."""
_shares: MutableSequence[float] = []
"""In a process of the pool: progress of each task, from 0 to 1, shared with the parent."""


def _begin(shares: MutableSequence[float], schedules: dict[str, PipelineSchedule], families: dict[str, Family]) -> None:
    """Set up a process of the pool: where it notes its progress, and schedules and families that plugins registered."""
    global _shares
    _shares = shares
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all, without a traceback of each
    for schedule in schedules.values():
        if schedule.name not in SCHEDULES:
            register_schedule(schedule)
    for family in families.values():
        if family.name not in FAMILIES:
            register_family(family)


def _dry_run(
    place: int, records: list[Kernel], subject: Subject, options: dict[str, Any]
) -> tuple[RankReport, ActionMemory | None]:
    """Run one task in a process of the pool; `records` are kernels that may be registered in the parent alone."""
    from dtlayout.dryrun.rank import dry_run  # only here, since reading reports needs no torch

    def note_progress(share: float) -> None:
        _shares[place] = share

    gc.freeze()  # torch's own objects are a million, which every collection would look through
    with kernels_replaced(*records):
        return dry_run(*subject, on_progress=note_progress, **options), options.get("action_memory")
