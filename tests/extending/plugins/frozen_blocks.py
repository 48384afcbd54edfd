"""A family of which the final norm and the head alone are trained, as somebody adds it who has no checkout."""

from dataclasses import replace

from dtlayout import Family, ModelShape, register_family
from dtlayout.models.description import Description, describe_llama
from dtlayout.models.operations import Linear, Norm


def describe(model: ModelShape) -> Description:
    """A Llama whose embedding and blocks are frozen."""
    llama = describe_llama(model)
    block = [replace(each, trains=False) if isinstance(each, Linear | Norm) else each for each in llama.block]
    return replace(llama, embedding=replace(llama.embedding, trains=False), block=tuple(block))


register_family(Family(name="frozen-blocks", describe=describe))
