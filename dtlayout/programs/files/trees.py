"""Trees: files of nested tables in YAML, JSON or TOML, as values by dotted names; and the same files with changes.

A change touches the text of its own value alone: comments, order, quotes and indentation stay.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.shell.script import Unknown

_MOST_VALUES = 20_000
"""Most values of a file; a few aliases of aliases would be billions."""
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_FUNCTIONS: Mapping[str, Callable[[int, int], int]] = {
    "multiply": lambda one, other: one * other, "add": lambda one, other: one + other,
    "int_div": lambda one, other: one // other, "divide_floor": lambda one, other: one // other,
    "divide_ceil": lambda one, other: -(-one // other),
}  # fmt: skip
"""Functions in references that NeMo and its launcher know."""


@dataclass(frozen=True)
class Tree:
    """A file of nested tables."""

    text: str
    """Text of the file."""
    language: Literal["yaml", "toml"]
    """Language of the text; JSON is YAML."""
    values: Mapping[str, Any]
    """Dotted name → value; a list is one value, and so is a table without keys. Words in place of a reference that the
    file alone does not say are `Unknown`."""

    def edit(self, changes: Mapping[str, Any]) -> str:
        """The text with other values by dotted name; None takes a value out.

        InvalidConfig where the text cannot say them without a change of something else.
        """
        before, wanted = _flatten(_load(self.text, self.language)), dict(_flatten(_load(self.text, self.language)))
        for name, value in changes.items():
            wanted.pop(name, None)
            if value is not None:
                wanted[name] = value
        text = self.text
        for name, value in changes.items():
            if value is not None or name in before:
                change = _change_toml if self.language == "toml" else _change_yaml
                text = change(text, name.split("."), value)
        after = {name: value for name, value in _flatten(_load(text, self.language)).items() if value != {}}
        if after != {name: value for name, value in wanted.items() if value != {}}:
            raise InvalidConfig(f"{', '.join(changes)} cannot be changed without a change of something else")
        return text


def read_tree(text: str, given: Mapping[str, str], beside: Mapping[str, Any] | None = None) -> Tree | None:
    """The tree of a text; None for a text that is no table of names.

    `given` are values of variables in its references, such as ${oc.env:NODES}; `beside` are values of another file, by
    their dotted names, which its references may name too.
    """
    for language in ("toml", "yaml"):
        try:
            tables = _load(text, language)
        except InvalidConfig:
            continue
        values = _flatten(tables)
        return Tree(text, language, _resolve(values, given, beside or {}) if language == "yaml" else values)
    return None


def _load(text: str, language: str) -> Mapping[str, Any]:
    """The tables of a text; InvalidConfig if it is none in that language."""
    if len(text) > 1_000_000:
        raise InvalidConfig("a file of more than a megabyte is no config")
    try:
        tables = toml.loads(text) if language == "toml" else _load_yaml(text)
    except ValueError as error:
        raise InvalidConfig(f"no {language}: {error}") from None
    if not isinstance(tables, Mapping) or not tables or not all(isinstance(key, str) for key in tables):
        raise InvalidConfig(f"no {language} with names")
    return tables


def _load_yaml(text: str) -> Any:
    from dtlayout.programs.files.yaml_files import (
        load,  # only now: a config of ours is TOML, and YAML takes time to import
    )

    return load(text)


def _flatten(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted name → value; InvalidConfig for too many of them."""
    found: dict[str, Any] = {}
    for name, value in _walk(tables, ""):
        found[name] = value
        if len(found) > _MOST_VALUES:
            raise InvalidConfig(f"a file with more than {_MOST_VALUES:,} values is no config")
    return found


def _walk(tables: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, Mapping) and value:
            yield from _walk(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


# References of OmegaConf, in YAML


def _resolve(values: Mapping[str, Any], given: Mapping[str, str], beside: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with those in the place of references such as ${model.hidden_size} that they name."""
    known = {**beside, **values}

    def find(name: str, inside: str, depth: int) -> Any:
        if name in given:
            return _load_yaml(given[name])
        function, colon, rest = name.partition(":")
        if colon and function == "oc.env":
            variable, comma, default = rest.partition(",")
            if variable in given:
                return _load_yaml(given[variable])
            what = f"the variable {variable} of its surroundings"
            return _load_yaml(default) if comma else Unknown(f"${{{name}}}", variable, what)
        if (value := _compute(function, rest)) is not None:
            return value
        dots = len(name) - len(name.lstrip("."))
        parents = inside.split(".")[:-dots] if dots else []
        target = ".".join([*parents, name.lstrip(".")])
        if colon or target not in known or depth > 20:
            return Unknown(f"${{{name}}}", name, "said by no line of the file")
        return fill(known[target], target, depth + 1)

    def fill(value: Any, inside: str, depth: int) -> Any:
        if isinstance(value, list):
            return [fill(each, inside, depth) for each in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        if (whole := _REFERENCE.fullmatch(value.strip())) is not None:
            return find(whole[1], inside, depth)
        parts = {match[0]: find(match[1], inside, depth) for match in _REFERENCE.finditer(value)}
        unknown = next((each for each in parts.values() if isinstance(each, Unknown)), None)
        if unknown is not None or not parts:
            return Unknown(value, unknown.variable if unknown else "", unknown.reason if unknown else "nested")
        text = _REFERENCE.sub(lambda match: str(parts[match[0]]), value)
        return fill(text, inside, depth + 1) if "${" in text and depth <= 20 else text

    return {name: fill(value, name, 0) for name, value in values.items()}


def _compute(function: str, rest: str) -> Any:
    """The value of ${multiply:4, 8} and its like; None for what is no such function of whole numbers."""
    try:
        one, other = (int(word) for word in rest.split(","))
        return _FUNCTIONS[function](one, other)
    except (KeyError, ValueError, ZeroDivisionError):
        return None


# Changes


def _change_toml(text: str, path: list[str], value: Any) -> str:
    import tomlkit  # only now: most files are only read

    document = tomlkit.parse(text)
    table: Any = document
    for key in path[:-1]:
        if key not in table:
            table[key] = tomlkit.table()
        table = table[key]
    if value is None:
        del table[path[-1]]
    else:
        table[path[-1]] = value
    return tomlkit.dumps(document)


def _change_yaml(text: str, path: list[str], value: Any) -> str:
    from dtlayout.programs.files.yaml_files import change  # only now, as above

    return change(text, path, value)
