"""Cross-entropy: a sum over valid targets that others may divide."""

import pytest
import torch
from torch.nn import functional as F

from dtlayout.ops.loss import IGNORED, CrossEntropy

generator = torch.Generator().manual_seed(0)
LOGITS = torch.randn(3, 7, 11, dtype=torch.float64, generator=generator)
TARGETS = torch.randint(11, (3, 7), generator=generator)
MASKED = TARGETS.masked_fill(torch.rand(3, 7, generator=generator) < 0.4, IGNORED)


def test_it_is_minus_the_log_of_the_targets_probabilities():
    expected = -LOGITS.softmax(-1).gather(-1, TARGETS[..., None]).log().sum()
    torch.testing.assert_close(CrossEntropy()(LOGITS, TARGETS), expected)


def test_ignored_targets_add_nothing_to_the_loss_or_the_gradient():
    logits = LOGITS.clone().requires_grad_()
    loss = CrossEntropy()(logits, MASKED)
    loss.backward()
    valid = MASKED != IGNORED
    assert 0 < valid.sum() < valid.numel()
    torch.testing.assert_close(loss, F.cross_entropy(LOGITS[valid], MASKED[valid], reduction="sum"))
    assert (logits.grad[~valid] == 0).all()
    assert (logits.grad[valid] != 0).all()


def test_parts_of_a_batch_add_up_to_the_whole():
    parts = [CrossEntropy()(logits, targets) for logits, targets in zip(LOGITS.split(1), MASKED.split(1), strict=True)]
    torch.testing.assert_close(torch.stack(parts).sum(), CrossEntropy()(LOGITS, MASKED))


def test_without_a_valid_target_the_loss_is_zero_and_not_nan():
    logits = LOGITS.clone().requires_grad_()
    loss = CrossEntropy()(logits, torch.full_like(TARGETS, IGNORED))
    loss.backward()
    assert loss == 0
    assert (logits.grad == 0).all()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_the_loss_is_in_fp32_or_finer(dtype, expected):
    loss = CrossEntropy()(LOGITS.to(dtype), TARGETS)
    assert loss.dtype == expected
    reference = CrossEntropy()(LOGITS.to(dtype).double(), TARGETS)
    torch.testing.assert_close(loss.double(), reference, rtol=1e-6, atol=0)
