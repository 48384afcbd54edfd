"""Megatron-Bridge's and NeMo 2's files and commands: each is understood field by field, under its own names."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from megatron_jobs import check_choices, draw_jobs, list_differences, list_options
from program_files import ROUND_TRIPS, check_any_value, check_rows, check_understood, compare_job

from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.programs.files.trees import read_tree
from dtlayout.programs.files.yaml import dump
from dtlayout.programs.nemo import read_bridge, read_nemo1, read_nemo2
from dtlayout.programs.program import nest
from dtlayout.programs.reading import READERS
from dtlayout.programs.understood import OtherFile

FOLDER = Path(__file__).parent
ADAM = {"name": "adamw", "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1}
CLIPPED = ADAM | {"max_norm": 1.0, "eps": 1e-8}
LLAMA = {
    "family": "llama", "gated_ffn": True, "tied_embeddings": False, "norm_eps": 1e-5, "rope_theta": 5e5,
    "vocab_size": 128256, "num_kv_heads": 8,
}  # fmt: skip
LLAMA_8B = LLAMA | {"num_layers": 32, "hidden_size": 4096, "ffn_size": 14336, "num_heads": 32}
LLAMA_70B = LLAMA | {"num_layers": 80, "hidden_size": 8192, "ffn_size": 28672, "num_heads": 64}
QWEN = {"gated_ffn": True, "tied_embeddings": False, "norm_eps": 1e-6, "rope_theta": 1e6}
EXPERTS = QWEN | {
    "family": "qwen3_moe", "qk_norm": True, "hidden_size": 2048, "ffn_size": 6144, "num_heads": 32, "num_kv_heads": 4,
    "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}
GIVEN: dict[str, dict[str, str]] = {
    "bridge/changes.yaml": {"recipe": "llama3_70b_pretrain_config"},
    "bridge/zoo.yaml": {"recipe": "qwen3_30b_a3b_pretrain_config", "TP": "1", "PP": "4", "EP": "8"},
}
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "bridge/saved.yaml": {
        "gpus": (16, 0), "told": {"overlap_dp": "true", "fused_loss": "always"},
        "model": LLAMA_8B | {"rope_scaling": SCALING},
        "batch": {"seq_len": 4096, "global_batch": 256},
        "layout": {
            "tp": 2, "pp": 1, "cp": 2, "ep": 1, "cp_method": "all-to-all", "micro_batch": 2, "sequence_parallel": True,
            "tp_overlap": True, "dp_shard": 4, "dp_replicate": 1, "recompute": "every-2",
        },
        "precision": {"compute": "bfloat16", "matmuls": "fp8-tensorwise", "reduce": "bfloat16"},
        "kernels": {"attention": "sdpa-cudnn"}, "optimizer": CLIPPED | {"lr": 2e-4, "weight_decay": 0.05},
    },
    "bridge/experts.yaml": {
        "gpus": (32, 0),
        "told": {"overlap_dp": "true", "cuda_graphs": "attention", "recompute_modules": "layernorm+moe_act"},
        "model": EXPERTS | {
            "num_layers": 24,
            "experts": {"number": 128, "per_token": 8, "ffn_size": 768, "balance_loss": 0.001, "dense_layers": 1},
        },
        "batch": {"seq_len": 8192, "global_batch": 1024},
        "layout": {
            "tp": 1, "pp": 2, "cp": 1, "ep": 16, "micro_batch": 1, "sequence_parallel": False, "virtual_stages": 2,
            "schedule": "interleaved-1f1b", "stage_layers": [5, 7, 6, 6], "dp_shard": 8, "dp_replicate": 2,
            "recompute": "selective", "ep_dispatcher": "deepep", "ep_overlap": True,
        },
        "precision": {"compute": "bfloat16", "matmuls": "mxfp8"},
        "optimizer": ADAM | {"lr": 1e-4, "state_format": "bfloat16"},
    },
    "bridge/changes.yaml": {
        "gpus": (0, 0), "told": {"overlap_dp": "true", "fused_loss": "always"}, "model": LLAMA_70B,
        "batch": {"seq_len": 16384, "global_batch": 128},
        "layout": {
            "tp": 4, "pp": 4, "cp": 4, "cp_method": "ring", "micro_batch": 1, "sequence_parallel": True,
            "tp_overlap": True, "virtual_stages": 10, "schedule": "interleaved-1f1b", "recompute": "full",
        },
        "precision": {"compute": "bfloat16", "matmuls": "mxfp8"}, "optimizer": CLIPPED | {"lr": 1.5e-4},
    },
    "bridge/older.yaml": {
        "gpus": (0, 0), "told": {"overlap_dp": "true"},
        "model": LLAMA | {
            "tied_embeddings": True, "num_layers": 14, "hidden_size": 2048, "ffn_size": 8192, "num_heads": 32,
        },
        "batch": {"seq_len": 8192, "global_batch": 64},
        "layout": {"tp": 1, "pp": 4, "micro_batch": 4, "sequence_parallel": False, "stage_layers": [3, 4, 4, 3]},
        "precision": {"compute": "bfloat16"},
        "optimizer": {"name": "sgd", "lr": 6e-4, "momentum": 0.95, "weight_decay": 0.0},
    },
    "bridge/zoo.yaml": {
        "gpus": (0, 0), "told": {"overlap_dp": "true", "fused_loss": "always"},
        "model": EXPERTS | {
            "num_layers": 48, "experts": {"number": 128, "per_token": 8, "ffn_size": 768, "balance_loss": 0.0},
        },
        "batch": {"seq_len": 4096, "global_batch": 256},
        "layout": {
            "tp": 1, "pp": 4, "cp": 1, "ep": 8, "micro_batch": 1, "sequence_parallel": True, "virtual_stages": 6,
            "schedule": "interleaved-1f1b", "ep_dispatcher": "deepep",
        },
        "precision": {"compute": "bfloat16"}, "kernels": {"attention": "flash-attn"},
        "optimizer": CLIPPED | {"lr": 3e-4},
    },
    "bridge/fsdp.yaml": {
        "gpus": (0, 0), "told": {"overlap_dp": "true"},
        "model": QWEN | {
            "family": "qwen2", "qkv_bias": True, "num_layers": 28, "hidden_size": 3584, "ffn_size": 18944,
            "num_heads": 28, "num_kv_heads": 4, "vocab_size": 152064,
        },
        "batch": {"seq_len": 4096, "global_batch": 512},
        "layout": {"tp": 1, "micro_batch": 4, "sequence_parallel": False, "zero": 3},
        "precision": {"compute": "bfloat16", "reduce": "bfloat16"}, "optimizer": {"name": "adamw", "lr": 1e-4},
    },
    "bridge/start.sh": {
        "gpus": (16, 8), "told": {"overlap_dp": "true", "fused_loss": "always"}, "model": LLAMA_8B,
        "batch": {"seq_len": 8192, "global_batch": 128},
        "layout": {
            "tp": 2, "pp": 1, "cp": 1, "micro_batch": 1, "sequence_parallel": True, "recompute": "selective",
            "dp_shard": 8, "dp_replicate": 1,
        },
        "precision": {"compute": "bfloat16", "matmuls": "fp8-tensorwise"}, "optimizer": CLIPPED | {"lr": 2.5e-4},
    },
    "bridge/nodes.sh": {
        "gpus": (16, 8), "told": {"overlap_dp": "true", "fused_loss": "always"},
        "model": QWEN | {
            "family": "qwen3", "qk_norm": True, "num_layers": 36, "hidden_size": 4096, "ffn_size": 12288,
            "num_heads": 32, "num_kv_heads": 8, "vocab_size": 151936,
        },
        "batch": {"seq_len": 4096, "global_batch": 128},
        "layout": {
            "tp": 2, "pp": 1, "cp": 1, "micro_batch": 4, "sequence_parallel": False, "dp_shard": 8, "dp_replicate": 1,
        },
        "precision": {"compute": "bfloat16"}, "optimizer": CLIPPED | {"lr": 1e-4},
    },
    "nemo2/recipe.yaml": {
        "gpus": (32, 8), "told": {"overlap_dp": "true", "fused_loss": "always"}, "model": LLAMA_8B,
        "batch": {"seq_len": 8192, "global_batch": 256},
        "layout": {
            "tp": 2, "pp": 2, "cp": 2, "ep": 1, "cp_method": "ring", "micro_batch": 2, "sequence_parallel": True,
            "tp_overlap": True, "virtual_stages": 4, "schedule": "interleaved-1f1b", "dp_shard": 4, "dp_replicate": 1,
        },
        "precision": {"compute": "bfloat16", "matmuls": "fp8-tensorwise", "reduce": "bfloat16"},
        "optimizer": CLIPPED | {"lr": 4e-4, "eps": 1e-5},
    },
    "nemo2/sizes.yaml": {
        "gpus": (128, 8), "told": {"overlap_dp": "true"},
        "model": {
            "family": "llama", "gated_ffn": False, "tied_embeddings": True, "num_layers": 40, "hidden_size": 5120,
            "ffn_size": 20480, "num_heads": 40, "num_kv_heads": 40, "vocab_size": 51200,
        },
        "batch": {"seq_len": 4096, "global_batch": 1024},
        "layout": {
            "tp": 2, "micro_batch": 1, "sequence_parallel": True, "zero": 2, "dp_shard": 64, "dp_replicate": 1,
            "recompute": "selective",
        },
        "precision": {"compute": "bfloat16"}, "optimizer": ADAM | {"lr": 2e-4},
    },
    "nemo2/start.sh": {
        "gpus": (128, 8), "told": {"overlap_dp": "true", "overlap_pp": "false", "fused_loss": "always"},
        "model": LLAMA_70B,
        "batch": {"seq_len": 8192, "global_batch": 256},
        "layout": {
            "tp": 8, "pp": 4, "cp": 2, "cp_method": "ring", "micro_batch": 1, "sequence_parallel": True,
            "virtual_stages": 10, "schedule": "interleaved-1f1b", "dp_shard": 2, "dp_replicate": 1,
        },
        "precision": {"compute": "bfloat16"}, "optimizer": CLIPPED | {"lr": 1e-4, "eps": 1e-5},
    },
    "nemo2/experts.yaml": {
        "gpus": (64, 8),
        "told": {"overlap_dp": "true"},
        "model": {
            "family": "mixtral", "num_layers": 32, "hidden_size": 4096, "ffn_size": 14336, "num_heads": 32,
            "vocab_size": 32000, "num_kv_heads": 8, "gated_ffn": True, "norm_eps": 1e-05, "tied_embeddings": False,
            "rope_theta": 1000000.0, "experts": {"number": 8, "per_token": 2, "ffn_size": 14336,
            "balance_loss": 0.0},
        },
        "batch": {"seq_len": 4096, "global_batch": 512},
        "layout": {
            "tp": 1, "pp": 4, "cp": 1, "ep": 8, "micro_batch": 1, "sequence_parallel": True,
            "virtual_stages": 8, "schedule": "interleaved-1f1b", "dp_shard": 16, "dp_replicate": 1,
        },
        "precision": {"compute": "bfloat16", "reduce": "bfloat16"},
        "optimizer": {
            "name": "adamw", "lr": 0.0003, "weight_decay": 0.1, "max_norm": 1.0, "beta1": 0.9, "beta2": 0.95,
        },
    },
    "nemo2/latent.yaml": {
        "gpus": (16, 8),
        "told": {"overlap_dp": "true"},
        "model": {
            "family": "deepseek_v2", "num_layers": 27, "hidden_size": 2048, "ffn_size": 10944, "num_heads": 16,
            "vocab_size": 102400, "latent_attention": {"query_rank": 0, "kv_rank": 512, "rope_width": 64,
            "value_width": 128}, "head_dim": 192, "num_kv_heads": 16, "gated_ffn": True, "tied_embeddings": False,
            "rope_theta": 10000.0, "experts": {"number": 64, "per_token": 6, "ffn_size": 1408,
            "shared_ffn_size": 2816, "score": "softmax", "groups": 1, "groups_per_token": 1, "scale": 1.0,
            "balance_loss": 0.001, "dense_layers": 1},
        },
        "batch": {"seq_len": 4096, "global_batch": 256},
        "layout": {
            "tp": 1, "ep": 8, "micro_batch": 2, "sequence_parallel": False, "dp_shard": 16, "dp_replicate": 1,
            "recompute": "selective",
        },
        "precision": {"compute": "bfloat16"},
        "optimizer": {
            "name": "adamw", "lr": 0.00042, "weight_decay": 0.1, "max_norm": 1.0, "beta1": 0.9, "beta2": 0.95,
        },
    },
    "nemo2/tuning.yaml": {
        "gpus": (4, 4),
        "told": {"overlap_dp": "false"},
        "model": {
            "family": "qwen2", "num_layers": 28, "hidden_size": 3584, "ffn_size": 18944, "num_heads": 28,
            "vocab_size": 152064, "num_kv_heads": 4, "gated_ffn": True, "norm_eps": 1e-06, "qkv_bias": True,
            "tied_embeddings": False, "rope_theta": 1000000.0,
        },
        "batch": {"seq_len": 2048, "global_batch": 128},
        "layout": {
            "tp": 4, "pp": 1, "cp": 1, "micro_batch": 1, "sequence_parallel": True, "dp_shard": 1,
            "dp_replicate": 1,
        },
        "precision": {"compute": "bfloat16"},
        "optimizer": {
            "name": "adamw", "lr": 5e-06, "weight_decay": 0.1, "max_norm": 1.0, "beta1": 0.9, "beta2": 0.98,
        },
    },
    "nemo2/long.yaml": {
        "gpus": (256, 8),
        "told": {"overlap_dp": "true", "cuda_graphs": "full"},
        "model": {
            "family": "llama", "num_layers": 80, "hidden_size": 8192, "ffn_size": 28672, "num_heads": 64,
            "vocab_size": 128256, "num_kv_heads": 8, "gated_ffn": True, "norm_eps": 1e-05, "tied_embeddings": False,
            "rope_theta": 500000.0,
        },
        "batch": {"seq_len": 65536, "global_batch": 64},
        "layout": {
            "tp": 8, "pp": 4, "cp": 4, "micro_batch": 1, "sequence_parallel": True, "tp_overlap": True,
            "cp_method": "ring", "virtual_stages": 5, "schedule": "interleaved-1f1b", "dp_shard": 1, "dp_replicate": 2,
            "recompute": "every-4",
        },
        "precision": {"compute": "bfloat16", "matmuls": "mxfp8"},
        "optimizer": {
            "name": "adamw", "lr": 0.00015, "weight_decay": 0.1, "max_norm": 1.0, "beta1": 0.9, "beta2": 0.95,
            "eps": 1e-05, "state_format": "bfloat16",
        },
    },
    "nemo2/changed.sh": {
        "gpus": (64, 8),
        "told": {"overlap_dp": "true", "fused_loss": "always"},
        "model": {
            "family": "llama", "num_layers": 32, "hidden_size": 4096, "ffn_size": 14336, "num_heads": 32,
            "vocab_size": 128256, "num_kv_heads": 8, "gated_ffn": True, "norm_eps": 1e-05, "tied_embeddings": False,
            "rope_theta": 500000.0,
        },
        "batch": {"seq_len": 8192, "global_batch": 128},
        "layout": {
            "tp": 2, "pp": 1, "cp": 2, "ep": 1, "micro_batch": 2, "sequence_parallel": True, "tp_overlap": True,
            "cp_method": "ring", "dp_shard": 16, "dp_replicate": 1, "recompute": "full",
        },
        "precision": {"compute": "bfloat16", "matmuls": "fp8-tensorwise", "reduce": "bfloat16"},
        "optimizer": {
            "name": "adamw", "lr": 0.0004, "weight_decay": 0.1, "max_norm": 1.0, "beta1": 0.9, "beta2": 0.95,
            "eps": 1e-05,
        },
    },
}  # fmt: skip
"""File → what it says, in our words, without the model's name."""


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_field_of_a_file_is_understood_and_each_name_has_a_row(name):
    path = FOLDER / name
    found = check_understood(path, {"engine": "megatron", **UNDERSTOOD[name]}, GIVEN.get(name))
    tree = read_tree(path.read_text(), {})
    names = tree.values if tree else re.findall(r"(?<=[\s+'])[a-z_]+\.[a-z_.]+(?==)", path.read_text())
    check_rows(found, {each for each in names if each not in ("trainer.callbacks", "trainer.plugins")})
    if tree is not None:
        assert not any("--" in row.option for row in found.rows)


