"""How attention is computed in training is measured: kernels, masks, and scores in memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from toys import TOYS, make_config

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.description import Description
from dtlayout.models.operations import Activation, Norm
from dtlayout.models.scores import NONE, ScoreBytes, SequenceScores, describe_scores, find_score_bytes
from dtlayout.models.tape import PLAIN, join
from dtlayout.models.trace_text import list_operations
from dtlayout.models.traced import Trace, parse_trace
from dtlayout.tracing.scores import MeasuredBlock, ScoreWatch, count_more, list_saved
from dtlayout.tracing.trace import trace_config

HEADS, LENGTH = 4, 37


def make_trace(name: str, **more: Any) -> Trace:
    kind, keys = TOYS[name]
    return trace_config({**make_config(kind, **keys | more).to_dict(), "model_type": kind}, name)


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {name: make_trace(name) for name in ("llama", "mistral", "gemma2", "bloom", "gpt_oss", "mpt")}


def find(trace: Trace, seq_len: int = 64, element_bytes: int = 2) -> ScoreBytes:
    return find_score_bytes(trace.kinds[0].attention.scores, seq_len, element_bytes)


def test_plain_attention_holds_no_scores(traces):
    assert traces["llama"].kinds[0].attention.scores == ()
    assert find(traces["llama"]) == NONE


def test_a_softcap_keeps_the_tanh_the_softmax_and_what_is_multiplied(traces):
    found = find(traces["gemma2"])
    assert found.kept == 4 + 4 + 2  # in fp32, but for the last
    assert found.pair_kept == 1  # the causal mask, a byte for each pair of tokens
    assert found.products == 2
    assert find(traces["gemma2"], element_bytes=4).kept == 4 + 4  # the softmax is what is multiplied
    assert traces["gemma2"].kinds[0].caps_logits and not traces["llama"].kinds[0].caps_logits


def test_sinks_are_a_column_beside_the_scores(traces):
    assert find(traces["gpt_oss"]).kept == 4 + 2


def test_code_of_a_familys_own_keeps_its_softmax_and_a_copy(traces):
    found = find(traces["bloom"])
    assert found.kept == 4 + 2 and found.are_in_memory
    assert found.in_backward == 6  # what is multiplied goes before the softmax's gradient is at its fullest
    assert found.mask == 2 and not found.keeps_mask
    assert find(traces["mpt"]).keeps_mask


def test_a_window_is_a_mask_beside_a_kernel(traces):
    found = find(traces["mistral"])
    assert not found.are_in_memory and found.repeats_heads
    assert (found.pair_kept, found.mask) == (2, 1)  # in bf16 by each block, in bytes once for all


def test_windows_that_reach_over_all_tokens_are_none():
    trace = make_trace("mistral", sliding_window=41, max_position_embeddings=128)
    assert [each.longer_than for each in trace.kinds[0].attention.scores] == [0, 41]
    assert find(trace, 41) == NONE and find(trace, 42).pair_kept == 2


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "mpt", "gpt_oss"])
def test_a_file_gives_back_what_was_measured(name, traces):
    import json

    trace = traces[name]
    read = parse_trace(json.loads(trace.dumps()), trace.shape.trace)
    assert read.kinds == trace.kinds
    assert all(isinstance(each.half, ScoreBytes) for each in read.kinds[0].attention.scores)


def test_lengths_and_formats_choose_what_was_measured():
    half, single = ScoreBytes(kept=10.0), ScoreBytes(kept=8.0, keeps_mask=True)
    scores = [SequenceScores(0, NONE, NONE), SequenceScores(128, half, single)]
    assert find_score_bytes(scores, 128, 2) == NONE and find_score_bytes(scores, 129, 2) == half
    assert find_score_bytes(scores, 129, 4) == single
    assert find_score_bytes(scores, 129, 8) == single._replace(kept=16.0)
    assert find_score_bytes([], 129, 2) == NONE


def test_a_trace_says_what_scores_in_memory_cost(traces):
    lines = "\n".join(what for _, what in list_operations(traces["gemma2"].kinds[0]))
    assert "its scores are in memory: 10 bytes kept for each score of a head in bf16, 16 at the fullest" in lines
    assert "in memory" not in "\n".join(what for _, what in list_operations(traces["llama"].kinds[0]))
    assert describe_scores(traces["mistral"].kinds[0].attention.scores) == ""


def test_only_tensors_with_a_number_for_each_pair_of_tokens_are_counted():
    with ScoreWatch(LENGTH, HEADS) as watch:
        queries = torch.ones(1, HEADS, LENGTH, 8)
        scores = queries @ queries.transpose(-1, -2)
        assert watch.held.now == (HEADS * 4, 0)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        assert watch.held.now == (HEADS * 4, 1)
        watch.restart()
        scores.mul_(2)
        assert watch.moved.now == (2 * HEADS * 4, 0)  # read and written
        scores.view(HEADS, LENGTH, LENGTH)
        assert watch.moved.now == (2 * HEADS * 4, 0)  # a view moves nothing
        del scores
        assert watch.held.now == (0, 1) and mask.all()
        assert watch.most == (HEADS * 4, 1)


def test_saved_tensors_are_those_that_backward_reads():
    weight, x = nn.Parameter(torch.ones(3, 3)), torch.ones(2, 3, requires_grad=True)
    product = x @ weight
    saved = {id(each.untyped_storage()) for each in list_saved(product.tanh())}
    assert {id(weight.untyped_storage()), id(x.untyped_storage())} < saved and len(saved) == 3


def count_saved(described: Description) -> float:
    sizes = {"compute": 2, "cast": 2, "exact": 4, "index": 8}
    tape = join(entry for each in described.block for entry in each.record(PLAIN._replace(casts_norms=True)))
    return sum(sizes[each.format] * each.width for entry in tape for each in entry.saves)


def test_operations_say_all_that_a_block_keeps(traces):
    described = traces["llama"].kinds[0]
    assert described.attention.held == 0
    rows = 4 * described.attention.num_heads
    measured = MeasuredBlock(NONE, count_saved(described) + rows + 2 * 70)
    assert count_more(described, measured, 2) == 70
    few = MeasuredBlock(NONE, measured.others - 2 * 68)
    assert count_more(described, few, 2) == 0
    doubled = MeasuredBlock(ScoreBytes(pair_kept=2), measured.others)  # keys and values of every query head
    copied = 2 * described.attention.query_width + described.attention.output_width - described.attention.input_width
    assert count_more(described, doubled, 2) == 70 - copied


def test_modules_that_the_trainer_replaces_are_not_measured():
    (described,) = make_trace("olmo2").kinds
    assert any(isinstance(each, Norm) and each.over_ranks for each in described.block)
    assert described.attention.held == 0


def test_a_backward_of_its_own_keeps_what_the_activation_reads_alone(traces):
    (activation,) = (each for each in traces["bloom"].kinds[0].block if isinstance(each, Activation))
    assert activation.own == 0 and activation.keeps_opened


def test_passes_of_norms_and_activations_are_counted(traces):
    norms = {name: next(each for each in traces[name].kinds[0].block if isinstance(each, Norm)) for name in traces}
    # to fp32 6, square 8, mean 4, product 8, back to bf16 6, weight 4; in fp32 no copies
    assert norms["llama"].moves == (36, 28)
    assert norms["bloom"].moves == (4, 8)  # one kernel
    gated = next(each for each in traces["llama"].kinds[0].block if isinstance(each, Activation))
    assert gated.moves == (4 + 6, 8 + 12)
    assert replace(gated, own=-1).record(PLAIN)[0].moves == (0.0, 0.0)


def test_scores_of_short_sequences_alone_are_those_of_chunks_and_refused():
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 96, "intermediate_size": 48, "num_local_experts": 2, "layer_types": ["linear_attention"] * 2,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    config = make_config("minimax", **sizes)
    assert config.block_size == 256
    with pytest.raises(InvalidConfig, match="block 0 has scores of all pairs of tokens in short sequences alone"):
        trace_config({**config.to_dict(), "model_type": "minimax"})
