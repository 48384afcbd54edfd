"""What operators do, told from what they are given: matmuls by sizes, attention by FLOPs, the rest by bytes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dtlayout.measure.work import WorkCounter, describe
from dtlayout.models.kernel_calls import AttentionCall, KernelCall, Matmul, Pass
from dtlayout.ops.composite import call_seen
from dtlayout.ops.grouped import GROUPED, LOOP, multiply_groups
from dtlayout.ops.scaled_groups import SCALED_LOOPS


class Listing(TorchDispatchMode):
    """What each operator does, views and the like left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[KernelCall] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = call_seen(self, func, args, kwargs or {})
        if operation := describe(func, args, kwargs or {}, result):
            self.found.append(operation)
        return result


X, Y = torch.zeros(8, 4), torch.zeros(8, 4)  # 128 bytes each
CAST, ONE = X.to(torch.float8_e4m3fn), torch.ones(())


@pytest.mark.parametrize(
    ("work", "operation"),
    [
        (lambda: X @ torch.ones(4, 3), Matmul(8, 3, 4)),
        (lambda: torch.addmm(torch.ones(3), X, torch.ones(4, 3)), Matmul(8, 3, 4)),
        (lambda: torch._scaled_mm(CAST, CAST.t(), ONE, ONE), Matmul(8, 8, 4, is_scaled=True)),
        (lambda: torch.bmm(torch.ones(2, 8, 4), torch.ones(2, 4, 3)), Matmul(8, 3, 4, batch=2)),
        (lambda: torch.mm(X, torch.ones(4, 3), out=torch.empty(8, 3)), Matmul(8, 3, 4)),
        (lambda: torch.ones(8, 3).addmm_(X, torch.ones(4, 3)), Matmul(8, 3, 4)),
        (lambda: X + Y, Pass(3 * 128)),
        (lambda: torch.exp(X), Pass(2 * 128)),
        (lambda: X.clone().add_(Y), Pass(3 * 128)),  # in place it reads both and writes one
        (lambda: torch.empty(8, 4).copy_(X), Pass(2 * 128)),
        (lambda: torch.empty(8, 4).fill_(1.0), Pass(128)),
        (lambda: torch.add(X, Y, out=torch.empty(8, 4)), Pass(3 * 128)),
        (lambda: torch.ones(8, 1).expand(8, 4) + Y, Pass(32 + 2 * 128)),  # no larger than its storage
        (lambda: F.embedding(torch.arange(2), torch.zeros(1000, 4)), Pass(2 * 32)),
        (lambda: X.clone().scatter_(1, torch.zeros(8, 1, dtype=torch.int64), 1.0), Pass(2 * 64)),
        (lambda: torch._foreach_mul([X.clone(), Y.clone()], 2.0), Pass(4 * 128)),
    ],
)  # fmt: skip
def test_the_last_operator_does_this(work, operation):
    with Listing() as listing:
        work()
    assert listing.found[-1] == operation


@pytest.mark.parametrize(
    "work", [lambda: X.view(-1), lambda: X.t(), lambda: X.detach(), lambda: X[1:], lambda: torch.empty_like(X)]
)
def test_views_and_allocations_do_nothing(work):
    with Listing() as listing:
        work()
    assert listing.found == []


@pytest.mark.parametrize("kernel", [GROUPED, LOOP])
def test_matmuls_of_experts_count_each_row_once_forward_and_for_both_gradients(kernel):
    x, weight = torch.zeros(7, 8, requires_grad=True), torch.zeros(4, 16, 8, requires_grad=True)
    ends = torch.tensor([2, 2, 7, 7], dtype=torch.int32)
    with Listing() as listing:
        multiply_groups(x, weight, ends, kernel).sum().backward()
    found = [each for each in listing.found if isinstance(each, Matmul)]
    assert found == [Matmul(7, 16, 8), Matmul(7, 8, 16), Matmul(16, 8, 7)]  # the result, and gradients of x and weight
    assert {each.flops for each in found} == {2 * 7 * 16 * 8}


def test_matmuls_of_experts_in_fp8_are_those_of_each_expert_that_has_rows():
    x, weight = torch.zeros(7, 16, requires_grad=True), torch.zeros(4, 32, 16, requires_grad=True)
    ends = torch.tensor([2, 2, 7, 7], dtype=torch.int32)
    with Listing() as listing:
        multiply_groups(x, weight, ends, SCALED_LOOPS["fp8-rowwise"]).sum().backward()
    found = [each for each in listing.found if isinstance(each, Matmul)]
    sizes = [(rows, 32, 16) for rows in (2, 5)], [(rows, 16, 32) for rows in (2, 5)], [(32, 16, 16)] * 2  # filled up
    assert found == [Matmul(*each, is_scaled=True) for matmul in sizes for each in matmul]


def test_attention_counts_whole_and_two_and_a_half_times_backward():
    q, k, v = (torch.zeros(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    with Listing() as listing, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    whole = 2 * 4 * 4 * 16**2 * 8
    assert [each.flops for each in listing.found if isinstance(each, AttentionCall)] == [whole, 2.5 * whole]


def test_attention_that_hides_nothing_counts_as_if_it_hid_half():
    q, k, v = torch.zeros(2, 4, 16, 8), torch.zeros(2, 4, 24, 8), torch.zeros(2, 4, 24, 8)
    with Listing() as listing, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(16, 24))
    whole = 2 * 4 * 4 * 16 * 24 * 8
    assert [each.flops for each in listing.found if isinstance(each, AttentionCall)] == [2 * whole, whole]


def test_fused_adam_reads_four_tensors_and_writes_three():
    parameter = nn.Parameter(torch.zeros(1024))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.ones(1024)
    optimizer.step()
    with Listing() as listing:
        optimizer.step()
    moved = max(each.moved_bytes for each in listing.found if isinstance(each, Pass))
    assert moved == pytest.approx(7 * 4096, rel=0.01)
    optimizer.grad_scale = torch.ones(())  # type: ignore[attr-defined]
    with Listing() as listing:
        optimizer.step()
    moved = max(each.moved_bytes for each in listing.found if isinstance(each, Pass))
    assert moved == pytest.approx(8 * 4096, rel=0.01), "an update that divides gradients writes them"


def test_a_counter_adds_up_by_label():
    labels = iter(("a", "b", "b"))
    counter = WorkCounter(lambda: next(labels))
    for _ in range(3):
        counter.observe(torch.ops.aten.mm.default, (X, torch.ones(4, 3)), {}, torch.ones(8, 3))
    assert counter.counts == {("a", Matmul(8, 3, 4)): 1, ("b", Matmul(8, 3, 4)): 2}
    assert Matmul(8, 3, 4).flops == 2 * 8 * 3 * 4 and Pass(5).flops == 0
