"""Matmuls of a mixture's experts in fp8, one expert after the other.

Each expert's rows and matrix have scales of their own, as if the expert were a linear layer by itself: ops/scaled.py
computes it, and result and gradients are that layer's, to the bit. An expert without rows has no scale for them; its
weight's gradient is 0.

The host reads how many rows each expert has; fake tensors say that all have as many. PyTorch's one kernel for all
experts in fp8 is on CUDA alone.

Legend: R rows, D width of a row, N width of a result, E experts.
"""

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dtlayout.ops.composite import composite
from dtlayout.ops.grouped import GroupedMatmul, in_rows, make_result
from dtlayout.ops.scaled import RECIPES


# An operator, so that torch.compile does not look for the ends, and recomputation can keep a result by its name.
@composite("dtlayout::scaled_grouped_mm")
def _multiply_in_loop(left: Tensor, right: Tensor, ends: Tensor, recipe: str, makes: str) -> Tensor:
    """`ops.grouped`'s loop in a format of `RECIPES`; `makes` is the field of `CastRecipe` that multiplies.

    For the output x [R, D] times weights [E, D, N], for the input's gradient that of the output [R, N] times weights
    [E, N, D], for the weight's the gradient of the output [N, R] times x [R, D].
    """
    made, matmuls = make_result(left, right, ends), RECIPES[recipe]
    begin, num_rows = 0, left.shape[right.dim() == 2]
    for expert, end in enumerate(_read_ends(ends, num_rows)):
        rows = slice(begin, end)
        if makes == "weight_gradient" and begin == end:
            made[expert] = 0
        elif begin == end:
            continue
        elif makes == "weight_gradient":
            made[expert] = matmuls.weight_gradient(left[:, rows].t(), right[rows])
        elif makes == "input_gradient":
            made[rows] = matmuls.input_gradient(left[rows], right[expert])
        else:
            made[rows] = matmuls.output(left[rows], right[expert].t())
        begin = end
    assert begin == num_rows, f"{begin} rows have an expert, of {list(left.shape)}"
    return made


def _read_ends(ends: Tensor, num_rows: int) -> list[int]:
    if isinstance(ends, FakeTensor):
        return [num_rows * (expert + 1) // len(ends) for expert in range(len(ends))]
    found: list[int] = ends.tolist()
    return found


@_multiply_in_loop.register_fake
def _make_fake(left: Tensor, right: Tensor, ends: Tensor, recipe: str, makes: str) -> Tensor:
    return make_result(left, right, ends)


def _make_kernel(recipe: str) -> GroupedMatmul:
    """A kernel of experts whose sides `ALIGNMENT` of spec/precision.py divides."""
    return GroupedMatmul(
        lambda x, weight, ends: _multiply_in_loop(in_rows(x), weight.mT, ends, recipe, "output"),
        lambda gradient, weight, ends: _multiply_in_loop(in_rows(gradient), weight, ends, recipe, "input_gradient"),
        lambda gradient, x, ends: _multiply_in_loop(in_rows(gradient).t(), in_rows(x), ends, recipe, "weight_gradient"),
    )


SCALED_LOOPS = {name: _make_kernel(name) for name in RECIPES}
"""Name in `precision.matmuls` → kernel."""
