"""The modules of a model's adapter, at the places that its description names."""

from torch import nn

from dtlayout.models.adapters import LowRankLinear, list_adapted
from dtlayout.models.description import BLOCKS
from dtlayout.models.families import describe
from dtlayout.ops.adapters import add_low_rank, add_scale
from dtlayout.spec.model_shape import ModelShape


def attach_adapters(module: nn.Module, shape: ModelShape) -> None:
    """Give each target in a model, or in some of its blocks, its adapter in place; nothing where the model has none.

    The base is frozen by whoever trains it (`plans.apply.freeze`).
    """
    if shape.adapter is None:
        return
    parts = dict(module.named_modules())
    for number in range(shape.num_layers):
        block = BLOCKS.replace("*", str(number))
        for operation in list_adapted(describe(shape.kind_of(number))) if block in parts else ():
            linear = parts[f"{block}.{operation.module}"]
            assert isinstance(linear, nn.Linear), "the description calls it a linear layer"
            if isinstance(operation, LowRankLinear):
                add_low_rank(linear, operation.rank, shape.adapter.scale)
            else:
                add_scale(linear, of_input=operation.scales == "input")
