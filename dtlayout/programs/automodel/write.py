"""NeMo AutoModel: the YAML file of its recipe for next-token prediction."""

from typing import Any

from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.models.files import to_hf
from dtlayout.models.naming import NAME_KEY
from dtlayout.programs.files.yaml import dump
from dtlayout.programs.options import Option, positive, real, string, write_options, yes
from dtlayout.programs.program import TORCH_SCHEDULES, Arguments, Job, Program, choose, name_stages, nest
from dtlayout.spec.optimizers import SGD, AdamW
from dtlayout.spec.recompute import Recompute

ATTENTION = {"sdpa-cudnn": "cudnn_attention", "sdpa-flash": "flash_attention", "sdpa-math": "math"}
"""Our attention → its name among sdpa_method."""
FORMATS = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "float64": "float64"} | {
    f"{torch}{word}": ours
    for torch in ("", "torch.")
    for word, ours in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("float", "float32"),
                       ("half", "float16"), *((each, each) for each in ("float32", "bfloat16", "float16", "float64")))
}  # fmt: skip
"""Word for a number format → ours; the first of several is written."""
OPTIONS = (
    Option("step_scheduler.global_batch_size", "batch", "global_batch", positive),
    Option("model.torch_dtype", "precision", "params", string, None, FORMATS),
    Option("distributed.tp_size", "layout", "tp", positive, 1),
    Option("distributed.cp_size", "layout", "cp", positive, 1),
    Option("distributed.pp_size", "layout", "pp", positive, 1),
    Option("distributed.ep_size", "layout", "ep", positive, 1),
    Option("distributed.sequence_parallel", "layout", "sequence_parallel", yes, False),
    Option("distributed.enable_async_tensor_parallel", "layout", "tp_overlap", yes, False),
    Option("distributed.mp_policy.param_dtype", "precision", "compute", string, "bfloat16", FORMATS),
    Option("distributed.mp_policy.reduce_dtype", "precision", "reduce", string, "float32", FORMATS),
    Option("optimizer.lr", "optimizer", "lr", real, 1e-4),
    Option("optimizer.weight_decay", "optimizer", "weight_decay", real, 0.01),
    Option("optimizer.eps", "optimizer", "eps", real, 1e-8),
    Option("optimizer.momentum", "optimizer", "momentum", real, 0.0),
    Option("clip_grad_norm.max_norm", "optimizer", "max_norm", real, 1.0),
    Option("dataset.seq_len", "batch", "seq_len", positive),
)
"""Options that are keys of ours, with the defaults of its recipe."""
FP8: dict[str, dict[str, Any]] = {
    "fp8-tensorwise": {"enabled": True, "enable_fsdp_float8_all_gather": True},
    "fp8-rowwise": {"enabled": True, "recipe_name": "rowwise"},
}
"""precision.matmuls → fp8."""
_FIRST = (
    "step_scheduler.global_batch_size", "step_scheduler.local_batch_size",
    *(f"distributed.{name}" for name in (
        "strategy", "dp_size", "tp_size", "cp_size", "pp_size", "sequence_parallel", "enable_async_tensor_parallel",
        "activation_checkpointing", "reshard_after_forward", "defer_fsdp_grad_sync", "enable_compile",
        "mp_policy._target_",
    )),
    *(f"optimizer.{name}" for name in ("_target_", "lr", "weight_decay", "betas")),
)  # fmt: skip
"""Options before others, in the order of the file."""
_PIPELINE = ("pp_schedule", "pp_microbatch_size", "module_fqns_per_model_part")
"""Options of distributed.pipeline that are written."""


def write(job: Job) -> Arguments:
    """The file; InvalidLayout for a pipeline that AutoModel does not start, InvalidConfig for experts."""
    layout = job.layout
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
    options, gaps = choose_options(job)
    gaps += job.odd_state() + job.odd_kernels(said=("compile", "attention"))
    chosen = nest(options)
    tables: dict[str, Any] = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "step_scheduler": chosen.pop("step_scheduler") | {"max_steps": job.steps},
        "model": _model(job) | chosen.pop("model"),
        "distributed": chosen.pop("distributed"),
        "optimizer": chosen.pop("optimizer"),
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {
            "_target_": "nemo_automodel.components.datasets.llm.mock_iterable_dataset.MockIterableDataset",
            "vocab_size": job.model.vocab_size, **chosen.pop("dataset"),
        },
        "dataloader": {"_target_": "torch.utils.data.DataLoader", "batch_size": None},
        "checkpoint": {"enabled": False},
        **chosen,
    }  # fmt: skip
    return Arguments(list(dump(tables)), f"{job.torchrun} -m nemo_automodel.cli.app FILE", gaps)


