"""Intervals: ranges around predicted values that hold nine of ten measured values.

They are no theory: constants/errors.toml has them from rows that were left out of every fit
(validation/cross_validation.py). A prediction is known where rows of its engine, GPU type, format and kind of model
were measured at its site, on as many nodes. Where it is not, the ways in which it is new each have a range, and it has
the widest that these make together:

| kind | what is new | rows behind the range |
|---|---|---|
| known | only the model | those of the engine on the GPU type in the format, by fits to other models |
| new nodes | more nodes than any row like it: a range of one doubling, a step's for each | by fits to half as many |
| new site | the site, as that of a user is | by fits to what other sites measured |
| new GPU | the GPU type, the format or the kind of model | by fits to other GPU types |
| new engine | the engine | by fits to no run of the engine |

Behind all but the first, each group that was left out as a whole counts as much: a site, or an engine on a GPU type.

Layouts of one engine on one GPU type share most of their error, so whether two of them can be told apart is another
question; `find_order` answers it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import ceil, inf, log2
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
KNOWN, NEW_NODES, NEW_SITE, NEW_GPU, NEW_ENGINE = "known", "new nodes", "new site", "new GPU", "new engine"
KINDS = {
    KNOWN: "{engine} on {gpu} in {precision}, {model}, by fits to other models",
    NEW_NODES: "more nodes than fits had seen",
    NEW_SITE: "sites that no fit had seen",
    NEW_GPU: "GPU types that no fit had seen",
    NEW_ENGINE: "engines that no fit had seen",
}
"""Kind → its rows, in words."""
SAME = ("engine", "gpu", "precision", "model")
"""Keys of `describe_scenario` whose values known rows share with the predicted scenario."""
_NEAR = 0.75
"""Share of pairs in their predicted order below which a difference is no reason to prefer the faster layout."""
_RECORD = "the steps of the last sweep on these machines"


@dataclass(frozen=True)
class Interval:
    """The range in which a measured value is expected, as multiples of the predicted one."""

    low: float
    high: float
    kind: str
    """The kinds of rows that it rests on, or `record`."""
    like: str
    """The rows that the interval rests on, in words."""
    rows: int | None
    """Number of those rows; None where the record does not say."""
    covered: float = COVERED
    """Share of those rows whose measured value lies inside."""
    upper_quartile: float | None = None
    """Multiple of the predicted value that three of four measured ones stay below; None where nobody has counted."""

    def around(self, predicted: float) -> tuple[float, float]:
        """The range of the measured value, in the unit of the predicted one."""
        return self.low * predicted, self.high * predicted

    def holds(self, ratio: float) -> bool:
        """Whether a measured value of so many times the predicted one lies inside."""
        return self.low <= ratio <= self.high

    @property
    def is_foreign(self) -> bool:
        """Whether it rests on other engines' rows, since no run of the predicted engine was measured."""
        return NEW_ENGINE in self.kind

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
    """The facts that tell groups of rows apart: key → value."""
    return {
        "engine": scenario.engine.name, "gpu": scenario.cluster.gpu.name,
        "precision": scenario.precision.multiplies_in,
        "model": "dense models" if scenario.model.experts is None else "mixtures of experts",
    }  # fmt: skip


def find_intervals(scenario: Scenario, site: str = "") -> Intervals:
    """The intervals of a scenario at a site; without one, as on machines of a user, no row was measured there.

    Our own engine on machines with a record has that of their steps.
    """
    found = Intervals(**look_up(read_errors(), describe_scenario(scenario), site, scenario.cluster.num_nodes))
    gpu = scenario.cluster.gpu
    if scenario.engine.name != OWN_ENGINE or gpu.prediction_error is None:
        return found
    error = gpu.prediction_error  # the median of abs(predicted / measured - 1)
    record = Interval(1 / (1 + error), 1 / (1 - min(error, 0.99)), "record", _RECORD, rows=None, covered=0.5)
    return found._replace(step_time=record)


