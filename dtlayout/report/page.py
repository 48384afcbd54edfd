"""The report of measured rows, as one page that needs no other file and as Markdown: findings, plots, every layout."""

import textwrap
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from dtlayout.models.counting import count_model_flops_per_token
from dtlayout.planner.plots import draw_equality
from dtlayout.planner.runs import Run
from dtlayout.planner.scores import Prediction, by_table
from dtlayout.planner.validate import predict
from dtlayout.report import html
from dtlayout.report.findings import find, find_common, list_options
from dtlayout.report.questions import choose
from dtlayout.text import GIB, choose_unit, plural, to_markdown

_STYLE = """
body { max-width: 74em; } .findings td, .findings th { text-align: left; vertical-align: top; }
.wide { overflow-x: auto; font-size: 13px; }
#rows th { cursor: pointer; }
#filter { width: 30em; font: inherit; padding: .2em .4em; }
"""
_SCRIPT = """
const table = document.getElementById('rows'), body = table.tBodies[0], rows = [...body.rows];
const value = (row, i) => { const t = row.cells[i].textContent, n = parseFloat(t); return isNaN(n) ? t : n; };
const compare = (a, b) => typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === 'number' ? -1 : 1;
[...table.tHead.rows[0].cells].forEach((cell, i) => cell.addEventListener('click', () => {
  const down = cell.dataset.order !== 'down';
  [...table.tHead.rows[0].cells].forEach(other => delete other.dataset.order);
  cell.dataset.order = down ? 'down' : 'up';
  rows.sort((a, b) => {
    const [x, y] = [value(a, i), value(b, i)], order = compare(x, y);
    return typeof x === typeof y && down ? -order : order;
  });
  body.append(...rows);
}));
document.getElementById('filter').addEventListener('input', event => {
  const words = event.target.value.toLowerCase().split(/\\s+/).filter(Boolean);
  rows.forEach(row => {
    const cells = [...row.cells].map((cell, i) => table.tHead.rows[0].cells[i].textContent + '=' + cell.textContent);
    const text = (row.textContent + ' ' + cells.join(' ')).toLowerCase();
    const matches = word => word.includes('=') ? cells.some(c => c.toLowerCase() === word) : text.includes(word);
    row.hidden = !words.every(matches);
  });
});
"""
_COLUMNS = (
    "sweep", "outcome", "micro_batch", "tp", "pp", "dp", "sp", "zero", "recompute", "attention", "norm", "step_s",
    "mfu_%", "predicted_mfu_%", "peak_gib", "predicted_gib",
)  # fmt: skip
_BARS = 24
"""Layouts of which memory is drawn."""
_LEGEND_COLUMNS, _LABEL_LETTERS, _MOST_LABELS = 6, 130, 40
"""Values side by side in a legend, letters of sweeps' names below a plot, and bars that have room for their numbers."""


