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
from dtlayout.dryrun.sampled_schedule import find_excerpt, put_together
from dtlayout.models.families import FAMILIES, Family, find_family, register_family
from dtlayout.schedules.schedules import SCHEDULES, PipelineSchedule, find_schedule, register_schedule
from dtlayout.spec.kernel_table import Kernel, kernels_replaced
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

_LOOK_EVERY_S = 0.5
"""Between two looks at how far the processes are."""


class Subject(NamedTuple):
    """What is run dry, and as which rank."""

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
    """The report of each of `ranks` as it comes; the options are those of `dry_run`.

    `on_progress` gets the share of all work that is done, again and again while somebody waits for the next report.
    """
    tasks = [(Subject(config, layout, kernels, rank), options) for rank in ranks]
    for _, (report, _) in _run_all(tasks, on_progress):
        yield report


def find_peaks(
    subjects: Sequence[Subject], *, on_progress: Callable[[float], None] = lambda share: None, **options: Any
) -> Iterator[tuple[Subject, int]]:
    """Peak bytes of each subject, in the order in which they are known, by the sampled runs of sampled_schedule.py.

    Less work than `dry_run_ranks`.

    `on_progress` begins anew where some have to be run with all of their actions.
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
    """None for those whose excerpts do not say it."""
    excerpts = [find_excerpt(s.config.model, s.config.batch, s.layout, s.rank, leaves_out=leaves_out) for s in subjects]
    tasks: list[tuple[Subject, dict[str, Any]]] = []
    owners: list[int] = []
    for place, (subject, excerpt) in enumerate(zip(subjects, excerpts, strict=True)):
        tasks += [(subject, options | case) for case in excerpt.cases]
        owners += [place] * len(excerpt.cases)
    found = defaultdict[int, dict[int, ActionMemory]](dict)
    for task, (_, heights) in _run_all(tasks, on_progress):
        place = owners[task]
        assert heights is not None, "they were asked for"
        found[place][task] = heights
        if len(found[place]) == owners.count(place):
            yield subjects[place], put_together(excerpts[place], [found[place][task] for task in sorted(found[place])])


def _run_all(
    tasks: Sequence[tuple[Subject, dict[str, Any]]], on_progress: Callable[[float], None]
) -> Iterator[tuple[int, tuple[RankReport, ActionMemory | None]]]:
    """The place of each task and what was found, as it comes."""
    processes = multiprocessing.get_context("forkserver")  # each has torch already, and no thread of this one
    processes.set_forkserver_preload([f"{__package__}.rank", "torch._dynamo"])
    with elsewhere():
        forkserver.ensure_running()
    shares = processes.RawArray("d", len(tasks))
    schedules = {s.layout.schedule: find_schedule(s.layout.schedule) for s, _ in tasks}
    families = {s.config.model.family: find_family(s.config.model.family) for s, _ in tasks}
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
"""A process a rank, where Python can do so: what a dry run leaves in memory goes with it."""
_shares: MutableSequence[float] = []
"""In a process of the pool: how far each of the tasks is."""


def _begin(shares: MutableSequence[float], schedules: dict[str, PipelineSchedule], families: dict[str, Family]) -> None:
    """What a process of the pool takes over: where to note how far it is, and what is not shipped."""
    global _shares
    _shares = shares
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is for all; without a traceback of each
    for schedule in schedules.values():
        if schedule.name not in SCHEDULES:
            register_schedule(schedule)
    for family in families.values():
        if family.name not in FAMILIES:
            register_family(family)


def _dry_run(
    place: int, records: list[Kernel], subject: Subject, options: dict[str, Any]
) -> tuple[RankReport, ActionMemory | None]:
    """`records` come along, since one may be registered in the process that asks."""
    from dtlayout.dryrun.rank import dry_run  # not where the reports are read, which needs no torch

    def note_progress(share: float) -> None:
        _shares[place] = share

    gc.freeze()  # torch's own objects are a million, which every collection would look through
    with kernels_replaced(*records):
        return dry_run(*subject, on_progress=note_progress, **options), options.get("heights")
