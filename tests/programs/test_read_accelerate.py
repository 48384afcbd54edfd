"""accelerate's YAML: each file is understood field by field, and what is chosen for a job is read back."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from program_files import ROUND_TRIPS, check_rows, check_understood
from trainer_jobs import compare, draw_jobs, read_text, to_yaml

from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.config.loading import parse_config
from dtlayout.programs.files.trees import read_tree
from dtlayout.programs.hugging_face.accelerate import choose_options
from dtlayout.programs.reading import read_program
from dtlayout.programs.understood import Understood

FOLDER = Path(__file__).parent / "accelerate"
FP32 = {"compute": "float32", "params": "float32", "reduce": "float32"}
BF16 = {"compute": "bfloat16", "params": "float32", "reduce": "bfloat16"}
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "several_gpus.yaml": {
        "gpus": (4, 4), "engine": "accelerate", "precision": BF16 | {"reduce": "float32"},
        "layout": {"zero": 1, "dp_replicate": 4, "dp_shard": 1}, "kernels": {"compile": "model"},
    },
    "first_fsdp.yaml": {
        "gpus": (16, 8), "engine": "accelerate", "precision": BF16,
        "layout": {"zero": 3, "dp_replicate": 2, "dp_shard": 8, "recompute": "full"},
    },
    "by_number.yaml": {
        "gpus": (8, 8), "engine": "accelerate", "precision": FP32,
        "layout": {"zero": 2, "dp_replicate": 1, "dp_shard": 8, "offload": "optimizer"},
    },
    "second_fsdp.yaml": {
        "gpus": (8, 8), "engine": "accelerate", "precision": BF16 | {"matmuls": "fp8-tensorwise"},
        "layout": {"zero": 2, "dp_replicate": 1, "dp_shard": 8},
    },
    "four_axes.yaml": {
        "gpus": (32, 8), "engine": "accelerate", "precision": BF16,
        "layout": {
            "tp": 2, "cp": 2, "cp_method": "ring", "sequence_parallel": False, "zero": 3, "dp_replicate": 2,
            "dp_shard": 4,
        },
    },
    "own_words_for_deepspeed.yaml": {
        "gpus": (2, 2), "engine": "deepspeed", "told": {"overlap_dp": "false"}, "precision": BF16,
        "layout": {"zero": 2, "dp_replicate": 1, "dp_shard": 2, "offload": "optimizer"},
        "optimizer": {"max_norm": 0.5},
    },
    "file_for_deepspeed.yaml": {
        "gpus": (16, 8), "engine": "deepspeed", "told": {"overlap_dp": "true"}, "precision": BF16,
        "layout": {"zero": 3, "dp_replicate": 1, "dp_shard": 16, "micro_batch": 1}, "batch": {"global_batch": 64},
    },
    "one_gpu.yaml": {
        "gpus": (1, 1), "engine": "accelerate", "precision": FP32 | {"compute": "float16"},
        "layout": {"zero": 1, "dp_replicate": 1, "dp_shard": 1},
    },
}  # fmt: skip
"""File → what it says, in our words; the model and the batch are the script's."""
BESIDE = {"stage3.json"}
"""Files that others name."""


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_field_of_a_file_is_understood(name):
    found = check_understood(FOLDER / name, UNDERSTOOD[name])
    batch = {"seq_len": 2048, "global_batch": 128, **found.tables.get("batch", {})}
    parse_config({**found.tables, "batch": batch, "model": {"name": "llama3.1-8b"}, "train": {"steps": 1}})


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_option_of_a_file_has_a_row(name):
    found, tree = read_program(FOLDER / name, {}), read_tree((FOLDER / name).read_text(), {})
    assert found is not None and tree is not None
    check_rows(found, tree.values)


def test_every_file_of_the_folder_is_held_against_what_it_says():
    assert {each.name for each in FOLDER.iterdir()} == set(UNDERSTOOD) | BESIDE


def change(tmp_path: Path, name: str, num_gpus: int = 0, **values: Any) -> Understood:
    """A file of the folder with other values by dotted names, `__` for a dot; None takes one out."""
    tree = read_tree((FOLDER / name).read_text(), {})
    assert tree is not None
    for beside in BESIDE:
        (tmp_path / beside).write_text((FOLDER / beside).read_text())
    changes = {key.replace("__", "."): value for key, value in values.items()}
    return read_text(tmp_path, name, tree.edit(changes), num_gpus)


def list_rows(found: Understood, how: str) -> dict[str, str]:
    """Option → note, of the options that play one part."""
    return {row.option: row.note for row in found.rows if row.how == how}


