"""Answers of published runs to the questions that the study leaves open, as Markdown.

    make bench NAME=open_questions TABLES="FILE …"

Sequence parallelism beyond its models, fp8, and more than 100B parameters (arXiv:2311.05610). Rows are compared as
`dtlayout report` compares them, in pairs that differ in the choice alone; but as cells of their tables, for many are of
programs, formats and models that nothing predicts. A factor is the speed of the second over that of the first.
"""

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dtlayout.report.findings import find_pairs
from dtlayout.report.questions import Question
from dtlayout.spec.cluster import gpu_named
from dtlayout.validation.predict import predict
from dtlayout.validation.tables import open_table, read_tables

Row = dict[str, str]
"""A line of a table, column → cell; empty where the source does not say."""

FORMATS = ("bf16", "fp8-tensorwise", "fp8-rowwise", "mxfp8", "nvfp4")
"""Formats of matmuls; each is compared with those before it."""
LARGE = 100e9
"""Parameters from which on a model is larger than the study's."""
_LATENT = re.compile(r"q_lora (\d+) kv_lora (\d+) qk (\d+)\+(\d+) v (\d+)")
"""How a note says the ranks and head widths of multi-head latent attention (arXiv:2405.04434, sec. 2.1)."""
_CONDITIONS = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "async tp": r"(?<!no )async ?tp",
        "token drop": "token drop",
        "mtp": "with one mtp",
        "fp32": "mp mode default",
    }.items()
}
"""Condition of a run → how a note says it, where no column does."""
_MEASURED = (
    "table", "row", "model", "status", "step_time_s", "mfu", "peak_memory_gb", "tokens_per_s_gpu", "source", "note",
)  # fmt: skip
"""Columns that are no part of what was run; a model is its sizes, for programs spell its name as they like."""
_USUAL = {"tied": "False", "qk_norm": "False", "compile": "False", "cp": "1", "virtual_stages": "1", "ep": "1"}
"""Column → value of a source that does not say it."""
_TASK = ("hidden", "layers", "ffn", "vocab", "experts", "seq_len", "engine", "gpu")
"""Columns of what was to be trained on which GPU."""


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """All rows whose speed is known, all with tokens a second and GPU."""
    rows = []
    for path in paths:
        with open_table(path) as reader:
            for row in reader:
                if not row.get("tokens_per_s_gpu") and row["step_time_s"]:
                    tokens = float(row["global_batch"]) * float(row["seq_len"])
                    row["tokens_per_s_gpu"] = str(tokens / float(row["step_time_s"]) / float(row["gpus"]))
                if row.get("tokens_per_s_gpu"):
                    rows.append(row)
    return rows


def find_release(row: Row) -> str:
    """The rows that one version of a program made: a table, or several that differ in the format alone."""
    return re.sub(r"-(bf16|fp8)$", "", row["table"])


def find_conditions(row: Row) -> tuple[str, ...]:
    """Conditions of a run that no column has, but its note names."""
    return tuple(name for name, pattern in _CONDITIONS.items() if pattern.search(row.get("note") or ""))


def but(*names: str) -> Callable[[Row], Hashable]:
    """Everything that was run but these columns."""

    def rest(row: Row) -> Hashable:
        cells = ((name, cell or _USUAL.get(name)) for name, cell in row.items() if name not in (*_MEASURED, *names))
        return tuple(cells), find_conditions(row)

    return rest


def task(*names: str) -> Callable[[Row], Hashable]:
    """A function from a row to its model, batch and GPU, to these columns, and to the conditions in its note."""
    return lambda row: (tuple(row.get(name) for name in (*_TASK, *names)), find_conditions(row))


def follows(first: str, second: str) -> bool:
    """Whether a format comes after another one."""
    return first in FORMATS and second in FORMATS and FORMATS.index(first) < FORMATS.index(second)


def ask(
    column: str, rest: Callable[[Row], Hashable], is_after: Callable[[str, str], bool], pool: Callable[[Row], Hashable]
) -> Question:
    """A question about a column."""
    return Question(column, lambda row: row.get(column), rest, is_after, "", "", pool=pool)


SEQUENCE_PARALLEL = ask(
    "sequence_parallel", but("sequence_parallel"), lambda *pair: pair == ("False", "True"), find_release
)


