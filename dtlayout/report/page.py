"""The report of measured rows, as one page that needs no other file and as Markdown: findings, charts, every layout."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from dtlayout.base.formatting import choose_unit, escape_markdown, plural, to_markdown
from dtlayout.costmodel.scenario import fullest_share
from dtlayout.models.counting import count_model_flops_per_token
from dtlayout.records.run import Run
from dtlayout.report import html
from dtlayout.report.charts import Bar, Ratio, beside, draw_bars, draw_heat, draw_ratios
from dtlayout.report.findings import Finding, find, find_common, list_options
from dtlayout.report.imbalance import find_imbalances
from dtlayout.report.questions import choose
from dtlayout.validation.plots import draw_equality
from dtlayout.validation.predict import predict
from dtlayout.validation.scores import Prediction, by_table

_BARS = 24
"""Most layouts whose memory is drawn."""
_MFU, _SPEED = "MFU, %", "tokens/s/GPU"
_READING = (
    "Each line compares pairs of layouts that differ in this choice alone. The dot is the median of their ratios of "
    "speed, the bar holds the middle half of them, and right of the upright line the choice is faster."
)


class Report:
    """Everything that a report says of some measured rows, as Markdown and as a page."""

    def __init__(self, runs: Sequence[Run], left_out: str = ""):
        """Findings and predictions are computed here, a second for a thousand rows; `left_out` names further rows."""
        self.runs, self.left_out = list(runs), left_out
        self.findings, self.common, self.predictions = find(runs), find_common(runs), predict(runs)
        self.imbalances = find_imbalances(runs)
        self.tables = by_table(sorted(self.predictions, key=lambda row: row.run.table))
        # Somebody measured an MFU, and nothing ran where no peak is known.
        self._has_mfu = any(run.mfu is not None for run in runs) and all(r.scenario.cluster.gpu.has_mfu for r in runs)
        self._unit = _MFU if self._has_mfu else _SPEED
        peaks = [row.estimate.memory[0].total for row in self.predictions]
        self._memory = choose_unit(max([run.peak_bytes or 0 for run in runs] + peaks))

    @property
    def title(self) -> str:
        """Number of layouts, of sweeps, and of layouts that ran, in a line."""
        ran = sum(run.tokens_per_s_per_gpu is not None for run in self.runs)
        return f"{plural(len(self.runs), 'layout')} in {plural(len(self.tables), 'sweep')}, of which {ran} ran"

    def list_findings(self) -> list[list[str]]:
        """Each question with its answer."""
        rows = [["question", "what the rows say"]]
        rows += [[finding.question.name, finding.describe()] for finding in self.findings]
        return rows + [[f"The fastest tenth of each sweep: {each.name}", each.describe()] for each in self.common]

    def list_best(self) -> list[list[str]]:
        """The fastest layout of each sweep."""
        best = [max(rows, key=lambda row: row.run.tokens_per_s_per_gpu or 0.0) for rows in self.tables.values()]
        return self._list_rows([row for row in best if row.run.tokens_per_s_per_gpu])

    def to_markdown(self) -> str:
        """Findings and best layouts as Markdown."""
        findings, best = ("\n".join(to_markdown(rows)) for rows in (self.list_findings(), self.list_best()))
        parts = [f"# {self.title}", escape_markdown(self.left_out), "## Findings", findings, "## Fastest", best]
        if self.imbalances:
            parts += [
                "## Balance of experts",
                "\n".join(f"- {escape_markdown(f)}." for f in self._describe_imbalances()),
            ]
        return "\n\n".join(filter(None, parts)) + "\n"

    def write_page(self, path: Path) -> None:
        """Write everything as one page; DtlayoutError if the file cannot be written."""
        parts = [html.heading(heading) + content for heading, content in self._parts()]
        left_out = [html.paragraph(self.left_out, "note")] if self.left_out else []
        html.write_page(path, self.title, [*left_out, *parts])

    def _parts(self) -> Iterator[tuple[str, str]]:
        """The parts of the page, each with its heading."""
        yield "What each choice does", self._draw_findings()
        if self.common:
            yield "What the fastest tenth of each sweep chose", self._draw_common()
        yield "The fastest layout of each sweep", html.table(self.list_best(), "the fastest layouts")
        if self.imbalances:
            yield "Balance of experts", html.bullets(f"{sentence}." for sentence in self._describe_imbalances())
        for name in ("micro_batch", "recompute", "attention", "norm", "sequence_parallel"):
            if len(options := list_options(name, self.runs)) > 1:
                yield f"Best {self._unit} by {name}, whatever else was chosen", self._draw_best(name, options)
        yield f"Best {self._unit} by tp and pp", beside(map(self._draw_heat, self.tables))
        if self._pair_speeds(self.predictions):
            yield "Predicted against measured speed", self._draw_predictions()
        fastest = sorted(self.predictions, key=lambda row: self._measure(row.run), reverse=True)
        if known := [row for row in fastest if row.run.peak_bytes and self._measure(row.run)]:
            yield "Memory of pipeline rank 0, the fastest layouts", self._draw_memory(known[:_BARS])
        yield "All layouts, the fastest first", html.sorted_table(self._list_rows(fastest), "all layouts", self._unit)

    def _describe_imbalances(self) -> list[str]:
        return [each.describe() for each in self.imbalances]

    def _draw_findings(self) -> str:
        """Supported findings as a picture and in sentences; the others folded away."""
        supported = [finding for finding in self.findings if finding.speaks_of_speed or finding.speaks_of_fit]
        settled = sorted(supported, key=lambda finding: -(finding.factor or 0.0))
        open_ones = [finding for finding in self.findings if finding not in settled]
        parts = []
        if ratios := [_to_ratio(finding) for finding in settled if finding.quartiles]:
            parts += [html.paragraph(_READING, "note"), draw_ratios(ratios, name="speed of each choice")]
        parts.append(html.bullets(f"{finding.question.name}: {finding.describe()}." for finding in settled))
        if not settled:
            parts = [html.paragraph("These rows settle none of the questions below.")]
        if open_ones:
            sentences = (f"{finding.question.name}: {finding.describe()}." for finding in open_ones)
            parts.append(html.fold(f"{plural(len(open_ones), 'question')} left open", html.bullets(sentences)))
        return "".join(parts)

    def _draw_common(self) -> str:
        settled = [each for each in self.common if each.is_supported]
        open_ones = [each for each in self.common if not each.is_supported]
        bars = [
            Bar(f"{each.name}={each.value}", [each.share], f"{each.share:.0%}, of all {each.share_of_all:.0%}",
                each.share_of_all)
            for each in sorted(settled, key=lambda each: -each.share)
        ]  # fmt: skip
        parts = (
            [draw_bars(bars, ["share of the fastest tenth"], "share of all that ran", 1.0, name="shares of choices")]
            if bars
            else []
        )
        if open_ones:
            sentences = (f"{each.name}: {each.describe()}." for each in open_ones)
            parts.append(html.fold(f"{plural(len(open_ones), 'choice')} on which they differ", html.bullets(sentences)))
        return "".join(parts)

    def _measure(self, run: Run) -> float:
        """Measured MFU in percent, or tokens a second of one GPU where nobody knows the peak; 0 if it did not run."""
        speed, scenario = run.tokens_per_s_per_gpu, run.scenario
        if speed is None or not self._has_mfu:
            return speed or 0.0
        flops_per_s = speed * count_model_flops_per_token(scenario.model, scenario.batch.seq_len)
        return 100 * (run.mfu if run.mfu is not None else flops_per_s / scenario.cluster.gpu.peak_flops_per_s)

    def _predict(self, row: Prediction) -> float | None:
        """The predicted speed, as `_measure` is measured; None where no time is known."""
        if not row.estimate.knows_time:
            return None
        if self._has_mfu:
            return 100 * row.estimate.mfu
        scenario = row.run.scenario
        return scenario.batch.num_tokens / row.estimate.step_time_s / scenario.cluster.num_gpus

    def _draw_best(self, name: str, options: Sequence[Hashable]) -> str:
        """A chart for each sweep: the best speed with each value of a choice."""

        def best(rows: Sequence[Prediction], option: Hashable) -> float | None:
            speeds = (self._measure(row.run) for row in rows if choose(row.run, name) == option)
            return max(speeds, default=0.0) or None

        lines = {table: [best(rows, option) for option in options] for table, rows in self.tables.items()}
        return draw_heat([str(option) for option in options], lines, name)

    def _draw_heat(self, table: str) -> str:
        """The best speed of one sweep for each tp and pp."""
        best: dict[tuple[int, int], float] = {}
        for run in (row.run for row in self.tables[table]):
            at = run.layout.pp, run.layout.tp
            best[at] = max(best.get(at, 0.0), self._measure(run))
        pps, tps = (sorted(set(degrees)) for degrees in zip(*best, strict=True))
        rows = {f"pp {pp}": [best.get((pp, tp)) or None for tp in tps] for pp in pps}
        return html.paragraph(table, "note") + draw_heat([f"tp {tp}" for tp in tps], rows, table)

    def _pair_speeds(self, rows: Iterable[Prediction]) -> list[tuple[float, float]]:
        """Measured and predicted speed of each row that has both."""
        found = ((self._measure(row.run), self._predict(row)) for row in rows)
        return [(measured, predicted) for measured, predicted in found if measured and predicted]

    def _draw_predictions(self) -> str:
        figure, axes = plt.subplots(figsize=(7, 4.2 + 0.17 * len(self.tables)), layout="constrained")
        axes.set_prop_cycle(color=html.LINES)
        speeds: list[float] = []
        for name, rows in self.tables.items():
            if pairs := self._pair_speeds(rows):
                measured, predicted = zip(*pairs, strict=True)
                axes.scatter(measured, predicted, s=12, alpha=0.7, linewidth=0, label=name)
                speeds += [*measured, *predicted]
        draw_equality(axes, 0.9 * min(speeds), 1.1 * max(speeds), color="0.4")
        axes.set(xlabel=f"measured {self._unit}", ylabel=f"predicted {self._unit}")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower left", fontsize=8, frameon=False)
        return html.picture(figure, "predicted against measured speed")

    def _draw_memory(self, shown: Sequence[Prediction]) -> str:
        """Measured bars with marks where they were predicted."""
        unit, size = self._memory
        bars = [
            Bar(f"{row.run.layout} {row.run.kernels.attention}", [peak], f"{peak:.2f} {unit}", predicted)
            for row in shown
            for peak, predicted in [((row.run.peak_bytes or 0) / size, row.estimate.memory[0].total / size)]
        ]
        return draw_bars(bars, ["measured"], "predicted", name="measured and predicted")

    def _list_rows(self, rows: Sequence[Prediction]) -> list[list[str]]:
        """A line for each row, below the names of the columns that some row has."""
        lines = [self._describe(row) for row in rows]
        columns = [name for name in (lines or [{}])[0] if any(line[name] for line in lines)] or ["sweep"]
        return [columns, *([line[name] for name in columns] for line in lines)]

    def _describe(self, row: Prediction) -> dict[str, str]:
        """Column → cell; empty where nothing is known."""
        run, layout, kernels = row.run, row.run.layout, row.run.kernels
        unit, size = self._memory
        imbalance = run.measured.expert_imbalance

        def show(value: float | None, form: str) -> str:
            return format(value, form) if value else ""

        return {
            "sweep": run.table, "outcome": run.outcome,
            _MFU: show(self._measure(run), ".1f") if self._has_mfu else "",
            f"predicted {_MFU}": show(self._predict(row), ".1f") if self._has_mfu else "",
            _SPEED: show(run.tokens_per_s_per_gpu, ",.0f"), "step, s": show(run.step_time_s, ".3f"),
            "micro_batch": str(layout.micro_batch), "tp": str(layout.tp), "pp": str(layout.pp), "dp": str(layout.dp),
            "sp": "yes" if layout.shards_sequence else "no", "zero": str(layout.zero), "recompute": layout.recompute,
            "attention": kernels.attention, "norm": kernels.norm,
            f"peak, {unit}": show((run.peak_bytes or 0) / size, ".2f"),
            f"predicted peak, {unit}": show(row.estimate.memory[0].total / size, ".2f"),
            "ep": str(layout.ep) if run.scenario.model.experts else "", "imbalance": show(imbalance, ".2f"),
            "predicted imbalance": show(imbalance and fullest_share(run.scenario, layout), ".2f"),
        }  # fmt: skip


def _to_ratio(finding: Finding) -> Ratio:
    """A finding as a line of the picture."""
    assert finding.quartiles and finding.factor, "some pairs ran"
    texts = [f"×{finding.factor:.2f}" + ("" if finding.speaks_of_speed else ", chance")]
    if finding.speaks_of_fit:
        texts += [f"{finding.num_only_after} fit only with it"] * (finding.num_only_after > 0)
        texts += [f"{finding.num_only_before} only without"] * (finding.num_only_before > 0)
    low, high = finding.quartiles
    return Ratio(finding.question.name, low, finding.factor, high, "; ".join(texts))
