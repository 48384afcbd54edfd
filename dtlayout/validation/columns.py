"""Columns: values of cells in a table of measured runs, and our names for its words (docs/guide/sweep.md)."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.engine_features import CHOICES, ToldFeature
from dtlayout.records.run import Outcome
from dtlayout.spec.context_parallel import CONTEXT_METHODS
from dtlayout.spec.kernel_table import KERNELS as KERNELS_BY_OPERATION
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout_keys import DISPATCHERS
from dtlayout.spec.optimizers import AdamW
from dtlayout.spec.precision import BYTES
from dtlayout.spec.recompute import Recompute

KERNELS = {
    "torch": Kernels(attention="torch", norm="eager"),
    "megatron-softmax": Kernels(attention="megatron-softmax", norm="eager"),
    "flash1": Kernels(attention="flash1", norm="eager"),
    "flash2": Kernels(attention="sdpa-flash", norm="eager"),
    "flash2+rmsnorm": Kernels(attention="sdpa-flash", norm="fused"),
}
"""A table's word for attention and norm → our kernels."""
_OUTCOMES: dict[str, Outcome] = {
    "ok": "ok", "oom": "oom", "crashed_or_oom": "crashed_or_oom", "unavailable": "skipped", "error": "crashed",
}  # fmt: skip
"""A table's status → outcome."""
WHERE_NO_COLUMN = {
    "engine": "megatron", "precision": "bf16", "recompute": "none", "sequence_parallel": "False", "zero": "1",
}  # fmt: skip
"""Column → value of all runs of a table that lacks the column."""
KERNEL_COLUMNS = {"attention": "attention", "loss": "loss", "experts_kernel": "experts"}
"""Column with the name of a kernel, where `kernel` says less → operation."""
Cell = Callable[[str], Any]
"""Reads a cell, None where it is empty and may be; InvalidConfig, without saying where, for what it cannot be."""
Cells = Mapping[str, Any]
"""Column → value of a row's cell."""


def _number(
    least: float, most: float, expected: str, *, may_be_empty: bool = True, kind: Callable[[float], float] = float
) -> Cell:
    def read(text: str) -> float | None:
        if not text and may_be_empty:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or kind(value) != value:
            raise InvalidConfig(f"{text!r} must be {expected}")
        return kind(value)

    return read


def _whole(least: int, most: int | None = None, *, may_be_empty: bool = False) -> Cell:
    expected = f"a whole number of at least {least}" if most is None else f"a whole number, {least} to {most}"
    return _number(least, most or sys.float_info.max, expected, may_be_empty=may_be_empty, kind=int)


def _one_of(values: Mapping[str, Any]) -> Cell:
    def read(text: str) -> Any:
        if text not in values:
            raise InvalidConfig(f"{text!r} is unknown; use {', '.join(filter(None, values))}")
        return values[text]

    return read


def _maybe(names: Iterable[str]) -> Cell:
    """A cell that is empty or one of these words."""
    return _one_of({"": None, **{name: name for name in names}})


def _told(feature: ToldFeature) -> Cell:
    """A cell that is empty or a word for a feature."""
    return lambda text: feature.word(feature.find(text)) if text else None


def _recompute(text: str) -> str | None:
    if text:
        Recompute.parse(text)
    return text or None


def _word(text: str) -> str | None:
    return text or None


def _truth(default: bool | None) -> Cell:
    read = _one_of({"": default, "true": True, "false": False})
    return lambda text: read(text.lower())


_SIZE, _COUNT = _whole(1), _whole(1, may_be_empty=True)
_ABOVE_0 = _number(math.ulp(0.0), sys.float_info.max, "empty or a number above 0")
COLUMNS: dict[str, Cell] = {
    **dict.fromkeys(("table", "row", "model"), str),
    **dict.fromkeys(("hidden", "layers", "heads", "ffn", "vocab", "seq_len", "gpus", "dp", "tp", "pp"), _SIZE),
    **dict.fromkeys(("global_batch", "micro_batch"), _COUNT),
    "gpu": str,
    "kernel": _one_of({"": None, **KERNELS}),
    "status": _one_of(_OUTCOMES),
    **dict.fromkeys(("kv_heads", "head_dim", "gpus_per_node", "cp", "virtual_stages"), _COUNT),
    "zero": _whole(0, 3, may_be_empty=True),
    **dict.fromkeys(("tied", "qk_norm", "compile"), _truth(default=False)),
    "gated": _truth(default=True),
    "sequence_parallel": _truth(default=None),
    "recompute": _recompute,
    **dict.fromkeys(("engine", "precision", "schedule"), _word),
    "optimizer": lambda text: text or AdamW.name,
    **dict.fromkeys(
        ("ep", "experts", "experts_per_token", "expert_ffn", "shared_expert_ffn", "dense_layers"),
        _whole(0, may_be_empty=True),
    ),
    **dict.fromkeys(("step_time_s", "tokens_per_s_gpu", "peak_memory_gb"), _ABOVE_0),
    "mfu": _number(0.0, 8.0, "empty or a fraction of the bf16 peak, 0 to 1, below bf16 to 8"),
    **dict.fromkeys(("source", "note"), str),
    **dict.fromkeys(("tp_overlap", "ep_overlap", "expert_bias", "drops_tokens", "tells_memory"), _truth(default=None)),
    **dict.fromkeys(("query_rank", "kv_rank", "rope_width", "value_width", "window"), _whole(0, may_be_empty=True)),
    **dict.fromkeys(("optimizer_shards", "expert_tp"), _COUNT),
    "imbalance": _number(1.0, sys.float_info.max, "empty or a number of at least 1"),
    "cp_method": _maybe(CONTEXT_METHODS),
    "ep_dispatcher": _maybe(DISPATCHERS),
    **dict.fromkeys(("gradients", "state_format"), _maybe(BYTES)),
    **{name: _told(choice) for name, choice in CHOICES.items()},
    **{column: _maybe(KERNELS_BY_OPERATION[operation]) for column, operation in KERNEL_COLUMNS.items()},
}  # fmt: skip
"""Column → function that reads its cells."""
REQUIRED = list(COLUMNS)[: list(COLUMNS).index("kv_heads")]
