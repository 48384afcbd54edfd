"""Tables: CSV files of measured training runs, a `Run` a line; every cell is checked before the first is predicted.

The columns are those of published runs: model sizes, engine, GPUs, batch, degrees, kernel, status, tokens a second,
step time, MFU and peak memory in GiB; an empty cell means that the source does not say. `zero` 0 is replicated state:
dp_replicate = dp. docs/sweep.md has a line on each.

A cell that cannot be true is an error. A row that is right and cannot be predicted is `Unpredicted`, with its reasons.
"""

import csv
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dtlayout.batch import Batch
from dtlayout.cluster import Cluster, gpu_named
from dtlayout.costmodel.engine import find_engine, find_usual, known_engines
from dtlayout.costmodel.scenario import Scenario
from dtlayout.errors import DtlayoutError, InvalidConfig
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.model_shape import Experts, LatentAttention, ModelShape
from dtlayout.models.counting import count_model_flops_per_token
from dtlayout.optimizers import OPTIMIZERS, AdamW, Optimizer
from dtlayout.pipelining.schedules import SCHEDULES, schedule_with
from dtlayout.planner.runs import Outcome, Performance, Run
from dtlayout.precision import MATMUL_FORMATS, Precision
from dtlayout.recompute import Recompute
from dtlayout.text import GIB

KERNELS = {
    "torch": Kernels(attention="torch", norm="eager"),
    "megatron-softmax": Kernels(attention="megatron-softmax", norm="eager"),
    "flash1": Kernels(attention="flash1", norm="eager"),
    "flash2": Kernels(attention="sdpa-flash", norm="eager"),
    "flash2+rmsnorm": Kernels(attention="sdpa-flash", norm="fused"),
}
"""A table's word for attention and norm → our kernels."""
_OUTCOMES: dict[str, Outcome] = {
    "ok": "ok", "oom": "oom", "crashed_or_oom": "crashed_or_oom", "unavailable": "skipped", "error": "crashed",
}  # fmt: skip
"""A table's status → outcome."""
_PRECISIONS = {"bf16": Precision(), **{name: Precision(matmuls=name) for name in MATMUL_FORMATS}}
"""A table's word for the format of matmuls → ours."""
_SHARDED_OVER = re.compile(r"\boptimizer shards over (\d+) GPUs")
"""A note on data-parallel ranks of which each so many have a whole optimizer state."""
_SCHEDULES = {"interleaved": "interleaved-1f1b"}
"""A table's word for a schedule, where it is not ours."""
_WHERE_NO_COLUMN = {
    "engine": "megatron", "precision": "bf16", "recompute": "none", "sequence_parallel": "False", "zero": "1",
}  # fmt: skip
"""What all runs of a table have that lacks the column."""
ROUNDING = 0.02
"""How far apart two published figures of one speed may lie: tokens a second are printed in steps of up to 2 %."""
_MAY_BE_USUAL = ("micro_batch", "zero", "recompute", "sequence_parallel")
"""Columns that an engine's usual habit may fill."""
_SAME_LAYOUT = re.compile(r"\bsame layout as in (\S+)")
"""A note on a row that was measured again at another date."""
_CHUNKED_HEAD = re.compile(r"\brl trainer step\b")
"""A note on prime-rl's trainer for reinforcement learning, which takes head and loss in chunks of tokens."""
_LATENT_ATTENTION = re.compile(r"\bMLA q_lora (\d+) kv_lora (\d+) qk (\d+)\+(\d+) v (\d+)")
"""A note on latent attention: ranks of queries and of keys and values, and a head's width, rotated part and values."""
_OVERLAPS_TP = re.compile(r"(?<!no )\basync ?TP\b", re.IGNORECASE)
"""A note on tp's messages that are sent in pieces beside matmuls."""
_DROPS_TOKENS = re.compile(r"\btoken drop\b")
"""A note on experts that leave tokens out beyond some number."""
_MOST_MFU = 12 / 7
"""MFU of a causal kernel at the peak, at lengths at which attention is all there is: it computes 7 of 12 FLOPs."""
_OVERLAPS_EP = re.compile(r"\ba2a overlap\b")
"""A note on tokens that are exchanged while another microbatch is computed."""
_MOST_PROBLEMS = 20
"""Cells of a table that are named; a wrong column would name every row."""
_Cell = Callable[[str], Any]
"""Reads a cell, None where it is empty and may be; InvalidConfig, without saying where, for what it cannot be."""
_Cells = Mapping[str, Any]
"""Column → what the cell of a row says."""


