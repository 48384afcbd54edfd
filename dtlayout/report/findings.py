"""Answers of measured rows to each question, by pairs that differ in the choice alone, and choices of the fastest.

A finding is supported where the measured speeds, dealt out at random among the rows of their sweep, hardly ever show as
much: a permutation test, [Note: chance].
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import exp, log
from typing import Any

import numpy as np

from dtlayout.base.formatting import plural
from dtlayout.records.run import Run
from dtlayout.report.chance import MOST_CHANCE, deal, group, rarity, sign_test
from dtlayout.report.questions import QUESTIONS, Question, choose

_FASTEST = 0.1
"""Share of a sweep's rows that are its fastest."""
CHOICES = ("micro_batch", "tp", "pp", "recompute", "attention", "norm", "sequence_parallel")
FEWEST_PAIRS = 6
_NOISE = 0.005
"""Relative difference between repeated runs."""
_FITS = {"ok": 1.0, "oom": 0.0, "crashed_or_oom": 0.0}
"""Outcome → whether the layout fits; the others say nothing of it."""


@dataclass(frozen=True)
class Finding:
    """The answer to a question."""

    question: Question
    num_pairs: int
    """Pairs of which both rows ran."""
    share_faster: float | None
    """Share of the pairs in which the second row was faster."""
    factor: float | None
    """Median of the second's speed over the first's."""
    quartiles: tuple[float, float] | None
    """Lower and upper quartile of the second's speed over the first's."""
    explained: float | None
    """Median factor that needs no finding, being foreseen; 1 where nothing is."""
    beyond: float | None
    """Median of the factors over what is foreseen of each."""
    points: float | None
    """Median difference of MFU, second less first, where it is known."""
    p_speed: float | None
    """How often chance shows as large a factor beyond what is foreseen."""
    num_only_after: int
    """Pairs of which only the second fits."""
    num_only_before: int
    """Pairs of which only the first fits."""
    p_fit: float | None
    """How often chance shows as large a difference between the two numbers of pairs."""

    @property
    def speaks_of_speed(self) -> bool:
        """Whether the rows carry what is said of speed: more than noise of repeated runs, and than what is foreseen."""
        is_rare = self.num_pairs >= FEWEST_PAIRS and self.p_speed is not None and self.p_speed <= MOST_CHANCE
        return is_rare and self.beyond is not None and abs(log(self.beyond)) > _NOISE

    @property
    def speaks_of_fit(self) -> bool:
        """Whether the rows carry what is said of memory."""
        num_changed = self.num_only_after + self.num_only_before
        return num_changed >= FEWEST_PAIRS and self.p_fit is not None and self.p_fit <= MOST_CHANCE

    def describe(self) -> str:
        """Clauses on speed and on fit, without a full stop.

        Fit is left out where the rows do not support it. Unsupported speed is named with the reason: 'not supported:
        …'.
        """
        if not self.speaks_of_fit:
            return self._describe_speed()
        q = self.question
        fits = " and ".join(
            f"{plural(number, 'layout')} {'fits' if number == 1 else 'fit'} only with {choice}"
            for number, choice in ((self.num_only_after, q.after), (self.num_only_before, q.before))
            if number
        )
        if self.speaks_of_speed:
            return f"{self._describe_speed()}; {fits}"
        return f"{fits}; on speed, {self._describe_speed()}"

    def _describe_speed(self) -> str:
        q = self.question
        if self.quartiles is None:
            return "not supported: no two layouts that ran differ in this alone"
        low, high = self.quartiles
        pairs = f"median of {plural(self.num_pairs, 'pair')}, half of them {low:.2f} to {high:.2f}"
        foreseen = f"; {q.explanation} alone explains {self.explained:.2f}" if q.explanation else ""
        if self.speaks_of_speed:
            points = "" if self.points is None else f", MFU {100 * self.points:+.1f} points"
            share = {0.0: "no pair", 1.0: "every pair"}.get(
                self.share_faster or 0.0, f"{self.share_faster:.0%} of the pairs"
            )
            return (
                f"the speed with {q.after} is {self.factor:.2f} times that with {q.before} ({pairs}{points}), "
                f"and higher in {share}{foreseen}"
            )
        if self.num_pairs < FEWEST_PAIRS:
            few = f"only {plural(self.num_pairs, 'pair')}, and fewer than {FEWEST_PAIRS} say nothing"
            return f"not supported: {few} ({self.factor:.2f} times as fast){foreseen}"
        return (
            f"not supported: {self.factor:.2f} times as fast ({pairs}), and chance alone shows as much with "
            f"p = {self.p_speed:.2g}{foreseen}"
        )


def find(runs: Sequence[Run], questions: Sequence[Question] = QUESTIONS) -> list[Finding]:
    """One finding for each question, from measured rows."""
    speeds = np.array([log(speed) if (speed := run.tokens_per_s_per_gpu) else np.nan for run in runs])
    measured = {
        "speeds": speeds,
        "totals": speeds + np.log([run.scenario.cluster.num_gpus for run in runs]),
        "fits": np.array([_FITS.get(run.outcome, np.nan) for run in runs]),
    }

    @cache  # all questions share it
    def deal_out(name: str, pool: Callable[[Run], Hashable]) -> np.ndarray:
        """Values as measured, and dealt out anew within each pool; shape rows × (1 + deals)."""
        return deal(measured[name], [pool(run) for run in runs])

    return [_answer(question, runs, deal_out) for question in questions]


