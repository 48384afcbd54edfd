"""What people read: tables of cells that are text, aligned for a terminal or as Markdown, long lists, counts, sizes."""

from collections.abc import Sequence

GIB = 2**30
"""Bytes of a GiB, in which people read the memory of GPUs."""


def align(rows: Sequence[Sequence[str]], columns: Sequence[str] = ()) -> list[str]:
    """A line for each row; each column is as wide as its widest cell, with two blanks between.

    `columns` says of the first ones on which side their cells stand, and how wide they are at least. The others have
    theirs on the right, but for the very first.

    >>> align([["layout", "step, s"], ["tp2", "1.5"]], ["<8"])
    ['layout    step, s', 'tp2           1.5']
    """
    sides = [*columns, *["<", *[">"] * len(rows[0])][len(columns) : len(rows[0])]]
    widths = [
        max(int(side[1:] or 0), *map(len, column)) for side, column in zip(sides, zip(*rows, strict=True), strict=True)
    ]
    forms = [f"{{:{side[0]}{width}}}" for side, width in zip(sides, widths, strict=True)]
    return ["  ".join(forms).format(*row).rstrip() for row in rows]


def to_markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; the first row has the names of the columns."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *body]


def plural(number: int, noun: str, form: str = "") -> str:
    """So many things; `form` is how a format writes the number.

    >>> plural(1, "microbatch"), plural(2, "microbatch"), plural(16384, "rank", ",")
    ('1 microbatch', '2 microbatches', '16,384 ranks')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:{form}} {noun}{ending}"


def choose_unit(nbytes: float) -> tuple[str, int]:
    """The unit in which people read so many bytes, and its size."""
    return ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20)


def wrap(start: str, words: Sequence[str], width: int = 118) -> list[str]:
    """Words after a start, with commas between, in lines of a width; further lines are indented below the first."""
    lines, line = [], start
    for i, word in enumerate(words):
        word += "," * (i < len(words) - 1)
        if len(line) + len(word) > width:
            lines.append(line.rstrip())
            line = " " * (len(start) - len(start.lstrip()) + 4)
        line += f"{word} "
    return [*lines, line.rstrip()]
