"""Files of a folder are read as the planner reads them, and counted beside the class of `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from benchmarks.every_decoder import Numbers, Read, print_folder, read_config, read_folder, strip_reason

SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 128,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
DEEPSEEK_V2: dict[str, Any] = {
    **SMALL, "model_type": "deepseek_v2", "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    "moe_layer_freq": 1, "scoring_func": "softmax", "aux_loss_alpha": 0.001, "seq_aux": True,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


def write(folder: Path, name: str, config: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps(config))


def test_each_file_of_a_folder_is_held_against_its_class(tmp_path, capsys):
    write(tmp_path, "a", {**SMALL, "model_type": "llama"})
    write(tmp_path, "b", {**SMALL, "model_type": "gpt_neox"})
    write(tmp_path, "c", {"model_type": "own"})
    found = {each.name: each for each in read_folder(tmp_path)}
    assert [each.how for each in found.values()] == ["described", "traced", "refused"]
    assert found["a"].is_same and found["b"].is_same and not found["c"].is_same
    assert found["c"].note == f"transformers {transformers.__version__} knows no model_type='own'"
    print_folder(tmp_path)
    page = capsys.readouterr().out
    assert "Of 3 files of published models 2 are planned: 1 described, 1 traced." in page
    assert f"| a | described | {found['a'].parameters:,} | same |" in page


def test_a_count_that_differs_is_said(tmp_path):
    write(tmp_path, "a", {**SMALL, "model_type": "llama"})
    ours = next(read_folder(tmp_path)).parameters
    theirs = Numbers(parameters=ours - 7, stored=ours - 3)
    assert read_config("a", tmp_path / "a.json", theirs) == Read("a", "described", "+7", ours)
    assert read_config("a", tmp_path / "a.json", theirs._replace(stored=ours)).is_same
    assert read_config("a", tmp_path / "a.json", None).note == "no class"


@pytest.mark.parametrize("rank", [None, 24], ids=["lite", "with a query rank"])
def test_a_deepseek_v2_is_planned_with_or_without_a_rank_of_queries(rank, tmp_path):
    write(tmp_path, "a", {**DEEPSEEK_V2, "q_lora_rank": rank})
    assert next(read_folder(tmp_path)).is_same


def test_a_number_that_is_missing_is_named(tmp_path):
    write(tmp_path, "a", {**DEEPSEEK_V2, "num_experts_per_tok": None})
    assert next(read_folder(tmp_path)).note == "num_experts_per_tok is missing: it is null"


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("model x/a.json: model_type='b' cannot be traced: its forward fails: ValueError: no", None),
        ("model x/a.json: model_type='b' is neither described nor traced: it has blocks: two", "it has blocks: two"),
        ("model x/a.json: num_heads is missing: it is null", "num_heads is missing: it is null"),
    ],
)
def test_a_reason_is_told_whole(problem, reason):
    assert strip_reason(problem) == (reason or "its forward fails: ValueError: no")


def test_keys_that_transformers_does_not_read_change_nothing(tmp_path):
    write(tmp_path, "a", {
        **SMALL, "model_type": "starcoder2", "norm_epsilon": 1e-5, "layer_norm_epsilon": 1e-5, "mlp_type": "default",
        "norm_type": "layer_norm", "num_key_value_heads": 2,
    })  # fmt: skip
    write(tmp_path, "b", {
        **SMALL, "model_type": "gemma2", "sliding_window": 16, "sliding_window_size": 16, "num_key_value_heads": 2,
    })  # fmt: skip
    assert [(each.how, each.is_same) for each in read_folder(tmp_path)] == [("described", True)] * 2
    write(tmp_path, "a", {**SMALL, "model_type": "starcoder2", "norm_type": "rms_norm"})
    assert next(read_folder(tmp_path)).how == "refused"
