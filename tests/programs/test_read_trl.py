"""TRL's YAML files and commands: each is understood field by field, and what is chosen for a job is read back."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from program_files import ROUND_TRIPS, check_rows, check_understood
from trainer_jobs import compare, draw_jobs, read_text, to_yaml, write_adapter

from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.programs.files.trees import read_tree
from dtlayout.programs.hugging_face.trl import choose_options
from dtlayout.programs.reading import read_program
from dtlayout.programs.understood import Understood
from dtlayout.spec.adapter import Adapter

FOLDER = Path(__file__).parent / "trl"
BF16 = {"compute": "bfloat16", "params": "float32", "reduce": "bfloat16"}
DDP = BF16 | {"reduce": "float32"}
ADAMW = {"name": "adamw", "lr": 2e-5, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "max_norm": 1.0}
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "smallest.yaml": {
        "gpus": (0, 0), "engine": "accelerate", "model": {"name": "qwen2.5-0.5b"}, "batch": {"seq_len": 1024},
        "precision": DDP, "layout": {"zero": 1, "micro_batch": 8, "recompute": "full"},
        "kernels": {"attention": "sdpa-flash", "loss": "linear"}, "optimizer": ADAMW | {"lr": 1e-4},
        "data": {"samples": "padded"},
    },
    "full.yaml": {
        "gpus": (16, 8), "engine": "accelerate", "model": {"name": "llama3.1-8b"},
        "batch": {"seq_len": 4096, "global_batch": 128}, "precision": BF16,
        "layout": {"zero": 3, "dp_replicate": 1, "dp_shard": 16, "micro_batch": 2, "recompute": "full"},
        "kernels": {"attention": "flash-attn", "rope": "liger", "norm": "liger", "swiglu": "liger", "loss": "linear"},
        "optimizer": ADAMW, "data": {"samples": "packed", "document_mask": True},
    },
    "lora.yaml": {
        "gpus": (2, 2), "engine": "accelerate", "model": {"name": "qwen3-8b"},
        "adapter": {"method": "lora", "rank": 32, "alpha": 16.0},
        "batch": {"seq_len": 2048, "global_batch": 16}, "precision": DDP,
        "layout": {
            "zero": 1, "dp_replicate": 2, "dp_shard": 1, "micro_batch": 4, "recompute": "full",
            "offload": "activations",
        },
        "kernels": {"attention": "sdpa-flash", "loss": "eager"},
        "optimizer": ADAMW | {"lr": 2e-4, "state_format": "int8"}, "data": {"samples": "padded"},
    },
    "older.yaml": {
        "gpus": (0, 0), "engine": "accelerate",
        "adapter": {"method": "lora", "rank": 16, "alpha": 32, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        "batch": {"seq_len": 2048}, "precision": DDP | {"base": "nf4"},
        "layout": {"zero": 1, "micro_batch": 4, "recompute": "full"},
        "kernels": {"attention": "flash-attn", "loss": "eager"}, "optimizer": ADAMW | {"lr": 2e-4},
        "data": {"samples": "packed"},
    },
    "zero3.yaml": {
        "gpus": (8, 8), "engine": "deepspeed", "told": {"overlap_dp": "true"}, "model": {"name": "llama3.1-70b"},
        "batch": {"seq_len": 8192, "global_batch": 8}, "precision": BF16,
        "layout": {
            "zero": 3, "dp_replicate": 1, "dp_shard": 8, "micro_batch": 1, "recompute": "full", "offload": "optimizer",
        },
        "kernels": {"attention": "fa3", "loss": "linear"}, "optimizer": ADAMW | {"weight_decay": 0.1},
        "data": {"samples": "padded"},
    },
    "sft.sh": {
        "gpus": (4, 4), "engine": "deepspeed", "told": {"overlap_dp": "false"}, "model": {"name": "qwen2.5-7b"},
        "batch": {"seq_len": 2048, "global_batch": 64}, "precision": BF16,
        "layout": {"zero": 2, "dp_replicate": 1, "dp_shard": 4, "micro_batch": 2, "recompute": "none"},
        "kernels": {"attention": "sdpa-flash", "loss": "linear", "compile": "model"},
        "optimizer": ADAMW | {"lr": 5e-6}, "data": {"samples": "padded"},
    },
    "launched.sh": {
        "gpus": (2, 2), "engine": "accelerate", "model": {"name": "llama3.2-3b"},
        "adapter": {"method": "lora", "rank": 8, "alpha": 32, "targets": ["q_proj", "v_proj"]},
        "batch": {"seq_len": 1024, "global_batch": 16}, "precision": DDP | {"base": "int8"},
        "layout": {"zero": 1, "dp_replicate": 2, "dp_shard": 1, "micro_batch": 8, "recompute": "full"},
        "kernels": {"attention": "sdpa-flash", "loss": "linear"}, "optimizer": ADAMW, "data": {"samples": "packed"},
    },
}  # fmt: skip
"""File → what it says, in our words."""


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_field_of_a_file_is_understood(name):
    expected = UNDERSTOOD[name]
    if expected["gpus"] != (0, 0):
        check_understood(FOLDER / name, expected)
        return
    found = read_program(FOLDER / name, {})  # a batch needs the GPUs, and a config the batch
    assert found is not None and found.tables == {
        key: value for key, value in expected.items() if key not in ("gpus", "engine", "told")
    }
    again = read_program(FOLDER / name, {}, 4)
    assert again is not None
    if again.tables.get("model"):
        batch = {"seq_len": 1024, "global_batch": 32}
        check_understood_on(again, expected | {"batch": batch})


def check_understood_on(found: Understood, expected: dict[str, Any]) -> None:
    """Fail unless a job on four GPUs, each with a copy, is what is expected."""
    layout = expected["layout"] | {"dp_replicate": 4, "dp_shard": 1}
    wanted = {key: value for key, value in (expected | {"layout": layout}).items() if key not in ("gpus", "engine")}
    assert found.tables == wanted


@pytest.mark.parametrize("name", [name for name in UNDERSTOOD if name.endswith(".yaml")])
def test_each_option_of_a_file_has_a_row(name):
    found, tree = read_program(FOLDER / name, {}), read_tree((FOLDER / name).read_text(), {})
    assert found is not None and tree is not None
    check_rows(found, tree.values)


@pytest.mark.parametrize("name", ["sft.sh", "launched.sh"])
def test_each_option_of_a_command_has_a_row(name):
    found, text = read_program(FOLDER / name, {}), (FOLDER / name).read_text()
    assert found is not None
    shown = {word for row in found.rows for word in row.option.replace(",", " ").split()}
    options = {word[2:] for word in text.split() if word.startswith("--")}
    assert options - shown <= {"no_gradient_checkpointing"}


def test_every_file_of_the_folder_is_held_against_what_it_says():
    assert {each.name for each in FOLDER.iterdir()} == set(UNDERSTOOD)


def change(tmp_path: Path, name: str, num_gpus: int = 0, **values: Any) -> Understood:
    """A YAML file of the folder with other values by dotted names, `__` for a dot; None takes one out."""
    tree = read_tree((FOLDER / name).read_text(), {})
    assert tree is not None
    changes = {key.replace("__", "."): value for key, value in values.items()}
    return read_text(tmp_path, name, tree.edit(changes), num_gpus)


def list_rows(found: Understood, how: str) -> dict[str, str]:
    """Option → note, of the options that play one part."""
    return {row.option: row.note for row in found.rows if row.how == how}


def test_defaults_are_those_of_the_release(tmp_path):
    new = change(tmp_path, "smallest.yaml")
    assert list_rows(new, "assumed")["loss_type"] == "its default, chunked_nll"
    between = change(tmp_path, "smallest.yaml", torch_dtype="bfloat16")
    assert between.get("kernels", "loss") == "eager" and between.get("layout", "recompute") == "full"
    assert between.tables["precision"]["params"] == "bfloat16"
    old = change(tmp_path, "smallest.yaml", max_seq_length=512)
    assert old.tables["layout"]["recompute"] == "none" and old.get("precision", "compute") == "float32"
    assert old.get("kernels", "loss") == "eager" and old.get("batch", "seq_len") == 512


def test_names_of_accelerates_files_are_known(tmp_path):
    def read(name: str) -> tuple[str, dict[str, Any]]:
        found = change(tmp_path, "full.yaml", accelerate_config=name, num_processes=8, num_machines=1)
        return found.engine, found.tables["layout"]

    assert read("zero1")[0] == "deepspeed" and read("zero1")[1]["zero"] == 1
    assert read("zero3")[1].items() >= {"zero": 3, "dp_shard": 8}.items()
    assert read("fsdp1") == read("fsdp2") and read("fsdp2")[0] == "accelerate"
    assert read("multi_gpu")[1].items() >= {"zero": 1, "dp_replicate": 8, "dp_shard": 1}.items()
    (tmp_path / "mine.yaml").write_text(
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\nnum_processes: 4\n"
    )
    found = change(tmp_path, "full.yaml", accelerate_config="mine.yaml", num_processes=None, num_machines=None)
    assert found.num_gpus == 4 and found.get("layout", "zero") == 2


def test_what_has_no_effect_is_said(tmp_path):
    liger = change(tmp_path, "full.yaml", loss_type="nll")
    assert list_rows(liger, "no effect")["loss_type = nll"] == "use_liger_kernel has a loss of its own"
    plain = change(tmp_path, "full.yaml", packing=False, gradient_checkpointing=False)
    said = list_rows(plain, "no effect")
    assert said["packing_strategy = bfd"] == "without packing"
    assert said["gradient_checkpointing_kwargs.use_reentrant = false"] == "without gradient_checkpointing"
    whole = change(tmp_path, "lora.yaml", use_peft=False)
    assert list_rows(whole, "no effect")["lora_r = 32"] == "without use_peft"
    command = read_program(FOLDER / "sft.sh", {})
    assert command is not None
    assert list_rows(command, "no effect").keys() == {
        "model_name_or_path = Qwen/Qwen2.5-0.5B", "learning_rate = 0.0001", "num_processes = 8",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("lora.yaml", {"dtype": None},
         "dtype, its default keeps frozen weights in float32 beside bfloat16, which is not"),
        ("lora.yaml", {"optim": "lion_8bit"}, "optim=lion_8bit is nothing that is known here; use adamw_torch_fused"),
        ("lora.yaml", {"use_dora": True}, "use_dora=true: DoRA is not predicted"),
        ("lora.yaml", {"lora_modules_to_save": ["lm_head"]},
         "lora_modules_to_save=['lm_head']: weights that are trained"),
        ("lora.yaml", {"beta": 0.1}, "beta is not understood here; without it the rest can be predicted"),
        ("full.yaml", {"load_in_4bit": True}, "load_in_4bit = true: weights of few bits cannot be trained"),
        ("full.yaml", {"packing_strategy": "tight"}, "packing_strategy=tight is nothing that is known here"),
        ("full.yaml", {"use_liger_kernel": False, "loss_type": "sigmoid"},
         "loss_type=sigmoid is nothing that is known"),
        ("full.yaml", {"fsdp": "full_shard auto_wrap", "deepspeed": "ds.json"}, "are both said: use one"),
        ("full.yaml", {"accelerate_config": "zero9"}, "accelerate_config zero9 is not there, beside the file"),
        ("full.yaml", {"fp16": True}, "bf16 and fp16 are both true"),
        ("zero3.yaml", {"deepspeed__zero_optimization__stage": 5}, "deepspeed.zero_optimization.stage=5 is no stage"),
        ("zero3.yaml", {"deepspeed__gradient_accumulation_steps": 2},
         "deepspeed.gradient_accumulation_steps=2, and the arguments make 1"),
        ("zero3.yaml", {"deepspeed__new": 2}, "deepspeed.new is not understood here"),
    ],
)  # fmt: skip
def test_what_is_not_understood_or_contradicts_is_named(tmp_path, name, values, problem):
    with pytest.raises(InvalidConfig) as caught:
        change(tmp_path, name, **values)
    assert any(problem in each for each in caught.value.problems), caught.value.problems


def test_other_trainers_are_refused(tmp_path):
    text = (FOLDER / "sft.sh").read_text().replace("trl sft", "trl dpo")
    with pytest.raises(InvalidConfig, match=r"trl dpo has other models beside the one that is trained"):
        read_text(tmp_path, "dpo.sh", text)


def name_adapter(adapter: Adapter) -> dict[str, Any]:
    """ModelConfig's words for an adapter."""
    return {"use_peft": True, "lora_r": adapter.rank, "lora_alpha": adapter.alpha,
            "lora_target_modules": list(adapter.targets)}  # fmt: skip


