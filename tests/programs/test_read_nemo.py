"""YAML and commands of NeMo 1: each is understood field by field, under NeMo's own names and with its defaults."""

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
from dtlayout.programs.nemo import read_nemo1
from dtlayout.programs.program import nest
from dtlayout.programs.understood import OtherFile

FOLDER = Path(__file__).parent / "nemo"
ADAM = {"name": "adamw", "beta1": 0.9, "beta2": 0.95, "max_norm": 1.0, "weight_decay": 0.1}
LLAMA = {"family": "llama", "gated_ffn": True, "tied_embeddings": False, "norm_eps": 1e-5}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "llama.yaml": {
        "gpus": (128, 8), "told": {"overlap_dp": "true"},
        "model": LLAMA | {
            "num_layers": 80, "hidden_size": 8192, "ffn_size": 28672, "num_heads": 64, "num_kv_heads": 8,
            "vocab_size": 128512, "rope_scaling": SCALING,
        },
        "batch": {"seq_len": 8192, "global_batch": 512},
        "layout": {
            "tp": 4, "pp": 4, "cp": 2, "cp_method": "ring", "virtual_stages": 10, "schedule": "interleaved-1f1b",
            "micro_batch": 1, "sequence_parallel": True, "tp_overlap": True, "dp_shard": 4, "dp_replicate": 1,
        },
        "precision": {"compute": "bfloat16"}, "kernels": {"attention": "flash-attn"},
        "optimizer": ADAM | {"lr": 1.5e-4},
    },
    "gpt.yaml": {
        "gpus": (64, 8), "told": {"overlap_dp": "true", "overlap_pp": "false"},
        "model": LLAMA | {
            "gated_ffn": False, "tied_embeddings": True, "num_layers": 48, "hidden_size": 6144, "ffn_size": 24576,
            "num_heads": 48, "num_kv_heads": 48, "vocab_size": 51200,
        },
        "batch": {"seq_len": 2048, "global_batch": 256},
        "layout": {
            "tp": 8, "pp": 4, "virtual_stages": 6, "schedule": "interleaved-1f1b", "micro_batch": 2,
            "sequence_parallel": True, "dp_shard": 2, "dp_replicate": 1, "recompute": "selective",
        },
        "precision": {"compute": "bfloat16", "matmuls": "fp8-tensorwise", "reduce": "bfloat16"},
        "optimizer": ADAM | {"lr": 0.9e-4},
    },
    "older.yaml": {
        "gpus": (1, 1), "told": {"overlap_dp": "false"},
        "model": LLAMA | {
            "gated_ffn": False, "tied_embeddings": True, "num_layers": 12, "hidden_size": 768, "ffn_size": 3072,
            "num_heads": 12, "num_kv_heads": 12, "vocab_size": 50304,
        },
        "batch": {"seq_len": 512, "global_batch": 8},
        "layout": {"tp": 1, "pp": 1, "micro_batch": 4, "sequence_parallel": False, "dp_shard": 1, "dp_replicate": 1},
        "precision": {"compute": "float16"},
        "optimizer": {
            "name": "adamw", "beta1": 0.9, "beta2": 0.98, "max_norm": 1.0, "weight_decay": 0.01, "lr": 2e-4,
        },
    },
    "experts.yaml": {
        "gpus": (64, 8), "told": {"overlap_dp": "true"},
        "model": LLAMA | {
            "family": "mixtral", "num_layers": 32, "hidden_size": 4096, "ffn_size": 14336, "num_heads": 32,
            "num_kv_heads": 8, "vocab_size": 32000, "rope_theta": 1e6,
            "experts": {"number": 8, "per_token": 2, "ffn_size": 14336, "balance_loss": 0.01},
        },
        "batch": {"seq_len": 4096, "global_batch": 256},
        "layout": {
            "tp": 1, "pp": 4, "ep": 8, "virtual_stages": 8, "schedule": "interleaved-1f1b", "micro_batch": 1,
            "sequence_parallel": True, "dp_shard": 8, "dp_replicate": 2,
        },
        "precision": {"compute": "bfloat16"}, "optimizer": ADAM | {"lr": 1e-4},
    },
    "fsdp.yaml": {
        "gpus": (32, 8), "told": {"overlap_dp": "false"},
        "model": LLAMA | {
            "family": "qwen2", "qkv_bias": True, "num_layers": 28, "hidden_size": 3584, "ffn_size": 18944,
            "num_heads": 28, "num_kv_heads": 4, "vocab_size": 152064, "rope_theta": 1e6, "norm_eps": 1e-6,
        },
        "batch": {"seq_len": 32768, "global_batch": 256},
        "layout": {
            "tp": 2, "pp": 1, "micro_batch": 2, "sequence_parallel": True, "zero": 3, "dp_shard": 16,
            "dp_replicate": 1, "recompute": "full",
        },
        "precision": {"compute": "bfloat16", "reduce": "bfloat16"}, "kernels": {"attention": "sdpa-cudnn"},
        "optimizer": ADAM | {"lr": 1.1e-4},
    },
    "tuning.yaml": {
        "gpus": (8, 8), "told": {"overlap_dp": "true"}, "batch": {"seq_len": 4096, "global_batch": 128},
        "layout": {
            "tp": 4, "pp": 1, "micro_batch": 4, "sequence_parallel": True, "dp_shard": 2, "dp_replicate": 1,
            "recompute": "selective",
        },
        "precision": {"compute": "bfloat16"},
        "optimizer": {
            "name": "adamw", "beta1": 0.9, "beta2": 0.98, "max_norm": 1.0, "weight_decay": 0.01, "lr": 5e-6,
        },
    },
    "train.sh": {
        "gpus": (16, 8), "told": {"overlap_dp": "true"},
        "model": {
            "family": "llama", "gated_ffn": True, "tied_embeddings": True, "num_layers": 16, "hidden_size": 2048,
            "ffn_size": 8192, "num_heads": 32, "num_kv_heads": 8, "vocab_size": 128256,
        },
        "batch": {"seq_len": 4096, "global_batch": 64},
        "layout": {"tp": 2, "pp": 1, "micro_batch": 4, "sequence_parallel": True, "dp_shard": 8, "dp_replicate": 1},
        "precision": {"compute": "bfloat16"}, "kernels": {"attention": "flash-attn"}, "optimizer": ADAM | {"lr": 3e-4},
    },
    "conf/small.yaml": {
        "gpus": (1, 1), "told": {"overlap_dp": "true"},
        "model": {
            "family": "llama", "gated_ffn": True, "tied_embeddings": True, "num_layers": 16, "hidden_size": 2048,
            "ffn_size": 8192, "num_heads": 32, "num_kv_heads": 8, "vocab_size": 128256,
        },
        "batch": {"seq_len": 4096, "global_batch": 64},
        "layout": {"tp": 1, "pp": 1, "micro_batch": 4, "sequence_parallel": False, "dp_shard": 1, "dp_replicate": 1},
        "precision": {"compute": "bfloat16"}, "optimizer": ADAM | {"lr": 3e-4, "beta2": 0.98},
    },
}  # fmt: skip
"""File → what it says, in our words, without the model's name."""


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_field_of_a_file_is_understood_and_each_name_has_a_row(name):
    found = check_understood(FOLDER / name, {"engine": "megatron", **UNDERSTOOD[name]})
    tree = read_tree((FOLDER / name).read_text(), {})
    names = tree.values if tree else re.findall(r"(?<=[\s+~])(?:model|trainer)\.[\w.]+", (FOLDER / name).read_text())
    check_rows(found, {each.removeprefix("training.") for each in names})
    assert not any("--" in row.option for row in found.rows if "--config-name" not in row.option)


