"""LLaMA-Factory's YAML files and commands: each is understood field by field, and a job's options are read back."""

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
from dtlayout.programs.hugging_face.llama_factory import choose_options
from dtlayout.programs.reading import read_program
from dtlayout.programs.understood import Understood
from dtlayout.spec.adapter import Adapter

FOLDER = Path(__file__).parent / "llama_factory"
BF16 = {"compute": "bfloat16", "params": "float32", "reduce": "bfloat16"}
ADAPTED = BF16 | {"reduce": "float32"}
ADAMW = {"name": "adamw", "lr": 1e-4, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "max_norm": 1.0}
LIGER = {"rope": "liger", "norm": "liger", "swiglu": "liger", "loss": "linear"}
PLAIN = {"attention": "sdpa-flash", "loss": "eager"}
FULL: dict[str, Any] = {
    "engine": "deepspeed", "told": {"overlap_dp": "false"}, "model": {"name": "qwen3-4b"}, "batch": {"seq_len": 8192},
    "precision": BF16, "layout": {"zero": 3, "micro_batch": 1, "recompute": "full"},
    "kernels": LIGER | {"attention": "sdpa-flash"}, "optimizer": ADAMW | {"lr": 1e-5}, "data": {"samples": "padded"},
}  # fmt: skip
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "lora.yaml": {
        "engine": "accelerate", "model": {"name": "llama3.1-8b"}, "adapter": {"method": "lora", "rank": 8, "alpha": 16},
        "batch": {"seq_len": 2048}, "precision": ADAPTED, "layout": {"zero": 1, "micro_batch": 1, "recompute": "full"},
        "kernels": PLAIN, "optimizer": ADAMW, "data": {"samples": "padded"},
    },
    "qlora.yaml": {
        "engine": "accelerate", "model": {"name": "qwen2.5-7b"},
        "adapter": {"method": "lora", "rank": 16, "alpha": 16.0, "targets": ["q_proj", "v_proj"], "rslora": True},
        "batch": {"seq_len": 4096}, "precision": ADAPTED | {"base": "nf4"},
        "layout": {"zero": 1, "micro_batch": 2, "recompute": "full"},
        "kernels": PLAIN | {"attention": "flash-attn"},
        "optimizer": ADAMW | {"lr": 2e-4, "state_format": "int8"},
        "data": {"samples": "packed", "document_mask": True},
    },
    "full.yaml": FULL,
    "pretraining.yaml": {
        "engine": "accelerate", "model": {"name": "llama3.2-1b"}, "batch": {"seq_len": 4096},
        "precision": {"compute": "bfloat16", "params": "bfloat16", "reduce": "bfloat16"},
        "layout": {"zero": 1, "micro_batch": 4, "recompute": "none"}, "kernels": PLAIN | {"attention": "torch"},
        "optimizer": ADAMW | {"state_format": "int8"}, "data": {"samples": "packed"},
    },
    "sharded.yaml": {
        "engine": "accelerate", "model": {"name": "llama3.1-70b"},
        "adapter": {"method": "lora", "rank": 8, "alpha": 16}, "batch": {"seq_len": 1024},
        "precision": BF16 | {"base": "nf4"},
        "layout": {"zero": 3, "micro_batch": 1, "recompute": "full", "offload": "optimizer"},
        "kernels": PLAIN, "optimizer": ADAMW, "data": {"samples": "padded"},
    },
    "smallest.yaml": {
        "engine": "accelerate", "model": {"name": "qwen2.5-1.5b"},
        "adapter": {"method": "lora", "rank": 8, "alpha": 16}, "batch": {"seq_len": 2048},
        "precision": {"compute": "float16", "params": "float32", "reduce": "float32"},
        "layout": {"zero": 1, "micro_batch": 8, "recompute": "full", "offload": "activations"},
        "kernels": PLAIN, "optimizer": ADAMW | {"lr": 5e-5}, "data": {"samples": "padded"},
    },
    "train.sh": FULL | {
        "gpus": (16, 8), "batch": {"seq_len": 4096, "global_batch": 32}, "optimizer": ADAMW | {"lr": 2e-5},
        "layout": FULL["layout"] | {"dp_replicate": 1, "dp_shard": 16},
    },
    "launched.sh": {
        "gpus": (4, 4), "engine": "accelerate", "model": {"name": "llama2-7b"},
        "batch": {"seq_len": 1024, "global_batch": 16}, "precision": BF16,
        "layout": {"zero": 3, "dp_replicate": 1, "dp_shard": 4, "micro_batch": 2, "recompute": "full"},
        "kernels": PLAIN | {"attention": "flash-attn"}, "optimizer": ADAMW | {"lr": 1e-5},
        "data": {"samples": "padded"},
    },
}  # fmt: skip
"""File → what it says, in our words; a YAML file does not say GPUs."""
BESIDE = {"fsdp.yaml", "examples"}


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
    beside = tmp_path / "examples" / "deepspeed"
    beside.mkdir(parents=True, exist_ok=True)
    (beside / "stage3.json").write_text((FOLDER / "examples" / "deepspeed" / "stage3.json").read_text())
    changes = {key.replace("__", "."): value for key, value in values.items()}
    return read_text(tmp_path, name, tree.edit(changes), num_gpus)


