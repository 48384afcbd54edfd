"""Display: a progress bar on a terminal, plain lines elsewhere, and a table at the end."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from statistics import median
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from typing_extensions import Self

from dtlayout.base.formatting import plural
from dtlayout.training.metrics import StepMetrics, Validation

_RECENT_STEPS = 50
"""Number of last steps whose median says how long the next ones take."""


class Display:
    """Shows the steps of one run; its console is quiet on all ranks but one."""

    def __init__(
        self, console: Console, num_steps: int, log_every: int, clock: Callable[[], float] = time.perf_counter
    ):
        self.console = console
        self.num_steps = num_steps
        self.log_every = log_every
        self.time_left = TimeLeft(num_steps, clock)
        self.widths: dict[tuple[str, str], int] = {}
        self.unsaid_peak: int | None = None
        self._unsaid: tuple[int, list[Number]] | None = None
        """Number of the newest step and the cells of its line, as long as that was not printed."""
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            disable=console.quiet or not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.task = self.progress.add_task("train", total=num_steps, numbers="")

    def set_length(self, num_steps: int) -> None:
        """Set the number of steps, where only the data have said it."""
        self.num_steps = self.time_left.num_steps = num_steps
        self.progress.update(self.task, total=num_steps)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.progress.stop()

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, metrics: StepMetrics) -> None:
        """Show a step: move the bar, and print a line where one is due."""
        left_s = self.time_left.after(metrics.step, metrics.step_time_s)
        numbers = [Number("loss", f"{metrics.loss:.4f}"), Number("grad_norm", f"{metrics.grad_norm:.3f}")]
        if metrics.fullest_expert is not None:
            numbers.append(Number("fullest expert", f"{metrics.fullest_expert:.2f}", "x"))
        details = [Number("lr", f"{metrics.lr:.2e}"), Number("", f"{metrics.step_time_s:.3f}", "s")]
        speed = [Number("", f"{metrics.tokens_per_s:,.0f}", "tok/s")]
        if metrics.mfu is not None:
            speed.append(Number("MFU", f"{metrics.mfu:.1%}"))
        if left_s is not None:
            speed.append(Number("", format_duration(left_s), "left"))
        self.progress.update(self.task, completed=metrics.step, numbers="  ".join(map(str, [*numbers, *speed])))
        self.unsaid_peak = metrics.peak_memory_bytes or self.unsaid_peak
        self._unsaid = metrics.step, [*numbers, *details, *speed]
        if metrics.step in (1, self.num_steps) or metrics.step % self.log_every == 0:
            self.show_last()
        if metrics.validation_loss is not None:
            self.show_validation(metrics.step, metrics.validation_loss, metrics.validation_losses or {})

    def show_last(self) -> None:
        """Print the line of the newest step, where it has none yet: a run may end with a step that none was due for."""
        if self._unsaid is None or self.console.is_terminal:
            return
        (step, cells), self._unsaid = self._unsaid, None
        if self.unsaid_peak is not None:
            cells = [*cells, Number("peak", format_bytes(self.unsaid_peak))]
            self.unsaid_peak = None
        self.say("  ".join([self._name(step), *map(self._align, cells)]))

    def show_validation(self, step: int, loss: float, named: Mapping[str, float]) -> None:
        """Print the validation losses after a step: that of the run, and those of named sets."""
        sets = "".join(f"  {name} {each:.4f}" for name, each in named.items())
        self.say(f"{self._name(step)}  validation loss {loss:.4f}{sets}")

    def _name(self, step: int) -> str:
        """A step's name, as wide as the last step's."""
        return f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}"

    def _align(self, number: "Number") -> str:
        """A number, padded to the widest one in its column so far."""
        column = number.name, number.unit
        self.widths[column] = width = max(self.widths.get(column, 0), len(number.text))
        return str(number._replace(text=number.text.rjust(width)))

    def show_table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print a table of two columns."""
        table = Table(title=title, title_justify="left", show_header=False)
        for name, value in rows:
            table.add_row(name, value)
        self.console.print(table, highlight=False)


class Number(NamedTuple):
    """A number in a line of the log, with its name and its unit."""

    name: str
    """Word before the number; empty for none."""
    text: str
    unit: str = ""
    """Unit after the number; empty for none."""

    def __str__(self) -> str:
        return " ".join(filter(None, self))


class TimeLeft:
    """Estimates how long a run still takes."""

    def __init__(self, num_steps: int, clock: Callable[[], float]):
        """`clock` gives seconds."""
        self.num_steps = num_steps
        self.clock = clock
        self.step_times_s = deque[float](maxlen=_RECENT_STEPS)
        self.num_counted = 0
        self.outside_s = 0.0  # of all steps but the first
        self.seen_s: float | None = None

    def after(self, step: int, step_time_s: float) -> float | None:
        """Seconds until the run ends, after a step that has just been done; None after the first, slower one.

        Each step to come counts as the median of recent steps, plus the mean time between steps so far, which holds
        checkpoints and validation.
        """
        now_s = self.clock()
        if self.seen_s is not None:
            self.step_times_s.append(step_time_s)
            self.num_counted += 1
            self.outside_s += max(0.0, now_s - self.seen_s - step_time_s)
        self.seen_s = now_s
        if not self.num_counted:
            return None
        return (self.num_steps - step) * (median(self.step_times_s) + self.outside_s / self.num_counted)


T = TypeVar("T", int, float)


def compare(measured: T | None, predicted: T | None, show: Callable[[T], str]) -> str:
    """Text of a measured number beside its prediction, and by how much the prediction is off.

    >>> compare(0.5, 0.6, "{} s".format)
    '0.5 s, predicted 0.6 s (+20 %)'
    """
    text = "n/a" if measured is None else show(measured)
    if predicted is None:
        return text
    text += f", predicted {show(predicted)}"
    return f"{text} ({round(100 * (predicted / measured - 1)):+d} %)" if measured else text


def describe_validation(validation: Validation | None, sets: Mapping[str, Validation]) -> list[tuple[str, str]]:
    """Rows about validation in the table at the end, one for each named set; none without validation."""
    if validation is None:
        return []
    found = {f"validation loss, {name}": each for name, each in sets.items()} or {"validation loss": validation}
    if sets and validation not in sets.values():
        found = {"validation loss": validation, **found}
    return [
        (name, f"{each.last:.4f}, best {each.best:.4f} after {plural(each.best_step, 'step')}")
        for name, each in found.items()
    ]


def describe_peaks(
    measured: Sequence[int | None] | None, predicted: Sequence[int | None] | None
) -> list[tuple[str, str]]:
    """Rows about peak memory in the table at the end, one for each pipeline rank.

    `measured` is None for a run that ended before it measured, `predicted` for a GPU of unknown type.
    """
    pairs = zip_longest(measured or (), predicted or ())
    return [(f"peak memory, pipeline rank {rank}", compare(*pair, format_bytes)) for rank, pair in enumerate(pairs)]


def format_bytes(count: int) -> str:
    """Text of a number of bytes in binary units, with two decimals.

    >>> format_bytes(3 * 2**20)
    '3.00 MiB'
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_duration(seconds: float) -> str:
    """Text of a duration: minutes and seconds, from an hour on hours too, from a day on days and hours.

    >>> [format_duration(seconds) for seconds in (9, 3729, 180_000)]
    ['0:09', '1:02:09', '2d 02h']
    """
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}h"
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"
