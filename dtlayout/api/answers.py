"""Answers as values: text for a terminal, HTML and a picture for a notebook, a document for a program."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dtlayout.base.formatting import choose_unit, format_bytes, three_digits
from dtlayout.commands.case import Case
from dtlayout.commands.dryrun import describe as describe_dry_run
from dtlayout.commands.dryrun import to_document as to_dry_document
from dtlayout.commands.explain import describe_layout, describe_limit
from dtlayout.commands.explain import to_document as to_explanation_document
from dtlayout.commands.recommend_text import describe as describe_recommendation
from dtlayout.costmodel.estimate import Estimate, Estimator
from dtlayout.costmodel.scenario import NO_TIME, Scenario
from dtlayout.dryrun.findings import Findings
from dtlayout.planner.explain import Change, Explanation
from dtlayout.records.intervals import Intervals, find_intervals
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Answer(ABC):
    """An answer: `print` shows it as the command does, a notebook as a page does."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The model and where it trains, in a line."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The answer as values of JSON, which the command prints with `--json`."""

    @abstractmethod
    def _lines(self) -> Iterable[str]:
        """Lines for a terminal."""

    @abstractmethod
    def _parts(self) -> Iterable[str]:
        """Parts of a page."""

    @abstractmethod
    def _bars(self) -> "list[_Panel]":
        """Panels of the picture, from left to right."""

    def plot(self) -> "Figure":
        """A matplotlib figure of the answer, which a notebook shows and `savefig` writes."""
        from dtlayout.report.html import new_figure  # only now: matplotlib takes half a second

        panels = self._bars()
        figure = new_figure(5.2 * len(panels), 1.5 + 0.32 * max(len(panel.rows) for panel in panels))
        figure.suptitle(self.title, fontsize=10)
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            panel.draw(axes)
        return figure

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from dtlayout.report import html  # only now: it imports matplotlib

        return html.fragment(self.title, self._parts())


@dataclass(frozen=True)
class _Panel:
    """Stacked bars of one picture."""

    title: str
    rows: Sequence[tuple[str, Mapping[str, float]]]
    """Name of each bar, and its parts in the panel's unit."""
    mark: float | None = None
    """Value at which a line stands, such as the capacity."""

    def draw(self, axes: Any) -> None:
        names, parts = [name for name, _ in self.rows], list(self.rows[0][1])
        left = [0.0] * len(names)
        for i, part in enumerate(parts):
            widths = [values[part] for _, values in self.rows]
            if any(widths):
                axes.barh(names, widths, left=left, label=part, color=f"C{i}", height=0.7)
                left = [before + width for before, width in zip(left, widths, strict=True)]
        if self.mark is not None and self.mark < 1.6 * max(left):
            axes.axvline(self.mark, color="0.2", linewidth=1, label="capacity")
        axes.invert_yaxis()
        axes.set_title(self.title, fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, ncols=3, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=3)