def test_what_has_no_effect_is_said(tmp_path):
    second = list_rows(change(tmp_path, "second_fsdp.yaml"), "no effect")
    assert second == {"fsdp_config.fsdp_sharding_strategy = FULL_SHARD": "FSDP 2 asks reshard_after_forward"}
    copies = list_rows(change(tmp_path, "second_fsdp.yaml", distributed_type="MULTI_GPU"), "no effect")
    assert copies["fsdp_config.fsdp_version = 2"] == "with distributed_type MULTI_GPU"
    alone = list_rows(change(tmp_path, "second_fsdp.yaml", num_processes=1), "no effect")
    assert alone["fsdp_config.fsdp_reshard_after_forward = false"] == "one GPU shares its state with nobody"
    first = change(tmp_path, "first_fsdp.yaml", fsdp_config__fsdp_reshard_after_forward=True)
    assert list_rows(first, "no effect") == {
        "fsdp_config.fsdp_reshard_after_forward = true": "FSDP 1 asks for a strategy"
    }
    beside = change(tmp_path, "file_for_deepspeed.yaml", deepspeed_config__zero_stage=2)
    assert list_rows(beside, "no effect")["deepspeed_config.zero_stage = 2"] == "stage3.json says it"
    method = change(tmp_path, "four_axes.yaml", parallelism_config__parallelism_config_cp_size=1,
                    parallelism_config__parallelism_config_dp_shard_size=8)  # fmt: skip
    assert "parallelism_config.parallelism_config_cp_comm_strategy = alltoall" in list_rows(method, "no effect")


def test_strategies_of_the_first_fsdp_are_stages_of_zero(tmp_path):
    def read(strategy: str | int, nodes: int = 2) -> dict[str, Any]:
        values = {"fsdp_config__fsdp_sharding_strategy": strategy, "num_machines": nodes}
        return change(tmp_path, "first_fsdp.yaml", **values).tables["layout"]

    assert read("FULL_SHARD").items() >= {"zero": 3, "dp_replicate": 1, "dp_shard": 16}.items()
    assert read("SHARD_GRAD_OP").items() >= {"zero": 2, "dp_replicate": 1, "dp_shard": 16}.items()
    assert read("NO_SHARD").items() >= {"zero": 1, "dp_replicate": 16, "dp_shard": 1}.items()
    assert read("HYBRID_SHARD_ZERO2", 4).items() >= {"zero": 2, "dp_replicate": 4, "dp_shard": 4}.items()
    assert read(4) == read("HYBRID_SHARD")
    named = change(tmp_path, "first_fsdp.yaml", fsdp_config__fsdp_sharding_strategy=None,
                   fsdp_config__fsdp_reshard_after_forward="SHARD_GRAD_OP")  # fmt: skip
    assert named.get("layout", "zero") == 2


def test_one_gpu_is_meant_where_nothing_is_distributed(tmp_path):
    found = change(tmp_path, "one_gpu.yaml", num_processes=None, mixed_precision="fp8", fp8_config__backend="TE")
    assert (found.num_gpus, found.gpus_per_node) == (1, 1) and found.get("precision", "matmuls") == "fp8-tensorwise"


