"""A family of which some weights are not trained, as somebody adds it who has no checkout: a Llama, described anew."""

from dataclasses import replace

from dtlayout import Family, ModelShape, register_family
from dtlayout.models.description import Description, describe_llama
from dtlayout.models.operations import Linear, Norm

FROZEN = ("post_attention_layernorm", "self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj")
"""Modules of each block that stay as they are, and so does the embedding."""


def describe(model: ModelShape) -> Description:
    """A Llama whose embedding and some weights of each block are frozen."""
    llama = describe_llama(model)
    block = [
        replace(each, trains=False) if isinstance(each, Linear | Norm) and each.module in FROZEN else each
        for each in llama.block
    ]
    return replace(llama, embedding=replace(llama.embedding, trains=False), block=tuple(block))


register_family(Family(name="partly-frozen", describe=describe))
