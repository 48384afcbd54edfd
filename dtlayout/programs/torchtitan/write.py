"""torchtitan: the TOML file of its last release that takes one."""

from typing import Any

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.models.presets import PRESETS
from dtlayout.programs.options import Option, positive, real, string, whole, write_options, yes
from dtlayout.programs.program import TORCH_SCHEDULES, Arguments, Job, Program, choose, name_stages, nest
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts, ModelShape
from dtlayout.spec.recompute import Recompute

OPTIONS = (
    Option("training.seq_len", "batch", "seq_len", positive, 2048),
    Option("training.max_norm", "optimizer", "max_norm", real, 1.0),
    Option("training.dtype", "precision", "params", string, "float32",
           {"float32": "float32", "bfloat16": "bfloat16"}),
    Option("training.mixed_precision_param", "precision", "compute", string, "bfloat16",
           {"bfloat16": "bfloat16", "float32": "float32"}),
    Option("training.mixed_precision_reduce", "precision", "reduce", string, "float32", {"float32": "float32"}),
    Option("training.enable_cpu_offload", "layout", "offload", yes, None, {True: "optimizer", False: "none"}),
    Option("parallelism.data_parallel_replicate_degree", "layout", "dp_replicate", positive, 1),
    Option("parallelism.data_parallel_shard_degree", "layout", "dp_shard", whole, -1),
    Option("parallelism.tensor_parallel_degree", "layout", "tp", positive, 1),
    Option("parallelism.context_parallel_degree", "layout", "cp", positive, 1),
    Option("parallelism.pipeline_parallel_degree", "layout", "pp", positive, 1),
    Option("parallelism.expert_parallel_degree", "layout", "ep", positive, 1),
    Option("parallelism.enable_async_tensor_parallel", "layout", "tp_overlap", yes, False),
    Option("optimizer.name", "optimizer", "name", string, "adamw", {"AdamW": "adamw", "Adam": "adamw"}),
    Option("optimizer.lr", "optimizer", "lr", real, 8e-4),
    Option("optimizer.beta1", "optimizer", "beta1", real, 0.9),
    Option("optimizer.beta2", "optimizer", "beta2", real, 0.95),
    Option("optimizer.eps", "optimizer", "eps", real, 1e-8),
    Option("optimizer.weight_decay", "optimizer", "weight_decay", real, 0.1),
)  # fmt: skip
"""Options that are keys of ours, with the defaults of JobConfig."""
FLAVORS = {f"llama3.1-{size}": size.upper() for size in ("8b", "70b", "405b")} | {
    f"qwen3-{size}": size.upper() for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")
}
"""Preset → the flavor that torchtitan has of it, with the same sizes."""
MIXTURES = {
    "30B-A3B": (2048, 48, 32, 4, 128, 151_936, Experts(number=128, per_token=8, ffn_size=768)),
    "235B-A22B": (4096, 94, 64, 4, 128, 151_936, Experts(number=128, per_token=8, ffn_size=1536)),
}
"""Flavor → width, blocks, heads, key heads, width of a head, vocabulary and experts of a Qwen3 with experts."""
MODULES = {"llama": "llama3", "qwen3": "qwen3", "qwen3_moe": "qwen3"}
"""Family → torchtitan's name of the model."""
ROTATE = {"gather": "allgather", "ring": "alltoall"}
"""Our method of attention over cp → context_parallel_rotate_method."""
CONVERTERS: dict[str, dict[str, Any]] = {
    "fp8-tensorwise": {"float8.enable_fsdp_float8_all_gather": True, "float8.filter_fqns": ["output"]},
    "fp8-rowwise": {"float8.recipe_name": "rowwise", "float8.filter_fqns": ["output"]},
    "mxfp8": {"mx.recipe_name": "mxfp8_cublas"},
}
"""precision.matmuls → keys of [quantize.linear]; the head stays in the compute format, as mx has it by default."""
SCHEDULES = TORCH_SCHEDULES | {
    "looped-bfs": "LoopedBFS", "interleaved-zb": "InterleavedZeroBubble", "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}  # fmt: skip
"""Our name of a schedule → torchtitan's."""


def write(job: Job) -> Arguments:
    """The file; InvalidConfig and InvalidLayout for what torchtitan does not start with."""
    _check(job)
    model, gaps = _model(job.model)
    options, unknown = choose_options(job)
    gaps += (
        unknown + job.odd_state() + job.odd_kernels(said=("compile",), attention="sdpa-cudnn")
    )  # which it tries first
    converters = options.pop("model.converters")
    tables = nest({"model": {**model, "converters": converters}, **options})
    tables["training"] |= {"steps": job.steps, "dataset": "c4_test"}
    start = f"{job.torchrun} -m torchtitan.train --job.config_file FILE"
    return Arguments(toml.dumps(tables).splitlines(), start, gaps)


def choose_options(job: Job) -> tuple[dict[str, Any], list[str]]:
    """Options that all but the model decides, and gaps; None stands for an option that is left out."""
    layout, precision, gaps = job.layout, job.scenario.precision, list[str]()
    options = write_options(OPTIONS, job)
    if job.scenario.optimizer.name != "adamw":
        gaps.append(f"optimizer.name={job.scenario.optimizer.name} is nothing that it has: AdamW is written instead")
        options["optimizer.name"] = "AdamW"
    if precision.reduce != "float32":
        gaps.append(f"precision.reduce={precision.reduce} is no choice of mixed_precision_reduce: it stays float32")
        options["training.mixed_precision_reduce"] = "float32"
    if precision.params == "float64":
        gaps.append("precision.params=float64 is no choice of dtype: float32 is written instead")
        options["training.dtype"] = "float32"
    if precision.compute == "float16":
        gaps.append("precision.compute=float16 is no choice of mixed_precision_param: bfloat16 is written instead")
        options["training.mixed_precision_param"] = "bfloat16"
    if layout.dp_shard * layout.cp == 1 < layout.tp * layout.pp and precision.compute != precision.params:
        gaps.append(
            f"precision.compute={precision.compute} has no effect where nothing is sharded, beside tp or pp: "
            f"it computes in {precision.params}"
        )
    quantize = CONVERTERS.get(precision.matmuls, {})
    if precision.matmul_format and not quantize:
        gaps.append(f"precision.matmuls={precision.matmuls} is nothing that it has: bfloat16 is written instead")
    if layout.offloads_state and layout.dp_shard * layout.cp == 1:
        gaps.append(f"layout.offload={layout.offload} takes shards, by dp_shard or cp above 1: it is left out")
    if not layout.offloads_state or layout.dp_shard * layout.cp == 1:
        options["training.enable_cpu_offload"] = None
    if not job.model.experts:
        options["parallelism.expert_parallel_degree"] = None
    parallelism, unknown = _parallelism(job)
    kernels, features = job.estimate.kernels, job.scenario.engine.features
    compiled = ["model"] * (kernels.compile != "none") + ["loss"] * features.fuses_loss(kernels)
    options |= {
        "training.local_batch_size": job.sequences_at_once,
        "training.global_batch_size": job.scenario.batch.global_batch, **parallelism, **_recompute(layout.recompute),
        "compile.enable": bool(compiled), "compile.components": compiled if len(compiled) == 1 else None,
        "model.converters": [f"quantize.linear.{name}" for name in {each.split(".")[0] for each in quantize}] or None,
        **dict.fromkeys(f"quantize.linear.{each}" for known in CONVERTERS.values() for each in known),
        **{f"quantize.linear.{each}": value for each, value in quantize.items()},
    }  # fmt: skip
    return options, gaps + unknown


def _check(job: Job) -> None:
    model, layout = job.model, job.layout
    if model.latent_attention or model.window or model.block or not model.gated_ffn:
        raise InvalidConfig(
            f"model {model.name}: only Llama's and Qwen3's own attention and feed-forward are written for torchtitan; "
            f"leave out --emit, or use another model"
        )
    plain = MODULES.get(model.family)
    if plain is None or model.qkv_bias or (plain == "llama3" and (model.head_dim or model.qk_norm)):
        raise InvalidConfig(
            f"model {model.name}: torchtitan {TORCHTITAN.version} has Llama and Qwen3, without biases; "
            f"leave out --emit, or use another model"
        )
    if model.experts:
        _check_experts(model, model.experts, layout)
    if plain == "qwen3" and layout.is_pipelined:
        raise InvalidLayout(f"torchtitan {TORCHTITAN.version} has no pipeline for Qwen3; use --fix pp=1")
    if job.scenario.precision.matmuls == "mxfp8" and layout.tp > 1 and job.estimate.kernels.compile != "none":
        raise InvalidLayout(
            f"torchtitan {TORCHTITAN.version} compiles no mxfp8 beside tensor parallelism; use --fix tp=1"
        )
    if layout.dp_replicate > 1 and not job.shards_state and layout.world_size > layout.dp_replicate:
        raise InvalidLayout(
            f"torchtitan copies a model that nothing shards only where tp, cp and pp are 1, and here is {layout}; "
            f"use --fix dp_replicate=1"
        )


def _check_experts(model: ModelShape, experts: Experts, layout: Layout) -> None:
    has_others = experts.bias or experts.dense_layers or experts.shared_ffn_size % experts.ffn_size
    has_others = has_others or experts.score != "softmax" or experts.groups > 1 or experts.scale != 1
    has_others = has_others or experts.correction_bias or not experts.normalized
    if MODULES[model.family] != "qwen3" or has_others:
        raise InvalidConfig(
            f"model {model.name}: of mixtures of experts those of Qwen3 are written for torchtitan, with its router "
            f"and experts alike in all blocks; leave out --emit, or use --engine megatron"
        )
    if layout.dp_shard * layout.cp * layout.tp % layout.ep:
        raise InvalidLayout(
            f"torchtitan shares experts out inside dp_shard * cp * tp = {layout.dp_shard * layout.cp * layout.tp}, "
            f"which ep={layout.ep} does not divide; use --fix dp_replicate=1"
        )


def _model(model: ModelShape) -> tuple[dict[str, str], list[str]]:
    """[model] and gaps: sizes are no options, but flavors in its code."""
    name = MODULES[model.family]
    attention = (model.hidden_size, model.num_layers, model.num_heads, model.num_kv_heads, model.head_width)
    own = (*attention, model.vocab_size, model.experts)
    if mixture := next((flavor for flavor, sizes in MIXTURES.items() if sizes == own), None):
        return {"name": name, "flavor": mixture, "hf_assets_path": "./assets/hf/TOKENIZER"}, []
    known = {"name": name, "flavor": FLAVORS.get(model.name, model.name), "hf_assets_path": "./assets/hf/TOKENIZER"}
    if model.name in FLAVORS and model == PRESETS[model.name]:
        return known, []
    if name == "qwen3":
        sizes: dict[str, Any] = {"hidden_dim": model.ffn_size, "head_dim": model.head_width, "qk_norm": model.qk_norm}
        sizes |= {"enable_weight_tying": model.tied_embeddings}
    else:
        sizes = _llama_ffn(model.hidden_size, model.ffn_size)
    sizes |= {
        "dim": model.hidden_size, "n_layers": model.num_layers, "n_heads": model.num_heads,
        "n_kv_heads": model.num_kv_heads, "vocab_size": model.vocab_size, "rope_theta": model.rope_theta,
        "norm_eps": model.norm_eps,
    }  # fmt: skip
    if experts := model.experts:
        shared = experts.shared_ffn_size // experts.ffn_size
        routing = f"num_experts={experts.number}, num_shared_experts={shared}, top_k={experts.per_token}"
        sizes |= {"moe_enabled": True, "moe_inter_dim": experts.ffn_size, "moe_args": f"MoEArgs({routing})"}
    arguments = ", ".join(f"{key}={value}" for key, value in sizes.items())
    gaps = [
        f"the model's sizes are no options: add to {name}_args of torchtitan a flavor {model.name!r} of {arguments}"
    ]
    if name == "llama3" and model.tied_embeddings:
        gaps.append("its Llama has a head of its own: model.tied_embeddings is lost")
    return {**known, "flavor": model.name}, gaps


def _llama_ffn(hidden_size: int, ffn_size: int) -> dict[str, Any]:
    """Arguments from which its Llama makes `ffn_size`: int(multiplier · int(8 · hidden / 3)), up to a multiple."""
    multiple = ffn_size & -ffn_size  # the power of two in it
    return {"ffn_dim_multiplier": round((ffn_size - multiple / 2) / (8 * hidden_size // 3), 6), "multiple_of": multiple}


def _parallelism(job: Job) -> tuple[dict[str, Any], list[str]]:
    """Options of [parallelism] that several of our keys decide, and gaps."""
    layout, gaps = job.layout, list[str]()
    table: dict[str, Any] = dict.fromkeys(
        ("expert_tensor_parallel_degree", "expert_parallel_comm_backend", "context_parallel_rotate_method",
         "fsdp_reshard_after_forward", "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size",
         "module_fqns_per_model_part")
    )  # fmt: skip
    if layout.tp > 1 and not layout.sequence_parallel:
        gaps.append("layout.sequence_parallel=false is nothing that it has: it shards the sequence over tp")
    if job.model.experts:
        table["expert_tensor_parallel_degree"] = 1
        table["expert_parallel_comm_backend"] = "deepep" if layout.sends_tokens_once else "standard"
        if layout.sends_tokens_once:
            gaps.append("layout.ep_dispatcher=deepep has no effect on its Qwen3, which sends copies to all experts")
        if layout.tp > 1 and layout.ep == 1:
            gaps.append("it cuts each expert over tp where ep is 1, and predicted are whole ones")
    if layout.cp > 1:
        table["context_parallel_rotate_method"] = ROTATE[layout.cp_method]
    if job.shards_state:
        table["fsdp_reshard_after_forward"] = "always" if layout.zero == 3 else "never"
        if layout.zero == 1 and not layout.is_pipelined and job.num_microbatches > 1:
            gaps.append("layout.zero=1 is nothing that it has: gradients are reduced after each microbatch, as zero=2")
    if layout.overlaps_tp and job.estimate.kernels.compile == "none":
        gaps.append("layout.tp_overlap takes effect only with [compile] enable = true: it is written as false")
        table["enable_async_tensor_parallel"] = False
    if layout.is_pipelined:
        schedule, unknown = choose("layout.schedule", layout.schedule, SCHEDULES, "1F1B")
        gaps += unknown
        modules = name_stages(
            job.estimate.stage_layers, first="tok_embeddings", block="layers.{}", last=["norm", "output"]
        )
        table |= {
            "pipeline_parallel_schedule": schedule, "pipeline_parallel_microbatch_size": layout.micro_batch,
            "module_fqns_per_model_part": modules,
        }  # fmt: skip
    return {f"parallelism.{name}": value for name, value in table.items()}, gaps


def _recompute(text: str) -> dict[str, Any]:
    """Options of [activation_checkpoint]."""
    parsed = Recompute.parse(text)
    mode, option = "full", None
    if parsed.every == 0:
        mode = "none"
    elif parsed.is_selective or (parsed.is_partial and parsed.number == 1):
        mode, option = "selective", "op" if parsed.is_selective else f"{parsed.every}"
    return {"activation_checkpoint.mode": mode, "activation_checkpoint.selective_ac_option": option}


TORCHTITAN = Program(
    engine="torchtitan", title="torchtitan", version="0.2.2", parser="torchtitan/config/job_config.py", write=write,
    options=choose_options,
)  # fmt: skip
