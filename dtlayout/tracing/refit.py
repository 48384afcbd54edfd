"""A block made ready to be split over tp: its own code, with other modules and numbers where it asks for whole ones.

Matrices that hold several, such as queries, keys and values, become a linear layer for each. A matrix with a row for
each input becomes a linear layer, with a row for each output. They do so in every layout, since parameters have the
same names in all. Where tp splits heads, numbers that count them are divided.
"""

import copy
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from dtlayout.models.description import Operation
from dtlayout.models.operations import Linear, Norm
from dtlayout.ops.norm import RMSNorm
from dtlayout.tracing.norms import find_rms_eps
from dtlayout.tracing.shell import replace

_CONFIG = ".config"
"""End of the path of a number that a module reads from its config."""


class JoinedLinear(nn.Module):
    """Linear layers that read the same; their results lie one after the other, as that of one matrix does.

    The layers are called 0, 1, and so on.
    """

    def __init__(self, layers: Iterable[nn.Linear]):
        super().__init__()
        for number, layer in enumerate(layers):
            self.register_module(str(number), layer)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] → [..., all outputs]."""
        return torch.cat([layer(x) for layer in self.children()], dim=-1)


def refit(block: nn.Module, operations: Sequence[Operation]) -> None:
    """Put our modules in the place of a block's own: linear layers where matrices are joined or transposed, and an
    RMSNorm where norms go over what tp splits."""
    refit_linears(block, operations)
    refit_norms(block, operations)


def refit_linears(block: nn.Module, operations: Sequence[Operation]) -> None:
    """Put linear layers in the place of a block's modules whose matrices are joined, transposed, or multiplied in
    another way."""
    parts = [each for each in operations if isinstance(each, Linear) and each.part_of]
    for module, group in groupby(parts, key=lambda each: each.part_of):
        pieces, own = list(group), next(block.get_submodule(module).parameters())
        layers = [
            nn.Linear(each.inputs, each.outputs, bias=each.bias, dtype=own.dtype, device=own.device) for each in pieces
        ]
        replace(block, module, layers[0] if pieces[0].module == module else JoinedLinear(layers))


def refit_norms(block: nn.Module, operations: Sequence[Operation]) -> None:
    """Put our RMSNorm in the place of a block's norms over all that tp splits."""
    for norm in operations:
        if isinstance(norm, Norm) and norm.over_ranks:
            module = block.get_submodule(norm.module)
            eps, weight = find_rms_eps(module), next(module.parameters())
            assert eps is not None, "an RMSNorm was recognised"
            with weight.device:
                replace(block, norm.module, RMSNorm(weight.numel(), eps, "eager", weight.dtype))


def divide(block: nn.Module, numbers: Sequence[str], parts: int) -> None:
    """Divide numbers of a block's modules by `parts`."""
    for path in numbers:
        values, name = find_values(block, path)
        values[name] //= parts


def find_values(block: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    """The table of a number of `Divided`, and its name there. Modules share a config: this one gets a copy."""
    module, _, name = path.rpartition(".")
    if not f".{module}".endswith(_CONFIG):
        return vars(block.get_submodule(module)), name
    owner: Any = block.get_submodule(f".{module}".removesuffix(_CONFIG).removeprefix("."))
    owner.config = copy.copy(owner.config)
    return vars(owner.config), name


def list_numbers(block: nn.Module, sizes: Iterable[int]) -> list[str]:
    """Numbers of a block's inner modules and of their configs that are one of `sizes`, as `Divided` has them."""
    wanted, found = {*sizes}, list[str]()
    for path, module in block.named_modules():
        if not list(module.children()):
            continue
        for owner, values in (("", vars(module)), (_CONFIG, vars(getattr(module, "config", object)))):
            prefix = f"{path}{owner}".lstrip(".")
            found += [
                f"{prefix}.{name}".lstrip(".") for name, value in values.items()
                if not name.startswith("_") and type(value) is int and value in wanted
            ]  # fmt: skip
    return found
