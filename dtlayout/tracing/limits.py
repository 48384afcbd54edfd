"""Reasons against layouts, and against documents that are kept apart, that lie in a model's code beside its matrices.

Ranks of cp have parts of each sequence. So the base model has to make tables for positions that it is given, and
attention has to come through `attend`, which our methods of cp replace. Methods that attend part after part join
results of plain causal attention alone. Where documents are kept apart, `attend` gets their mask. And a backward is
split in linear layers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from dtlayout.models.description import Operation
from dtlayout.models.operations import Linear, SelfAttention
from dtlayout.spec.context_parallel import CONTEXT_METHODS
from dtlayout.tracing.attention import NAME, looks_attention_up
from dtlayout.tracing.shell import takes_positions

_LONGEST = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies depend on the longest position of a sequence."""


def find_sequence_limits(
    model: Any, base: nn.Module, blocks: Sequence[nn.Module], attentions: Iterable[SelfAttention],
    asked: Iterable[Mapping[str, Any]],
) -> dict[str, str]:  # fmt: skip
    """ "cp", a method of cp or "document_mask" → reason against it.

    `model` is one of `building.build_model`, `asked` what each attention was called with.
    """
    attentions, asked = list(attentions), list(asked)
    if model.config._attn_implementation != NAME or not all(
        any(map(looks_attention_up, block.modules())) for block in blocks
    ):
        return dict.fromkeys(("cp", "document_mask"), "its attention is no function that transformers looks up by name")
    if any(each.get("mask") for each in asked):
        return dict.fromkeys(("cp", "document_mask"), "its blocks make a mask of their own")
    if not takes_positions(base):
        return dict.fromkeys(("cp", "document_mask"), "its base model is not given the positions of its tokens")
    found = dict[str, str]()
    if any(kind in _LONGEST for kind in _list_rotary_kinds(model)):
        found["cp"] = "its rotary frequencies depend on the longest position of a sequence"
    if any(each.sinks for each in attentions):
        found["cp"] = "its attention has sinks"
    reasons = {
        "a window": any(each.window for each in attentions),
        "a softcap": any(each.get("softcap") for each in asked),
        "values of another width than its keys": any(each.value_width != each.head_width for each in attentions),
    }
    if has := [what for what, is_so in reasons.items() if is_so]:
        in_parts = [each.name for each in CONTEXT_METHODS.values() if not each.splits_heads]
        found |= dict.fromkeys(
            in_parts, f"its attention has {' and '.join(has)}, which no kernel joins part after part"
        )
    return found


def _list_rotary_kinds(model: nn.Module) -> Iterator[str]:
    for part in model.modules():
        kinds = getattr(part, "rope_type", None)
        yield from kinds.values() if isinstance(kinds, Mapping) else [str(kinds)]


def find_whole_backward(block: nn.Module, operations: Iterable[Operation]) -> str:
    """The reason why a schedule does not split the backward of a block; empty if it does."""
    modules = dict(block.named_modules())
    for each in operations:
        if not isinstance(each, Linear) or each.part_of:  # which becomes an nn.Linear
            continue
        own = modules.get(each.module)
        if own is not None and type(own) is not nn.Linear:
            return f"{each.module} is a {type(own).__name__}, whose backward is one piece"
    return ""
