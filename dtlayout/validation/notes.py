"""Notes of published rows, read into the columns that a table lacks (docs/guide/sweep.md)."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from dtlayout.costmodel.recompute_modules import MODULES

Found = Mapping[str, Any]
"""Column → value of its cell."""


class _Note(NamedTuple):
    """Words in a note."""

    pattern: re.Pattern[str]
    read: Callable[[re.Match[str]], Found]


def _note(pattern: str, read: Callable[[re.Match[str]], Found] | None = None, **cells: Any) -> _Note:
    """Words that fill cells: always the same ones, or what `read` makes of the match."""
    return _Note(re.compile(pattern, re.IGNORECASE), read or (lambda found: cells))


_NOTES = (
    _note(
        r"\bMLA q_lora (none|\d+) kv_lora (\d+) qk \d+\+(\d+) v (\d+)",
        lambda found: {
            "query_rank": 0 if found[1] == "none" else int(found[1]),
            "kv_rank": int(found[2]), "rope_width": int(found[3]), "value_width": int(found[4]),
        },
    ),
    _note(
        r"\bevery other layer has a (\d+)-token window",  # gpt-oss, whose experts have biases
        lambda found: {"window": int(found[1]), "expert_bias": True},
    ),
    _note(r"\boptimizer shards over (\d+) GPUs", lambda found: {"optimizer_shards": int(found[1])}),
    _note(r"\bactivations of \d+ layers offloaded\b|\brecompute from release\b", tells_memory=False),
    _note(r"\bno async ?TP\b|\bvanilla TP\b", tp_overlap=False),
    _note(r"\basync ?TP\b", tp_overlap=True),
    _note(r"\ba2a overlap\b", ep_overlap=True),
    _note(r"\bdispatcher (?:deepep|hybridep)\b", ep_dispatcher="deepep"),
    _note(r"\bCP by all-to-all\b", cp_method="all-to-all"),
    _note(r"\bno overlap of any kind\b", overlap_dp="false", overlap_pp="false", tp_overlap=False),
    _note(r"\bno gradient or parameter overlap\b", overlap_dp="false"),
    _note(r"\bfp32 gradient reduce\b", gradients="float32"),
    _note(
        rf"\brecompute (?:modules )?((?:\w+\+)*(?:{'|'.join(MODULES)})\b(?:\+\w+)*)",
        lambda found: {"recompute": "selective", "recompute_modules": found[1]},
    ),
    _note(r"\bcuda graphs local:full_iteration\b", cuda_graphs="full"),
    _note(r"\bcuda graphs transformer_engine\b", cuda_graphs="attention"),
    _note(r"\bflash_attention_2\b", attention="flash-attn"),
    _note(r"\bflash_attention_3\b", attention="fa3"),
    _note(r"\brl trainer step\b", loss="linear"),  # prime-rl's, which takes head and loss in chunks of tokens
    _note(r"\bexperts packed\b", experts_kernel="grouped"),
    _note(r"\bexperts unpacked\b", experts_kernel="loop"),
    _note(r"\btoken drop\b", drops_tokens=True),
)  # fmt: skip
"""Words and what they say; of several that fill a cell, the first that a note has."""
_SOURCES = (
    _note(r"\bMegatron-Bridge\b", fused_loss="always"),  # cross_entropy_fusion_impl of its recipes
    _note(r"\bperf-activation-recompute\b", state_format="bfloat16"),  # Moonlight's recipe, by its optimizer
    _note(r"^torchtitan repo$|\btorchtitan benchmarks/\w*_2024\d\d_", fused_loss="never"),  # which came in 2025
)
"""Words of a source and what they say, as `_NOTES`."""


def read_note(note: str, source: str = "") -> dict[str, Any]:
    """Column → value, for each column that a note speaks of, or the source that a row is from.

    >>> read_note("dispatcher deepep; no async TP")
    {'ep_dispatcher': 'deepep', 'tp_overlap': False}
    """
    cells: dict[str, Any] = {}
    for found in (*_find(_NOTES, note), *_find(_SOURCES, source)):
        cells = {**found, **cells}
    return cells


def _find(known: Iterable[_Note], text: str) -> Iterator[Found]:
    for pattern, read in known:
        if found := pattern.search(text):
            yield read(found)