def look_up(errors: Mapping[str, Any], facts: Mapping[str, str], site: str, nodes: int) -> dict[Quantity, Interval]:
    """The intervals by tables like those of errors.toml, for what `describe_scenario` says.

    A quantity is missing where too few rows stand behind a kind that is needed.
    """
    ways = find_new(errors["seen"], facts, site, nodes)
    of_memory = dict.fromkeys(ways, 1)  # it does not grow with each doubling of nodes
    found: dict[Quantity, Interval | None] = {
        "step_time": _join(errors["step_time"], facts, ways),
        "peak_memory": _join(errors["peak_memory"], facts, of_memory),
    }
    return {quantity: interval for quantity, interval in found.items() if interval}


def find_new(seen: Sequence[Mapping[str, Any]], facts: Mapping[str, str], site: str, nodes: int) -> dict[str, int]:
    """Ways in which a prediction is new to the rows that fits have seen → how often its range counts; {} if it is not.

    `seen` has the facts of such rows, with their site and their most nodes.
    """
    same_engine = [row for row in seen if row["engine"] == facts["engine"]]
    if not same_engine:
        return {NEW_ENGINE: 1}
    alike = [row for row in same_engine if all(row[key] == facts[key] for key in SAME)]
    ways: dict[str, int] = {}
    if not alike:
        ways[NEW_GPU] = 1
    here = [row for row in alike or same_engine if row["site"] == site]
    if not here:
        ways[NEW_SITE] = 1
    most = max(row["nodes"] for row in here or alike or same_engine)
    if nodes > most:
        ways[NEW_NODES] = ceil(log2(nodes / most))
    return ways


def _join(entries: Sequence[Mapping[str, Any]], facts: Mapping[str, str], ways: Mapping[str, int]) -> Interval | None:
    """The widest range that the ways together make; that of known rows where there is no way.

    Too few known rows are as good as none: then the range of new GPU types stands for theirs.
    """
    if not ways:
        if (entry := _find_entry(entries, KNOWN, facts)) is not None:
            like, quartile = KINDS[KNOWN].format_map(facts), entry.get("upper_quartile")
            return Interval(entry["low"], entry["high"], KNOWN, like, entry["rows"], upper_quartile=quartile)
        ways = {NEW_GPU: 1}
    found = {kind: entry for kind in ways if (entry := _find_entry(entries, kind, facts))}
    if len(found) < len(ways):  # nothing is left to stand for it
        return None
    quartiles = [entry["upper_quartile"] ** ways[kind] for kind, entry in found.items() if "upper_quartile" in entry]
    return Interval(
        low=min(entry["low"] ** ways[kind] for kind, entry in found.items()),
        high=max(entry["high"] ** ways[kind] for kind, entry in found.items()),
        kind=" and ".join(found),
        like=" and ".join(KINDS[kind] for kind in found),
        rows=sum(entry["rows"] for entry in found.values()),
        upper_quartile=max(quartiles) if len(quartiles) == len(found) else None,
    )


def _find_entry(entries: Sequence[Mapping[str, Any]], kind: str, facts: Mapping[str, str]) -> Mapping[str, Any] | None:
    """The entry of a kind whose facts are these, with as many facts as there are; None if there is none."""
    fitting = [
        entry
        for entry in entries
        if entry["kind"] == kind and all(entry[key] == facts[key] for key in SAME if key in entry)
    ]
    return max(fitting, key=lambda entry: sum(key in entry for key in SAME), default=None)


def find_order(engine: str) -> list[PairOrder]:
    """How often layouts came in their predicted order, by their difference: of an engine, or of all if it has none."""
    entries = read_errors()["order"]
    own = [entry for entry in entries if entry.get("engine") == engine]
    wanted = own or [entry for entry in entries if "engine" not in entry]
    return [PairOrder(entry["least"], entry["pairs"], entry["right"]) for entry in wanted]


def find_least_apart(orders: Sequence[PairOrder], share: float = COVERED) -> float:
    """Least difference from which on such a share of pairs, nine of ten, came in their predicted order; infinite if
    there is none."""
    apart = inf
    for order in sorted(orders, key=lambda order: order.least, reverse=True):
        if order.right < share * order.pairs:
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


def count_near(times_s: Sequence[float], engine: str) -> int:
    """How many of the leading layouts, the fastest first, are so near to it that fewer than three of four such pairs
    came in their predicted order: 1 where none is."""
    apart = find_least_apart(find_order(engine), _NEAR)
    return next((i for i, time_s in enumerate(times_s) if time_s / min(times_s) - 1 >= apart), len(times_s))


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
    return toml.read_constant_file(FILE)
