"""Skip reasons: why a valid row of a table cannot be predicted; each reason is a predicate of its cells."""

import math
import re
from collections.abc import Callable
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.engine import find_engine, known_engines
from dtlayout.costmodel.engine_features import CHOICES, JOINT, Features
from dtlayout.costmodel.recompute_modules import MODULES
from dtlayout.schedules.schedules import SCHEDULES
from dtlayout.spec.cluster import gpu_named
from dtlayout.spec.optimizers import OPTIMIZERS, AdamW, Optimizer
from dtlayout.spec.precision import MATMUL_FORMATS
from dtlayout.validation.columns import Cells
from dtlayout.validation.row_parsing import PRECISIONS, find_schedule, to_mfu

ROUNDING = 0.02
"""How far apart two published figures of one speed may lie: tokens a second are printed in steps of up to 2 %."""
_MOST_MFU = 12 / 7
"""MFU of a causal kernel at the peak, at lengths at which attention is all there is: it computes 7 of 12 FLOPs."""


def _needs_other_stages(cells: Cells) -> bool:
    """Whether a pipeline's schedule, known and named by the row, does not go with its virtual stages."""
    if cells["pp"] == 1 or not cells["schedule"] or not (schedule := SCHEDULES.get(find_schedule(cells))):
        return False
    return not schedule.takes(cells["pp"], cells["virtual_stages"] or 1)


def _lacks(column: str) -> Callable[[Cells], bool]:
    return lambda row: row[column] is None


def _contradicts_time(cells: Cells) -> bool:
    tokens_per_s_gpu, step_time_s, batch = (cells[name] for name in ("tokens_per_s_gpu", "step_time_s", "global_batch"))
    if not (tokens_per_s_gpu and step_time_s and batch):
        return False
    return abs(batch * cells["seq_len"] / (step_time_s * cells["gpus"]) / tokens_per_s_gpu - 1) > ROUNDING


def _contradicts_mfu(cells: Cells) -> bool:
    """Whether the row's MFU contradicts its tokens a second; asked where parameters and the GPU's peak are known."""
    if not (cells["tokens_per_s_gpu"] and cells["mfu"]) or _lacks_ranks(cells) or _lacks_sizes(cells):
        return False
    gpu = gpu_named(cells["gpu"])
    return gpu.is_known and gpu.has_mfu and abs(cells["mfu"] / to_mfu(cells) - 1) > ROUNDING


def _lacks_sizes(cells: Cells) -> bool:
    """Whether the row names experts without their sizes."""
    return bool(cells["experts"]) and not (cells["experts_per_token"] and cells["expert_ffn"])


def _known_features(cells: Cells) -> Features | None:
    """Features of the row's engine; None for an engine that is not known."""
    if cells["engine"] not in known_engines():
        return None
    return find_engine(cells["engine"], cells["gpu"]).features


def _has_no_experts(cells: Cells) -> bool:
    """Whether the engine, of which that is known, trains no experts, and nothing of latent attention."""
    is_special = cells["experts"] or cells["kv_rank"]
    return bool(is_special and (known := _known_features(cells)) and "ep" not in known.axes)


def _lacks_ranks(cells: Cells) -> bool:
    """Whether attention is latent and the note does not say how narrow."""
    return bool(re.search(r"\bMLA\b", cells["note"])) and not cells["kv_rank"]


def _knows_modules(cells: Cells) -> bool:
    """True if a note names no recompute module that is unknown; a column is checked where it is read."""
    return not cells["recompute_modules"] or {*cells["recompute_modules"].split(JOINT)} <= MODULES.keys()


def _has_no_choice(cells: Cells) -> bool:
    """Whether a row says of its program what that cannot be told."""
    if not (known := _known_features(cells)):
        return False
    asked = {name: CHOICES[name].find(cells[name]) for name in CHOICES if cells[name]} if _knows_modules(cells) else {}
    return any(name not in known.choices and getattr(known, name) != value for name, value in asked.items())


def _has_no_schedule(cells: Cells) -> bool:
    """Whether a row names a schedule for its pipeline that its engine is known to lack."""
    if cells["pp"] == 1 or not cells["schedule"] or not (known := _known_features(cells)):
        return False
    return bool(known.schedules) and find_schedule(cells) not in known.schedules


