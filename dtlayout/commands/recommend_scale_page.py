"""The answer of `recommend --scale` as one page that needs no other file: cost against days, efficiency, every cluster.

It is made of the document that `--json` prints, so that a page says nothing that a program cannot read.
"""

from collections.abc import Iterator, Sequence
from math import log
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, StrMethodFormatter

from dtlayout.base.formatting import plural, three_digits
from dtlayout.commands.arguments import JsonDocument
from dtlayout.commands.recommend_page import describe_scenario
from dtlayout.commands.recommend_text import format_tokens
from dtlayout.report import html
from dtlayout.report.charts import Bar, draw_bars

_APART, _ABOVE = 0.15, 0.08
"""Shares of the axes of days and of cost below which two labels would touch."""
_LONG = 0.22
"""Share of the axis below which two names with marks would touch."""
_LINE = 13
"""Points between lines of labels."""


def write_scale_page(path: Path, document: JsonDocument) -> None:
    """Write the page of a document that compares clusters; DtlayoutError if it cannot be written."""
    scenario = document["scenario"]
    sizes = sorted(row["num_gpus"] for row in document["scale"])
    numbers = f"{sizes[0]:,}" if len(set(sizes)) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    html.write_page(path, f"{scenario['model']['name']} on {numbers} x {scenario['gpu']}", _parts(document))


def _parts(document: JsonDocument) -> Iterator[str]:
    rows = [row for row in document["scale"] if row["layout"]]
    if not rows:
        yield html.paragraph("No layout is legal and fits on any of these clusters.", "lead")
    elif "tokens" in document:
        yield html.paragraph(_describe_marks(document, rows), "lead")
    yield html.paragraph(describe_scenario(document["scenario"]), "note")
    if rows and "tokens" in document:
        yield html.heading("Cost against days") + _draw_costs(document, rows)
        yield html.paragraph(_describe_budget(document), "note")
    if rows:
        yield html.heading("Efficiency") + _draw_efficiency(rows)
        first = f"those of {plural(rows[0]['num_gpus'], 'GPU', ',')}"
        yield html.paragraph(f"Tokens a second of one GPU, as a share of {first}, on the same batch.", "note")
    yield html.heading("The best layout of each cluster")
    yield html.sorted_table(_list_rows(document), "clusters", "GPUs", "ascending")


def _read_costs(document: JsonDocument, rows: Sequence[JsonDocument]) -> tuple[str, list[float]]:
    """Name and values of the cost of a training on each cluster: money where there is a price, else GPU-hours."""
    name, key = ("GPU-hours", "gpu_hours") if document["price_per_gpu_hour"] is None else ("money", "money")
    return name, [row["cost"][key] for row in rows]


def _name_marks(document: JsonDocument, row: JsonDocument) -> str:
    """Marks of a cluster, such as cheapest, fastest or knee; empty if it has none."""
    return ", ".join(name for name, num_gpus in document["marks"].items() if num_gpus == row["num_gpus"])


def _describe_marks(document: JsonDocument, rows: Sequence[JsonDocument]) -> str:
    """A sentence on each cluster that has a mark: its GPUs, its days, and its cost in money or GPU-hours."""
    name, costs = _read_costs(document, rows)
    return " ".join(
        f"{marks.capitalize()}: {plural(row['num_gpus'], 'GPU', ',')}, {row['cost']['days']:,.1f} days, "
        f"{cost:,.0f} {'GPU-hours' if name == 'GPU-hours' else 'in money'}."
        for row, cost in zip(rows, costs, strict=True)
        if (marks := _name_marks(document, row))
    )


def _describe_budget(document: JsonDocument) -> str:
    """A sentence on the tokens of the training and the price of a GPU-hour."""
    price = document["price_per_gpu_hour"]
    money = "" if price is None else f" at {price:g} for a GPU-hour"
    return f"Training on {format_tokens(document['tokens'])} tokens{money}: steps alone, without restarts."


