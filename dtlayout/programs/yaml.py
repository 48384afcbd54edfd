"""YAML out: what configs of programs need of it, which any version of YAML reads alike."""

import json
from collections.abc import Iterator, Mapping
from typing import Any


def dump(tables: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Tables as lines; a list stands on one line.

    >>> list(dump({"optimizer": {"lr": 1e-5, "name": "adamW"}, "profiler": None}))
    ['optimizer:', '  lr: 1.0e-05', '  name: "adamW"', 'profiler: null']
    """
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from dump(value, indent + "  ")
        else:
            yield f"{indent}{key}: {_to_flow(value)}"


def _to_flow(value: Any) -> str:
    """A value on one line; strings are quoted, for YAML 1.1 takes `no` and `1e5` for something else."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_to_flow, value))}]"
    text = json.dumps(value)
    has_no_point = isinstance(value, float) and "e" in text and "." not in text
    return text.replace("e", ".0e") if has_no_point else text
