"""Styles of tensor parallelism: for each its name, the module that it is for, and what it does there. No torch.

`styles.py` carries them out; the API page shows this table.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

TensorStyle = Literal[
    "colwise", "rowwise", "rowwise-scatter", "rowwise-scatter-cast", "rowwise-overlap", "embedding",
    "embedding-scatter", "input", "input-gather", "input-gather-cast", "input-overlap", "sequence", "head",
    "head-gather", "head-norm", "replicated", "rowwise-term", "scale", "scale-split", "norm-split", "whole",
    "traced", "traced-sequence",
]  # fmt: skip
"""Name of a style, in `Plan.tensor`."""

_ANY, _LINEAR = "any with parameters of its own", "`nn.Linear`"
STYLE_TABLE: Mapping[TensorStyle, tuple[str, str]] = MappingProxyType({
    "colwise": (_LINEAR, "Splits its outputs over tp: each rank has columns that follow each other, whole heads."),
    "rowwise": (_LINEAR, "Splits its inputs, which come split; an all-reduce adds up the outputs."),
    "rowwise-scatter": (_LINEAR, "As rowwise, but each rank gets its tokens of the sum (sequence parallelism)."),
    "rowwise-scatter-cast": (_LINEAR, "As rowwise-scatter; the gradient is gathered in fp8."),
    "rowwise-overlap": (_LINEAR, "As rowwise-scatter, in pieces beside its matmul."),
    "input": ("a parent of colwise layers", "Only they read its input, which is whole: its gradient is added up once."),
    "input-gather": ("a parent of colwise layers", "Gathers the tokens of its input once for all of them."),
    "input-gather-cast": ("a parent of colwise layers", "As input-gather, in fp8."),
    "input-overlap": ("a parent with a `project`", "As input-gather, in pieces beside the matmuls below."),
    "head-norm": (_ANY, "Works on a rank's own heads or columns: gradients of its parameters are summed over tp."),
    "sequence": (_ANY, "Works on a rank's own tokens: gradients of its parameters are summed over tp."),
    "whole": (_ANY, "Computes the same on each rank of tp: no gradient is summed. Holds for all modules inside it."),
    "norm-split": ("dtlayout's `RMSNorm`", "One norm over all columns that tp splits: ranks add up their squares."),
    "replicated": (_LINEAR, "Whole on each rank, before or after what is split: its gradient is summed over tp."),
    "rowwise-term": (_LINEAR, "The `lora_A` of a rowwise layer: splits its inputs, and sends nothing."),
    "scale": ("dtlayout's `ScaleVector`", "A vector of (IA)³ that each rank has whole; its gradient is summed."),
    "scale-split": ("dtlayout's `ScaleVector`", "A vector of (IA)³ that is split like what it multiplies."),
    "embedding": ("`nn.Embedding`", "Splits its rows; an all-reduce adds up what ranks look up."),
    "embedding-scatter": ("`nn.Embedding`", "As embedding, but each rank gets its tokens."),
    "head": ("dtlayout's `Head`", "Splits the vocabulary, and computes the loss on split logits."),
    "head-gather": ("dtlayout's `Head`", "As head, after the tokens of its input are gathered."),
    "traced": ("a traced model", "Tells its own code which heads it has."),
    "traced-sequence": ("a traced model", "As traced, and which part of each sequence."),
})  # fmt: skip
"""Style → the module that it is for, and what it does."""
OPENING_STYLES = frozenset[str]({"input", "input-gather", "input-gather-cast", "input-overlap"})
"""Styles of a module's input, which say nothing of its parameters."""
SPLIT_BY_OUTPUTS = frozenset[str]({"colwise"})
"""Styles after which activations are split."""
SPLIT_BY_INPUTS = frozenset[str](
    {"rowwise", "rowwise-scatter", "rowwise-scatter-cast", "rowwise-overlap", "rowwise-term"}
)
"""Styles before which activations are split."""