class Unpredicted(NamedTuple):
    """A row that cannot be predicted."""

    table: str
    """The sweep that it belongs to."""
    row: str
    """Its name there."""
    reasons: tuple[str, ...]
    """Everything that stands against a prediction, of `_REASONS`."""


class Tables(NamedTuple):
    """The rows of tables, in their order."""

    runs: list[Run]
    """Rows that can be predicted."""
    unpredicted: list[Unpredicted]
    """Rows that cannot."""
    num_repeats: int
    """Rows that could be predicted, and are another one's layout at another date by their note: not among the runs."""


def read_tables(paths: Sequence[str | Path], engine: str | None = None) -> Tables:
    """All rows of tables; `engine` is put in the place of each row's own.

    InvalidConfig names file, line and column of each cell that is wrong, and each table without rows.
    """
    if engine is not None and engine not in known_engines():
        raise InvalidConfig(f"--engine={engine} is unknown; use one of {', '.join(known_engines())}")
    problems: list[str] = []
    rows = [row for path in paths for row in _read_table(Path(path), engine, problems)]
    if problems:
        raise InvalidConfig(problems)
    tables = {row.table for row in rows}
    runs = _name_alike([row for row in rows if isinstance(row, Run)])
    firsts = [run for run in runs if not _is_repeat(run, tables)]
    unpredicted = [row for row in rows if isinstance(row, Unpredicted)]
    return Tables(firsts, unpredicted, num_repeats=len(runs) - len(firsts))


def _name_alike(runs: Sequence[Run]) -> list[Run]:
    """Runs whose models have one name for each shape, the first: sources call a model by several."""
    names: dict[ModelShape, str] = {}

    def rename(scenario: Scenario) -> Scenario:
        shape = replace(scenario.model, name="")
        name = names.setdefault(shape, scenario.model.name)
        return scenario if name == scenario.model.name else replace(scenario, model=replace(shape, name=name))

    return [replace(run, scenario=rename(run.scenario)) for run in runs]


def _is_repeat(run: Run, tables: set[str]) -> bool:
    """Whether the note says that another of these tables has the layout; without that table it is the only one."""
    found = _SAME_LAYOUT.search(run.note)
    return found is not None and found[1].rstrip(";,.") in tables - {run.table}


