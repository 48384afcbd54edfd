"""TOML in and out: a reader that checks a table against a frozen dataclass, and a writer.

`parse` takes no string for a number and no truth value for a 1. It refuses unknown keys, names the nearest known one,
and reports all problems of a table at once. `read_keys` does the same for keys that are no dataclass.
"""

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.base.files import check_depth, expand
from dtlayout.base.formatting import shorten

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

_WORDS = {
    int: "a whole number", float: "a number", str: "a string", bool: "true or false", Path: "a path", list: "a list",
    tuple: "a list",
}  # fmt: skip
"""Type → description of its values."""
_TOO_LARGE = 1 << 1023
"""Whole numbers from here on are not read as floats: the largest float is below twice this."""
_INNER_ARRAY = re.compile(r"(?<=^    \[)\n((?:        .*,\n)+)    (?=\],$)", re.MULTILINE)
_FLAT_ARRAY = re.compile(r"(?<= = \[)\n((?:    [^\[\n].*,\n)+)(?=\]$)", re.MULTILINE)


def loads(text: str) -> dict[str, Any]:
    """The tables of a TOML document; ValueError if the text is none, or is nested too deep."""
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    check_depth(tables)
    return tables


def dumps(tables: Mapping[str, Any]) -> str:
    """Tables as TOML text, which has no null: a None is left out.

    >>> dumps({"layout": {"tp": 2, "stage_layers": (3, 4), "note": None}})
    '[layout]\\ntp = 2\\nstage_layers = [3, 4]\\n'

    A list of lists has a line for each inner list.
    """
    import tomli_w  # only now: most code that reads TOML writes none

    text = tomli_w.dumps(_without_none(tables))
    for array in (_INNER_ARRAY, _FLAT_ARRAY):
        text = array.sub(lambda found: " ".join(line.strip(" ") for line in found[1].split("\n")).strip(" ,"), text)
    return text


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list | tuple) else value


def read(path: str | Path, what: str) -> dict[str, Any]:
    """The tables of a file; InvalidConfig, with `what` the file should be, if it cannot be read or is no TOML."""
    with problems_of(what):
        path = expand(path)
    try:
        return loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"{what} {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise InvalidConfig(f"{what} {path} is not TOML: {error}") from None


def read_constants(folder: str) -> dict[str, dict[str, Any]]:
    """Name → tables, for each file in a folder of the package's constants."""
    paths = sorted(Path(__file__).parents[1].joinpath("constants", folder).glob("*.toml"))
    return {path.name: read_constant_file(folder, path.name) for path in paths}


def read_constant_file(*parts: str) -> dict[str, Any]:
    """The tables of one file of the package's constants, from its path there."""
    return loads(Path(__file__).parents[1].joinpath("constants", *parts).read_text(encoding="utf-8"))


def parse_value(text: str) -> Any:
    """A value from the command line: TOML, or a string where the text is no TOML."""
    try:
        return loads(f"value = {text}")["value"]
    except ValueError:
        return text


@contextmanager
def problems_of(place: str) -> Iterator[None]:
    """Put `place` in front of each problem that is found inside the block."""
    try:
        yield
    except InvalidConfig as error:
        raise InvalidConfig([f"{place}: {problem}" for problem in error.problems]) from None


def parse(table: Any, into: type[T], name: str = "", /, **given: Any) -> T:
    """The table called `name` as a dataclass; InvalidConfig with every problem, also those that the dataclass finds.

    Fields that are `given` are no keys. Lists become tuples where the field is one, whole numbers become floats. If a
    field's metadata has a "key", that is its name in the file.
    """
    keys = {f.metadata.get("key", f.name): f for f in fields(into) if f.name not in given}  # type: ignore[arg-type]
    hints = get_type_hints(into)
    required = [key for key, f in keys.items() if f.default is MISSING and f.default_factory is MISSING]
    problems: list[str] = []
    values = read_keys(table, {key: hints[f.name] for key, f in keys.items()}, required, name, problems)
    if isinstance(table, dict) and values.keys() == {*required, *keys.keys() & table.keys()}:
        try:
            made = into(**given, **{keys[key].name: value for key, value in values.items()})
        except (InvalidConfig, InvalidLayout) as error:
            problems += error.problems
    if problems:
        raise InvalidConfig(problems)
    return made