def pair_formats(rows: Sequence[Row]) -> dict[str, list[tuple[Row, Row]]]:
    """How they are alike → pairs of rows in two formats.

    Software alone moves one layout by 1.2 to 1.8 times, so pairs of one release stand apart from those of several, of
    which each layout counts once, with the fastest of its rows.
    """
    job = task("gpus", "global_batch")
    same = ask("precision", but("precision"), follows, find_release)
    own = ask("precision", job, follows, find_release)
    later = ask("precision", but("precision"), follows, find_engine)
    any_batch = ask("precision", task(), follows, find_engine)
    return {
        "one layout, one release": _take(same, rows),
        "one layout, two releases": _take(later, keep_fastest(rows, but()), _differ_in(find_release)),
        "the fastest of each, one release": _take(
            own, keep_fastest(rows, find_release, job, find_format), _differ_in(but("precision"))
        ),
        "the fastest of each, whatever release, GPUs and batch": _take(
            any_batch, keep_fastest(rows, task(), find_format), _differ_in(find_release)
        ),
    }


def find_engine(row: Row) -> str:
    """The program."""
    return row["engine"]


def find_format(row: Row) -> str | None:
    """The format of matmuls."""
    return row.get("precision")


def _differ_in(key: Callable[[Row], Hashable]) -> Callable[[Row, Row], bool]:
    return lambda a, b: key(a) != key(b)


def _take(
    question: Question, rows: Sequence[Row], which: Callable[[Row, Row], bool] = lambda a, b: True
) -> list[tuple[Row, Row]]:
    pairs = ((rows[a], rows[b]) for a, b in find_pairs(question, rows))
    return [pair for pair in pairs if which(*pair)]


def speed_of(row: Row) -> float:
    """Tokens a second and GPU."""
    return float(row["tokens_per_s_gpu"])


def keep_fastest(rows: Sequence[Row], *keys: Callable[[Row], Hashable]) -> list[Row]:
    """The fastest of all rows that are alike in all keys, in the order of the rows."""
    fastest: dict[Hashable, Row] = {}
    for row in rows:
        alike = tuple(key(row) for key in keys)
        if alike not in fastest or speed_of(row) > speed_of(fastest[alike]):
            fastest[alike] = row
    return list(fastest.values())


def describe_range(factors: Sequence[float]) -> str:
    """Median and the range of nine of ten, which of fewer than ten pairs is nearly that of all."""
    low, middle, high = np.quantile(factors, (0.05, 0.5, 0.95))
    return f"×{middle:.2f} | ×{low:.2f} to ×{high:.2f}"


def describe_formats(rows: Sequence[Row]) -> Iterator[str]:
    """Speed of one format over another's, by program and GPU, and then each pair."""
    pairs = pair_formats(rows)
    yield from ("## Formats", "", "| alike | from | to | program | GPU | layouts | pairs | median | nine of ten |")
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, found in pairs.items():
        groups: dict[tuple[str, ...], list[tuple[Row, Row]]] = defaultdict(list)
        for a, b in found:
            for place in ((a["engine"], a["gpu"]), ("all", "")):
                groups[(a["precision"], b["precision"], *place)].append((a, b))
        for group, alike in sorted(groups.items()):
            if group[2] == "all" and any(
                len(alike) == len(others) for each, others in groups.items() if each[:2] == group[:2] and each != group
            ):
                continue  # one program on one GPU has them all
            layouts = {tuple(but("precision")(row) for row in pair) for pair in alike}
            factors = [speed_of(b) / speed_of(a) for a, b in alike]
            yield f"| {name} | {' | '.join(group)} | {len(layouts)} | {len(alike)} | {describe_range(factors)} |"
    for name, found in pairs.items():
        yield from ("", f"### Pairs: {name}", "")
        yield "| model | s | GPU | layouts | formats | factor | rows |"
        yield "|---|---|---|---|---|---|---|"
        for a, b in sorted(found, key=lambda pair: (pair[0]["model"].lower(), pair[0]["gpu"], pair[1]["precision"])):
            both = "; ".join(dict.fromkeys(map(describe_layout, (a, b))))
            run = f"{b['model']} | {a['seq_len']} | {a['gpus']} {a['gpu']} | {both}"
            names = f"{name_row(a)}, {name_row(b)}"
            factor = speed_of(b) / speed_of(a)
            yield f"| {run} | {a['precision']}, {b['precision']} | ×{factor:.2f} | {names} |"