def _read_table(path: Path, engine: str | None, problems: list[str]) -> list[Run | Unpredicted]:
    """The rows of a table; what is wrong with it is put to the problems of all tables."""
    found: list[str] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in _REQUIRED if name not in (reader.fieldnames or ())]:
                raise InvalidConfig(f"table {path} has no column {', '.join(missing)}")
            rows = list(_read_rows(reader, engine, found))
    except OSError as error:
        raise InvalidConfig(f"table {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidConfig(f"table {path} is not CSV: {error}") from None
    problems += [f"table {path}, {problem}" for problem in found[:_MOST_PROBLEMS]]
    if len(found) > _MOST_PROBLEMS:
        problems.append(f"table {path}: {len(found) - _MOST_PROBLEMS} more cells are wrong")
    if not rows and not found:
        problems.append(f"table {path} has columns and no rows")
    return rows


def _read_rows(reader: "csv.DictReader[str]", engine: str | None, problems: list[str]) -> Iterator[Run | Unpredicted]:
    for row in reader:
        where = f"line {reader.line_num}"
        cells: dict[str, Any] = {"engine": engine}
        wrong = []
        if None in row:
            wrong.append(f"{where}: more cells than the {len(reader.fieldnames or ())} columns")
        for name, read in _COLUMNS.items():
            try:
                cells[name] = cells.get(name) or read((row.get(name, _WHERE_NO_COLUMN.get(name)) or "").strip())
            except DtlayoutError as error:
                wrong.append(f"{where}, column {name}: {error}")
        if not wrong:
            cells |= {"assumed": _assume(cells)}
            try:
                reasons = _find_reasons(cells)
                yield Unpredicted(cells["table"], cells["row"], reasons) if reasons else _to_run(cells)
            except DtlayoutError as error:
                wrong.append(f"{where}: {error}")
        problems += wrong


def _assume(cells: dict[str, Any]) -> tuple[str, ...]:
    """Fill what a row does not say with what its engine usually does; a sentence on each thing that is taken for so."""
    usual = dict(vars(find_usual(cells["engine"])))
    if usual["fills_pipeline_once"] and cells["pp"] > 1 and cells["global_batch"]:
        usual["micro_batch"] = max(1, cells["global_batch"] // (cells["dp"] * cells["pp"]))
    filled = {name: usual[name] for name in _MAY_BE_USUAL if cells[name] is None and usual[name] is not None}
    cells |= filled
    engine = cells["engine"]
    assumed = [f"not stated: {name}={json.dumps(value)}, what {engine} usually does" for name, value in filled.items()]
    if engine in known_engines() and _to_zero(cells) < (cells["zero"] or 1):
        assumed.append(f"zero={cells['zero']} in a pipeline: {engine} keeps parameters gathered and gradients whole")
    return tuple(assumed)


def _to_run(cells: _Cells) -> Run:
    gpu, model, layout = gpu_named(cells["gpu"]), _to_model(cells), _to_layout(cells)
    batch = Batch(global_batch=cells["global_batch"], seq_len=cells["seq_len"])
    num_gpus, peak_gib = cells["gpus"], cells["peak_memory_gb"]
    cluster = Cluster(gpu=gpu, num_gpus=num_gpus, gpus_per_node=cells["gpus_per_node"] or gpu.gpus_per_node)
    step_time_s, mfu = cells["step_time_s"], cells["mfu"]
    tokens_per_s = batch.num_tokens / step_time_s if step_time_s else None
    if tokens_per_s_gpu := cells["tokens_per_s_gpu"]:  # what was measured: the others follow from it
        tokens_per_s = tokens_per_s_gpu * num_gpus
        step_time_s = step_time_s or batch.num_tokens / tokens_per_s
        mfu = _to_mfu(cells) if gpu.has_mfu else None
    measured = Performance(
        step_time_s=step_time_s,
        tokens_per_s=tokens_per_s,
        mfu=mfu,
        peak_memory_bytes=None if peak_gib is None else (round(peak_gib * GIB), *(None,) * (layout.pp - 1)),
    )
    engine = find_engine(cells["engine"], gpu.name)
    scenario = Scenario(
        model=model, batch=batch, cluster=cluster, engine=engine,
        precision=_PRECISIONS[cells["precision"]], optimizer=_known_optimizers()[cells["optimizer"]](),
    )  # fmt: skip
    return Run(
        table=cells["table"], row=cells["row"], source=cells["source"], note=cells["note"], outcome=cells["status"],
        scenario=scenario, layout=layout, measured=measured,
        kernels=_to_kernels(cells), assumed=cells["assumed"],
    )  # fmt: skip


def _to_kernels(cells: _Cells) -> Kernels:
    """The kernels of a row, those that its word leaves open as its engine has them."""
    kernels: Kernels = cells["kernel"]
    usual = find_usual(cells["engine"])
    return replace(
        usual.kernels, attention=usual.kernels.attention if kernels.attention == "sdpa-flash" else kernels.attention,
        norm="fused" if usual.fuses_norms else kernels.norm, compile="blocks" if cells["compile"] else "none",
        loss="linear" if _CHUNKED_HEAD.search(cells["note"]) else usual.kernels.loss,
    )  # fmt: skip


def _to_model(cells: _Cells) -> ModelShape:
    experts = None
    if cells["experts"]:
        experts = Experts(
            number=cells["experts"], per_token=cells["experts_per_token"], ffn_size=cells["expert_ffn"],
            shared_ffn_size=cells["shared_expert_ffn"] or 0, dense_layers=cells["dense_layers"] or 0,
        )  # fmt: skip
    latent = None
    if found := _LATENT_ATTENTION.search(cells["note"]):
        query_rank, kv_rank, _, rope_width, value_width = map(int, found.groups())
        latent = LatentAttention(query_rank=query_rank, kv_rank=kv_rank, rope_width=rope_width, value_width=value_width)
    return ModelShape(
        name=cells["model"], hidden_size=cells["hidden"], num_layers=cells["layers"], num_heads=cells["heads"],
        num_kv_heads=cells["kv_heads"] or cells["heads"], ffn_size=cells["ffn"], vocab_size=cells["vocab"],
        head_dim=cells["head_dim"], qk_norm=cells["qk_norm"], gated_ffn=cells["gated"], tied_embeddings=cells["tied"],
        experts=experts, latent_attention=latent,
    )  # fmt: skip


def _to_layout(cells: _Cells) -> Layout:
    zero, dp = cells["zero"], cells["dp"]
    shards = 1 if zero == 0 else dp
    if (found := _SHARDED_OVER.search(cells["note"])) and dp % int(found[1]) == 0:
        shards = int(found[1])
    return Layout(
        pp=cells["pp"], dp_replicate=dp // shards, dp_shard=shards,
        cp=cells["cp"] or 1, tp=cells["tp"], ep=(cells["experts"] and cells["ep"]) or 1,
        ep_overlap=bool(_OVERLAPS_EP.search(cells["note"])), tp_overlap=bool(_OVERLAPS_TP.search(cells["note"])),
        sequence_parallel=bool(cells["sequence_parallel"]),
        micro_batch=cells["micro_batch"], schedule=_find_schedule(cells),
        virtual_stages=cells["virtual_stages"] or 1, zero=_to_zero(cells), recompute=cells["recompute"],
    )  # fmt: skip


def _to_zero(cells: _Cells) -> Literal[1, 2, 3]:
    """The stage of ZeRO that runs: FSDP2's 3 keeps parameters gathered in some engines' pipelines."""
    most = find_engine(cells["engine"], cells["gpu"]).features.pipeline_zero if cells["pp"] > 1 else 3
    stated: Literal[1, 2, 3] = cells["zero"] or 1
    return most if stated > most else stated


def _to_mfu(cells: _Cells) -> float:
    """The MFU that a known GPU type has at the tokens a second of a row."""
    flops_per_token = count_model_flops_per_token(_to_model(cells), cells["seq_len"])
    return float(cells["tokens_per_s_gpu"] * flops_per_token / gpu_named(cells["gpu"]).peak_flops_per_s)


def _find_schedule(cells: _Cells) -> str:
    """The schedule that a row names, ours where the name is known; without pipeline none has a meaning."""
    if cells["pp"] == 1 or not (word := str(cells["schedule"] or "")):
        return schedule_with(cells["virtual_stages"] or 1)
    return _SCHEDULES.get(word, word)


def _known_optimizers() -> dict[str, type[Optimizer]]:
    """A table's word → optimizer; Adam keeps and moves what AdamW does."""
    return {**OPTIMIZERS, "adam": AdamW}


# What cannot be predicted.


def _needs_other_stages(cells: _Cells) -> bool:
    """Whether a pipeline's schedule, known and named by the row, does not go with its virtual stages."""
    if cells["pp"] == 1 or not cells["schedule"] or not (schedule := SCHEDULES.get(_find_schedule(cells))):
        return False
    return not schedule.takes(cells["pp"], cells["virtual_stages"] or 1)


def _lacks(column: str) -> Callable[[_Cells], bool]:
    return lambda row: row[column] is None


def _contradicts_time(cells: _Cells) -> bool:
    tokens_per_s_gpu, step_time_s, batch = (cells[name] for name in ("tokens_per_s_gpu", "step_time_s", "global_batch"))
    if not (tokens_per_s_gpu and step_time_s and batch):
        return False
    return abs(batch * cells["seq_len"] / (step_time_s * cells["gpus"]) / tokens_per_s_gpu - 1) > ROUNDING


def _contradicts_mfu(cells: _Cells) -> bool:
    """Of models whose parameters are counted here, on GPUs whose peak is known."""
    if not (cells["tokens_per_s_gpu"] and cells["mfu"]) or _lacks_ranks(cells) or _lacks_sizes(cells):
        return False
    gpu = gpu_named(cells["gpu"])
    return gpu.is_known and gpu.has_mfu and abs(cells["mfu"] / _to_mfu(cells) - 1) > ROUNDING


def _lacks_sizes(cells: _Cells) -> bool:
    """Whether the row names experts and not what they are."""
    return bool(cells["experts"]) and not (cells["experts_per_token"] and cells["expert_ffn"])


def _has_no_experts(cells: _Cells) -> bool:
    """Whether the engine, of which that is known, trains no experts, and nothing of latent attention."""
    is_special = cells["experts"] or _LATENT_ATTENTION.search(cells["note"])
    if not is_special or cells["engine"] not in known_engines():
        return False
    return not find_engine(cells["engine"], cells["gpu"]).features.has_experts


def _lacks_ranks(cells: _Cells) -> bool:
    """Whether attention is latent and the note does not say how narrow."""
    return bool(re.search(r"\bMLA\b", cells["note"])) and not _LATENT_ATTENTION.search(cells["note"])


def _has_no_schedule(cells: _Cells) -> bool:
    """Whether a pipeline's schedule is one that its engine is known to lack."""
    if cells["pp"] == 1 or cells["engine"] not in known_engines():
        return False
    known = find_engine(cells["engine"], cells["gpu"]).features.schedules
    return bool(known) and _find_schedule(cells) not in known


def _has_no_zero(cells: _Cells) -> bool:
    """Whether a distributed optimizer is said to share in a pipeline what it does not."""
    if cells["pp"] == 1 or cells["engine"] not in known_engines():
        return False
    features = find_engine(cells["engine"], cells["gpu"]).features
    return features.sharding == "distributed-optimizer" and (cells["zero"] or 0) > features.pipeline_zero


_REASONS: dict[str, Callable[[_Cells], Any]] = {
    "engine is not stated, --engine names one": lambda row: not row["engine"],
    "engine {engine} is not known": lambda row: row["engine"] and row["engine"] not in known_engines(),
    "GPU type {gpu} is not known": lambda row: not gpu_named(row["gpu"]).is_known,
    "precision {precision}": lambda row: row["precision"] and row["precision"] not in _PRECISIONS,
    "{gpu} does not multiply in {precision}":
        lambda row: row["precision"] in MATMUL_FORMATS and gpu_named(row["gpu"]).is_known
        and not gpu_named(row["gpu"]).peak_of(MATMUL_FORMATS[row["precision"]]),
    "experts_per_token or expert_ffn is not stated": _lacks_sizes,
    "ep is not stated": lambda row: row["experts"] and row["ep"] is None,
    "engine {engine} has no experts or latent attention": _has_no_experts,
    "multi-head latent attention, its ranks not stated": _lacks_ranks,
    "optimizer {optimizer} is not known": lambda row: row["optimizer"] not in _known_optimizers(),
    "tokens are dropped": lambda row: _DROPS_TOKENS.search(row["note"]),
    "engine {engine} has no schedule {schedule}": _has_no_schedule,
    "engine {engine} has no zero={zero} in pipelines": _has_no_zero,
    "schedule {schedule} is not known": lambda row: _find_schedule(row) not in SCHEDULES,
    "schedule {schedule} does not go with virtual_stages={virtual_stages}":
        lambda row: row["virtual_stages"] and _needs_other_stages(row),
    "virtual_stages is not stated": lambda row: row["virtual_stages"] is None and _needs_other_stages(row),
    **{f"{name} is not stated": _lacks(name)
       for name in ("global_batch", "micro_batch", "recompute", "kernel", "precision")},
    "zero is not stated": lambda row: row["zero"] is None and row["dp"] > 1,
    "sequence_parallel is not stated": lambda row: row["sequence_parallel"] is None and row["tp"] > 1,
    "step_time_s contradicts tokens_per_s_gpu": _contradicts_time,
    "mfu contradicts tokens_per_s_gpu": _contradicts_mfu,
}  # fmt: skip
"""Why a row cannot be predicted, with its cells in it → whether that is so."""


def _find_reasons(cells: _Cells) -> tuple[str, ...]:
    """Everything that stands against a prediction of a row; InvalidConfig where its cells cannot be true together."""
    degrees = math.prod(cells[name] or 1 for name in ("dp", "cp", "tp", "pp"))
    if degrees != cells["gpus"]:
        raise InvalidConfig(f"dp·cp·tp·pp is {degrees}, but gpus={cells['gpus']}")
    ep, sizes = cells["ep"] or 1, {"dp·cp·tp": degrees // cells["pp"], "experts": cells["experts"] or 0}
    for name, size in sizes.items():
        if size % ep:
            raise InvalidConfig(f"ep={ep} does not divide {name}={size}")
    if (cells["mfu"] or 0) > _MOST_MFU and cells["precision"] == "bf16":
        raise InvalidConfig(f"mfu={cells['mfu']} is above 12/7, which takes a format below bf16")
    return tuple(reason.format_map(cells) for reason, holds in _REASONS.items() if holds(cells))


# Cells.


def _number(
    least: float, most: float, expected: str, *, may_be_empty: bool = True, kind: Callable[[float], float] = float
) -> _Cell:
    def read(text: str) -> float | None:
        if not text and may_be_empty:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or kind(value) != value:
            raise InvalidConfig(f"{text!r} must be {expected}")
        return kind(value)

    return read


def _whole(least: int, most: int | None = None, *, may_be_empty: bool = False) -> _Cell:
    expected = f"a whole number of at least {least}" if most is None else f"a whole number, {least} to {most}"
    return _number(least, most or sys.float_info.max, expected, may_be_empty=may_be_empty, kind=int)


def _one_of(values: Mapping[str, Any]) -> _Cell:
    def read(text: str) -> Any:
        if text not in values:
            raise InvalidConfig(f"{text!r} is unknown; use {', '.join(filter(None, values))}")
        return values[text]

    return read


def _recompute(text: str) -> str | None:
    if text:
        Recompute.parse(text)
    return text or None


def _word(text: str) -> str | None:
    return text or None


def _truth(default: bool | None) -> _Cell:
    read = _one_of({"": default, "true": True, "false": False})
    return lambda text: read(text.lower())


_SIZE, _COUNT = _whole(1), _whole(1, may_be_empty=True)
_ABOVE_0 = _number(math.ulp(0.0), sys.float_info.max, "empty or a number above 0")
_COLUMNS: dict[str, _Cell] = {
    **dict.fromkeys(("table", "row", "model"), str),
    **dict.fromkeys(("hidden", "layers", "heads", "ffn", "vocab", "seq_len", "gpus", "dp", "tp", "pp"), _SIZE),
    **dict.fromkeys(("global_batch", "micro_batch"), _COUNT),
    "gpu": str,
    "kernel": _one_of({"": None, **KERNELS}),
    "status": _one_of(_OUTCOMES),
    **dict.fromkeys(("kv_heads", "head_dim", "gpus_per_node", "cp", "virtual_stages"), _COUNT),
    "zero": _whole(0, 3, may_be_empty=True),
    **dict.fromkeys(("tied", "qk_norm", "compile"), _truth(default=False)),
    "gated": _truth(default=True),
    "sequence_parallel": _truth(default=None),
    "recompute": _recompute,
    **dict.fromkeys(("engine", "precision", "schedule"), _word),
    "optimizer": lambda text: text or AdamW.name,
    **dict.fromkeys(
        ("ep", "experts", "experts_per_token", "expert_ffn", "shared_expert_ffn", "dense_layers"),
        _whole(0, may_be_empty=True),
    ),
    **dict.fromkeys(("step_time_s", "tokens_per_s_gpu", "peak_memory_gb"), _ABOVE_0),
    "mfu": _number(0.0, 8.0, "empty or a fraction of the bf16 peak, 0 to 1, below bf16 to 8"),
    **dict.fromkeys(("source", "note"), str),
}  # fmt: skip
"""Column → what its cells say."""
_REQUIRED = list(_COLUMNS)[: list(_COLUMNS).index("kv_heads")]
