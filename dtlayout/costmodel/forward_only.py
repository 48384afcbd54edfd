"""Blocks that have a forward and no backward: no weight is trained in them or before them.

They keep no activations and are not recomputed. Only the stage with the embedding has such blocks: every later stage
sends the gradient of its input back, whether a weight before it is trained or not.
"""

from dtlayout.models.families import count_frozen_first, describe
from dtlayout.pipelining.partition import StageSlice
from dtlayout.spec.model_shape import ModelShape


def has_forward_only(model: ModelShape) -> bool:
    """True if the first blocks of a model have no backward."""
    return count_frozen_first(model) > 0


def find_forward_only(model: ModelShape, stage: StageSlice) -> range:
    """The blocks of a stage that have no backward, all of them at its beginning."""
    layers = stage.layers
    return layers[: max(0, count_frozen_first(model) - layers.start)] if stage.embedding else layers[:0]


def find_first_differentiated(model: ModelShape) -> int | None:
    """Index of the first block with a backward, if the embedding is frozen: its weights have gradients, its input none.

    None if the embedding is trained, or if no block is.
    """
    number = count_frozen_first(model)
    has_frozen_embedding = not describe(model).embedding.trains
    return number if has_frozen_embedding and number < model.num_layers else None


def find_differentiated(model: ModelShape, stage: StageSlice) -> range:
    """The blocks of a stage that have a backward."""
    return stage.layers[len(find_forward_only(model, stage)) :]
