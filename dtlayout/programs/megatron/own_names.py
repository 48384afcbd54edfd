"""Own names: options of Megatron-LM under the names that a tree of another program has for them, in both directions.

A program's table is a list of rules, each a `Naming`. A rule says which options of Megatron-LM the values of its names
stand for, and which values of its names stand for options. Of two rules that say one option, the first has the word.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.megatron.write import MEGATRON
from dtlayout.programs.options import ask_for, yes
from dtlayout.programs.program import Job
from dtlayout.programs.shell.script import Unknown
from dtlayout.programs.understood import Understood

Options = Mapping[str, Sequence[str] | None]
"""Option of Megatron-LM → its words, none for a flag; None for an option that is left out."""
_LONGEST_VALUE = 60
"""Letters of a value in a row."""


class Assumed(list[str]):
    """Words of an option that no line of the file says."""

    def __init__(self, words: Iterable[str], note: str):
        """Words, and the reason for them."""
        super().__init__(words)
        self.note = note


class Naming(NamedTuple):
    """Names of a tree that stand for options of Megatron-LM."""

    names: tuple[str, ...]
    """Dotted names of the tree."""
    options: tuple[str, ...]
    """Options of Megatron-LM."""
    to: Callable[[Mapping[str, Any]], Options]
    """Options of those names that the file has; InvalidConfig for a value that is not known. An option that is not
    there stays open, one that is None is denied."""
    back: Callable[[Options], Mapping[str, Any]]
    """Values of the names, from those options that are given; None takes a name out. InvalidConfig for words that
    no value says."""
    default: Any = None
    """Value of the first name where the file does not have it; None where that of Megatron-LM stands."""
    idle: Callable[[Mapping[str, Any]], Mapping[str, str]] = lambda values: {}
    """Names that have no effect beside the values of others → the reason."""
    homes: Mapping[str, str] = {}
    """Option → name by which it is called; the first name for others."""
    passes: bool = False
    """True if a value that the file alone does not say becomes a word, for whose reader it is a problem."""
    asks: tuple[str, ...] = ()
    """Options of other rules that `back` is given too, where they are there."""
    shown: tuple[str, ...] = ()
    """Names that rows have for its options; all where it is empty. Others only decide, and rules of their own say
    them."""


def same(name: str, option: str, default: Any = None) -> Naming:
    """A name whose value is the option's word, or a list of them."""

    def to(values: Mapping[str, Any]) -> Options:
        value = values[name]
        return {option: [_to_word(each) for each in value] if isinstance(value, list) else [_to_word(value)]}

    def back(options: Options) -> Mapping[str, Any]:
        return {name: _from_words(options[option])}

    return Naming((name,), (option,), to, back, default, passes=True)


def listed(name: str, option: str) -> Naming:
    """A name whose value is a list of the option's words, also where there is one."""

    def back(options: Options) -> Mapping[str, Any]:
        words = options[option]
        return {name: None if words is None else [_from_word(word) for word in words]}

    return same(name, option)._replace(back=back)


def flag(name: str, option: str, default: bool | None = None) -> Naming:
    """A truth value, true where the option is there."""
    return choice(name, {True: {option: []}, False: {option: None}}, default)


def opposite(name: str, option: str, default: bool | None = None) -> Naming:
    """A truth value, false where the option is there."""
    return choice(name, {True: {option: None}, False: {option: []}}, default)


def renamed(name: str, option: str, words: Mapping[Any, str], default: Any = None) -> Naming:
    """A name with words of its own for those of the option; of several for one, the first is written."""
    return choice(name, {theirs: {option: [word]} for theirs, word in words.items()}, default)


def choice(name: str, values: Mapping[Any, Options], default: Any = None) -> Naming:
    """A name each of whose values stands for some options; of several for the same options, the first is written.

    None is written where all options are left out that no value denies.
    """
    names = tuple(dict.fromkeys(option for options in values.values() for option in options))
    is_truth = all(isinstance(value, bool) for value in values)

    def to(found: Mapping[str, Any]) -> Options:
        return values[choose_value(name, found[name], values, is_truth=is_truth)]

    def back(options: Options) -> Mapping[str, Any]:
        given = {option: options[option] for option in names if option in options}
        for value, said in values.items():
            if all(_are_same(said.get(option), words) for option, words in given.items()):
                return {name: value}
        if all(words is None for words in given.values()):
            return {name: None}
        raise InvalidConfig(f"{name} has no value that says {show_options(given)}")

    return Naming((name,), names, to, back, default)


def alike(values: Iterable[Any], options: Options) -> dict[Any, Options]:
    """Values that all stand for the same options, for `choice`."""
    return dict.fromkeys(values, options)