def test_every_file_of_the_folders_is_held_against_what_it_says():
    files = [*(FOLDER / "bridge").iterdir(), *(FOLDER / "nemo2").iterdir()]
    assert {str(each.relative_to(FOLDER)) for each in files} == set(UNDERSTOOD)


def read(text: str, name: str = "file", **given: str) -> Any:
    file = OtherFile(FOLDER / name, text, read_tree(text, given), given)
    found = next(each for each in (read_nemo2, read_bridge) if each.is_ours(file)).read(file)
    if found.problems:
        raise InvalidConfig(list(dict.fromkeys(found.problems)))
    return found


def change(name: str, *pairs: tuple[str, str]) -> Any:
    text = (FOLDER / name).read_text()
    for before, after in pairs:
        assert before in text, before
        text = text.replace(before, after)
    return read(text, name, **GIVEN.get(name, {}))


def list_rows(found: Any, how: str) -> dict[str, str]:
    """Option → note, of the options that play one part."""
    return {each.option: each.note for each in found.rows if each.how == how}


def test_what_a_recipe_or_a_class_says_is_marked():
    rows = list_rows(change("bridge/changes.yaml"), "read")
    assert rows["recipe llama3_70b_pretrain_config"] == "the values of that name"
    assert rows["model.num_layers = 80"] == "of recipe llama3_70b_pretrain_config"
    assert rows["train.global_batch_size = 128"] == ""
    assert list_rows(change("bridge/older.yaml"), "read")["model_config.hidden_size = 2048"] == "of that class"
    assert list_rows(change("nemo2/start.sh"), "read")["data.seq_length = 8192"] == "of that factory"
    newer = change("bridge/start.sh", ("llama3_8b_pretrain_config", "llama3_8b_pretrain_2gpu_h100_bf16_config"))
    assert newer.get("model", "num_layers") == 32


