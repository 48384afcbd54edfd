"""Recipes of Megatron-Bridge and of NeMo 2: configs that code has under a name, and sizes that classes name."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from dtlayout.models.presets import PRESETS
from dtlayout.spec.model_shape import ModelShape


class BridgeRecipe(NamedTuple):
    """Values of a config that the program's code has under a name."""

    model: str
    """Our preset with its sizes."""
    seq_len: int
    """Tokens of a sequence."""
    tp: int = 1
    """Ranks that split matrices."""
    pp: int = 1
    """Ranks of a pipeline."""
    cp: int = 1
    """Ranks that split a sequence."""
    ep: int = 1
    """Ranks that share out experts."""
    virtual: int | None = None
    """Virtual stages of a rank."""
    sequence_parallel: bool = False
    """True if norms are split by the sequence."""
    global_batch: int = 512
    """Sequences of a step."""
    micro_batch: int = 1
    """Sequences that a rank takes at once."""
    overlaps_tp: bool | None = None
    """comm_overlap.tp_comm_overlap; None where there is no comm_overlap."""
    recompute: str | None = None
    """Granularity of what is computed again."""
    overlaps_dp: bool = True
    """True if gradients and weights move during computation."""


RECIPES: Mapping[str, BridgeRecipe] = {
    "llama2_7b": BridgeRecipe("llama2-7b", 4096, tp=2, overlaps_tp=False),
    "llama32_1b": BridgeRecipe("llama3.2-1b", 8192), "llama32_3b": BridgeRecipe("llama3.2-3b", 8192),
    "llama3_8b": BridgeRecipe("llama3.1-8b", 8192, cp=2),
    "llama3_8b_16k": BridgeRecipe("llama3.1-8b", 16384, tp=4, pp=2, cp=2, sequence_parallel=True),
    "llama3_8b_64k": BridgeRecipe("llama3.1-8b", 65536, tp=4, pp=2, cp=4, sequence_parallel=True),
    "llama3_8b_128k": BridgeRecipe("llama3.1-8b", 131072, tp=4, pp=2, cp=8, sequence_parallel=True),
    "llama3_70b": BridgeRecipe("llama3.1-70b", 8192, tp=4, pp=4, cp=2, virtual=5, sequence_parallel=True,
                               overlaps_tp=True),
    "llama3_70b_16k": BridgeRecipe("llama3.1-70b", 16384, tp=8, pp=2, cp=2, sequence_parallel=True, overlaps_tp=True),
    "llama3_70b_64k": BridgeRecipe("llama3.1-70b", 65536, tp=8, pp=4, cp=8, sequence_parallel=True, overlaps_tp=True),
    "llama31_8b": BridgeRecipe("llama3.1-8b", 8192, cp=2),
    "llama31_70b": BridgeRecipe("llama3.1-70b", 131072, tp=4, pp=4, cp=2, virtual=5, sequence_parallel=True,
                          overlaps_tp=True),
    "qwen25_500m": BridgeRecipe("qwen2.5-0.5b", 4096, global_batch=32, micro_batch=2, overlaps_dp=False),
    "qwen25_1p5b": BridgeRecipe("qwen2.5-1.5b", 4096, global_batch=32, micro_batch=2, overlaps_dp=False),
    "qwen25_7b": BridgeRecipe("qwen2.5-7b", 4096, tp=2, global_batch=32, micro_batch=2, overlaps_dp=False),
    "qwen25_14b": BridgeRecipe("qwen2.5-14b", 4096, tp=4, global_batch=32, micro_batch=2, overlaps_dp=False),
    "qwen3_600m": BridgeRecipe("qwen3-0.6b", 4096, global_batch=32, micro_batch=2),
    "qwen3_1p7b": BridgeRecipe("qwen3-1.7b", 4096, global_batch=32, micro_batch=2),
    "qwen3_4b": BridgeRecipe("qwen3-4b", 4096, tp=2, global_batch=32, micro_batch=2),
    "qwen3_8b": BridgeRecipe("qwen3-8b", 4096, tp=4, global_batch=32, micro_batch=2),
    "qwen3_14b": BridgeRecipe("qwen3-14b", 4096, tp=8, global_batch=32, micro_batch=2),
    "qwen3_32b": BridgeRecipe("qwen3-32b", 4096, tp=8, pp=2, global_batch=32, micro_batch=2, recompute="full"),
    "qwen3_30b_a3b": BridgeRecipe("qwen3-30b-a3b", 4096, tp=4, pp=2, ep=4, sequence_parallel=True, global_batch=32,
                            micro_batch=2, recompute="full"),
}  # fmt: skip
"""Name without _pretrain_config → values, of Megatron-Bridge 0.3."""
NEMO_RECIPES: Mapping[str, BridgeRecipe] = {
    "llama3_8b": RECIPES["llama3_8b"], "llama32_1b": RECIPES["llama32_1b"],
    "llama3_70b": RECIPES["llama3_70b"]._replace(overlaps_tp=None),
    "llama31_70b": RECIPES["llama3_70b"]._replace(overlaps_tp=None),
}  # fmt: skip
"""Name of a factory → values, of NeMo 2.1 and later."""
_NEWER = re.compile(r"(llama\d*_\w+?)_pretrain_\d+gpu_h100_bf16(_\d+k)?")
"""Names of 0.4 whose values are those of 0.3: Llama on H100s."""
_FAMILIES = {
    "Llama2": "llama2-", "Llama3": "llama3.1-", "Llama31": "llama3.1-", "Llama32": "llama3.2-", "Qwen25": "qwen2.5-",
    "Qwen3": "qwen3-", "Qwen3MoE": "qwen3-", "Mixtral": "mixtral-",
}  # fmt: skip
"""Beginning of a class → that of our preset."""