def test_every_file_of_the_folder_is_held_against_what_it_says():
    assert {str(each.relative_to(FOLDER)) for each in FOLDER.rglob("*.*")} == set(UNDERSTOOD)


def read(text: str, **given: str) -> Any:
    tree = read_tree(text, given)
    found = read_nemo1.read(OtherFile(FOLDER / "file", text, tree, given))
    if found.problems:
        raise InvalidConfig(found.problems)
    return found


def change(name: str, *pairs: tuple[str, str]) -> Any:
    text = (FOLDER / name).read_text()
    for before, after in pairs:
        assert before in text, before
        text = text.replace(before, after)
    return read(text)


def list_rows(found: Any, how: str) -> dict[str, str]:
    """Option → note, of the options that play one part."""
    return {each.option: each.note for each in found.rows if each.how == how}


def test_defaults_that_differ_from_those_of_megatron_are_marked():
    assumed = list_rows(change("gpt.yaml"), "assumed")
    assert assumed["model.optim.overlap_grad_sync"] == "the default of distributed_fused_adam"
    later = list_rows(change("gpt.yaml", ("overlap_p2p_comm: False", "seed: 1")), "assumed")
    assert later["model.overlap_p2p_comm"] == "model.overlap_p2p_comm is false by default"
    older = list_rows(change("older.yaml"), "assumed")
    assert older["model.transformer_engine"] == "predicted as with Transformer Engine"
    assert older["model.megatron_amp_O2 = false"].startswith("weights in fp32 under autocast")
    sharded = list_rows(change("fsdp.yaml"), "assumed")
    shown = "model.fsdp = true, model.fsdp_sharding_strategy = full"
    assert sharded[shown] == "PyTorch's FSDP, predicted as Megatron's own"
    plain = change("older.yaml", ("    name: fused_adam\n", ""))
    assert plain.get("optimizer", "name") == "adamw" and "model.optim.name" in list_rows(plain, "assumed")


