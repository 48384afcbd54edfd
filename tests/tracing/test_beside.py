"""Traced models beside what was written about them by others: descriptions by hand, and plans of transformers."""

from pathlib import Path

import pytest

from benchmarks.traced import compare_descriptions, compare_plans, make_config, rehearse, trace, without_code
from dtlayout.models.families import block_tape, describe
from dtlayout.models.operations import Activation, Norm
from dtlayout.models.tape import PLAIN
from dtlayout.spec.layout import Layout

_TOY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 128, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_trace_is_the_written_description(family: str, tmp_path: Path) -> None:
    _, differences = compare_descriptions(family, _TOY, tmp_path)
    assert not differences


@pytest.mark.parametrize("family", ["llama", "starcoder2", "gpt_neox"])
def test_our_plan_sends_no_more_than_that_of_transformers(family: str, tmp_path: Path) -> None:
    _, ours, theirs = compare_plans(family, tmp_path)
    assert ours is not None and 0 < ours <= theirs


@pytest.mark.parametrize(
    ("family", "norm", "activation"),
    [
        ("llama", ("cast", "compute"), 1), ("gemma", ("cast", "exact"), 1), ("olmo", ("cast",), 1),
        ("starcoder2", ("input",), 0), ("cohere", ("exact", "exact", "exact"), 1),
    ],
)  # fmt: skip
def test_a_trace_knows_what_norms_and_activations_keep(
    family: str, norm: tuple[str, ...], activation: int, tmp_path: Path
) -> None:
    block = describe(trace(make_config(family, _TOY), tmp_path)).block
    assert {each.keeps for each in block if isinstance(each, Norm)} == {norm}
    assert {each.own for each in block if isinstance(each, Activation)} == {activation}


def test_norms_of_one_tensor_keep_it_once(tmp_path: Path) -> None:
    model = trace(make_config("gpt_neox", {**_TOY, "num_key_value_heads": 4}), tmp_path)
    kept = [each.name for entry in block_tape(model) for each in entry.saves]
    assert kept.count("input_layernorm.input") == 1
    assert "post_attention_layernorm.input" not in kept


def test_a_result_that_lies_in_one_matrix_is_held_whole(tmp_path: Path) -> None:
    model = trace(make_config("gpt_neox", {**_TOY, "num_key_value_heads": 4}), tmp_path)
    # Queries and keys are copied by the rotary embedding, and the result into the order of tokens.
    assert describe(model).attention.held == 64 + 64 + 64


def test_a_shared_matrix_says_how_many_heads_have_keys(tmp_path: Path) -> None:
    assert describe(trace(make_config("phi3", _TOY), tmp_path)).attention.num_kv_heads == 2


def test_a_final_norm_that_adds_one_begins_with_zeros(tmp_path: Path) -> None:
    assert describe(trace(make_config("gemma", _TOY), tmp_path)).final_norm.initial == "zeros"


def test_compiled_blocks_keep_what_kernels_keep(tmp_path: Path) -> None:
    described = describe(trace(make_config("olmo", _TOY), tmp_path))
    for own, plain in zip(described.block, without_code(described).block, strict=True):
        compiled = PLAIN._replace(compiles=True, casts_norms=True)
        assert own.record(compiled) == plain.record(compiled)


def test_a_dry_run_of_a_traced_model_holds_what_is_predicted(tmp_path: Path) -> None:
    model = trace(make_config("olmo", {**_TOY, "max_position_embeddings": 4096}), tmp_path)
    predicted, dry = rehearse(model, Layout(dp_shard=2, zero=3, micro_batch=1))
    assert predicted == pytest.approx(dry, rel=0.02)
