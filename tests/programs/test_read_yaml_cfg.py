"""YAML for Megatron-LM's --yaml-cfg: a file is understood field by field, and what is written is read back."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from megatron_jobs import draw_jobs, list_differences, list_options
from program_files import ROUND_TRIPS, check_any_value, check_rows, check_understood, compare_job

from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.programs.files.trees import read_tree
from dtlayout.programs.files.yaml import dump
from dtlayout.programs.megatron import read_yaml_cfg
from dtlayout.programs.program import nest
from dtlayout.programs.reading import READERS
from dtlayout.programs.understood import OtherFile

PATH = Path(__file__).parent / "yaml_cfg" / "gpt.yaml"
FOLDER = PATH.parent
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "cut.yaml": {
        "gpus": (0, 0),
        "told": {"overlap_dp": "false", "cuda_graphs": "attention"},
        "model": {
            "family": "llama", "num_layers": 80, "hidden_size": 8192, "ffn_size": 28672, "num_heads": 64,
            "vocab_size": 128512, "num_kv_heads": 8, "gated_ffn": True, "norm_eps": 1e-05, "tied_embeddings": False,
            "rope_theta": 500000.0,
        },
        "batch": {"seq_len": 8192, "global_batch": 256},
        "layout": {
            "tp": 4, "pp": 4, "micro_batch": 1, "sequence_parallel": True, "tp_overlap": True, "stage_layers": [19,
            21, 21, 19],
        },
        "precision": {"compute": "bfloat16", "matmuls": "mxfp8"},
        "optimizer": {"name": "sgd", "lr": 6e-05, "weight_decay": 0.0, "max_norm": 1.0, "momentum": 0.9},
    },
    "experts.yaml": {
        "gpus": (0, 0),
        "told": {"overlap_dp": "true"},
        "model": {
            "family": "mixtral", "num_layers": 32, "hidden_size": 4096, "ffn_size": 14336, "num_heads": 32,
            "vocab_size": 32000, "num_kv_heads": 8, "gated_ffn": True, "norm_eps": 1e-05, "tied_embeddings": False,
            "rope_theta": 1000000.0, "experts": {"number": 8, "per_token": 2, "balance_loss": 0.01,
            "ffn_size": 14336},
        },
        "batch": {"seq_len": 4096, "global_batch": 256},
        "layout": {
            "tp": 1, "pp": 4, "ep": 8, "micro_batch": 1, "sequence_parallel": False, "virtual_stages": 2,
            "schedule": "interleaved-1f1b",
        },
        "precision": {"compute": "bfloat16"},
        "optimizer": {"name": "adamw", "lr": 0.0001, "weight_decay": 0.1, "max_norm": 1.0},
    },
    "gpt.yaml": {
        "gpus": (0, 0),
        "told": {"overlap_dp": "true"},
        "model": {
            "family": "llama", "num_layers": 48, "hidden_size": 6144, "ffn_size": 16384, "num_heads": 48,
            "vocab_size": 64000, "num_kv_heads": 8, "gated_ffn": True, "norm_eps": 1e-05, "tied_embeddings": False,
            "rope_theta": 10000.0,
        },
        "batch": {"seq_len": 4096, "global_batch": 512},
        "layout": {
            "tp": 4, "pp": 4, "cp": 1, "ep": 1, "micro_batch": 1, "sequence_parallel": True, "tp_overlap": True,
            "virtual_stages": 2, "schedule": "interleaved-1f1b", "recompute": "full",
        },
        "precision": {"compute": "bfloat16", "matmuls": "fp8-tensorwise"},
        "optimizer": {
            "name": "adamw", "lr": 0.00012, "weight_decay": 0.1, "max_norm": 1.0, "beta1": 0.9, "beta2": 0.95,
        },
    },
    "long.yaml": {
        "gpus": (0, 0),
        "told": {"overlap_dp": "true"},
        "model": {
            "family": "llama", "num_layers": 32, "hidden_size": 4096, "ffn_size": 14336, "num_heads": 32,
            "vocab_size": 128256, "num_kv_heads": 8, "gated_ffn": True, "norm_eps": 1e-05, "rope_scaling":
            {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192},
            "tied_embeddings": False, "rope_theta": 500000.0,
        },
        "batch": {"seq_len": 65536, "global_batch": 32},
        "layout": {
            "tp": 2, "pp": 1, "cp": 4, "micro_batch": 1, "sequence_parallel": True, "tp_overlap": True,
            "cp_method": "all-to-all", "recompute": "every-2",
        },
        "precision": {"compute": "bfloat16", "reduce": "bfloat16"},
        "kernels": {"attention": "flash-attn"},
        "optimizer": {
            "name": "adamw", "lr": 2e-05, "weight_decay": 0.1, "max_norm": 1.0, "beta1": 0.9, "beta2": 0.95,
        },
    },
    "all_sharded.yaml": {
        "gpus": (0, 0),
        "told": {"overlap_dp": "true"},
        "model": {
            "family": "qwen2", "num_layers": 28, "hidden_size": 3584, "ffn_size": 18944, "num_heads": 28,
            "vocab_size": 152064, "num_kv_heads": 4, "gated_ffn": True, "norm_eps": 1e-06, "qkv_bias": True,
            "tied_embeddings": False, "rope_theta": 1000000.0,
        },
        "batch": {"seq_len": 8192, "global_batch": 256},
        "layout": {"tp": 1, "pp": 1, "micro_batch": 2, "sequence_parallel": False, "zero": 3},
        "precision": {"compute": "bfloat16"},
        "kernels": {"attention": "sdpa-cudnn"},
        "optimizer": {
            "name": "adamw", "lr": 0.0003, "weight_decay": 0.1, "max_norm": 1.0, "beta1": 0.9, "beta2": 0.95,
            "state_format": "bfloat16",
        },
    },
    "smallest.yaml": {
        "gpus": (0, 0),
        "told": {"overlap_dp": "false"},
        "model": {
            "family": "llama", "num_layers": 24, "hidden_size": 1024, "num_heads": 16, "vocab_size": 50304,
            "ffn_size": 4096, "num_kv_heads": 16, "gated_ffn": False, "norm_eps": 1e-05, "tied_embeddings": True,
        },
        "batch": {"seq_len": 1024, "global_batch": 64},
        "layout": {
            "tp": 1, "pp": 1, "cp": 1, "ep": 1, "micro_batch": 4, "sequence_parallel": True,
            "recompute": "selective",
        },
        "precision": {"compute": "float16"},
        "kernels": {"attention": "megatron-softmax"},
        "optimizer": {
            "name": "adamw", "lr": 0.00015, "weight_decay": 0.01, "max_norm": 1.0, "beta1": 0.9, "beta2": 0.999,
            "eps": 1e-08,
        },
    },
}  # fmt: skip
"""File → what it says, in our words, without the model's name."""


