"""A search's answer as one page that needs no other file: the best layouts, and what stands against others.

It is made of the document that `--json` prints, so that a page says nothing that a program cannot read.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from dtlayout.base.formatting import choose_unit, format_bytes, plural, three_digits
from dtlayout.commands.arguments import JsonDocument
from dtlayout.commands.recommend_text import BASELINE_NAMES, OUTCOMES, describe_simplest, describe_usual
from dtlayout.planner.verdicts import fold_alike
from dtlayout.records.intervals import Alike
from dtlayout.report import html
from dtlayout.report.charts import Bar, Ratio, draw_bars, draw_ratios

_IMPOSSIBLE = ("not legal", "does not fit", "too full")
"""Outcomes of a choice that has no speed to compare."""


def write_page(path: Path, document: JsonDocument) -> None:
    """Write the page of one search's document; DtlayoutError if it cannot be written."""
    scenario = document["scenario"]
    title = f"{scenario['model']['name']} on {scenario['num_gpus']:,} x {scenario['gpu']}"
    html.write_page(path, title, [*list_parts(document), *_list_numbers(document)])


def list_parts(document: JsonDocument) -> Iterator[str]:
    """HTML of one search's document but its long tables, each part whole by itself."""
    scenario, layouts = document["scenario"], document["layouts"]
    yield html.paragraph(_describe_best(scenario, layouts[0]), "lead")
    yield html.paragraph(describe_scenario(scenario), "note")
    yield html.heading("Where the step goes") + _draw_steps(layouts)
    yield "".join(html.paragraph(f"{i}: {each['why']}.") for i, each in enumerate(layouts, 1) if each["why"])
    if document["alike"]:
        yield html.paragraph(str(Alike(**document["alike"])), "note")
    said = (describe_simplest(document["simplest"]), describe_usual(document["usual"]))
    yield "".join(html.paragraph(sentence, "note") for sentence in said if sentence)
    yield html.heading("Memory of the fullest rank") + _draw_memory(layouts)
    yield html.heading("Other choices than those of the best")
    yield from _compare_choices(document["against"], layouts[0]["step_time_s"])
    yield from _answer_questions(document)


def _list_numbers(document: JsonDocument) -> Iterator[str]:
    """A table of the best layouts, and how many of all were left out, and why."""
    scenario, layouts = document["scenario"], document["layouts"]
    yield html.heading("The best layouts in numbers")
    yield html.sorted_table(_list_layouts(scenario, layouts), "layouts", "place", "ascending")
    searched = document["searched"]
    counts = [["left out because", "layouts"], *([why, f"{count:,}"] for why, count in searched["counts"].items())]
    yield html.fold(f"{plural(searched['layouts'], 'layout', ',')} searched", html.table(counts))


def _describe_best(scenario: JsonDocument, best: JsonDocument) -> str:
    low_s, high_s = best["step_time_range_s"]
    mfu = "" if best["mfu"] is None else f"{best['mfu']:.1%} MFU, "
    return (
        f"{best['name']}: {mfu}{three_digits(best['tokens_per_s_per_gpu'])} tokens/s/GPU, "
        f"{best['step_time_s']:.3f} s a step ({low_s:.3f} to {high_s:.3f}), "
        f"{format_bytes(best['peak_bytes'], 1)} of {format_bytes(best['capacity_bytes'], 1)}."
    )


def describe_scenario(scenario: JsonDocument) -> str:
    """The batch, the program, and how far its predictions are to be trusted."""
    batch, step = scenario["batch"], scenario["intervals"]["step_time"]
    known = "" if scenario["calibrated"] else f", of which no run on {scenario['gpu']} is known"
    return (
        f"{plural(batch['global_batch'], 'sequence', ',')} of {plural(batch['seq_len'], 'token', ',')} a step, with "
        f"the program {scenario['engine']}{known}. The range held for {step['covered']:.0%} of {step['rows']:,} "
        f"measured runs: {step['like']}."
    )


def _draw_steps(layouts: Sequence[JsonDocument]) -> str:
    """A bar for each layout: the parts of its step."""
    bars = [
        Bar(
            name=f"{place}  {each['name']}",
            parts=list(each["time"].values()),
            text=f"{each['step_time_s']:.3f} s" + ("" if each["mfu"] is None else f", {each['mfu']:.1%} MFU"),
        )
        for place, each in enumerate(layouts, 1)
    ]
    return draw_bars(bars, list(layouts[0]["time"]), name="parts of a step of each layout")