def test_what_overlaps_is_said_by_comm_overlap_where_it_is_there():
    found = change("bridge/experts.yaml")
    idle, assumed = list_rows(found, "no effect"), list_rows(found, "assumed")
    assert idle["ddp.overlap_grad_reduce = false"] == "comm_overlap.overlap_grad_reduce says it"
    assert assumed["comm_overlap.overlap_grad_reduce"] == "the default of comm_overlap"
    assert found.told["overlap_dp"] == "true" and "overlap_pp" not in found.told
    text = (FOLDER / "bridge/experts.yaml").read_text()
    without = read(re.sub(r"comm_overlap:\n(  .*\n)+", "comm_overlap: null\n", text))
    assert without.told["overlap_dp"] == "false" and without.told["overlap_pp"] == "false"
    assert without.get("layout", "ep_overlap") is None
    saved = list_rows(change("bridge/saved.yaml", ("tp_comm_overlap: true\n  tp_comm_overlap_cfg", "x: null\n  y")),
                      "no effect")  # fmt: skip
    assert saved["model.tp_comm_overlap = true"] == "comm_overlap.tp_comm_overlap says it"


def test_formats_are_said_by_mixed_precision_where_it_is_there():
    found = change(
        "bridge/saved.yaml", ("  fp8: hybrid\n  fp8_amax_compute_algo", "  fp8: null\n  fp8_amax_compute_algo")
    )
    assert found.get("precision", "matmuls") is None
    assert list_rows(found, "no effect")["model.fp8 = hybrid"] == "mixed_precision.fp8 says it"
    half = change("bridge/changes.yaml", ("bf16_with_mxfp8_mixed", "fp16-mixed"))
    assert half.tables["precision"] == {"compute": "float16"}
    plain = change("nemo2/recipe.yaml", ("    grad_reduce_in_fp32: false\n", ""))
    assert plain.get("precision", "reduce") is None


