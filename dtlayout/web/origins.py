"""Origins: where each number of an answer comes from, with its formula, its constants, and who measured them.

A part of a step or of memory has a formula, which docs/theory derives, and constants of two kinds: numbers of the GPU
type, each with its source, and constants of the program, fitted to runs or general.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from importlib.resources import files
from typing import Any, NamedTuple

from dtlayout.base import toml
from dtlayout.config.reference import find_meaning
from dtlayout.costmodel.engine import Engine
from dtlayout.costmodel.engine_constants import Constants
from dtlayout.costmodel.estimate import TimeEstimate
from dtlayout.costmodel.memory import MemoryEstimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.records.intervals import find_intervals
from dtlayout.spec.cluster import UNITS, Gpu

_MEMORY, _TIME = "docs/theory/memory-model.md", "docs/theory/time-model.md"
_SYMBOLS = (
    "n parameters of a stage on one tp rank, S = dp_shard·cp, t = tp, T tokens of a microbatch on one cp rank, "
    "h hidden size, f width of the FFN, q and kv widths of all query and key heads, V vocabulary, e bytes of an "
    "activation, w bytes of a master weight, r bytes of a gradient, o bytes of optimizer state, m microbatches"
)


class Origin(NamedTuple):
    """Formula behind one number, and the constants in it."""

    formula: str
    page: str
    """File of the documentation that derives it, with the heading."""
    constants: Sequence[str] = ()
    """Names of the program's constants (`Constants`)."""
    numbers: Sequence[str] = ()
    """Names of the GPU type's numbers, as its file has them."""


_TRAFFIC = ("memory_efficiency", "width_traffic_bytes", "rope_traffic_bytes", "norm_traffic_bytes")
TIME = {
    "compute": Origin(
        "matmul(m, n, k) = max(2(m + fill)(n + fill)(k + fill) / (peak · matmul_efficiency · matmul_share), bytes / "
        "(memory bandwidth · memory_efficiency)); attention X/2 / (peak · its efficiency), backward 2.5 times; "
        "elementwise kernels bytes / (memory bandwidth · memory_efficiency); summed over blocks and microbatches",
        f"{_TIME}#a-block-one-microbatch-on-one-rank",
        ("matmul_efficiency", "matmul_share", "matmul_fill", "flash2_efficiency", "flash3_efficiency",
         "fp8_efficiency", "fp4_efficiency", *_TRAFFIC, "logit_traffic_bytes", "gradient_traffic_bytes"),
        ("peak_bf16", "peak_fp8", "memory_bandwidth"),
    ),
    "recompute": Origin(
        "the forward of each block that recompute covers, once more in backward, less what it keeps",
        f"{_TIME}#a-block-one-microbatch-on-one-rank",
        ("matmul_efficiency", "matmul_share", "flash2_efficiency", "flash3_efficiency", *_TRAFFIC),
        ("peak_bf16", "memory_bandwidth"),
    ),
    "tp": Origin(
        "half(b, n) = start + (n − 1)/n · b / bandwidth + (n − 1) · latency for each gather or reduce-scatter of b "
        "bytes over n ranks, times tp_exposed where it is overlapped",
        f"{_TIME}#links",
        ("link_efficiency", "collective_start_s", "link_latency_s", "tp_exposed", "tp_network_efficiency",
         "tp_network_latency_s"),
        ("link_bandwidth", "network_bandwidth", "link_latency"),
    ),
    "pp": Origin(
        "a message is T·h·e bytes, over t under sequence parallelism; bytes / (link or network bandwidth · efficiency)",
        f"{_TIME}#pipeline",
        ("message_efficiency", "link_efficiency", "message_host_s"),
        ("link_bandwidth", "network_bandwidth", "network_latency"),
    ),
    "bubble": Origin(
        "the schedule's actions are played with the times of all stages; what is left of the step beside the busiest "
        "rank's own work, dp and optimizer. For equal stages in 1F1B (p − 1) / (m + p − 1)",
        f"{_TIME}#pipeline",
    ),
    "dp": Origin(
        "max(0, reduce + gather − overlap · what runs meanwhile), with r·n bytes reduced and e·n gathered over S, as "
        "often as ZeRO asks, and overlap_slowdown of what is hidden on the network",
        f"{_TIME}#data-parallelism-and-optimizer",
        ("overlap", "overlap_slowdown", "network_efficiency", "network_sharing", "network_congestion",
         "link_efficiency", "layer_sync_s"),
        ("network_bandwidth", "link_bandwidth", "gpus_linked"),
    ),
    "optimizer": Origin(
        "n·(12 + update_bytes/S) bytes / (memory bandwidth · memory_efficiency); update_bytes is 28 for AdamW",
        f"{_TIME}#data-parallelism-and-optimizer",
        ("memory_efficiency", "layer_update_s"),
        ("memory_bandwidth",),
    ),
    "host": Origin(
        "step_host_s, and what a layer's host time is longer than the GPU's; with offload what copies are waited for",
        f"{_TIME}#data-parallelism-and-optimizer",
        ("step_host_s", "layer_host_s", "layer_host_tp_s", "compiled_host_s", "thrash_share", "thrash_s"),
        ("host_link", "host_memory_bandwidth"),
    ),
}  # fmt: skip
"""Part of a step → its origin."""

