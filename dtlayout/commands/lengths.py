"""Lengths of a data set's samples beside a prediction: --lengths, what padding wastes and what the longest needs."""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import align, fold, format_bytes, plural, three_digits
from dtlayout.commands.arguments import JsonDocument
from dtlayout.commands.side_question import Asked, SideQuestion
from dtlayout.planner.lengths import weigh_lengths

_LENGTHS, _NUMBERS = ("length", "lengths", "len", "tokens", "num_tokens"), ("number", "count", "samples", "n")
"""Names of columns with lengths, and with their numbers."""
_MOST_DIGITS = 13
_MOST_SAMPLES = 1_000_000
"""Most samples of one length that are counted one by one."""


def _add(parser: argparse.ArgumentParser) -> None:
    """Add the file of lengths."""
    text = "lengths of samples in tokens: one a line, with their number behind or without; or a JSON list or object"
    parser.add_argument("--lengths", type=Path, metavar="FILE", help=text)


def read_lengths(path: Path) -> Counter[int]:
    """Length → number of samples; InvalidConfig for a file that has other things than whole numbers above 0.

    Lines of `length`, of `length,number` or `length number`, or a JSON list of lengths, or a JSON object of numbers by
    length.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"--lengths {path} cannot be read: {error}") from None
    pairs = list(_read_json(path, text) if text.lstrip()[:1] in ("[", "{") else _read_lines(path, text))
    if not pairs:
        raise InvalidConfig(f"--lengths {path} has no length")
    found = Counter[int]()
    for length, number in pairs:
        found[length] += number
    return found


def _read_lines(path: Path, text: str) -> Iterator[tuple[int, int]]:
    columns: tuple[int, int | None] | None = None
    for place, line in enumerate(text.splitlines(), start=1):
        words = re.split(r"[\s,;:]+", line.split("#")[0].strip())
        if words == [""]:
            continue
        if columns is None and not any(character.isdigit() for character in words[0]):
            columns = _find_columns(path, words)
            continue
        columns = columns or (0, 1 if len(words) > 1 else None)
        picked = [words[column] for column in columns if column is not None and column < len(words)]
        if (len(words) > 2 and columns == (0, 1)) or not picked or not all(map(_is_count, picked)):
            raise InvalidConfig(f"--lengths {path}, line {place}: {line.strip()[:40]!r} is no length with its number")
        yield int(picked[0]), int(picked[1]) if len(picked) > 1 else 1


def _find_columns(path: Path, names: Sequence[str]) -> tuple[int, int | None]:
    """Places of the length and of the number among names of columns; InvalidConfig where none is a length."""
    lower = [name.lower() for name in names]
    found = [next((lower.index(name) for name in known if name in lower), None) for known in (_LENGTHS, _NUMBERS)]
    if found[0] is None and len(names) > 1:
        raise InvalidConfig(f"--lengths {path}: no column of {', '.join(names)} is called length or tokens")
    return found[0] or 0, found[1]


def _is_count(word: str) -> bool:
    return word.isdecimal() and len(word) < _MOST_DIGITS and int(word) > 0


def _read_json(path: Path, text: str) -> Iterator[tuple[int, int]]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"--lengths {path} is no JSON: {error}") from None
    entries = value.items() if isinstance(value, dict) else ((each, 1) for each in value)
    for length, number in entries:
        digits = str(length)
        if not _is_count(digits) or not isinstance(number, int) or number < 1:
            raise InvalidConfig(f"--lengths {path}: {str(length)[:40]!r} is no length with its number")
        yield int(digits), number


def _answer(asked: Asked) -> dict[str, Any]:
    """The keys of a document on the lengths; {} where none are given."""
    if (path := asked.options.lengths) is None:
        return {}
    counts = read_lengths(path)
    if sum(counts.values()) > 100 * _MOST_SAMPLES:
        raise InvalidConfig(f"--lengths {path} has more than {100 * _MOST_SAMPLES:,} samples: give a share")
    return {"lengths": asdict(weigh_lengths(counts, *asked.case))}


def _describe(document: JsonDocument) -> Iterator[str]:
    """Lines on the lengths."""
    if not (found := document.get("lengths")):
        return
    cut = f"; {found['cut'] / found['samples']:.1%} are cut" if found["cut"] else ""
    yield ""
    yield from fold(
        f"lengths: {plural(found['samples'], 'sample')}, mean {found['mean']:.0f}, median {found['median']}, "
        f"longest {found['longest']} tokens{cut}"
    )
    rows = [["samples are", "tokens of a sequence", "their own", "step, s", "their own tokens/s/GPU"]]
    rows += [
        [each["name"], f"{each['tokens']:.0f}", f"{each['real_share']:.1%}", f"{each['step_time_s']:.3f}",
         three_digits(each["real_tokens_per_s_per_gpu"])]
        for each in found["fillings"]
    ]  # fmt: skip
    yield from align(rows)
    fits = "fits" if found["fits"] else "does not fit"
    longest = f"a micro-batch with the longest, uncut: {format_bytes(found['longest_peak_bytes'])}, {fits}"
    yield from fold(longest)


LENGTHS = SideQuestion(_add, _answer, _describe)
