"""Patterns of a plan that match nothing, styles that nobody knows, and parameters of which a plan does not say enough.

All are found by names, before anything is sharded. A stage of a pipeline lacks most of the whole, so patterns are held
against names of all stages together. No torch.

[Note: parameters beside what is split]
Between a colwise and a rowwise matmul each rank has some columns. A norm of heads there gets only its rank's terms of
its gradient, and nothing fails: ranks would train with different weights. Names don't say on what a module works. So a
plan must: "head-norm" sums its gradients over tp, "whole" says that all ranks compute the same. It is asked of every
trained parameter in the smallest module that has both matmuls of a pair, and in the parent of each of them.
"""

import difflib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from dtlayout.base.errors import InvalidConfig
from dtlayout.plans.plan import Plan, match_names
from dtlayout.plans.style_table import OPENING_STYLES, SPLIT_BY_INPUTS, SPLIT_BY_OUTPUTS

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


def check_parameters(plan: Plan, modules: Collection[str], trained: Collection[str]) -> None:
    """InvalidConfig with a line for each of the `trained` parameters beside split matmuls that has no style.

    `modules` are names of a model or of a stage: [Note: parameters beside what is split].
    """
    styles: dict[str, str] = {}
    for pattern, style in plan.tensor.items():
        for name in match_names(pattern, modules):
            styles.setdefault(name, style)
    elsewhere = {name for pattern in (*plan.frozen, *plan.counters) for name in match_names(pattern, trained)}
    experts = [f"{name}." for name in match_names(plan.experts, modules)] if plan.experts else []
    pairs, parents = _find_pairs(modules, styles)
    problems = {}
    for parameter in trained:
        owner = parameter.rpartition(".")[0]
        place = next((name for name in _list_outwards(owner) if name in pairs or name in parents), None)
        if place is None or parameter in elsewhere or parameter.startswith(tuple(experts)):
            continue
        inside = [name for name in _list_outwards(owner) if len(name) > len(place)]
        says = styles.get(owner)
        if (says is None or says in OPENING_STYLES) and all(styles.get(name) != "whole" for name in inside):
            problems[_star_numbers(parameter)] = _describe(_star_numbers(parameter), has_style=says is not None)
    if problems:
        raise InvalidConfig(list(problems.values()))


def _find_pairs(modules: Collection[str], styles: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """The smallest modules with both matmuls of a pair, and the parents of all split matmuls."""
    open_in, pairs, parents = defaultdict[str, set[bool]](set), set(), set()
    for name in sorted(modules, key=lambda name: -name.count(".") - bool(name)):  # children before their parents
        style = styles.get(name)
        if style in SPLIT_BY_OUTPUTS or style in SPLIT_BY_INPUTS:
            open_in[name].add(style in SPLIT_BY_OUTPUTS)
            parents.add(name.rpartition(".")[0])
        if len(open_in[name]) > 1:
            pairs.add(name)
        elif name:
            open_in[name.rpartition(".")[0]] |= open_in[name]
    return pairs, parents


def _list_outwards(name: str) -> Iterator[str]:
    """A module's name, then those of the modules around it; the whole is last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _star_numbers(name: str) -> str:
    """A name with `*` in the place of each number, as patterns have it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _describe(parameter: str, *, has_style: bool) -> str:
    """The refusal of a parameter that no style covers; `has_style` if its module's input has one."""
    owner, _, own = parameter.rpartition(".")
    what = f"plan.tensor: {parameter!r} is trained beside matmuls that tp splits, and no style says on what it works; "
    if has_style:
        return f"{what}put {own!r} into a module of its own, and say 'head-norm' or 'whole' for that"
    return (
        f"{what}say {owner!r}: 'head-norm' where a rank computes with its own heads or columns, or 'whole' where all "
        f"ranks compute the same"
    )


def check_styles(plan: Plan, tensor: Collection[str], context: Collection[str]) -> None:
    """InvalidConfig with a line for each style of a plan that is none of these names."""
    _refuse([*_list_unknown("tensor", plan.tensor, tensor), *_list_unknown("context", plan.context, context)])


def check_context_styles(styles: Mapping[str, str], known: Collection[str]) -> None:
    """InvalidConfig with a line for each style of context parallelism that is none of the `known` names."""
    _refuse([*_list_unknown("context", styles, known)])


def _list_unknown(field: str, styles: Mapping[str, str], known: Collection[str]) -> Iterator[str]:
    """A refusal for each style of a field of a plan that is no known one."""
    for pattern, style in styles.items():
        if style not in known:
            near = difflib.get_close_matches(style, known, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(map(repr, sorted(known)))}"
            yield f"plan.{field}[{pattern!r}]: the style {style!r} is unknown; {advice}"


def _refuse(problems: list[str]) -> None:
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
