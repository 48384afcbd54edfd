"""Predicted layouts side by side, as a value: what each costs in time and in memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dtlayout.api.answers import (
    Answer,
    PredictedLayout,
    RecommendedLayouts,
    make_memory_panel,
    make_time_panel,
    to_prediction,
)
from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.base.formatting import align, format_bytes, three_digits
from dtlayout.commands.case import Case
from dtlayout.costmodel.scenario import NO_TIME
from dtlayout.planner.choices import parse_choices
from dtlayout.planner.space import Space
from dtlayout.planner.verdicts import find_problems, parse_layout
from dtlayout.spec.layout import Layout

_WAITS = ("tp", "pp", "dp")
"""Parts of a step in which the busiest rank waits for what it sends and receives."""


@dataclass(frozen=True, repr=False)
class ComparedLayouts(Answer):
    """Predicted layouts side by side, in the order in which they were given."""

    layouts: tuple[PredictedLayout, ...]
    """The layouts, two or more."""

    @property
    def title(self) -> str:
        """The models and the GPUs, in a line."""
        jobs = [
            f"{each.scenario.model.name} on {each.layout.world_size:,} x {each.scenario.cluster.gpu.name}"
            for each in self.layouts
        ]
        return f"{' and '.join(dict.fromkeys(jobs))}, {len(self.layouts)} layouts"

    def to_dict(self) -> dict[str, Any]:
        """The prediction of each layout as values of JSON, with its waits as shares of the step."""
        return {
            "layouts": [
                {**each.to_dict(), "bubble": _share(each, "bubble"), "exposed_communication": _share(each, *_WAITS)}
                for each in self.layouts
            ]
        }

    def _rows(self) -> list[list[str]]:
        """A row for each quantity, with a cell for each layout."""
        sides = self.layouts
        return [
            ["", *(str(place) for place, _ in enumerate(sides, 1))],
            ["step, s", *map(_describe_step, sides)],
            ["tokens/s/GPU", *(_show(each.tokens_per_s_per_gpu, three_digits) for each in sides)],
            ["MFU", *(_show(each.mfu, "{:.1%}".format) for each in sides)],
            ["peak memory", *map(_describe_peak, sides)],
            ["fits", *("yes" if each.fits else "no" for each in sides)],
            ["bubble", *(_show(_share(each, "bubble"), "{:.1%}".format) for each in sides)],
            ["exposed communication", *(_show(_share(each, *_WAITS), "{:.1%}".format) for each in sides)],
        ]

    def _lines(self) -> Iterator[str]:
        yield self.title
        yield from (f"  {place}  {_name(each)}" for place, each in enumerate(self.layouts, 1))
        yield from ("", *align(self._rows()))
        if any(each.step_time_s is None for each in self.layouts):
            yield NO_TIME

    def _parts(self) -> Iterator[str]:
        from dtlayout.report import html  # only now: it imports matplotlib

        (head, *rows), names = self._rows(), map(_name, self.layouts)
        heads = [_break(f"{place}  {name}".strip()) for place, name in zip(head, ["", *names], strict=True)]
        yield html.table([heads, *rows], "layouts side by side")

    def _bars(self) -> list[Any]:
        rows = [(f"{place}  {each.layout}", each.estimate) for place, each in enumerate(self.layouts, 1)]
        return [make_time_panel(rows), make_memory_panel(rows)]


def compare(*layouts: PredictedLayout | RecommendedLayouts | Layout | str) -> ComparedLayouts:
    """Predicted layouts side by side, two or more.

    The best layouts of a search count one by one. A layout, or choices such as "tp4 mb2", are predicted for the job of
    the first argument, on its GPUs and with its kernels where they name no others. InvalidConfig if the first argument
    is no prediction, or there is nothing to compare; InvalidLayout for one that the job cannot have.
    """
    sides = list[PredictedLayout]()
    for each in layouts:
        if isinstance(each, RecommendedLayouts):
            sides += each.layouts
        elif isinstance(each, PredictedLayout):
            sides.append(each)
        elif not isinstance(each, Layout | str):
            raise InvalidConfig(f"compare takes predictions and layouts, and {each!r} is a {type(each).__name__}")
        elif not sides:
            raise InvalidConfig(f"{each} has no job: give a prediction first, as dl.predict makes it")
        else:
            sides.append(_predict(sides[0], each))
    if len(sides) < 2:
        raise InvalidConfig("compare takes two layouts or more")
    return ComparedLayouts(tuple(sides))


def _predict(first: PredictedLayout, asked: Layout | str) -> PredictedLayout:
    """A layout, or some choices, for the job of another prediction."""
    scenario, kernels, space = first.scenario, first.kernels, Space(first.scenario)
    choices = parse_choices(asked) if isinstance(asked, str) else {}
    layout = asked if isinstance(asked, Layout) else parse_layout(space, choices)[0]
    kernels = replace(kernels, **{name: value for name, value in choices.items() if hasattr(kernels, name)})
    if layout.world_size != scenario.cluster.num_gpus:
        raise InvalidLayout(f"{layout} is for {layout.world_size} GPUs, and the job has {scenario.cluster.num_gpus}")
    if problems := find_problems(space, layout, kernels):
        raise InvalidLayout(problems)
    return to_prediction(Case(scenario, layout, kernels))


def _name(side: PredictedLayout) -> str:
    """A layout with its attention and its compiling, in which layouts often differ."""
    compiled = f", compile {side.kernels.compile}"
    return f"{side.layout}, {side.kernels.attention}{compiled}"


def _break(name: str) -> str:
    """A name as HTML on a line for each of its parts, so that many fit beside each other."""
    from dtlayout.report import html  # only now: it imports matplotlib

    return html.Markup(",<br>".join(map(html.escape, name.split(", "))))


def _share(side: PredictedLayout, *parts: str) -> float | None:
    """Share of the step that these parts take, 0 to 1; None where seconds are not known."""
    if (times := side.time_s) is None or not side.step_time_s:
        return None
    return sum(times[part] for part in parts) / side.step_time_s


def _show(value: float | None, form: Any) -> str:
    return "n/a" if value is None else str(form(value))


def _describe_step(side: PredictedLayout) -> str:
    if (around := side.step_time_range_s) is None:
        return "n/a"
    return f"{side.step_time_s:.3f} ({around[0]:.3f} to {around[1]:.3f})"


def _describe_peak(side: PredictedLayout) -> str:
    low, high = side.peak_range_bytes
    return f"{format_bytes(side.peak_bytes, 1)} ({format_bytes(low, 1)} to {format_bytes(high, 1)})"
