"""Weights whose matmuls add their gradients to FSDP2's sum: as autograd's own, in fewer bytes, compiled or not."""

from typing import Any

import pytest
import torch
from cuda import StandInCuda
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtlayout.models.presets import find_preset
from dtlayout.ops import weight_sum
from dtlayout.ops.linear import SplittableLinear
from dtlayout.ops.weight_sum import WeightSum, add_product, adds_finer
from dtlayout.plans import fsdp
from dtlayout.plans.plan import make_plan
from dtlayout.spec.batch import Batch
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import Precision
from dtlayout.training.build import Assembly, assemble

SHAPE = find_preset("debug")
BATCH = Batch(seq_len=16, global_batch=4)
EXACT = Precision(params="float64", compute="float64", reduce="float64")
HALF = Precision(params="float32", compute="bfloat16", reduce="float32")


class _Passes(TorchDispatchMode):
    """Bytes of all tensors that additions outside of matmuls write."""

    def __init__(self) -> None:
        super().__init__()
        self.added_bytes = self.matmuls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "add_" and args[0].dim() == 2:
            self.added_bytes += args[0].nbytes
        self.matmuls += name in ("addmm_", "add_product")
        return result


PLAIN = Kernels(attention="sdpa-math")


def train(precision: Precision, kernels: Kernels = PLAIN, **layout: Any) -> tuple[Assembly, dict[str, Tensor]]:
    """One step's gradients, by name."""
    assembly = assemble(SHAPE, BATCH, Layout(**layout), kernels, precision, seed=1, device_type="cpu")
    tokens = torch.randint(SHAPE.vocab_size, (4, 17), generator=torch.Generator().manual_seed(3))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    assembly.runtime.step(inputs, targets=targets, num_targets=torch.tensor(64.0))
    (module,) = assembly.modules
    return assembly, {name: parameter.grad.full_tensor() for name, parameter in module.named_parameters()}  # type: ignore[union-attr]


@pytest.fixture
def apart(one_rank, monkeypatch) -> dict[str, Tensor]:
    """The gradients that autograd and FSDP2 add up by themselves."""
    with monkeypatch.context() as patched:
        patched.setattr(fsdp, "add_in_matmuls", lambda units, layers: None)
        return train(EXACT)[1]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("compiled", ["none", "blocks"])
def test_a_step_has_the_gradients_that_autograd_adds_up(apart, recompute, compiled):
    _, found = train(EXACT, Kernels(attention="sdpa-math", compile=compiled), recompute=recompute)  # type: ignore[arg-type]
    for name, wanted in apart.items():
        assert (found[name] - wanted).norm() <= 1e-12 * wanted.norm(), name


@pytest.mark.parametrize("precision", [EXACT, HALF], ids=["one format", "two formats"])
def test_no_pass_of_its_own_adds_up_what_matmuls_do(one_rank, monkeypatch, precision):
    with _Passes() as own:
        assembly, _ = train(precision)
    plan = make_plan(SHAPE, Layout(), Kernels(), precision)
    assert len(assembly.sync[0].summed) == 7 * SHAPE.num_layers + 1 and plan.summed[-1] == "lm_head"
    monkeypatch.setattr(fsdp, "add_in_matmuls", lambda units, layers: None)
    with _Passes() as other:
        train(precision)
    size = 4 if precision is HALF else 8
    summed = sum(each.weight.numel() for each in assembly.sync[0].summed)  # type: ignore[operator, union-attr]
    assert other.added_bytes - own.added_bytes >= 3 * size * summed, "one for each microbatch after the first"
    assert own.matmuls - other.matmuls >= 3 * len(assembly.sync[0].summed)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_what_cuda_graphs_would_replay_has_no_sum(mode):
    kernels = Kernels(compile="blocks", compile_mode=mode)
    assert not make_plan(SHAPE, Layout(), kernels, EXACT).summed
    assert make_plan(SHAPE, Layout(), Kernels(compile_mode=mode), EXACT).summed, "nothing is compiled"


@pytest.mark.parametrize("layout", [{"zero": 2}, {"zero": 3}, {"micro_batch": 4}])
def test_without_a_whole_sum_of_several_microbatches_nothing_changes(one_rank, layout):
    assembly, _ = train(EXACT, **layout)
    (module,) = assembly.modules
    assert not any(isinstance(part, SplittableLinear) for part in module.modules())
    assert module.lm_head.product is torch.nn.functional.linear  # type: ignore[union-attr]


def test_blocks_of_a_kind_are_compiled_once(one_rank):
    from torch._dynamo.testing import CompileCounter

    counter, owners = CompileCounter(), [_Owner() for _ in range(3)]
    layers = [SplittableLinear(4, 4) for _ in owners]
    for layer, owner in zip(layers, owners, strict=True):
        layer.multiply = WeightSum(owner).multiply
        layer.forward = torch.compile(layer.forward, backend=counter, fullgraph=True)  # type: ignore[method-assign]
    x = torch.randn(2, 4)
    for layer, owner in zip(layers, owners, strict=True):
        layer(x).sum().backward()
        assert torch.allclose(owner.total, torch.ones(2, 4).t() @ x) and layer.weight.grad is None
        assert layer.bias.grad is not None
    assert counter.frame_count == 1


class _Owner:
    def __init__(self) -> None:
        self.total = torch.zeros(4, 4)

    def add(self, gradient_TN: Tensor, x_TD: Tensor) -> None:
        add_product(self.total, gradient_TN.t(), x_TD, begins=False)


@pytest.mark.parametrize("begins", [True, False])
def test_products_are_added_or_begin_a_sum(begins):
    left, right = torch.randn(3, 5, dtype=torch.bfloat16), torch.randn(5, 2, dtype=torch.bfloat16)
    for fmt in (torch.bfloat16, torch.float32):
        total = torch.full((3, 2), 2.0, dtype=fmt)
        add_product(total, left, right, begins=begins)
        assert torch.allclose(total.float(), (left @ right).float() + 2 * (not begins), rtol=0.02, atol=0.05)
    assert not adds_finer("cpu", torch.bfloat16, torch.float32)


def test_a_frozen_weight_and_a_forward_alone_have_no_sum():
    owner, layer = _Owner(), nn.Linear(4, 4, bias=False)
    summed, x = WeightSum(owner), torch.randn(2, 4, requires_grad=True)
    with torch.no_grad():
        assert summed.multiply(x, layer.weight).grad_fn is None
    layer.weight.requires_grad_(False)
    summed.multiply(x, layer.weight).sum().backward()
    assert x.grad is not None and not owner.total.any()


@pytest.mark.parametrize(("is_exact", "is_there"), [(True, True), (False, True), (False, False)])
def test_on_cuda_the_matmul_that_adds_to_a_finer_sum_is_taken_where_it_is_there_and_right(
    cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch, is_exact: bool, is_there: bool
) -> None:
    def add(total: Tensor, left: Tensor, right: Tensor, *, begins: bool) -> None:
        if not is_there:
            raise NotImplementedError("aten::addmm.dtype_out")
        product = left.float() @ right.float()
        total += product if is_exact else product.bfloat16()

    monkeypatch.setattr(weight_sum, "_add_finer", add)
    adds_finer.cache_clear()
    assert adds_finer("cuda", torch.bfloat16, torch.float32) == (is_exact and is_there)
    adds_finer.cache_clear()
