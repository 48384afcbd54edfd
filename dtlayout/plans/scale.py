"""Linear layers that multiply in fp8, with one scale for all parts of a tensor that the ranks of tp share; and experts.

A scale of a whole tensor is the same in every layout that gives a microbatch's tokens to the same ranks of dp and cp:
these scale their activations each for itself, as torchao does, and weights are whole where they multiply. tp's ranks
tell each other the largest magnitudes of their parts: of input and weight together, once in forward; in backward of the
output's gradient, where tp splits the outputs. Scales of rows are each rank's own: of the part of a row that it has.

An expert's weight is whole on one rank of ep and tp, which gets the expert's rows; it has scales of its own.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtlayout.ops.grouped import StackedLinear
from dtlayout.ops.linear import SplittableLinear
from dtlayout.ops.scaled import multiply_rowwise, multiply_tensorwise
from dtlayout.ops.scaled_groups import SCALED_LOOPS
from dtlayout.plans.collectives import Group, find_largest
from dtlayout.plans.plan import match_names


def scale_linears(module: nn.Module, patterns: Sequence[str], name: str, tp_mesh: DeviceMesh) -> None:
    """Have the linear layers that these patterns name multiply in a format of `MATMUL_FORMATS`, after tp split them."""
    group = Group.of(tp_mesh) if tp_mesh.size() > 1 else None
    names = [name for name, _ in module.named_modules()]
    for linear in (module.get_submodule(each) for pattern in patterns for each in match_names(pattern, names)):
        if type(linear) is nn.Linear:
            linear.__class__ = SplittableLinear
        assert isinstance(linear, SplittableLinear), "linear layers alone multiply in fp8"
        linear.multiply = _MULTIPLY[name](group, _splits_outputs(linear.weight))


def scale_experts(module: nn.Module, patterns: Sequence[str], name: str) -> None:
    """Have the stacks of the experts that these patterns name multiply in a format of `SCALED_LOOPS`."""
    names = [name for name, _ in module.named_modules()]
    for experts in (module.get_submodule(each) for pattern in patterns for each in match_names(pattern, names)):
        for stack in (part for part in experts.modules() if isinstance(part, StackedLinear)):
            stack.kernel = SCALED_LOOPS[name]


def _splits_outputs(weight: Tensor) -> bool:
    return isinstance(weight, DTensor) and weight.placements == (Shard(0),)


@cache
def _make_tensorwise(group: Group | None, splits_outputs: bool) -> Callable[..., Tensor]:
    """One function for all layers that ranks share alike, so that torch.compile reuses code."""
    if group is None:
        return multiply_tensorwise
    share: dict[str, Any] = {"share": partial(find_largest, group=group)}
    if splits_outputs:  # elsewhere every rank has the whole gradient
        share["share_gradient"] = share["share"]
    return partial(multiply_tensorwise, **share)


def _make_rowwise(group: Group | None, splits_outputs: bool) -> Callable[..., Tensor]:
    return multiply_rowwise


_MULTIPLY: dict[str, Callable[[Group | None, bool], Callable[..., Tensor]]] = {
    "fp8-tensorwise": _make_tensorwise,
    "fp8-rowwise": _make_rowwise,
}
"""Name in `precision.matmuls` → maker of the function that multiplies, of tp's group and whether it splits outputs."""