def describe_layout(row: Row) -> str:
    """Degrees above 1, micro-batch and recomputation."""
    names = ("dp", "tp", "pp", "cp", "ep", "virtual_stages")
    degrees = [f"{name}{row[name]}" for name in names if (row.get(name) or "1") not in ("0", "1")]
    zero = ["zero3"] if row["zero"] == "3" else []
    recompute = [row["recompute"]] if row["recompute"] not in ("", "none") else []
    return " ".join([*degrees, f"mb{row['micro_batch'] or '?'}", *zero, *recompute]).replace("virtual_stages", "vp")


def name_row(row: Row) -> str:
    """Table and number of a row."""
    return f"{row['table']} {row['row']}"


def describe_sequence_parallelism(rows: Sequence[Row]) -> Iterator[str]:
    """Pairs with and without, and who has it on at tp > 1."""
    split = [row for row in rows if int(row["tp"]) > 1]
    pairs = find_pairs(SEQUENCE_PARALLEL, split)
    yield from ("## Sequence parallelism", "", f"Pairs of rows of one layout with and without it: {len(pairs)}.")
    for a, b in _take(SEQUENCE_PARALLEL, split):
        yield f"- {b['model']}, {describe_layout(b)}: ×{speed_of(b) / speed_of(a):.2f}; {name_row(a)}, {name_row(b)}"
    yield from ("", "| rows at tp > 1 | GPU | models | on | off | not stated |", "|---|---|---|---|---|---|")
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in split:
        groups[row["engine"], row["gpu"]].append(row)
    for (engine, gpu), found in sorted(groups.items()):
        counts = Counter(row["sequence_parallel"] for row in found)
        models = ", ".join(sorted({row["model"] for row in found}, key=str.lower))
        yield f"| {engine} | {gpu} | {models} | {counts['True']} | {counts['False']} | {counts['']} |"


def describe_predicted_sequence_parallelism(tables: Sequence[Path]) -> Iterator[str]:
    """Predicted speed and peak with sequence parallelism over those without it, for rows that have it on."""
    runs = [run for run in read_tables(tables).runs if run.ran and run.layout.shards_sequence]
    off = [replace(run, layout=replace(run.layout, sequence_parallel=False)) for run in runs]
    groups: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for on, without in zip(predict(runs), predict(off), strict=True):
        if not without.estimate.fits:
            continue
        speed = without.estimate.step_time_s / on.estimate.step_time_s
        peak = on.estimate.peak_bytes / without.estimate.peak_bytes
        groups[on.run.scenario.engine.name, on.run.layout.tp].append((speed, peak))
    yield from ("Predicted, with it over without it, for rows that have it on and fit without:", "")
    yield "| program | tp | rows | speed, median | nine of ten | peak memory, median | nine of ten |"
    yield "|---|---|---|---|---|---|---|"
    for (engine, tp), found in sorted(groups.items()):
        speeds, peaks = zip(*found, strict=True)
        yield f"| {engine} | {tp} | {len(found)} | {describe_range(speeds)} | {describe_range(peaks)} |"


def count_parameters(row: Row) -> tuple[float, float]:
    """All parameters without norms and biases, and those of routed experts among them."""

    def cell(name: str, default: float = 0.0) -> float:
        return float(row.get(name) or default)

    h, layers, heads = cell("hidden"), cell("layers"), cell("heads")
    attention = 2 * h * cell("head_dim", h / heads) * (heads + cell("kv_heads", heads))
    if latent := _LATENT.search(row.get("note") or ""):
        q_rank, kv_rank, nope, rope, value = map(int, latent.groups())
        attention = h * (q_rank + kv_rank + rope + heads * value)
        attention += heads * (q_rank * (nope + rope) + kv_rank * (nope + value))
    matrices = 2 if row.get("gated") == "False" else 3
    ends = cell("vocab") * h * (1 if row["tied"] == "True" else 2)
    if not cell("experts"):
        return ends + layers * (attention + matrices * h * cell("ffn")), 0.0
    dense = cell("dense_layers")
    routed = (layers - dense) * cell("experts") * matrices * h * cell("expert_ffn")
    shared = (layers - dense) * (matrices * h * cell("shared_expert_ffn") + h * cell("experts"))
    return ends + layers * attention + dense * matrices * h * cell("ffn") + shared + routed, routed


