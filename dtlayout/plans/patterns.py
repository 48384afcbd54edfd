"""Patterns of a plan that match nothing, and styles that nobody knows: found by names, before anything is sharded.

A stage of a pipeline lacks most of the whole, so patterns are held against names of all stages together. No torch.
"""

import difflib
from collections.abc import Collection, Iterator

from dtlayout.base.errors import InvalidConfig
from dtlayout.plans.plan import Plan, match_names

_MOST_NAMED = 3
"""Most names that a refusal suggests."""


def check_patterns(plan: Plan, modules: Collection[str], parameters: Collection[str]) -> None:
    """InvalidConfig with a line for each pattern that matches none of these names, of a whole model."""
    problems = []
    for field, pattern, names in _list_patterns(plan, modules, parameters):
        if not match_names(pattern, names):
            problems.append(f"plan.{field}: {pattern!r} matches nothing in the model; {_suggest(pattern, names)}")
    if problems:
        raise InvalidConfig(list(dict.fromkeys(problems)))


def check_styles(plan: Plan, tensor: Collection[str], context: Collection[str]) -> None:
    """InvalidConfig with a line for each style of a plan that is none of these names."""
    said: list[tuple[str, str, str, Collection[str]]] = [
        ("tensor", pattern, style, tensor) for pattern, style in plan.tensor.items()
    ]
    said += [("context", pattern, style, context) for pattern, style in plan.context.items()]
    problems = []
    for field, pattern, style, known in said:
        if style not in known:
            near = difflib.get_close_matches(style, known, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(map(repr, sorted(known)))}"
            problems.append(f"plan.{field}[{pattern!r}]: the style {style!r} is unknown; {advice}")
    if problems:
        raise InvalidConfig(problems)


def _list_patterns(
    plan: Plan, modules: Collection[str], parameters: Collection[str]
) -> Iterator[tuple[str, str, Collection[str]]]:
    """Field of the plan, pattern, and the names among which it is looked for."""
    for pattern in plan.tensor:
        yield "tensor", pattern, modules
    for pattern in plan.context:
        yield "context", pattern.rpartition(".")[0], modules  # its last part may be a function of that module
    for unit in plan.units:
        for pattern in unit:
            yield "units", pattern, modules
    for field in ("quantized", "scaled", "summed", "fake_quantized", "scaled_experts"):
        for pattern in getattr(plan, field):
            yield field, pattern, modules
    for field in ("blocks", "experts"):
        if pattern := getattr(plan, field):
            yield field, pattern, modules
    for field in ("frozen", "counters"):
        for pattern in getattr(plan, field):
            yield field, pattern, parameters


def _suggest(pattern: str, names: Collection[str]) -> str:
    """The names that are most like a pattern, with `*` where the pattern has it."""
    parts = pattern.split(".")
    alike: dict[str, None] = {}
    for name in filter(None, names):
        own = name.split(".")
        starred = [star if star == "*" else part for star, part in zip(parts, own, strict=False)]
        alike[".".join([*starred, *own[len(parts) :]])] = None
    near = difflib.get_close_matches(pattern, alike, n=_MOST_NAMED, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(list(alike)[:8])}"
