"""nanotron: the YAML file of run_train.py."""

from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.files import to_hf
from dtlayout.programs.files.yaml import dump
from dtlayout.programs.options import Option, positive, real, string, whole, write_options, yes
from dtlayout.programs.program import Arguments, Job, Program, choose, nest
from dtlayout.spec.optimizers import SGD, AdamW
from dtlayout.spec.recompute import Recompute

SCHEDULES = {"1f1b": "1f1b", "gpipe": "afab"}
"""Our schedule → pp_engine."""
OPTIONS = (
    Option("parallelism.pp", "layout", "pp", positive, 1),
    Option("parallelism.tp", "layout", "tp", positive, 1),
    Option("parallelism.context_parallel_size", "layout", "cp", positive, 1),
    Option("parallelism.pp_engine", "layout", "schedule", string, "gpipe",
           {theirs: ours for ours, theirs in SCHEDULES.items()}),
    Option("parallelism.tp_mode", "layout", "sequence_parallel", string, False,
           {"REDUCE_SCATTER": True, "ALL_REDUCE": False, "reduce_scatter": True, "all_reduce": False}),
    Option("model.dtype", "precision", "compute", string, "bfloat16", {"bfloat16": "bfloat16", "float16": "float16"}),
    Option("tokens.sequence_length", "batch", "seq_len", positive),
    Option("tokens.micro_batch_size", "layout", "micro_batch", positive),
    Option("optimizer.weight_decay", "optimizer", "weight_decay", real),
    Option("optimizer.clip_grad", "optimizer", "max_norm", real, float("inf")),
    Option("optimizer.accumulate_grad_in_fp32", "precision", "reduce", yes, None, {True: "float32", False: "bfloat16"}),
    Option("optimizer.optimizer_factory.name", "optimizer", "name", string, "adamw", {"adamW": "adamw", "sgd": "sgd"}),
    Option("optimizer.optimizer_factory.adam_beta1", "optimizer", "beta1", real),
    Option("optimizer.optimizer_factory.adam_beta2", "optimizer", "beta2", real),
    Option("optimizer.optimizer_factory.adam_eps", "optimizer", "eps", real),
    Option("optimizer.learning_rate_scheduler.learning_rate", "optimizer", "lr", real),
)  # fmt: skip
"""Options that are keys of ours, with the defaults of its dataclasses."""
SIZES = (
    Option("model.model_config.hidden_size", "model", "hidden_size", positive, 4096),
    Option("model.model_config.num_hidden_layers", "model", "num_layers", positive, 32),
    Option("model.model_config.num_attention_heads", "model", "num_heads", positive, 32),
    Option("model.model_config.num_key_value_heads", "model", "num_kv_heads", positive),
    Option("model.model_config.intermediate_size", "model", "ffn_size", positive, 11_008),
    Option("model.model_config.vocab_size", "model", "vocab_size", whole, 32_000),
    Option("model.model_config.tie_word_embeddings", "model", "tied_embeddings", yes, False),
    Option("model.model_config.rms_norm_eps", "model", "norm_eps", real, 1e-6),
    Option("model.model_config.rope_theta", "model", "rope_theta", real, 10_000.0),
)
"""Options that are sizes of the model, with the defaults of its LlamaConfig and its Qwen2Config."""
_FAMILIES = {"llama": {"is_llama_config": True}, "qwen2": {"is_qwen2_config": True, "attention_bias": True}}
"""Family → the keys and values by which its model_config differs."""


def write(job: Job) -> Arguments:
    """The file; InvalidConfig for a model or an optimizer that nanotron does not have."""
    scenario, model = job.scenario, job.model
    if model.family not in _FAMILIES or model.head_dim or model.qk_norm or model.block:
        raise InvalidConfig(
            f"model {model.name}: nanotron has Llama and Qwen2, with heads of hidden_size / num_heads; "
            f"leave out --emit, or use another model"
        )
    options, gaps = choose_options(job)
    gaps += job.odd_state() + job.odd_kernels()
    if model.rope_scaling:
        gaps.append("model.rope_scaling is left out: the time of a step and its memory are the same")
    sizes = to_hf(model, scenario.precision.compute, scenario.batch.seq_len)
    names = [each.name.rpartition(".")[2] for each in SIZES]
    chosen = nest(options)
    chosen["optimizer"]["learning_rate_scheduler"] |= {"lr_warmup_style": "linear", "lr_decay_style": "cosine"}
    tables: dict[str, Any] = {
        "general": {"project": "dtlayout", "run": model.name, "seed": 42},
        "parallelism": chosen["parallelism"],
        "model": {
            **chosen["model"], "init_method": {"std": 0.02}, "make_vocab_size_divisible_by": 1,
            "model_config": {
                **{name: sizes[name] for name in (*names, "max_position_embeddings", "hidden_act")},
                **_FAMILIES[model.family],
            },
        },
        "tokens": chosen["tokens"] | {"train_steps": job.steps},
        "optimizer": chosen["optimizer"],
        "data_stages": [
            {"name": "first run", "start_training_step": 1, "data": {"dataset": None, "seed": 42}},
        ],
        "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": 1000},
        "logging": {"iteration_step_info_interval": 1},
    }  # fmt: skip
    start = f"CUDA_DEVICE_MAX_CONNECTIONS=1 {job.torchrun} run_train.py --config-file FILE"
    return Arguments(list(dump(tables)), start, gaps)


