"""Windows of a config.json: how many tokens, and in which share of the blocks. No torch."""

from collections.abc import Mapping
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import shorten
from dtlayout.models.family import WindowRule

WINDOW = "sliding_window"
"""Key of config.json with the tokens of a window."""
_KINDS = ("full_attention", "sliding_attention")


def list_window_keys(rule: WindowRule | None) -> set[str]:
    """Keys that the windows of a family are read from."""
    return set() if rule is None else {WINDOW, "layer_types", rule.period_key, rule.switch} - {""}


def read_windows(config: Mapping[str, Any], rule: WindowRule | None) -> dict[str, Any]:
    """Fields of `ModelShape` about windows, from a config.json with its family's defaults.

    InvalidConfig where blocks attend otherwise than to all earlier tokens or to a window of them.
    """
    kinds, num_layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is not None:
        _check_kinds(kinds, num_layers, rule)
    window = config.get(WINDOW) if rule is not None else None
    if rule is None or not window or not isinstance(num_layers, int):
        return {}
    if rule.switch and not config.get(rule.switch):
        return {}
    if kinds is not None and rule.is_listed:
        number = kinds.count("sliding_attention")
    elif rule.switch:
        raise InvalidConfig(f"{rule.switch}=true is not known without layer_types; list the kind of each block there")
    else:
        number = num_layers - _count_full(config, rule, num_layers)
    return {"window": window, "window_share": number / num_layers} if number else {}


def _check_kinds(kinds: Any, num_layers: Any, rule: WindowRule | None) -> None:
    found = shorten(repr(kinds), 60)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise InvalidConfig(f"layer_types={found} must name each of num_hidden_layers={num_layers} blocks")
    known = _KINDS if rule is not None and rule.is_listed else _KINDS[:1]
    if other := [each for each in kinds if each not in known]:
        raise InvalidConfig(f"layer_types names {other[0]!r}; {' and '.join(known)} alone {_be(known)} known")


def _be(names: tuple[str, ...]) -> str:
    return "is" if len(names) == 1 else "are"


def _count_full(config: Mapping[str, Any], rule: WindowRule, num_layers: int) -> int:
    """Blocks that attend to all earlier tokens, where no list says them."""
    period, full = rule.period, rule.full
    if rule.period_key and (given := config.get(rule.period_key)) is not None:
        if type(given) is not int or given < 1:
            found = shorten(repr(given))
            raise InvalidConfig(f"{rule.period_key}={found} is not known without layer_types; use a whole number")
        period, full = given, given - 1
    return len(range(full, num_layers, period)) if period else 0