def list_rows(found: Understood, how: str) -> dict[str, str]:
    """Option → note, of the options that play one part."""
    return {row.option: row.note for row in found.rows if row.how == how}


def test_a_path_may_begin_in_a_folder_above(tmp_path):
    change(tmp_path, "full.yaml")
    inner = tmp_path / "examples" / "train_full"
    inner.mkdir()
    (inner / "job.yaml").write_text((FOLDER / "full.yaml").read_text())
    found = read_program(inner / "job.yaml", {})
    assert found is not None and found.get("layout", "zero") == 3


def test_defaults_are_those_of_the_program(tmp_path):
    plain = change(tmp_path, "lora.yaml", finetuning_type=None, lora_rank=None, lora_target=None, cutoff_len=None,
                   bf16=None)  # fmt: skip
    assert plain.tables["adapter"] == {"method": "lora", "rank": 8, "alpha": 16}
    assert plain.tables["precision"] == ADAPTED and plain.get("batch", "seq_len") == 2048
    wide = change(tmp_path, "lora.yaml", lora_rank=64)
    assert wide.tables["adapter"]["alpha"] == 128
    whole = change(tmp_path, "full.yaml", deepspeed=None, bf16=False)
    assert whole.tables["precision"] == {"compute": "float32", "params": "float32", "reduce": "float32"}
    mixed = change(tmp_path, "full.yaml", 2, deepspeed=None)
    assert mixed.tables["precision"] == ADAPTED and mixed.get("batch", "global_batch") == 4
    assert change(tmp_path, "pretraining.yaml", packing=False).get("data", "samples") == "padded"


def test_what_has_no_effect_is_said(tmp_path):
    bits = change(tmp_path, "qlora.yaml", quantization_bit=None)
    assert list_rows(bits, "no effect") == {
        "quantization_method = bnb": "without quantization_bit",
        "double_quantization = true": "without quantization_bit",
    }
    whole = list_rows(change(tmp_path, "qlora.yaml", finetuning_type="full", quantization_bit=None), "no effect")
    assert whole["lora_rank = 16"] == "with finetuning_type full"
    again = change(tmp_path, "lora.yaml", gradient_checkpointing=False)
    assert again.get("layout", "recompute") == "full"
    assert list_rows(again, "no effect") == {
        "gradient_checkpointing = false": "disable_gradient_checkpointing turns it off"
    }
    unsharded = list_rows(change(tmp_path, "sharded.yaml", fsdp=""), "no effect")
    assert unsharded.keys() == {
        "fsdp_config.transformer_layer_cls_to_wrap = LlamaDecoderLayer", "fsdp_config.use_orig_params = false",
    }  # fmt: skip
    command = read_program(FOLDER / "train.sh", {})
    assert command is not None and list_rows(command, "no effect").keys() == {
        "cutoff_len = 8192", "learning_rate = 1e-05",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("lora.yaml", {"stage": "dpo"}, "stage=dpo is nothing that is known here; use sft or pt"),
        ("lora.yaml", {"finetuning_type": "freeze"},
         "finetuning_type=freeze is nothing that is known here; use lora or"),
        ("lora.yaml", {"use_galore": True}, "use_galore=true: GaLore is not predicted; adamw_torch is"),
        ("lora.yaml", {"use_badam": True}, "use_badam=true: BAdam is not predicted"),
        ("lora.yaml", {"use_unsloth": True}, "use_unsloth=true: unsloth's kernels are not predicted"),
        ("lora.yaml", {"shift_attn": True}, "shift_attn=true: shifted attention is not predicted"),
        ("lora.yaml", {"use_dora": True}, "use_dora=true: DoRA is not predicted"),
        ("lora.yaml", {"pissa_init": True}, "pissa_init=true: PiSSA is not predicted"),
        ("lora.yaml", {"additional_target": "embed_tokens"}, "weights that are trained beside an adapter are not"),
        ("lora.yaml", {"lora_target": "q_proj,lm_head"}, "an adapter of lm_head is not predicted"),
        ("lora.yaml", {"flash_attn": "fa9"}, "flash_attn=fa9 is nothing that is known here"),
        ("lora.yaml", {"new_thing": 1}, "new_thing is not understood here; without it the rest can be predicted"),
        ("lora.yaml", {"optim": "adafactor"}, "optim=adafactor is nothing that is known here"),
        ("lora.yaml", {"fp16": True}, "bf16 and fp16 are both true"),
        ("lora.yaml", {"pure_bf16": True}, "pure_bf16 and bf16 = true are both said: LLaMA-Factory refuses that"),
        ("lora.yaml", {"disable_gradient_checkpointing": True, "gradient_checkpointing": True}, "are both true"),
        ("qlora.yaml", {"quantization_bit": 3}, "quantization_bit=3 is not predicted; 4 or 8 is"),
        ("qlora.yaml", {"quantization_method": "hqq"}, "quantization_method=hqq is not predicted; bnb is"),
        ("qlora.yaml", {"finetuning_type": "full"}, "quantization_bit = 4: weights of few bits cannot be trained"),
        ("full.yaml", {"deepspeed": "ds.json"}, "deepspeed ds.json is not there, beside the file"),
        ("full.yaml", {"fsdp": "full_shard auto_wrap"}, "are both said: use one"),
        ("full.yaml", {"fp8": True, "fp8_backend": "msamp"}, "fp8_backend=msamp: only torchao's and Transformer"),
        ("sharded.yaml", {"fsdp": "full_shard"}, "fsdp without auto_wrap gathers the whole model at once"),
    ],
)  # fmt: skip
def test_what_is_not_understood_or_contradicts_is_named(tmp_path, name, values, problem):
    with pytest.raises(InvalidConfig) as caught:
        change(tmp_path, name, 8, **values)
    assert any(problem in each for each in caught.value.problems), caught.value.problems