def _draw_memory(layouts: Sequence[JsonDocument]) -> str:
    """A bar for each layout: the components of its fullest rank, beside the capacity."""
    capacity = layouts[0]["capacity_bytes"]
    fullest = [each["memory"][each["busiest_rank"]] for each in layouts]
    bars = [
        Bar(f"{place}  {each['name']}", list(rank.values()), format_bytes(each["peak_bytes"], 1), capacity)
        for place, (each, rank) in enumerate(zip(layouts, fullest, strict=True), 1)
    ]
    return draw_bars(bars, list(fullest[0]), f"capacity, {format_bytes(capacity, 1)}", name="memory of each layout")


def _compare_choices(against: Sequence[JsonDocument], best_s: float) -> Iterator[str]:
    """Speeds of other choices beside the best as a picture and in sentences; impossible choices are folded away."""
    rows = [(each["change"], each) for each in against]
    folded = fold_alike(rows, lambda each: (each["name"], each["problems"][0]))
    against = [{**each, "change": changes} for changes, each in folded]
    possible = [each for each in against if each["outcome"] not in _IMPOSSIBLE and each["step_time_s"]]
    possible.sort(key=lambda each: each["step_time_s"])
    if possible:
        yield draw_ratios([
            Ratio(each["change"], ratio, ratio, ratio, f"×{ratio:.2f}")
            for each in possible
            for ratio in [best_s / each["step_time_s"]]
        ], name="speed of other choices")  # fmt: skip
        yield html.bullets(f"{each['change']}, as {each['name']}: {each['problems'][0]}." for each in possible)
    if impossible := [each for each in against if each not in possible]:
        sentences = (f"{each['change']}: {each['outcome']}, {each['problems'][0]}." for each in impossible)
        yield html.fold(f"{plural(len(impossible), 'choice')} not legal or too large", html.bullets(sentences))


def _answer_questions(document: JsonDocument) -> Iterator[str]:
    """Answers to further questions: why not another layout, the layout of a procedure, and peaks of dry runs."""
    if found := document.get("why_not"):
        yield html.heading("Why not the layout that was asked about?")
        yield html.paragraph(f"{OUTCOMES[found['outcome']]}.") + html.bullets(found["problems"])
        if best := found["best_with_these_choices"]:
            yield html.paragraph(
                f"The best with these choices, {best['name']}, takes {best['step_time_s']:.3f} s a step."
            )
    if found := document.get("baseline"):
        yield html.heading(f"What {BASELINE_NAMES[found['name']]} chooses")
        if found["layout"] is None:
            yield html.paragraph("It finds no layout that is legal and fits.")
        else:
            slower = f"a step of the best is {1 - 1 / (1 + found['slower_than_best']):.1%} shorter"
            yield html.paragraph(f"{found['layout']['name']}: {found['layout']['step_time_s']:.3f} s a step; {slower}.")
            yield html.bullets(found["steps"])
    if found := document.get("verified"):
        yield html.heading("Dry runs")
        yield html.table([
            ["place", "dry run", "predicted", "fits"],
            *([str(place), format_bytes(each["peak_memory_bytes"]), format_bytes(each["predicted_peak_memory_bytes"]),
               "yes" if each["fits"] else "no"] for place, each in enumerate(found, 1)),
        ])  # fmt: skip


def _list_layouts(scenario: JsonDocument, layouts: Sequence[JsonDocument]) -> list[list[str]]:
    """A line for each layout, the fastest first, below the names of the columns."""
    unit, size = choose_unit(max(each["peak_bytes"] for each in layouts))
    shown = ("pp", "cp", "tp", "micro_batch", "zero", "schedule", "virtual_stages", "recompute")
    has_mfu = layouts[0]["mfu"] is not None
    rows = [
        ["place", "layout", *["MFU, %"] * has_mfu, "tokens/s/GPU", "step, s", "range, s", f"peak, {unit}", *shown]
    ]  # fmt: skip
    for place, each in enumerate(layouts, 1):
        low_s, high_s = each["step_time_range_s"]
        seconds = [f"{each['step_time_s']:.3f}", f"{three_digits(low_s)} to {three_digits(high_s)}"]
        speed = three_digits(each["tokens_per_s_per_gpu"])
        mfu = [f"{100 * each['mfu']:.1f}"] if has_mfu else []
        choices = [str(each["layout"][name]) for name in shown]
        rows.append([str(place), each["name"], *mfu, speed, *seconds, f"{each['peak_bytes'] / size:.2f}", *choices])
    return rows
