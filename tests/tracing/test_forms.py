"""Forms of code that a trace follows: a module called twice, a view of a vector, writes into tensors, chunks, zeros."""

from collections import Counter
from typing import Any

import pytest
import torch
from toys import make_config
from transformers import CONFIG_MAPPING

from dtlayout.models.counting import count_parameters
from dtlayout.models.operations import Elementwise, Norm
from dtlayout.models.traced import Trace, read_trace
from dtlayout.tracing.building import build_causal, find_causal_class
from dtlayout.tracing.trace import trace_config

LLAMA4 = {
    "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 40,
    "interleave_moe_layer_step": 2, "num_hidden_layers": 4, "moe_layers": [1, 3], "no_rope_layers": [1, 1, 1, 0],
    "layer_types": ["chunked_attention"] * 3 + ["full_attention"], "max_position_embeddings": 128,
    "pad_token_id": None, "head_dim": 8,
}  # fmt: skip


def make_trace(family: str, **keys: Any) -> Trace:
    return trace_config({**make_config(family, **keys).to_dict(), "model_type": family}, family)


def count_own(family: str, **keys: Any) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in build_causal(make_config(family, **keys)).parameters())


def keep_and_count(trace: Trace, folder) -> int:
    file = folder / "trace.json"
    file.write_text(trace.dumps())
    return count_parameters(read_trace(str(file)).shape)


def test_a_norm_that_is_called_for_queries_and_for_keys_is_two_operations(tmp_path):
    trace = make_trace("llama4_text", **LLAMA4)
    of_heads = [each for each in trace.kinds[0].block if isinstance(each, Norm) and each.is_of_heads]
    assert [(each.module, each.width, each.num_heads) for each in of_heads] == [
        ("self_attn.qk_norm", 32, 4), ("self_attn.qk_norm#2", 16, 2),
    ]  # fmt: skip
    assert trace.kinds[0].attention.num_kv_heads == 2
    assert keep_and_count(trace, tmp_path) == count_own("llama4_text", **LLAMA4)


def test_blocks_without_experts_stand_between_those_with_some():
    trace = make_trace("llama4_text", **LLAMA4)
    has_experts = [trace.kinds[kind].experts is not None for kind in trace.shape.block_kinds]
    assert has_experts == [False, True, False, True]
    experts = next(each.experts for each in trace.kinds if each.experts)
    assert (experts.number, experts.per_token, experts.router) == (4, 1, "feed_forward.router")


@pytest.mark.parametrize("chunk", [40, 60])
def test_attention_within_chunks_has_a_mask_in_longer_sequences_alone(chunk):
    trace = make_trace("llama4_text", **LLAMA4 | {"attention_chunk_size": chunk})
    masks = {each.longer_than: each.half.mask for each in trace.kinds[0].attention.scores}
    assert masks.get(0, 0) == 0 and masks[chunk] == 1


def test_a_vector_that_is_viewed_with_more_dimensions_is_a_pass():
    keys = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "pad_token_id": None}
    trace = make_trace("beam", **keys)
    for described in trace.kinds:
        passes = [each for each in described.block if isinstance(each, Elementwise)]
        assert ("self_attn.gate_bias", (4,)) in [pair for each in passes for pair in each.parameters]


def test_a_matmul_of_zeros_alone_is_counted_with_the_other_call_of_its_module(tmp_path):
    keys = {
        "num_hidden_layers": 2,
        "layer_types": ["hybrid", "hybrid"],
        "router_hidden_size": 12,
        "num_experts_per_tok": 1,
    }
    trace = make_trace("zaya", **keys)
    names = Counter(weight.name for weight in trace.kinds[0].block_weights)
    assert set(names.values()) == {1} and "self_attn.qkv_proj.v_proj_delayed.weight" in names
    assert keep_and_count(trace, tmp_path) == count_own("zaya", **keys)
    assert trace.kinds[0].attention.num_kv_heads == 2


def test_the_class_of_a_part_that_reads_text_is_found_by_its_family():
    text = CONFIG_MAPPING["emu3"]().get_text_config(decoder=True)
    assert find_causal_class(text).__name__ == "Emu3ForCausalLM"
    assert find_causal_class(CONFIG_MAPPING["clip_vision_model"]()) is None