def choose_options(job: Job) -> tuple[dict[str, Any], list[str]]:
    """Options that all but the model decides, and gaps; None stands for an option that is left out.

    InvalidConfig for an optimizer that nanotron does not have.
    """
    layout, options = job.layout, write_options(OPTIONS, job)
    schedule, gaps = choose("layout.schedule", layout.schedule, SCHEDULES, "1f1b")
    recomputes, unknown = _recompute(layout.recompute)
    gaps += unknown + _find_gaps(job)
    optimizer = job.scenario.optimizer
    if not isinstance(optimizer, AdamW | SGD):
        raise InvalidConfig(f"--optimizer={optimizer.name} is nothing that nanotron has; use adamw or sgd")
    left_out = dict.fromkeys(option.name for option in OPTIONS)
    first = {"parallelism.dp": layout.dp, "optimizer.zero_stage": int(job.shards_state)}
    options = first | left_out | options | {
        "parallelism.pp_engine": schedule,
        "parallelism.tp_mode": "REDUCE_SCATTER" if layout.shards_sequence else "ALL_REDUCE",
        "parallelism.tp_linear_async_communication": layout.shards_sequence,
        "parallelism.recompute_layer": recomputes,
        "model.dtype": "bfloat16",
        "tokens.batch_accumulation_per_replica": job.num_microbatches,
        "optimizer.optimizer_factory.torch_adam_is_fused": True if isinstance(optimizer, AdamW) else None,
    }  # fmt: skip
    return options, gaps


def _find_gaps(job: Job) -> list[str]:
    layout, precision, gaps = job.layout, job.scenario.precision, list[str]()
    if len({*job.estimate.stage_layers}) > 1:
        blocks = ", ".join(map(str, job.estimate.stage_layers))
        gaps.append(f"its stages are no option: it cuts them by cost itself, predicted are {blocks} blocks")
    if layout.zero > 1 and job.shards_state:
        gaps.append(
            f"layout.zero={layout.zero} is nothing that it has: zero_stage 1 is written instead, which needs more "
            f"memory; --fix zero=1 finds the best layout for that"
        )
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        gaps.append(
            f"layout.dp_replicate={layout.dp_replicate} beside dp_shard={layout.dp_shard} is nothing that it has: the "
            f"optimizer's state is shared by all {layout.dp} ranks"
        )
    if layout.overlaps_tp:
        gaps.append("layout.tp_overlap=true is no option beside tp_linear_async_communication, which is on")
    if precision.matmul_format:
        gaps.append(f"precision.matmuls={precision.matmuls} is nothing that it has: bf16 is written")
    if precision.compute == "float16":
        gaps.append("precision.compute=float16 is written as bfloat16: nothing scales the loss there")
    optimizer = job.scenario.optimizer
    if isinstance(optimizer, SGD) and optimizer.momentum:
        gaps.append(f"optimizer.momentum={optimizer.momentum} is no option: its SGD has none")
    return gaps


def _recompute(text: str) -> tuple[bool, list[str]]:
    """`recompute_layer` and gaps."""
    parsed = Recompute.parse(text)
    is_gap = parsed.is_selective or parsed.every > 1
    gap = f"layout.recompute={text} is nothing that it has: every block is recomputed instead, which is slower"
    return parsed.every > 0, [gap] * is_gap


NANOTRON = Program(
    engine="nanotron", title="nanotron", version="commit 00708b80c8", parser="src/nanotron/config/config.py",
    write=write, options=choose_options,
)  # fmt: skip
