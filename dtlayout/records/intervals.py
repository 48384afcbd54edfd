"""Intervals: ranges around predicted values that hold nine of ten measured values.

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
"""Predicted quantities that have an interval."""


class RowKind(NamedTuple):
    """The rows that an interval rests on."""

    name: str
    keys: tuple[str, ...]
    """Keys of `describe_scenario` whose values the rows share with the predicted scenario."""
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
"""Kinds of rows, the one most like the predicted scenario first."""
_RECORD = "the steps of the last sweep on these machines"


@dataclass(frozen=True)
class Interval:
    """The range in which a measured value is expected, as multiples of the predicted one."""

    low: float
    high: float
    kind: str
    """The name of the kind of rows that it rests on, or `record`."""
    like: str
    """The rows that the interval rests on, in words."""
    rows: int | None
    """Number of those rows; None where the record does not say."""
    covered: float = COVERED
    """Share of those rows whose measured value lies inside."""

    def around(self, predicted: float) -> tuple[float, float]:
        """The range of the measured value, in the unit of the predicted one."""
        return self.low * predicted, self.high * predicted

    def holds(self, ratio: float) -> bool:
        """Whether a measured value of so many times the predicted one lies inside."""
        return self.low <= ratio <= self.high

    @property
    def is_foreign(self) -> bool:
        """Whether it rests on other engines' rows, since nothing like the predicted scenario was measured."""
        return self.kind == KINDS[-1].name

    @property
    def basis(self) -> str:
        """The share of rows that lay inside, and which rows, in words."""
        return f"{self.covered:.0%} of {self.like if self.rows is None else f'{self.rows} rows of {self.like}'}"


class Intervals(NamedTuple):
    """The intervals of one scenario."""

    step_time: Interval
    peak_memory: Interval

    def by_quantity(self) -> dict[Quantity, Interval]:
        """Quantity → its interval."""
        return {"step_time": self.step_time, "peak_memory": self.peak_memory}

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: quantity → its interval."""
        return {quantity: asdict(interval) for quantity, interval in self.by_quantity().items()}


@dataclass(frozen=True)
class PairOrder:
    """How often two layouts of one scenario, predicted to differ by some share of the shorter step, came in order."""

    least: float
    """Least predicted difference of the pairs that are counted here."""
    pairs: int
    right: int
    """Pairs whose predicted faster layout was the faster one."""


def describe_scenario(scenario: Scenario) -> dict[str, str]:
    """The facts that tell kinds of rows apart: key → value."""
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
    """Least difference from which on nine of ten pairs came in their predicted order; infinite if there is none."""
    apart = inf
    for order in sorted(orders, key=lambda order: order.least, reverse=True):
        if order.right < COVERED * order.pairs:
            break
        apart = order.least
    return apart


class Alike(NamedTuple):
    """How far down a list of layouts, the fastest first, its order may be chance."""

    places: int
    """Leading places that cannot be told apart; 1 where the first stands alone."""
    least: float
    """Difference of the predicted steps, over the shorter one, from which on pairs are counted."""
    most: float | None
    """Difference up to which pairs are counted; None where there is no limit."""
    pairs: int
    """Pairs of measured layouts of one sweep whose predictions were so far apart."""
    right: int
    """Pairs among them that came in their predicted order."""

    def __str__(self) -> str:
        share = f"{100 * self.right / self.pairs:.0f} of 100 times"
        if self.places == 1:
            return f"1 is apart from 2: layouts predicted {self.least:.1%} apart or more came in that order {share}."
        within = "any distance" if self.most is None else f"{self.most:.1%}"
        return (
            f"Places 1 to {self.places} cannot be told apart: layouts predicted within {within} of each other came in "
            f"the predicted order {share}."
        )


def find_alike(times_s: Sequence[float], engine: str) -> Alike | None:
    """How many of the leading layouts cannot be told apart, by their steps; None where there is nothing to compare."""
    orders = find_order(engine)
    apart, fastest_s = find_least_apart(orders), min(times_s)
    differences = [time_s / fastest_s - 1 for time_s in times_s]
    places = next((i for i, difference in enumerate(differences) if difference >= apart), len(differences))
    if places > 1:
        counted = [order for order in orders if order.least <= max(differences[:places])]
        most = min((order.least for order in orders if order not in counted), default=None)
    else:
        counted = [order for order in orders if order.least >= apart]
        most = None
    pairs, right = (sum(getattr(order, name) for order in counted) for name in ("pairs", "right"))
    if len(times_s) < 2 or not pairs:
        return None
    return Alike(max(places, 1), 0.0 if places > 1 else apart, most, pairs, right)


@cache
def read_errors() -> dict[str, Any]:
    """The tables of errors.toml, which `dtlayout validate --errors` writes."""
    return toml.read_constants()[FILE]
