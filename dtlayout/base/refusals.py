"""Refusal: a broken rule and what would mend it, in one shape for layouts, kernels, engines and configs.

The owner of a thing lists its rules: functions that return a refusal for each rule that the thing breaks. `describe`
turns refusals into lines for people, and `refuse` raises them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dtlayout.base.errors import InvalidConfig, InvalidLayout

Changes = Mapping[str, Any]
"""Key → its new value."""
MOST_REPAIRS = 3
"""Repairs that a line names."""


class Refusal(NamedTuple):
    """A rule that is broken."""

    rule: str
    """Name of the rule. A change repairs it if no refusal with this name is left afterwards."""
    what: str
    """The asked value and the reason why it cannot be, with numbers."""
    repairs: Iterable[Changes] | str = ""
    """Changes that may repair it, best first, which can be gone through once; or advice in words, "" for none."""


def describe(
    refusals: Sequence[Refusal], find_again: Callable[[Changes], Sequence[Refusal]] = lambda changes: ()
) -> list[str]:
    """A line for each refusal: the reason, then the first repairs that work.

    `find_again` returns the refusals that are left after some changes. A repair works if it ends its own refusal and
    causes no new one.
    """
    return [_describe_one(refusal, refusals, find_again) for refusal in refusals]


def refuse(refusals: Sequence[Refusal], error: type[InvalidConfig | InvalidLayout] = InvalidConfig) -> None:
    """Raise `error` with a line for each refusal; return if there is none."""
    if refusals:
        raise error(describe(refusals))


def show_value(value: Any) -> str:
    """A value as an override on the command line takes it.

    >>> show_value(True), show_value((3, 4)), show_value("full")
    ('true', '[3,4]', 'full')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)).replace(" ", "") if isinstance(value, tuple) else str(value)


def _describe_one(
    refusal: Refusal, refusals: Sequence[Refusal], find_again: Callable[[Changes], Sequence[Refusal]]
) -> str:
    if isinstance(refusal.repairs, str):
        return "; ".join(filter(None, (refusal.what, refusal.repairs)))
    others, works = {each.rule for each in refusals} - {refusal.rule}, list[Changes]()
    for repair in refusal.repairs:
        is_third_of_its_kind = sum(repair.keys() == other.keys() for other in works) == 2
        if {each.rule for each in find_again(repair)} <= others and not is_third_of_its_kind:
            works.append(repair)
        if len(works) == MOST_REPAIRS:
            break
    named = [" with ".join(f"{name}={show_value(value)}" for name, value in repair.items()) for repair in works]
    return f"{refusal.what}; " + (f"use {' or '.join(named)}" if named else "no change of one setting mends it")
