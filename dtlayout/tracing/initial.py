"""Initial values by a family's own rule: what its code does to each parameter of a model without memory.

The model is built on the meta device and its `initialize_weights` runs there. Every operator that changes a parameter
is noted, its numbers included: normal with a mean and a deviation, uniform between two bounds, a constant. A rule that
goes over the parameters of a whole block, as GPT-2's does, is thus read like any other. `plans/init.py` computes the
values of any part of a parameter from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import first_line
from dtlayout.tracing.building import build_model
from dtlayout.tracing.parts import find_parts
from dtlayout.tracing.record import list_tensors
from dtlayout.tracing.stage import read_config

_MADE = {
    "zeros": ("constant", ()), "ones": ("constant", ()), "full": ("constant", ("fill_value",)),
    "normal": ("normal", ("mean", "std")), "randn": ("normal", ()), "rand": ("uniform", ()),
}  # fmt: skip
"""Operator that makes a tensor → kind of its values, and the arguments that are their numbers."""
_CHANGED = {
    "zero_": ("constant", ()), "fill_": ("constant", ("value",)), "normal_": ("normal", ("mean", "std")),
    "uniform_": ("uniform", ("from", "to")),
}  # fmt: skip
"""Operator that changes a tensor in place → the same."""
_USUAL = {"zeros": (0.0,), "zero_": (0.0,), "ones": (1.0,), "randn": (0.0, 1.0), "rand": (0.0, 1.0)}
"""Operator without arguments of that kind → its numbers."""


@dataclass(frozen=True)
class Draw:
    """Values that some elements of a parameter get."""

    kind: str
    """constant, normal or uniform."""
    numbers: tuple[float, ...]
    """The constant; mean and standard deviation; or the two bounds."""
    first: int
    """First of its elements, which are counted in the order of memory."""
    end: int
    """Element after the last one."""


InitialRule = tuple[Draw, ...]
"""Draws into a parameter, one after the other. The first one is for all of its elements."""


@lru_cache(maxsize=8)
def find_rules(trace: str) -> tuple[Mapping[str, InitialRule], str]:
    """Our name of each parameter of a traced model → the family's rule; empty, and a reason, where one is not known."""
    try:
        return read_rules(read_config(trace)), ""
    except InvalidConfig as error:
        return {}, "; ".join(error.problems)


def describe_rules(trace: str) -> str:
    """A line about the rule by which a traced model's initial weights are drawn."""
    reason = find_rules(trace)[1]
    if not reason:
        return f"initial weights by the rule of {read_config(trace).model_type}"
    return f"note: initial weights by the rule of described models, since the family's own is not known: {reason}"


def read_rules(config: Any) -> dict[str, InitialRule]:
    """Our name of each parameter of a `PretrainedConfig`'s causal model → the family's rule.

    InvalidConfig with a reason of one line if a parameter gets other values than constants and draws.
    """
    with _Watch() as watch:
        model = build_model(config, torch.float32)
        _initialize(model)
    parts = find_parts(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    return {parts.from_family(name): watch.read(name, parameter) for name, parameter in named.items()}


def _initialize(model: Any) -> None:
    """The family's own initialisation; a tied head has a weight of its own meanwhile, as on other devices."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    weight = head.weight
    if is_tied := weight is table.weight:
        head.weight = nn.Parameter(torch.empty_like(weight))
    try:
        model.initialize_weights()
    except Exception as error:  # whatever a family's own code raises
        raise InvalidConfig(f"{type(model).__name__} is not initialised without memory: {first_line(error)}") from None
    finally:
        if is_tied:
            head.weight = weight


class _Watch(TorchDispatchMode):
    """Notes what is drawn into each tensor that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self._rules: dict[int, list[Draw]] = {}
        self._unknown: dict[int, str] = {}
        self._kept: list[Any] = []

    def read(self, name: str, parameter: Tensor) -> InitialRule:
        """The rule of a parameter; InvalidConfig if it is none."""
        number = _number(parameter)
        rule, reason = self._rules.get(number, []), self._unknown.get(number, "")
        if not reason and not rule:
            reason = "nothing is drawn into it"
        if not parameter.is_contiguous() or parameter.dim() == 0 or parameter.numel() != _count(parameter):
            reason = "it is no whole tensor with dimensions"
        if reason:
            raise InvalidConfig(f"{name}: {reason}")
        return tuple(rule)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        changes = function._schema.is_mutable
        for tensor in list_tensors(result):
            if changes or _number(tensor) not in self._rules:
                self._note(name, (_CHANGED if changes else _MADE).get(name), tensor, _read(function, args, kwargs))
        return result

    def _note(self, name: str, known: tuple[str, tuple[str, ...]] | None, tensor: Tensor, given: Any) -> None:
        number, whole = _number(tensor), _count(tensor)
        rule = self._rules.setdefault(number, [])
        self._kept.append(tensor.untyped_storage())  # one that is freed would lend its number
        first, size = int(tensor.storage_offset()), tensor.numel()
        is_whole = size == whole
        if known is None or not (is_whole or (tensor.is_contiguous() and rule)):
            if not name.startswith("empty"):
                self._unknown[number] = f"{name} is no draw"
            return
        kind, keys = known
        numbers = tuple(given[key] for key in keys) or _USUAL[name]
        if is_whole:
            rule.clear()
            self._unknown.pop(number, None)
        rule.append(Draw(kind, tuple(map(float, numbers)), first, first + size))


def _number(tensor: Tensor) -> int:
    """A number of the memory that a tensor shows."""
    return int(tensor.untyped_storage()._cdata)


def _count(tensor: Tensor) -> int:
    """Elements of the memory that a tensor shows."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _read(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an operator by their names, defaults included."""
    named = {each.name: each.default_value for each in function._schema.arguments if each.has_default_value()}
    return (
        named
        | {each.name: value for each, value in zip(function._schema.arguments, args, strict=False)}
        | (kwargs or {})
    )
