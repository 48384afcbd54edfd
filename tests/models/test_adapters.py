"""Adapters: what their modules compute, and which parts of a model get one."""

from dataclasses import replace

import pytest
import torch
from parity import MIXTURE, QWEN2, SHAPE
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.adapters import list_adapted
from dtlayout.models.families import count_frozen_first, describe, find_target_problems
from dtlayout.models.llama import Llama
from dtlayout.ops.adapters import add_low_rank, add_scale
from dtlayout.plans.init import initialize
from dtlayout.plans.plan import find_quantized
from dtlayout.plans.quantize import quantize_linears
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.kernels import Kernels


def names_of(model) -> list[str]:
    return [each.module for each in list_adapted(describe(model))]


def test_a_layer_with_an_adapter_computes_what_its_paper_says():
    torch.manual_seed(0)
    x = torch.randn(3, 8, dtype=torch.float64)
    linear = torch.nn.Linear(8, 6, dtype=torch.float64)
    weight, bias = linear.weight, linear.bias
    add_low_rank(linear, 2, 1.5)
    a, b = (torch.nn.init.normal_(each.weight) for each in (linear.lora_A, linear.lora_B))
    torch.testing.assert_close(linear(x), F.linear(x, weight + 1.5 * b @ a, bias))
    for of_input in (False, True):
        linear = torch.nn.Linear(8, 6, dtype=torch.float64)
        add_scale(linear, of_input=of_input)
        factors = torch.nn.init.normal_(linear.ia3.weight)
        expected = F.linear(x * factors, linear.weight, linear.bias) if of_input else linear(x)
        if not of_input:
            expected = F.linear(x, linear.weight, linear.bias) * factors
        torch.testing.assert_close(linear(x), expected)


@pytest.mark.parametrize("adapter", [Adapter(rank=4), Adapter(method="ia3")], ids=lambda each: each.method)
def test_a_new_adapter_changes_no_logit_and_every_rank_draws_the_same(adapter):
    plain, adapted = (Llama(shape, Kernels(), 16) for shape in (QWEN2, replace(QWEN2, adapter=adapter)))
    initialize([plain], QWEN2, 3, "cpu")
    initialize([adapted], replace(QWEN2, adapter=adapter), 3, "cpu")
    tokens = torch.arange(16)[None]
    assert torch.equal(plain(tokens), adapted(tokens))


def test_the_first_matrix_has_the_deviation_of_pefts_and_the_second_is_zero():
    model = replace(SHAPE, hidden_size=512, head_dim=4, adapter=Adapter(rank=64, targets=("q_proj",)))
    adapted = Llama(model, Kernels(), 16)
    initialize([adapted], model, 3, "cpu")
    q_proj = adapted.get_submodule("model.layers.0.self_attn.q_proj")
    assert q_proj.lora_A.weight.std().item() == pytest.approx((3 * 512) ** -0.5, rel=0.02)
    assert q_proj.lora_B.weight.eq(0).all()


def test_targets_are_ends_of_names_and_without_any_each_linear_layer_but_the_router_has_one():
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    for model, module in ((SHAPE, "mlp"), (MIXTURE, "mlp.shared_expert")):
        of_mlp = [f"{module}.{name}_proj" for name in ("gate", "up", "down")]
        assert names_of(replace(model, adapter=Adapter())) == [*attention, *of_mlp]
    assert names_of(replace(SHAPE, adapter=Adapter(targets=("self_attn.q_proj", "down_proj")))) == [
        "self_attn.q_proj", "mlp.down_proj",
    ]  # fmt: skip
    assert names_of(replace(SHAPE, adapter=Adapter(method="ia3"))) == [
        "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj",
    ]  # fmt: skip


def test_the_base_is_frozen_and_a_target_of_first_blocks_alone_is_known():
    model = replace(MIXTURE, adapter=Adapter(targets=("mlp.gate_proj",)))
    assert find_target_problems(model) == [] and names_of(model) == [] and count_frozen_first(model) == 0
    blocks = [describe(kind).block_weights for kind, _ in model.kinds(range(6))]
    trained = [weight.name for weights in blocks for weight in weights if weight.trains]
    assert trained == ["mlp.gate_proj.lora_A.weight", "mlp.gate_proj.lora_B.weight"]
    assert not describe(model).head.trains and not describe(model).embedding.trains


def test_a_torch_whose_fsdp_shards_no_codes_is_refused(monkeypatch):
    model = replace(SHAPE, adapter=Adapter(rank=2))
    with torch.device("meta"):
        adapted = Llama(model, Kernels(), 16)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    with pytest.raises(
        InvalidConfig, match=r"precision\.base=nf4 needs torch 2\.12: FSDP2 of 2\.11\.0 shards no codes"
    ):
        quantize_linears(adapted, find_quantized(model), "nf4")
