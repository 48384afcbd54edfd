"""NeMo AutoModel: the YAML file of its recipe for next-token prediction."""

from typing import Any

from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.models.files import to_hf
from dtlayout.models.naming import NAME_KEY
from dtlayout.programs.program import TORCH_SCHEDULES, Arguments, Job, Program, choose, name_stages
from dtlayout.programs.yaml import dump
from dtlayout.spec.optimizers import SGD, AdamW
from dtlayout.spec.recompute import Recompute

_ATTENTION = {"sdpa-cudnn": "cudnn_attention", "sdpa-flash": "flash_attention", "sdpa-math": "math"}
_FP8: dict[str, dict[str, Any]] = {
    "fp8-tensorwise": {"enabled": True, "enable_fsdp_float8_all_gather": True},
    "fp8-rowwise": {"enabled": True, "recipe_name": "rowwise"},
}
"""precision.matmuls → fp8."""


def write(job: Job) -> Arguments:
    """The file; InvalidLayout for a pipeline that AutoModel does not start, InvalidConfig for experts."""
    layout, scenario, precision = job.layout, job.scenario, job.scenario.precision
    if job.model.experts:
        raise InvalidConfig(
            f"model {job.model.name}: AutoModel builds a mixture of experts from its config.json, which is not written "
            f"here; leave out --emit, or use --engine megatron or torchtitan"
        )
    if layout.is_pipelined and job.num_microbatches < layout.pp:
        raise InvalidLayout(
            f"AutoModel refuses a pipeline with fewer microbatches than ranks, here {job.num_microbatches} on pp="
            f"{layout.pp}; use a smaller --fix pp, or a larger --global-batch"
        )
    distributed, gaps = _distributed(job)
    optimizer, unknown = _optimizer(job)
    gaps += unknown + job.odd_state() + job.odd_kernels(said=("compile", "attention"))
    if precision.matmul_format and precision.matmuls not in _FP8:
        gaps.append(f"precision.matmuls={precision.matmuls} is nothing that it has: bf16 is written instead")
    tables: dict[str, Any] = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "step_scheduler": {
            "global_batch_size": scenario.batch.global_batch, "local_batch_size": job.sequences_at_once,
            "max_steps": job.steps,
        },
        "model": _model(job),
        "distributed": distributed,
        "optimizer": optimizer,
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {
            "_target_": "nemo_automodel.components.datasets.llm.mock_iterable_dataset.MockIterableDataset",
            "vocab_size": job.model.vocab_size, "seq_len": scenario.batch.seq_len, "batch_size": job.sequences_at_once,
        },
        "dataloader": {"_target_": "torch.utils.data.DataLoader", "batch_size": None},
        "checkpoint": {"enabled": False},
    }  # fmt: skip
    if precision.matmuls in _FP8:
        tables["fp8"] = _FP8[precision.matmuls]
    return Arguments(list(dump(tables)), f"{job.torchrun} -m nemo_automodel.cli.app FILE", gaps)


def _model(job: Job) -> dict[str, Any]:
    """The recipe's table `model`: the family's transformers config with the model's sizes, and the number format of the
    weights.

    `sdpa_method` is there only for attention kernels that AutoModel can name.
    """
    config = to_hf(job.model, job.scenario.precision.params, job.scenario.batch.seq_len)
    (architecture,) = config.pop("architectures")
    for name in ("model_type", "torch_dtype", NAME_KEY):
        del config[name]  # the class says the first, from_config takes the second, and nobody needs the third
    method = _ATTENTION.get(job.estimate.kernels.attention)
    return {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
        "config": {"_target_": f"transformers.{architecture.removesuffix('ForCausalLM')}Config", **config},
        "torch_dtype": job.scenario.precision.params,
        **({"sdpa_method": [method]} if method else {}),
    }


def _distributed(job: Job) -> tuple[dict[str, Any], list[str]]:
    """`distributed` and gaps."""
    layout, precision, compile = job.layout, job.scenario.precision, job.estimate.kernels.compile
    recompute, gaps = _recompute(layout.recompute)
    compute = precision.compute
    if compute == "float16":
        compute = "bfloat16"
        gaps.append("precision.compute=float16 is written as bfloat16: nothing scales the loss there")
    if job.estimate.kernels.attention not in _ATTENTION:
        gaps.append(f"kernels.attention={job.estimate.kernels.attention} is no sdpa_method: it takes its own")
    table: dict[str, Any] = {
        "strategy": "fsdp2", "dp_size": layout.dp, "tp_size": layout.tp, "cp_size": layout.cp, "pp_size": layout.pp,
        "sequence_parallel": layout.shards_sequence, "enable_async_tensor_parallel": layout.overlaps_tp,
        "activation_checkpointing": recompute, "reshard_after_forward": layout.zero == 3,
        "defer_fsdp_grad_sync": layout.zero == 1, "enable_compile": compile != "none",
        "mp_policy": {
            "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy", "param_dtype": compute,
            "reduce_dtype": precision.reduce,
        },
    }  # fmt: skip
    if layout.offloads_state:
        table["offload_policy"] = {"_target_": "torch.distributed.fsdp.CPUOffloadPolicy"}
    if layout.dp_replicate > 1:
        table["dp_replicate_size"] = layout.dp_replicate
    if compile == "model":
        gaps.append("kernels.compile=model: blocks are compiled one by one instead")
    if layout.is_pipelined:
        schedule, unknown = choose("layout.schedule", layout.schedule, TORCH_SCHEDULES, "1F1B")
        gaps += unknown
        modules = name_stages(
            job.estimate.stage_layers, first="model.embed_tokens", block="model.layers.{}",
            last=["model.norm", "lm_head"], every=["model.rotary_emb"],
        )  # fmt: skip
        table["pipeline"] = {
            "pp_schedule": schedule.lower(), "pp_microbatch_size": layout.micro_batch,
            "module_fqns_per_model_part": modules,
        }  # fmt: skip
    return table, gaps


def _recompute(text: str) -> tuple[bool | str, list[str]]:
    """`activation_checkpointing` and gaps."""
    parsed = Recompute.parse(text)
    if parsed.is_selective:
        gap = f"layout.recompute={text} is nothing that it has: selective is written instead"
        return "selective", [gap] * (text != "selective")
    gap = f"layout.recompute={text} is nothing that it has: every block is recomputed instead, which is slower"
    return parsed.every > 0, [gap] * (parsed.every > 1)


def _optimizer(job: Job) -> tuple[dict[str, Any], list[str]]:
    """`optimizer` and gaps."""
    optimizer = job.scenario.optimizer
    table = {"_target_": "torch.optim.AdamW", "lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    match optimizer:
        case AdamW():
            return {**table, "betas": [optimizer.beta1, optimizer.beta2], "eps": optimizer.eps}, []
        case SGD():
            return {**table, "_target_": "torch.optim.SGD", "momentum": optimizer.momentum}, []
    return table, [f"optimizer.name={optimizer.name} is written as AdamW: put your class in optimizer._target_"]


AUTOMODEL = Program(
    engine="automodel", title="NeMo AutoModel", version="0.7.0",
    parser="nemo_automodel/recipes/_dist_utils.py and components/distributed/config.py", write=write,
)  # fmt: skip
