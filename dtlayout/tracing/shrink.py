"""A narrow model with the code of a large one: what a proof runs, since a full one fits on no CPU.

Sizes are replaced by their keys' meaning, as `transformers` maps the keys of each family to common names. Everything
that is no size stays: which blocks have windows, what is normalised where, which numbers are multiplied.
"""

from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, INNER, VOCABULARY, POSITIONS = 64, 4, 2, 16, 96, 128, 64
_FEWEST_BLOCKS, _MOST_BLOCKS = 4, 8
_SIZES = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": INNER, "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS, "head_dim": HEAD_WIDTH, "sliding_window": 8, "rotary_dim": 8,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "original_max_position_embeddings": POSITIONS,
}  # fmt: skip
"""Key, or the name that transformers maps it to → the size of a narrow model, where the key has a number."""
_INNER_NAMES = ("ffn_dim", "n_inner", "d_ff", "ffn_hidden_size")
"""Keys of some families for the width inside of a feed-forward."""
_KV_HEADS = ("num_kv_heads", "n_head_kv")
"""Keys of some families for the number of key and value heads."""
_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def shrink(config: Mapping[str, Any], block_kinds: Sequence[int]) -> dict[str, Any]:
    """The config.json of a narrow model with the code of `config`, and blocks of all kinds that eight hold."""
    import transformers

    parsed = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).get_text_config(decoder=True)
    num_blocks, width = len(block_kinds), parsed.hidden_size
    few = next((n for n in range(_FEWEST_BLOCKS, _MOST_BLOCKS) if {*block_kinds[:n]} == {*block_kinds}), _MOST_BLOCKS)
    mapped = {own: common for common, own in getattr(parsed, "attribute_map", {}).items()}
    small = dict[str, Any]()
    for key, value in parsed.to_dict().items():
        common = mapped.get(key, key)
        if isinstance(value, list) and len(value) == num_blocks:
            small[key] = value[:few]
        elif isinstance(value, dict):
            small[key] = {each: _shrink_inner(each, inner) for each, inner in value.items()}
        elif isinstance(value, bool) or not isinstance(value, int):
            small[key] = value
        elif common in ("num_hidden_layers", "max_window_layers"):
            small[key] = min(value, few)
        elif common == "num_key_value_heads" or key in _KV_HEADS:
            small[key] = 1 if value == 1 else HEADS if value == parsed.num_attention_heads else KV_HEADS
        elif common == "head_dim" and hasattr(parsed, "qk_rope_head_dim"):
            small[key] = _SIZES["qk_rope_head_dim"]
        elif common in _SIZES or key in _INNER_NAMES:
            small[key] = min(value, _SIZES.get(common, INNER))
        elif key in _IDS:
            small[key] = min(value, VOCABULARY - 1)
        else:
            small[key] = WIDTH if value == width else value
    return {**small, "model_type": parsed.model_type}


def _shrink_inner(key: str, value: Any) -> Any:
    """A value of a table such as rope_parameters, whose factors are one for each pair of a head."""
    if isinstance(value, list) and len(value) > HEAD_WIDTH // 2:
        return value[: HEAD_WIDTH // 2]
    return min(value, _SIZES[key]) if key in _SIZES and isinstance(value, int) else value
