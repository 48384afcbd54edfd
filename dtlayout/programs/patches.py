"""Patches: a layout in the words of another program's file, and that file with no more changed than it needs.

Two jobs differ in a file as the options do which the program's writer chooses for them. A changed text is read again,
and counts only if it says the job that was wanted. A change without which it still says that job is left out.
"""

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtlayout.base.errors import DtlayoutError, InvalidConfig
from dtlayout.base.formatting import shorten
from dtlayout.programs.program import Job
from dtlayout.programs.shell.edits import edit_assignments, edit_script, to_flag, to_words
from dtlayout.programs.shell.script import find_dead
from dtlayout.programs.understood import Understood

_FIRST_LETTER = 0xF0000
"""First of the letters that no file has, which stand for text that is not changed."""
Says = Callable[[str, Collection[str]], bool]
"""Function from a text and the names of the options that may differ in it; true if it says the job that is wanted."""


class Patch(NamedTuple):
    """Changes of a file of another program."""

    changes: Mapping[str, Any]
    """Option → its new value; None takes it out."""
    before: Mapping[str, Any]
    """Option → the value that it has; None where the file has no such option."""
    text: str
    """Text of the file with these changes."""

    def describe(self, *, has_flags: bool) -> Iterator[str]:
        """The changes in words, such as `--micro-batch-size 2 (was 1)`."""
        for name, value in self.changes.items():
            was = _show_value(self.before.get(name))
            if value is None:
                yield f"without {_show(name, self.before.get(name), has_flags)}"
            else:
                yield _show(name, value, has_flags) + f" (was {was})" * (was not in ("", _show_value(value)))


def find_patch(found: Understood, before: Job, after: Job, says: Says) -> Patch:
    """The patch that turns the job of a file into another one; `says` reads a changed text again.

    InvalidConfig where the file cannot say it by changes of its options.
    """
    if found.file is None or found.options is None:
        raise InvalidConfig(f"files of {found.title} are read, and not changed")
    said, lacks = found.options(after)
    if lost := [each for each in lacks if each not in found.options(before)[1]]:
        raise InvalidConfig([f"the file cannot say it: {lost[0]}", *lost[1:]])
    wanted = _find_changes(found, before, after)
    theirs = {own: name for name, own in found.names.items()}
    # What the file leaves to a default may depend on what changes: a whole batch, on each rank's.
    unsaid = {found.names.get(name, name): value for name, value in said.items() if value is not None}
    unsaid = {name: value for name, value in unsaid.items() if found.values.get(theirs.get(name, name)) is None}
    # And what has no effect in the file may get one by what changes: Liger's options, by its plugin.
    idle = {found.names.get(name, name): None for name, value in said.items() if value is None and name in found.values}
    # A flag that is true by default is false by its word alone.
    written = {name: "False" if value is False and found.takes_flags else value for name, value in wanted.items()}
    tries = [(wanted, True), (wanted, False), (written, False), ({**unsaid, **wanted}, False)]
    tries.append(({**idle, **wanted}, False))
    for changes, by_variables in tries:
        text = _try(found, changes, says, by_variables)
        if text is None:
            continue
        for names in _group(found, changes):  # such as a degree of which the file says that it is what others leave
            fewer = {key: value for key, value in changes.items() if key not in names}
            if (shorter := _try(found, fewer, says, by_variables)) is not None:
                changes, text = fewer, shorter
        return Patch(changes, {name: found.values.get(theirs.get(name, name)) for name in changes}, text)
    if not wanted:
        raise InvalidConfig(f"no option of {found.title} says it")
    by_hand = [_show(name, value, found.takes_flags) for name, value in wanted.items() if value is not None]
    raise InvalidConfig([f"the file cannot be changed by these alone: {by_hand[0]}", *by_hand[1:]])


def write_diff(path: Path, before: str, after: str) -> str:
    """The change of a file, as the command patch takes it."""
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    lines = difflib.unified_diff(old, new, str(path), str(path))
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _find_changes(found: Understood, before: Job, after: Job) -> dict[str, Any]:
    """Option → value, of those that two jobs have otherwise, and of those that say one thing together with them."""
    assert found.options is not None, "the caller has asked"
    old, new = (found.options(job)[0] for job in (before, after))
    changed = {name for name in {*old, *new} if old.get(name) != new.get(name)}
    beside = {name for names in found.together if names & changed for name in names if new.get(name) is None}
    needed = [
        name
        for name in dict.fromkeys([*new, *sorted(changed | beside)])
        if name in changed | beside and new.get(name) != found.values.get(name)
    ]
    return {found.names.get(name, name): new.get(name) for name in needed}


def _group(found: Understood, changes: Mapping[str, Any]) -> list[set[str]]:
    """The options of changes that are made together or not at all."""
    groups = [{found.names.get(name, name) for name in names} & {*changes} for names in found.together]
    grouped = {name for names in groups for name in names}
    return [names for names in groups if names] + [{name} for name in changes if name not in grouped]


def _try(found: Understood, changes: Mapping[str, Any], says: Says, by_variables: bool) -> str | None:
    """The text with changes; None if it does not say what is wanted."""
    assert found.file is not None, "the caller has asked"
    file = found.file
    try:
        if file.tree is not None:
            text = file.tree.edit(changes)
        else:
            shown, put_back = _hide(file.text, find_dead(file.text, file.given))
            if found.assigns:
                text = edit_assignments(shown, changes)
            else:
                text, others = found.rewrite(shown, changes) if found.rewrite else (shown, changes)
                text = edit_script(text, others, _list_anchors(changes, text), by_variables=by_variables)
            text = put_back(text)
        return text if says(text, changes) else None
    except DtlayoutError:
        return None


def _hide(text: str, spans: Sequence[tuple[int, int]]) -> tuple[str, Callable[[str], str]]:
    """A text with a letter for each part that is not run, and the function that puts those parts back."""
    parts, shown, end = list[str](), "", 0
    for begin, stop in spans:
        letter = chr(_FIRST_LETTER + len(parts))
        shown, end = f"{shown}{text[end:begin]}{letter}", stop
        parts.append(text[begin:stop])
    shown += text[end:]

    def put_back(changed: str) -> str:
        for number, part in enumerate(parts):
            changed = changed.replace(chr(_FIRST_LETTER + number), part)
        return changed

    return shown, put_back


def _list_anchors(changes: Mapping[str, Any], text: str) -> list[str]:
    """Options before which a new one may stand: first those that change too, then any of the script's."""
    import re  # only now: most files are only read

    there = [match[0] for match in re.finditer(r"(?m)(?<![\w-])--[A-Za-z][\w.-]*", text)]
    last = [name for name in reversed(there) if "parallel" in name or "batch" in name]
    return [*[name for name in map(to_flag, changes) if name in there], *last, *there]


def _show(name: str, value: Any, has_flags: bool) -> str:
    if has_flags:
        return " ".join([to_flag(name), *(to_words(value) or ())])
    return f"{name} = {_show_value(value)}"


def _show_value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return " ".join(value)
    return shorten(str(value).lower() if isinstance(value, bool) else str(value), 60)
