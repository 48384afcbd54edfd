"""Proofs: the axes of a layout on which a traced model was found exact. No torch.

A proof is made by `training/prove.py`, and kept in the user's cache under a hash of all that it depends on: the model's
trace, the versions of torch and transformers that are installed, and our own code that splits models.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.base.files import find_cache, write_whole
from dtlayout.base.formatting import find_version
from dtlayout.models.traced import FAMILY, hash_code, read_trace
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape

AXES = ("fsdp", "pp", "tp", "sequence_parallel", "cp", "offload", "splits_backward", "document_mask")
"""Features of a layout, and of data, that a proof tests."""
TOLERANCE = 1e-10
"""Relative differences of a loss or a gradient in float64 up to this one are rounding."""
_CODE = ("mesh", "models", "ops", "pipelining", "plans", "schedules", "spec", "tracing", "training")
"""Folders of our own code that build, split and step a model, or prove that."""


def list_axes(layout: Layout, *, document_mask: bool = False) -> list[str]:
    """The axes for which a layout, with documents that are perhaps kept apart, needs a proof."""
    used = {
        "fsdp": layout.dp * layout.cp > 1, "pp": layout.pp > 1, "tp": layout.tp > 1,
        "sequence_parallel": layout.shards_sequence, "cp": layout.cp > 1, "offload": layout.offloads_activations,
        "splits_backward": layout.splits_backward, "document_mask": document_mask,
    }  # fmt: skip
    return [axis for axis in AXES if used[axis]]


def read_proof(model: ModelShape) -> dict[str, float]:
    """Axis → largest relative difference from one process, for the axes on which a model was tried; empty if none."""
    try:
        found: dict[str, float] = json.loads(_find_file(model).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_proof(model: ModelShape, differences: Mapping[str, float]) -> Path:
    """Add these differences to the model's proof file; InvalidConfig if the user's cache cannot be written."""
    file = _find_file(model)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({**read_proof(model), **differences}, indent=1) + "\n")
    except OSError as error:
        raise InvalidConfig(
            f"{file} cannot be written: {error.strerror}; XDG_CACHE_HOME names another folder"
        ) from None
    return file


def find_unproven(model: ModelShape, layout: Layout, *, document_mask: bool = False) -> list[str]:
    """The axes of a layout on which a traced model was not yet seen to be exact; empty for a described one."""
    if model.family != FAMILY:
        return []
    known = read_proof(model)
    return [axis for axis in list_axes(layout, document_mask=document_mask) if not known.get(axis, 1.0) <= TOLERANCE]


def refuse_unproven(model: ModelShape, layout: Layout, *, document_mask: bool = False) -> None:
    """InvalidLayout if a traced model was not yet seen to train exactly on the axes of a layout."""
    if not (missing := find_unproven(model, layout, document_mask=document_mask)):
        return
    known = read_proof(model)
    if failed := [axis for axis in missing if axis in known]:
        found = ", ".join(f"{axis} by {known[axis]:.1e}" for axis in failed)
        raise InvalidLayout(f"{model.name} was traced, and its proof differs from one process: {found}; leave that out")
    raise InvalidLayout(
        f"{model.name} was traced, and no proof shows yet that it trains exactly with {' and '.join(missing)}; "
        f"dtlayout check CONFIG --world N --prove makes one on four processes here, train.force=true goes without"
    )


def _find_file(model: ModelShape) -> Path:
    trace = read_trace(model.trace)
    own = replace(trace, shape=replace(trace.shape, name="own", trace=""))
    facts = [own.dumps(), *map(find_version, ("torch", "transformers")), hash_code(*_CODE)]
    return find_cache() / "proofs" / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"
