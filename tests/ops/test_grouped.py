"""Experts' matmuls: both kernels are a dense reference, forward and backward, also for experts without rows."""

from functools import partial

import pytest
import torch
from cuda import StandInCuda
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dtlayout.ops import grouped
from dtlayout.ops.grouped import GROUPED, LOOP, GroupedMatmul, StackedLinear, multiply_groups

D, N = 8, 16
COUNTS = [(2, 0, 5, 0), (0, 0, 0, 7), (7, 0, 0, 0), (1, 3, 2, 1), (0, 0, 0, 0)]
"""Rows of each expert."""
EXACTNESS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
each_kernel = pytest.mark.parametrize(
    ("kernel", "dtype"),
    [*((LOOP, dtype) for dtype in EXACTNESS), *((GROUPED, dtype) for dtype in list(EXACTNESS)[1:])],
    ids=lambda value: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None,
)
each_count = pytest.mark.parametrize("counts", COUNTS, ids=str)


def make_inputs(counts: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, weights, scores and ends."""
    generator = torch.Generator().manual_seed(sum(counts))
    x = torch.randn(sum(counts), D, dtype=torch.float64, generator=generator).to(dtype)
    weight = torch.randn(len(counts), N, D, dtype=torch.float64, generator=generator).to(dtype)
    scores = torch.rand(sum(counts), dtype=torch.float64, generator=generator)
    scores = scores.to(torch.promote_types(dtype, torch.float32))
    ends = torch.tensor(counts).cumsum(0).int()
    return x.requires_grad_(), weight.requires_grad_(), scores.requires_grad_(), ends


def multiply_densely(x: Tensor, weight: Tensor, ends: Tensor, scores: Tensor | None = None) -> Tensor:
    """Each row times every expert's matrix, of which its own expert's product stays."""
    scaled = x if scores is None else x * scores[:, None]
    experts = torch.bucketize(torch.arange(len(x)), ends, right=True)
    return torch.einsum("rd,end,re->rn", scaled, weight, torch.nn.functional.one_hot(experts, len(ends)).to(x.dtype))


def differentiate(output: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    upstream = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(output, inputs, upstream.to(output.dtype))


@each_kernel
@each_count
@pytest.mark.parametrize("is_scored", [False, True])
def test_result_and_gradients_are_those_of_a_dense_reference(kernel, dtype, counts, is_scored):
    x, weight, scores, ends = make_inputs(counts, dtype)
    inputs = [x, weight, scores] if is_scored else [x, weight]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    result = multiply_groups(x, weight, ends, kernel, *inputs[2:])
    expected = multiply_densely(exact[0], exact[1], ends, *exact[2:])
    assert result.dtype == dtype
    gradients, exact_gradients = differentiate(result, *inputs), differentiate(expected, *exact)
    assert [each.dtype for each in gradients] == [each.dtype for each in inputs]
    for got, wanted in zip((result, *gradients), (expected, *exact_gradients), strict=True):
        largest = wanted.abs().max().item() if wanted.numel() else 0.0
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=4 * EXACTNESS[dtype] * largest)


@each_kernel
def test_the_gradient_of_an_expert_without_rows_is_zero(kernel, dtype):
    x, weight, _, ends = make_inputs((2, 0, 5, 0), dtype)
    (of_weight,) = differentiate(multiply_groups(x, weight, ends, kernel), weight)
    assert [bool(each.any()) for each in of_weight] == [True, False, True, False]


@each_count
def test_gradients_are_those_of_finite_differences(counts):
    x, weight, scores, ends = make_inputs(counts)
    assert gradcheck(lambda x, weight: multiply_groups(x, weight, ends, LOOP), (x, weight))
    assert gradcheck(lambda *given: multiply_groups(given[0], given[1], ends, LOOP, given[2]), (x, weight, scores))


@pytest.mark.parametrize("kernel", [LOOP, GROUPED])
@pytest.mark.parametrize("counts", [(2, 0, 5, 0), (0, 0, 0, 0)])
def test_an_expanded_gradient_and_rows_that_do_not_lie_together_are_taken(kernel, counts):
    x, weight, _, ends = make_inputs(counts, torch.float32)
    across = x.detach().t().contiguous().t().requires_grad_()
    multiply_groups(across, weight, ends, kernel).sum().backward()
    of_x, of_weight = torch.autograd.grad(multiply_densely(x, weight, ends).sum(), (x, weight))
    torch.testing.assert_close((across.grad, weight.grad), (of_x, of_weight))


class Saved:
    """Inside, the tensors that autograd saves."""

    def __enter__(self) -> list[Tensor]:
        found: list[Tensor] = []
        self.hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t)
        self.hooks.__enter__()
        return found

    def __exit__(self, *exception: object) -> None:
        self.hooks.__exit__(*exception)


@pytest.mark.parametrize(
    ("trained", "kept"),
    [
        ("x weight scores", "x weight scores"),
        ("x", "weight scores"),
        ("weight", "x scores"),
        ("scores", "x weight scores"),
        ("x weight", "x weight scores"),
    ],
)
def test_no_more_is_saved_than_the_gradients_that_are_needed_take_and_never_the_product(trained, kept):
    x, weight, scores, ends = make_inputs((2, 0, 5, 0))
    given = {"x": x, "weight": weight, "scores": scores}
    for name, each in given.items():
        each.requires_grad_(name in trained.split())
    with Saved() as found:
        output = multiply_groups(x, weight, ends, LOOP, scores)
    assert {id(each) for each in found} == {id(each) for each in (ends, *(given[name] for name in kept.split()))}
    output.sum().backward()
    assert {name for name, each in given.items() if each.grad is not None} == set(trained.split())


def count_calls(kernel: GroupedMatmul) -> tuple[GroupedMatmul, list[str]]:
    """The kernel, and the names of its functions as they are called."""
    calls: list[str] = []

    def counting(name: str, *given: Tensor) -> Tensor:
        calls.append(name)
        return getattr(kernel, name)(*given)

    return GroupedMatmul(*(partial(counting, name) for name in GroupedMatmul._fields)), calls


@pytest.mark.parametrize(
    ("trained", "backward"),
    [
        ("x weight", ["input_gradient", "weight_gradient"]),
        ("x", ["input_gradient"]),
        ("weight", ["weight_gradient"]),
        ("scores", ["input_gradient"]),
    ],
)
def test_only_gradients_that_are_needed_are_computed(trained, backward):
    x, weight, scores, ends = make_inputs((2, 0, 5, 0))
    for name, each in {"x": x, "weight": weight, "scores": scores}.items():
        each.requires_grad_(name in trained.split())
    kernel, calls = count_calls(LOOP)
    output = multiply_groups(x, weight, ends, kernel, scores)
    calls.clear()
    output.sum().backward()
    assert calls == backward


@pytest.mark.parametrize(
    ("kernel", "operator"), [(LOOP, "dtlayout.grouped_mm.default"), (GROUPED, "aten._grouped_mm.default")]
)
@pytest.mark.parametrize("kept", [False, True])
def test_a_recomputed_forward_has_the_same_gradients_and_multiplies_again_unless_that_is_kept(kernel, operator, kept):
    x, weight, scores, ends = make_inputs((2, 0, 5, 0), torch.float32)
    layer = StackedLinear(len(ends), D, N, kernel, torch.float32)
    layer.weight = torch.nn.Parameter(weight.detach())
    seen: list[str] = []

    class Seeing(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def run(x: Tensor, scores: Tensor) -> Tensor:
        return torch.sin(layer(torch.cos(x), ends, scores))

    options = {"context_fn": partial(create_selective_checkpoint_contexts, [find(operator)])} if kept else {}
    with Seeing():
        output = checkpoint(run, x, scores, use_reentrant=False, **options)
        assert seen.count(operator) == 1
        got = differentiate(output, x, layer.weight, scores)
    assert seen.count(operator) == (3 if kept else 4)  # forward, gradients of rows and weights, and forward again
    expected = differentiate(run(x, scores), x, layer.weight, scores)
    assert all(map(torch.equal, got, expected))


def find(operator: str) -> torch._ops.OpOverload:
    namespace, name, overload = operator.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(LOOP, torch.float64), (LOOP, torch.bfloat16), (GROUPED, torch.float32), (GROUPED, torch.bfloat16)],
)
def test_fake_tensors_have_the_shapes_of_real_ones(kernel, dtype):
    given = make_inputs((2, 0, 5, 0), dtype)
    with FakeTensorMode() as mode:
        x, weight, scores, ends = (mode.from_tensor(each) for each in given)
        output = multiply_groups(x, weight, ends, kernel, scores)
        gradients = torch.autograd.grad(output.sum(), (x, weight, scores))
    real = multiply_groups(given[0], given[1], given[3], kernel, given[2])
    assert (output.shape, output.dtype) == (real.shape, real.dtype)
    assert [(each.shape, each.dtype) for each in gradients] == [(each.shape, each.dtype) for each in given[:3]]


@pytest.mark.parametrize("kernel", [LOOP, GROUPED])
def test_compiled_it_is_one_graph_with_the_same_gradients(kernel):
    x, weight, scores, ends = make_inputs((2, 0, 5, 0), torch.float32)

    def run(x: Tensor, weight: Tensor, scores: Tensor) -> Tensor:
        return torch.sin(multiply_groups(x, weight, ends, kernel, scores))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    inputs = (x, weight, scores)
    for got, expected in zip(
        differentiate(compiled(*inputs), *inputs), differentiate(run(*inputs), *inputs), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_where_garbage_is_left_for_experts_without_rows_it_is_overwritten(monkeypatch):
    """As on Blackwell; the device's place is taken by a tensor subclass that says it were CUDA's."""
    x, _, _, ends = make_inputs((2, 0, 5, 0), torch.float32)
    gradient = torch.ones(7, N)
    whole = GROUPED.weight_gradient(gradient, x.detach(), ends)

    class OnCuda(Tensor):
        device = torch.device("cuda", 0)

    def leave_garbage(*given: Tensor, offs: Tensor) -> Tensor:
        made = whole.clone()
        made[1], made[3] = torch.nan, 1e30
        return made.as_subclass(OnCuda)

    monkeypatch.setattr(torch, "_grouped_mm", leave_garbage)
    for is_blackwell in (False, True):
        monkeypatch.setattr(grouped, "_leaves_garbage", lambda device, said=is_blackwell: said)
        made = GROUPED.weight_gradient(gradient, x.detach(), ends).as_subclass(Tensor)
        assert torch.equal(made, whole) == is_blackwell


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": torch.zeros(7, D + 1)},
        {"ends": torch.tensor([2, 7], dtype=torch.int32)},
        {"ends": torch.tensor([2, 2, 7, 7])},
        {"scores": torch.zeros(6)},
        {"ends": torch.tensor([2, 2, 5, 6], dtype=torch.int32)},
    ],
    ids=["width", "experts", "int64", "scores", "rows without an expert"],
)
def test_sizes_that_do_not_agree_are_told(wrong):
    x, weight, scores, ends = make_inputs((2, 0, 5, 0), torch.float32)
    given = {"x": x, "weight": weight, "ends": ends, "kernel": LOOP, "scores": scores}
    multiply_groups(**given)
    with pytest.raises(AssertionError):
        multiply_groups(**{**given, **wrong})


@pytest.mark.parametrize(("capability", "leaves"), [((9, 0), False), ((10, 0), True)])
def test_blackwell_leaves_garbage(monkeypatch, capability, leaves):
    StandInCuda(monkeypatch, capability)
    grouped._leaves_garbage.cache_clear()
    assert grouped._leaves_garbage(torch.device("cuda", 0)) == leaves
    grouped._leaves_garbage.cache_clear()