def test_what_has_no_effect_is_said():
    saved = list_rows(change("bridge/saved.yaml"), "no effect")
    assert saved["ddp.data_parallel_sharding_strategy = no_shard"] == "without ddp.use_megatron_fsdp"
    assert saved["model.moe_router_topk = 2"] == "without model.num_moe_experts"
    assert saved["comm_overlap.overlap_p2p_comm = false"] == "without model.virtual_pipeline_model_parallel_size"
    recipe = list_rows(change("nemo2/recipe.yaml"), "no effect")
    name = "trainer.strategy.ddp.data_parallel_sharding_strategy = optim_grads_params"
    assert recipe[name] == "without trainer.strategy.fsdp"
    assert recipe["trainer.strategy.ddp.overlap_grad_reduce = false"].startswith("trainer.callbacks[1].overlap_grad")
    longer = list_rows(change("bridge/changes.yaml", ("  seq_length: 16384", "  seq_length: 8192")), "no effect")
    assert longer["model.seq_length = 8192"] == "dataset.sequence_length says it"


def test_callbacks_that_watch_a_run_are_ignored_and_others_are_refused_by_name():
    rows = {
        row.option for row in change("nemo2/experts.yaml").rows if row.note == "about the length of the run, and logs"
    }
    assert any(row.startswith("trainer.callbacks[1] = nemo.lightning.pytorch.callbacks.garbage") for row in rows)
    for name in ("MegatronTokenDropCallback", "DeepEPCallback", "ModelTransform", "LayerFreezer"):
        with pytest.raises(InvalidConfig, match=rf"trainer.callbacks\[1\]={name} is not understood here"):
            change("nemo2/experts.yaml", ("GarbageCollectionCallback", name))


