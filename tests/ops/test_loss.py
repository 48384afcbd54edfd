"""Cross-entropy: a sum over valid targets that others may divide, the same by every kernel."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dtlayout.base.errors import KernelError
from dtlayout.ops.loss import Head, eager_loss, token_losses
from dtlayout.spec import kernel_table
from dtlayout.spec.batch import IGNORED
from dtlayout.spec.kernels import count_loss_chunks

LOSSES = [name for name, known in kernel_table.KERNELS["loss"].items() if known.cpu]  # the others are predicted only
B, S, D, V = 3, 7, 5, 11
generator = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(B, S, D, dtype=torch.float64, generator=generator)
WEIGHT = torch.randn(V, D, dtype=torch.float64, generator=generator)
TARGETS = torch.randint(V, (B, S), generator=generator)
MASKED = TARGETS.masked_fill(torch.rand(B, S, generator=generator) < 0.4, IGNORED)


def run(kernel: str, targets: Tensor, *, dtype=torch.float64, scale=0.37) -> tuple[Tensor, Tensor, Tensor]:
    """Loss · scale, and the gradients of hidden states and weight."""
    head = Head(D, V, kernel, dtype)
    head.weight.data = WEIGHT.to(dtype, copy=True)
    hidden = HIDDEN.to(dtype, copy=True).requires_grad_()
    loss = head(hidden, targets, 1 / scale)
    loss.backward()
    return loss.detach(), hidden.grad, head.weight.grad


def reference(targets: Tensor, *, dtype=torch.float64, scale=0.37) -> tuple[Tensor, Tensor, Tensor]:
    """The same by PyTorch's own operations, in float64, from inputs rounded to `dtype`."""
    hidden = HIDDEN.to(dtype).to(torch.float64, copy=True).requires_grad_()
    weight = WEIGHT.to(dtype).to(torch.float64, copy=True).requires_grad_()
    logits = F.linear(hidden, weight).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum") * scale
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("kernel", LOSSES)
@pytest.mark.parametrize("targets", [TARGETS, MASKED], ids=["all", "masked"])
def test_every_kernel_is_the_reference_forward_and_backward(kernel, targets):
    assert 0 < (MASKED != IGNORED).sum() < MASKED.numel()
    torch.testing.assert_close(run(kernel, targets), reference(targets))


@pytest.mark.parametrize(
    "options",
    [{"bias": True}, {"factor": 0.3}, {"softcap": 2.0}, {"bias": True, "factor": 3.0, "softcap": 5.0}],
    ids=str,
)
@pytest.mark.parametrize("kernel", LOSSES)
def test_bias_factor_and_softcap_are_those_of_separate_operations_in_every_kernel(kernel, options):
    head = Head(D, V, kernel, torch.float64, **options)
    head.weight.data = WEIGHT.clone()
    if head.bias is not None:
        head.bias.data = torch.linspace(-1, 2, V, dtype=torch.float64)
    hidden = HIDDEN.clone().requires_grad_()
    leaves = [hidden, *head.parameters()]
    loss = head(hidden, MASKED, 1 / 0.37)
    found = torch.autograd.grad(loss, leaves)
    logits = F.linear(hidden * options.get("factor", 1.0), head.weight, head.bias)
    cap = options.get("softcap")
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    expected = F.cross_entropy(logits.flatten(0, 1), MASKED.flatten(), ignore_index=IGNORED, reduction="sum") * 0.37
    torch.testing.assert_close(head(hidden), logits)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaves))


def test_a_frozen_bias_has_no_gradient():
    head = Head(D, V, "linear", torch.float64, bias=True)
    head.bias.requires_grad_(False)
    head(HIDDEN, TARGETS).backward()
    assert head.bias.grad is None and head.weight.grad is not None