def read(text: str, num_gpus: int = 0) -> Any:
    file = OtherFile(PATH, text, read_tree(text, {}), {}, num_gpus)
    assert [each.title for each in READERS if each.is_ours(file)] == ["YAML for Megatron-LM's --yaml-cfg"]
    found = read_yaml_cfg.read(file)
    if found.problems:
        raise InvalidConfig(found.problems)
    return found


def change(before: str, after: str) -> Any:
    text = PATH.read_text()
    assert before in text
    return read(text.replace(before, after))


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_field_of_a_file_is_understood_and_each_name_has_a_row(name):
    found = check_understood(FOLDER / name, {"engine": "megatron", **UNDERSTOOD[name]})
    tree = read_tree((FOLDER / name).read_text(), {})
    assert tree is not None
    check_rows(found, tree.values)
    assert not any("--" in row.option for row in found.rows)


def test_what_differs_from_the_options_of_a_command():
    assert change("  overlap_p2p_comm: True\n", "").told["overlap_pp"] == "false"
    plain = change("num_layers_per_virtual_pipeline_stage: 6", "num_layers_per_virtual_pipeline_stage: null")
    idle = {row.option: row.note for row in plain.rows if row.how == "no effect"}
    assert idle["model_parallel.overlap_p2p_comm = true"] == "without num_layers_per_virtual_pipeline_stage"
    assert change("activation_func: swiglu", "activation_func: gelu").get("model", "gated_ffn") is False


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("spec: null", "spec: [a, b]", "spec is not understood here: nothing predicts blocks of several kinds"),
        ("activation_func: swiglu", "activation_func: relu", "language_model.activation_func=relu is nothing that"),
        ("window_size: null", "window_size: [128, 0]", "language_model.window_size=[128, 0] is not understood here"),
        (
            "transformer_impl: transformer_engine",
            "transformer_impl: inference",
            "transformer_impl is not understood here",
        ),
        ("stage: 6", "stage: 5", "num_layers_per_virtual_pipeline_stage 5 does not divide the 48 blocks of 4 ranks"),
        ("cpu_offloading: False", "cpu_offloading: True", "model_parallel.cpu_offloading=true is not understood here"),
    ],
)
def test_what_is_not_understood_is_named_as_the_file_has_it(before, after, problem):
    with pytest.raises(InvalidConfig) as caught:
        change(before, after)
    assert any(problem in each for each in caught.value.problems), caught.value.problems