def name_adapter(adapter: Adapter) -> dict[str, Any]:
    """LLaMA-Factory's words for an adapter."""
    return {"lora_rank": adapter.rank, "lora_alpha": adapter.alpha, "lora_target": ",".join(adapter.targets)}


@ROUND_TRIPS
@given(draw_jobs())
def test_what_is_chosen_for_a_job_is_read_back(tmp_path_factory, job):
    options, gaps = choose_options(job)
    adapter = write_adapter(job, name_adapter)
    own = {"model_name_or_path": "x/y", "stage": "sft", "template": "default"}
    text = to_yaml({**own, "finetuning_type": "lora" if adapter else "full", **options, **adapter})
    found = read_text(tmp_path_factory.mktemp("job"), "job.yaml", text, job.layout.world_size)
    assert [gap.partition("=")[0] for gap in gaps] in ([], ["precision.compute"])
    compare(job, found, {"compute", "reduce"} if gaps else ())


def explain(capsys: Any, *arguments: str) -> dict[str, Any]:
    """The document of explain."""
    assert main(["explain", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_explain_says_what_lora_and_qlora_need_on_one_gpu(tmp_path, capsys):
    alone = ["--gpu", "rtx4090-24g", "--world", "1"]
    lora = explain(capsys, str(FOLDER / "lora.yaml"), *alone)["memory_bytes"][0]
    assert lora["parameters"] == pytest.approx(2 * 8.03e9, rel=0.02) and lora["optimizer"] < 0.3e9
    change(tmp_path, "lora.yaml", quantization_bit=4)
    few = explain(capsys, str(tmp_path / "lora.yaml"), *alone)
    assert few["fits"] and 7.5 * 2**30 < few["peak_memory_bytes"] < 10 * 2**30


def test_explain_predicts_shards_of_a_base_in_few_bits_on_two_gpus(capsys):
    """A 70B in nf4 on two GPUs, with its shards on the host."""
    document = explain(capsys, str(FOLDER / "sharded.yaml"), "--gpu", "a100-80g-sxm", "--world", "2")
    assert document["peak_memory_bytes"] < 16 * 2**30
    assert 34e9 / 2 < document["host_memory_bytes"][0] < 44e9 / 2


def test_read_shows_each_option(capsys):
    assert main(["read", str(FOLDER / "train.sh")]) == 0
    said = capsys.readouterr().out
    assert "LLaMA-Factory, 16 GPUs, 8 a node" in said and "layout.dp_shard=16" in said
    assert main(["read", str(FOLDER / "lora.yaml")]) == 0
    assert "GPUs are not said: give --world" in capsys.readouterr().out
