"""Linear layers that multiply by weights rounded to few bits, the same ones in every layout.

FSDP2 gathers the full weights, and each rank rounds what it multiplies by. A group of columns lies on one rank of tp,
which the rules of layouts see to. Where a group is a whole row and tp splits it, ranks tell each other the largest
magnitudes of their parts, once in forward.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtlayout.ops.fake_quantized import multiply_fake_quantized
from dtlayout.ops.linear import SplittableLinear
from dtlayout.plans.collectives import Group, find_largest
from dtlayout.plans.plan import match_names
from dtlayout.spec.fake_quant import FAKE_QUANT_FORMATS


def fake_quantize_linears(module: nn.Module, patterns: Sequence[str], name: str, tp_mesh: DeviceMesh) -> None:
    """Have the linear layers that these patterns name round their weights to a format of `FAKE_QUANT_FORMATS`, after tp
    split them."""
    group = Group.of(tp_mesh) if tp_mesh.size() > 1 and not FAKE_QUANT_FORMATS[name].group else None
    names = [name for name, _ in module.named_modules()]
    for linear in (module.get_submodule(each) for pattern in patterns for each in match_names(pattern, names)):
        if type(linear) is nn.Linear:
            linear.__class__ = SplittableLinear
        assert isinstance(linear, SplittableLinear), "linear layers alone multiply by a weight"
        linear.multiply = _make_multiply(name, group if _splits_rows(linear.weight) else None)


def _splits_rows(weight: Tensor) -> bool:
    return isinstance(weight, DTensor) and weight.placements == (Shard(1),)


@cache
def _make_multiply(name: str, group: Group | None) -> Callable[..., Tensor]:
    """One function for all layers that ranks share alike, so that torch.compile reuses code."""
    if group is None:
        return partial(multiply_fake_quantized, name=name)
    return partial(multiply_fake_quantized, name=name, share=partial(find_largest, group=group))
