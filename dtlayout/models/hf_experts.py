"""Keys of a config.json about experts: fields of `Experts` out of them, and back. No torch.

`Family.experts` says which key has which field. Most keys hold the field itself; others have a `Conversion`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import shorten
from dtlayout.models.family import Family
from dtlayout.spec.model_shape import Experts


@dataclass(frozen=True)
class Conversion:
    """A key of config.json that holds something else than the field it stands for."""

    read: Callable[[Mapping[str, Any]], Any]
    """Function from a config.json with the family's defaults to the field; InvalidConfig if it has none."""
    write: Callable[[Experts], dict[str, Any]]
    """Function from experts to the keys that say the field."""
    beside: tuple[str, ...] = ()
    """Other keys that it reads."""


def _count_dense_layers(config: Mapping[str, Any]) -> int:
    listed = config["mlp_only_layers"] or []
    if not isinstance(listed, list) or listed != [*range(len(listed))]:
        found = shorten(repr(listed))
        raise InvalidConfig(f"mlp_only_layers={found} is not known; it must have the first blocks, as [0, 1], or none")
    return len(listed)


def _read_balance_loss(config: Mapping[str, Any]) -> Any:
    is_added = config["output_router_logits"]
    if not isinstance(is_added, bool):
        raise InvalidConfig(f"output_router_logits={shorten(repr(is_added))} must be true or false")
    return config["router_aux_loss_coef"] if is_added else 0.0


def _write_balance_loss(experts: Experts) -> dict[str, Any]:
    loss = experts.balance_loss
    return {"output_router_logits": True, "router_aux_loss_coef": loss} if loss else {"output_router_logits": False}


def _read_shared_width(config: Mapping[str, Any]) -> int:
    number, width = config["n_shared_experts"] or 0, config["moe_intermediate_size"]
    if type(number) is not int or type(width) is not int:
        raise InvalidConfig(f"n_shared_experts={shorten(repr(number))} of moe_intermediate_size={width} is no width")
    return number * width


_CONVERSIONS = {
    "mlp_only_layers": Conversion(
        _count_dense_layers, lambda experts: {"mlp_only_layers": [*range(experts.dense_layers)]}
    ),
    "router_aux_loss_coef": Conversion(_read_balance_loss, _write_balance_loss, ("output_router_logits",)),
    "n_shared_experts": Conversion(
        _read_shared_width, lambda experts: {"n_shared_experts": experts.shared_ffn_size // experts.ffn_size}
    ),
}
"""Key → what it means. `transformers` adds the loss of balance only where it is to put out the router's logits."""


def list_expert_keys(family: Family) -> set[str]:
    """Keys of config.json that are read for a family's experts; none if it has no experts."""
    keys = set(family.experts.values())
    return keys | {other for key in keys & _CONVERSIONS.keys() for other in _CONVERSIONS[key].beside}


def read_experts(config: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    """Fields of `Experts` that a config.json says, with the family's defaults, and problems with its keys."""
    given, values, problems = {**family.defaults, **config}, {}, []
    for field, key in family.experts.items():
        if key not in given or (given[key] is None and key not in _CONVERSIONS):
            problems.append(f"{key} is missing{': it is null' * (key in config)}")
            continue
        try:
            values[field] = _CONVERSIONS[key].read(given) if key in _CONVERSIONS else given[key]
        except InvalidConfig as error:
            problems += error.problems
    return values, problems


def write_experts(experts: Experts, family: Family) -> dict[str, Any]:
    """Keys of config.json for a family's experts."""
    table: dict[str, Any] = {}
    for field, key in family.experts.items():
        table |= _CONVERSIONS[key].write(experts) if key in _CONVERSIONS else {key: getattr(experts, field)}
    return table