@dataclass(frozen=True, repr=False)
class PredictedLayout(Answer):
    """A layout's predicted step and memory, with the ranges that nine of ten measured runs kept."""

    scenario: Scenario
    """The model, the batch, the GPUs and the program that trains."""
    estimate: Estimate
    """The prediction with all its parts."""

    @property
    def layout(self) -> Layout:
        """The layout, with every degree."""
        return self.estimate.layout

    @property
    def kernels(self) -> Kernels:
        """The kernels that it was predicted with."""
        return self.estimate.kernels

    @property
    def fits(self) -> bool:
        """Whether every rank's memory, and its host's, is enough."""
        return self.estimate.fits

    @property
    def step_time_s(self) -> float | None:
        """Seconds of a step; None on a CPU that nobody has calibrated."""
        return self.estimate.step_time_s if self.estimate.knows_time else None

    @property
    def step_time_range_s(self) -> tuple[float, float] | None:
        """Range of `step_time_s`; None where that is None."""
        around = self._intervals.step_time.around(self.estimate.step_time_s)
        return around if self.estimate.knows_time else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, 0 to 1; None on a CPU."""
        return self.estimate.mfu if self.scenario.cluster.gpu.has_mfu else None

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        """Tokens of the batch over seconds and GPUs; None where seconds are not known."""
        seconds = self.step_time_s
        return None if seconds is None else self.scenario.batch.tokens_per_s_per_gpu(seconds, self.layout.world_size)

    @property
    def peak_bytes(self) -> float:
        """Memory of the fullest rank at its fullest moment."""
        return self.estimate.peak_bytes

    @property
    def peak_range_bytes(self) -> tuple[float, float]:
        """Range of `peak_bytes`."""
        return self._intervals.peak_memory.around(self.peak_bytes)

    @property
    def memory_bytes(self) -> tuple[dict[str, float], ...]:
        """For each pipeline rank the components of its peak."""
        return tuple(rank.as_dict() for rank in self.estimate.memory)

    @property
    def time_s(self) -> dict[str, float] | None:
        """Components of a step as the busiest rank spends it; None where seconds are not known."""
        return self.estimate.time.as_dict() if self.estimate.knows_time else None

    @property
    def title(self) -> str:
        """The model, the layout and the GPUs, in a line."""
        gpus = f"{self.layout.world_size} x {self.scenario.cluster.gpu.name}"
        return f"{self.scenario.model.name} as {self.layout} on {gpus}"

    def to_dict(self) -> dict[str, Any]:
        """The prediction as values of JSON."""
        return {
            "layout": str(self.layout), "gpus": self.layout.world_size, "gpu": self.scenario.cluster.gpu.name,
            "fits": self.fits, "step_time_s": self.step_time_s, "step_time_range_s": self.step_time_range_s,
            "mfu": self.mfu, "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu, "peak_bytes": self.peak_bytes,
            "peak_range_bytes": self.peak_range_bytes, "capacity_bytes": self.estimate.capacity_bytes,
            "memory_bytes": list(self.memory_bytes), "time_s": self.time_s,
        }  # fmt: skip

    @cached_property
    def _intervals(self) -> Intervals:
        return find_intervals(self.scenario)

    def _lines(self) -> Iterable[str]:
        return self.title, *self._sentences()

    def _sentences(self) -> Iterator[str]:
        if (around := self.step_time_range_s) is None:
            yield NO_TIME
        else:
            mfu = "" if self.mfu is None else f"{self.mfu:.1%} MFU, "
            speed = f"{three_digits(self.tokens_per_s_per_gpu or 0.0)} tokens/s/GPU"
            yield f"step {self.step_time_s:.3f} s ({around[0]:.3f} to {around[1]:.3f}), {mfu}{speed}"
        low, high = self.peak_range_bytes
        capacity = format_bytes(self.estimate.capacity_bytes, 1)
        ends = f"{format_bytes(low, 1)} to {format_bytes(high, 1)}"
        verdict = "fits" if self.fits else "does not fit"
        yield f"peak {format_bytes(self.peak_bytes, 1)} ({ends}) of {capacity}: it {verdict}"

    def _parts(self) -> Iterator[str]:
        from dtlayout.report import html  # only now: it imports matplotlib
        from dtlayout.report.charts import Bar, draw_bars

        yield from (html.paragraph(f"{sentence[0].upper()}{sentence[1:]}.") for sentence in self._sentences())
        if times := self.time_s:
            yield draw_bars(
                [Bar("step", list(times.values()), f"{self.step_time_s:.3f} s")], list(times), name="parts of a step"
            )
        capacity = self.estimate.capacity_bytes
        bars = [
            Bar(f"rank {i}", list(rank.values()), format_bytes(sum(rank.values()), 1), capacity)
            for i, rank in enumerate(self.memory_bytes)
        ]
        yield draw_bars(
            bars, list(self.memory_bytes[0]), f"capacity, {format_bytes(capacity, 1)}", name="memory of each rank"
        )

    def _bars(self) -> list[_Panel]:
        return [make_time_panel([("step", self.estimate)]), _memory_panel(self.estimate)][
            -1 - self.estimate.knows_time :
        ]


def make_time_panel(rows: Sequence[tuple[str, Estimate]]) -> _Panel:
    """Seconds of the parts of a step, a bar for each layout."""
    return _Panel("seconds of a step", [(name, estimate.time.as_dict()) for name, estimate in rows])


def make_memory_panel(rows: Sequence[tuple[str, Estimate]]) -> _Panel:
    """Memory of the fullest rank, a bar for each layout, and the capacity of the first one's GPU."""
    unit, size = choose_unit(max(estimate.peak_bytes for _, estimate in rows))
    fullest = [(f"{i}", e.memory[e.busiest_rank].as_dict()) for i, (_, e) in enumerate(rows, 1)]
    memory = [(name, _divide(parts, size)) for name, parts in fullest]
    return _Panel(f"memory of the fullest rank, {unit}", memory, rows[0][1].capacity_bytes / size)


def _memory_panel(estimate: Estimate) -> _Panel:
    """The memory of each pipeline rank of one layout."""
    unit, size = choose_unit(estimate.peak_bytes)
    ranks = [(f"rank {i}", _divide(rank.as_dict(), size)) for i, rank in enumerate(estimate.memory)]
    return _Panel(f"memory at the peak, {unit}", ranks, estimate.capacity_bytes / size)


def _divide(parts: Mapping[str, float], size: float) -> dict[str, float]:
    return {name: value / size for name, value in parts.items()}


