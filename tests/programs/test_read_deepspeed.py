"""DeepSpeed's JSON: each file is understood field by field, and what is chosen for a job is read back."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from program_files import ROUND_TRIPS, check_rows, check_understood
from trainer_jobs import compare, draw_jobs, read_text, to_json

from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.config.loading import parse_config
from dtlayout.programs.files.trees import read_tree
from dtlayout.programs.hugging_face.deepspeed import choose_options
from dtlayout.programs.reading import read_program
from dtlayout.programs.understood import Understood

FOLDER = Path(__file__).parent / "deepspeed"
BF16 = {"compute": "bfloat16", "params": "float32", "reduce": "bfloat16"}
OVERLAPS, WAITS = {"overlap_dp": "true"}, {"overlap_dp": "false"}
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "filled_by_the_trainer.json": {"told": OVERLAPS, "precision": BF16, "layout": {"zero": 3}},
    "numbers.json": {
        "told": OVERLAPS, "precision": {"compute": "float16", "params": "float32", "reduce": "float16"},
        "layout": {"zero": 2, "micro_batch": 4}, "batch": {"global_batch": 128},
        "optimizer": {
            "name": "adamw", "lr": 3e-5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "max_norm": 1.0,
        },
    },
    "on_the_host.json": {
        "told": WAITS, "precision": BF16, "layout": {"zero": 3, "offload": "optimizer", "micro_batch": 2},
        "optimizer": {"max_norm": float("inf")},
    },
    "on_disk.json": {
        "told": OVERLAPS, "precision": BF16, "layout": {"zero": 3, "offload": "disk", "micro_batch": 1},
    },
    "gradients_in_fp32.json": {
        "told": WAITS, "precision": {"compute": "bfloat16", "params": "float32", "reduce": "float32"},
        "layout": {"zero": 1}, "batch": {"global_batch": 64}, "optimizer": {"name": "adamw"},
    },
    "copies.json": {"told": WAITS, "precision": BF16, "layout": {"zero": 1, "micro_batch": 8}},
    "masters_in_bf16.json": {
        "told": WAITS, "precision": {"compute": "bfloat16", "params": "bfloat16", "reduce": "bfloat16"},
        "layout": {"zero": 2, "micro_batch": 1},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0},
    },
}  # fmt: skip
"""File → what it says, in our words; no file says GPUs, nor the model."""


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_field_of_a_file_is_understood(name):
    found = check_understood(FOLDER / name, {"engine": "deepspeed", "gpus": (0, 0), **UNDERSTOOD[name]})
    batch = {"seq_len": 2048, "global_batch": 128, **found.tables.get("batch", {})}
    parse_config({**found.tables, "batch": batch, "model": {"name": "llama3.1-8b"}, "train": {"steps": 1}})


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_option_of_a_file_has_a_row(name):
    found = read_program(FOLDER / name, {})
    tree = read_tree((FOLDER / name).read_text(), {})
    assert found is not None and tree is not None
    check_rows(found, tree.values)


def test_every_file_of_the_folder_is_held_against_what_it_says():
    assert {each.name for each in FOLDER.iterdir()} == set(UNDERSTOOD)


def change(tmp_path: Path, name: str, num_gpus: int = 0, **values: Any) -> Understood:
    """A file of the folder with other values by dotted names, `__` for a dot; None takes one out."""
    tree = read_tree((FOLDER / name).read_text(), {})
    assert tree is not None
    changes = {key.replace("__", "."): value for key, value in values.items()}
    return read_text(tmp_path, name, tree.edit(changes), num_gpus)


def list_rows(found: Understood, how: str) -> dict[str, str]:
    """Option → note, of the options that play one part."""
    return {row.option: row.note for row in found.rows if row.how == how}


def test_degrees_and_the_batch_follow_from_the_number_of_gpus(tmp_path):
    found = change(tmp_path, "numbers.json", 8)
    assert found.tables["layout"] == {"zero": 2, "micro_batch": 4, "dp_replicate": 1, "dp_shard": 8}
    assert change(tmp_path, "copies.json", 4).tables["layout"].items() >= {"dp_replicate": 4, "dp_shard": 1}.items()
    assert change(tmp_path, "on_the_host.json", 4).get("batch", "global_batch") == 2 * 16 * 4
    fewer = change(tmp_path, "numbers.json", 8, train_micro_batch_size_per_gpu=None)
    assert fewer.get("layout", "micro_batch") == 4
    assert change(tmp_path, "gradients_in_fp32.json", 16).get("layout", "micro_batch") == 2


def test_what_has_no_effect_is_said(tmp_path):
    first = list_rows(change(tmp_path, "gradients_in_fp32.json"), "no effect")
    assert first == {
        "zero_optimization.offload_param.device = cpu": "stage 1 keeps parameters whole: stage 3 offloads them"
    }
    alone = list_rows(change(tmp_path, "numbers.json", 1, train_batch_size=16), "no effect")
    assert alone["zero_optimization.stage = 2"] == "one GPU shares its state with nobody"
    copies = list_rows(change(tmp_path, "copies.json", zero_optimization__offload_optimizer__device="cpu"), "no effect")
    assert copies == {
        "zero_optimization.stage = 0": "each GPU has all of the state",
        "zero_optimization.offload_optimizer.device = cpu": "stage 0 shares no state that the host could have",
    }  # fmt: skip
    disk = list_rows(change(tmp_path, "on_disk.json"), "no effect")
    assert disk.keys() == {"activation_checkpointing.partition_activations = true",
                           "activation_checkpointing.cpu_checkpointing = false"}  # fmt: skip
    states = change(tmp_path, "masters_in_bf16.json", bf16__bf16_master_weights_and_grads=False)
    assert "bf16.bf16_optimizer_states = true" in list_rows(states, "no effect")
    assert states.get("precision", "params") == "float32"


@pytest.mark.parametrize(
    ("name", "gpus", "values", "problem"),
    [
        ("numbers.json", 16, {}, "train_batch_size=128 is not 4 sequences of 4 steps on 16 GPUs, which are 256"),
        ("numbers.json", 0, {"bf16__enabled": True}, "bf16.enabled and fp16.enabled are both true"),
        ("numbers.json", 0, {"zero_optimization__stage": 4}, "zero_optimization.stage=4 is no stage of ZeRO: 0 to 3"),
        ("numbers.json", 0, {"optimizer__type": "OneBitAdam"}, "optimizer.type=OneBitAdam is nothing that is known"),
        ("numbers.json", 0, {"train_batch_size": "many"}, "train_batch_size=many is no whole number above 0"),
        ("numbers.json", 0, {"optimizer__params__betas": [0.9]}, "optimizer.params.betas=[0.9] is no pair of numbers"),
        ("on_the_host.json", 0, {"zero_optimization__offload_param__device": "none"},
         "zero_optimization.offload_optimizer.device=cpu: at stage 3 offload without offload_param is not predicted"),
        ("on_the_host.json", 0, {"zero_optimization__offload_param__device": "nvme"}, "both on nvme are"),
        ("on_the_host.json", 0, {"zero_optimization__offload_optimizer__ratio": 0.3}, "offload_optimizer.ratio=0.3:"),
        ("on_disk.json", 0, {"zero_optimization__stage": 2}, "offload_optimizer.device=nvme is for stage 3 alone"),
        ("filled_by_the_trainer.json", 0, {"zero_optimization__zero_hpz_partition_size": 8},
         "zero_optimization.zero_hpz_partition_size=8: a second copy of the weights in each node is not predicted"),
        ("filled_by_the_trainer.json", 0, {"zero_optimization__zero_quantized_weights": True}, "in int8 are not"),
        ("filled_by_the_trainer.json", 0, {"tensor_parallel__autotp_size": 4}, "tensor_parallel.autotp_size=4:"),
        ("filled_by_the_trainer.json", 0, {"compile__deepcompile": True}, "compile.deepcompile=true: DeepCompile"),
        ("filled_by_the_trainer.json", 0, {"torch_autocast__enabled": True}, "torch_autocast.enabled=true:"),
        ("filled_by_the_trainer.json", 0, {"new_thing": 1}, "new_thing is not understood here; without it the rest"),
        ("filled_by_the_trainer.json", 0, {"communication_data_type": "fp8"}, "communication_data_type=fp8 is nothing"),
    ],
)  # fmt: skip
def test_what_is_not_understood_or_contradicts_is_named(tmp_path, name, gpus, values, problem):
    with pytest.raises(InvalidConfig) as caught:
        change(tmp_path, name, gpus, **values)
    assert any(problem in each for each in caught.value.problems), caught.value.problems


def test_states_in_fp32_beside_masters_in_bf16_are_said(tmp_path):
    found = change(tmp_path, "masters_in_bf16.json", bf16__bf16_optimizer_states=None)
    assert found.get("optimizer", "state_format") == "float32" and found.get("precision", "params") == "bfloat16"


@ROUND_TRIPS
@given(draw_jobs(engines=["deepspeed"], adapters=False))
def test_what_is_chosen_for_a_job_is_read_back(tmp_path_factory, job):
    options, _ = choose_options(job)
    found = read_text(tmp_path_factory.mktemp("job"), "ds.json", to_json(options), job.layout.world_size)
    found.put("batch", {"seq_len": 4096}, "")
    differ = {"recompute", "kernels"} | ({"optimizer"} if job.scenario.optimizer.name == "adamw" else set())
    compare(job, found, differ)
    kept = {key: value for key, value in found.tables["optimizer"].items() if key != "state_format"}
    assert kept.items() <= {**vars(job.scenario.optimizer), "name": job.scenario.optimizer.name}.items()


def test_explain_predicts_a_file_with_a_model(tmp_path, capsys):
    big = ["--model", "llama3.1-70b", "--batch.seq_len=4096", "--batch.global_batch=8"]
    file = str(FOLDER / "filled_by_the_trainer.json")
    assert (
        main(["explain", file, "--gpu", "h100-80g-sxm", "--world", "8", *big, "--layout.recompute=full", "--json"]) == 0
    )
    said = capsys.readouterr()
    assert "is read as a job of DeepSpeed" in said.err
    document = json.loads(said.out)
    (rank,) = document["memory_bytes"]
    state = rank["parameters"] + rank["gradients"] + rank["optimizer"]
    assert (
        15.9 * 70.55e9 / 8 < state < 16.9 * 70.55e9 / 8
    )  # bytes a parameter, on eight GPUs, and a block that is gathered
    assert not document["fits"]
    assert main(["explain", file, "--gpu", "h100-80g-sxm"]) == 2
    asked = capsys.readouterr().err
    assert all(each in asked for each in ("--model M", "--batch.seq_len=N", "--batch.global_batch=N", "--world N"))


def test_read_shows_each_option(capsys):
    assert main(["read", str(FOLDER / "numbers.json"), "--world", "8"]) == 0
    said = capsys.readouterr().out
    assert "DeepSpeed, 8 GPUs" in said and "layout.zero=2" in said and "optimizer.lr=3e-05" in said
