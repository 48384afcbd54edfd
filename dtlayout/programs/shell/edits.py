"""Changes of options in a script: the text of one option after another, with comments and all else kept.

An option is looked for in the text as it stands. Where its value is a variable that one line sets, that line may be
changed instead. Nobody knows from the text alone whether the script then means what was wanted: read it again.
"""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dtlayout.base.errors import InvalidConfig

_VALUE = re.compile(r"""[ \t]+((?:"[^"\n]*"|'[^'\n]*'|[^\s)"'\\])+)""")
_ASSIGNED = re.compile(r"""(?<=[\s'"])\+{0,2}[A-Za-z_]\w*(?:\.\w+)+=(?=\S)""")
"""An option as NAME=VALUE, whose name has a dot."""
_VARIABLE = re.compile(r'"?\$(?:(\w+)|\{(\w+)(?::?-[^}]*)?\})"?')


def edit_script(text: str, changes: Mapping[str, Any], anchors: Collection[str], *, by_variables: bool) -> str:
    """The text with other values of options.

    `changes` has the words of each option by its name, a flag's are []; None takes the option out. A new option stands
    before the first of `anchors` that the text has. With `by_variables` the line that sets a variable is changed where
    an option's value is that variable. InvalidConfig for an option that stands there twice, and without an anchor.
    """
    for name, value in changes.items():
        flag, words = to_flag(name), to_words(value)
        place = _find(text, flag)
        if place is not None:
            flag = text[place : place + len(flag)]
            spans = _find_values(text, place + len(flag))
            if isinstance(value, bool) and len(spans) == 1:  # a truth value that is written out
                words = [str(value) if text[slice(*spans[0])][:1].isupper() else str(value).lower()]
        if place is None and words is not None:
            text = _insert(text, " ".join([flag, *map(shlex.quote, words)]), anchors)
        elif place is not None and words is None:
            text = _take_out(text, place, flag)
        elif place is not None and words is not None:
            text = _put(text, place + len(flag), words, by_variables)
    return text


def edit_assignments(text: str, changes: Mapping[str, Any]) -> str:
    """The text with other values of options that a command says as NAME=VALUE, as Hydra's; None is null.

    A new one stands before the first that the text has. InvalidConfig where there is none, or one stands there twice.
    """
    for name, value in changes.items():
        written = _to_assignment(name, value)
        pattern = re.compile(rf"""(?<![\w.+~])['"]?(\+{{0,2}}){re.escape(name)}=((?:\[[^\]\n]*\]|[^\s'"\\)])*)['"]?""")
        places = [match for match in pattern.finditer(text) if not _is_comment(text, match.start())]
        if len(places) > 1:
            raise InvalidConfig(f"{name}= stands in the script {len(places)} times")
        if places:
            found = places[0]
            quoted = shlex.quote(f"{found[1]}{written}")
            text = text[: found.start()] + quoted + text[found.end() :]
            continue
        first = next((m for m in _ASSIGNED.finditer(text) if not _is_comment(text, m.start())), None)
        if first is None:
            raise InvalidConfig(f"{written} finds no place in the script")
        place = first.start()
        place -= re.search(r"""(?<=\s)['"]$""", text[:place]) is not None  # before a word in quotes, not inside of it
        text = f"{text[:place]}{shlex.quote(written)} {text[place:]}"
    return text


def _to_assignment(name: str, value: Any) -> str:
    if value is None:
        return f"{name}=null"
    if isinstance(value, list):
        return f"{name}=[{','.join(map(str, value))}]"
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def to_flag(name: str) -> str:
    """An option as a command has it."""
    return name if name.startswith("-") else f"--{name}"