def _draw_costs(document: JsonDocument, rows: Sequence[JsonDocument]) -> str:
    """A dot for each cluster at its days and cost, named by its GPUs; days are on a log axis."""
    name, costs = _read_costs(document, rows)
    days, marks = [row["cost"]["days"] for row in rows], [_name_marks(document, row) for row in rows]
    low, high, top = min(days) / 1.25, max(days) * 1.25, 1.35 * max(costs) or 1.0
    places = [log(value / low) / log(high / low) for value in days]
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.scatter(days, costs, s=45, c=[html.MARK if mark else html.ACCENT for mark in marks], zorder=2)
    labelled, ticks = list[int](), list[float]()
    for i in sorted(range(len(rows)), key=lambda i: not marks[i]):
        near = [other for other in labelled if abs(places[i] - places[other]) < _APART]
        beside = [other for other in labelled if abs(places[i] - places[other]) < (_LONG if marks[i] else _APART)]
        touching = sum(abs(costs[i] - costs[other]) < _ABOVE * top for other in beside)
        if touching and not marks[i]:
            continue
        labelled.append(i)
        ticks += [days[i]] * (not near)
        text = plural(rows[i]["num_gpus"], "GPU", ",") + f", {marks[i]}" * bool(marks[i])
        side = "left" if places[i] < _APART else "right" if places[i] > 1 - _APART else "center"
        at = (0, 8 + _LINE * touching)
        axes.annotate(text, (days[i], costs[i]), at, textcoords="offset points", ha=side, fontsize=9)
    axes.set(xscale="log", xlim=(low, high), ylim=(0, top), xlabel="days", ylabel=name)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:,.2g}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.spines[["top", "right"]].set_visible(False)
    return html.picture(figure, f"{name} against days")


def _draw_efficiency(rows: Sequence[JsonDocument]) -> str:
    """A bar for each cluster: speed of one GPU as a share of the first cluster's."""
    bars = [
        Bar(
            plural(row["num_gpus"], "GPU", ","),
            [row["efficiency"]],
            f"{row['efficiency']:.1%}, {_speed(row)} tokens/s/GPU",
        )
        for row in rows
    ]
    return draw_bars(bars, whole=1.0, name="efficiency of each cluster")


def _speed(row: JsonDocument) -> str:
    return f"{row['layout']['tokens_per_s_per_gpu']:,.0f}"


def _list_rows(document: JsonDocument) -> list[list[str]]:
    """A row for each cluster below the names of the columns; with costs where they are known."""
    has_budget, has_price = "tokens" in document, document.get("price_per_gpu_hour") is not None
    costs = [*["mark", "days"] * has_budget, *["money"] * has_price, *["GPU-hours", "MWh"] * has_budget]
    head = ["GPUs", *costs, "MFU, %", "tokens/s/GPU", "efficiency, %", "step, s", "range, s", "layout"]
    lines = [head]
    for row in document["scale"]:
        cells = [f"{row['num_gpus']:,}"]
        if (best := row["layout"]) is None:
            lines.append([*cells, *[""] * (len(head) - 2), "no layout is legal and fits"])
            continue
        if has_budget:
            cost, energy = row["cost"], row["cost"]["energy_mwh"]
            cells += [_name_marks(document, row), f"{cost['days']:,.1f}"]
            cells += [f"{cost['money']:,.0f}"] if has_price else []
            cells += [f"{cost['gpu_hours']:,.0f}", "" if energy is None else f"{energy:,.0f}"]
        cells += ["" if best["mfu"] is None else f"{100 * best['mfu']:.1f}", _speed(row)]
        cells.append(f"{100 * row['efficiency']:.1f}")
        low_s, high_s = best["step_time_range_s"]
        cells += [f"{best['step_time_s']:.3f}", f"{three_digits(low_s)} to {three_digits(high_s)}", best["name"]]
        lines.append(cells)
    return lines
