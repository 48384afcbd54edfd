"""Logs: speeds of steps in the console output of training programs; a further program is a row of `PATTERNS`."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from dtlayout.base.errors import InvalidConfig

SpeedUnit = Literal["s", "tokens/s/GPU"]
_SIZES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_SKIPPED_SHARE, _LEAST_SKIPPED = 0.1, 2
"""Share of the first steps that are left out, and their least number: kernels are compiled and memory is found."""


class LogPattern(NamedTuple):
    """Lines of one program's log."""

    title: str
    """Name of the program for people."""
    pattern: re.Pattern[str]
    """Pattern of a line, whose first group is a number, and the second its K or M where there is one."""
    unit: SpeedUnit
    convert: Callable[[float], float] = float
    """Function from the number to that unit."""
    is_summary: bool = False
    """True for a line at the end that is about all steps."""


_NUMBER = r"([0-9][0-9.,]*(?:[eE][-+]?[0-9]+)?)([KMGB]?)"
PATTERNS = (
    LogPattern("Megatron-LM", re.compile(rf"elapsed time per iteration \(ms\): *{_NUMBER}"), "s", lambda ms: ms / 1e3),
    LogPattern("torchtitan", re.compile(rf"\bstep: *\d+ .*\btps: *{_NUMBER}"), "tokens/s/GPU"),
    LogPattern(
        "nanotron", re.compile(rf"(?:elapsed_)?time_per_iteration_ms: *{_NUMBER}"), "s", lambda ms: ms / 1e3
    ),
    LogPattern(
        "Hugging Face's Trainer", re.compile(rf"train_steps_per_second'?\"?[ =:]+'?{_NUMBER}"), "s",
        lambda rate: 1 / rate, is_summary=True,
    ),
)  # fmt: skip
"""Patterns, of which the first that a log has twice, or once as a summary, is taken."""


_BAR = re.compile(r"(\d+)/(\d+) \[[^\]]*, *([0-9][0-9.,]*)(s/it|it/s)")
"""A line of a progress bar: step, number of steps, speed and its unit."""


class Speeds(NamedTuple):
    """Speeds of a log's steps."""

    title: str
    """Name of the program for people."""
    unit: SpeedUnit
    values: tuple[float, ...]
    """Speed of each step that counts, in the log's order."""

    @property
    def median(self) -> float:
        """The median of the steps."""
        return median(self.values)


def read_log(path: Path) -> Speeds:
    """Speeds of the steps in a log, but for the first ones; InvalidConfig for a file without any."""
    try:
        text = _COLOURS.sub("", path.read_text(encoding="utf-8", errors="replace")).replace("\r", "\n")
    except OSError as error:
        raise InvalidConfig(f"--log {path} cannot be read: {error.strerror}") from None
    for each in PATTERNS:
        found = [_read(match, each) for line in text.split("\n") if (match := each.pattern.search(line))]
        values = [value for value in found if value is not None]
        if each.is_summary and values:
            return Speeds(each.title, each.unit, (values[-1],))
        if len(values) > 1:
            return Speeds(each.title, each.unit, tuple(values[_count_skipped(values) :]))
    if len(values := _read_bars(text)) > 1:
        return Speeds("a progress bar", "s", tuple(values[_count_skipped(values) :]))
    known = ", ".join([*dict.fromkeys(each.title for each in PATTERNS), "a progress bar"])
    raise InvalidConfig(f"--log {path} has no speed of steps as these print them: {known}")


def _count_skipped(values: Sequence[float]) -> int:
    return min(max(_LEAST_SKIPPED, round(_SKIPPED_SHARE * len(values))), len(values) - 1)


def _read_bars(text: str) -> list[float]:
    """Seconds of a step on the lines of the longest progress bar: others load a model, or evaluate it."""
    bars: dict[int, list[float]] = {}
    for line in text.split("\n"):
        if (match := _BAR.search(line)) and (speed := float(match[3].replace(",", ""))) > 0:
            bars.setdefault(int(match[2]), []).append(speed if match[4] == "s/it" else 1 / speed)
    return bars[max(bars)] if bars else []


def _read(match: re.Match[str], pattern: LogPattern) -> float | None:
    """The value of a line in the pattern's unit; None for one that is no number above 0."""
    number, size = match[1], match[2]
    try:
        value = float(number.replace(",", "")) * _SIZES[size]
    except ValueError:
        return None
    return pattern.convert(value) if value > 0 else None
