"""Tensor and sequence parallelism of a Llama as data: which style each module takes. No torch.

Megatron's scheme (arXiv:1909.08053; with sequence parallelism arXiv:2205.05198): matmuls come in pairs, the first split
by columns and the second by rows, so that one collective closes the pair. The embedding and the head are split over the
vocabulary, and the loss is computed on the split logits. What a style sends over tp for each microbatch:

| style | forward | backward |
|---|---|---|
| input | | all-reduce |
| input-gather | all-gather | reduce-scatter |
| colwise below an input | | |
| rowwise, embedding | all-reduce | |
| rowwise-scatter, embedding-scatter | reduce-scatter | all-gather |
| sequence | | (weight gradients: an all-reduce when gradients are synchronised) |
| head | two all-reduces, of one and of two numbers a token | all-reduce |
| head-gather | all-gather, and these two | reduce-scatter |
"""

from typing import Literal

from dtlayout.layout import Layout

TensorStyle = Literal[
    "colwise",
    "rowwise",
    "rowwise-scatter",
    "embedding",
    "embedding-scatter",
    "input",
    "input-gather",
    "sequence",
    "head",
    "head-gather",
]


BLOCKS = "model.layers.*"


def tensor_styles(layout: Layout) -> dict[str, TensorStyle]:
    """Pattern → style for a Llama; empty at tp = 1."""
    if layout.tp == 1:
        return {}
    scatter = layout.shards_sequence
    styles: dict[str, TensorStyle] = {
        "model.embed_tokens": "embedding-scatter" if scatter else "embedding",
        f"{BLOCKS}.self_attn": "input-gather" if scatter else "input",
        f"{BLOCKS}.self_attn.q_proj": "colwise",
        f"{BLOCKS}.self_attn.k_proj": "colwise",
        f"{BLOCKS}.self_attn.v_proj": "colwise",
        f"{BLOCKS}.self_attn.o_proj": "rowwise-scatter" if scatter else "rowwise",
        f"{BLOCKS}.mlp": "input-gather" if scatter else "input",
        f"{BLOCKS}.mlp.gate_proj": "colwise",
        f"{BLOCKS}.mlp.up_proj": "colwise",
        f"{BLOCKS}.mlp.down_proj": "rowwise-scatter" if scatter else "rowwise",
        "lm_head": "head-gather" if scatter else "head",
    }
    if scatter:
        norms = (f"{BLOCKS}.input_layernorm", f"{BLOCKS}.post_attention_layernorm", "model.norm")
        styles |= dict.fromkeys(norms, "sequence")
    return styles
