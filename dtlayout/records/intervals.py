"""Intervals: where what is measured lies, nine times of ten, around what is predicted.

They are no theory: constants/errors.toml has them from rows that were left out of every fit
(validation/cross_validation.py), each for rows of a kind.
A prediction takes the first kind that it belongs to and that enough rows stand behind:

| kind | rows of | whose constants |
|---|---|---|
| known | the engine on the GPU type in the precision, of dense models or of mixtures | were fitted to other models |
| new GPU | the engine in the precision, of such models | were fitted to runs on other GPU types |
| new precision | the engine, of such models | were fitted to runs on other GPU types |
| new engine | all engines | were fitted to no run of their engine |

Layouts of one engine on one GPU type share most of their error, so whether two of them can be told apart is another
question; `find_order` answers it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import inf
from typing import Any, Literal, NamedTuple

from dtlayout.base import toml
from dtlayout.costmodel.engine import OWN_ENGINE
from dtlayout.costmodel.scenario import Scenario

COVERED = 0.9
"""Share of the rows of a kind that lie inside their interval."""
FILE = "errors.toml"
Quantity = Literal["step_time", "peak_memory"]
QUANTITIES: tuple[Quantity, ...] = ("step_time", "peak_memory")
"""What has intervals."""


class RowKind(NamedTuple):
    """The rows that an interval rests on."""

    name: str
    keys: tuple[str, ...]
    """What they have in common with what is predicted, of `describe_scenario`."""
    words: str
    """The rows in words, with the keys in braces."""


KINDS = (
    RowKind(
        "known",
        ("engine", "gpu", "precision", "model"),
        "{engine} on {gpu} in {precision}, {model}, by fits to other models",
    ),
    RowKind(
        "new GPU", ("engine", "precision", "model"), "{engine} in {precision}, {model}, by fits to other GPU types"
    ),
    RowKind("new precision", ("engine", "model"), "{engine}, {model}, by fits to other GPU types"),
    RowKind("new engine", (), "all engines, fitted to none of them"),
)
"""From the nearest on."""
_RECORD = "the steps of the last sweep on these machines"


@dataclass(frozen=True)
class Interval:
    """Where the measured value lies, as shares of the predicted one."""

    low: float
    high: float
    kind: str
    """The name of the kind of rows that it rests on, or `record`."""
    like: str
    """These rows in words."""
    rows: int | None
    """How many they are; None where the record does not say."""
    covered: float = COVERED
    """Share of them that lie inside."""

    def around(self, predicted: float) -> tuple[float, float]:
        """The range of the measured value, in the unit of the predicted one."""
        return self.low * predicted, self.high * predicted

    def holds(self, ratio: float) -> bool:
        """Whether a measured value of so many times the predicted one lies inside."""
        return self.low <= ratio <= self.high

    @property
    def is_foreign(self) -> bool:
        """Whether it rests on other engines' rows: nothing like what is predicted was measured."""
        return self.kind == KINDS[-1].name

    @property
    def basis(self) -> str:
        """What lay inside, in words."""
        return f"{self.covered:.0%} of {self.like if self.rows is None else f'{self.rows} rows of {self.like}'}"


class Intervals(NamedTuple):
    """Those of one scenario."""

    step_time: Interval
    peak_memory: Interval

    def by_quantity(self) -> dict[Quantity, Interval]:
        """Each under its quantity."""
        return {"step_time": self.step_time, "peak_memory": self.peak_memory}

    def to_dict(self) -> dict[str, Any]:
        """As JSON has them."""
        return {quantity: asdict(interval) for quantity, interval in self.by_quantity().items()}


@dataclass(frozen=True)
class PairOrder:
    """How often two layouts of one scenario, predicted to differ by some share of the shorter step, came in order."""

    least: float
    """The difference from which on pairs are counted here."""
    pairs: int
    right: int
    """Pairs of which the one that was predicted to be faster was so."""


def describe_scenario(scenario: Scenario) -> dict[str, str]:
    """What tells kinds of rows apart."""
    return {
        "engine": scenario.engine.name, "gpu": scenario.cluster.gpu.name,
        "precision": scenario.precision.multiplies_in,
        "model": "dense models" if scenario.model.experts is None else "mixtures of experts",
    }  # fmt: skip


def find_intervals(scenario: Scenario) -> Intervals:
    """The intervals of a scenario; our own engine on machines with a record has that of their steps."""
    found = Intervals(**look_up(read_errors(), describe_scenario(scenario)))
    gpu = scenario.cluster.gpu
    if scenario.engine.name != OWN_ENGINE or gpu.prediction_error is None:
        return found
    error = gpu.prediction_error  # the median of abs(predicted / measured - 1)
    record = Interval(1 / (1 + error), 1 / (1 - min(error, 0.99)), "record", _RECORD, rows=None, covered=0.5)
    return found._replace(step_time=record)


def look_up(errors: Mapping[str, Any], scenario: Mapping[str, str]) -> dict[Quantity, Interval]:
    """The intervals of the nearest kinds in tables like those of errors.toml, for what `describe_scenario` says.

    A quantity is missing where too few rows stand behind any kind.
    """
    nearest = {quantity: _find_nearest(errors[quantity], scenario) for quantity in QUANTITIES}
    return {quantity: interval for quantity, interval in nearest.items() if interval}


def _find_nearest(entries: Sequence[Mapping[str, Any]], scenario: Mapping[str, str]) -> Interval | None:
    for kind in KINDS:
        wanted = {"kind": kind.name, **{key: scenario[key] for key in kind.keys}}
        for entry in entries:
            if all(entry.get(key) == value for key, value in wanted.items()):
                like = kind.words.format_map(scenario)
                return Interval(entry["low"], entry["high"], kind.name, like, entry["rows"])
    return None


def find_order(engine: str) -> list[PairOrder]:
    """How often layouts came in their predicted order, by their difference: of an engine, or of all if it has none."""
    entries = read_errors()["order"]
    own = [entry for entry in entries if entry.get("engine") == engine]
    wanted = own or [entry for entry in entries if "engine" not in entry]
    return [PairOrder(entry["least"], entry["pairs"], entry["right"]) for entry in wanted]


def find_least_apart(orders: Sequence[PairOrder]) -> float:
    """The difference from which on nine of ten pairs came in their predicted order; infinite where they never did."""
    apart = inf
    for order in sorted(orders, key=lambda order: order.least, reverse=True):
        if order.right < COVERED * order.pairs:
            break
        apart = order.least
    return apart


@cache
def read_errors() -> dict[str, Any]:
    """The tables of errors.toml, which `dtlayout validate --errors` writes."""
    return toml.read_constants()[FILE]
