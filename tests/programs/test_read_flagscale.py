"""YAML of FlagScale, and of Megatron-LM's own options: each file is understood field by field under its own names."""

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
from dtlayout.programs.megatron import read_flagscale
from dtlayout.programs.program import nest
from dtlayout.programs.reading import read_program
from dtlayout.programs.understood import OtherFile

FOLDER = Path(__file__).parent / "flagscale"
LLAMA = {"family": "llama", "gated_ffn": True, "tied_embeddings": False}
ADAM = {"name": "adamw", "beta1": 0.9, "beta2": 0.95, "max_norm": 1.0}
QWEN: dict[str, Any] = {
    "gpus": (32, 8), "told": {"overlap_dp": "true"},
    "model": LLAMA | {
        "family": "qwen3_moe", "qk_norm": True, "num_layers": 48, "hidden_size": 2048, "ffn_size": 6144,
        "num_heads": 32, "num_kv_heads": 4, "head_dim": 128, "vocab_size": 151872, "norm_eps": 1e-6,
        "rope_theta": 1e6, "experts": {"number": 128, "per_token": 8, "ffn_size": 768, "balance_loss": 0.001},
    },
    "batch": {"seq_len": 4096, "global_batch": 512},
    "layout": {
        "tp": 1, "pp": 2, "cp": 1, "ep": 8, "micro_batch": 1, "sequence_parallel": True, "dp_shard": 16,
        "dp_replicate": 1,
    },
    "precision": {"compute": "bfloat16"}, "optimizer": ADAM | {"lr": 3e-4, "weight_decay": 0.1},
}  # fmt: skip
DENSE: dict[str, Any] = {
    "gpus": (64, 8), "told": {"overlap_dp": "true"},
    "model": LLAMA | {
        "num_layers": 80, "hidden_size": 8192, "ffn_size": 28672, "num_heads": 64, "num_kv_heads": 8,
        "vocab_size": 128512, "norm_eps": 1e-5, "rope_theta": 5e5,
    },
    "batch": {"seq_len": 8192, "global_batch": 512},
    "layout": {
        "tp": 8, "pp": 4, "micro_batch": 1, "sequence_parallel": True, "virtual_stages": 4,
        "schedule": "interleaved-1f1b", "dp_shard": 2, "dp_replicate": 1, "recompute": "full",
    },
    "precision": {"compute": "bfloat16"}, "kernels": {"attention": "flash-attn"}, "optimizer": ADAM | {"lr": 1.2e-4},
}  # fmt: skip
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "llama/train.yaml": DENSE,
    "llama/train/70b.yaml": DENSE,
    "qwen/pretrain.yaml": QWEN,
    "qwen/train/30b_a3b.yaml": QWEN | {"batch": {"seq_len": 4096, "global_batch": 128}},
    "older.yaml": {
        "gpus": (0, 0), "told": {"overlap_dp": "false"},
        "model": LLAMA | {
            "num_layers": 32, "hidden_size": 4096, "ffn_size": 11008, "num_heads": 32, "num_kv_heads": 32,
            "vocab_size": 100096, "norm_eps": 1e-5,
        },
        "batch": {"seq_len": 2048, "global_batch": 1728},
        "layout": {"tp": 2, "pp": 1, "micro_batch": 2, "sequence_parallel": False},
        "precision": {"compute": "float16"}, "kernels": {"attention": "flash-attn"},
        "optimizer": ADAM | {"lr": 2e-5, "weight_decay": 0.01},
    },
    "cut.yaml": {
        "gpus": (0, 0), "told": {"overlap_dp": "false"},
        "model": LLAMA | {
            "num_layers": 30, "hidden_size": 4096, "ffn_size": 11008, "num_heads": 32, "num_kv_heads": 32,
            "vocab_size": 32000,
        },
        "batch": {"seq_len": 16384, "global_batch": 64},
        "layout": {
            "tp": 2, "pp": 4, "cp": 2, "cp_method": "all-to-all", "micro_batch": 1, "sequence_parallel": True,
            "tp_overlap": True, "stage_layers": [7, 8, 8, 7], "recompute": "every-2",
        },
        "precision": {"compute": "bfloat16", "matmuls": "fp8-tensorwise", "reduce": "bfloat16"},
        "kernels": {"attention": "sdpa-cudnn"}, "optimizer": {"name": "sgd", "momentum": 0.8, "lr": 1e-4},
    },
    "recipe.yaml": {
        "gpus": (0, 0), "told": {"overlap_dp": "true"},
        "model": LLAMA | {
            "family": "mixtral", "num_layers": 32, "hidden_size": 4096, "ffn_size": 14336, "num_heads": 32,
            "num_kv_heads": 8, "vocab_size": 32000, "norm_eps": 1e-5, "rope_theta": 1e6,
            "experts": {"number": 8, "per_token": 2, "ffn_size": 14336, "balance_loss": 0.01, "dense_layers": 2},
        },
        "batch": {"seq_len": 4096, "global_batch": 256},
        "layout": {
            "tp": 2, "pp": 4, "cp": 1, "ep": 8, "micro_batch": 1, "sequence_parallel": True, "ep_dispatcher": "deepep",
        },
        "precision": {"compute": "bfloat16"}, "optimizer": ADAM | {"lr": 1.2e-4, "weight_decay": 0.1},
    },
    "dashes.yaml": {
        "gpus": (0, 0), "told": {"overlap_dp": "true"},
        "model": LLAMA | {
            "num_layers": 40, "hidden_size": 5120, "ffn_size": 13824, "num_heads": 40, "num_kv_heads": 40,
            "vocab_size": 32256,
        },
        "batch": {"seq_len": 4096, "global_batch": 128},
        "layout": {"tp": 4, "pp": 2, "cp": 1, "micro_batch": 2, "sequence_parallel": True, "recompute": "selective"},
        "precision": {"compute": "bfloat16"}, "optimizer": ADAM | {"lr": 1.2e-4, "weight_decay": 0.1},
    },
}  # fmt: skip
"""File → what it says, in our words, without the model's name."""
GIVEN = {"dashes.yaml": {"TP": "4", "PP": "2"}}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_field_of_a_file_is_understood_and_each_name_has_a_row(name):
    found = check_understood(FOLDER / name, {"engine": "megatron", **UNDERSTOOD[name]}, GIVEN.get(name))
    tree = read_tree((FOLDER / name).read_text(), {})
    assert tree is not None
    check_rows(found, {each.removeprefix("train.") for each in tree.values})
    assert not any("--" in row.option.replace("MODEL_ARGS.--", "") for row in found.rows), "names are the file's"


