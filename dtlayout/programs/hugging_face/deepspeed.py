"""DeepSpeed: its JSON file, alone or as a table of another program's file."""

from collections.abc import Mapping
from typing import Any

from dtlayout.programs.program import Job
from dtlayout.spec.optimizers import SGD, AdamW

OPTIMIZERS: Mapping[str, str] = {
    "AdamW": "adamw", "Adam": "adamw", "FusedAdam": "adamw", "DeepSpeedCPUAdam": "adamw", "SGD": "sgd",
}  # fmt: skip
"""Type of an optimizer → ours; of several for one of ours, the first is written."""
FORMATS = {"fp32": "float32", "bf16": "bfloat16", "bfp16": "bfloat16", "fp16": "float16"}
"""Word for a format → ours."""
DEVICES = {"none": "none", "optimizer": "cpu", "both": "cpu", "disk": "nvme"}
"""layout.offload → device of offload_optimizer and offload_param; activations are no option of DeepSpeed's."""
_WORDS = {ours: theirs for theirs, ours in reversed(FORMATS.items())}


def choose_options(job: Job) -> tuple[dict[str, Any], list[str]]:
    """Options of the JSON that layout, batch, kernels and formats decide, and gaps; None for one that is left out."""
    layout, optimizer, gaps = job.layout, job.scenario.optimizer, list[str]()
    options: dict[str, Any] = {
        "train_batch_size": job.scenario.batch.global_batch, "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": job.num_microbatches, "gradient_clipping": write_clipping(optimizer.max_norm),
        **choose_sharding(job), **dict.fromkeys(("optimizer.params.betas", "optimizer.params.eps")),
        "optimizer.params.momentum": None, "optimizer.params.lr": optimizer.lr,
        "optimizer.params.weight_decay": optimizer.weight_decay,
    }  # fmt: skip
    if isinstance(optimizer, SGD):
        options |= {"optimizer.type": "SGD", "optimizer.params.momentum": optimizer.momentum}
    else:
        options["optimizer.type"] = "AdamW"
        if isinstance(optimizer, AdamW):
            options |= {
                "optimizer.params.betas": [optimizer.beta1, optimizer.beta2],
                "optimizer.params.eps": optimizer.eps,
            }
        else:
            gaps.append(f"optimizer.name={optimizer.name} is not written: AdamW is")
    if layout.offloads_activations:
        gaps.append(
            f"layout.offload={layout.offload} keeps activations on the host, which the Trainer is told beside it"
        )
    if layout.recompute != "none":
        gaps.append(f"layout.recompute={layout.recompute} is the Trainer's, as gradient_checkpointing")
    return options, gaps + job.odd_kernels()


def choose_sharding(job: Job, before: str = "") -> dict[str, Any]:
    """Options of the stage, its offload and the formats; `before` is what precedes their names in a file."""
    layout, precision = job.layout, job.scenario.precision
    zero, params = f"{before}zero_optimization.", "bf16.bf16_"
    overlaps = job.scenario.engine.features.overlap_dp
    stage = layout.zero if layout.dp_replicate == 1 else 0
    device = DEVICES.get(layout.offload, "none")
    is_coarse = precision.params == "bfloat16" == precision.compute
    coarse = {f"{params}master_weights_and_grads": is_coarse or None, f"{params}optimizer_states": is_coarse or None}
    sent = None if precision.reduce == precision.compute else _WORDS[precision.reduce]
    return {
        f"{zero}stage": stage,
        f"{zero}offload_optimizer.device": device,
        f"{zero}offload_param.device": device if stage == 3 else None,
        f"{zero}overlap_comm": None if overlaps == (stage == 3) else overlaps,
        f"{before}bf16.enabled": precision.compute == "bfloat16",
        f"{before}fp16.enabled": precision.compute == "float16",
        f"{before}communication_data_type": sent,
        **{f"{before}{name}": value for name, value in coarse.items()},
    }


def write_clipping(max_norm: float) -> float:
    """Norm to clip at, as DeepSpeed and the Trainer have it: 0 where nothing is clipped."""
    return 0.0 if max_norm == float("inf") else max_norm