_DISTRIBUTED, _FSDP2 = f"{_MEMORY}#engines-with-a-distributed-optimizer", f"{_MEMORY}#fsdp2-engines"
MEMORY = {
    "parameters": Origin("2n, or 2n / S with ZeRO-3", _DISTRIBUTED),
    "gradients": Origin("r·n, or r·n / S with ZeRO-2 where there is no pipeline", _DISTRIBUTED),
    "optimizer": Origin("(4 + o + copy_bytes)·n / S; o is 8 for AdamW's two moments", _DISTRIBUTED, ("copy_bytes",)),
    "activations": Origin(
        "microbatches in flight · layers · T · A, with A = 2eh/u + 2eh/u' + e(2q + 2kv)/t + scores/t + 4ef/t and "
        "further terms, u = t under sequence parallelism, else 1; a recomputed block keeps eh/u",
        f"{_MEMORY}#activations-of-a-block",
        ("block_saved_bytes", "norm_saved_bytes", "score_saved_bytes", "fused_score_saved_bytes"),
    ),
    "logits": Origin(
        "logit_bytes·T·V / t, or (logit_bytes + gathered_logit_bytes · [t > 1])·T·V where they are gathered",
        f"{_MEMORY}#logits",
        ("logit_bytes", "gathered_logit_bytes"),
    ),
    "buffers": Origin("bucket_bytes·n with dp > 1; with ZeRO-3 4 · the largest unit beside it", _DISTRIBUTED),
    "run_ahead": Origin(
        "run_ahead_bytes·T·h, and with a pipeline more; only where memory is left", f"{_MEMORY}#run-ahead"
    ),
    "overhead": Origin("overhead_bytes, whatever the layout", _DISTRIBUTED, ("overhead_bytes",)),
    "fragments": Origin(
        "fragment_share of all that comes and goes but logits, for programs that report what is reserved",
        f"{_MEMORY}#fragments",
        ("fragment_share",),
    ),
}
"""Component of memory → its origin, for programs with a distributed optimizer."""
MEMORY_FSDP2 = MEMORY | {
    "parameters": Origin("masters w·n / S, and e·n gathered: all of it, or one unit and the next with ZeRO-3", _FSDP2),
    "gradients": Origin("r·n before the last backward with ZeRO-1, else w·n / S; and of a unit r·N + r·N/S", _FSDP2),
    "optimizer": Origin("o·n / S; o is 2w for AdamW", _FSDP2),
    "activations": Origin(
        "a walk over the tape of each block, at the fullest moment of the played schedule; a recomputed block keeps "
        "eh/u",
        _FSDP2,
    ),
    "logits": Origin(
        "eager and chunked 2L + w·T·V/t (chunked: over its chunks), linear e·T·h + e·V·h/t and the same over its "
        "chunks; L = e·T·V/t",
        _FSDP2,
    ),
    "buffers": Origin("units gathered for use, e·N, and a unit's reduction, r·N", _FSDP2),
}
"""Component of memory → its origin, under FSDP2."""
_MESSAGES = f"{_TIME}#messages"
_LINKS = ("link_efficiency", "collective_start_s", "link_latency_s")
MESSAGES = {
    "tp": Origin(
        "all halves of an all-reduce of T·h·e bytes over n ranks, of each of which a rank sends (n − 1)/n; of all "
        "microbatches, blocks that are computed again, and the head",
        _MESSAGES,
        (*_LINKS, "tp_exposed", "tp_network_efficiency", "tp_network_latency_s"),
        ("link_bandwidth", "network_bandwidth"),
    ),
    "cp": Origin(
        "keys and values of a rank's tokens, and their gradients, to the other ranks of cp; or heads, there and back",
        _MESSAGES,
        (*_LINKS, "network_efficiency", "network_sharing"),
        ("link_bandwidth", "network_bandwidth", "network_latency"),
    ),
    "ep": Origin(
        "k copies of each token to its experts and back, forward and backward, but those whose expert is here",
        _MESSAGES,
        ("exchange_efficiency", "collective_start_s", "overlap"),
        ("link_bandwidth", "network_bandwidth", "network_latency"),
    ),
    "pp": Origin(
        "T·h·e bytes, over t under sequence parallelism, of each microbatch to the next stage, and as many back",
        _MESSAGES,
        ("message_efficiency", "link_efficiency"),
        ("link_bandwidth", "network_bandwidth", "network_latency"),
    ),
    "dp": Origin(
        "(S − 1)/S · r·n bytes of gradients and (S − 1)/S · e·n of parameters, as often as ZeRO asks, and gradients "
        "among replicas",
        _MESSAGES,
        ("overlap", "network_efficiency", "network_sharing", "network_congestion", "link_efficiency"),
        ("network_bandwidth", "link_bandwidth", "gpus_linked"),
    ),
}
"""Axis → the origin of what a rank sends along it."""
OTHERS = {
    "step_time_s": Origin(
        "max over ranks r of (finished_r + dp_r + optimizer_r) + fixed", f"{_TIME}#from-a-layout-to-a-step"
    ),
    "mfu": Origin("B·s · (6N + 12·L·q·s) / (step · GPUs · peak)", f"{_TIME}#mfu", (), ("peak_bf16",)),
    "tokens_per_s": Origin("global_batch · seq_len / step, over the GPUs for one of them", f"{_TIME}#mfu"),
    "capacity": Origin("memory − context_bytes", f"{_MEMORY}#does-it-fit", ("context_bytes",), ("memory",)),
    "peak": Origin("the sum of the components on the fullest pipeline rank", f"{_MEMORY}#does-it-fit"),
    "range": Origin("predicted · low to predicted · high", "docs/theory/validation.md#intervals"),
    "efficiency": Origin("tokens/s of one GPU, over those of one GPU of the smallest cluster", f"{_TIME}#mfu"),
    "cost": Origin("tokens / (tokens/s); GPU-hours = GPUs · hours; money = GPU-hours · price", f"{_TIME}#mfu"),
}  # fmt: skip
"""Other number → its origin."""
_MEANINGS = {
    "step_time_s": "Predicted seconds of one training step.",
    "mfu": "Model FLOPs utilization: the model's FLOPs in a step over those that the GPUs could do at their peak.",
    "tokens_per_s": "Tokens trained in a second by all GPUs together, or by one.",
    "capacity": "Bytes that PyTorch's allocator may hold on one GPU.",
    "peak": "Bytes that the fullest pipeline rank holds at its fullest moment.",
    "efficiency": "Speed of one GPU beside that of one GPU of the smallest cluster.",
    "cost": "Days, GPU-hours and money of the steps alone, without restarts and checkpoints. The price is yours.",
}
_SENT = "Everything that one rank sends in a step along {}: bytes, seconds, and the share that computing hides."


