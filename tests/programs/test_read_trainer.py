"""Commands of Hugging Face's Trainer: each is understood field by field, with the files that it names."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from program_files import ROUND_TRIPS, check_understood
from trainer_jobs import compare, draw_jobs, read_text, to_json

from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.programs.hugging_face.read_trainer_script import choose_options
from dtlayout.programs.program import Job
from dtlayout.programs.reading import read_program
from dtlayout.programs.understood import Understood

FOLDER = Path(__file__).parent / "trainer"
BF16 = {"compute": "bfloat16", "params": "float32", "reduce": "bfloat16"}
ADAMW = {"name": "adamw", "lr": 5e-5, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "max_norm": 1.0}
PLAIN = {"attention": "sdpa-flash", "loss": "eager"}
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "with_deepspeed.sh": {
        "gpus": (16, 8), "engine": "deepspeed", "told": {"overlap_dp": "true"}, "model": {"name": "llama2-13b"},
        "batch": {"seq_len": 2048, "global_batch": 128}, "precision": BF16,
        "layout": {"zero": 2, "dp_replicate": 1, "dp_shard": 16, "micro_batch": 4, "recompute": "full"},
        "kernels": PLAIN | {"attention": "flash-attn"}, "optimizer": ADAMW | {"lr": 2e-5},
    },
    "with_accelerate.sh": {
        "gpus": (8, 8), "engine": "accelerate", "model": {"name": "qwen2.5-7b"},
        "batch": {"seq_len": 8192, "global_batch": 32}, "precision": BF16,
        "layout": {"zero": 3, "dp_replicate": 1, "dp_shard": 8, "micro_batch": 1, "recompute": "full"},
        "kernels": {"attention": "flash-attn", "rope": "liger", "norm": "liger", "swiglu": "liger", "loss": "linear"},
        "optimizer": ADAMW | {"lr": 1e-5, "beta2": 0.95, "max_norm": 0.3}, "data": {"samples": "packed"},
    },
    "with_torchrun.sh": {
        "gpus": (16, 8), "engine": "accelerate", "model": {"name": "llama3.1-8b"},
        "batch": {"seq_len": 4096, "global_batch": 32}, "precision": BF16,
        "layout": {"zero": 3, "dp_replicate": 1, "dp_shard": 16, "micro_batch": 2, "recompute": "full"},
        "kernels": PLAIN | {"compile": "model"}, "optimizer": ADAMW,
    },
    "adapter.sh": {
        "gpus": (1, 1), "engine": "accelerate", "model": {"name": "llama3.1-8b"},
        "adapter": {"method": "lora", "rank": 64, "alpha": 16.0},
        "batch": {"seq_len": 2048, "global_batch": 16},
        "precision": BF16 | {"reduce": "float32", "base": "nf4"},
        "layout": {"zero": 1, "dp_replicate": 1, "dp_shard": 1, "micro_batch": 4, "recompute": "full"},
        "kernels": PLAIN, "optimizer": ADAMW | {"state_format": "int8", "lr": 2e-4},
    },
    "one_command.sh": {
        "gpus": (4, 4), "engine": "deepspeed", "told": {"overlap_dp": "true"}, "model": {"name": "qwen3-4b"},
        "batch": {"seq_len": 4096, "global_batch": 16}, "precision": BF16,
        "layout": {"zero": 3, "dp_replicate": 1, "dp_shard": 4, "micro_batch": 2, "recompute": "full"},
        "kernels": PLAIN | {"attention": "torch"}, "optimizer": ADAMW | {"eps": 1e-6},
    },
    "arguments.txt": {
        "gpus": (0, 0), "engine": "accelerate", "model": {"name": "llama3.2-1b"},
        "adapter": {"method": "lora", "rank": 16, "alpha": 32.0, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        "batch": {"seq_len": 1024}, "precision": {"compute": "float16", "params": "float32", "reduce": "float32"},
        "layout": {"zero": 1, "micro_batch": 8, "recompute": "none"}, "kernels": PLAIN,
        "optimizer": {"name": "sgd", "momentum": 0.0, "lr": 5e-5, "weight_decay": 0.0, "max_norm": 1.0},
    },
}  # fmt: skip
"""File → what it says, in our words."""
BESIDE = {"stage2.json", "sharded.yaml", "fsdp.json"}
GIVEN = {"HOST": "node0"}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_field_of_a_command_is_understood(name):
    expected = dict(UNDERSTOOD[name])
    if expected["gpus"] == (0, 0):  # and so no batch, without which there is no config
        found = read_program(FOLDER / name, GIVEN)
        assert found is not None
        assert {key: found.tables.get(key, {}) for key in expected if key not in ("gpus", "engine", "told")} == {
            key: value for key, value in expected.items() if key not in ("gpus", "engine", "told")
        }
    else:
        check_understood(FOLDER / name, expected, GIVEN)


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_option_of_a_command_has_a_row(name):
    found, text = read_program(FOLDER / name, GIVEN), (FOLDER / name).read_text()
    assert found is not None
    shown = {word for row in found.rows for word in row.option.replace(",", " ").replace("=", " ").split()}
    options = {word[2:].partition("=")[0] for word in text.split() if word.startswith("--")} - {"config_file"}
    assert options - shown <= {"no_gradient_checkpointing"}, options - shown


def test_every_file_of_the_folder_is_held_against_what_it_says():
    assert {each.name for each in FOLDER.iterdir()} == set(UNDERSTOOD) | BESIDE


def change(tmp_path: Path, name: str, *pairs: tuple[str, str], num_gpus: int = 0) -> Understood:
    """A command of the folder with other words, as it is read."""
    for each in BESIDE:
        (tmp_path / each).write_text((FOLDER / each).read_text())
    text = (FOLDER / name).read_text()
    for before, after in pairs:
        assert before in text
        text = text.replace(before, after)
    (tmp_path / name).write_text(text)
    found = read_program(tmp_path / name, GIVEN, num_gpus)
    assert found is not None
    return found


def list_rows(found: Understood, how: str) -> dict[str, str]:
    """Option → note, of the options that play one part."""
    return {row.option: row.note for row in found.rows if row.how == how}


def test_what_has_no_effect_is_said(tmp_path):
    assert list_rows(change(tmp_path, "with_accelerate.sh"), "no effect") == {
        "num_processes = 4": "the command says num_processes"
    }
    plain = change(tmp_path, "with_accelerate.sh", ("--gradient_checkpointing --", "--"))
    assert list_rows(plain, "no effect")['gradient_checkpointing_kwargs = {"use_reentrant": false}'] == (
        "without gradient_checkpointing"
    )
    assert list_rows(change(tmp_path, "arguments.txt"), "no effect") == {"adam_beta1 = 0.8": "with optim = sgd"}
    unsharded = change(
        tmp_path, "with_torchrun.sh", ('--fsdp "full_shard auto_wrap"', "--ddp_find_unused_parameters False")
    )
    assert list_rows(unsharded, "no effect") == {"fsdp_config = fsdp.json": "without fsdp"}
    twice = change(
        tmp_path,
        "with_deepspeed.sh",
        ("--use_flash_attn True", "--use_flash_attn True --attn_implementation flash_attention_2"),
    )
    assert list_rows(twice, "no effect") == {"use_flash_attn = True": "attn_implementation = flash_attention_2 says it"}
    no_adapter = change(tmp_path, "adapter.sh", ("--use_peft", "--use_peft false"), ("--load_in_4bit", ""))
    said = list_rows(no_adapter, "no effect")
    assert said["lora_r = 64"] == "without use_peft" and "bnb_4bit_quant_type = nf4" in said


def test_defaults_are_those_of_the_trainer(tmp_path):
    found = change(tmp_path, "with_torchrun.sh", ("--per_device_train_batch_size 2", "--dataloader_pin_memory True"),
                   ("--bf16", ""))  # fmt: skip
    assert found.get("layout", "micro_batch") == 8 and found.get("batch", "global_batch") == 128
    assert found.tables["precision"] == {"compute": "float32", "params": "float32", "reduce": "float32"}
    words = change(tmp_path, "with_torchrun.sh", ("full_shard auto_wrap", "shard_grad_op auto_wrap offload"))
    assert words.tables["layout"].items() >= {"zero": 2, "offload": "optimizer"}.items()
    nodes = change(tmp_path, "with_torchrun.sh", ("full_shard", "hybrid_shard"))
    assert nodes.tables["layout"].items() >= {"zero": 3, "dp_replicate": 2, "dp_shard": 8}.items()


def test_a_table_may_stand_in_one_word(tmp_path):
    word = """'{"fsdp_version": 2, "reshard_after_forward": false, "transformer_layer_cls_to_wrap": ["Block"]}'"""
    found = change(tmp_path, "with_torchrun.sh", ("fsdp.json", word))
    assert found.get("layout", "zero") == 2
    older = ("--fsdp_config fsdp.json", "--fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer")
    assert change(tmp_path, "with_torchrun.sh", older).get("layout", "recompute") == "none"


def test_an_option_under_two_names_is_said(tmp_path):
    found = change(tmp_path, "with_accelerate.sh", ("--seed 7", "--max_length 4096"))
    assert found.get("batch", "seq_len") == 4096
    assert list_rows(found, "no effect")["max_seq_length = 8192"] == "max_length says it"


def test_weights_in_bf16_are_trained_in_bf16_without_sharding(tmp_path):
    alone = [('--fsdp "full_shard auto_wrap"', "--torch_dtype bfloat16"), ("--fsdp_config fsdp.json", "")]
    found = change(tmp_path, "with_torchrun.sh", *alone)
    assert found.tables["precision"] == {"compute": "bfloat16", "params": "bfloat16", "reduce": "bfloat16"}
    assert found.tables["layout"].items() >= {"zero": 1, "dp_replicate": 16, "dp_shard": 1}.items()


def test_gpus_are_those_of_the_launcher(tmp_path):
    included = change(tmp_path, "with_deepspeed.sh", ("--num_gpus 8 --num_nodes 2", "--include localhost:0,1,3"))
    assert (included.num_gpus, included.gpus_per_node) == (3, 3)
    seen = change(
        tmp_path,
        "with_deepspeed.sh",
        ("--num_gpus 8 --num_nodes 2", ""),
        ("deepspeed  -", "CUDA_VISIBLE_DEVICES=0,1 deepspeed -"),
    )
    assert seen.num_gpus == 2
    open_ = change(tmp_path, "with_deepspeed.sh", ("--num_gpus 8 --num_nodes 2", "--hostfile hosts"))
    assert open_.num_gpus == 0 and open_.get("batch", "global_batch") is None
    assert change(tmp_path, "with_deepspeed.sh", num_gpus=4).get("batch", "global_batch") == 32
    assert change(tmp_path, "adapter.sh", ("CUDA_VISIBLE_DEVICES=0 ", "")).num_gpus == 1
    module = change(tmp_path, "with_torchrun.sh", ("torchrun", "python -m torch.distributed.run"))
    assert module.num_gpus == 16


@pytest.mark.parametrize(
    ("name", "pair", "problem"),
    [
        ("adapter.sh", ("--optim paged_adamw_8bit", "--optim adafactor"),
         "optim=adafactor is nothing that is known here; use adamw_torch_fused or"),
        ("adapter.sh", ("--optim paged_adamw_8bit", "--optim galore_adamw"),
         "optim=galore_adamw is nothing that is known"),
        ("adapter.sh", ("--use_peft", "--use_peft --use_dora"), "use_dora=true: DoRA is not predicted"),
        ("adapter.sh", ("--use_peft", "--use_peft --modules_to_save lm_head"),
         "trained beside an adapter are not predicted"),
        ("adapter.sh", ("--target_modules all-linear", "--target_modules lm_head"),
         "an adapter of lm_head is not predicted"),
        ("adapter.sh", ("--load_in_4bit", "--load_in_4bit --load_in_8bit"),
         "load_in_4bit and load_in_8bit are both true"),
        ("adapter.sh", ("--use_peft", "--use_peft false"),
         "load_in_4bit = true: weights of few bits cannot be trained"),
        ("adapter.sh", ("--bf16", "--bf16 --fp16"), "bf16 and fp16 are both true, and one format is computed in"),
        ("adapter.sh", ("--bf16", "--bf16 --attn_implementation flex_attention"),
         "attn_implementation=flex_attention is"),
        ("adapter.sh", ("--load_in_4bit", "--torch_dtype float32"),
         "torch_dtype = float32 keeps frozen weights in float32 beside bfloat16, which is not predicted"),
        ("adapter.sh", ("--max_steps 1000", "--max_steps 1000 $MORE"),
         "$MORE may hold options, and is set by no line of the script"),
        ("with_torchrun.sh", ("full_shard auto_wrap", "full_shard"), "fsdp without auto_wrap gathers the whole model"),
        ("with_torchrun.sh", ("full_shard", "third_shard"), "fsdp=third_shard is nothing that is known here"),
        ("with_torchrun.sh", ("--bf16", "--bf16 --gradient_checkpointing"),
         "fsdp_config.activation_checkpointing = true and gradient_checkpointing = true are both on"),
        ("with_torchrun.sh", ("--bf16", "--bf16 --deepspeed stage2.json"), "are both said: use one"),
        ("with_torchrun.sh", ("fsdp.json", "$FSDP"),
         "fsdp_config is $FSDP, set by no line of the script: --given FSDP=FILE"),
        ("with_deepspeed.sh", ("stage2.json", "stage9.json"), "deepspeed stage9.json is not there, beside the file"),
        ("with_accelerate.sh", ("--bf16", "--bf16 --deepspeed stage2.json"),
         "accelerate is told FSDP, and the arguments DeepSpeed"),
        ("one_command.sh", ("--gradient_accumulation_steps 2 --bf16", "--gradient_accumulation_steps 4 --bf16"),
         "gradient_accumulation_steps=2, and the arguments make 4: transformers refuses that; use auto"),
        ("one_command.sh", ("--zero_stage 3", "--zero_stage 3 --zero_hat 1"), "zero_hat is not understood here"),
    ],
)  # fmt: skip
def test_what_is_not_understood_or_contradicts_is_named(tmp_path, name, pair, problem):
    with pytest.raises(InvalidConfig) as caught:
        change(tmp_path, name, pair)
    assert any(problem in each for each in caught.value.problems), caught.value.problems


def explain(capsys: Any, *arguments: str) -> dict[str, Any]:
    """The document of explain."""
    assert main(["explain", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_explain_says_what_an_adapter_needs_on_one_gpu(tmp_path, capsys):
    """An 8B on 24 GB: with a base in nf4 it fits, with one in bf16 it hardly does, and with all trained not at all."""
    on = ["--gpu", "rtx4090-24g", "--layout.micro_batch=1", "--batch.global_batch=1"]
    few = explain(capsys, str(FOLDER / "adapter.sh"), *on)["peak_memory_bytes"]
    assert 7 * 2**30 < few < 11 * 2**30
    change(tmp_path, "adapter.sh", ("--load_in_4bit", ""))
    frozen = explain(capsys, str(tmp_path / "adapter.sh"), *on)["peak_memory_bytes"]
    linear = 6.98e9  # parameters of linear layers in blocks, of 4.25 bits or of 16
    assert frozen - few == pytest.approx(linear * (2 - 4.25 / 8), rel=0.02)
    change(tmp_path, "adapter.sh", ("--load_in_4bit", ""), ("--use_peft", "--use_peft false"))
    assert explain(capsys, str(tmp_path / "adapter.sh"), *on)["peak_memory_bytes"] > 80 * 2**30


def test_read_shows_each_option(capsys):
    assert main(["read", str(FOLDER / "with_deepspeed.sh")]) == 0
    said = capsys.readouterr().out
    assert "Hugging Face's Trainer, 16 GPUs, 8 a node" in said and "layout.zero=2" in said
    assert "not predicted: about the course of the learning rate" in said


def write_command(folder: Path, job: Job) -> str:
    """A command with the options that are chosen for a job; those of DeepSpeed and FSDP lie in JSON files beside it."""
    options, gaps = choose_options(job)
    assert not gaps
    adapter = job.model.adapter
    if adapter is not None:
        options |= {"use_peft": True, "lora_r": adapter.rank, "lora_alpha": adapter.alpha}
        options["lora_target_modules"] = list(adapter.targets)
    words = ["torchrun", "--nproc_per_node", str(job.layout.world_size), "train.py", "--model_name_or_path", "x/y"]
    for option, prefix in (("deepspeed", "deepspeed."), ("fsdp_config", "fsdp_config.")):
        inner = {name.removeprefix(prefix): options.pop(name) for name in list(options) if name.startswith(prefix)}
        if any(value is not None for value in inner.values()):
            (folder / f"{option}.json").write_text(to_json(inner))
            words += [f"--{option}", f"{option}.json"]
    for name, value in options.items():
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


@ROUND_TRIPS
@given(draw_jobs())
def test_what_is_chosen_for_a_job_is_read_back(tmp_path_factory, job):
    folder = tmp_path_factory.mktemp("job")
    compare(job, read_text(folder, "train.sh", write_command(folder, job)))