class Report:
    """Everything that a report says of some measured rows, as Markdown and as a page."""

    def __init__(self, runs: Sequence[Run], left_out: str = ""):
        """Finds and predicts at once, a second for a thousand rows; `left_out` says of which there is nothing."""
        self.runs, self.left_out = list(runs), left_out
        self.findings, self.common, self.predictions = find(runs), find_common(runs), predict(runs)
        self.tables = by_table(sorted(self.predictions, key=lambda row: row.run.table))
        # Somebody measured an MFU, and nothing ran where no peak is known.
        self._has_mfu = any(run.mfu is not None for run in runs) and all(r.scenario.cluster.gpu.has_mfu for r in runs)
        self._unit = "MFU, %" if self._has_mfu else "tokens/s of a rank"

    @property
    def title(self) -> str:
        """What the report is about."""
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
        return [list(_COLUMNS), *(_describe(row) for row in best if row.run.tokens_per_s_per_gpu)]

    def to_markdown(self) -> str:
        """Findings and best layouts as Markdown."""
        findings, best = ("\n".join(to_markdown(rows)) for rows in (self.list_findings(), self.list_best()))
        parts = [f"# {self.title}", self.left_out, "## Findings", findings, "## Fastest", best]
        return "\n\n".join(filter(None, parts)) + "\n"

    def write_page(self, path: Path) -> None:
        """Write everything as one page; DtlayoutError if the file cannot be written."""
        parts = [html.heading(heading) + content for heading, content in self._parts()]
        left_out = [html.paragraph(self.left_out)] if self.left_out else []
        html.write_page(path, self.title, [*left_out, *parts], _STYLE)

    def _parts(self) -> Iterator[tuple[str, str]]:
        """Headings, and what is below them."""
        yield "Findings", html.table(self.list_findings(), ' class="findings"')
        yield "The fastest layout of each sweep", f'<div class="wide">{html.table(self.list_best())}</div>'
        for name in ("micro_batch", "recompute", "attention", "norm", "sequence_parallel"):
            if len(options := list_options(name, self.runs)) > 1:
                yield f"Best speed by {name}, whatever else was chosen", self._draw_best(name, options)
        yield "Best speed by tp and pp", self._draw_heat()
        yield "Predicted against measured speed", self._draw_predictions()
        if known := [row for row in self.predictions if row.run.peak_bytes and self._measure(row.run)]:
            fastest = sorted(known, key=lambda row: self._measure(row.run), reverse=True)[:_BARS]
            yield "Memory of pipeline rank 0, the fastest layouts", _draw_memory(fastest)
        rows = [list(_COLUMNS), *(_describe(row) for rows in self.tables.values() for row in rows)]
        everything = html.table(rows, ' id="rows"')
        words = '<p><input id="filter" placeholder="filter: words, or column=value such as tp=2"></p>'
        yield "All layouts", f'{words}<div class="wide">{everything}</div><script>{_SCRIPT}</script>'

    def _measure(self, run: Run) -> float:
        """Measured MFU in percent, or tokens a second of one GPU where nobody knows the peak; 0 if it did not run."""
        speed, scenario = run.tokens_per_s_per_gpu, run.scenario
        if speed is None or not self._has_mfu:
            return speed or 0.0
        flops_per_s = speed * count_model_flops_per_token(scenario.model, scenario.batch.seq_len)
        return 100 * (run.mfu if run.mfu is not None else flops_per_s / scenario.cluster.gpu.peak_flops_per_s)

    def _predict(self, row: Prediction) -> float:
        """The predicted speed, as `_measure` is measured."""
        if self._has_mfu:
            return 100 * row.estimate.mfu
        scenario = row.run.scenario
        return scenario.batch.num_tokens / row.estimate.step_time_s / scenario.cluster.num_gpus

    def _draw_best(self, name: str, options: Sequence[Hashable]) -> str:
        """Bars of the best of each value, a group for each sweep."""
        figure, axes = plt.subplots(figsize=(10, 3), layout="constrained")
        width = 0.8 / len(options)
        for number, option in enumerate(options):
            best = [
                max((self._measure(row.run) for row in rows if choose(row.run, name) == option), default=0.0)
                for rows in self.tables.values()
            ]
            bars = axes.bar(np.arange(len(best)) + number * width, best, width * 0.9, label=f"{name}={option}")
            if len(options) * len(best) <= _MOST_LABELS:
                axes.bar_label(bars, [f"{value:.1f}" if value else "–" for value in best], fontsize=7, padding=1)
        names = [_fold(name, max(8, _LABEL_LETTERS // len(self.tables))) for name in self.tables]
        axes.set_xticks(np.arange(len(names)) + 0.4 - width / 2, names, fontsize=7)
        axes.set_ylabel(self._unit)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper right", ncols=min(len(options), _LEGEND_COLUMNS), fontsize=8, frameon=False)
        return html.picture(figure)

    def _draw_heat(self) -> str:
        """A square for each tp and pp with the best speed, a picture for each sweep."""
        tps, pps = (sorted({getattr(run.layout, axis) for run in self.runs}) for axis in ("tp", "pp"))
        columns = min(3, len(self.tables))
        lines = -(-len(self.tables) // columns)
        figure, grid = plt.subplots(lines, columns, figsize=(10, 2.6 * lines), layout="constrained", squeeze=False)
        for axes in grid.flat[len(self.tables) :]:
            axes.set_visible(False)
        for axes, (name, rows) in zip(grid.flat, self.tables.items(), strict=False):
            best = np.zeros((len(pps), len(tps)))
            for run in (row.run for row in rows):
                at = pps.index(run.layout.pp), tps.index(run.layout.tp)
                best[at] = max(best[at], self._measure(run))
            best[best == 0] = np.nan
            if not np.isnan(best).all():
                axes.imshow(best, cmap="Blues", aspect="auto", origin="lower", vmin=0, vmax=1.4 * np.nanmax(best))
            for (row, column), value in np.ndenumerate(best):
                axes.text(column, row, "" if np.isnan(value) else f"{value:.1f}", ha="center", va="center", fontsize=8)
            axes.set_xticks(range(len(tps)), [f"tp {tp}" for tp in tps], fontsize=7)
            axes.set_yticks(range(len(pps)), [f"pp {pp}" for pp in pps], fontsize=7)
            axes.set_title(_fold(name), fontsize=8)
        return html.picture(figure)

    def _draw_predictions(self) -> str:
        figure, axes = plt.subplots(figsize=(10, 6), layout="constrained")
        speeds: list[float] = []
        for name, rows in self.tables.items():
            if pairs := [(speed, self._predict(row)) for row in rows if (speed := self._measure(row.run))]:
                measured, predicted = zip(*pairs, strict=True)
                axes.scatter(measured, predicted, s=12, alpha=0.7, linewidth=0, label=name.replace("_", " "))
                speeds += [*measured, *predicted]
        if speeds:
            draw_equality(axes, 0.9 * min(speeds), 1.1 * max(speeds), color="0.4")
            axes.legend(fontsize=8, frameon=False)
        axes.set(xlabel=f"measured {self._unit}", ylabel=f"predicted {self._unit}")
        return html.picture(figure)


def _describe(row: Prediction) -> list[str]:
    """The cells of _COLUMNS."""
    run, layout, found = row.run, row.run.layout, row.estimate

    def show(value: float | None, form: str, factor: float = 1.0) -> str:
        return "" if value is None else format(value * factor, form)

    return [
        run.table, run.outcome, *(str(n) for n in (layout.micro_batch, layout.tp, layout.pp, layout.dp)),
        "yes" if layout.shards_sequence else "no", str(layout.zero), layout.recompute, run.kernels.attention,
        run.kernels.norm, show(run.step_time_s, ".3f"), show(run.mfu, ".1f", 100),
        show(found.mfu if run.scenario.cluster.gpu.has_mfu else None, ".1f", 100),
        show(run.peak_bytes, ".2f", 1 / GIB), show(found.memory[0].total, ".2f", 1 / GIB),
    ]  # fmt: skip


def _draw_memory(shown: Sequence[Prediction]) -> str:
    """Measured bars with marks where they were predicted."""
    peaks = [row.run.peak_bytes or 0 for row in shown]
    unit, size = choose_unit(max(peaks))
    figure, axes = plt.subplots(figsize=(10, 0.26 * len(shown) + 0.8), layout="constrained")
    predicted = [row.estimate.memory[0].total / size for row in shown]
    axes.barh(range(len(shown)), [peak / size for peak in peaks], color="#4477aa", alpha=0.7, label="measured")
    axes.scatter(predicted, range(len(shown)), marker="|", s=120, color="#cc3311", label="predicted")
    axes.set_yticks(range(len(shown)), [f"{row.run.layout} {row.run.kernels.attention}" for row in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=2, fontsize=8, frameon=False)
    return html.picture(figure)


def _fold(name: str, width: int = 22) -> str:
    """A sweep's long name in several lines."""
    words = name.removeprefix("aa/").replace("_", " ").replace("/", "/ ")
    return textwrap.fill(words, width).replace("/ ", "/")
