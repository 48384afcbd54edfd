"""Options of another program: the table that says them in our words, in both directions, and their reader.

A row of a table serves both ways: the program's writer takes its value from a job, its reader puts the value of a file.
What several options say together is code of that program. Each option of a file is asked for once; an option that
nobody asks for is about a subject that changes no prediction, or is not understood.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dtlayout.base.formatting import shorten
from dtlayout.programs.program import Job
from dtlayout.programs.shell.script import Unknown
from dtlayout.programs.understood import Row, Understood


def positive(value: Any) -> int:
    """A whole number above 0; ValueError for another value."""
    if (number := whole(value)) < 1:
        raise ValueError(value)
    return number


def whole(value: Any) -> int:
    """A whole number, also one that is written 1e3; ValueError for another value."""
    if isinstance(value, bool) or (number := float(value)) != int(number):
        raise ValueError(value)
    return int(number)


def real(value: Any) -> float:
    """A number; ValueError for another value."""
    if isinstance(value, bool):
        raise ValueError(value)
    return float(value)


def string(value: Any) -> str:
    """A string; ValueError for another value."""
    if not isinstance(value, str):
        raise ValueError(value)
    return str(value)


def several(value: Any) -> list[str]:
    """Words, in a list or between commas; ValueError for another value."""
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(value)
    return [str(word).strip() for word in words if word]


def yes(value: Any) -> bool:
    """A truth value, also as a word; ValueError for another value."""
    words = {"true": True, "false": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


KINDS: Mapping[Any, str] = {
    positive: "whole number above 0", whole: "whole number", real: "number", string: "word", several: "list of words",
    yes: "true or false",
}  # fmt: skip
"""Function that reads a value → description of such values."""


def ask_for(name: str, value: Unknown) -> str:
    """A problem: the value of an option, which the file alone does not say, and how to say it."""
    how = f"--given {value.variable}=VALUE says it" if value.variable else "write its value there"
    return f"{name} is {value}, {value.reason}: {how}"


class Option(NamedTuple):
    """An option that is one of our keys."""

    name: str
    """The program's name of it."""
    section: str
    """Section of our config: batch, layout, precision, kernels or optimizer."""
    key: str
    """Key of that section."""
    kind: Callable[[Any], Any]
    """Function of `KINDS` that reads its value."""
    default: Any = None
    """Value in our words where the file has no such option; None where ours stands."""
    words: Mapping[Any, Any] = {}
    """The program's value → ours; values are the same where it is empty. Of several for one of ours, the first is
    written."""


def write_options(table: Iterable[Option], job: Job) -> dict[str, Any]:
    """Option → value of a job, for the rows of a table; those whose value the program has no word for are left out."""
    found: dict[str, Any] = {}
    for option in table:
        value = _of_job(job, option)
        if value is None:
            continue
        theirs = {ours: each for each, ours in reversed(list(option.words.items()))}
        if not option.words:
            found[option.name] = value
        elif value in theirs:
            found[option.name] = theirs[value]
    return found


def _of_job(job: Job, option: Option) -> Any:
    scenario = job.scenario
    sections = {
        "batch": scenario.batch, "layout": job.layout, "precision": scenario.precision,
        "kernels": job.estimate.kernels, "optimizer": scenario.optimizer, "model": scenario.model,
    }  # fmt: skip
    return getattr(sections[option.section], option.key, None)


