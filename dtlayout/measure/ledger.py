"""Bytes by category over time, noted as allocations come, change size and go.

An *allocation* is one storage: a size and a category. The purpose of a storage often shows later: a matmul's result
becomes a gradient, or an output is saved for backward. So an allocation has one category for its whole life, the
strongest one that it ever claimed, in the order of `Category`. Categories are summed up only when someone asks.

A *window* is the time that one reading covers; of earlier windows only numbers are kept. Marks divide a window, for
example into the actions of a schedule. The largest totals between marks are the curve of memory over a step. No torch.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from enum import IntEnum
from itertools import accumulate, chain


class Category(IntEnum):
    """Purpose of a storage; a higher category wins."""

    OTHER = 0
    COMMUNICATION = 1
    ACTIVATION = 2
    GRADIENT = 3
    OPTIMIZER = 4
    GATHERED = 5
    PARAMETER = 6


UPDATE = "update"
"""Name of the part of a step after its last action: norm, clipping and optimizer."""


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
    """Size and category of one storage in the ledger."""

    __slots__ = ("category", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self.category = Category.OTHER

    def claim(self, category: Category) -> None:
        """Take `category`, unless the allocation has a stronger one already."""
        self.category = max(self.category, category)


class Ledger:
    """List of all changes of size, in order; `total_bytes` and its maximum `peak_bytes` are kept up to date."""

    def __init__(self, on_peak: Callable[[], None] = lambda: None) -> None:
        """`on_peak` is called whenever the total is higher than ever before."""
        self.total_bytes = 0
        self.peak_bytes = 0
        self._on_peak = on_peak
        self._marks: list[tuple[str, int]] = []
        self._carried: list[tuple[Allocation, int]] = []
        self._changes: list[tuple[Allocation, int]] = []
        self._past_peak = Footprint()
        self._past_category_peaks = Footprint()

    def set_bytes(self, allocation: Allocation, nbytes: int) -> None:
        """Note that `allocation` now holds `nbytes`; 0 when it is freed."""
        change_bytes = nbytes - allocation.nbytes
        if change_bytes:
            allocation.nbytes = nbytes
            self._changes.append((allocation, change_bytes))
            self.total_bytes += change_bytes
            if self.total_bytes > self.peak_bytes:
                self.peak_bytes = self.total_bytes
                self._on_peak()

    def mark(self, name: str) -> None:
        """Begin the part `name` of the window; later changes belong to it."""
        self._marks.append((name, len(self._changes)))

    def begin_window(self) -> None:
        """Begin a window: keep earlier peaks as numbers, and start from the allocations that are alive."""
        _, self._past_peak, self._past_category_peaks = self._read()
        alive = dict.fromkeys(allocation for allocation, _ in chain(self._carried, self._changes) if allocation.nbytes)
        self._carried = [(allocation, allocation.nbytes) for allocation in alive]
        self._changes, self._marks = [], []

    def forget_peak(self) -> None:
        """Begin a window from the allocations that are alive, and forget all earlier peaks."""
        self.begin_window()
        self.peak_bytes = self.total_bytes
        self._past_peak = self._past_category_peaks = Footprint()

    @property
    def current(self) -> Footprint:
        """Bytes that are alive now, by category."""
        return self._read()[0]

    @property
    def peak(self) -> Footprint:
        """Bytes by category at the moment of `peak_bytes`, the first such moment if there are several."""
        return self._read()[1]

    @property
    def category_peaks(self) -> Footprint:
        """Maximum of each category over time; their moments differ, so the total of these means nothing."""
        return self._read()[2]

    @property
    def curve_bytes(self) -> list[int]:
        """Total when the window began and after each change since."""
        carried_bytes = sum(nbytes for _, nbytes in self._carried)
        return list(accumulate((change_bytes for _, change_bytes in self._changes), initial=carried_bytes))

    @property
    def highest_by_mark(self) -> list[Highest]:
        """Largest total from each mark of the window to the next, including the bytes held at the mark."""
        curve = self.curve_bytes
        ends = [*(place for _, place in self._marks), len(curve) - 1][1:]
        return [Highest(name, max(curve[a : b + 1])) for (name, a), b in zip(self._marks, ends, strict=True)]

    def _read(self) -> tuple[Footprint, Footprint, Footprint]:
        """(bytes by category now, at the peak of the total, maximum of each category)"""
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