def test_a_command_changes_nothing_in_a_list_of_the_yaml_that_it_names(capsys):
    found = change("nemo2/changed.sh")
    assert found.get("layout", "tp_overlap") is True and list_rows(found, "read")["data.micro_batch_size = 2"] == ""
    options = {"--tp-comm-overlap": None, "--tensor-model-parallel-size": ["4"]}
    assert read_nemo2.to_own(options, found.own) == {"trainer.strategy.tensor_model_parallel_size": 4}
    assert main(["explain", str(FOLDER / "nemo2/changed.sh"), "--gpu", "h100-80g-sxm"]) == 0
    said = capsys.readouterr().out
    assert "data.micro_batch_size = 8 (was 2)" in said.partition("as changes of")[2] and "trainer.callbacks" not in said


def test_formats_of_the_optimizers_state():
    found = change("bridge/experts.yaml")
    assert list_rows(found, "assumed")["optimizer.main_grads_dtype._target_ = torch.bfloat16"] == "predicted as fp32"
    with pytest.raises(InvalidConfig) as caught:
        change("bridge/experts.yaml", ("use_precision_aware_optimizer: true", "use_precision_aware_optimizer: false"))
    assert caught.value.problems == [
        "optimizer.exp_avg_dtype._target_ bf16, optimizer.exp_avg_sq_dtype._target_ bf16, "
        "optimizer.main_grads_dtype._target_ bf16 needs optimizer.use_precision_aware_optimizer"
    ]
    before = "exp_avg_sq_dtype:\n    _call_: false\n    _target_: torch.bfloat16"
    with pytest.raises(InvalidConfig, match="is not predicted; fp32 or bf16 for both is"):
        change("bridge/experts.yaml", (before, before.replace("bfloat16", "float16")))


