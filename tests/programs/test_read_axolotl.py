"""axolotl's YAML files and commands: each is understood field by field, and what is chosen for a job is read back."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from program_files import ROUND_TRIPS, check_rows, check_understood
from trainer_jobs import compare, draw_jobs, read_text, to_yaml, write_adapter

from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.programs.files.trees import read_tree
from dtlayout.programs.hugging_face.axolotl import choose_options
from dtlayout.programs.reading import read_program
from dtlayout.programs.understood import Understood
from dtlayout.spec.adapter import Adapter

FOLDER = Path(__file__).parent / "axolotl"
BF16 = {"compute": "bfloat16", "params": "float32", "reduce": "bfloat16"}
ADAPTED = BF16 | {"reduce": "float32"}
ADAMW = {"name": "adamw", "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "max_norm": 1.0}
LIGER = {"rope": "liger", "norm": "liger", "swiglu": "liger", "loss": "linear"}
PACKED, PADDED = {"samples": "packed", "document_mask": True}, {"samples": "padded"}
QLORA: dict[str, Any] = {
    "engine": "accelerate", "model": {"name": "llama3.1-8b"}, "adapter": {"method": "lora", "rank": 32, "alpha": 16.0},
    "batch": {"seq_len": 4096}, "precision": ADAPTED | {"base": "nf4"},
    "layout": {"zero": 1, "micro_batch": 2, "recompute": "full"},
    "kernels": {"attention": "flash-attn", "loss": "eager"}, "optimizer": ADAMW | {"lr": 2e-4}, "data": PACKED,
}  # fmt: skip
ZERO: dict[str, Any] = {
    "engine": "deepspeed", "told": {"overlap_dp": "true"}, "model": {"name": "qwen2.5-32b"},
    "batch": {"seq_len": 2048}, "precision": BF16, "layout": {"zero": 3, "micro_batch": 4, "recompute": "full"},
    "kernels": {"attention": "sdpa-flash", "loss": "chunked"}, "optimizer": ADAMW | {"lr": 1e-5}, "data": PADDED,
}  # fmt: skip
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "qlora.yml": QLORA,
    "first_fsdp.yml": {
        "engine": "accelerate", "model": {"name": "llama3.1-8b"}, "batch": {"seq_len": 4096}, "precision": BF16,
        "layout": {"zero": 3, "micro_batch": 2, "recompute": "full", "offload": "optimizer"},
        "kernels": LIGER | {"attention": "flash-attn"}, "optimizer": ADAMW | {"lr": 2e-5, "beta2": 0.95},
        "data": PACKED,
    },
    "second_fsdp.yaml": {
        "engine": "accelerate", "model": {"name": "qwen3-14b"}, "batch": {"seq_len": 16384}, "precision": BF16,
        "layout": {
            "tp": 2, "cp": 2, "sequence_parallel": False, "cp_method": "gather", "zero": 3, "dp_replicate": 1,
            "dp_shard": 4, "micro_batch": 1, "recompute": "full", "offload": "activations",
        },
        "kernels": {"attention": "fa3", "loss": "linear"},
        "optimizer": ADAMW | {"lr": 1e-5, "max_norm": 0.5, "state_format": "int8"}, "data": PACKED,
    },
    "with_deepspeed.yml": ZERO,
    "lora.yml": {
        "engine": "accelerate", "model": {"name": "llama3.2-1b"},
        "adapter": {
            "method": "lora", "rank": 16, "alpha": 32.0, "rslora": True,
            "targets": ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"],
        },
        "batch": {"seq_len": 2048}, "precision": ADAPTED | {"base": "int8"},
        "layout": {"zero": 1, "micro_batch": 2, "recompute": "none"},
        "kernels": {"attention": "torch", "loss": "eager"},
        "optimizer": ADAMW | {"lr": 2e-4, "state_format": "int8"}, "data": PADDED,
    },
    "all_weights.yml": {
        "engine": "accelerate", "model": {"name": "llama3.2-3b"}, "batch": {"seq_len": 8192},
        "precision": {"compute": "bfloat16", "params": "bfloat16", "reduce": "bfloat16", "matmuls": "fp8-tensorwise"},
        "layout": {"zero": 1, "micro_batch": 8, "recompute": "none"},
        "kernels": {"attention": "flash-attn", "loss": "eager", "compile": "model"},
        "optimizer": ADAMW | {"lr": 2e-5, "state_format": "int8"}, "data": PACKED,
    },
    "train.sh": QLORA | {
        "gpus": (2, 2), "batch": {"seq_len": 4096, "global_batch": 8},
        "layout": QLORA["layout"] | {"micro_batch": 1, "dp_replicate": 2, "dp_shard": 1},
    },
    "launched.sh": ZERO | {
        "gpus": (8, 8), "batch": {"seq_len": 2048, "global_batch": 128}, "optimizer": ADAMW | {"lr": 2e-5},
        "layout": ZERO["layout"] | {"dp_replicate": 1, "dp_shard": 8},
    },
}  # fmt: skip
"""File → what it says, in our words; a YAML file does not say GPUs."""
BESIDE = {"configs"}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_field_of_a_file_is_understood(name):
    expected = UNDERSTOOD[name]
    if "gpus" in expected:
        check_understood(FOLDER / name, expected)
        return
    found = read_program(FOLDER / name, {})
    assert found is not None and found.engine == expected["engine"] and found.told == expected.get("told", {})
    assert (found.num_gpus, found.gpus_per_node) == (0, 0)
    assert found.tables == {key: value for key, value in expected.items() if key not in ("engine", "told")}


@pytest.mark.parametrize("name", [name for name in UNDERSTOOD if not name.endswith(".sh")])
def test_each_option_of_a_file_has_a_row(name):
    found, tree = read_program(FOLDER / name, {}), read_tree((FOLDER / name).read_text(), {})
    assert found is not None and tree is not None
    check_rows(found, tree.values)


def test_every_file_of_the_folder_is_held_against_what_it_says():
    assert {each.name for each in FOLDER.iterdir()} == set(UNDERSTOOD) | BESIDE


def change(tmp_path: Path, name: str, num_gpus: int = 0, **values: Any) -> Understood:
    """A YAML file of the folder with other values by dotted names, `__` for a dot; None takes one out."""
    tree = read_tree((FOLDER / name).read_text(), {})
    assert tree is not None
    (tmp_path / "configs").mkdir(exist_ok=True)
    (tmp_path / "configs" / "stage3.json").write_text((FOLDER / "configs" / "stage3.json").read_text())
    changes = {key.replace("__", "."): value for key, value in values.items()}
    return read_text(tmp_path, name, tree.edit(changes), num_gpus)


def list_rows(found: Understood, how: str) -> dict[str, str]:
    """Option → note, of the options that play one part."""
    return {row.option: row.note for row in found.rows if row.how == how}


def test_degrees_and_the_batch_follow_from_the_number_of_gpus(tmp_path):
    found = change(tmp_path, "second_fsdp.yaml", 32, dp_shard_size=None, dp_replicate_size=None)
    assert found.tables["layout"].items() >= {"tp": 2, "cp": 2, "dp_replicate": 1, "dp_shard": 8}.items()
    assert found.get("batch", "global_batch") == 1 * 2 * 8
    copies = change(tmp_path, "second_fsdp.yaml", 32, dp_replicate_size=2)
    assert copies.tables["layout"].items() >= {"dp_replicate": 2, "dp_shard": 4}.items()
    assert change(tmp_path, "with_deepspeed.yml", 8).get("batch", "global_batch") == 16 * 8
    alone = change(tmp_path, "all_weights.yml", 1)
    assert alone.tables["layout"].items() >= {"dp_replicate": 1, "dp_shard": 1, "zero": 1}.items()


def test_defaults_are_those_of_the_program(tmp_path):
    found = change(tmp_path, "all_weights.yml", micro_batch_size=None, sequence_len=None, bf16=None, fp8=None,
                   flash_attention=None, attn_implementation=None)  # fmt: skip
    assert found.get("layout", "micro_batch") == 1 and found.get("batch", "seq_len") == 512
    assert found.tables["precision"] == {"compute": "float32", "params": "float32", "reduce": "float32"}
    assert found.get("kernels", "attention") == "sdpa-flash"
    pure = change(tmp_path, "first_fsdp.yml", bf16=None, bfloat16=True)
    assert pure.tables["precision"] == {"compute": "bfloat16", "params": "bfloat16", "reduce": "bfloat16"}
    older = change(tmp_path, "second_fsdp.yaml", context_parallel_size=None, sequence_parallel_degree=2)
    assert older.get("layout", "cp") == 2
    ring = change(tmp_path, "second_fsdp.yaml", ring_attn_func=None, sample_packing=False)
    assert ring.get("layout", "cp_method") == "ring"


def test_what_has_no_effect_is_said(tmp_path):
    assert list_rows(change(tmp_path, "lora.yml"), "no effect")["liger_rope = true"] == (
        "without axolotl.integrations.liger.LigerPlugin in plugins"
    )
    assert list_rows(change(tmp_path, "all_weights.yml"), "no effect") == {
        "attn_implementation = flash_attention_2": "flash_attention = true says it"
    }
    whole = list_rows(change(tmp_path, "qlora.yml", adapter=None, load_in_4bit=False), "no effect")
    assert whole["lora_r = 32"] == "without adapter" and "lora_target_linear = true" in whole
    alone = list_rows(change(tmp_path, "first_fsdp.yml", 1), "no effect")
    assert alone == {"fsdp_config.fsdp_sharding_strategy = FULL_SHARD": "one GPU shares its state with nobody"}
    method = change(tmp_path, "second_fsdp.yaml", context_parallel_size=1)
    assert list_rows(method, "no effect")["ring_attn_func = varlen_llama3"] == "context_parallel_size is 1"
    again = change(tmp_path, "first_fsdp.yml", gradient_checkpointing=False)
    assert "gradient_checkpointing_kwargs.use_reentrant = false" in list_rows(again, "no effect")


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("qlora.yml", {"rl": "dpo"}, "rl=dpo: preferences have other models beside the one that is trained"),
        ("qlora.yml", {"reward_model": True}, "reward_model=true: models with a head of their own are not predicted"),
        ("qlora.yml", {"unfrozen_parameters": ["lm_head"]}, "a part of the weights is trained, which is not predicted"),
        ("qlora.yml", {"optimizer": "adopt_adamw"}, "optimizer=adopt_adamw is nothing that is known here"),
        ("qlora.yml", {"optimizer": "lion_pytorch"}, "optimizer=lion_pytorch is nothing that is known here"),
        ("qlora.yml", {"adapter": "llama-adapter"}, "adapter=llama-adapter is nothing that is known here; use lora or"),
        ("qlora.yml", {"load_in_4bit": False}, "adapter=qlora without load_in_4bit: axolotl refuses that"),
        ("qlora.yml", {"load_in_8bit": True}, "load_in_4bit and load_in_8bit are both true"),
        ("qlora.yml", {"adapter": None}, "load_in_4bit = true: weights of few bits cannot be trained"),
        ("qlora.yml", {"lora_target_linear": False}, "adapter has no targets: lora_target_linear or"),
        ("qlora.yml", {"lora_modules_to_save": ["embed_tokens"]}, "weights that are trained beside an adapter are not"),
        ("qlora.yml", {"peft_use_dora": True}, "peft_use_dora=true: DoRA is not predicted"),
        ("qlora.yml", {"sdp_attention": True}, "flash_attention = true and sdp_attention = true name several kernels"),
        ("qlora.yml", {"flash_attention": False, "flex_attention": True}, "flex attention is not predicted"),
        ("qlora.yml", {"new_thing": 1}, "new_thing is not understood here; without it the rest can be predicted"),
        ("qlora.yml", {"deepspeed": "none.json"}, "deepspeed none.json is not there, beside the file"),
        ("lora.yml", {"peft__weight_dtype": "fp8"}, "peft.weight_dtype=fp8 is nothing that is known here"),
        ("all_weights.yml", {"fp16": True}, "bf16 and fp16 are both true"),
        ("all_weights.yml", {"bf16": False, "fp16": True},
         "weights in float16 cannot be trained; use bfloat16, or float32"),
        ("all_weights.yml", {"batch_size": 12}, "batch_size=12 is no multiple of micro_batch_size=8"),
        ("all_weights.yml", {"batch_size": 16, "gradient_accumulation_steps": 2}, "are both said: use one"),
        ("all_weights.yml", {"context_parallel_size": 2},
         "ranks of cp that all have the whole state are not predicted"),
        ("first_fsdp.yml", {"deepspeed": "configs/stage3.json"}, "are both said: use one"),
        ("first_fsdp.yml", {"fsdp_config__fsdp_activation_checkpointing": True},
         "are both on: the Trainer refuses that"),
        ("second_fsdp.yaml", {"gradient_checkpointing": "offload_disk"},
         "gradient_checkpointing=offload_disk is nothing"),
        ("second_fsdp.yaml", {"dp_shard_size": 3}, "1 copies of 3 shards"),
        ("second_fsdp.yaml", {"expert_parallel_size": 2}, "expert parallelism is not predicted"),
        ("second_fsdp.yaml", {"ring_attn_func": "own"}, "ring_attn_func=own is nothing that is known here"),
    ],
)  # fmt: skip
def test_what_is_not_understood_or_contradicts_is_named(tmp_path, name, values, problem):
    with pytest.raises(InvalidConfig) as caught:
        change(tmp_path, name, 2 if "context_parallel_size" in values else 16, **values)
    assert any(problem in each for each in caught.value.problems), caught.value.problems


def name_adapter(adapter: Adapter) -> dict[str, Any]:
    """axolotl's words for an adapter."""
    return {"lora_r": adapter.rank, "lora_alpha": adapter.alpha, "lora_target_modules": list(adapter.targets)}