def find_recipe(name: str) -> BridgeRecipe | None:
    """Values of a recipe's function, such as llama3_8b_pretrain_config; None for one that is not known here."""
    bare = name.removesuffix("_config")
    if (match := _NEWER.fullmatch(bare)) is not None:
        return RECIPES.get(f"{match[1]}{match[2] or ''}")
    return RECIPES.get(bare.removesuffix("_pretrain"))


def find_class(target: Any) -> str | None:
    """Our preset of a class such as Llama3ModelProvider8B or Llama3Config8B; None for one that names no sizes."""
    name = str(target).rpartition(".")[2]
    match = re.fullmatch(r"([A-Za-z]+\d*(?:MoE)?)(?:ModelProvider|Config)(\w+)", name)
    if match is None or match[1] not in _FAMILIES:
        return None
    size = match[2].lower().replace("p", ".").replace("_", "-").replace("600m", "0.6b").replace("500m", "0.5b")
    preset = f"{_FAMILIES[match[1]]}{size}"
    return preset if preset in PRESETS else None


def list_model(shape: ModelShape) -> dict[str, Any]:
    """Field of a GPT model's provider → value, of a model of ours."""
    fields = {
        "num_layers": shape.num_layers, "hidden_size": shape.hidden_size, "ffn_hidden_size": shape.ffn_size,
        "num_attention_heads": shape.num_heads, "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_width, "vocab_size": shape.vocab_size, "rotary_base": shape.rope_theta,
        "layernorm_epsilon": shape.norm_eps, "normalization": "RMSNorm", "gated_linear_unit": shape.gated_ffn,
        "add_bias_linear": False, "add_qkv_bias": shape.qkv_bias, "qk_layernorm": shape.qk_norm,
        "share_embeddings_and_output_weights": shape.tied_embeddings, "position_embedding_type": "rope",
    }  # fmt: skip
    if experts := shape.experts:
        fields |= {
            "num_moe_experts": experts.number, "moe_router_topk": experts.per_token,
            "moe_ffn_hidden_size": experts.ffn_size, "moe_aux_loss_coeff": experts.balance_loss,
        }  # fmt: skip
    return fields


def list_recipe(recipe: BridgeRecipe) -> dict[tuple[str, str], Any]:
    """Part of a config and field → value, of a recipe."""
    fields: dict[tuple[str, str], Any] = {
        ("model", name): value for name, value in list_model(PRESETS[recipe.model]).items()
    } | {
        ("model", "tensor_model_parallel_size"): recipe.tp, ("model", "pipeline_model_parallel_size"): recipe.pp,
        ("model", "context_parallel_size"): recipe.cp, ("model", "sequence_parallel"): recipe.sequence_parallel,
        ("train", "global_batch_size"): recipe.global_batch, ("train", "micro_batch_size"): recipe.micro_batch,
        ("dataset", "seq_length"): recipe.seq_len, ("ddp", "use_distributed_optimizer"): True,
        ("ddp", "overlap_grad_reduce"): recipe.overlaps_dp, ("ddp", "overlap_param_gather"): recipe.overlaps_dp,
        ("mixed_precision", "bf16"): True, ("mixed_precision", "grad_reduce_in_fp32"): True,
        ("optimizer", "optimizer"): "adam", ("optimizer", "lr"): 3e-4, ("optimizer", "weight_decay"): 0.1,
        ("optimizer", "adam_beta1"): 0.9, ("optimizer", "adam_beta2"): 0.95, ("optimizer", "adam_eps"): 1e-8,
        ("optimizer", "clip_grad"): 1.0, ("model", "cross_entropy_fusion_impl"): "te",
    }  # fmt: skip
    if recipe.virtual:
        fields["model", "virtual_pipeline_model_parallel_size"] = recipe.virtual
    if recipe.ep > 1:
        fields |= {("model", "expert_model_parallel_size"): recipe.ep, ("model", "expert_tensor_parallel_size"): 1,
                   ("model", "moe_token_dispatcher_type"): "alltoall"}  # fmt: skip
    if recipe.recompute:
        fields |= {("model", "recompute_granularity"): recipe.recompute, ("model", "recompute_method"): "uniform",
                   ("model", "recompute_num_layers"): 1}  # fmt: skip
    if recipe.overlaps_tp is not None:
        fields["comm_overlap", "tp_comm_overlap"] = recipe.overlaps_tp
    return fields