def test_latent_attention_and_another_backend_are_read():
    latent = (
        "multi_latent_attention: true\n  q_lora_rank: 768\n  kv_lora_rank: 256\n  qk_head_dim: 64\n  v_head_dim: 96"
    )
    found = change("bridge/saved.yaml", ("multi_latent_attention: false", latent))
    assert found.get("model", "latent_attention") == {
        "query_rank": 768, "kv_rank": 256, "rope_width": 64, "value_width": 96
    }  # fmt: skip
    assert (found.get("model", "head_dim"), found.get("model", "num_kv_heads")) == (128, 32)
    idle = list_rows(found, "no effect")
    assert idle["model.num_query_groups = 8"] == "with model.multi_latent_attention"
    experts = change("bridge/experts.yaml", ("dispatcher_backend: deepep", "dispatcher_backend: hybridep"))
    assert list_rows(experts, "assumed")["model.moe_flex_dispatcher_backend = hybridep"] == "predicted as deepep"


def test_stages_may_count_the_table_and_the_loss_as_blocks():
    only = change("bridge/older.yaml", ("account_for_loss_in_pipeline_split: true", "x: null"),
                  ("num_layers: 14", "num_layers: 15"))  # fmt: skip
    assert only.get("layout", "stage_layers") == [3, 4, 4, 4]
    with pytest.raises(InvalidConfig, match=r"15 blocks, with those of model_config\.account_for_embedding.*, are no "
                                            "multiple of 4 stages"):  # fmt: skip
        change("bridge/older.yaml", ("num_layers: 14", "num_layers: 15"))