def test_the_stage_of_zero_is_2_where_accelerate_is_not_told(tmp_path):
    assert (
        change(tmp_path, "own_words_for_deepspeed.yaml", deepspeed_config__zero_stage=None).get("layout", "zero") == 2
    )


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("several_gpus.yaml", {"distributed_type": "MEGATRON_LM"},
         "distributed_type=MEGATRON_LM is nothing that is known"),
        ("several_gpus.yaml", {"compute_environment": "AMAZON_SAGEMAKER"}, "only files for LOCAL_MACHINE are read"),
        ("several_gpus.yaml", {"use_cpu": True}, "use_cpu = true: training on CPUs is not predicted"),
        ("several_gpus.yaml", {"dynamo_config__dynamo_backend": "ONNXRT"}, "dynamo_backend=ONNXRT is nothing that is"),
        ("several_gpus.yaml", {"new_thing": 1}, "new_thing is not understood here"),
        ("first_fsdp.yaml", {"fsdp_config__fsdp_auto_wrap_policy": "NO_WRAP"}, "gathers the whole model at once"),
        ("first_fsdp.yaml", {"fsdp_config__fsdp_sharding_strategy": "HALF"}, "fsdp_sharding_strategy=HALF is nothing"),
        ("first_fsdp.yaml",
         {"fsdp_config__fsdp_offload_params": True, "fsdp_config__fsdp_sharding_strategy": "NO_SHARD"},
         "fsdp_config.fsdp_offload_params = true beside NO_SHARD is not predicted"),
        ("second_fsdp.yaml", {"fp8_config__backend": "MSAMP"}, "fp8_config.backend=MSAMP is nothing that is known"),
        ("four_axes.yaml", {"num_processes": 30}, "30 GPUs are no multiple of tp * cp = 4"),
        ("four_axes.yaml", {"num_processes": 64}, "2 copies of 4 shards"),
        ("four_axes.yaml", {"parallelism_config__parallelism_config_sp_size": 2}, "sequence parallelism by DeepSpeed"),
        ("four_axes.yaml", {"parallelism_config__parallelism_config_dp_shard_size": 1, "num_processes": 8},
         "accelerate has no copies beside tp or cp without shards"),
        ("several_gpus.yaml", {"parallelism_config__parallelism_config_dp_shard_size": 4},
         "dp_shard=4 is without FSDP"),
        ("own_words_for_deepspeed.yaml", {"mixed_precision": "bf8"}, "mixed_precision=bf8 is nothing that is known"),
        ("file_for_deepspeed.yaml", {"deepspeed_config__deepspeed_config_file": "none.json"},
         "deepspeed_config.deepspeed_config_file none.json is not there, beside the file"),
        ("file_for_deepspeed.yaml", {"mixed_precision": "fp16"}, "bf16.enabled=true computes in bfloat16, and"),
    ],
)  # fmt: skip
def test_what_is_not_understood_or_contradicts_is_named(tmp_path, name, values, problem):
    with pytest.raises(InvalidConfig) as caught:
        change(tmp_path, name, **values)
    assert any(problem in each for each in caught.value.problems), caught.value.problems


@ROUND_TRIPS
@given(draw_jobs(degrees=True, hybrids=True, adapters=False))
def test_what_is_chosen_for_a_job_is_read_back(tmp_path_factory, job):
    options, gaps = choose_options(job)
    found = read_text(tmp_path_factory.mktemp("job"), "job.yaml", to_yaml(options))
    assert found.num_gpus == job.layout.world_size
    found.put("layout", {"micro_batch": job.layout.micro_batch}, "")
    found.put("batch", {"seq_len": 4096, "global_batch": job.scenario.batch.global_batch}, "")
    differ = {"optimizer", "kernels"}
    if job.scenario.precision.params == "bfloat16":  # the script loads its weights
        differ |= {"params", "reduce"}
    differ |= {"recompute"} if any("layout.recompute" in gap for gap in gaps) else set()
    differ |= {"reduce"} if any("precision.reduce" in gap for gap in gaps) else set()
    if any(gap.startswith("overlap_dp") for gap in gaps):
        found.told["overlap_dp"] = str(job.scenario.engine.features.overlap_dp).lower()
    compare(job, found, differ)


def test_explain_predicts_a_file_with_a_model(capsys):
    file, job = str(FOLDER / "first_fsdp.yaml"), ["--model", "llama3.1-8b", "--batch.seq_len=4096"]
    asked = [*job, "--batch.global_batch=16", "--gpu", "a100-80g-sxm"]
    assert main(["explain", file, *asked, "--json"]) == 0
    said = capsys.readouterr()
    assert "is read as a job of Hugging Face accelerate" in said.err
    document = json.loads(said.out)
    assert document["gpus"] == 16 and document["engine"] == "accelerate" and document["fits"]
    assert main(["explain", file, *asked, "--batch.global_batch=64", "--json"]) == 0
    more = json.loads(capsys.readouterr().out)
    whole = 2 * 8.03e9 * (1 - 1 / 8)  # gradients of several microbatches are added up whole, in bf16
    assert more["peak_memory_bytes"] - document["peak_memory_bytes"] == pytest.approx(whole, rel=0.35)


def test_our_own_configs_and_those_of_others_are_none_of_accelerates():
    root = Path(__file__).parents[2]
    assert read_program(root / "configs" / "debug.toml", {}) is None


def test_read_shows_each_option_and_writes_our_config(tmp_path, capsys):
    config = tmp_path / "job.toml"
    assert main(["read", str(FOLDER / "four_axes.yaml"), "--output", str(config)]) == 0
    said = capsys.readouterr().out
    assert "Hugging Face accelerate, 32 GPUs, 8 a node" in said and "layout.cp_method=ring" in said
    assert config.read_text().startswith(
        "# A job of Hugging Face accelerate: dtlayout explain FILE --engine accelerate"
    )
    assert "tp = 2" in config.read_text()
