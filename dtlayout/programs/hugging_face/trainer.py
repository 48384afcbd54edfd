"""Hugging Face's Trainer: the words of its TrainingArguments and of PEFT, in both directions.

Programs that train by it have some of these words, and others of their own: a `Dialect` says which.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dtlayout.programs.hugging_face import accelerate, deepspeed
from dtlayout.programs.hugging_face.words_reader import Names
from dtlayout.programs.options import Option, positive, real, write_options
from dtlayout.programs.program import Job
from dtlayout.spec.optimizers import STATE_FORMAT

OPTIONS = (
    Option("per_device_train_batch_size", "layout", "micro_batch", positive, 8),
    Option("learning_rate", "optimizer", "lr", real, 5e-5),
    Option("weight_decay", "optimizer", "weight_decay", real, 0.0),
    Option("adam_beta1", "optimizer", "beta1", real, 0.9),
    Option("adam_beta2", "optimizer", "beta2", real, 0.999),
    Option("adam_epsilon", "optimizer", "eps", real, 1e-8),
)
"""Options that are keys of ours, with the defaults of TrainingArguments."""


class Optim(NamedTuple):
    """An optimizer of `optim`."""

    name: str
    """Our name of it."""
    state_format: str = ""
    """optimizer.state_format."""
    note: str = ""
    """Sentence on what is predicted otherwise."""


_PAGED = "its state moves to the host where the GPU is full, which is predicted as if it stayed"
OPTIMS: Mapping[str, Optim] = {
    "adamw_torch_fused": Optim("adamw"), "adamw_torch": Optim("adamw"), "adamw_hf": Optim("adamw"),
    "adamw_apex_fused": Optim("adamw"), "adamw_bnb_8bit": Optim("adamw", "int8"), "adamw_8bit": Optim("adamw", "int8"),
    "adamw_torch_8bit": Optim("adamw", "int8", "torchao has moments of the embedding in int8 too"),
    "paged_adamw": Optim("adamw", "", _PAGED), "paged_adamw_32bit": Optim("adamw", "", _PAGED),
    "paged_adamw_8bit": Optim("adamw", "int8", _PAGED), "sgd": Optim("sgd"),
}  # fmt: skip
"""Value of optim → the optimizer; of several for one of ours, the first is written."""
ATTENTION: Mapping[str, str] = {
    "flash_attention_2": "flash-attn", "flash_attention_3": "fa3", "sdpa": "sdpa-flash", "eager": "torch",
    "kernels-community/flash-attn": "flash-attn", "kernels-community/flash-attn2": "flash-attn",
    "kernels-community/flash-attn3": "fa3", "kernels-community/vllm-flash-attn3": "fa3",
}  # fmt: skip
"""Value of attn_implementation → kernels.attention; of several for one of ours, the first is written."""
LIGER: Mapping[str, str] = {"rope": "liger", "norm": "liger", "swiglu": "liger", "loss": "linear"}
"""Kernels of use_liger_kernel."""
PLAIN: Mapping[str, str] = {"rope": "eager", "norm": "eager", "swiglu": "eager", "loss": "eager"}
"""Kernels of transformers' own."""
USUAL_TARGETS = ("q_proj", "v_proj")
"""Matmuls that PEFT gives LoRA where nothing names them."""


@dataclass(frozen=True)
class Dialect:
    """Words of a program that trains by the Trainer."""

    title: str
    """Name of the program for people."""
    names: Names
    """Name of TrainingArguments or PEFT → names in the program's files, where they are others."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Name of TrainingArguments or PEFT → the program's default, where it is another one."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Subject of options of its own that change no prediction → a pattern of their names."""
    otherwise: str = ""
    """Pattern of options of its own that are predicted as if they were not there."""
    deepspeed: str = "deepspeed."
    """Text before DeepSpeed's options in a table of the program's file."""
    fsdp: str = "fsdp_config."
    """Text before FSDP's options."""
    losses: Mapping[str, str] = field(default_factory=dict)
    """kernels.loss → value of `loss_type`; empty where the program has none but Liger's and transformers'."""
    has_fsdp_words: bool = True
    """True if `fsdp` has words such as "full_shard auto_wrap"."""
    degrees: Mapping[str, str] = field(default_factory=dict)
    """Degree of ours → the program's option of it; none where accelerate alone says degrees."""