@ROUND_TRIPS
@given(draw_jobs(degrees=True, hybrids=True, losses=["chunked"]))
def test_what_is_chosen_for_a_job_is_read_back(tmp_path_factory, job):
    options, gaps = choose_options(job)
    adapter = write_adapter(job, name_adapter)
    adapter |= {"adapter": "qlora" if options["load_in_4bit"] else "lora"} if adapter else {}
    text = to_yaml({"base_model": "x/y", "datasets": [{"path": "my/data"}], **options, **adapter})
    differ = set()
    if gaps:
        assert [gap.partition("=")[0] for gap in gaps] == ["precision.params"]
        if job.scenario.precision.compute == "float16":  # whose weights nobody trains
            assume(False)
        differ = {"params", "reduce"}
    found = read_text(tmp_path_factory.mktemp("job"), "job.yaml", text, job.layout.world_size)
    compare(job, found, differ)


def explain(capsys: Any, *arguments: str) -> dict[str, Any]:
    """The document of explain."""
    assert main(["explain", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_explain_says_whether_an_adapter_fits_on_one_gpu(capsys):
    """QLoRA of an 8B with two sequences of 4,096 tokens: on 24 GB, and not on 12 of them."""
    document = explain(capsys, str(FOLDER / "qlora.yml"), "--gpu", "rtx4090-24g", "--world", "1")
    assert document["fits"] and 12 * 2**30 < document["peak_memory_bytes"] < 18 * 2**30
    (rank,) = document["memory_bytes"]
    assert 5.5 * 2**30 < rank["parameters"] < 6.2 * 2**30
    assert main(["explain", str(FOLDER / "qlora.yml"), "--gpu", "rtx4090-24g"]) == 2
    assert "--world N" in capsys.readouterr().err


def test_explain_predicts_zero_3_of_a_command(capsys):
    document = explain(capsys, str(FOLDER / "launched.sh"), "--gpu", "h200-141g-sxm")
    (rank,) = document["memory_bytes"]
    state = rank["parameters"] + rank["gradients"] + rank["optimizer"]
    assert document["engine"] == "deepspeed" and 15.9 * 32.76e9 / 8 < state < 17.5 * 32.76e9 / 8


def test_read_shows_each_option(capsys):
    assert main(["read", str(FOLDER / "qlora.yml"), "--world", "1"]) == 0
    said = capsys.readouterr().out
    assert "axolotl, 1 GPU" in said and "precision.base=nf4" in said and "adapter.rank=32" in said