def test_any_value_ends_in_a_job_or_is_refused():
    assert check_any_value(read_yaml_cfg.read, PATH) > 1000


def test_changes_are_written_under_names_that_the_file_has():
    tree = read_tree(PATH.read_text(), {})
    assert tree is not None
    options = {"--tensor-model-parallel-size": ["8"], "--use-distributed-optimizer": None, "--cp-comm-type": ["a2a"],
               "--fp8-format": None, "--fp8-recipe": None, "--use-megatron-fsdp": None}  # fmt: skip
    changes = read_yaml_cfg.to_own(options, tree.values)
    assert changes == {
        "model_parallel.tensor_model_parallel_size": 8, "use_distributed_optimizer": False, "use_megatron_fsdp": False,
        "language_model.cp_comm_type": "a2a", "language_model.fp8": None, "language_model.fp8_recipe": None,
    }  # fmt: skip
    found = read(tree.edit(changes), 64)
    assert found.tables["layout"].items() >= {"tp": 8, "dp_replicate": 2, "dp_shard": 1}.items()
    assert found.get("precision", "matmuls") is None


@ROUND_TRIPS
@given(draw_jobs())
def test_what_is_written_is_read_back(job):
    options = list_options(job)
    assume(options is not None)
    layout = job.layout
    if options.pop("--num-virtual-stages-per-pipeline-rank", None):
        blocks = job.model.num_layers // layout.pp // layout.virtual_stages
        options["--num-layers-per-virtual-pipeline-stage"] = [str(blocks)]
    own = read_yaml_cfg.to_own(options)
    own |= {"model_parallel.sequence_parallel": layout.sequence_parallel}
    found = read("\n".join(dump(nest(own))), layout.world_size)
    compare_job(job, found, list_differences(job))
    if layout.virtual_stages > 1:
        assert found.told.get("overlap_pp", "true") == str(job.scenario.engine.features.overlap_pp).lower()


def test_commands_take_such_a_file(capsys):
    assert main(["read", str(PATH)]) == 0
    said = capsys.readouterr().out
    assert "Megatron-LM" in said and "model_parallel.tensor_model_parallel_size = 4" in said
    assert main(["explain", str(PATH), "--gpu", "h100-80g-sxm", "--world", "64"]) == 0
    assert "tp4+sp" in capsys.readouterr().out