class OptionReader:
    """Reads options of a file into what is understood of it."""

    def __init__(self, found: Understood, options: Mapping[str, Any]):
        self.found, self.options = found, options
        found.values = options
        self.used: set[str] = set()

    def call(self, name: str) -> str:
        """The name of an option as the file has it, or would have it."""
        return name

    def list_names(self, name: str) -> Sequence[str]:
        """The file's own names that an option comes from, each of which has a row."""
        return (name,)

    def has(self, name: str) -> bool:
        """True if the file has the option, which is then used; null stands for none."""
        if name in self.options:
            self.used.add(name)
        return self.options.get(name) is not None

    def one(self, name: str) -> Any:
        """The value of an option that is there; None if it is not known, which is a problem then."""
        return self.known(name, self.options[name])

    def known(self, name: str, value: Any) -> Any:
        """A value of an option; None if the file alone does not say it, which is a problem then."""
        if isinstance(value, Unknown):
            self.found.problems.append(ask_for(self.call(name), value))
            return None
        return value

    def value(self, name: str, kind: Callable[[Any], Any]) -> Any:
        """The option's value; None where it is not there, not known or of another kind, which is a problem then."""
        if not self.has(name) or (value := self.one(name)) is None:
            return None
        try:
            return kind(value)
        except (ValueError, TypeError, OverflowError):
            self.found.problems.append(f"{self.call(name)}={value} is no {KINDS[kind]}")
            return None

    def choice(self, name: str, words: Mapping[Any, Any], kind: Callable[[Any], Any] = string) -> Any:
        """Our word for the option's value; None where it is not there, or has none, which is a problem then."""
        value = self.value(name, kind)
        if value is None or value in words:
            return words.get(value)
        known = " or ".join(map(str, words))
        self.found.problems.append(f"{self.call(name)}={value} is nothing that is known here; use {known}")
        return None

    def show(self, name: str) -> str:
        """The option as the file has it, cut to a line."""
        value = self.options[name]
        words = {True: "true", False: "false", None: "null"}
        is_word = value is None or isinstance(value, bool)
        return f"{name} = {words[value] if is_word else shorten(str(value), 80)}"

    def show_if_there(self, name: str) -> str:
        """The option as the file has it; its name alone where it is not there."""
        return self.show(name) if name in self.options else name

    def put(self, section: str, key: str, name: str, kind: Callable[[Any], Any]) -> Any:
        """Note an option that is one of our keys; None where it is not there."""
        value = self.value(name, kind)
        if value is not None:
            self.found.put(section, {key: value}, self.show(name))
        return value

    def read_table(self, table: Iterable[Option]) -> None:
        """Note each option of a table, or the program's default of it."""
        for option in table:
            read = self.choice(option.name, option.words, option.kind) if option.words else None
            value = read if option.words else self.value(option.name, option.kind)
            if value is not None:
                self.found.put(option.section, {option.key: value}, self.show(option.name))
            elif option.default is not None and self.options.get(option.name) is None:
                self.assume(option.section, {option.key: option.default}, option.name, "its default")

    def put_or_default(self, section: str, values: Mapping[str, Any], name: str, default: str, shown: str = "") -> None:
        """Note what an option says, or that its default stands where the file does not have it."""
        said = self.options.get(name) is not None
        shown = shown or (self.show(name) if said else name)
        self.found.put(section, values, shown, "read" if said else "assumed", "" if said else default)

    def assume(self, section: str, values: Mapping[str, Any], what: str, note: str) -> None:
        """Note what the file does not say."""
        self.found.put(section, values, what, "assumed", note)

    def tell(self, name: str, value: str, option: str, note: str = "") -> None:
        """Note a setting of the engine, which --engine-set takes, and the option that says it; empty for a default."""
        self.found.told[name] = value
        self.found.rows.append(Row(option, f"engine {name}={value}", "read" if option else "assumed", note))

    def read_rest(self, ignored: Mapping[str, str], otherwise: str = "") -> None:
        """Note the options that nobody has asked for, and those that were asked for and have no row.

        `ignored` has a pattern of names for each subject that changes no prediction; `otherwise` is one for options
        that are predicted as if they were not there.
        """
        shown = {name for row in self.found.rows for name in row.option.replace(",", " ").split()}
        for name in self.options:
            if name not in self.used:
                self._read_other(name, ignored, otherwise)
            elif not shown.issuperset(self.list_names(name)):
                self.found.ignore(self.show(name), "as predicted", "read")

    def _read_other(self, name: str, ignored: Mapping[str, str], otherwise: str) -> None:
        what = next((what for what, names in ignored.items() if re.fullmatch(names, name)), None)
        if not self.list_names(name):
            return  # assumed, with no name in the file
        if what is not None:
            self.found.ignore(self.show(name), f"about {what}")
        elif otherwise and re.fullmatch(otherwise, name):
            self.found.ignore(self.show(name), "predicted as if it were not there", "assumed")
        elif self.options[name] is None:
            self.found.ignore(self.show(name), "null stands for the default", "no effect")
        else:
            self.found.problems.append(
                f"{self.call(name)} is not understood here; without it the rest can be predicted"
            )