def choose_options(job: Job, dialect: Dialect) -> tuple[dict[str, Any], list[str]]:
    """Options of a program's file that layout, batch, kernels and formats decide, by its names, and gaps.

    None stands for an option that is left out. GPUs are the launcher's.
    """
    precision, optimizer, gaps = job.scenario.precision, job.scenario.optimizer, list[str]()
    options = write_options(OPTIONS, job)
    options |= {
        "gradient_accumulation_steps": job.num_microbatches, "max_length": job.scenario.batch.seq_len,
        "max_grad_norm": deepspeed.write_clipping(optimizer.max_norm),
        "bf16": precision.compute == "bfloat16", "fp16": precision.compute == "float16",
        "gradient_checkpointing": job.layout.recompute == "full",
        "load_in_4bit": precision.base == "nf4" or None, "load_in_8bit": precision.base == "int8" or None,
    }  # fmt: skip
    kept = getattr(optimizer, STATE_FORMAT, "")
    known = {(each.name, each.state_format): theirs for theirs, each in reversed([*OPTIMS.items()])}
    options["optim"] = known.get((optimizer.name, kept))
    if options["optim"] is None:
        gaps.append(f"optimizer.name={optimizer.name} with its state in {kept or 'the usual format'} is not written: "
                    f"adamw_torch_fused is")  # fmt: skip
        options["optim"] = "adamw_torch_fused"
    if optimizer.name != "adamw":
        options |= dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"))
    options |= _choose_weights(job)
    kernels, more = choose_kernels(job, dialect)
    sharding, others = _choose_sharding(job, dialect)
    named = {_own(dialect, name): value for name, value in {**options, **kernels}.items()}
    return {**named, **sharding}, gaps + more + others


def _own(dialect: Dialect, name: str) -> str:
    return dialect.names.get(name, (name,))[0]


def name_fsdp(dialect: Dialect, key: str) -> str:
    """The program's name of an option of FSDP."""
    return dialect.names.get(f"fsdp.{key}", (f"{dialect.fsdp}fsdp_{key}",))[0]


def _choose_weights(job: Job) -> dict[str, Any]:
    """The format in which weights are loaded: that of masters, or of frozen weights."""
    precision = job.scenario.precision
    if job.model.adapter is not None:
        return {"dtype": precision.compute}
    return {"dtype": None if job.scenario.engine.name == "deepspeed" else precision.params}


def choose_kernels(job: Job, dialect: Dialect) -> tuple[dict[str, Any], list[str]]:
    """attn_implementation, use_liger_kernel, torch_compile and loss_type, and gaps."""
    kernels, gaps = job.estimate.kernels, list[str]()
    names = {ours: theirs for theirs, ours in reversed([*ATTENTION.items()])}
    attention = names.get(kernels.attention)
    if attention is None:
        gaps.append(f"kernels.attention={kernels.attention} is nothing that it has: sdpa is written instead")
    own = {name: getattr(kernels, name) for name in LIGER}
    losses = {"loss_type": None if own == LIGER else dialect.losses.get(kernels.loss)} if dialect.losses else {}
    if own != LIGER and own not in [{**PLAIN, "loss": name} for name in (PLAIN["loss"], *dialect.losses)]:
        odd = ", ".join(f"kernels.{name}={value}" for name, value in own.items() if value != PLAIN[name])
        gaps.append(f"{odd}: Liger's kernels are used all together, or none is")
    if kernels.compile not in ("none", "model"):
        gaps.append(f"kernels.compile={kernels.compile} is no option: the whole model is compiled, or nothing")
    return {
        "attn_implementation": attention or "sdpa", "use_liger_kernel": own == LIGER,
        "torch_compile": kernels.compile == "model", **losses,
    }, gaps  # fmt: skip


def _choose_sharding(job: Job, dialect: Dialect) -> tuple[dict[str, Any], list[str]]:
    """Options of FSDP, of DeepSpeed and of the degrees, by the program's names, and gaps."""
    layout, gaps = job.layout, list[str]()
    zero = deepspeed.choose_sharding(job, dialect.deepspeed)
    fsdp = accelerate.choose_fsdp(job, "")
    del fsdp["activation_checkpointing"]  # gradient_checkpointing says it
    words = None
    if dialect.has_fsdp_words:
        words = " ".join([accelerate.choose_strategy(job), "auto_wrap", *["offload"] * layout.offloads_state])
        fsdp = {key: fsdp[key] for key in ("version", "reshard_after_forward")}
    fsdp = {name_fsdp(dialect, key): value for key, value in fsdp.items()}
    is_sharded = layout.dp_shard > 1 or layout.offloads_state or layout.cp > 1
    if job.scenario.engine.name == "deepspeed":
        options = {**zero, **dict.fromkeys(fsdp), "fsdp": None}
    else:
        options = {**dict.fromkeys(zero), **(fsdp if is_sharded else dict.fromkeys(fsdp))}
        options["fsdp"] = words if is_sharded else None
    degrees = {key: getattr(layout, key) for key in ("tp", "cp", "dp_replicate", "dp_shard")}
    is_plain = layout.tp == layout.cp == 1 and (layout.dp_replicate == 1 or layout.dp_shard == 1)
    if dialect.degrees:
        options |= {dialect.degrees[key]: None if is_plain else value for key, value in degrees.items()}
    elif not is_plain:
        gaps.append("layout.tp, layout.cp and dp_replicate beside dp_shard are said by accelerate's parallelism_config")
    return options, gaps
