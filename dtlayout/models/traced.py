"""Models that were traced: the file that a trace is written to, and the description that it holds. No torch.

A trace is made once, with torch and transformers (`tracing/trace.py`). Everything that plans and predicts reads its
file: the operations of each kind of block, the weights before and after the blocks, and the config.json that the
model was built from.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import parse_json
from dtlayout.models.description import Description, Operation
from dtlayout.models.mixer import TokenElements
from dtlayout.models.operations import Norm
from dtlayout.models.scores import read_scores
from dtlayout.models.weight import Weight
from dtlayout.spec.model_shape import ModelShape

FAMILY = "transformers"
"""Family of the models that were traced."""
MARK = "dtlayout_trace"
"""Key by which a trace's file is known; its value is the version of the format."""
VERSION = 4
_OPERATIONS = {kind.__name__: kind for kind in get_args(Operation)}


class Divided(NamedTuple):
    """Numbers and arguments of a block's code that are about all heads, and that tp divides by its ranks."""

    numbers: tuple[str, ...] = ()
    """Numbers of heads or of their elements, such as self_attn.num_heads or self_attn.config.num_heads."""
    arguments: tuple[str, ...] = ()
    """Arguments of a block with a part for each head, such as alibi."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A model that was traced."""

    shape: ModelShape
    """Sizes of the model, and the kind of each block."""
    kinds: tuple[Description, ...]
    """A description for each kind of block; the ends are alike."""
    config: Mapping[str, Any]
    """The config.json that it was built from."""
    library: str
    """The version of transformers that built it."""
    whole: Mapping[str, str]
    """Axis of a layout, such as tp → reason why the trainer cannot split the model over it."""
    names: Mapping[str, str]
    """Our module, such as "model.layers" → the model's own name of it."""
    divided: tuple[Divided, ...]
    """Numbers and arguments of its blocks' code that tp divides, for each kind."""

    def dumps(self) -> str:
        """The text of the trace's file."""
        content = {
            MARK: VERSION, "transformers": self.library, "model": _known(asdict(self.shape)),
            "whole": dict(self.whole), "names": dict(self.names), "divided": [each._asdict() for each in self.divided],
            "kinds": [_write(each) for each in self.kinds], "config": dict(self.config),
        }  # fmt: skip
        return json.dumps(content, indent=1, sort_keys=False) + "\n"


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


_ENDS = [each.name for each in fields(Description) if each.name not in ("block", "caps_logits")]
"""Weights of a description that lie outside of blocks."""


def _write(described: Description) -> dict[str, Any]:
    ends = {name: getattr(described, name) for name in _ENDS}
    block = [{"operation": type(each).__name__, **asdict(each)} for each in described.block]
    return {
        "block": block, "caps_logits": described.caps_logits,
        **{
            name: [asdict(each) for each in value] if isinstance(value, tuple) else asdict(value)
            for name, value in ends.items()
        },
    }  # fmt: skip


def _read(table: Mapping[str, Any]) -> Description:
    return Description(
        embedding=_make(Weight, table["embedding"]),
        block=tuple(
            _make(_OPERATIONS[each["operation"]], {k: v for k, v in each.items() if k != "operation"})
            for each in table["block"]
        ),
        final_norm=_make(Norm, table["final_norm"]),
        head=_make(Weight, table["head"]),
        beside_embedding=tuple(_make(Weight, each) for each in table["beside_embedding"]),
        beside_head=tuple(_make(Weight, each) for each in table["beside_head"]),
        caps_logits=table["caps_logits"],
    )


def _make(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """A dataclass of values from JSON, in which tuples are lists."""
    made = {key: _to_tuple(value) for key, value in values.items()}
    readers = {"scores": read_scores, **dict.fromkeys(("kept", "in_forward", "in_backward"), TokenElements._make)}
    return kind(**made | {key: read(made[key]) for key, read in readers.items() if key in made})


def _to_tuple(value: Any) -> Any:
    return tuple(map(_to_tuple, value)) if isinstance(value, list) else value


def is_trace(content: Any) -> bool:
    """True for what a trace's file holds."""
    return isinstance(content, dict) and MARK in content


@lru_cache(maxsize=32)
def read_trace(path: str) -> Trace:
    """The trace in a file; InvalidConfig if there is none, or one of another version."""
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(
            f"model.trace={path!r} cannot be read: {error.strerror}; write it with dtlayout trace"
        ) from None
    except ValueError as error:
        raise InvalidConfig(f"model.trace={path!r} is not JSON: {error}") from None
    return parse_trace(content, path)


def parse_trace(content: Mapping[str, Any], path: str) -> Trace:
    """The trace that a file holds, whose path its shape will name; InvalidConfig if it is of another version."""
    if content.get(MARK) != VERSION:
        raise InvalidConfig(
            f"model.trace={path!r} has {MARK}={content.get(MARK)!r} and not {VERSION}; trace the model again"
        )
    try:
        return Trace(
            shape=toml.parse({**content["model"], "trace": path}, ModelShape, "model"),
            kinds=tuple(map(_read, content["kinds"])),
            config=content["config"],
            library=content["transformers"],
            whole=content["whole"],
            names=content["names"],
            divided=tuple(Divided(**{key: tuple(value) for key, value in each.items()}) for each in content["divided"]),
        )
    except (KeyError, TypeError) as error:
        raise InvalidConfig(f"model.trace={path!r} is damaged: {error}; trace the model again") from None


def describe_traced(model: ModelShape) -> Description:
    """The operations of a traced model, of the kind that most of its blocks have."""
    if not (model.trace and model.block_kinds):
        raise InvalidConfig(f"model.family={FAMILY} needs model.trace, the file that dtlayout trace writes")
    kind, _ = Counter(model.block_kinds).most_common(1)[0]
    return read_trace(model.trace).kinds[kind]


def find_changed_sizes(model: ModelShape) -> list[str]:
    """A line for each size of a traced model that is not the one of its trace; empty for a described one."""
    if model.family != FAMILY or not model.trace:
        return []
    traced = read_trace(model.trace).shape
    names = [each.name for each in fields(ModelShape) if each.name not in ("name", "trace", "adapter")]
    pairs = [(name, getattr(model, name), getattr(traced, name)) for name in names]
    return [f"model.{name} is {own}, and {theirs} in its trace" for name, own, theirs in pairs if own != theirs]


def find_whole(model: ModelShape) -> Mapping[str, str]:
    """Axis → reason why the trainer cannot split a model over it; empty for one that was not traced."""
    return read_trace(model.trace).whole if model.family == FAMILY else {}


def find_state(model: ModelShape) -> str:
    """The first module of a model's blocks that carries a state along the sequence; empty where none does."""
    if model.family != FAMILY or not model.trace:
        return ""
    return next((each.module for kind in read_trace(model.trace).kinds for each in kind.mixers), "")


def find_stored_name(model: ModelShape, name: str) -> str:
    """The name on disk of a parameter, which is the model's own name of it."""
    return rename(name, read_trace(model.trace).names) if model.family == FAMILY else name


def rename(name: str, prefixes: Mapping[str, str]) -> str:
    """The name of a parameter with the other name of the module that it lies in; the same name if it has no other.

    >>> rename("model.layers.1.mlp.weight", {"model.layers": "gpt.h"})
    'gpt.h.1.mlp.weight'
    """
    for prefix, other in prefixes.items():
        if name.startswith(f"{prefix}."):
            return other + name.removeprefix(prefix)
    return name


@cache
def hash_code(*folders: str) -> str:
    """A hash of the modules in some folders of this package."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(file for folder in folders for file in (package / folder).rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
