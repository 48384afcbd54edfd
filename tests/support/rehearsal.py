"""Dry runs of test cases, and of cases with something planted; a module of its own, since processes import it."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from parity import MAX_NORM, Case
from torch import Tensor

from dtlayout.config.config import Config
from dtlayout.config.loading import parse_config
from dtlayout.dryrun.rank import dry_run
from dtlayout.dryrun.ranks import dry_run_ranks
from dtlayout.dryrun.report import RankReport
from dtlayout.models.llama import Decoder

NUM_PLANTED = 1024
"""Elements."""


def to_config(case: Case) -> Config:
    """A case as a file would say it, but for the layout and the kernels."""
    config = parse_config(
        {"model": {"name": "debug"}, "batch": {"global_batch": 8, "seq_len": 16}, "train": {"steps": 1}}
    )  # fmt: skip
    optimizer = replace(case.optimizer, max_norm=MAX_NORM)
    return replace(config, model=case.model, batch=case.batch, precision=case.precision, optimizer=optimizer)


def rehearse(case: Case, ranks: list[int], **options: Any) -> dict[int, RankReport]:
    """The reports of some ranks on nodes of two CPUs."""
    options = {"device_type": "cpu", "gpus_per_node": 2, **options}
    found = dry_run_ranks(to_config(case), case.layout, case.kernels, ranks, **options)
    return {report.rank: report for report in found}


def rehearse_with(plant: str, case: Case) -> RankReport:
    """Rank 0's report of a trainer whose decoder does something more in each forward: see PLANTS."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(_plant_and_run, plant, case).result()


def _plant_and_run(plant: str, case: Case) -> RankReport:
    forward, held = Decoder.forward, []

    def forward_and_more(*inputs: Any) -> Tensor:
        PLANTS[plant](held)
        return forward(*inputs)

    Decoder.forward = forward_and_more  # type: ignore[method-assign,assignment]
    return dry_run(to_config(case), case.layout, case.kernels, 0, device_type="cpu", gpus_per_node=2)


def _gather(_: list[Tensor]) -> None:
    part = torch.zeros(NUM_PLANTED // dist.get_world_size())
    dist.all_gather_into_tensor(torch.empty(NUM_PLANTED), part)


def _retain(held: list[Tensor]) -> None:
    if not held:
        held.append(torch.zeros(NUM_PLANTED))


PLANTS: dict[str, Callable[[list[Tensor]], None]] = {
    "nothing": lambda held: None,
    "an all-gather": _gather,
    "a retained tensor": _retain,
}