def _answer(question: Question, runs: Sequence[Run], deal_out: Callable[..., np.ndarray]) -> Finding:
    pairs = find_pairs(question, runs)

    def compare(name: str) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of which both rows are known, and their changes; pairs × (1 + deals)."""
        values = deal_out(name, question.pool)
        known = pairs[~np.isnan(values[pairs, 0]).any(axis=1)]
        return known, values[known[:, 1]] - values[known[:, 0]]

    ran, dealt = compare("speeds")
    judged, fits = compare("fits")
    ratios, changes = dealt[:, 0], fits[:, 0]
    explained = np.array([question.explained(runs[a], runs[b]) for a, b in ran])
    mfus = [(runs[a].mfu, runs[b].mfu) for a, b in ran]
    points = [after - before for before, after in mfus if before is not None and after is not None]
    unlikely = [_consistency(dealt - explained[:, None])] if len(ran) else []
    if question.crosses_gpus and len(ran):
        unlikely.append(_consistency(compare("totals")[1]))
    return Finding(
        question=question,
        num_pairs=len(ran),
        share_faster=float((ratios > 0).mean()) if len(ran) else None,
        factor=exp(float(np.median(ratios))) if len(ran) else None,
        quartiles=tuple(np.exp(np.quantile(ratios, (0.25, 0.75))).tolist()) if len(ran) else None,
        explained=exp(float(np.median(explained))) if len(ran) else None,
        beyond=exp(float(np.median(ratios - explained))) if len(ran) else None,
        points=float(np.median(points)) if points else None,
        p_speed=max(map(rarity, unlikely), default=None),
        num_only_after=int((changes > 0).sum()),
        num_only_before=int((changes < 0).sum()),
        p_fit=max(rarity(_agreement(fits)), sign_test(changes)) if len(judged) else None,
    )


def find_pairs(question: Question, runs: Sequence[Any]) -> np.ndarray:
    """Places of rows to compare; pairs × 2. A row is whatever the question's functions take."""
    chosen = [question.choice(run) for run in runs]
    alike = group((question.pool(run), question.rest(run)) for run in runs)
    pairs = [(a, b) for places in alike for a, b in product(places, places) if question.follows(chosen[a], chosen[b])]
    return np.array(pairs, dtype=int).reshape(-1, 2)


def _consistency(ratios: np.ndarray) -> np.ndarray:
    """How far the pairs agree on who is faster and by how much; pairs × deals → deals."""
    size = np.sqrt((ratios**2).mean(axis=0))
    return np.abs(ratios.mean(axis=0)) / np.maximum(size, 1e-12)


def _agreement(changes: np.ndarray) -> np.ndarray:
    """How far the pairs of which only one fits agree on which; pairs × deals → deals."""
    num_changed = np.abs(changes).sum(axis=0)
    return np.abs(changes.sum(axis=0)) / np.maximum(num_changed, 1)


@dataclass(frozen=True)
class Common:
    """A choice that the fastest rows of each sweep have in common."""

    name: str
    """The choice."""
    value: Hashable
    """Value that most of these rows chose."""
    share: float
    """Share of the fastest rows that chose it."""
    share_of_all: float
    """Share of all rows that ran that chose it."""
    p: float
    """p-value: how often as many of rows picked at random chose one and the same."""

    @property
    def is_supported(self) -> bool:
        """Whether chance hardly ever shows as much."""
        return self.p <= MOST_CHANCE

    def describe(self) -> str:
        """A sentence without a full stop; "not supported" where chance could say it."""
        if not self.is_supported:
            return f"not supported: {self.share:.0%} have {self.name}={self.value}, and chance has p = {self.p:.2g}"
        return f"{self.share:.0%} have {self.name}={self.value}, and {self.share_of_all:.0%} of all that ran"


def list_options(name: str, runs: Sequence[Run]) -> list[Hashable]:
    """Values of a choice that occur in the rows, sorted."""
    options = {choose(run, name) for run in runs} - {None}
    return sorted(options, key=lambda option: (isinstance(option, str), option))


def find_common(runs: Sequence[Run]) -> list[Common]:
    """For each choice with several values, the one that the fastest tenth of each sweep favours most."""
    ran = [run for run in runs if run.tokens_per_s_per_gpu]
    tables = [run.table for run in ran]
    fastest = _find_fastest(deal(np.array([run.tokens_per_s_per_gpu for run in ran]), tables), tables)
    common = []
    for name in CHOICES:
        if len(names := list_options(name, ran)) > 1:
            options = np.array([[choose(run, name) == option for run in ran] for option in names], dtype=float)
            shares, shares_of_all = options @ fastest / fastest[:, 0].sum(), options.mean(axis=1)
            gains = shares - shares_of_all[:, None]  # options × (1 + deals)
            best = int(gains[:, 0].argmax())
            share, share_of_all = float(shares[best, 0]), float(shares_of_all[best])
            common.append(Common(name, names[best], share, share_of_all, p=rarity(gains.max(axis=0))))
    return common


def _find_fastest(speeds: np.ndarray, tables: Sequence[str]) -> np.ndarray:
    """1 for the rows that are of the fastest tenth of their table, at least one of each; rows × (1 + deals)."""
    found = np.zeros(speeds.shape)
    for places in map(np.array, group(tables)):
        number = max(1, round(_FASTEST * len(places)))
        order = np.argsort(-speeds[places], axis=0, kind="stable")[:number]
        np.put_along_axis(found, places[order], 1.0, axis=0)
    return found
