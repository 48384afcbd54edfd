"""accelerate: the YAML file of `accelerate launch --config_file`, which says GPUs, sharding and mixed precision."""

from collections.abc import Mapping
from typing import Any

from dtlayout.programs.hugging_face import deepspeed
from dtlayout.programs.program import Job

STRATEGIES: Mapping[str, tuple[int, bool]] = {
    "full_shard": (3, False), "shard_grad_op": (2, False), "hybrid_shard": (3, True), "hybrid_shard_zero2": (2, True),
    "no_shard": (1, False),
}  # fmt: skip
"""Strategy of FSDP 1 → stage of ZeRO, and whether each node has copies of the shards."""
STRATEGY_NUMBERS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""Strategies in the order of their numbers, from 1."""
ROTATE = {"gather": "allgather", "ring": "alltoall"}
"""Our method of attention over cp → parallelism_config_cp_comm_strategy."""
MIXED = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}
"""Compute format → mixed_precision."""
MATMULS = {"fp8-tensorwise": "AO"}
"""precision.matmuls → fp8_config.backend."""


def choose_options(job: Job) -> tuple[dict[str, Any], list[str]]:
    """Options of the YAML that layout, batch, kernels and formats decide, and gaps; None for one that is left out.

    Micro-batch, optimizer and kernels are the script's.
    """
    layout, cluster, precision, gaps = job.layout, job.scenario.cluster, job.scenario.precision, list[str]()
    matmuls = MATMULS.get(precision.matmuls)
    if precision.matmul_format and not matmuls:
        gaps.append(f"precision.matmuls={precision.matmuls} is nothing that it has: {precision.compute} is written")
    options: dict[str, Any] = {
        "num_processes": cluster.num_gpus, "num_machines": cluster.num_nodes,
        "mixed_precision": "fp8" if matmuls else MIXED[precision.compute], "fp8_config.backend": matmuls,
        **dict.fromkeys(("deepspeed_config.zero_stage", "deepspeed_config.offload_optimizer_device",
                         "deepspeed_config.offload_param_device", "deepspeed_config.gradient_accumulation_steps")),
    }  # fmt: skip
    if job.scenario.engine.name == "deepspeed":
        device = deepspeed.DEVICES.get(layout.offload, "none")
        stage = layout.zero if layout.dp_replicate == 1 else 0
        options |= {
            **dict.fromkeys(choose_fsdp(job, "fsdp_config.fsdp_")), **choose_degrees(job),
            "distributed_type": "DEEPSPEED",
            "deepspeed_config.zero_stage": stage, "deepspeed_config.offload_optimizer_device": device,
            "deepspeed_config.offload_param_device": device if stage == 3 else "none",
            "deepspeed_config.gradient_accumulation_steps": job.num_microbatches,
        }  # fmt: skip
        return options, gaps + _list_gaps(job)
    is_sharded = layout.dp_shard > 1 or layout.offloads_state
    kind = "FSDP" if is_sharded or layout.cp > 1 else "MULTI_GPU" if cluster.num_gpus > 1 else "NO"
    fsdp = choose_fsdp(job, "fsdp_config.fsdp_")
    options |= {"distributed_type": kind, **(fsdp if kind == "FSDP" else dict.fromkeys(fsdp)), **choose_degrees(job)}
    return options, gaps + _list_gaps(job)


def choose_fsdp(job: Job, before: str) -> dict[str, Any]:
    """Options of FSDP, whose names follow `before`. FSDP 1 reads the strategy, and FSDP 2 reshard_after_forward.

    Replicas are the strategy's where each node has one, and else a degree of parallelism_config.
    """
    layout = job.layout
    return {
        f"{before}version": 2, f"{before}reshard_after_forward": layout.zero == 3,
        f"{before}sharding_strategy": choose_strategy(job).upper(), f"{before}offload_params": layout.offloads_state,
        f"{before}activation_checkpointing": layout.recompute == "full",
        f"{before}auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }  # fmt: skip


def choose_strategy(job: Job) -> str:
    """The strategy of FSDP 1 for a layout whose state is sharded."""
    wanted = (3 if job.layout.zero == 3 else 2, job.layout.dp_replicate > 1)
    return next(name for name, each in STRATEGIES.items() if each == wanted)


def choose_degrees(job: Job, before: str = "parallelism_config.parallelism_config_") -> dict[str, Any]:
    """Degrees of parallelism_config, all left out where FSDP or DDP alone says them."""
    layout = job.layout
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_comm_strategy")
    is_plain = layout.tp == layout.cp == 1 and (layout.dp_replicate == 1 or layout.dp_shard == 1)
    if is_plain:
        return {f"{before}{name}": None for name in names}
    method = ROTATE.get(layout.cp_method) if layout.cp > 1 else None
    values = (layout.dp_replicate, layout.dp_shard, layout.tp, layout.cp, method)
    return {f"{before}{name}": value for name, value in zip(names, values, strict=True)}


def _list_gaps(job: Job) -> list[str]:
    layout, precision, gaps = job.layout, job.scenario.precision, list[str]()
    overlaps = job.scenario.engine.features.overlap_dp
    if job.scenario.engine.name == "deepspeed" and overlaps != (layout.zero == 3 and layout.dp_replicate == 1):
        gaps.append(f"overlap_dp={str(overlaps).lower()} is zero_optimization.overlap_comm of DeepSpeed's own file")
    if job.scenario.engine.name == "deepspeed" and precision.reduce != precision.compute:
        gaps.append(f"precision.reduce={precision.reduce} is communication_data_type of DeepSpeed's own file")
    says_recompute = job.scenario.engine.name == "accelerate" and (layout.dp_shard > 1 or layout.offloads_state)
    if layout.recompute != "none" and not (says_recompute or layout.cp > 1):
        gaps.append(f"layout.recompute={layout.recompute} is the script's, as gradient_checkpointing")
    if layout.offloads_activations:
        gaps.append(f"layout.offload={layout.offload} keeps activations on the host, which the script does")
    if layout.cp > 1 and layout.cp_method not in ROTATE:
        gaps.append(f"layout.cp_method={layout.cp_method} is nothing that it has: allgather is written instead")
    return gaps