@dataclass(frozen=True, repr=False)
class ExplainedLayout(PredictedLayout):
    """A predicted layout, the limit of it, and the single changes that would make it fit or faster."""

    explanation: Explanation = field(kw_only=True)
    """The limit, the changes, and what would do on more GPUs."""

    @property
    def bound_by(self) -> str:
        """The largest component of the step, or of the memory that does not fit."""
        return self.explanation.limit.component

    @property
    def changes(self) -> tuple[Change, ...]:
        """Single changes that help, the fastest first."""
        return self.explanation.changes

    def to_dict(self) -> dict[str, Any]:
        """The document that `dtlayout explain --json` prints."""
        return to_explanation_document(self.scenario, self.explanation)

    def _lines(self) -> Iterable[str]:
        return describe_layout(self.scenario, self.explanation)

    def _parts(self) -> Iterator[str]:
        from dtlayout.report import html  # only now: it imports matplotlib

        yield html.paragraph(f"Bound by {describe_limit(self.explanation)}.")
        yield from super()._parts()
        rows = [
            [" ".join(each.overrides), f"{each.estimate.step_time_s:.3f}", format_bytes(each.estimate.peak_bytes)]
            for each in self.changes
        ]
        if rows:
            yield html.table([["change", "step, s", "peak"], *rows], "changes that help")


@dataclass(frozen=True, repr=False)
class RecommendedLayouts(Answer):
    """The fastest layouts that fit, and what stands against the others."""

    scenario: Scenario
    """The model, the batch, the GPUs and the program that trains."""
    document: Mapping[str, Any]
    """The document of the search; keys that begin with "_" are for text and pages."""

    @cached_property
    def layouts(self) -> tuple[PredictedLayout, ...]:
        """The best layouts, the best first."""
        estimator = Estimator(self.scenario)
        found = [(Layout(**each["layout"]), Kernels(**each["kernels"])) for each in self.document["layouts"]]
        return tuple(PredictedLayout(self.scenario, estimator.estimate(*each)) for each in found)

    @property
    def best(self) -> PredictedLayout:
        """The first of `layouts`."""
        return self.layouts[0]

    @property
    def title(self) -> str:
        """The model and the GPUs, in a line."""
        cluster = self.scenario.cluster
        return f"{self.scenario.model.name} on {cluster.num_gpus:,} x {cluster.gpu.name}"

    def to_dict(self) -> dict[str, Any]:
        """The document that `dtlayout recommend --json` prints."""
        return {key: value for key, value in self.document.items() if not key.startswith("_")}

    def _lines(self) -> Iterable[str]:
        return describe_recommendation(self.document)

    def _parts(self) -> Iterable[str]:
        from dtlayout.commands.recommend_page import list_parts  # only now: it imports matplotlib

        return list_parts(self.document)

    def _bars(self) -> list[_Panel]:
        rows = [(f"{i}  {each.layout}", each.estimate) for i, each in enumerate(self.layouts, 1)]
        return [make_time_panel(rows), make_memory_panel(rows)]


@dataclass(frozen=True, repr=False)
class DryRunRanks(Answer):
    """Reports of ranks that were built and stepped without a cluster, beside what is predicted."""

    findings: Findings
    """The reports, the prediction, and how they are compared."""

    @property
    def title(self) -> str:
        """The model, the layout and the GPUs, in a line."""
        return self.findings.title

    @property
    def peak_bytes(self) -> dict[int, int]:
        """Rank → bytes at its fullest moment."""
        return {report.rank: report.peak_bytes for report in self.findings.reports}

    @property
    def fits(self) -> bool:
        """Whether every rank that was run fits."""
        return all(map(self.findings.fits, self.findings.reports))

    @cached_property
    def _document(self) -> dict[str, Any]:
        return {**to_dry_document(self.findings), "_compares": True}

    def to_dict(self) -> dict[str, Any]:
        """The document that `dtlayout dryrun --json` prints."""
        return {key: value for key, value in self._document.items() if not key.startswith("_")}

    def _lines(self) -> Iterable[str]:
        return describe_dry_run(self._document)

    def _parts(self) -> Iterable[str]:
        from dtlayout.commands.dryrun_page import list_parts  # only now: it imports matplotlib

        return list_parts(self._document)

    def _bars(self) -> list[_Panel]:
        from dtlayout.commands.dryrun_tables import PARTS

        ranks = self._document["ranks"]
        unit, size = choose_unit(max(rank["peak_bytes"] for rank in ranks))
        rows = [
            (f"rank {rank['rank']}", {name: rank["parts"][key] / size for key, name in PARTS.items()}) for rank in ranks
        ]
        return [_Panel(f"memory at the peak, {unit}", rows, self._document["capacity_bytes"] / size)]


def to_prediction(case: Case) -> PredictedLayout:
    """The prediction of a case."""
    return PredictedLayout(case.scenario, Estimator(case.scenario).estimate(case.layout, case.kernels))