@ROUND_TRIPS
@given(draw_jobs(losses=["linear"]))
def test_what_is_chosen_for_a_job_is_read_back(tmp_path_factory, job):
    options, gaps = choose_options(job)
    assert not gaps
    text = to_yaml({"model_name_or_path": "x/y", **options, **write_adapter(job, name_adapter)})
    found = read_text(tmp_path_factory.mktemp("job"), "job.yaml", text, job.layout.world_size)
    compare(job, found)


def test_explain_asks_for_what_a_file_does_not_say_and_predicts_the_rest(capsys):
    file = str(FOLDER / "smallest.yaml")
    assert main(["explain", file, "--gpu", "l4-24g"]) == 2
    assert "--world N" in capsys.readouterr().err
    assert main(["explain", file, "--gpu", "l4-24g", "--world", "1", "--json"]) == 0
    said = capsys.readouterr()
    assert "is read as a job of TRL" in said.err
    document = json.loads(said.out)
    assert document["fits"] and 8e9 < document["peak_memory_bytes"] < 16e9  # 16 to 18 bytes for each of 0.5 billion
    assert main(["explain", str(FOLDER / "zero3.yaml"), "--gpu", "h100-80g-sxm", "--json"]) == 0
    big = json.loads(capsys.readouterr().out)
    assert big["engine"] == "deepspeed" and big["host_memory_bytes"][0] == pytest.approx(16 * 70.55e9 / 8, rel=0.01)


def test_read_shows_each_option(capsys):
    assert main(["read", str(FOLDER / "lora.yaml")]) == 0
    said = capsys.readouterr().out
    assert "TRL, 2 GPUs, 2 a node" in said and "adapter.rank=32" in said and "optimizer.state_format=int8" in said
