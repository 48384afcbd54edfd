"""Linear layers of a whole model in fp8: which they are, and what they learn."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parity import QWEN2, SHAPE
from torch import Tensor, nn
from torch.nn import functional as F

from dtlayout.models.llama import Llama
from dtlayout.ops.grouped import StackedLinear
from dtlayout.ops.linear import SplittableLinear
from dtlayout.ops.scaled_groups import SCALED_LOOPS
from dtlayout.plans.init import initialize
from dtlayout.plans.plan import find_scaled, find_scaled_experts, gathers_cast, make_plan
from dtlayout.plans.scale import scale_experts, scale_linears
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts, ModelShape
from dtlayout.spec.precision import Precision

ALONE: Any = SimpleNamespace(size=lambda: 1)
"""A mesh of one rank."""
SMALL = ModelShape(
    name="small", hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, ffn_size=128, vocab_size=32
)  # fmt: skip
NUM_STEPS, BATCH, LENGTH = 120, 16, 32


def list_scaled(module: nn.Module) -> set[str]:
    linears = {name: part for name, part in module.named_modules() if isinstance(part, SplittableLinear)}
    return {name for name, linear in linears.items() if linear.multiply is not F.linear}


def test_linear_layers_of_blocks_multiply_in_fp8_where_16_divides_both_sides():
    kinds = {"q_proj", "k_proj", "v_proj", "o_proj"}  # of 32 and 16 elements; the other three have 48 and 40
    shape = ModelShape(
        name="odd", hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_size=40, vocab_size=48
    )  # fmt: skip
    model = Llama(shape, Kernels(), 8)
    scale_linears(model, find_scaled(shape), "fp8-rowwise", ALONE)
    assert list_scaled(model) == {f"model.layers.{i}.self_attn.{kind}" for i in range(2) for kind in kinds}
    plan = make_plan(SHAPE, Layout(), Kernels(), Precision(matmuls="fp8-tensorwise"))
    rows = [line.split(maxsplit=1) for line in str(plan).split("\n")]
    said = [pattern for pattern, text in rows if text == "multiplies in fp8-tensorwise"]
    assert tuple(said) == plan.scaled and len(said) == 7
    assert make_plan(SHAPE, Layout(), Kernels(), Precision()).scaled == ()


def test_experts_multiply_in_fp8_where_16_divides_their_sides_and_their_kernel_can():
    rules = Experts(number=4, per_token=2, ffn_size=32, dense_layers=1)
    shape = replace(SMALL, experts=rules)
    model = Llama(shape, Kernels(), 8)
    (pattern,) = find_scaled_experts(shape, Kernels())
    scale_experts(model, [pattern], "fp8-rowwise")
    stacks = [part for part in model.modules() if isinstance(part, StackedLinear)]
    assert len(stacks) == 3 and all(each.kernel is SCALED_LOOPS["fp8-rowwise"] for each in stacks)
    plan = make_plan(shape, Layout(), Kernels(), Precision(matmuls="fp8-rowwise"))
    rows = [line.split(maxsplit=1) for line in str(plan).split("\n")]
    assert [pattern, "each expert multiplies in fp8-rowwise"] in rows and plan.scaled_experts == (pattern,)
    odd = replace(SMALL, experts=replace(rules, ffn_size=24))
    others = (shape, Kernels(experts="grouped")), (odd, Kernels()), (SMALL, Kernels())
    assert [find_scaled_experts(*each) for each in others] == [()] * 3
    assert make_plan(shape, Layout(), Kernels(), Precision()).scaled_experts == ()


def test_fp8_is_gathered_where_one_scale_fits_and_nothing_else_reads_it():
    tensorwise, rowwise = (Precision(matmuls=f"fp8-{name}") for name in ("tensorwise", "rowwise"))
    assert gathers_cast(QWEN2, tensorwise) and not gathers_cast(QWEN2, rowwise) and not gathers_cast(QWEN2, Precision())
    adapted, odd = replace(QWEN2, adapter=Adapter()), replace(QWEN2, ffn_size=40)
    assert not gathers_cast(adapted, tensorwise) and not gathers_cast(odd, tensorwise)


def make_batch(step: int) -> Tensor:
    """Chains of tokens: each of 32 is followed by one of four, of which the first is the likeliest."""
    generator = torch.Generator().manual_seed(step)
    choices = torch.multinomial(torch.tensor([0.7, 0.1, 0.1, 0.1]), BATCH * LENGTH, True, generator=generator)
    tokens = [torch.randint(32, (BATCH,), generator=generator)]
    for choice in choices.view(LENGTH, BATCH):
        tokens.append((tokens[-1] * 5 + 7 * choice + 3) % 32)
    return torch.stack(tokens, 1)


def learn(matmuls: str) -> float:
    """The mean loss of the last twenty steps."""
    torch.manual_seed(0)
    model = Llama(SMALL, Kernels(), LENGTH, dtype=torch.bfloat16)
    initialize([model], SMALL, seed=0, device="cpu")
    if matmuls != "compute":
        scale_linears(model, find_scaled(SMALL), matmuls, ALONE)
    masters = [parameter.detach().float() for parameter in model.parameters()]
    optimizer, losses = torch.optim.AdamW(masters, lr=1e-2, fused=True), list[float]()
    for step in range(NUM_STEPS):
        tokens = make_batch(step)
        loss = model(tokens[:, :-1], targets=tokens[:, 1:], num_targets=BATCH * LENGTH)
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.data.copy_(master)
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


@pytest.mark.parametrize("matmuls", ["fp8-tensorwise", "fp8-rowwise"])
def test_a_training_in_fp8_ends_within_a_percent_of_bf16(matmuls):
    """Of a language whose entropy is 0.94 nats a token."""
    expected = learn("compute")
    assert 0.9 < expected < 1.2
    assert learn(matmuls) == pytest.approx(expected, rel=0.01)
