"""Tensor and sequence parallelism of a model as data: which style each module takes. No torch.

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
| head-norm | | (weight gradients: an all-reduce when gradients are synchronised) |
"""

from typing import Literal

from dtlayout.layout import Layout
from dtlayout.model_shape import ModelShape
from dtlayout.models.description import BLOCKS, EMBEDDING, FINAL_NORM, HEAD, Linear, Norm
from dtlayout.models.families import describe

TensorStyle = Literal[
    "colwise", "rowwise", "rowwise-scatter", "embedding", "embedding-scatter", "input", "input-gather", "sequence",
    "head", "head-gather", "head-norm",
]  # fmt: skip


def tensor_styles(model: ModelShape, layout: Layout) -> dict[str, TensorStyle]:
    """Pattern → style of each module that tp changes; empty at tp = 1."""
    if layout.tp == 1:
        return {}
    scatter = layout.shards_sequence
    styles: dict[str, TensorStyle] = {EMBEDDING: "embedding-scatter" if scatter else "embedding"}
    for operation in describe(model).block:
        match operation:
            case Norm(is_of_heads=True):
                styles[f"{BLOCKS}.{operation.module}"] = "head-norm"
            case Norm() if scatter:
                styles[f"{BLOCKS}.{operation.module}"] = "sequence"
            case Linear(style="colwise"):
                branch = operation.module.rpartition(".")[0]
                styles.setdefault(f"{BLOCKS}.{branch}", "input-gather" if scatter else "input")
                styles[f"{BLOCKS}.{operation.module}"] = "colwise"
            case Linear(style="rowwise"):
                styles[f"{BLOCKS}.{operation.module}"] = "rowwise-scatter" if scatter else "rowwise"
    if scatter:
        styles[FINAL_NORM] = "sequence"
    return styles | {HEAD: "head-gather" if scatter else "head"}