def test_every_file_of_the_folder_is_held_against_what_it_says():
    assert {str(each.relative_to(FOLDER)) for each in FOLDER.rglob("*.yaml")} == set(UNDERSTOOD)


def read(text: str, path: Path = FOLDER / "file.yaml", num_gpus: int = 0, **given: str) -> Any:
    found = read_flagscale.read(OtherFile(path, text, read_tree(text, given), given, num_gpus))
    if found.problems:
        raise InvalidConfig(found.problems)
    return found


def list_rows(name: str, how: str, *changes: tuple[str, str]) -> dict[str, str]:
    """Option → note, of the options that play one part."""
    text = (FOLDER / name).read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return {each.option: each.note for each in read(text).rows if each.how == how}


def test_what_is_assumed_and_what_has_no_effect_are_said_by_their_own_names():
    assert list_rows("cut.yaml", "no effect") == {
        "model.optimizer.adam_beta1 = 0.9": "with model.optimizer.optimizer = sgd"
    }
    assert list_rows("older.yaml", "no effect") == {"model.weight_decay = 0.1": "model.optimizer.weight_decay says it"}
    assumed = list_rows("older.yaml", "assumed")
    width = "model.multiple_of = 256, model.hidden_size = 4096"
    assert assumed[width] == "its default, a multiple of model.multiple_of"
    wider = (" 256", " 256\n  ffn_hidden_size: 11264\n  hidden_dim_multiplier: 1.3")
    assert list_rows("older.yaml", "no effect", wider).items() >= {
        "model.multiple_of = 256": "model.ffn_hidden_size says it",
        "model.hidden_dim_multiplier = 1.3": "model.ffn_hidden_size says it",
    }.items()  # fmt: skip
    groups = ("swiglu: true", "swiglu: true\n  num_query_groups: 4\n  use_rope_scaling: false")
    assert list_rows("cut.yaml", "no effect", groups).items() >= {
        "model.num_query_groups = 4": "without model.group_query_attention"
    }.items()  # fmt: skip
    denied = list_rows("cut.yaml", "read", ("sequence_parallel: true", "sequence_parallel: false"))
    assert "system.sequence_parallel = false" in denied


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("swiglu: true", "swiglu: true\n  new_thing: 3"), "model.new_thing is not understood here; without it"),
        (("num_layers: 30", "num_layers: thirty"), "model.num_layers=thirty is no whole number above 0"),
        (("num_layers: 30", "num_layers: [30, 40]"), "model.num_layers has 2 values, and takes one"),
        (("num_layers: 30", "num_layers: ${L}"), "model.num_layers is ${L}, said by no line of the file: --given L="),
        (("parallel_size: 4", "parallel_size: 0"), "system.pipeline_model_parallel_size=0 is no whole number above 0"),
        (("swiglu: true", "swiglu: 3"), "model.swiglu takes no value, and has 3"),
        (("swiglu: true", "swiglu: ${S}"), "model.swiglu is ${S}, said by no line of the file: --given S="),
        (("cp_comm_type: a2a", "cp_comm_type: p2p+a2a"), "system.cp_comm_type p2p+a2a is nothing that is known here"),
        (("recipe: tensorwise", "recipe: own"), "system.precision.fp8_recipe own is nothing that is known here; use"),
        (("optimizer: sgd", "optimizer: lion"), "model.optimizer.optimizer lion is nothing that is known here"),
        (("backend: fused", "backend: own"), "system.attention_backend own is nothing that is known here"),
        (("enable_hetero: false", "enable_hetero: true"), "system.hetero.enable_hetero is not understood here"),
        (("swiglu: true", "swiglu: true\n  transformer_impl: inference"),
         "model.transformer_impl is not understood here"),
        (("swiglu: true", "swiglu: true\n  num_experts: 8"),
         "experts are cut by 2 ranks of tp, which is not predicted; system.expert_tensor_parallel_size 1 is"),
        (("swiglu: true", "swiglu: true\n  num_experts: 8\n  moe_layer_freq: 2"),
         "model.moe_layer_freq = 2: only dense blocks before those with experts"),
        (("decoder_last_pipeline_num_layers: 7", "pipeline_model_parallel_layout: Et|x"),
         "system.pipeline_model_parallel_layout Et|x: 'x' is no part of a stage"),
        (("decoder_last_pipeline_num_layers: 7", "num_layers_per_virtual_pipeline_stage: 4"),
         "system.num_layers_per_virtual_pipeline_stage 4 does not divide the 30 blocks of 4 ranks"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named_as_the_file_has_it(change, problem):
    text = (FOLDER / "cut.yaml").read_text()
    assert change[0] in text
    with pytest.raises(InvalidConfig) as caught:
        read(text.replace(*change))
    assert any(problem in each for each in caught.value.problems), caught.value.problems


def test_gpus_that_the_layout_does_not_divide_are_refused():
    with pytest.raises(InvalidConfig, match=re.escape("24 GPUs are no multiple of tp * pp * cp = 16")):
        read((FOLDER / "cut.yaml").read_text(), num_gpus=24)
    with pytest.raises(InvalidConfig, match=r"system.num_distributed_optimizer_instances 2 does not divide dp = 1"):
        read((FOLDER / "cut.yaml").read_text(), num_gpus=16)
    assert read((FOLDER / "cut.yaml").read_text(), num_gpus=32).get("layout", "dp_replicate") == 2


def test_an_experiment_says_the_gpus():
    text = (FOLDER / "llama" / "train.yaml").read_text()
    path = FOLDER / "llama" / "train.yaml"
    assert read(text.replace("nnodes: 8", 'nnodes: "16:16"'), path).num_gpus == 128
    assert read(text.replace("0,1,2,3,4,5,6,7", '"0,1,2,3"').replace("nnodes: 8", "nnodes: 16"), path).num_gpus == 64
    assert read(text, path, num_gpus=32).num_gpus == 32
    alone = text.replace("    nnodes: 8\n", "").replace("hostfile: /work/hosts", "hostfile: null")
    with pytest.raises(InvalidConfig, match="8 GPUs are no multiple"):
        read(alone, path)
    hosts = read(text.replace("    nnodes: 8\n", ""), path)  # a file of hosts that is not here
    assert (hosts.num_gpus, hosts.gpus_per_node) == (0, 8)
    with pytest.raises(InvalidConfig, match="8 GPUs are no multiple"):
        read(text.replace("    nnodes: 8\n", "    nnodes: 8\n    per_node_task: true\n"), path)


def test_an_experiment_without_its_options_is_refused():
    text, path = (FOLDER / "llama" / "train.yaml").read_text(), FOLDER / "llama" / "train.yaml"
    with pytest.raises(InvalidConfig, match=r"defaults name train: 7b, and train/7b\.yaml is not there"):
        read(text.replace("train: 70b", "train: 7b"), path)
    with pytest.raises(InvalidConfig, match=r"experiment\.task\.backend=vllm is none of Megatron-LM's"):
        read(text.replace("backend: megatron", "backend: vllm"), path)
    with pytest.raises(InvalidConfig, match="defaults name no file of options"):
        read(text.replace("  - train: 70b\n", ""), path)


def test_of_two_experiments_that_name_a_file_none_is_chosen(tmp_path):
    (tmp_path / "train").mkdir()
    options = (FOLDER / "llama" / "train" / "70b.yaml").read_text()
    (tmp_path / "train" / "70b.yaml").write_text(options)
    experiment = (FOLDER / "llama" / "train.yaml").read_text()
    (tmp_path / "one.yaml").write_text(experiment)
    assert read(options, tmp_path / "train" / "70b.yaml").num_gpus == 64
    (tmp_path / "two.yaml").write_text(experiment.replace("nnodes: 8", "nnodes: 4"))
    assert read(options, tmp_path / "train" / "70b.yaml").num_gpus == 0


@pytest.mark.parametrize(
    "text",
    [
        "model: {name: llama3.1-8b}\ntrain: {steps: 3}", "parallelism: {tp: 2}\nmodel: {model_config: {num_layers: 2}}",
        "model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM}\ndistributed: {tp_size: 1}",
        "compute_environment: LOCAL_MACHINE\nnum_processes: 8", "base_model: meta/Llama-3.1-8B\nsequence_len: 512",
        "experiment: {runner: {nnodes: 2}}", "system: {}\nmodel: {name: x}",
    ],
)  # fmt: skip
def test_files_of_others_are_none_of_these(text):
    assert not read_flagscale.is_ours(OtherFile(Path("file.yaml"), text, read_tree(text, {})))


def test_changes_are_written_where_the_file_has_them():
    values = read_tree((FOLDER / "cut.yaml").read_text(), {}).values  # type: ignore[union-attr]
    changes = {"--tensor-model-parallel-size": ["4"], "--bf16": [], "--swiglu": None, "--recompute-method": None,
               "--sequence-parallel": None, "--global-batch-size": ["96"], "--overlap-grad-reduce": []}  # fmt: skip
    assert read_flagscale.to_own(changes, values) == {
        "system.tensor_model_parallel_size": 4, "system.precision.bf16": True, "model.swiglu": False,
        "system.recompute.recompute_method": None, "system.sequence_parallel": False, "model.global_batch_size": 96,
        "system.overlap_grad_reduce": True,
    }  # fmt: skip
    recipe = read_tree((FOLDER / "dashes.yaml").read_text(), {}).values  # type: ignore[union-attr]
    assert read_flagscale.to_own({"--bf16": None, "--cp-comm-type": ["a2a"]}, recipe) == {
        "MODEL_ARGS.--bf16": False, "MODEL_ARGS.--cp-comm-type": "a2a",
    }  # fmt: skip


def test_any_value_ends_in_a_job_or_is_refused():
    assert check_any_value(read_flagscale.read, FOLDER / "cut.yaml") > 500


@ROUND_TRIPS
@given(draw_jobs())
def test_what_is_written_is_read_back(job):
    options = list_options(job)
    assume(options is not None)
    text = "\n".join(dump(nest(read_flagscale.to_own(options))))
    found = read(text, num_gpus=job.layout.world_size)
    compare_job(job, found, list_differences(job))
    features = job.scenario.engine.features
    assert found.told.get("overlap_dp") == str(features.overlap_dp).lower() or job.layout.dp == 1
    assert found.told.get("cuda_graphs", "none") == features.cuda_graphs
    check_choices(job, found)


def test_commands_take_such_a_file(capsys):
    path = str(FOLDER / "llama" / "train.yaml")
    assert main(["read", path]) == 0
    said = capsys.readouterr().out
    assert "FlagScale, 64 GPUs, 8 a node" in said and "system.tensor_model_parallel_size = 8" in said
    assert main(["explain", path, "--gpu", "h100-80g-sxm"]) == 0
    said = capsys.readouterr()
    assert "is read as a job of FlagScale" in said.err and "tp8+sp" in said.out
    assert read_program(Path(__file__).parents[2] / "configs" / "debug.toml", {}) is None
