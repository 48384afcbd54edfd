"""YAML out: the part of YAML that configs of programs need, and that every version of YAML reads alike."""

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
    """A value on one line. Strings are quoted, since YAML 1.1 reads `no` and `1e5` as something else."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_to_flow, value))}]"
    text = json.dumps(value)
    has_no_point = isinstance(value, float) and "e" in text and "." not in text
    return text.replace("e", ".0e") if has_no_point else text
