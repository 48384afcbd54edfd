"""Choices that a user fixes, rules out or asks about, as text and as fields of a layout and kernels.

A text is a layout as it is printed, with or without its kernels, or some choices `name=value` as in TOML. A choice that
is fixed must have an effect: `find_idle` says which ones have none.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.base.refusals import show_value
from dtlayout.costmodel.scenario import request_kernels
from dtlayout.planner.space import KERNEL_NAMES, Space
from dtlayout.spec.kernel_table import KERNELS
from dtlayout.spec.kernels import Kernels, OpenKernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.layout_keys import NEEDED_DEGREE
from dtlayout.spec.layout_names import complete_name, describe_unknown_word, is_whole, read_word, split_name

_OFF = Layout()
CHOICES: dict[str, type] = {f.name: type(getattr(_OFF, f.name)) for f in fields(Layout) if f.name != "offload_folder"}
CHOICES |= dict.fromkeys(KERNEL_NAMES, str)
"""Everything that can be fixed or avoided: name → type."""


def parse_choices(text: str) -> dict[str, Any]:
    """The fields of a layout and the kernels that a text names: a layout as it is printed, or `name=value` as in TOML.

    InvalidConfig or InvalidLayout says what would work.

    >>> parse_choices("recompute=full, tp=2"), parse_choices("pp2·dp4 loss linear")
    ({'recompute': 'full', 'tp': 2}, {'pp': 2, 'dp_shard': 4, 'loss': 'linear'})
    """
    found: dict[str, Any] = {}
    words = split_name(text)
    while words:
        word = words.pop(0)
        if word in KERNEL_NAMES and words:  # printed as two words
            choice = {word: words.pop(0)}
        elif word in KERNELS["attention"]:  # printed by its name alone
            choice = {"attention": word}
        else:
            choice = read_word(word.removeprefix("layout.").removeprefix("kernels."))
        for name, value in choice.items():
            _check_choice(name, value)
            check_once(found, name, value)
        if not choice:
            raise describe_unknown_word(word)
        found |= choice
    if not found:
        raise describe_unknown_word(text)
    return complete_name(text, found)


def check_once(found: Mapping[str, Any], name: str, value: Any) -> None:
    """InvalidConfig if another value of `name` was found before."""
    if found.get(name, value) != value:
        raise InvalidConfig(f"{name}={show_value(value)} and {name}={show_value(found[name])}: say one of them")


def _check_choice(name: str, value: Any) -> None:
    if name not in CHOICES:
        raise InvalidConfig(toml.describe_unknown_key(name, CHOICES))
    if type(value) is not CHOICES[name]:
        kinds = {int: "a whole number", bool: "true or false", str: "a word", tuple: "a list such as [3, 3, 2]"}
        raise InvalidConfig(f"{name}={show_value(value)} must be {kinds[CHOICES[name]]}")
    checked: dict[str, Any] = {name: value}
    OpenKernels(**checked) if name in KERNEL_NAMES else Layout(**checked)


def read_fixed(texts: Iterable[str]) -> dict[str, Any]:
    """Name → the only value that several texts allow; InvalidConfig if two contradict each other."""
    fixed: dict[str, Any] = {}
    for text in texts:
        for name, value in parse_choices(text).items():
            check_once(fixed, name, value)
            fixed[name] = value
    return fixed


def read_avoided(texts: Iterable[str], fixed: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Name → values that no layout may have; InvalidConfig if one is fixed, or if a text names a whole layout."""
    avoided: dict[str, list[Any]] = {}
    for text in texts:
        if is_whole(text):
            raise InvalidConfig(
                f"--avoid {text!r} is a whole layout, and each of its values would be ruled out; name the values that "
                f"no layout may have, such as --avoid recompute=full"
            )
        for name, value in parse_choices(text).items():
            if name in fixed and fixed[name] == value:
                choice = f"{name}={show_value(value)}"
                raise InvalidConfig(f"--fix {choice} and --avoid {choice} leave no layout; say one of them")
            avoided.setdefault(name, []).append(value)
    return avoided


def find_idle(space: Space) -> list[str]:
    """One line of advice for each fixed choice that is known to have no effect; an empty list if there is none.

    Two kinds are known. A field of `NEEDED_DEGREE` is not off, and its degree is 1 in all layouts of the space. Or a
    kernel is of an operation that the model lacks. The caller refuses the search with these lines.
    """
    problems = list[str]()
    for name, value in space.fixed.items():
        axis = NEEDED_DEGREE.get(name, "")
        is_off = bool(space.degrees) and all(getattr(each, axis, 0) == 1 for each in space.degrees)
        if is_off and value != getattr(_OFF, name):
            problems.append(
                f"{name}={show_value(value)} has an effect only where {axis} is above 1, and every layout here has "
                f"{axis}=1; leave it out"
            )
    request = request_kernels(space.scenario, _OFF)
    for operation, known in KERNELS.items():
        usual = getattr(Kernels(), operation)
        value = space.fixed.get(operation, usual)
        if value != usual and not known[value].is_used(request):
            model = space.scenario.model.name
            problems.append(f"{operation}={value} has no effect, since model {model} has no {operation}; leave it out")
    return problems
