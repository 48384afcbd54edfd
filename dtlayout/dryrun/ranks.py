"""Dry runs of several ranks, each in a process of its own, as many at a time as there are cores."""

import gc
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from dtlayout.config import Config
from dtlayout.dryrun.report import RankReport
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout


def dry_run_ranks(
    config: Config,
    layout: Layout,
    kernels: Kernels,
    ranks: Sequence[int],
    **options: Any,
) -> Iterator[RankReport]:
    """The report of each of `ranks` as it comes; the options are those of `dry_run`."""
    processes = multiprocessing.get_context("forkserver")  # each has torch already, and no thread of this one
    processes.set_forkserver_preload([f"{__package__}.rank", "torch._dynamo"])
    with ProcessPoolExecutor(min(len(ranks), os.cpu_count() or 1), processes, max_tasks_per_child=1) as pool:
        futures = [pool.submit(_dry_run, config, layout, kernels, rank, **options) for rank in ranks]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def _dry_run(*arguments: Any, **options: Any) -> RankReport:
    from dtlayout.dryrun.rank import dry_run  # not where the reports are read, which needs no torch

    gc.freeze()  # torch's own objects are a million, which every collection would look through
    return dry_run(*arguments, **options)
