"""Row parsing: model, layout, kernels and engine from the cells of a row."""

import json
from dataclasses import replace
from typing import Any, Literal

from dtlayout.costmodel.engine import Engine, find_engine, find_usual, known_engines
from dtlayout.costmodel.engine_features import CHOICES
from dtlayout.models.counting import count_model_flops_per_token
from dtlayout.schedules.schedules import schedule_with
from dtlayout.spec.cluster import gpu_named
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts, LatentAttention, ModelShape
from dtlayout.spec.precision import MATMUL_FORMATS, Precision
from dtlayout.validation.columns import KERNEL_COLUMNS, KERNELS, Cells
from dtlayout.validation.notes import read_note

PRECISIONS = {
    "bf16": {}, "fp16": {"compute": "float16"}, **{name: {"matmuls": name} for name in MATMUL_FORMATS},
}  # fmt: skip
"""A table's word for the format of matmuls → the keys of `Precision` that it sets."""
LATENT = ("query_rank", "kv_rank", "rope_width", "value_width")
"""Columns of latent attention."""
_SCHEDULES = {"interleaved": "interleaved-1f1b", "zero-bubble": "zb-h1", "zbv": "zb-v"}
"""A table's word for a schedule, where it is not ours."""
_MAY_BE_USUAL = ("micro_batch", "zero", "recompute", "sequence_parallel", "tp_overlap", "gradients")
"""Columns that an engine's usual habit may fill."""
_BEFORE_FLASH = "megatron-softmax"
"""Attention of a Megatron from before FlashAttention, which is another program than today's."""


def assume(cells: dict[str, Any]) -> tuple[str, ...]:
    """Fill empty cells of a row with what its note says, then with what its engine usually does.

    Returns a sentence on each assumption.
    """
    cells |= {name: value for name, value in read_note(cells["note"], cells["source"]).items() if cells[name] is None}
    changed = []
    if cells["engine"] == "megatron" and cells["kernel"] == KERNELS[_BEFORE_FLASH]:
        cells["engine"] = "megatron-2021"
        changed = [f"kernel={_BEFORE_FLASH}: the Megatron of 2021, in which nothing is overlapped"]
    usual = dict(vars(find_usual(cells["engine"])))
    if cells["experts"] or cells["tp"] == 1 or not (cells["sequence_parallel"] or usual["sequence_parallel"]):
        usual["tp_overlap"] = None
    if usual["fills_pipeline_once"] and cells["pp"] > 1 and cells["global_batch"]:
        usual["micro_batch"] = max(1, cells["global_batch"] // (cells["dp"] * cells["pp"]))
    filled = {name: usual[name] for name in _MAY_BE_USUAL if cells[name] is None and usual[name] is not None}
    cells |= filled
    engine = cells["engine"]
    assumed = changed + [
        f"not stated: {name}={json.dumps(value)}, what {engine} usually does" for name, value in filled.items()
    ]
    if engine in known_engines() and _to_zero(cells) < (cells["zero"] or 1):
        assumed.append(f"zero={cells['zero']} in a pipeline: {engine} keeps parameters gathered and gradients whole")
    cells["tells_memory"] = cells["tells_memory"] is not False and "recompute" not in filled
    return tuple(assumed)


def to_kernels(cells: Cells) -> Kernels:
    """The kernels of a row, those that its word leaves open as its engine has them."""
    kernels: Kernels = cells["kernel"]
    usual = find_usual(cells["engine"])
    named = {operation: cells[column] for column, operation in KERNEL_COLUMNS.items() if cells[column]}
    if kernels.attention != "sdpa-flash":
        named = {"attention": kernels.attention, **named}
    return replace(
        usual.kernels, norm="fused" if usual.fuses_norms else kernels.norm,
        compile="blocks" if cells["compile"] else "none", **named,
    )  # fmt: skip


def to_engine(cells: Cells) -> tuple[Engine, Precision]:
    """The engine of a row, told what the row says of it, and its formats."""
    told = {name: cells[name] for name in CHOICES if cells[name]}
    asked = dict(PRECISIONS[cells["precision"]])
    if cells["gradients"]:
        asked["reduce"] = cells["gradients"]
    return find_engine(cells["engine"], cells["gpu"]).told(told).told_formats(asked)


def to_model(cells: Cells) -> ModelShape:
    experts, latent = None, None
    if cells["experts"]:
        experts = Experts(
            number=cells["experts"], per_token=cells["experts_per_token"], ffn_size=cells["expert_ffn"],
            shared_ffn_size=cells["shared_expert_ffn"] or 0, dense_layers=cells["dense_layers"] or 0,
            bias=bool(cells["expert_bias"]), imbalance=cells["imbalance"] or 1.0,
        )  # fmt: skip
    if cells["kv_rank"]:
        latent = LatentAttention(**{name: cells[name] or 0 for name in LATENT})
    return ModelShape(
        name=cells["model"], hidden_size=cells["hidden"], num_layers=cells["layers"], num_heads=cells["heads"],
        num_kv_heads=cells["kv_heads"] or cells["heads"], ffn_size=cells["ffn"], vocab_size=cells["vocab"],
        head_dim=cells["head_dim"], qk_norm=cells["qk_norm"], gated_ffn=cells["gated"], tied_embeddings=cells["tied"],
        experts=experts, latent_attention=latent, window=cells["window"] or 0,
    )  # fmt: skip


def to_layout(cells: Cells) -> Layout:
    zero, dp = cells["zero"], cells["dp"]
    shards = 1 if zero == 0 else dp
    if (together := cells["optimizer_shards"]) and dp % together == 0:
        shards = together
    features = find_engine(cells["engine"], cells["gpu"]).features
    return Layout(
        pp=cells["pp"], dp_replicate=dp // shards, dp_shard=shards,
        cp=cells["cp"] or 1, cp_method=cells["cp_method"] or features.cp_methods[0],
        tp=cells["tp"], ep=(cells["experts"] and cells["ep"]) or 1,
        ep_overlap=bool(cells["ep_overlap"]), tp_overlap=bool(cells["tp_overlap"]),
        ep_dispatcher=cells["ep_dispatcher"] or features.ep_dispatchers[0],  # type: ignore[arg-type]
        sequence_parallel=bool(cells["sequence_parallel"]),
        micro_batch=cells["micro_batch"], schedule=find_schedule(cells),
        virtual_stages=cells["virtual_stages"] or 1, zero=_to_zero(cells), recompute=cells["recompute"],
    )  # fmt: skip


def _to_zero(cells: Cells) -> Literal[1, 2, 3]:
    """The stage of ZeRO that runs: FSDP2's 3 keeps parameters gathered in some engines' pipelines."""
    most = find_engine(cells["engine"], cells["gpu"]).features.pipeline_zero if cells["pp"] > 1 else 3
    stated: Literal[1, 2, 3] = cells["zero"] or 1
    return most if stated > most else stated


def to_mfu(cells: Cells) -> float:
    """The MFU that a known GPU type has at the tokens a second of a row."""
    flops_per_token = count_model_flops_per_token(to_model(cells), cells["seq_len"])
    return float(cells["tokens_per_s_gpu"] * flops_per_token / gpu_named(cells["gpu"]).peak_flops_per_s)


def find_schedule(cells: Cells) -> str:
    """The schedule that a row names, ours where the name is known; without pipeline none has a meaning."""
    if cells["pp"] == 1 or not (word := str(cells["schedule"] or "")):
        return schedule_with(cells["virtual_stages"] or 1)
    return _SCHEDULES.get(word, word)