def choose_options(job: Job) -> tuple[dict[str, Any], list[str]]:
    """Options that all but the model decides, and gaps; None stands for an option that is left out."""
    precision = job.scenario.precision
    left_out = dict.fromkeys((*_FIRST, *(option.name for option in OPTIONS)))
    distributed, gaps = _distributed(job)
    optimizer, unknown = _optimizer(job)
    gaps += unknown
    if precision.matmul_format and precision.matmuls not in FP8:
        gaps.append(f"precision.matmuls={precision.matmuls} is nothing that it has: bf16 is written instead")
    method = ATTENTION.get(job.estimate.kernels.attention)
    max_norm = job.scenario.optimizer.max_norm
    options = left_out | write_options(OPTIONS, job) | distributed | optimizer | {
        "step_scheduler.local_batch_size": job.sequences_at_once,
        "model.sdpa_method": [method] if method else None,
        "clip_grad_norm.max_norm": None if max_norm == 1.0 else max_norm,  # its default
        "dataset.batch_size": job.sequences_at_once,
        **dict.fromkeys(f"fp8.{name}" for known in FP8.values() for name in known),
        **{f"fp8.{name}": value for name, value in FP8.get(precision.matmuls, {}).items()},
    }  # fmt: skip
    if not job.model.experts:
        options["distributed.ep_size"] = None
    return options, gaps


def _model(job: Job) -> dict[str, Any]:
    """Options of `model` that the model decides: the family's transformers config with its sizes."""
    config = to_hf(job.model, job.scenario.precision.params, job.scenario.batch.seq_len)
    (architecture,) = config.pop("architectures")
    for name in ("model_type", "torch_dtype", NAME_KEY):
        del config[name]  # the class says the first, from_config takes the second, and nobody needs the third
    return {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
        "config": {"_target_": f"transformers.{architecture.removesuffix('ForCausalLM')}Config", **config},
    }


def _distributed(job: Job) -> tuple[dict[str, Any], list[str]]:
    """Options of `distributed` that are no row of `OPTIONS`, or not always, and gaps."""
    layout, precision, compile = job.layout, job.scenario.precision, job.estimate.kernels.compile
    recompute, gaps = _recompute(layout.recompute)
    compute = precision.compute
    if compute == "float16":
        compute = "bfloat16"
        gaps.append("precision.compute=float16 is written as bfloat16: nothing scales the loss there")
    if job.estimate.kernels.attention not in ATTENTION:
        gaps.append(f"kernels.attention={job.estimate.kernels.attention} is no sdpa_method: it takes its own")
    if layout.cp > 1 and layout.cp_method != "gather":
        gaps.append(f"layout.cp_method={layout.cp_method} is no option: it gathers keys and values")
    if layout.overlaps_tp and compile == "none":
        gaps.append("kernels.compile=none: blocks are compiled with enable_async_tensor_parallel")
    if compile == "model":
        gaps.append("kernels.compile=model: blocks are compiled one by one instead")
    options: dict[str, Any] = {
        "strategy": "fsdp2", "dp_size": layout.dp,
        "sequence_parallel": layout.shards_sequence, "enable_async_tensor_parallel": layout.overlaps_tp,
        "activation_checkpointing": recompute, "reshard_after_forward": layout.zero == 3,
        "defer_fsdp_grad_sync": layout.zero == 1, "enable_compile": compile != "none",
        "mp_policy._target_": "torch.distributed.fsdp.MixedPrecisionPolicy", "mp_policy.param_dtype": compute,
        "mp_policy.reduce_dtype": precision.reduce,
        "offload_policy._target_": "torch.distributed.fsdp.CPUOffloadPolicy" if layout.offloads_state else None,
        "dp_replicate_size": layout.dp_replicate if layout.dp_replicate > 1 else None,
        **dict.fromkeys(f"pipeline.{name}" for name in _PIPELINE),
    }  # fmt: skip
    if layout.is_pipelined:
        schedule, unknown = choose("layout.schedule", layout.schedule, TORCH_SCHEDULES, "1F1B")
        gaps += unknown
        modules = name_stages(
            job.estimate.stage_layers, first="model.embed_tokens", block="model.layers.{}",
            last=["model.norm", "lm_head"], every=["model.rotary_emb"],
        )  # fmt: skip
        stages = (schedule.lower(), layout.micro_batch, modules)
        options |= {f"pipeline.{name}": value for name, value in zip(_PIPELINE, stages, strict=True)}
    return {f"distributed.{name}": value for name, value in options.items()}, gaps


def _recompute(text: str) -> tuple[bool | str, list[str]]:
    """`activation_checkpointing` and gaps."""
    parsed = Recompute.parse(text)
    if parsed.is_selective:
        gap = f"layout.recompute={text} is nothing that it has: selective is written instead"
        return "selective", [gap] * (text != "selective")
    gap = f"layout.recompute={text} is nothing that it has: every block is recomputed instead, which is slower"
    return parsed.every > 0, [gap] * (parsed.every > 1)


def _optimizer(job: Job) -> tuple[dict[str, Any], list[str]]:
    """Options of `optimizer` that are no row of `OPTIONS`, and gaps."""
    optimizer, gaps = job.scenario.optimizer, list[str]()
    options: dict[str, Any] = {"optimizer._target_": "torch.optim.AdamW", "optimizer.betas": None}
    match optimizer:
        case AdamW():
            options["optimizer.betas"] = [optimizer.beta1, optimizer.beta2]
        case SGD():
            options["optimizer._target_"] = "torch.optim.SGD"
        case _:
            gaps.append(f"optimizer.name={optimizer.name} is written as AdamW: put your class in optimizer._target_")
            options |= dict.fromkeys(("optimizer.eps", "optimizer.momentum"))
    return options, gaps


AUTOMODEL = Program(
    engine="automodel", title="NeMo AutoModel", version="0.7.0",
    parser="nemo_automodel/recipes/_dist_utils.py and components/distributed/config.py", write=write,
    options=choose_options,
)  # fmt: skip
