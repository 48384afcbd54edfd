"""nanotron: the YAML file of run_train.py."""

from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.files import to_hf
from dtlayout.programs.program import Arguments, Job, Program, choose
from dtlayout.programs.yaml import dump
from dtlayout.spec.optimizers import SGD, AdamW
from dtlayout.spec.recompute import Recompute

_SCHEDULES = {"1f1b": "1f1b", "gpipe": "afab"}
_FAMILIES = {"llama": {"is_llama_config": True}, "qwen2": {"is_qwen2_config": True, "attention_bias": True}}
"""Family → the keys and values by which its model_config differs."""
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    "tie_word_embeddings", "rms_norm_eps", "rope_theta", "max_position_embeddings", "hidden_act",
)  # fmt: skip


def write(job: Job) -> Arguments:
    """The file; InvalidConfig for a model or an optimizer that nanotron does not have."""
    scenario, layout, model = job.scenario, job.layout, job.model
    if model.family not in _FAMILIES or model.head_dim or model.qk_norm or model.block:
        raise InvalidConfig(
            f"model {model.name}: nanotron has Llama and Qwen2, with heads of hidden_size / num_heads; "
            f"leave out --emit, or use another model"
        )
    schedule, gaps = choose("layout.schedule", layout.schedule, _SCHEDULES, "1f1b")
    recomputes, unknown = _recompute(layout.recompute)
    gaps += unknown + _find_gaps(job)
    sizes = to_hf(model, scenario.precision.compute, scenario.batch.seq_len)
    tables: dict[str, Any] = {
        "general": {"project": "dtlayout", "run": model.name, "seed": 42},
        "parallelism": {
            "dp": layout.dp, "pp": layout.pp, "tp": layout.tp, "context_parallel_size": layout.cp,
            "pp_engine": schedule, "tp_mode": "REDUCE_SCATTER" if layout.shards_sequence else "ALL_REDUCE",
            "tp_linear_async_communication": layout.shards_sequence, "recompute_layer": recomputes,
        },
        "model": {
            "dtype": "bfloat16", "init_method": {"std": 0.02}, "make_vocab_size_divisible_by": 1,
            "model_config": {**{name: sizes[name] for name in _SIZES}, **_FAMILIES[model.family]},
        },
        "tokens": {
            "sequence_length": scenario.batch.seq_len, "micro_batch_size": layout.micro_batch,
            "batch_accumulation_per_replica": job.num_microbatches, "train_steps": job.steps,
        },
        "optimizer": _optimizer(job),
        "data_stages": [
            {"name": "first run", "start_training_step": 1, "data": {"dataset": None, "seed": 42}},
        ],
        "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": 1000},
        "logging": {"iteration_step_info_interval": 1},
    }  # fmt: skip
    start = f"CUDA_DEVICE_MAX_CONNECTIONS=1 {job.torchrun} run_train.py --config-file FILE"
    return Arguments(list(dump(tables)), start, gaps)


def _find_gaps(job: Job) -> list[str]:
    layout, gaps = job.layout, job.odd_state() + job.odd_kernels()
    if len({*job.estimate.stage_layers}) > 1:
        blocks = ", ".join(map(str, job.estimate.stage_layers))
        gaps.append(f"its stages are no option: it cuts them by cost itself, predicted are {blocks} blocks")
    if layout.zero > 1 and job.shards_state:
        gaps.append(
            f"layout.zero={layout.zero} is nothing that it has: zero_stage 1 is written instead, which needs more "
            f"memory; --fix zero=1 finds the best layout for that"
        )
    if job.model.rope_scaling:
        gaps.append("model.rope_scaling is left out: the time of a step and its memory are the same")
    if job.scenario.precision.matmul_format:
        gaps.append(f"precision.matmuls={job.scenario.precision.matmuls} is nothing that it has: bf16 is written")
    return gaps


def _recompute(text: str) -> tuple[bool, list[str]]:
    """`recompute_layer` and gaps."""
    parsed = Recompute.parse(text)
    is_gap = parsed.is_selective or parsed.every > 1
    gap = f"layout.recompute={text} is nothing that it has: every block is recomputed instead, which is slower"
    return parsed.every > 0, [gap] * is_gap


def _optimizer(job: Job) -> dict[str, Any]:
    optimizer = job.scenario.optimizer
    match optimizer:
        case AdamW():
            factory: dict[str, Any] = {
                "name": "adamW", "adam_beta1": optimizer.beta1, "adam_beta2": optimizer.beta2,
                "adam_eps": optimizer.eps, "torch_adam_is_fused": True,
            }  # fmt: skip
        case SGD():
            factory = {"name": "sgd"}
        case _:
            raise InvalidConfig(f"--optimizer={optimizer.name} is nothing that nanotron has; use adamw or sgd")
    schedule = {"learning_rate": optimizer.lr, "lr_warmup_style": "linear", "lr_decay_style": "cosine"}
    return {
        "zero_stage": int(job.shards_state), "weight_decay": optimizer.weight_decay, "clip_grad": optimizer.max_norm,
        "accumulate_grad_in_fp32": job.scenario.engine.features.gradient_bytes == 4, "optimizer_factory": factory,
        "learning_rate_scheduler": schedule,
    }  # fmt: skip


NANOTRON = Program(
    engine="nanotron", title="nanotron", version="commit 00708b80c8", parser="src/nanotron/config/config.py",
    write=write,
)  # fmt: skip