def read_keys(
    table: Any, types: Mapping[str, Any], required: Collection[str], name: str, problems: list[str]
) -> dict[str, Any]:
    """The valid values of a table whose keys have these types; `problems` gets the reasons for all others."""
    if not isinstance(table, dict):
        keys = f"with {', '.join(required)}" if required else "and its keys"
        problems.append(f"{name} is a table: write [{name}] {keys} below")
        return {}
    prefix = f"{name}." if name else ""
    problems += [describe_unknown_key(key, types, prefix) for key in table if key not in types]
    problems += [f"{prefix}{key} is missing" for key in required if key not in table]
    values = {}
    for key in [key for key in types if key in table]:
        try:
            values[key] = _convert(table[key], types[key], f"{prefix}{key}")
        except InvalidConfig as error:
            problems += error.problems
    return values


def describe_unknown_key(key: str, known: Collection[str], prefix: str = "") -> str:
    """Reason why a key of a table is refused, with the nearest known key or all of them; `prefix` names the table."""
    import difflib  # only now: most files have no such key

    from dtlayout.base.synonyms import MEANT

    if meant := MEANT.get(f"{prefix}{key}"):
        return f"{prefix}{key} is unknown; did you mean {meant}?"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    advice = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(known)}"
    return f"{prefix}{key} is unknown; {advice}"


def _convert(value: Any, wanted: Any, name: str) -> Any:
    """The value converted to the type of a field; InvalidConfig if it cannot be."""
    origin, args = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return value
    if origin in (Union, UnionType):
        return _convert_union(value, wanted, name)
    if is_dataclass(wanted):
        return wanted.parse(value, name) if hasattr(wanted, "parse") else parse(value, wanted, name)  # type: ignore[arg-type]
    if origin is Literal:
        if any(type(value) is type(each) and value == each for each in args):
            return value
        raise InvalidConfig(f"{name}={shorten(repr(value))} is unknown; use one of {list(args)}")
    kind = origin or wanted
    if kind is dict:
        return _convert_all(value, args[1], name)
    if kind in (list, tuple) and isinstance(value, list | tuple):
        return kind(_convert_all({f"{name}[{i}]": entry for i, entry in enumerate(value)}, args[0], "").values())
    if kind is Path and type(value) is str:
        return expand(value)
    if type(value) is kind or (kind is float and type(value) is int and abs(value) < _TOO_LARGE):
        return kind(value)
    raise InvalidConfig(f"{name}={shorten(repr(value))} must be {_WORDS[kind]}")


def _convert_union(value: Any, wanted: Any, name: str) -> Any:
    """The value converted to the first type of a union; None, or a word of a Literal there, may be in its place."""
    words = _list_words(wanted)
    if value is None or (isinstance(value, str) and value in words):
        return value
    if words and isinstance(value, str):
        raise InvalidConfig(f"{name}={shorten(repr(value))} must be {describe_type(wanted)}")
    return _convert(value, get_args(wanted)[0], name)


def _list_words(union: Any) -> list[Any]:
    """Words of the Literals behind the first type of a union."""
    return [word for each in get_args(union)[1:] if get_origin(each) is Literal for word in get_args(each)]


def describe_type(wanted: Any) -> str:
    """Description of the values of a field of this type."""
    origin, args = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        return " or ".join([describe_type(args[0]), *(f'"{word}"' for word in _list_words(wanted))])
    if origin is Literal:
        return _WORDS[type(args[0])]
    if origin is tuple and is_dataclass(args[0]):
        return "a list of tables"
    return "a table" if is_dataclass(wanted) else _WORDS[origin or wanted]


def _convert_all(table: Any, wanted: Any, name: str) -> dict[str, Any]:
    """All entries of a table with arbitrary keys, each converted to the type `wanted`."""
    problems: list[str] = []
    types = dict.fromkeys(table if isinstance(table, dict) else (), wanted)
    values = read_keys(table, types, (), name, problems)
    if problems:
        raise InvalidConfig(problems)
    return values
