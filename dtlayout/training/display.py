"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere, and a table at the end."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typing_extensions import Self

from dtlayout.training.metrics import StepMetrics, Validation


class Display:
    """Shows the steps of one run; only the rank that talks has one."""

    def __init__(self, console: Console, num_steps: int, log_every: int):
        self.console = console
        self.num_steps = num_steps
        self.log_every = log_every
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            disable=console.quiet or not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.task = self.progress.add_task("train", total=num_steps, numbers="")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.progress.stop()

    def say(self, text: str) -> None:
        """A line above the progress bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, metrics: StepMetrics) -> None:
        """Progress after a step."""
        numbers = f"loss {metrics.loss:.4f}  grad_norm {metrics.grad_norm:.3f}  {metrics.tokens_per_s:,.0f} tokens/s"
        if metrics.mfu is not None:
            numbers += f"  MFU {metrics.mfu:.1%}"
        if metrics.validation_loss is not None:
            numbers += f"  validation loss {metrics.validation_loss:.4f}"
        self.progress.update(self.task, completed=metrics.step, numbers=numbers)
        is_shown = metrics.step in (1, self.num_steps) or metrics.validation_loss is not None
        if not self.console.is_terminal and (is_shown or metrics.step % self.log_every == 0):
            self.say(f"step {metrics.step:>5}/{self.num_steps}  {numbers}  lr {metrics.lr:.2e}")

    def show_table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """A table of two columns."""
        table = Table(title=title, title_justify="left", show_header=False)
        for name, value in rows:
            table.add_row(name, value)
        self.console.print(table, highlight=False)


Number = TypeVar("Number", int, float)


def compare(measured: Number | None, predicted: Number | None, show: Callable[[Number], str]) -> str:
    """A measured number beside its prediction, and how far that is off.

    >>> compare(0.5, 0.6, "{} s".format)
    '0.5 s, predicted 0.6 s (+20 %)'
    """
    text = "n/a" if measured is None else show(measured)
    if predicted is None:
        return text
    text += f", predicted {show(predicted)}"
    return f"{text} ({round(100 * (predicted / measured - 1)):+d} %)" if measured else text


def describe_validation(validation: Validation | None) -> list[tuple[str, str]]:
    """The line of the table about validation, if there is one."""
    if validation is None:
        return []
    return [
        ("validation loss", f"{validation.last:.4f}, best {validation.best:.4f} after {validation.best_step} steps")
    ]


def describe_peaks(
    measured: Sequence[int | None] | None, predicted: Sequence[int | None] | None
) -> list[tuple[str, str]]:
    """A row of the table at the end for each pipeline rank.

    A run that ends early has measured none, a GPU that nobody knows has no prediction.
    """
    pairs = zip_longest(measured or (), predicted or ())
    return [(f"peak memory, pipeline rank {rank}", compare(*pair, format_bytes)) for rank, pair in enumerate(pairs)]


def format_bytes(count: int) -> str:
    """Binary units, three digits.

    >>> format_bytes(3 * 2**20)
    '3.00 MiB'
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
