"""Dry runs of several ranks, each in a process of its own, as many at a time as there are cores."""

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from typing import Any

from dtlayout.config import Config
from dtlayout.dryrun.report import RankReport
from dtlayout.kernel import Kernel, kernels_replaced
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.models.families import FAMILIES, Family, find_family, register_family
from dtlayout.pipelining.schedules import SCHEDULES, PipelineSchedule, find_schedule, register_schedule

_LOOK_EVERY_S = 0.5
"""Between two looks at how far the processes are."""


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
    processes = multiprocessing.get_context("forkserver")  # each has torch already, and no thread of this one
    processes.set_forkserver_preload([f"{__package__}.rank", "torch._dynamo"])
    shares = processes.RawArray("d", len(ranks))
    with ProcessPoolExecutor(
        min(len(ranks), os.cpu_count() or 1), processes, _begin,
        (shares, find_schedule(layout.schedule), find_family(config.model.family)), **_ONE_TASK_EACH,
    ) as pool:  # fmt: skip
        waiting = {
            pool.submit(_dry_run, place, kernels.records, config, layout, kernels, rank, **options)
            for place, rank in enumerate(ranks)
        }
        try:
            while waiting:
                done, waiting = wait(waiting, _LOOK_EVERY_S, FIRST_COMPLETED)
                on_progress(sum(shares) / len(ranks))
                for future in done:
                    yield future.result()
        finally:
            for future in waiting:
                future.cancel()


_ONE_TASK_EACH: dict[str, Any] = {"max_tasks_per_child": 1} if sys.version_info >= (3, 11) else {}
"""A process a rank, where Python can do so: what a dry run leaves in memory goes with it."""
_shares: MutableSequence[float] = []
"""In a process of the pool: how far each of the ranks is."""


def _begin(shares: MutableSequence[float], schedule: PipelineSchedule, family: Family) -> None:
    """What a process of the pool takes over: where to note how far it is, and what is not shipped."""
    global _shares
    _shares = shares
    if schedule.name not in SCHEDULES:
        register_schedule(schedule)
    if family.name not in FAMILIES:
        register_family(family)


def _dry_run(place: int, records: list[Kernel], *arguments: Any, **options: Any) -> RankReport:
    """`records` come along, since one may be registered in the process that asks."""
    from dtlayout.dryrun.rank import dry_run  # not where the reports are read, which needs no torch

    def note_progress(share: float) -> None:
        _shares[place] = share

    gc.freeze()  # torch's own objects are a million, which every collection would look through
    with kernels_replaced(*records):
        return dry_run(*arguments, on_progress=note_progress, **options)
