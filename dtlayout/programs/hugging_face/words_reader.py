"""Reader of options that several programs have under names of their own: it is asked by one name of each.

Files that a file names are read beside it. Nothing is run.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.files.trees import read_tree
from dtlayout.programs.options import OptionReader
from dtlayout.programs.shell.script import Unknown
from dtlayout.programs.understood import OtherFile, Understood

_FOLDERS_ABOVE = 4
"""Folders above a file in which a path that it names may begin."""

Names = Mapping[str, tuple[str, ...]]
"""Name by which a reader is asked → names of the option in a file, the usual one first."""


class WordsReader(OptionReader):
    """Reads options that are asked for by the names of `names`; an option that is not there is under its own name."""

    def __init__(self, found: Understood, options: Mapping[str, Any], names: Names):
        super().__init__(found, options)
        self.names = names
        for known in names.values():
            first, *others = [each for each in known if options.get(each) is not None] or [""]
            for each in others:
                self.used.add(each)
                found.ignore(self.show(each), f"{first} says it", "no effect")

    def own(self, name: str) -> str:
        """The option's name in this file; its usual one where the file has none of them."""
        known = self.names.get(name, (name,))
        return next((each for each in known if self.options.get(each) is not None), known[0])

    def says(self, name: str) -> bool:
        """True if the file has the option, which is then used; null stands for none."""
        for each in self.names.get(name, (name,)):
            self.has(each)
        return self.options.get(self.own(name)) is not None

    def ask(self, name: str, kind: Callable[[Any], Any]) -> Any:
        """The option's value, as `value` has it."""
        return self.value(self.own(name), kind) if self.says(name) else None

    def select(self, name: str, words: Mapping[Any, Any]) -> Any:
        """Our word for the option's value, as `choice` has it; letters may be large or small."""
        if not self.says(name):
            return None
        own = self.own(name)
        value = self.one(own)
        if isinstance(value, str) and value.lower() in words:
            value = value.lower()
        if value is None or (isinstance(value, str | bool | int) and value in words):
            return words.get(value)
        known = " or ".join(map(_show, words))
        self.found.problems.append(f"{own}={_show(value)} is nothing that is known here; use {known}")
        return None

    def shown(self, name: str) -> str:
        """The option as the file has it; its usual name where it is not there."""
        own = self.own(name)
        return self.show(own) if self.options.get(own) is not None else own

    def need(self, name: str, off: Collection[Any], why: str) -> None:
        """Take an option that has to be off; another value is a problem, which says why."""
        if self.says(name) and (value := self.one(self.own(name))) is not None and _plain(value) not in off:
            self.found.problems.append(f"{self.own(name)}={_show(value)}: {why}")


def _plain(value: Any) -> Any:
    words = {"true": True, "false": False, "none": "none", "null": "none"}
    return words.get(value.lower(), value) if isinstance(value, str) else value


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_beside(path: Any, file: OtherFile, what: str) -> tuple[Path, Mapping[str, Any]]:
    """Path and values of a file that another one names, beside that, in a folder above it, or from here.

    InvalidConfig if it is not there, or is no table of names.
    """
    if isinstance(path, Unknown):
        raise InvalidConfig(f"{what} is {path}, {path.reason}: --given {path.variable}=FILE says it")
    folder, name = file.path.parent, str(path)
    above = list(folder.resolve().parents)[:_FOLDERS_ABOVE]
    for place in (folder / name, *(each / name for each in above), Path(name), folder / Path(name).name):
        if not place.is_file():
            continue
        try:
            tree = read_tree(place.read_text(encoding="utf-8"), file.given)
        except (OSError, ValueError):
            tree = None
        if tree is None:
            raise InvalidConfig(f"{what} {path} is no file of names and values")
        return place, tree.values
    raise InvalidConfig(f"{what} {path} is not there, beside the file; put it there, or write its values in its place")


def flatten(tables: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Dotted name → value of nested tables; a table without keys is a value.

    >>> flatten({"bf16": {"enabled": True}, "steps": 3}, "deepspeed.")
    {'deepspeed.bf16.enabled': True, 'deepspeed.steps': 3}
    """
    found: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping) and value:
            found |= flatten(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value
    return found


def join_patterns(*tables: Mapping[str, str]) -> dict[str, str]:
    """Tables of subjects and patterns as one; a subject of several has all of their names.

    >>> join_patterns({"logs": "a"}, {"logs": "b", "data": "c"})
    {'logs': 'a|b', 'data': 'c'}
    """
    found: dict[str, str] = {}
    for table in tables:
        for what, names in table.items():
            found[what] = f"{found[what]}|{names}" if what in found else names
    return found
