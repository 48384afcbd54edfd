"""Sparse attention: what an indexer computes is in a trace, and what has no gradient is not trained."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.choice import TokenChoice
from dtlayout.models.counting import (
    count_block_flops_per_token,
    count_choosing_flops_per_token,
    count_model_flops_per_token,
    count_parameters,
)
from dtlayout.models.description import Description
from dtlayout.models.traced import Trace, read_trace
from dtlayout.spec.model_shape import ModelShape
from dtlayout.tracing.attention import NAME, bind_kernel, register, see_chosen
from dtlayout.tracing.building import build_causal
from dtlayout.tracing.trace import trace_config

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_local_experts": 8,
    "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 24,
    "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "index_n_heads": 3,
    "index_head_dim": 10, "index_topk": 5, "max_position_embeddings": 64, "first_k_dense_replace": 1,
    "pad_token_id": None, "mlp_layer_types": ["dense", "sparse", "sparse"],
    "indexer_types": ["full"] * 3,
}  # fmt: skip
FAMILIES = ("deepseek_v32", "glm_moe_dsa", "axk2")


def make_config(family: str, **more: Any) -> Any:
    kind = CONFIG_MAPPING[family]
    known = kind().to_dict().keys() | kind.attribute_map.keys()
    config = kind(**{key: value for key, value in (SIZES | more).items() if key in known})
    config._experts_implementation = "eager"
    return config


def make_trace(family: str, **more: Any) -> Trace:
    return trace_config({**make_config(family, **more).to_dict(), "model_type": family}, family)


def keep(trace: Trace, folder) -> ModelShape:
    file = folder / "trace.json"
    file.write_text(trace.dumps())
    return read_trace(str(file)).shape


def build(family: str, attention: str) -> Any:
    torch.manual_seed(0)
    model = build_causal(make_config(family), dtype=torch.float64, attn_implementation=attention).train()
    for block in model.model.layers:
        bind_kernel(block, "sdpa-math")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 1.0, 0.3)
    return model


def list_choices(described: Description) -> list[tuple[int, int]]:
    return [(each.num_heads, each.width) for each in described.block if isinstance(each, TokenChoice)]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_indexer_is_in_the_trace_and_trains_where_it_has_gradients(family, tmp_path):
    trace = make_trace(family)
    shape = keep(trace, tmp_path)
    model = build(family, "eager")
    assert count_parameters(shape) == sum(each.numel() for each in model.parameters())
    assert [list_choices(each) for each in trace.kinds] == [[(3, 10), (1, 3)]] * 2

    model(input_ids=torch.arange(12)[None], use_cache=False).logits.sum().backward()
    without = {name for name, each in model.named_parameters() if each.grad is None}
    untrained = {
        f"model.layers.{number}.{weight.name}"
        for number, kind in enumerate(shape.block_kinds)
        for weight in trace.kinds[kind].block_weights
        if not weight.trains
    }
    assert untrained == without and all(".indexer." in name for name in without) and len(without) == 15


def test_experts_of_a_token_are_counted_apart_from_groups_and_from_chosen_tokens():
    for chosen in (1, 3):
        experts = make_trace("glm_moe_dsa", num_experts_per_tok=chosen).shape.experts
        assert experts and (experts.number, experts.per_token) == (8, chosen)


def test_choosing_is_computed_forward_alone_by_all_pairs_of_tokens(tmp_path):
    shape = keep(make_trace("deepseek_v32", num_hidden_layers=1, mlp_layer_types=["dense"]), tmp_path)
    assert count_choosing_flops_per_token(shape, 4096) == 2 * 4096 * (3 * 10 + 1 * 3)
    assert count_choosing_flops_per_token(shape, 8192) == 2 * count_choosing_flops_per_token(shape, 4096)
    more = [
        count(shape, 8192) - count(shape, 4096) for count in (count_block_flops_per_token, count_model_flops_per_token)
    ]
    attention, choosing = 2 * 4096 * (4 * 12 + 4 * 12), 2 * 4096 * 33
    assert more == [attention + choosing, 3 * attention + choosing]


def test_a_block_may_take_the_choice_of_the_one_before():
    trace = make_trace("glm_moe_dsa", indexer_types=["full", "full", "shared"])
    assert [list_choices(each) for each in trace.kinds] == [[(3, 10), (1, 3)], [(3, 10), (1, 3)], []]


@pytest.mark.parametrize("family", FAMILIES)
def test_our_attention_sees_the_chosen_tokens_alone(family):
    register()
    tokens = torch.arange(24)[None]
    logits = [build(family, name)(input_ids=tokens, use_cache=False).logits for name in ("sdpa", NAME)]
    torch.testing.assert_close(*logits, rtol=1e-10, atol=1e-10)


def test_chosen_tokens_are_seen_where_the_mask_lets_them():
    chosen = torch.tensor([[[0], [2], [1]]])
    assert see_chosen(chosen, None, 3)[0, 0].tolist() == [[True, False, False], [False] * 3, [False, True, False]]
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    assert see_chosen(chosen, mask, 3)[0, 0].tolist()[1] == [False, False, True]


@pytest.mark.parametrize("mask", [torch.zeros(1, 1, 3, 3), torch.ones(1, 3, 3, dtype=torch.bool)])
def test_a_mask_that_does_not_say_what_is_seen_is_refused(mask):
    with pytest.raises(InvalidConfig, match="attention to chosen tokens takes a mask that says which tokens"):
        see_chosen(torch.zeros(1, 3, 1, dtype=torch.long), mask, 3)
