"""A dry run as one page that needs no other file: the curve of memory over the step, and the tables."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import matplotlib.pyplot as plt

from dtlayout.base.formatting import choose_unit, format_bytes
from dtlayout.commands.arguments import JsonDocument
from dtlayout.commands.dryrun_tables import (
    PARTS,
    describe_peak,
    describe_place,
    describe_run,
    list_tables,
    list_times,
)
from dtlayout.measure.ledger import UPDATE
from dtlayout.mesh.axes import PP
from dtlayout.report import html
from dtlayout.report.charts import Bar, beside, draw_bars

_NOTATION = (
    "Actions are named as 3F0: stage 3, forward (B: backward, SEND and RECV: its messages), microbatch 0. "
    "The curve shows the largest total during each of them."
)
_MOST_TICKS = 14
"""Most actions that are named below a curve."""
_MANY = 100
"""Number of actions from which on lines are thin, since a thick line would hide the area below it."""


def write_page(path: Path, document: JsonDocument) -> None:
    """Write the page of a dry run's document; DtlayoutError if it cannot be written."""
    html.write_page(path, document["_title"], list_parts(document))


def list_parts(document: JsonDocument) -> Iterator[str]:
    """HTML of a dry run's document, each part whole by itself."""
    yield from (html.paragraph(note, "note") for note in document["notes"])
    yield html.heading("Memory at the peak") + _draw_peaks(document)
    if times := list_times(document, compares=True):
        yield html.heading("Time of a step") + html.table(times)
    yield html.heading("Memory over the step") + html.paragraph(_NOTATION, "note")
    for rank in document["ranks"]:
        shares, messages, flops, *compared = list_tables(rank, compares=True)
        yield html.subheading(describe_place(document, rank).capitalize())
        yield html.paragraph(f"The peak is {describe_peak(document, rank)}. Run: {describe_run(document, rank)}.")
        yield _draw_curve(rank, document["capacity_bytes"])
        yield beside(map(html.table, (shares, *compared)))
        yield html.fold("Messages", html.table(messages)) + html.fold("FLOPs by module", html.table(flops))


def _draw_peaks(document: JsonDocument) -> str:
    """Each rank's memory at its peak, with marks where the cost model predicts it."""
    ranks, predicted = document["ranks"], document["run"]["predicted"]["memory"]
    _, size = choose_unit(max(rank["peak_bytes"] for rank in ranks))
    bars = [
        Bar(
            name=describe_place(document, rank),
            parts=[rank["parts"][key] / size for key in PARTS],
            text=format_bytes(rank["peak_bytes"]) + ("" if rank["fits"] else ", does not fit"),
            mark=sum(predicted[rank["coordinate"][PP]].values()) / size,
        )
        for rank in ranks
    ]
    return draw_bars(bars, list(PARTS.values()), "predicted", name="memory of each rank at its peak")


def _space_out(places: Iterable[int], least: float) -> list[int]:
    """Places that lie at least so far from all that were taken before them."""
    taken: list[int] = []
    for place in places:
        if all(abs(place - other) >= least for other in taken):
            taken.append(place)
    return taken


def _draw_curve(rank: JsonDocument, capacity_bytes: float) -> str:
    """The largest total during each action as SVG: dry, predicted and measured; the capacity if it is not far above."""
    unit, size = choose_unit(rank["peak_bytes"])
    actions, heights = zip(*((each["action"], each["nbytes"] / size) for each in rank["curve"]), strict=True)
    edges, capacity = range(len(heights) + 1), capacity_bytes / size
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    axes.stairs(heights, edges, baseline=0, fill=True, color=html.ACCENT, alpha=0.6, label="dry run")
    width = 2.2 if len(heights) < _MANY else 0.8
    predicted = [nbytes / size for nbytes in rank["predicted_curve"]]
    axes.stairs(predicted, edges, baseline=None, color=html.MARK, linewidth=width, alpha=0.7, label="predicted")
    top = max(*heights, *predicted)
    if measured := rank["measured"]:
        held = [highest["nbytes"] / size for highest in measured]
        axes.stairs(held, edges, baseline=None, color="black", linewidth=1, linestyle=(0, (2, 2)), label="measured")
        top = max(top, *held)
    if capacity < 1.6 * top:
        axes.axhline(capacity, color="0.2", linewidth=1, label=f"capacity, {capacity:.2f} {unit}")
        top = max(top, capacity)
    peak = heights.index(max(heights))
    label = f"{heights[peak]:.3f} {unit} in {actions[peak]}"
    side = "left" if peak < 0.2 * len(heights) else "right" if peak > 0.8 * len(heights) else "center"
    axes.annotate(label, (peak + 0.5, heights[peak]), (0, 3), textcoords="offset points", ha=side, fontsize=8)
    ends = [i for i, action in enumerate(actions) if action == UPDATE]
    for end in ends[:-1]:
        axes.axvline(end + 1, color="0.6", linewidth=0.8, linestyle=":")
    computing = (i for i, action in enumerate(actions) if "_" not in action)  # messages have long names
    places = _space_out((peak, *ends, *computing), len(heights) / _MOST_TICKS)
    axes.set_xticks([i + 0.5 for i in places], [actions[i] for i in places], fontsize=8)
    axes.set(xlim=(0, len(heights)), ylim=(0, 1.12 * top), ylabel=unit)
    figure.legend(loc="outside upper right", fontsize=8, ncols=4, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return html.picture(figure, f"memory of rank {rank['rank']} over the step")