def test_what_has_no_effect_is_said():
    assert list_rows(change("gpt.yaml"), "no effect")["model.activations_checkpoint_num_layers = 0"] == "none is said"
    off = list_rows(change("gpt.yaml", ("  fp8: True", "  fp8: False")), "no effect")
    assert off.items() >= {"model.fp8_hybrid = true": "without model.fp8"}.items()
    alone = change("gpt.yaml", ("transformer_engine: True", "transformer_engine: False"))
    assert list_rows(alone, "no effect")["model.fp8 = true"] == "without model.transformer_engine"
    assert alone.get("precision", "matmuls") is None
    plain = change("llama.yaml", ("sequence_parallel: true", "sequence_parallel: false"))
    assert list_rows(plain, "no effect")["model.ub_tp_comm_overlap = true"] == "without model.sequence_parallel"
    assert plain.get("layout", "tp_overlap") is None
    one = change("llama.yaml", ("virtual_pipeline_model_parallel_size: 10", "virtual_pipeline_model_parallel_size: 1"))
    without = list_rows(one, "no effect")
    assert without["model.overlap_p2p_comm = true"] == "without model.virtual_pipeline_model_parallel_size"
    shards = list_rows(change("fsdp.yaml", ("fsdp: True", "fsdp: False")), "no effect")
    assert shards["model.fsdp_sharding_strategy = full"] == "without model.fsdp"


