"""Successive halving replayed on a table of measured runs: what it saves, and what it misses, as Markdown.

    make bench NAME=halving TABLES="FILE …"

Every table of the file is a sweep whose rows have all been run. Halving sees a row only when it runs it, and orders
rows by predictions with constants that were fitted to the other models alone. A short run's step time is the measured
one with an error, since a few steps tell less than many; without one, halving by measurements could not miss.
"""

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from dtlayout.sweep.halving import Halving, halve
from dtlayout.validation.cross_validation import leave_models_out
from dtlayout.validation.scores import Prediction, by_table
from dtlayout.validation.tables import read_tables

FULL_STEPS = 20
"""Steps of every trial of a sweep that is not halved."""
START_S = 90.0
"""Until a job of many GPUs makes its first step; all that a trial costs that fails."""
ERRORS = (0.0, 0.03)
"""Standard deviation of a short run's step time; of the last round's, a third of it."""
SEEDS = range(20)
PLANS = {
    "predicted third, then thirds": Halving(steps=(6, 20)),
    "predicted tenth, then thirds": Halving(first=0.1, steps=(6, 20)),
    "predicted tenth, five left": Halving(first=0.1, keep=0.15, steps=(6, 20)),
    "no prediction, thirds": Halving(first=1.0, steps=(6, 20)),
}


@dataclass(frozen=True)
class Replay:
    """One sweep, halved."""

    runs: int
    """Trials that were started."""
    seconds: float
    """Seconds that all these trials took."""
    regret: float
    """How much longer the step of the one that was chosen is than the best one's."""


def replay(predictions: Sequence[Prediction], halving: Halving, error: float, seed: int) -> Replay:
    """Halve one sweep."""
    noise = random.Random(seed)
    fitting = sorted(
        (p for p in predictions if p.estimate.fits or halving.first == 1.0), key=lambda p: p.estimate.step_time_s
    )
    by_row = {p.run.row: p.run for p in fitting}
    spent = {"runs": 0, "seconds": 0.0}

    def run(rows: Sequence[str], steps: int) -> dict[str, float]:
        spent["runs"] += len(rows)
        spent["seconds"] += START_S * len(rows)
        found = {row: seconds for row in rows if (seconds := by_row[row].step_time_s) and by_row[row].ran}
        spent["seconds"] += steps * sum(found.values())
        spread = error if steps < max(halving.steps) else error / 3
        return {row: seconds * noise.lognormvariate(0, spread) for row, seconds in found.items()}

    *_, last = halve(list(by_row), halving, run)
    best_s = min(p.run.step_time_s for p in predictions if p.run.ran and p.run.step_time_s)
    chosen_s = by_row[last[0]].step_time_s
    assert chosen_s is not None, "it ran"
    return Replay(runs=int(spent["runs"]), seconds=spent["seconds"], regret=chosen_s / best_s - 1)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tables", type=Path, nargs="+")
    tables = parser.parse_args().tables
    predictions = [p for rows in leave_models_out(read_tables(tables).runs).predictions.values() for p in rows]
    print("\n".join(report(predictions, [path.name for path in tables])))


def report(predictions: Sequence[Prediction], tables: Sequence[str]) -> Iterator[str]:
    """Lines of the page."""
    sweeps = {name: rows for name, rows in by_table(predictions).items() if sum(p.run.ran for p in rows) > 1}
    yield "# Successive halving, replayed\n"
    num_rows, today = sum(map(len, sweeps.values())), f"{datetime.now(timezone.utc):%Y-%m-%d}"
    yield f"{today}, `make bench NAME=halving` on {', '.join(tables)}: {len(sweeps)} sweeps of {num_rows} rows in all."
    yield f"A whole sweep runs each for {FULL_STEPS} steps; a trial takes {START_S:.0f} s to start. Predictions come"
    yield f"from constants that never saw the model. Means over {len(SEEDS)} seeds.\n"
    yield "| plan | error of a short run | trials started | GPU time | regret, mean | worst sweep | best found |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for name, halving in PLANS.items():
        for error in ERRORS:
            yield _describe(name, error, [(rows, _replays(rows, halving, error)) for rows in sweeps.values()])


def _replays(rows: Sequence[Prediction], halving: Halving, error: float) -> list[Replay]:
    return [replay(rows, halving, error, seed) for seed in (SEEDS if error else SEEDS[:1])]


def _describe(name: str, error: float, found: Sequence[tuple[Sequence[Prediction], Sequence[Replay]]]) -> str:
    """A row of the table: shares of what whole sweeps would have cost."""
    whole_runs = sum(len(rows) for rows, _ in found)
    whole_s = sum(
        START_S * len(rows) + FULL_STEPS * sum(p.run.step_time_s or 0.0 for p in rows if p.run.ran) for rows, _ in found
    )
    runs = sum(statistics.fmean(r.runs for r in replays) for _, replays in found) / whole_runs
    seconds = sum(statistics.fmean(r.seconds for r in replays) for _, replays in found) / whole_s
    regrets = [statistics.fmean(r.regret for r in replays) for _, replays in found]
    hits = statistics.fmean(r.regret < 1e-9 for _, replays in found for r in replays)
    return (
        f"| {name} | {error:.0%} | {runs:.0%} | {seconds:.0%} | {statistics.fmean(regrets):.2%} | {max(regrets):.2%} | "
        f"{hits:.0%} |"
    )


if __name__ == "__main__":
    main()