@pytest.mark.parametrize(
    ("name", "change_of", "problem"),
    [
        ("bridge/saved.yaml", ("gated_linear_unit: true", "new_thing: 3"), "model.new_thing is not understood here"),
        ("bridge/saved.yaml", ("num_layers: 32", "num_layers: some"), "model.num_layers=some is no whole number above"),
        ("bridge/saved.yaml", ("    - 2\n", "    - 9\n"), "model.attention_backend._args_=[9] is nothing that is"),
        ("bridge/saved.yaml", ("softmax_type: vanilla", "softmax_type: learnable"),
         "model.softmax_type=learnable is not understood here; vanilla is"),
        ("bridge/saved.yaml", ("window_size: null", "window_size: [127, 0]"), "model.window_size=[127, 0] is not"),
        ("bridge/saved.yaml", ("fp8_recipe: tensorwise\n  fp8_wgrad", "fp8_recipe: own\n  fp8_wgrad"),
         "mixed_precision.fp8_recipe own is nothing that is known here; use"),
        ("bridge/saved.yaml", ("peft: null", "peft:\n  _target_: megatron.bridge.peft.lora.LoRA"),
         "peft._target_ is not understood here"),
        ("bridge/saved.yaml", ("optimizer_cpu_offload: false", "optimizer_cpu_offload: true"),
         "optimizer.optimizer_cpu_offload=true is not understood here; false is"),
        ("bridge/experts.yaml", ("expert_tensor_parallel_size: 1", "expert_tensor_parallel_size: 2"),
         "experts are cut by 2 ranks of tp, which is not predicted; model.expert_tensor_parallel_size 1 is"),
        ("bridge/experts.yaml", ("dispatcher_backend: deepep", "dispatcher_backend: mine"),
         "model.moe_flex_dispatcher_backend mine is nothing that is known here; use deepep"),
        ("bridge/experts.yaml", ("[0, 1, 1,", "[0, 1, 0,"), "only dense blocks before those with experts"),
        ("bridge/experts.yaml", ("num_distributed_optimizer_instances: 2", "num_distributed_optimizer_instances: 3"),
         "ddp.num_distributed_optimizer_instances 3 does not divide dp = 16"),
        ("bridge/changes.yaml", ("bf16_with_mxfp8_mixed", "bf16_with_int8"), "mixed_precision=bf16_with_int8 is"),
        ("bridge/fsdp.yaml", ("Qwen25ModelProvider7B", "Qwen25ModelProvider"), "--given recipe=NAME says it, with one"),
        ("bridge/start.sh", ("llama3_8b_pretrain_config", "mine_pretrain_config"),
         "recipe mine_pretrain_config is in the program's code; llama2_7b_pretrain_config, "),
        ("bridge/start.sh", ("train.train_iters=20", "$MORE"), "$MORE may hold options, and is set by no line"),
        ("bridge/start.sh", ("train.train_iters=20", "model.num_layers=$L"), "model.num_layers is $L, set by no line"),
        ("bridge/nodes.sh", ("--max_steps 100", "--new 1"), "--new is not understood here; without it the rest can"),
        ("nemo2/recipe.yaml", ("fsdp: null", "fsdp: pytorch"), "trainer.strategy.fsdp=pytorch is nothing that is"),
        ("nemo2/recipe.yaml", ("precision: bf16-mixed", "precision: int8"), "trainer.plugins.precision=int8 is"),
        ("nemo2/recipe.yaml", ("grad_batches: 1", "grad_batches: 4"), "trainer.accumulate_grad_batches=4 is not under"),
        ("nemo2/recipe.yaml", ("tensor_model_parallel_size: 2", "tensor_model_parallel_size: 3"),
         "32 GPUs are no multiple of tp * pp * cp = 12"),
        ("nemo2/recipe.yaml", ("Llama3Config8B", "LlamaConfig"), "the file does not say the sizes of the model"),
        ("nemo2/start.sh", ("llama3_70b(", "mine("), "recipe mine(num_nodes=16, name='long') is in the program's code"),
        ("nemo2/start.sh", ("name='long'", "performance_mode=True"), "argument performance_mode of recipe llama3_70b"),
        ("nemo2/start.sh", ("pretrain", "finetune"), "nemo llm finetune is not understood here; nemo llm pretrain is"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named_as_the_file_has_it(name, change_of, problem):
    with pytest.raises(InvalidConfig) as caught:
        change(name, change_of)
    assert any(problem in each for each in caught.value.problems), caught.value.problems


def test_a_value_that_the_file_does_not_say_is_asked_for():
    with pytest.raises(InvalidConfig) as caught:
        read((FOLDER / "bridge/zoo.yaml").read_text(), recipe="qwen3_30b_a3b_pretrain_config", PP="4", EP="8")
    assert caught.value.problems == [
        "ConfigContainer.model.tensor_model_parallel_size is ${TP}, said by no line of the file: "
        "--given TP=VALUE says it"
    ]


def test_a_command_may_name_a_file_beside_it(tmp_path):
    (tmp_path / "changes.yaml").write_text((FOLDER / "bridge/changes.yaml").read_text())
    command = "torchrun --nproc-per-node 8 --nnodes 32 run_recipe.py --recipe llama3_70b_pretrain_config --config-file "
    text = f"{command} changes.yaml model.tensor_model_parallel_size=8\n"
    file = OtherFile(tmp_path / "start.sh", text, None)
    found = read_bridge.read(file)
    assert not found.problems and found.num_gpus == 256
    assert found.tables["layout"].items() >= {"tp": 8, "cp": 4, "recompute": "full"}.items()
    with pytest.raises(InvalidConfig, match=r"the config file others\.yaml is not there"):
        read_bridge.read(file._replace(text=text.replace("changes", "others")))
    (tmp_path / "recipe.yaml").write_text((FOLDER / "nemo2/recipe.yaml").read_text())
    text = "nemo llm pretrain --yaml recipe.yaml trainer.num_nodes=2 trainer.callbacks=null"
    found = read_nemo2.read(OtherFile(tmp_path / "start.sh", text, None))
    assert not found.problems and found.num_gpus == 16 and found.told["overlap_dp"] == "false"


@pytest.mark.parametrize(
    "text",
    [
        "model: {name: llama3.1-8b}\ntrain: {steps: 3}\nbatch: {global_batch: 8}",
        "general: {project: x}\nparallelism: {dp: 2}\nmodel: {model_config: {hidden_size: 16}}",
        "recipe: Train\nmodel: {_target_: nemo_automodel.NeMoAutoModelForCausalLM}\ndistributed: {tp_size: 2}",
        "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16",
        "base_model: x\nmicro_batch_size: 2\nsequence_len: 4096", "trainer: {devices: 8}\nmodel: {micro_batch_size: 1}",
        "train: {global_batch_size: 8, micro_batch_size: 1}\nmodel_name: pythia\nprecision: bf16-true",
        "python train.py --config-file some.yaml model.lr=3", "python run_recipe.py", "pip install nemo",
    ],
)  # fmt: skip
def test_files_of_others_are_none_of_theirs(text):
    file = OtherFile(Path("file.yaml"), text, read_tree(text, {}))
    assert not read_bridge.is_ours(file) and not read_nemo2.is_ours(file)


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_one_reader_alone_takes_a_file(name):
    text = (FOLDER / name).read_text()
    file = OtherFile(FOLDER / name, text, read_tree(text, {}))
    assert len([each.title for each in READERS if each.is_ours(file)]) == 1 and not read_nemo1.is_ours(file)


@pytest.mark.parametrize(("name", "reader"), [("bridge/fsdp.yaml", read_bridge), ("nemo2/sizes.yaml", read_nemo2)])
def test_any_value_ends_in_a_job_or_is_refused(name, reader):
    assert check_any_value(reader.read, FOLDER / name) > 300


def test_changes_are_written_under_names_that_the_file_has():
    tree = read_tree((FOLDER / "bridge/saved.yaml").read_text(), {})
    assert tree is not None
    options = {
        "--tensor-model-parallel-size": ["4"], "--context-parallel-size": ["1"], "--overlap-grad-reduce": None,
        "--fp8-format": None, "--fp8-recipe": None, "--attention-backend": ["flash"], "--seq-length": ["8192"],
        "--recompute-granularity": ["selective"], "--recompute-method": None, "--recompute-num-layers": None,
    }  # fmt: skip
    changes = read_bridge.to_own(options, tree.values)
    assert changes == {
        "model.tensor_model_parallel_size": 4, "model.context_parallel_size": 1,
        "comm_overlap.overlap_grad_reduce": False, "ddp.overlap_grad_reduce": False, "mixed_precision.fp8": None,
        "model.fp8": None, "mixed_precision.fp8_recipe": None, "model.fp8_recipe": None,
        "model.attention_backend._args_": [1], "dataset.sequence_length": 8192, "model.seq_length": 8192,
        "model.recompute_granularity": "selective", "model.recompute_method": None, "model.recompute_num_layers": None,
    }  # fmt: skip
    found = read(tree.edit(changes))
    layout = {"tp": 4, "cp": 1, "recompute": "selective", "dp_shard": 4}
    assert found.tables["layout"].items() >= layout.items() and found.told["overlap_dp"] == "false"
    assert found.tables["kernels"] == {"attention": "flash-attn"} and found.num_gpus == 16
    named = read_tree((FOLDER / "bridge/changes.yaml").read_text(), {})
    assert named is not None
    assert read_bridge.to_own({"--fp8-format": ["hybrid"], "--fp8-recipe": ["tensorwise"], "--bf16": []}, named.values
                              ) == {"mixed_precision": "bf16_with_fp8_current_scaling_mixed"}  # fmt: skip
    with pytest.raises(InvalidConfig, match="--squared-relu is nothing that it has a name for"):
        read_bridge.to_own({"--squared-relu": []})


def test_changes_of_a_list_of_classes_are_written_whole():
    tree = read_tree((FOLDER / "nemo2/recipe.yaml").read_text(), {})
    assert tree is not None
    options = {"--tp-comm-overlap": None, "--tensor-model-parallel-size": ["1"], "--bf16": [], "--fp16": None}
    changes = read_nemo2.to_own(options, tree.values)
    callbacks = changes.pop("trainer.callbacks")
    assert changes == {"trainer.strategy.tensor_model_parallel_size": 1, "trainer.plugins.precision": "bf16-mixed"}
    assert [each.get("tp_comm_overlap") for each in callbacks] == [None, False]
    found = read("\n".join(dump(nest({**tree.values, **changes, "trainer.callbacks": callbacks}))))
    assert found.get("layout", "tp") == 1 and found.get("layout", "tp_overlap") is None


def check_round_trip(job: Any, own: dict[str, Any]) -> None:
    found = read("\n".join(dump(nest(own))))
    compare_job(job, found, list_differences(job))
    features = job.scenario.engine.features
    assert found.told["overlap_dp"] == str(features.overlap_dp).lower() or job.layout.dp == 1
    assert found.told.get("cuda_graphs", "none") == features.cuda_graphs
    check_choices(job, found)
    if job.layout.virtual_stages > 1:
        assert found.told.get("overlap_pp", "true") == str(features.overlap_pp).lower()


@ROUND_TRIPS
@given(draw_jobs())
def test_what_is_written_is_read_back(job):
    options = list_options(job)
    assume(options is not None)
    layout, bridge = job.layout, read_bridge.to_own(options)
    dp = layout.world_size // (layout.tp * layout.pp * layout.cp)
    bridge |= {"comm_overlap.data_parallel_size": dp, "comm_overlap.overlap_param_gather": None}
    overlaps = {f"comm_overlap.{name.partition('.')[2]}": bridge[name] for name in (
        "model.tp_comm_overlap", "model.overlap_moe_expert_parallel_comm", "model.overlap_p2p_comm",
        "ddp.overlap_grad_reduce",
    )}  # fmt: skip
    check_round_trip(job, {**bridge, **overlaps})
    devices = min(8, layout.world_size)
    nemo = read_nemo2.to_own(options)
    nemo |= {"trainer.devices": devices, "trainer.num_nodes": layout.world_size // devices}
    nemo |= {"_target_": "nemo.collections.llm.api.pretrain"}
    check_round_trip(job, nemo)


def test_commands_take_such_a_file(capsys):
    path = str(FOLDER / "bridge/saved.yaml")
    assert main(["read", path]) == 0
    said = capsys.readouterr().out
    assert "Megatron-Bridge, 16 GPUs" in said and "model.tensor_model_parallel_size = 2" in said
    assert main(["explain", path, "--gpu", "h100-80g-sxm"]) == 0
    said = capsys.readouterr()
    assert "is read as a job of Megatron-Bridge" in said.err and "tp2+sp" in said.out
    changes = str(FOLDER / "bridge/changes.yaml")
    assert main(["explain", changes, "--gpu", "h100-80g-sxm"]) == 2
    assert "--given recipe=NAME says it" in capsys.readouterr().err
    given = ["--given", "recipe=llama3_70b_pretrain_config", "--world", "256"]
    assert main(["explain", changes, "--gpu", "b200-180g-sxm", *given]) == 0
    recipe = str(FOLDER / "nemo2/recipe.yaml")
    assert main(["explain", recipe, "--gpu", "h100-80g-sxm"]) == 0
    assert "is read as a job of NeMo 2" in capsys.readouterr().err