def _has_no_zero(cells: Cells) -> bool:
    """Whether the row says that a distributed optimizer shards what it cannot shard in a pipeline."""
    if cells["pp"] == 1 or not (known := _known_features(cells)):
        return False
    return known.sharding == "distributed-optimizer" and (cells["zero"] or 0) > known.pipeline_zero


_REASONS: dict[str, Callable[[Cells], Any]] = {
    "engine is not stated, --engine names one": lambda row: not row["engine"],
    "engine {engine} is not known": lambda row: row["engine"] and row["engine"] not in known_engines(),
    "GPU type {gpu} is not known": lambda row: not gpu_named(row["gpu"]).is_known,
    "precision {precision}": lambda row: row["precision"] and row["precision"] not in PRECISIONS,
    "{gpu} does not multiply in {precision}":
        lambda row: row["precision"] in MATMUL_FORMATS and gpu_named(row["gpu"]).is_known
        and not gpu_named(row["gpu"]).peak_of(MATMUL_FORMATS[row["precision"]]),
    "experts_per_token or expert_ffn is not stated": _lacks_sizes,
    "ep is not stated": lambda row: row["experts"] and row["ep"] is None,
    "engine {engine} has no experts or latent attention": _has_no_experts,
    "multi-head latent attention, its ranks not stated": _lacks_ranks,
    "optimizer {optimizer} is not known": lambda row: row["optimizer"] not in known_optimizers(),
    "tokens are dropped": lambda row: row["drops_tokens"],
    "experts are split by tp": lambda row: (row["expert_tp"] or 1) > 1,
    "recompute_modules {recompute_modules} are not known": lambda row: not _knows_modules(row),
    f"engine {{engine}} cannot be told {' or '.join(CHOICES)} as stated": _has_no_choice,
    "engine {engine} has no schedule {schedule}": _has_no_schedule,
    "engine {engine} has no zero={zero} in pipelines": _has_no_zero,
    "schedule {schedule} is not known": lambda row: find_schedule(row) not in SCHEDULES,
    "schedule {schedule} does not go with virtual_stages={virtual_stages}":
        lambda row: row["virtual_stages"] and _needs_other_stages(row),
    "virtual_stages is not stated": lambda row: row["virtual_stages"] is None and _needs_other_stages(row),
    **{f"{name} is not stated": _lacks(name)
       for name in ("global_batch", "micro_batch", "recompute", "kernel", "precision")},
    "zero is not stated": lambda row: row["zero"] is None and row["dp"] > 1,
    "sequence_parallel is not stated": lambda row: row["sequence_parallel"] is None and row["tp"] > 1,
    "step_time_s contradicts tokens_per_s_gpu": _contradicts_time,
    "mfu contradicts tokens_per_s_gpu": _contradicts_mfu,
}  # fmt: skip
"""Reason why a row cannot be predicted, with cells in braces → predicate of the cells."""


def find_reasons(cells: Cells) -> tuple[str, ...]:
    """All reasons against a prediction of a row; InvalidConfig if its cells contradict each other."""
    degrees = math.prod(cells[name] or 1 for name in ("dp", "cp", "tp", "pp"))
    if degrees != cells["gpus"]:
        raise InvalidConfig(f"dp·cp·tp·pp is {degrees}, but gpus={cells['gpus']}")
    ep, sizes = cells["ep"] or 1, {"dp·cp·tp": degrees // cells["pp"], "experts": cells["experts"] or 0}
    for name, size in sizes.items():
        if size % ep:
            raise InvalidConfig(f"ep={ep} does not divide {name}={size}")
    if (cells["mfu"] or 0) > _MOST_MFU and cells["precision"] == "bf16":
        raise InvalidConfig(f"mfu={cells['mfu']} is above 12/7, which takes a format below bf16")
    return tuple(reason.format_map(cells) for reason, holds in _REASONS.items() if holds(cells))


def to_optimizer(cells: Cells) -> Optimizer:
    """The optimizer of a row, with its state in the format that the row says."""
    kept = {"state_format": cells["state_format"]} if cells["state_format"] else {}
    return known_optimizers()[cells["optimizer"]](**kept)


def known_optimizers() -> dict[str, type[Optimizer]]:
    """A table's word → optimizer; Adam keeps and moves what AdamW does."""
    return {**OPTIMIZERS, "adam": AdamW}
