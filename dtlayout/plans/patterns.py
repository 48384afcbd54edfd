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
_BESIDE_OUTPUTS, _BESIDE_INPUTS = ("replicated", "colwise"), ("rowwise-term", "replicated")
"""Styles of an adapter's two layers, in their order, beside a layer that tp splits by outputs, or by inputs."""
_NEAR = 0.6
"""Likeness, 0 to 1, from which on a name is what somebody meant, as difflib has it by default."""


def list_idle_patterns(plan: Plan, modules: Collection[str], parameters: Collection[str]) -> list[str]:
    """A line for each pattern that matches none of these names, of a whole model."""
    found = _list_patterns(plan, modules, parameters)
    idle = ((field, pattern, names) for field, pattern, names in found if not match_names(pattern, names))
    lines = (
        f"plan.{field}: {pattern!r} matches nothing in the model; {_suggest(pattern, names)}"
        for field, pattern, names in idle
    )
    return list(dict.fromkeys(lines))


def check_parameters(
    plan: Plan, modules: Collection[str], trained: Collection[str], linears: Collection[str] = ()
) -> None:
    """InvalidConfig with a line for each of the `trained` parameters beside split matmuls that has no style.

    `modules` are names of a model or of a stage, `linears` those of them that are linear layers: [Note: parameters
    beside what is split].
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
            around = next((styles[name] for name in inside[1:] if name in styles), "")
            problems[_star_numbers(parameter)] = _describe(
                _star_numbers(parameter), has_style=says is not None, is_linear=owner in linears, around=around
            )
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


def _describe(parameter: str, *, has_style: bool, is_linear: bool, around: str) -> str:
    """The refusal of a parameter that no style covers.

    `has_style` if its module's input has one, `is_linear` if its module is a linear layer. `around` is the style of the
    module that has its module inside, as a linear layer has its adapter.
    """
    owner, _, own = parameter.rpartition(".")
    what = f"plan.tensor: {parameter!r} is trained beside matmuls that tp splits, and no style says on what it works; "
    if has_style:
        return f"{what}put {own!r} into a module of its own, and say 'head-norm' or 'whole' for that"
    if is_linear and around in SPLIT_BY_OUTPUTS | SPLIT_BY_INPUTS:
        reads, gives = _BESIDE_INPUTS if around in SPLIT_BY_INPUTS else _BESIDE_OUTPUTS
        how = {"lora_A": f"{reads!r}, beside {around!r}", "lora_B": f"{gives!r}, beside {around!r}"}.get(
            owner.rpartition(".")[2],
            f"{around} splits the module around it; {reads!r} if it reads the same input, as lora_A does, or {gives!r} "
            f"if it makes a term of the same output, as lora_B does",
        )
    elif is_linear:
        how = (
            "'colwise' or 'rowwise' where tp splits it by outputs or by inputs, 'replicated' where it is whole beside "
            "what is split, or 'whole' where all ranks compute the same"
        )
    else:
        alike = "'whole' where all ranks compute the same"
        how = f"'head-norm' where a rank computes with its own heads or columns, or {alike}"
    return f"{what}say {owner!r}: {how}"


def list_unknown_styles(plan: Plan, tensor: Collection[str], context: Collection[str]) -> list[str]:
    """A line for each style of a plan that is none of these names."""
    return [*_list_unknown("tensor", plan.tensor, tensor), *_list_unknown("context", plan.context, context)]


def check_context_styles(styles: Mapping[str, str], known: Collection[str]) -> None:
    """InvalidConfig with a line for each style of context parallelism that is none of the `known` names."""
    if problems := [*_list_unknown("context", styles, known)]:
        raise InvalidConfig(problems)


def _list_unknown(field: str, styles: Mapping[str, str], known: Collection[str]) -> Iterator[str]:
    """A refusal for each style of a field of a plan that is no known one."""
    for pattern, style in styles.items():
        if style not in known:
            asked = str(style).lower().removesuffix("parallel")  # torch's classes are ColwiseParallel, …
            alike = {each: difflib.SequenceMatcher(None, asked, each).ratio() for each in known}
            near = max(alike, key=alike.__getitem__)
            names = sorted(known, key=lambda each: (-alike[each], each))
            is_near = alike[near] >= _NEAR
            advice = f"did you mean {near!r}?" if is_near else f"use one of {', '.join(map(repr, names))}"
            yield f"plan.{field}[{pattern!r}]: the style {style!r} is unknown; {advice}"


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
