"""Row parsing: model, layout and kernels from the cells of a row, and from its note where there is no column."""

import json
import re
from dataclasses import replace
from typing import Any, Literal

from dtlayout.costmodel.engine import find_engine, find_usual, known_engines
from dtlayout.models.counting import count_model_flops_per_token
from dtlayout.schedules.schedules import schedule_with
from dtlayout.spec.cluster import gpu_named
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts, LatentAttention, ModelShape
from dtlayout.validation.columns import Cells

_SCHEDULES = {"interleaved": "interleaved-1f1b", "zero-bubble": "zb-h1", "zbv": "zb-v"}
"""A table's word for a schedule, where it is not ours."""
_MAY_BE_USUAL = ("micro_batch", "zero", "recompute", "sequence_parallel")
"""Columns that an engine's usual habit may fill."""
_SHARDED_OVER = re.compile(r"\boptimizer shards over (\d+) GPUs")
"""A note on data-parallel ranks of which each so many have a whole optimizer state."""
_CHUNKED_HEAD = re.compile(r"\brl trainer step\b")
"""A note on prime-rl's trainer for reinforcement learning, which takes head and loss in chunks of tokens."""
LATENT_ATTENTION = re.compile(r"\bMLA q_lora (\d+) kv_lora (\d+) qk (\d+)\+(\d+) v (\d+)")
"""A note on latent attention: ranks of queries and of keys and values, and a head's width, rotated part and values."""
_OVERLAPS_TP = re.compile(r"(?<!no )\basync ?TP\b", re.IGNORECASE)
"""A note on tp's messages that are sent in pieces beside matmuls."""
_OVERLAPS_EP = re.compile(r"\ba2a overlap\b")
"""A note on tokens that are exchanged while another microbatch is computed."""
_SENDS_TOKENS_ONCE = re.compile(r"\bdispatcher (deepep|hybridep)\b")
"""A note on tokens that go once to each node that has any of their experts."""
_WINDOW = re.compile(r"\bevery other layer has a (\d+)-token window")
"""A note on gpt-oss, of which no other column tells: attention to so many tokens, and experts with biases."""


def assume(cells: dict[str, Any]) -> tuple[str, ...]:
    """Fill empty cells of a row with what its engine usually does; returns a sentence on each assumption."""
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


def to_kernels(cells: Cells) -> Kernels:
    """The kernels of a row, those that its word leaves open as its engine has them."""
    kernels: Kernels = cells["kernel"]
    usual = find_usual(cells["engine"])
    return replace(
        usual.kernels, attention=usual.kernels.attention if kernels.attention == "sdpa-flash" else kernels.attention,
        norm="fused" if usual.fuses_norms else kernels.norm, compile="blocks" if cells["compile"] else "none",
        loss="linear" if _CHUNKED_HEAD.search(cells["note"]) else usual.kernels.loss,
    )  # fmt: skip


def to_model(cells: Cells) -> ModelShape:
    window, experts = _WINDOW.search(cells["note"]), None
    if cells["experts"]:
        experts = Experts(
            number=cells["experts"], per_token=cells["experts_per_token"], ffn_size=cells["expert_ffn"],
            shared_ffn_size=cells["shared_expert_ffn"] or 0, dense_layers=cells["dense_layers"] or 0,
            bias=window is not None,
        )  # fmt: skip
    latent = None
    if found := LATENT_ATTENTION.search(cells["note"]):
        query_rank, kv_rank, _, rope_width, value_width = map(int, found.groups())
        latent = LatentAttention(query_rank=query_rank, kv_rank=kv_rank, rope_width=rope_width, value_width=value_width)
    return ModelShape(
        name=cells["model"], hidden_size=cells["hidden"], num_layers=cells["layers"], num_heads=cells["heads"],
        num_kv_heads=cells["kv_heads"] or cells["heads"], ffn_size=cells["ffn"], vocab_size=cells["vocab"],
        head_dim=cells["head_dim"], qk_norm=cells["qk_norm"], gated_ffn=cells["gated"], tied_embeddings=cells["tied"],
        experts=experts, latent_attention=latent, window=int(window[1]) if window else 0,
    )  # fmt: skip


def to_layout(cells: Cells) -> Layout:
    zero, dp = cells["zero"], cells["dp"]
    shards = 1 if zero == 0 else dp
    if (found := _SHARDED_OVER.search(cells["note"])) and dp % int(found[1]) == 0:
        shards = int(found[1])
    methods = find_engine(cells["engine"], cells["gpu"]).features.cp_methods
    return Layout(
        pp=cells["pp"], dp_replicate=dp // shards, dp_shard=shards,
        cp=cells["cp"] or 1, cp_method=methods[0], tp=cells["tp"], ep=(cells["experts"] and cells["ep"]) or 1,
        ep_overlap=bool(_OVERLAPS_EP.search(cells["note"])), tp_overlap=bool(_OVERLAPS_TP.search(cells["note"])),
        ep_dispatcher="deepep" if _SENDS_TOKENS_ONCE.search(cells["note"]) else "alltoall",
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
