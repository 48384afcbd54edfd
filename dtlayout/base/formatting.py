"""Text for people: aligned and Markdown tables, lists, counts, sizes, versions."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

from dtlayout.base.terminal import clean, find_width

GIB = 2**30
"""Bytes of a GiB, the unit in which people read the memory of GPUs."""


def align(rows: Sequence[Sequence[str]], columns: Sequence[str] = ()) -> list[str]:
    """A line for each row; each column is as wide as its widest cell, with two blanks between columns. There must be a
    row.

    `columns` has for each of the first columns a side, with or without a least width: "<8" or "<". Of the other columns
    the very first is aligned left, and all others right.

    >>> align([["layout", "step, s"], ["tp2", "1.5"]], ["<8"])
    ['layout    step, s', 'tp2           1.5']
    """
    sides = [*columns, *["<", *[">"] * len(rows[0])][len(columns) : len(rows[0])]]
    widths = [
        max(int(side[1:] or 0), *map(len, column)) for side, column in zip(sides, zip(*rows, strict=True), strict=True)
    ]
    forms = [f"{{:{side[0]}{width}}}" for side, width in zip(sides, widths, strict=True)]
    return ["  ".join(forms).format(*row).rstrip() for row in rows]


def align_in_parts(rows: Sequence[Sequence[str]], columns: Sequence[str], width: int) -> list[str]:
    """`align`, and where a line would be wider than `width`, several tables under each other.

    Each has the first column and as many others as fit, one at least; rows without any of these are left out of it.

    >>> align_in_parts([["n", "one", "two"], ["1", "a", "b"], ["2", "c", ""]], [], 8)
    ['n  one', '1    a', '2    c', '', 'n  two', '1    b']
    """
    sides = [*columns, *["<", *[">"] * len(rows[0])][len(columns) : len(rows[0])]]
    lines: list[str] = []
    begin, end = 1, len(rows[0])
    while begin < len(rows[0]):
        chosen = [row for row in rows if any(row[begin:end])]
        part = align([[row[0], *row[begin:end]] for row in chosen], [sides[0], *sides[begin:end]])
        if max(map(len, part)) > width and end > begin + 1:
            end -= 1
            continue
        lines += [*([""] if lines else []), *part]
        begin, end = end, len(rows[0])
    return lines


def to_markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table of plain text; the first row has the names of the columns."""
    head, *body = [f"| {' | '.join(map(escape_markdown, row))} |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *body]


def escape_markdown(text: str) -> str:
    r"""Text as Markdown that shows it as it is, in a line: no table, link, code, HTML or heading comes of it.

    >>> print(escape_markdown("a|b `<b>` micro_batch=2, _c_"))
    a\|b \`\<b>\` micro_batch=2, \_c\_
    """
    return _MARKDOWN.sub(r"\\\g<0>", clean(" ".join(text.split())))


_MARKDOWN = re.compile(r"[\\`|<&\[\]*~$]|(?<!\w)_|_(?!\w)|(?<=:)/|(?<=\w)@(?=\w)|(?<=\bwww)\.")
"""Characters that Markdown reads as markup; an underscore inside a word is a letter."""


def plural(number: int, noun: str, form: str = "") -> str:
    """A number with its noun in the right form; `form` is the number's format.

    >>> plural(1, "microbatch"), plural(2, "microbatch"), plural(16384, "rank", ",")
    ('1 microbatch', '2 microbatches', '16,384 ranks')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:{form}} {noun}{ending}"


def three_digits(value: float) -> str:
    """A number with three digits; with more than three before the point, all of those.

    >>> three_digits(5.583), three_digits(92.26), three_digits(1078.3)
    ('5.58', '92.3', '1,078')
    """
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def shorten(text: str, length: int = 80) -> str:
    """The text, cut to at most `length` characters.

    >>> shorten("a" * 90, 4)
    'aaa…'
    """
    return text if len(text) <= length else f"{text[: length - 1]}…"


def first_line(error: Exception) -> str:
    """Class and first line of an error of other code, for a message of one line.

    >>> first_line(ValueError("no such size\\nat all")), first_line(KeyError())
    ('ValueError: no such size', 'KeyError')
    """
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def join_words(words: Sequence[str]) -> str:
    """Words as a sentence lists them.

    >>> join_words(["tp"]), join_words(["tp", "cp", "ep"])
    ('tp', 'tp, cp and ep')
    """
    *firsts, last = words or [""]
    return f"{', '.join(firsts)} and {last}" if firsts else last


def join_alike(values: Sequence[object]) -> str:
    """Values with commas between them; more than two equal neighbours are counted.

    >>> join_alike([1, 2, 2, 2, 3, 3])
    '1, 2 (3 times), 3, 3'
    """
    rows = [(str(value), len(list(alike))) for value, alike in groupby(values)]
    return ", ".join(f"{value} ({n} times)" if n > 2 else ", ".join([value] * n) for value, n in rows)


def choose_unit(nbytes: float) -> tuple[str, int]:
    """Unit in which people read this number of bytes, and its size in bytes."""
    return ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20)


def format_bytes(nbytes: float, digits: int = 2) -> str:
    """A number of bytes in the unit in which people read it.

    >>> format_bytes(22_020_096), format_bytes(85_899_345_920, 1)
    ('21.00 MiB', '80.0 GiB')
    """
    unit, size = choose_unit(nbytes)
    return f"{nbytes / size:.{digits}f} {unit}"


def wrap(start: str, words: Sequence[str], width: int | None = None) -> list[str]:
    """`start` and words with commas between, in lines of up to `width`; further lines are indented below the first.

    By default they are as wide as the terminal, and 118 at most.
    """
    lines, line, width = [], start, width or min(118, find_width())
    for i, word in enumerate(words):
        word += "," * (i < len(words) - 1)
        if len(line) + len(word) > width:
            lines.append(line.rstrip())
            line = " " * (len(start) - len(start.lstrip()) + 4)
        line += f"{word} "
    return [*lines, line.rstrip()]


def fold(line: str, width: int | None = None, column: int | None = None) -> list[str]:
    """A line in pieces of up to `width` letters, by default the terminal's; pieces after the first are indented.

    They break between words, and begin at `column`, such as that of a value behind its name; by default four letters
    further than the line. A word that is longer stays whole.

    >>> fold("  one two three", 11)
    ['  one two', '      three']
    """
    width = width or find_width()
    if len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4 if column is None else column)
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def fold_notes(notes: Iterable[str]) -> list[str]:
    """Notes as lines, folded at the width of the terminal."""
    return [line for note in notes for line in fold(f"note: {note}")]


def find_version(package: str, otherwise: str = "a checkout") -> str:
    """Version of an installed package.

    A package that is not installed, such as a checkout on the path, has `otherwise`.

    >>> find_version("none-of-this-name", otherwise="not installed")
    'not installed'
    """
    from importlib.metadata import PackageNotFoundError, version  # only now: it is slow, and few commands ask

    try:
        return version(package)
    except PackageNotFoundError:
        return otherwise
