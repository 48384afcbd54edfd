"""Keys of the config.json of families that are planned: which fields of a model they say. No torch.

Each table is for several families: field of `ModelShape` → key, or the keys from which it follows.
"""

from collections.abc import Mapping
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import shorten
from dtlayout.models.family import Derived


def size_model(
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None = None,
) -> dict[str, Any]:
    """Keys of config.json with these sizes."""
    return {
        "vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers, "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads,
    }  # fmt: skip


def _count_shared(number: int | None, width: int) -> int:
    return (number or 0) * width


def _count_listed_dense(kinds: Any, first: int | None, num_layers: int) -> int:
    """First blocks without experts; kinds name each block, where a file has them."""
    if kinds is None:
        return first or 0
    number = kinds.index("sparse") if isinstance(kinds, list) and "sparse" in kinds else 0
    if kinds != ["dense"] * number + ["sparse"] * (num_layers - number):
        found = shorten(repr(kinds))
        raise InvalidConfig(f"mlp_layer_types={found} is not known; dense blocks must come first, and some be sparse")
    return number


def _read_alike(numbers: Any) -> Any:
    """A number that a file may list for each block."""
    if not isinstance(numbers, list):
        return numbers
    if len(set(numbers)) != 1:
        raise InvalidConfig(f"moe_topk={shorten(repr(numbers))} is not known; it must be the same in all blocks")
    return numbers[0]


def _count_dense_of_ernie(start: int, end: int, num_layers: int) -> int:
    if 0 <= end < num_layers - 1:
        raise InvalidConfig(f"moe_layer_end_index={end} is not known; the last block must have experts")
    return start


LATENT: Mapping[str, str | Derived] = {
    "head_dim": Derived(("qk_nope_head_dim", "qk_rope_head_dim"), lambda plain, rotated: plain + rotated),
    "num_kv_heads": "num_attention_heads",
    "latent_attention.query_rank": Derived(("q_lora_rank",), lambda rank: rank or 0),
    "latent_attention.kv_rank": "kv_lora_rank",
    "latent_attention.rope_width": "qk_rope_head_dim",
    "latent_attention.value_width": "v_head_dim",
}
DEEPSEEK_EXPERTS: Mapping[str, str | Derived] = {
    "experts.number": "n_routed_experts",
    "experts.per_token": "num_experts_per_tok",
    "experts.ffn_size": "moe_intermediate_size",
    "experts.shared_ffn_size": Derived(("n_shared_experts", "moe_intermediate_size"), _count_shared),
    "experts.dense_layers": "first_k_dense_replace",
    "experts.normalized": "norm_topk_prob",
    "experts.scale": "routed_scaling_factor",
}
GROUPS: Mapping[str, str | Derived] = {"experts.groups": "n_group", "experts.groups_per_token": "topk_group"}
GROUPS_V2 = Derived(("n_group", "topk_method"), lambda number, method: 1 if method == "greedy" else number or 1)
CHOSEN_GROUPS_V2 = Derived(
    ("topk_group", "topk_method"), lambda number, method: 1 if method == "greedy" else number or 1
)
QWEN_EXPERTS: Mapping[str, str | Derived] = {
    "experts.number": "num_experts", "experts.per_token": "num_experts_per_tok",
    "experts.ffn_size": "moe_intermediate_size", "experts.normalized": "norm_topk_prob",
}  # fmt: skip
MIXTRAL_EXPERTS: Mapping[str, str | Derived] = {
    "experts.number": "num_local_experts", "experts.per_token": "num_experts_per_tok",
    "experts.ffn_size": "intermediate_size",
}  # fmt: skip
ERNIE_EXPERTS: Mapping[str, str | Derived] = {
    "experts.number": "moe_num_experts",
    "experts.per_token": "moe_k",
    "experts.ffn_size": "moe_intermediate_size",
    "experts.shared_ffn_size": Derived(("moe_num_shared_experts", "moe_intermediate_size"), _count_shared),
    "experts.dense_layers": Derived(
        ("moe_layer_start_index", "moe_layer_end_index", "num_hidden_layers"), _count_dense_of_ernie
    ),
}
LISTED_DENSE = Derived(("mlp_layer_types", "first_k_dense_replace", "num_hidden_layers"), _count_listed_dense)
POST_NORM = Derived(("use_post_norm",), lambda is_used: "both" if is_used else "before")
PARALLEL = Derived(("use_parallel_residual",), lambda is_used: "shared" if is_used else "before")
SHARED = Derived(("num_shared_experts", "moe_intermediate_size"), _count_shared)
PER_TOKEN = Derived(("moe_topk",), _read_alike)
QKV_BIAS: Mapping[str, str | Derived] = {"qkv_bias": "attention_bias"}
BIASES: Mapping[str, str | Derived] = {"qkv_bias": "attention_bias", "block.output_bias": "attention_bias"}
FFN_BIAS: Mapping[str, str | Derived] = {"block.ffn_bias": "mlp_bias"}