@pytest.mark.parametrize(
    ("name", "change_of", "problem"),
    [
        ("llama.yaml", ("mcore_gpt: true", "new_thing: 3"), "model.new_thing is not understood here; without it"),
        ("llama.yaml", ("precision: bf16", "precision: int8"), "trainer.precision=int8 is nothing that is known here"),
        ("llama.yaml", ("num_layers: 80", "num_layers: ${L}"), "model.num_layers is ${L}, said by no line of the file"),
        ("llama.yaml", ("sequence_parallel: true", "sequence_parallel: ${S}"), "model.sequence_parallel is ${S}, said"),
        ("llama.yaml", ("activation: fast-swiglu", "activation: tanh"), "model.activation=tanh is nothing that is"),
        ("llama.yaml", ("normalization: rmsnorm", "normalization: batch"), "model.normalization=batch is nothing that"),
        ("llama.yaml", ("name: distributed_fused_adam", "name: adafactor"), "model.optim.name=adafactor is nothing"),
        ("llama.yaml", ("    - 0.9\n", ""), "model.optim.betas=[0.95] is no list of two numbers"),
        ("llama.yaml", ("seq_length: 8192\n    num", "seq_length: 4096\n    num"),
         "model.encoder_seq_length=8192 and model.data.seq_length=4096 contradict each other"),
        ("llama.yaml", ("transformer_block_type: pre_ln", "transformer_block_type: post_ln"),
         "model.transformer_block_type=post_ln is not understood here; pre_ln is"),
        ("llama.yaml", ("activation_checkpoints: null", "activation_checkpoints: 3"),
         "model.num_micro_batches_with_partial_activation_checkpoints=3 is not understood here"),
        ("llama.yaml", ("size: 4\n  virtual", "size: 3\n  virtual"), "128 GPUs are no multiple of tp * pp * cp = 24"),
        ("llama.yaml", ("accumulate_grad_batches: 1", "accumulate_grad_batches: 2"),
         "trainer.accumulate_grad_batches=2 is not understood here; 1 is"),
        ("gpt.yaml", ("fp8_hybrid: True", "fp8_hybrid: False"),
         "model.fp8=true without model.fp8_e4m3 or model.fp8_hybrid is no format"),
        ("experts.yaml", ("capacity_factor: null", "capacity_factor: 1.0"),
         "model.moe_expert_capacity_factor=1.0 is not understood here"),
        ("experts.yaml", ("tensor_model_parallel_size: 1", "tensor_model_parallel_size: 2"),
         "experts are cut by 2 ranks of tp, which is not predicted; model.expert_tensor_parallel_size 1 is"),
        ("fsdp.yaml", ("strategy: 'full'", "strategy: 'hybrid'"), "model.fsdp_sharding_strategy=hybrid is nothing"),
        ("fsdp.yaml", ("fsdp: True", "fsdp: True\n  fp8: hybrid"), "model.fsdp and model.fp8 contradict each other"),
        ("tuning.yaml", ("peft_scheme: null", "peft_scheme: lora"), "model.peft.peft_scheme=lora is not understood"),
        ("train.sh", ("trainer.devices=8", "$MORE"), "$MORE may hold options, and is set by no line of the script"),
        ("train.sh", ("trainer.devices=8", "model.num_layers=$L"), "model.num_layers is $L, set by no line of the"),
        ("train.sh", ("--config-name=small", "--config-name=large"), "the config file conf/large.yaml is not there"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named_as_the_file_has_it(name, change_of, problem):
    with pytest.raises(InvalidConfig) as caught:
        change(name, change_of)
    assert any(problem in each for each in caught.value.problems), caught.value.problems


def test_a_value_that_the_file_does_not_say_may_be_given():
    text = (FOLDER / "llama.yaml").read_text().replace("num_layers: 80", "num_layers: ${L}")
    assert read(text, L="40").get("model", "num_layers") == 40
    assert read((FOLDER / "train.sh").read_text(), NODES="4").num_gpus == 32


def test_devices_may_be_a_list_or_unknown():
    assert change("llama.yaml", ("devices: 8", "devices: [0, 1, 2, 3]")).num_gpus == 64
    assert change("llama.yaml", ("devices: 8", "devices: -1")).num_gpus == 0
    assert change("tuning.yaml", (", num_nodes: 1", "")).num_gpus == 8


@pytest.mark.parametrize(
    "text",
    [
        "model: {name: llama3.1-8b}\ntrain: {steps: 3}\nbatch: {global_batch: 8}", "trainer: {max_steps: 3}\nmodel: {}",
        "model: {_target_: megatron.bridge.GPTModelProvider, tensor_model_parallel_size: 2}\ntrainer: {devices: 8}",
        "trainer: {devices: 8}\ndata: {micro_batch_size: 1}", "system: {bf16: true}\nmodel: {micro_batch_size: 1}",
        "python train.py --config-name=small model.tensor_model_parallel_size=2",
    ],
)  # fmt: skip
def test_files_of_others_are_none_of_nemos(text):
    assert not read_nemo1.is_ours(OtherFile(Path("file.yaml"), text, read_tree(text, {})))


def test_any_value_ends_in_a_job_or_is_refused():
    assert check_any_value(read_nemo1.read, FOLDER / "gpt.yaml") > 800


def test_changes_are_written_under_names_that_the_file_has():
    tree = read_tree((FOLDER / "gpt.yaml").read_text(), {})
    assert tree is not None
    options = {"--tensor-model-parallel-size": ["4"], "--fp8-format": None, "--use-distributed-optimizer": None,
               "--recompute-granularity": ["full"], "--recompute-method": ["uniform"], "--bf16": [], "--fp16": None,
               "--num-virtual-stages-per-pipeline-rank": None, "--sequence-parallel": None}  # fmt: skip
    changes = read_nemo1.to_own(options, tree.values)
    assert changes == {
        "model.tensor_model_parallel_size": 4, "model.fp8": False, "model.optim.name": "fused_adam",
        "model.activations_checkpoint_granularity": "full", "model.activations_checkpoint_method": "uniform",
        "trainer.precision": "bf16", "model.virtual_pipeline_model_parallel_size": None,
        "model.sequence_parallel": False,
    }  # fmt: skip
    found = read(tree.edit(changes))
    assert found.tables["layout"].items() >= {"tp": 4, "recompute": "full", "dp_shard": 1, "dp_replicate": 4}.items()
    with pytest.raises(InvalidConfig, match="--squared-relu is nothing that it has a name for"):
        read_nemo1.to_own({"--squared-relu": []})
    with pytest.raises(InvalidConfig, match=r"model\.optim\.name has no value of sgd whose state ranks share"):
        read_nemo1.to_own({"--optimizer": ["sgd"], "--use-distributed-optimizer": []})


@ROUND_TRIPS
@given(draw_jobs())
def test_what_is_written_is_read_back(job):
    options = list_options(job)
    assume(options is not None)
    layout = job.layout
    try:
        own = read_nemo1.to_own(options)
    except InvalidConfig as error:  # what NeMo has no word for
        shares_sgd = job.scenario.optimizer.name == "sgd" and job.shards_state
        has_fp8 = options["--fp8-format"] is not None
        assert shares_sgd or (layout.zero > 1 and (layout.dp_replicate > 1 or has_fp8)), error
        assume(False)
    devices = min(8, layout.world_size)
    own |= {"trainer.devices": devices, "trainer.num_nodes": layout.world_size // devices}
    own |= {"model.megatron_amp_O2": True, "model.transformer_engine": True}
    found = read("\n".join(dump(nest(own))))
    compare_job(job, found, list_differences(job))
    features = job.scenario.engine.features
    assert found.told["overlap_dp"] == str(features.overlap_dp).lower() or layout.dp == 1
    assert found.told.get("cuda_graphs", "none") == features.cuda_graphs
    check_choices(job, found)
    if layout.virtual_stages > 1:
        assert found.told.get("overlap_pp", "true") == str(features.overlap_pp).lower()


def test_commands_take_such_a_file(capsys):
    path = str(FOLDER / "llama.yaml")
    assert main(["read", path]) == 0
    said = capsys.readouterr().out
    assert "NeMo, 128 GPUs, 8 a node" in said and "model.tensor_model_parallel_size = 4" in said
    assert main(["explain", path, "--gpu", "h100-80g-sxm"]) == 0
    said = capsys.readouterr()
    assert "is read as a job of NeMo" in said.err and "tp4+sp" in said.out
    tuning = str(FOLDER / "tuning.yaml")
    assert main(["explain", tuning, "--gpu", "h100-80g-sxm"]) == 2
    assert "does not say the sizes of the model: --model M does" in capsys.readouterr().err
    assert main(["explain", tuning, "--gpu", "h100-80g-sxm", "--model.name=llama3.1-8b"]) == 0