def choose_value(name: str, value: Any, known: Iterable[Any], *, is_truth: bool = False) -> Any:
    """A known value that is the given one, whatever its kind; InvalidConfig if none is."""
    if is_truth:
        try:
            return yes(value)
        except ValueError:
            raise InvalidConfig(f"{name}={value} is no true or false") from None
    for each in known:
        if each == value or str(each).lower() == str(value).lower():
            return each
    words = " or ".join(map(show_value, known))
    raise InvalidConfig(f"{name}={show_value(value)} is nothing that is known here; use {words}")


def show_options(options: Options) -> str:
    """Options of Megatron-LM as a command has them."""
    return ", ".join(" ".join([option, *words]) if words is not None else f"no {option}"
                     for option, words in options.items())  # fmt: skip


def show_value(value: Any) -> str:
    """A value as YAML has it, in one line that is not too long."""
    text = {True: "true", False: "false", None: "null"}.get(value) if value is None or isinstance(value, bool) else None
    text = text or " ".join(str(value).split())
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"


def _are_same(one: Sequence[str] | None, other: Sequence[str] | None) -> bool:
    if one is None or other is None:
        return one is other
    return [each.strip("'\"") for each in one] == [each.strip("'\"") for each in other]


def _to_word(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _from_words(words: Sequence[str] | None) -> Any:
    if words is None:
        return None
    values = [_from_word(word) for word in words]
    return values[0] if len(values) == 1 else values


def _from_word(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word.strip("'\"")


@dataclass
class Said:
    """Options of Megatron-LM that a tree says, and the names that they come from."""

    options: dict[str, list[str]] = field(default_factory=dict)
    """Option → its words."""
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Option → names of the file that say it, or deny it."""
    assumed: dict[str, str] = field(default_factory=dict)
    """Option that no line says → the reason for which it stands there."""
    open: set[str] = field(default_factory=set)
    """Options with a default that another rule's names may still say otherwise."""
    denied: set[str] = field(default_factory=set)
    """Options that the file says are not there."""
    idle: dict[str, str] = field(default_factory=dict)
    """Name without effect → the reason."""
    used: set[str] = field(default_factory=set)
    """Names of the file that a rule has."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Name → value, of the file."""
    homes: dict[str, str] = field(default_factory=dict)
    """Option → name by which it is called where no line says it."""
    place: Callable[[str], str] = str
    """Function that says that name of an option which no rule has."""

    def call(self, option: str) -> str:
        """The name of an option in the file, or the one that it would have there."""
        return (*self.sources.get(option, ()), self.homes.get(option) or self.place(option))[0]

    def show(self, *names: str) -> str:
        """Names with their values."""
        return ", ".join(f"{name} = {show_value(self.values.get(name))}" for name in names)

    def add(
        self, option: str, words: Sequence[str] | None, names: Sequence[str], note: str = "", *, is_open: bool = False
    ) -> None:
        """Note what some names say of an option, unless others have said it; with a note it is assumed."""
        note = words.note if isinstance(words, Assumed) else note
        is_decided = option in self.options or option in self.denied
        if is_decided and (option not in self.open or note):
            if note or not _are_same(self.options.get(option), words):
                self.idle.update({name: f"{self.call(option)} says it" for name in names if not note})
            else:
                self.sources[option] = tuple(dict.fromkeys((*self.sources.get(option, ()), *names)))
            return
        for noted in (self.open, self.denied):
            noted.discard(option)
        if is_open:
            self.open.add(option)
        self.assumed.pop(option, None)
        self.options.pop(option, None)
        self.sources.pop(option, None)
        if note:
            self.assumed[option] = note
        if names:
            self.sources[option] = tuple(names)
        if words is None:
            self.denied.add(option)
        else:
            self.options[option] = list(words)


def translate(
    rules: Sequence[Naming], values: Mapping[str, Any], problems: list[str], place: Callable[[str], str] = str
) -> Said:
    """Options of Megatron-LM that the values of a tree stand for.

    `problems` gets a line for each value that is not known, or that the file alone does not say. `place` says the name
    of an option that no rule has.
    """
    said = Said(values=values, place=place)
    for rule in rules:
        for option in rule.options:
            said.homes.setdefault(option, rule.homes.get(option, rule.names[0]))
        present = {name: values[name] for name in rule.names if values.get(name) is not None}
        said.used |= {name for name in present if not rule.shown or name in rule.shown}
        unknown = [ask_for(name, value) for name, value in present.items() if isinstance(value, Unknown)]
        unknown = [] if rule.passes else unknown
        problems += unknown
        first, note = rule.names[0], ""
        given = dict(present)
        if rule.default is not None and first not in present:
            given, note = {first: rule.default, **present}, f"its default, {show_value(rule.default)}"
        if unknown or not given:
            continue
        try:
            options, idle = rule.to(given), rule.idle(given)
        except InvalidConfig as error:
            problems += error.problems
            continue
        said.idle.update(idle)
        names = [name for name in rule.shown or rule.names if name in present and name not in said.idle]
        for option, words in options.items():
            is_open = rule.default is not None and first not in present
            said.add(option, words, names, "" if names else note or f"its default of {first}", is_open=is_open)
    places = {name: place for place, name in enumerate(values)}
    order = {option: min((places[name] for name in said.sources.get(option, ())), default=len(places))
             for option in said.options}  # fmt: skip
    said.options = {option: said.options[option] for option in sorted(said.options, key=order.__getitem__)}
    return said


def to_own(
    rules: Sequence[Naming], options: Options, values: Mapping[str, Any], ignored: Iterable[str] = ()
) -> dict[str, Any]:
    """Name → value that says some options of Megatron-LM; None takes a name out. The inverse of `translate`.

    `values` are those of the file: where several rules have an option, those are written whose names it has, or else
    the first. InvalidConfig for an option that no rule has, but for those of the `ignored` patterns.
    """
    found, lost = find_own(rules, options, values, ignored)
    if lost:
        raise InvalidConfig(lost)
    return found


def find_own(
    rules: Sequence[Naming], options: Options, values: Mapping[str, Any], ignored: Iterable[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Name → value as of `to_own`, and sentences on options that no name says."""
    chosen: dict[int, dict[str, Sequence[str] | None]] = {}
    lost: list[str] = []
    for option, words in options.items():
        places = [place for place, rule in enumerate(rules) if option in rule.options]
        has = [place for place in places if any(name in values for name in rules[place].names)]
        for place in has or places[:1]:
            chosen.setdefault(place, {})[option] = words
        is_lost = not places and words is not None
        if is_lost and not any(re.fullmatch(pattern, option) for pattern in ignored):
            lost.append(f"{show_options({option: words})} is nothing that it has a name for")
    found: dict[str, Any] = {}
    for place, given in chosen.items():
        asked = {option: options[option] for option in rules[place].asks if option in options}
        try:
            found |= rules[place].back({**asked, **given})
        except InvalidConfig as error:
            lost += error.problems
    return found, lost


def change_as(
    found: Understood, values: Mapping[str, Any], find: Callable[[Options], tuple[dict[str, Any], list[str]]]
) -> None:
    """Let a file of such names be changed: another layout is what its own names say of Megatron-LM's options.

    `values` are those of the file; `find` is the function from options to names, as `find_own`.
    """

    def choose(job: Job) -> tuple[dict[str, Any], list[str]]:
        options, gaps = MEGATRON.options(job)
        own, lost = find(options)
        return own, [*gaps, *lost]

    found.values, found.options = values, choose
    groups = [{name for option in group for name in find({option: None})[0]} for group in MEGATRON.together]
    # A name that says things of several groups, such as a list of classes, changes by itself.
    number = Counter(name for group in groups for name in group)
    found.together = [frozenset(name for name in group if number[name] == 1) for group in groups]


def read_names(
    found: Understood, said: Said, ignored: Mapping[str, str], otherwise: str = "",
    neutral: Mapping[str, Sequence[Any]] | None = None,
) -> None:  # fmt: skip
    """Note the names of a file that have no row yet; those that nothing is known of are a problem.

    `ignored` has a pattern of names for each subject that changes no prediction; `otherwise` is one for names that are
    predicted as if they were not there; `neutral` has values of names that leave everything as it is predicted.
    """
    neutral, found.own = neutral or {}, said.values
    shown = {name for row in found.rows for name in row.option.replace(",", " ").split()}
    for name, value in said.values.items():
        what = next((what for what, names in ignored.items() if re.fullmatch(names, name)), None)
        if name in shown:
            continue
        if name in said.idle:
            found.ignore(said.show(name), said.idle[name], "no effect")
        elif name in said.used:
            found.ignore(said.show(name), "as predicted", "read")
        elif what is not None:
            found.ignore(said.show(name), f"about {what}")
        elif value is None:
            found.ignore(said.show(name), "null stands for the default", "no effect")
        elif name in neutral and _is_among(value, neutral[name]):
            found.ignore(said.show(name), "its default", "no effect")
        elif otherwise and re.fullmatch(otherwise, name):
            found.ignore(said.show(name), "predicted as if it were not there", "assumed")
        elif isinstance(value, Unknown) and name in neutral:
            found.problems.append(ask_for(name, value))
        elif name in neutral:
            known = " or ".join(map(show_value, neutral[name]))
            found.problems.append(f"{name}={show_value(value)} is not understood here; {known} is")
        else:
            found.problems.append(f"{name} is not understood here; without it the rest can be predicted")


def _is_among(value: Any, known: Sequence[Any]) -> bool:
    return any(each is value or (not isinstance(each, bool) and each == value) or str(each) == value for each in known)