def test_a_kernel_that_knows_neither_bias_nor_softcap_is_refused(monkeypatch):
    class Foreign:
        @staticmethod
        def load():
            return lambda *arguments: eager_loss(*arguments)

    monkeypatch.setattr("dtlayout.ops.loss.find_kernel", lambda *_: Foreign)
    assert Head(D, V, "foreign", torch.float64, factor=2.0).factor == 2
    for options in ({"bias": True}, {"softcap": 3.0}):
        with pytest.raises(KernelError, match="loss=foreign computes logits without bias and softcap"):
            Head(D, V, "foreign", torch.float64, **options)


@pytest.mark.parametrize("num_targets", [3.7, torch.tensor(3.7, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_number_of_targets_changes_no_format(dtype, num_targets):
    head = Head(D, V, "eager", dtype)
    head.weight.data = WEIGHT.to(dtype, copy=True)
    loss = head(HIDDEN.to(dtype), TARGETS, num_targets)
    assert loss.dtype == dtype
    torch.testing.assert_close(
        loss.double(), reference(TARGETS, scale=1 / 3.7)[0], rtol=1e-14 if dtype.itemsize == 8 else 1e-5, atol=0
    )


@pytest.mark.parametrize("kernel", LOSSES)
def test_without_a_valid_target_loss_and_gradients_are_zero_and_not_nan(kernel):
    assert all((found == 0).all() for found in run(kernel, torch.full_like(TARGETS, IGNORED)))


@pytest.mark.parametrize("kernel", LOSSES)
def test_in_bf16_the_loss_is_in_fp32_and_gradients_are_as_near_as_bf16_comes(kernel):
    loss, *gradients = run(kernel, MASKED, dtype=torch.bfloat16)
    expected, *exact = reference(MASKED, dtype=torch.bfloat16)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=2e-2, atol=0)  # the logits are rounded
    for found, wanted in zip(gradients, exact, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.double() - wanted).norm() < 2e-2 * wanted.norm()


def test_a_target_that_is_nearly_certain_keeps_its_gradient_in_bf16():
    """p = 0.9990 is 1.0 in bf16; p - 1 is not 0."""
    logits = torch.tensor([[7.0, 0.0]], dtype=torch.bfloat16)
    gradient = torch.empty_like(logits)
    token_losses(logits, torch.tensor([0]), Head(D, V, "eager", torch.bfloat16).columns, 1.0, gradient)
    torch.testing.assert_close(gradient[0, 0].float(), torch.tensor(-9.11e-4), rtol=5e-3, atol=0)


@pytest.mark.parametrize("kernel", LOSSES)
def test_the_number_of_targets_divides_before_gradients_are_rounded(kernel):
    """1 / 32,640 is 0.2 % off in bf16, and gradients that were scaled with it would be too, all to the same side."""
    *_, found = run(kernel, TARGETS, dtype=torch.bfloat16, scale=1 / 32_640)
    *_, exact = reference(TARGETS, dtype=torch.bfloat16, scale=1 / 32_640)
    ratio = (found.double() * exact).sum() / exact.square().sum()
    assert abs(ratio - 1) < 1e-3


@pytest.mark.parametrize("kernel", LOSSES)
def test_without_targets_the_head_gives_logits(kernel):
    head = Head(D, V, kernel, torch.float64)
    torch.testing.assert_close(head(HIDDEN), HIDDEN @ head.weight.T)


@pytest.mark.parametrize("kernel", ["chunked", "linear"])
def test_chunked_kernels_never_hold_exact_logits_of_all_tokens(kernel):
    seen: list[int] = []

    def spy(logits, *rest):
        seen.append(len(logits))
        return token_losses(logits, *rest)

    head = Head(D, V, kernel, torch.float64)
    head.token_losses = spy
    head(HIDDEN, TARGETS)
    assert sum(seen) == B * S and len(seen) == count_loss_chunks(B * S) > 1


@pytest.mark.parametrize(("num_tokens", "chunks"), [(2, 2), (2048, 2), (2049, 3), (4096, 4), (8192, 8)])
def test_a_chunk_has_1024_tokens_at_most_and_there_are_two(num_tokens, chunks):
    assert count_loss_chunks(num_tokens) == chunks