def list_origins(scenario: Scenario) -> dict[str, Any]:
    """The document with the origin of each number in an answer about a scenario."""
    gpu, engine = scenario.cluster.gpu, scenario.engine
    memory = MEMORY_FSDP2 if engine.features.sharding == "fsdp2" else MEMORY
    intervals = find_intervals(scenario)
    ranges = "; ".join(
        f"{name} ×{each.low:.2f} to ×{each.high:.2f}, which held for {each.covered:.0%} of "
        f"{'measured' if each.rows is None else f'{each.rows:,} measured'} runs: {each.like}"
        for name, each in (("step", intervals.step_time), ("peak", intervals.peak_memory))
    )
    return {
        "ok": True, "symbols": _SYMBOLS, "engine": engine.name, "engine_source": engine.source, "gpu": gpu.name,
        "parts": {
            **{f"time.{name}": _show(each, find_meaning(TimeEstimate, name), scenario) for name, each in TIME.items()},
            **{
                f"memory.{name}": _show(each, find_meaning(MemoryEstimate, name), scenario)
                for name, each in memory.items()
            },
            **{f"messages.{axis}": _show(each, _SENT.format(axis), scenario) for axis, each in MESSAGES.items()},
            **{name: _show(each, _MEANINGS.get(name, ranges), scenario) for name, each in OTHERS.items()},
        },
    }  # fmt: skip


def _show(origin: Origin, meaning: str, scenario: Scenario) -> dict[str, Any]:
    gpu, engine = scenario.cluster.gpu, scenario.engine
    return {
        "meaning": meaning, "formula": origin.formula, "page": origin.page,
        "constants": [*_show_numbers(origin.numbers, gpu), *_show_constants(origin.constants, engine)],
    }  # fmt: skip


def _show_numbers(names: Sequence[str], gpu: Gpu) -> Iterator[dict[str, Any]]:
    """The numbers of a GPU type that it has, with the source of each."""
    file = files("dtlayout").joinpath("constants", "clusters", f"{gpu.name}.toml")
    table = toml.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for name in names:
        key, unit = UNITS[name]
        if name in table or not file.is_file():
            source, value = table.get(name, {}).get("source", "registered by a plugin"), getattr(gpu, key)
            yield {"name": name, "value": value, "unit": unit, "source": source, "meaning": find_meaning(Gpu, key)}


def _show_constants(names: Sequence[str], engine: Engine) -> Iterator[dict[str, Any]]:
    units = {each.name: each.metadata["unit"] for each in fields(Constants)}
    for name in names:
        if name in engine.fitted:
            source = f"fitted to runs on this GPU type: {engine.source}"
        elif name in engine.shared:
            source = f"fitted to runs on all GPU types together: {engine.source}"
        else:
            source = "general, or set by what the program's code does"
        meaning, value = find_meaning(Constants, name), getattr(engine.constants, name)
        yield {"name": name, "value": value, "unit": units[name], "source": source, "meaning": meaning}
