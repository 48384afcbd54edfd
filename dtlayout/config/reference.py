"""Reference of the config: type, default, rule and meaning of each key.

All is read off the dataclasses of the sections, so no page is written by hand: `dtlayout config` prints the text of
docs/reference/config.md. The meaning of a key is the string below its field.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dtlayout.base import toml
from dtlayout.base.validators import Ranged
from dtlayout.config.config import Config
from dtlayout.spec.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class Key:
    """One key of a section."""

    name: str
    type: str
    """Type of the values, in words."""
    default: str | None
    """Default, written as in TOML. Empty: a key that is left out has no value. None: the key is needed."""
    rule: str
    """Rule for values; empty where the type or the meaning says everything."""
    meaning: str


@dataclass(frozen=True)
class Section:
    """A table of the file, or one of a list of tables."""

    title: str
    """Heading of the table, as in the file."""
    meaning: str
    keys: tuple[Key, ...]

    @property
    def name(self) -> str:
        """Path of the table, as overrides name it."""
        return self.title.strip("[").partition("]")[0]

    def describe(self) -> Iterator[str]:
        """Lines of Markdown, which a terminal shows as well."""
        yield f"## {self.title}"
        yield ""
        yield from textwrap.wrap(self.meaning, 118)
        yield ""
        for key in self.keys:
            default = "needed" if key.default is None else f"`{key.default}` by default" if key.default else ""
            facts = ", ".join(filter(None, [key.type, default, key.rule]))
            text = f"`{key.name}`: {facts}. {key.meaning}".rstrip()
            yield from textwrap.wrap(
                text, 118, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
            )


def list_sections() -> list[Section]:
    """Every table that a config may have, in the order of `Config`; of [optimizer] one for each optimizer."""
    found: list[Section] = []
    for name, of in get_type_hints(Config).items():
        if name == "optimizer":
            found += [_describe(f'[optimizer] with name = "{each}"', kind) for each, kind in OPTIMIZERS.items()]
        else:
            found += _list_tables(name, of)
    return found


def _list_tables(name: str, of: type, brackets: str = "[{}]") -> Iterator[Section]:
    """The table of a dataclass, then those that its keys hold."""
    yield _describe(brackets.format(name), of)
    for key, hint in get_type_hints(of).items():
        for inner in (each for each in get_args(hint) if isinstance(each, type) and is_dataclass(each)):
            where = inner.section if issubclass(inner, Ranged) else f"{name}.{key}"  # [adapter] is no [model.adapter]
            yield from _list_tables(where, inner, "[[{}]]" if get_origin(hint) is tuple else "[{}]")


def _describe(title: str, of: type) -> Section:
    hints = get_type_hints(of)
    keys = [
        Key(
            name=f.name, type=toml.describe_type(hints[f.name]), default=_show_default(f),
            rule=_find_rule(f, hints[f.name]), meaning=find_meaning(of, f.name),
        )
        for f in fields(of)
    ]  # fmt: skip
    return Section(title, inspect.cleandoc(of.__doc__ or ""), tuple(keys))


def _show_default(f: "Field[Any]") -> str | None:
    if f.default is MISSING:
        return None if f.default_factory is MISSING else ""
    return toml.dumps({"key": f.default}).partition(" = ")[2].strip()


def _find_rule(f: "Field[Any]", hint: Any) -> str:
    choices: Any = get_args(hint) if get_origin(hint) is Literal else f.metadata.get("choices", ())
    known = choices() if callable(choices) else choices
    which = "some of" if get_origin(hint) is tuple else "one of"
    names = [str(each) or '`""`' for each in known]
    return f"{which} {', '.join(names)}" if known else str(f.metadata.get("rule", ""))


def find_meaning(of: type, name: str) -> str:
    """Meaning of a dataclass's field: the string below it, or empty if it has none.

    A string that starts with `Class.field`, of the same module and with the same field name, starts with the meaning
    there instead.
    """
    owner = next((each for each in of.__mro__ if name in _read_sentences(each)), None)
    if owner is None:
        return ""
    text = _read_sentences(owner)[name]
    if other := re.match(rf"`([A-Z]\w*)\.{name}`", text):
        kind = getattr(sys.modules[owner.__module__], other[1])
        text = find_meaning(kind, name).removesuffix(".") + text[other.end() :]
    return text


@cache
def _read_sentences(of: type) -> dict[str, str]:
    """Field → the string below it, of the fields that a class itself declares."""
    try:
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(of))).body
    except (OSError, TypeError):  # no source: built in, or made by a program
        return {}
    assert isinstance(found, ast.ClassDef), "what was asked for is a class"
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(found.body, found.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }  # fmt: skip
