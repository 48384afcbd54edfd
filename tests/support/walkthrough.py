"""A page that walks through commands: what it shows of each is what the command prints, and can be written again.

A block of a page is a comment, `<!-- shows: REGEX -->`, and below it a `console` block with a command behind `$ ` and
those of its lines that the regular expression finds; `…` stands for others. `python tests/support/walkthrough.py PAGE…`
runs all commands of each page in a folder of their own, which has the project's configs, and writes what they print.
"""

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from math import isclose
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from dtlayout.cli import main

_CONFIGS = Path(__file__).parents[2] / "configs"
_BLOCK = re.compile(
    r"(?P<head><!-- shows: (?P<shows>.*) -->\n```console\n\$ (?P<command>(?:.*\\\n)*.*)\n)(?P<said>(?:.*\n)*?)```\n"
)
_RANGE = re.compile(r"\(\S+ to \S+\)")
_LEFT_OUT = "…"
_COLUMNS = "1000"
"""Width of the terminal that pages show: nothing is folded, so that a regular expression finds whole lines."""


class Block(NamedTuple):
    """A command and what a page shows of it."""

    command: str
    shows: str
    """Regular expression of the lines that are shown."""
    said: list[str]

    def run(self) -> list[str]:
        """What the command prints here, shortened."""
        program, *arguments = shlex.split(self.command.replace("\\\n", " "))
        if program == "cat":
            return shorten(Path(arguments[0]).read_text(encoding="utf-8").splitlines(), self.shows)
        assert program == "dtlayout", f"{program} is no program that a page may run"
        out = io.StringIO()
        terminal = mock.patch.dict(os.environ, COLUMNS=_COLUMNS)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), terminal:
            main(arguments)
        return shorten(out.getvalue().splitlines(), self.shows)


def open_folder(folder: Path) -> None:
    """Put the project's configs where commands find them."""
    (folder / "configs").symlink_to(_CONFIGS)


def read_blocks(text: str) -> list[Block]:
    """All blocks of a page, in their order."""
    return [Block(found["command"], found["shows"], found["said"].splitlines()) for found in _BLOCK.finditer(text)]


def write_blocks(text: str) -> str:
    """The page with what its commands print now; they run in the working folder."""

    def write(found: re.Match[str]) -> str:
        said = Block(found["command"], found["shows"], []).run()
        return "\n".join([*found["head"].splitlines(), *said, "```\n"])

    return _BLOCK.sub(write, text)


def shorten(lines: list[str], shows: str) -> list[str]:
    """The lines that are shown, and a sign for each row of others that says anything.

    >>> shorten(["a 1", "", "b", "c", "a 2", "", "a 3"], "^a")
    ['a 1', '…', 'a 2', '', 'a 3']
    """

    def list_shown() -> Iterator[str]:
        between: list[str] = []
        for line in lines:
            if not re.search(shows, line):
                between.append(line)
                continue
            if between:
                yield _LEFT_OUT if any(between) else ""
            between = []
            yield line
        if any(between):
            yield _LEFT_OUT

    return list(list_shown())


def is_alike(line: str, other: str) -> bool:
    """Whether two lines say the same: words and layouts are equal, numbers within 3 %.

    Ranges and shares of measured rows are left out: they change with each table of runs that is added.

    >>> is_alike("1  dp8 mb1   61.0 (39 to 91) %", "1  dp8 mb1  61.2 (40 to 90) %"), is_alike("1  dp8", "1  dp4")
    (True, False)
    """
    words, others = (_RANGE.sub("", each).translate({ord("█"): "", ord("░"): ""}).split() for each in (line, other))
    if line.startswith("Places"):
        words, others = ([word for word in each if _read_number(word) is None] for each in (words, others))
    return len(words) == len(others) and all(map(_is_alike_word, words, others))


def _is_alike_word(word: str, other: str) -> bool:
    number, another = _read_number(word), _read_number(other)
    if number is None or another is None:
        return word == other
    return isclose(number, another, rel_tol=0.03, abs_tol=0.05)


def _read_number(word: str) -> float | None:
    found = re.fullmatch(r"[+-]?\d[\d,]*\.?\d*", word.strip("%:;.,()"))
    return float(found[0].replace(",", "")) if found else None


if __name__ == "__main__":
    for page in [Path(argument).resolve() for argument in sys.argv[1:]]:
        with tempfile.TemporaryDirectory() as temporary:
            open_folder(Path(temporary))
            os.chdir(temporary)
            page.write_text(write_blocks(page.read_text(encoding="utf-8")), encoding="utf-8")