def to_words(value: Any) -> list[str] | None:
    """The words of an option's value; none for a flag, and None for an option that is left out."""
    if value is None or value is False:
        return None
    if value is True:
        return []
    return [str(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else [str(value)]


def _find(text: str, flag: str) -> int | None:
    """The place of an option outside of comments, with dashes or underscores inside; None without one, InvalidConfig
    for several."""
    spelled = re.sub(r"(?<=\w)(?:\\-|_)", "[-_]", re.escape(flag))
    pattern = re.compile(rf"""(?<![\w./-]){spelled}(?=[\s=)"'\\]|$)""")
    places = [match.start() for match in pattern.finditer(text) if not _is_comment(text, match.start())]
    if len(places) > 1:
        raise InvalidConfig(f"{flag} stands in the script {len(places)} times")
    return places[0] if places else None


def _is_comment(text: str, place: int) -> bool:
    line = text[text.rfind("\n", 0, place) + 1 : place]
    return re.search(r"(^|\s)#", line) is not None


def _find_values(text: str, place: int) -> list[tuple[int, int]]:
    """Begin and end of each word that follows an option on its line."""
    if text[place : place + 1] == "=":
        match = re.compile(r"""=((?:"[^"\n]*"|'[^'\n]*'|[^\s)"'\\])*)""").match(text, place)
        return [match.span(1)] if match else []
    found = list[tuple[int, int]]()
    while (match := _VALUE.match(text, place)) is not None and not match[1].startswith(
        ("--", "#", '"${', ">", "<", "|")
    ):
        found.append(match.span(1))
        place = match.end()
    single = _VALUE.match(text, place) if not found else None  # a variable in quotes is a value, an array is not
    if single is not None and single[1].startswith('"${') and "[@]" not in single[1]:
        found.append(single.span(1))
    return found


def _put(text: str, place: int, words: Sequence[str], by_variables: bool) -> str:
    spans = _find_values(text, place)
    if len(spans) == len(words) == 1 and by_variables:
        begin, end = spans[0]
        variable = _VARIABLE.fullmatch(text[begin:end])
        changed = _set_variable(text, variable[1] or variable[2], words[0]) if variable else None
        if changed is not None:
            return changed
    written = " ".join(map(shlex.quote, words))
    if not spans:
        return f"{text[:place]} {written}{text[place:]}" if words else text
    return text[: spans[0][0]] + written + text[spans[-1][1] :]


def _set_variable(text: str, name: str, value: str) -> str | None:
    """The text with another value in the one line that sets a variable, or in its default; None without such a line."""
    lines = list(re.finditer(rf"""(?m)^([ \t]*(?:(?:export|readonly|declare)[ \t]+)?{name}=)([^\s;#]*)""", text))
    if len(lines) != 1:
        return None
    before, old = lines[0][1], lines[0][2]
    default = re.fullmatch(r'("?\$\{\w+:?[-=])([\w.]+)(\}"?)', old)
    if default is not None:
        value = f"{default[1]}{value}{default[3]}"
    elif not re.fullmatch(r"""["']?[\w.]+["']?""", old):
        return None
    return text[: lines[0].start()] + before + value + text[lines[0].end() :]


def _take_out(text: str, place: int, flag: str) -> str:
    spans = _find_values(text, place + len(flag))
    end = spans[-1][1] if spans else place + len(flag)
    line_begin, line_end = text.rfind("\n", 0, place) + 1, text.find("\n", end)
    line_end = len(text) if line_end < 0 else line_end
    rest = text[end:line_end].strip()
    previous = text[:line_begin].rstrip("\n")
    if not text[line_begin:place].strip() and (rest == "\\" or (not rest and not previous.endswith("\\"))):
        return text[:line_begin] + text[line_end + 1 :]
    while text[end : end + 1] in (" ", "\t") and text[place - 1 : place] in (" ", "\t", "(", ""):
        end += 1
    return text[:place] + text[end:]


def _insert(text: str, written: str, anchors: Collection[str]) -> str:
    for anchor in anchors:
        place = _find(text, to_flag(anchor))
        if place is None:
            continue
        line_begin = text.rfind("\n", 0, place) + 1
        line_end = text.find("\n", place)
        line = text[line_begin : line_end if line_end >= 0 else len(text)]
        indent = text[line_begin:place]
        if indent.strip() or line_begin == 0:
            return f"{text[:place]}{written} {text[place:]}"
        previous = text[:line_begin].rstrip("\n").rpartition("\n")[2]
        continues = " \\" if line.rstrip().endswith("\\") or previous.rstrip().endswith("\\") else ""
        return f"{text[:line_begin]}{indent}{written}{continues}\n{text[line_begin:]}"
    raise InvalidConfig(f"{written} finds no place in the script")
