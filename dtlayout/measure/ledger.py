"""Bytes by category over time, written down as allocations come, change size and go.

An *allocation* is one storage: a size and a category. What a storage is often shows later (a matmul's result becomes
a gradient, an output turns out to be saved for backward), so an allocation has one category for its whole life, the
strongest one it ever claimed, and categories are summed up only when someone asks. The order is that of `Category`.

A *window* is what one reading looks back on; what was read in earlier windows is kept as numbers only. Marks divide it,
such as into the actions of a schedule: the largest totals between them are the curve of memory over a step. No torch.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from enum import IntEnum
from itertools import accumulate, chain


class Category(IntEnum):
    """What a storage is for; a higher one wins."""

    OTHER = 0
    COMMUNICATION = 1
    ACTIVATION = 2
    GRADIENT = 3
    OPTIMIZER = 4
    GATHERED = 5
    PARAMETER = 6


UPDATE = "update"
"""The part of a step after its last action: norm, clipping and optimizer."""


@dataclass(frozen=True)
class Highest:
    """The largest total while an action was executed."""

    action: str
    """The action as a schedule prints it, such as 3F0; UPDATE after the last."""

    nbytes: int


@dataclass(frozen=True)
class Footprint:
    """Bytes by category, at one moment or as the largest of each over time."""

    other: int = 0
    communication: int = 0
    activation: int = 0
    gradient: int = 0
    optimizer: int = 0
    gathered: int = 0
    parameter: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))


class Allocation:
    """One storage in the ledger."""

    __slots__ = ("category", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self.category = Category.OTHER

    def claim(self, category: Category) -> None:
        """Becomes `category`, unless it already is something stronger."""
        self.category = max(self.category, category)


class Ledger:
    """Every change of size, in order; `total_bytes` and `peak_bytes`, the largest, are kept up as changes come."""

    def __init__(self, on_peak: Callable[[], None] = lambda: None) -> None:
        """`on_peak` is called whenever the total is higher than ever."""
        self.total_bytes = 0
        self.peak_bytes = 0
        self._on_peak = on_peak
        self._marks: list[tuple[str, int]] = []
        self._carried: list[tuple[Allocation, int]] = []
        self._changes: list[tuple[Allocation, int]] = []
        self._past_peak = Footprint()
        self._past_category_peaks = Footprint()

    def set_bytes(self, allocation: Allocation, nbytes: int) -> None:
        """Writes down that `allocation` now holds `nbytes`; 0 when it is freed."""
        change_bytes = nbytes - allocation.nbytes
        if change_bytes:
            allocation.nbytes = nbytes
            self._changes.append((allocation, change_bytes))
            self.total_bytes += change_bytes
            if self.total_bytes > self.peak_bytes:
                self.peak_bytes = self.total_bytes
                self._on_peak()

    def mark(self, name: str) -> None:
        """What is written down from now on belongs to `name`."""
        self._marks.append((name, len(self._changes)))

    def begin_window(self) -> None:
        """Keeps the peaks so far as numbers and starts again from what is alive."""
        _, self._past_peak, self._past_category_peaks = self._read()
        alive = dict.fromkeys(allocation for allocation, _ in chain(self._carried, self._changes) if allocation.nbytes)
        self._carried = [(allocation, allocation.nbytes) for allocation in alive]
        self._changes, self._marks = [], []

    def forget_peak(self) -> None:
        """Starts again from what is alive, as if nothing had been before."""
        self.begin_window()
        self.peak_bytes = self.total_bytes
        self._past_peak = self._past_category_peaks = Footprint()

    @property
    def current(self) -> Footprint:
        """What is alive now."""
        return self._read()[0]

    @property
    def peak(self) -> Footprint:
        """What was alive at the moment of `peak_bytes`, the first if there are several."""
        return self._read()[1]

    @property
    def category_peaks(self) -> Footprint:
        """The largest each category has been, each at a moment of its own; the total of these means nothing."""
        return self._read()[2]

    @property
    def curve_bytes(self) -> list[int]:
        """The total when the window began and after each change since."""
        carried_bytes = sum(nbytes for _, nbytes in self._carried)
        return list(accumulate((change_bytes for _, change_bytes in self._changes), initial=carried_bytes))

    @property
    def highest_by_mark(self) -> list[Highest]:
        """The largest total from each mark of the window to the next, what was there when it began included."""
        curve = self.curve_bytes
        ends = [*(place for _, place in self._marks), len(curve) - 1][1:]
        return [Highest(name, max(curve[a : b + 1])) for (name, a), b in zip(self._marks, ends, strict=True)]

    def _read(self) -> tuple[Footprint, Footprint, Footprint]:
        """(now, at the total's peak, each category's own peak)"""
        now = [0] * len(Category)
        for allocation, nbytes in self._carried:
            now[allocation.category] += nbytes
        at_peak, highest = now.copy(), now.copy()
        total = peak_bytes = sum(now)
        for allocation, change_bytes in self._changes:
            category = allocation.category
            now[category] += change_bytes
            total += change_bytes
            if now[category] > highest[category]:
                highest[category] = now[category]
            if total > peak_bytes:
                peak_bytes, at_peak = total, now.copy()
        past = self._past_peak
        peak = past if past.total > peak_bytes else Footprint(*at_peak)
        category_peaks = Footprint(*map(max, highest, astuple(self._past_category_peaks)))
        return Footprint(*now), peak, category_peaks