def state_share(row: Row, halved: int = 1) -> float | None:
    """Share of the memory of bf16 weights and gradients and the sharded fp32 optimizer, with tp·pp over `halved`.

    None under ZeRO-3, where tp and pp decide nothing of it, where no less is left, and on a GPU that is not known.
    """
    gpu, model_parallel = gpu_named(row["gpu"]), int(row["tp"]) * int(row["pp"])
    if row["zero"] == "3" or model_parallel < halved or not gpu.is_known:
        return None
    total, routed = count_parameters(row)
    local = ((total - routed) / model_parallel + routed / int(row["pp"]) / int(row.get("ep") or 1)) * halved
    return (4 * local + 12 * total / int(row["gpus"])) / gpu.memory_bytes


def describe_large(rows: Sequence[Row]) -> Iterator[str]:
    """The fastest published layout of each large model, and what half of its tp·pp would need."""
    large = [row for row in rows if count_parameters(row)[0] >= LARGE and row["mfu"]]
    names = ("seq_len", "gpu", "gpus", "precision")
    fastest = keep_fastest(large, *(lambda row, n=n: row[n].lower() for n in ("layers", "hidden", "experts", *names)))
    yield from ("## Beyond 100B parameters", "")
    yield "State: bf16 weights and gradients and the optimizer's share, of the memory; beside it with half of tp·pp."
    yield "MFU is of the bf16 peak whatever the format."
    yield from ("", "| model | parameters | s | GPU | format | layout | MFU | state | with half | row |")
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in sorted(fastest, key=lambda row: (count_parameters(row)[0], row["model"], row["gpu"], row["precision"])):
        shares = [state_share(row, halved) for halved in (1, 2)]
        shown = " | ".join("–" if share is None else f"{share:.0%}" for share in shares)
        place = f"{row['seq_len']} | {row['gpus']} {row['gpu']} | {row['precision']} | {describe_layout(row)}"
        size = f"{count_parameters(row)[0] / 1e9:,.0f}B"
        yield f"| {row['model']} | {size} | {place} | {float(row['mfu']):.1%} | {shown} | {name_row(row)} |"
    yield from ("", *_summarise_large(fastest))


def _summarise_large(rows: Sequence[Row]) -> Iterator[str]:
    """How many have micro-batch 1 and which degrees; dense models and mixtures apart, and formats."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["precision"] in FORMATS:
            kind = "mixtures of experts" if row.get("experts") else "dense"
            groups[f"{kind}, {'bf16' if row['precision'] == 'bf16' else 'fp8 and less'}"].append(row)
    columns = ("micro_batch", "tp", "pp", "cp", "recompute")
    yield f"| | rows | {' | '.join(columns)} | MFU, median | nine of ten |"
    yield "|---" * (len(columns) + 4) + "|"
    for title, found in sorted(groups.items()):
        counts = " | ".join(_count(row[column] for row in found) for column in columns)
        low, middle, high = np.quantile([float(row["mfu"]) for row in found], (0.05, 0.5, 0.95))
        yield f"| {title} | {len(found)} | {counts} | {middle:.0%} | {low:.0%} to {high:.0%} |"


def _count(cells: Iterable[str]) -> str:
    """How often each is there."""
    return ", ".join(f"{cell or 'not stated'}: {number}" for cell, number in sorted(Counter(cells).items()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the answers of the tables that are named."""
    parser = argparse.ArgumentParser(prog="benchmarks.open_questions", description="answers from tables, as Markdown")
    parser.add_argument("tables", type=Path, nargs="+", metavar="FILE", help="CSV tables of measured runs")
    tables = parser.parse_args(arguments).tables
    rows = read_rows(tables)
    print(f"# The study's open questions, asked of {len(rows):,} rows that ran\n")
    parts = (
        describe_sequence_parallelism(rows),
        describe_predicted_sequence_parallelism(tables),
        describe_formats(rows),
        describe_large(rows),
    )
    print("\n\n".join("\n".join(part) for part in parts))


if __name__ == "__main__":
    main()
