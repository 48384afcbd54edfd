"""Proofs: which axes of a layout a traced model has been seen to train exactly on. No torch.

A proof is made by `training/prove.py`, and kept in the user's cache under a hash of all that it depends on: the model's
config, the version of transformers, and our own code that splits models.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from dtlayout.base.errors import InvalidLayout
from dtlayout.base.files import find_cache, write_whole
from dtlayout.models.traced import FAMILY, read_trace
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape

AXES = ("fsdp", "pp", "tp", "sequence_parallel")
"""Things about a layout that a proof is made for, one by one and beside each other."""
TOLERANCE = 1e-10
"""Largest relative difference of a loss or a gradient in float64 that is none."""
_CODE = ("tracing", "plans", "pipelining", "models")
"""Folders of our own code that split a model."""


def list_axes(layout: Layout) -> list[str]:
    """The axes for which a layout needs a proof."""
    used = {
        "fsdp": layout.dp * layout.cp > 1, "pp": layout.pp > 1, "tp": layout.tp > 1,
        "sequence_parallel": layout.shards_sequence,
    }  # fmt: skip
    return [axis for axis in AXES if used[axis]]


def read_proof(model: ModelShape) -> dict[str, float]:
    """Axis → largest relative difference from one process, for the axes on which a model was tried; empty if none."""
    try:
        found: dict[str, float] = json.loads(_find_file(model).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def write_proof(model: ModelShape, differences: Mapping[str, float]) -> Path:
    """Keep what was found of a model, beside what is known; OSError if the cache cannot be written."""
    file = _find_file(model)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps({**read_proof(model), **differences}, indent=1) + "\n")
    return file


def find_unproven(model: ModelShape, layout: Layout) -> list[str]:
    """The axes of a layout on which a traced model was not yet seen to be exact; empty for a described one."""
    if model.family != FAMILY:
        return []
    known = read_proof(model)
    return [axis for axis in list_axes(layout) if not known.get(axis, 1.0) <= TOLERANCE]


def refuse_unproven(model: ModelShape, layout: Layout) -> None:
    """InvalidLayout if a traced model was not yet seen to train exactly on the axes of a layout."""
    if missing := find_unproven(model, layout):
        raise InvalidLayout(
            f"{model.name} was traced, and no proof shows yet that it trains exactly with {' and '.join(missing)}; "
            f"dtlayout check CONFIG --world N --prove makes one on four processes here, train.force=true goes without"
        )


def _find_file(model: ModelShape) -> Path:
    trace = read_trace(model.trace)
    facts = json.dumps([trace.config, trace.library, _hash_code()], sort_keys=True)
    return find_cache() / "proofs" / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"


@cache
def _hash_code() -> str:
    """A hash of our own code that splits models."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(file for folder in _CODE for file in (package / folder).glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
