"""Files of NeMo AutoModel: each is understood field by field, and what is written is read back."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from program_files import ROUND_TRIPS, check_any_value, check_rows, check_understood, compare_job
from program_jobs import LAYOUTS, job_of

from dtlayout.base import toml
from dtlayout.base.errors import DtlayoutError, InvalidConfig
from dtlayout.cli import main
from dtlayout.models.presets import PRESETS
from dtlayout.programs.automodel import read as read_automodel
from dtlayout.programs.automodel.write import OPTIONS
from dtlayout.programs.files.trees import read_tree
from dtlayout.programs.program import Job
from dtlayout.programs.reading import read_program
from dtlayout.programs.registry import PROGRAMS
from dtlayout.programs.understood import OtherFile, Understood
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.optimizers import SGD, AdamW

FOLDER = Path(__file__).parent / "automodel"
BF16 = {"params": "bfloat16", "compute": "bfloat16", "reduce": "bfloat16"}
MIXED = BF16 | {"reduce": "float32"}
ADAM = {"name": "adamw", "weight_decay": 0.1, "max_norm": 1.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
LAYOUT = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "dp_replicate": 1, "zero": 3, "recompute": "none"}
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "pretrain.yaml": {
        "gpus": (8, 8), "batch": {"seq_len": 2048, "global_batch": 64}, "precision": MIXED | {"params": "float32"},
        "model": {
            "family": "qwen3", "qk_norm": True, "num_layers": 36, "hidden_size": 4096, "ffn_size": 12288,
            "num_heads": 32, "num_kv_heads": 8, "vocab_size": 151936, "norm_eps": 1e-6, "rope_theta": 1e6,
        },
        "layout": LAYOUT | {
            "tp": 2, "sequence_parallel": True, "tp_overlap": False, "dp_shard": 4, "micro_batch": 2,
            "recompute": "full",
        },
        "optimizer": ADAM | {"lr": 3e-4, "max_norm": 0.5},
        "kernels": {"compile": "none", "attention": "sdpa-cudnn"},
    },
    "lora.yaml": {
        "gpus": (0, 0), "batch": {"global_batch": 64}, "precision": MIXED, "model": {"name": "llama3.2-1b"},
        "layout": LAYOUT | {"dp_shard": -1, "micro_batch": 8}, "kernels": {"compile": "none"},
        "optimizer": ADAM | {"lr": 1e-5, "beta2": 0.999, "weight_decay": 0.0},
        "adapter": {"rank": 8, "alpha": 32.0, "targets": []},
    },
    "start.sh": {
        "gpus": (16, 8), "batch": {"global_batch": 64, "seq_len": 1024}, "precision": MIXED,
        "model": {"name": "llama3.2-1b"}, "kernels": {"compile": "none"},
        "layout": LAYOUT | {
            "tp": 2, "sequence_parallel": False, "tp_overlap": False, "dp_shard": 8, "micro_batch": 2,
        },
        "optimizer": ADAM | {"lr": 1e-5, "weight_decay": 0.0},
        "adapter": {"rank": 8, "alpha": 32.0, "targets": []},
    },
    "release-0.2.yaml": {
        "gpus": (16, 0), "batch": {"seq_len": 4096, "global_batch": 32}, "precision": BF16,
        "model": {"name": "llama3.1-70b"},
        "layout": LAYOUT | {
            "tp": 4, "pp": 2, "sequence_parallel": False, "tp_overlap": False, "dp_shard": 2, "micro_batch": 1,
            "schedule": "1f1b", "virtual_stages": 1, "zero": 1, "recompute": "full",
        },
        "optimizer": ADAM | {"lr": 2e-5},
        "kernels": {"compile": "none", "loss": "linear", "attention": "flash-attn"},
    },
    "experts.yaml": {
        "gpus": (16, 8), "batch": {"seq_len": 4096, "global_batch": 512}, "precision": MIXED,
        "model": {"name": "qwen3-30b-a3b", "num_layers": 24},
        "layout": LAYOUT | {
            "ep": 8, "ep_dispatcher": "deepep", "dp_shard": 16, "micro_batch": 4, "recompute": "selective",
        },
        "optimizer": ADAM | {"lr": 1e-4, "beta2": 0.999, "weight_decay": 0.0},
        "kernels": {"compile": "none", "attention": "sdpa-cudnn"},
    },
    "pipeline.yaml": {
        "gpus": (64, 0), "batch": {"seq_len": 4096, "global_batch": 128}, "precision": BF16 | {"params": "float32"},
        "model": {"name": "llama3.1-70b"},
        "layout": LAYOUT | {
            "tp": 4, "pp": 4, "sequence_parallel": True, "tp_overlap": True, "dp_replicate": 2, "dp_shard": 2,
            "micro_batch": 1, "schedule": "interleaved-1f1b", "virtual_stages": 5, "zero": 1, "offload": "optimizer",
        },
        "optimizer": ADAM | {"lr": 2e-5}, "kernels": {"compile": "blocks"},
    },
    "fp8.yaml": {
        "gpus": (8, 0), "batch": {"seq_len": 8192, "global_batch": 8}, "precision": BF16 | {"matmuls": "fp8-rowwise"},
        "model": {"name": "qwen2.5-7b"},
        "layout": LAYOUT | {"cp": 2, "cp_method": "gather", "dp_shard": 4, "micro_batch": 1},
        "optimizer": {"name": "sgd", "lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0, "max_norm": 1.0},
        "kernels": {"compile": "model", "attention": "sdpa-flash"},
    },
    "qlora.yaml": {
        "gpus": (8, 0), "batch": {"seq_len": 832, "global_batch": 32}, "precision": BF16 | {"base": "nf4"},
        "model": {"name": "llama3.1-8b"}, "kernels": {"compile": "none"},
        "layout": LAYOUT | {"dp_replicate": 2, "dp_shard": 4, "micro_batch": 1},
        "optimizer": ADAM | {"lr": 5e-6, "beta2": 0.98, "weight_decay": 0.01},
        "adapter": {"rank": 16, "alpha": 16.0, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    },
}  # fmt: skip
"""File → what it says, in our words, without the name of a model with sizes of its own."""


def read(text: str, num_gpus: int = 0, path: Path = FOLDER / "job.yaml") -> Understood:
    file = OtherFile(path, text, read_tree(text, {}), {}, num_gpus)
    assert read_automodel.is_ours(file)
    found = read_automodel.read(file)
    if found.problems:
        raise InvalidConfig(found.problems)
    return found


def change(name: str, *pairs: tuple[str, str]) -> str:
    """Text of a file of the folder, with other words."""
    text = (FOLDER / name).read_text()
    for before, after in pairs:
        assert before in text, before
        text = text.replace(before, after)
    return text


def list_rows(found: Understood, how: str) -> dict[str, str]:
    """Option → note, of the options that play one part."""
    return {row.option.partition(" = ")[0]: row.note for row in found.rows if row.how == how}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_field_of_a_file_is_understood_and_each_option_has_a_row(name):
    expected = {"engine": "automodel", **UNDERSTOOD[name]}
    if "seq_len" not in expected["batch"]:
        with pytest.raises(InvalidConfig, match=r"batch\.seq_len is missing"):
            check_understood(FOLDER / name, expected)
        found = read_program(FOLDER / name, {})
        assert found is not None and found.tables["batch"] == expected["batch"]
    else:
        found = check_understood(FOLDER / name, expected)
    tree = read_tree((FOLDER / name.replace("start.sh", "lora.yaml")).read_text(), {})
    assert tree is not None
    check_rows(found, tree.values)


def test_every_file_of_the_folder_is_held_against_what_it_says():
    assert {each.name for each in FOLDER.iterdir()} == set(UNDERSTOOD)


def test_what_has_no_effect_is_said():
    idle = list_rows(read(change("experts.yaml")), "no effect")
    assert idle == {"distributed.sequence_parallel": "tp is 1"} | {
        f"distributed.pipeline.{name}": "pp is 1"
        for name in ("pp_schedule", "pp_microbatch_size", "round_virtual_stages_to_pp_multiple", "layers_per_stage")
    }
    assert list_rows(read(change("pipeline.yaml")), "no effect") == {"dataset.seq_length": "sequences are packed"}
    idle = list_rows(read(change("pretrain.yaml")), "no effect")
    assert idle == {"model.backend.attn": "another option says the kernel"}
    idle = list_rows(read(change("fp8.yaml", ("enabled: true", "enabled: false"))), "no effect")
    assert idle["fp8.recipe_name"] == "fp8.enabled is not true" and idle["compile.mode"] == "compile.enabled is false"
    idle = list_rows(read(change("fp8.yaml", ("momentum: 0.9", "betas: [0.9, 0.95]\n  eps: 1e-8"))), "no effect")
    assert idle["optimizer.betas"] == "its SGD has no moments" and idle["optimizer.eps"] == "with SGD"
    text = change("lora.yaml") + "\nqat:\n  enabled: false\n  fake_quant_after_n_steps: 10\n"
    assert list_rows(read(text), "no effect")["qat.fake_quant_after_n_steps"] == "qat.enabled is false"
    idle = list_rows(read(change("experts.yaml", ("ep_size: 8", "ep_size: 1"))), "no effect")
    assert idle["model.backend.dispatcher"] == "ep is 1" == idle["distributed.moe.wrap_outer_model"]


def test_what_is_assumed_is_said():
    assumed = list_rows(read(change("lora.yaml")), "assumed")
    whole = "gradients stay whole until the last microbatch, and are predicted as sharded"
    assert assumed["distributed.defer_fsdp_grad_sync"] == whole
    assert assumed["model.torch_dtype"] == "that of the weights, as they are usually stored"
    assert assumed["dataset"] == "its sequences are as long as they come: --batch.seq_len=N says it"
    assert assumed["peft.match_all_linear"] == "linear layers of blocks, without the head"
    assert assumed["optimizer._target_"] == "predicted with decoupled weight decay"
    assumed = list_rows(read(change("pipeline.yaml")), "assumed")
    assert assumed["distributed.enable_async_tensor_parallel"] == "which compiles blocks"
    assert assumed["loss_fn._target_"] == "predicted as MaskedCrossEntropy"
    unsaid = read(change("pipeline.yaml", ("sequence_parallel: true", "sequence_parallel: false")))
    assert unsaid.get("layout", "sequence_parallel") is True
    assert list_rows(unsaid, "assumed")["distributed.enable_async_tensor_parallel"] == "which turns it on"
    longest = read(change("qlora.yaml", ("packed_sequence_size: 832", "packed_sequence_size: 0")))
    assert list_rows(longest, "assumed")["dataset.seq_length"] == "that of its longest sequences"
    once = read(change("lora.yaml", ("global_batch_size: 64", "global_batch_size: 32")), 4)
    assert whole not in list_rows(once, "assumed").values()


@pytest.mark.parametrize(
    ("name", "change_of", "problem"),
    [
        ("pretrain.yaml", ("tp_size: 2", "tp_size: two"), "distributed.tp_size=two is no whole number above 0"),
        ("pretrain.yaml", ("tp_size: 2", "tp_size: 3"), "8 GPUs are no multiple of tp · cp · pp = 3"),
        ("pretrain.yaml", ("tp_size: 2", "tp_size: 2\n  new_thing: 3"), "distributed.new_thing is not understood here"),
        ("pretrain.yaml", ("strategy: fsdp2", "strategy: ddp"), "distributed.strategy=ddp is not predicted; fsdp2 is"),
        ("release-0.2.yaml", ("fsdp2.FSDP2M", "megatron_fsdp.MegatronFSDPM"), "MegatronFSDPManager is not predicted"),
        ("release-0.2.yaml", ("dp_replicate_size: 1", "dp_replicate_size: 3"), "=3 does not divide dp = 2"),
        ("release-0.2.yaml", ("pp_microbatch_size: 1", "pp_microbatch_size: 3"), "=4 is no multiple of the pipeline's"),
        ("release-0.2.yaml", ("pp_schedule: 1f1b", "pp_schedule: dfs"), "autopipeline.pp_schedule=dfs is nothing that"),
        ("pipeline.yaml", ("round_virtual_stages_to_pp_multiple: up", "pp_seq_len: 4096\n    layers_per_stage: 9"),
         "distributed.pipeline.layers_per_stage=9 makes 9 stages, which pp = 4 does not divide"),
        ("pipeline.yaml", ("meta-llama/Llama-3.1-70B", "company/own-70b"), "layers_per_stage=4 depends on blocks that"),
        ("pretrain.yaml", ("activation_checkpointing: true", "activation_checkpointing: some"), "=some is nothing"),
        ("pretrain.yaml", ("hidden_act: silu", "hidden_act: gelu"), "model.config: hidden_act='gelu' is not known"),
        ("pretrain.yaml", ("Qwen3Config", "MyOwnConfig"), "model.config: model_type is missing"),
        ("pretrain.yaml", ("exp_avg_dtype: torch.float32", "exp_avg_dtype: bf16"), "optimizer.exp_avg_dtype and"),
        ("pretrain.yaml", ("torch_dtype: bfloat16", "torch_dtype: fp4"), "model.torch_dtype=fp4 is nothing that is"),
        ("pretrain.yaml", ("attn: sdpa", "attn: flex"), "model.backend.attn=flex is nothing that is known here"),
        ("pretrain.yaml", ("TrainFinetuneRecipeForNextTokenPrediction", "KnowledgeDistillationRecipe"),
         "recipe=KnowledgeDistillationRecipe is not predicted"),
        ("lora.yaml", ("AutoModelForCausalLM.from", "AutoModelForImageTextToText.from"), "causal language models are"),
        ("lora.yaml", ("torch.optim.Adam", "dion.Muon"), "optimizer._target_=Muon is nothing that is known here"),
        ("lora.yaml", ("betas: [0.9, 0.999]", "betas: 0.9"), "optimizer.betas=0.9 are no two numbers"),
        ("lora.yaml", ("dim: 8", "dim: 8\n  use_dora: true"), "peft.use_dora=true is not predicted"),
        ("lora.yaml", ("step_scheduler:", "freeze_config: {freeze_embeddings: true}\nstep_scheduler:"),
         "freeze_config.freeze_embeddings is not understood here"),
        ("qlora.yaml", ('"*.q_proj"', '"*.layers.0.*.q_proj"'), "peft.target_modules has *.layers.0.*.q_proj, whi"),
        ("qlora.yaml", ("quant_type: nf4", "quant_type: fp4"), "bnb_4bit_quant_type=fp4 is not predicted; nf4 is"),
        ("qlora.yaml", ("peft:", "peft_config:"), "quantization freezes the weights that it stores in few bits, and"),
        ("fp8.yaml", ("recipe_name: rowwise", "recipe_name: block"), "fp8.recipe_name=block is nothing that is known"),
        ("fp8.yaml", ("sdpa_method: [flash", "sdpa_method: [new"), "model.sdpa_method=['new_attention', 'efficient"),
        ("experts.yaml", ("dispatcher: hybridep", "dispatcher: torch"), "model.backend.dispatcher=torch is not predi"),
        ("experts.yaml", ("attn: te", "attn: te\n    te_fp8: {recipe: block}"), "model.backend.te_fp8.recipe is not u"),
        ("experts.yaml", ("tp_size: 1", "tp_size: 1\n  dp_size: 4"), "the degrees multiply to 4, and the job has 16"),
        ("lora.yaml", ("tp_size: 1", "tp_size: ${oc.env:TP}"), "distributed.tp_size is ${oc.env:TP}, the variable TP"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named(name, change_of, problem):
    with pytest.raises(InvalidConfig) as caught:
        read(change(name, change_of))
    assert any(problem in each for each in caught.value.problems), caught.value.problems


def test_defaults_are_those_of_the_release():
    new = change("lora.yaml")
    for text, reduce in (
        (new, "float32"),
        (change("release-0.2.yaml"), "bfloat16"),
        (change("fp8.yaml"), "bfloat16"),
        (new.replace("  sequence_parallel: false", "  mp_policy: {reduce_dtype: bf16}"), "bfloat16"),
    ):
        assert read(text).get("precision", "reduce") == reduce
    bare = new.replace("  lr: 1.0e-5\n  weight_decay: 0\n", "")
    assert read(bare).tables["optimizer"].items() >= {"lr": 1e-4, "weight_decay": 0.01}.items()
    older = change("release-0.2.yaml", ("  lr: 2.0e-5\n  weight_decay: 0.1\n", ""))
    assert read(older).tables["optimizer"].items() >= {"lr": 1e-3, "weight_decay": 0.01}.items()
    short = change("lora.yaml", ("  local_batch_size: 8\n", ""), ("  global_batch_size: 64\n", ""))
    assert (read(short).get("layout", "micro_batch"), read(short).get("batch", "global_batch")) == (1, 32)


@pytest.mark.parametrize(
    ("gathers", "defers", "pp", "zero"),
    [
        (None, None, 1, 3), (None, False, 1, 3), (True, False, 2, 3), (False, True, 1, 1), (False, False, 1, 2),
        (False, None, 1, 1), (None, None, 2, 1), (None, False, 2, 2),
    ],
)  # fmt: skip
def test_the_stage_of_zero_is_what_is_gathered_and_deferred(gathers, defers, pp, zero):
    said = {"reshard_after_forward": gathers, "defer_fsdp_grad_sync": defers}
    lines = "".join(f"\n  {name}: {str(value).lower()}" for name, value in said.items() if value is not None)
    text = change("lora.yaml", ("cp_size: 1", f"cp_size: 1\n  pp_size: {pp}{lines}"))
    assert read(text, 8).get("layout", "zero") == zero


@pytest.mark.parametrize(
    ("schedule", "more", "virtual"),
    [
        ("1f1b", "", 1), ("GPipe", "", 1), ("Interleaved1F1B", "", 2), ("interleaved_1f1b", "layers_per_stage: 4", 2),
        ("interleaved1f1b", "layers_per_stage: 3, round_virtual_stages_to_pp_multiple: up", 3),
        ("interleaved1f1b", "layers_per_stage: 3, round_virtual_stages_to_pp_multiple: down", 3),
        ("interleaved1f1b", "layers_per_stage: 5, round_virtual_stages_to_pp_multiple: down", 2),
    ],
)  # fmt: skip
def test_stages_of_a_rank_are_counted_as_the_program_does(schedule, more, virtual):
    pipeline = f"pp_size: 2\n  pipeline: {{pp_schedule: {schedule}{', ' * bool(more)}{more}}}"
    found = read(change("lora.yaml", ("cp_size: 1", f"cp_size: 1\n  {pipeline}")), 8)
    assert found.get("layout", "virtual_stages") == virtual, "llama3.2-1b has 16 blocks"


@pytest.mark.parametrize(
    ("words", "targets"),
    [
        ("target_modules: '*_proj'", []),
        ("target_modules: ['*.q_proj', v_proj]", ["q_proj", "v_proj"]),
        ("target_modules: [gate_proj, '*.up_proj', down_proj]", ["gate_proj", "up_proj", "down_proj"]),
        ("exclude_modules: ['*.lm_head']", []),
        ("lora_A_init: xavier", []),
    ],
)
def test_targets_of_an_adapter_are_the_linear_layers_of_blocks(words, targets):
    found = read(change("lora.yaml", ("match_all_linear: True", words)))
    assert found.get("adapter", "targets") == targets


def test_what_is_called_otherwise_in_other_releases_is_read_alike():
    manager = change(
        "lora.yaml", ("strategy: fsdp2", "_target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager")
    )
    assert read(manager).tables["layout"] == read(change("lora.yaml")).tables["layout"]
    text = change("release-0.2.yaml", ("  activation_checkpointing: true\n", "")) + (
        "\nparallelizer:\n  _target_: nemo_automodel.components.moe.parallelizer.parallelize_model\n"
        "  activation_checkpointing: true\n"
    )
    assert read(text).get("layout", "recompute") == "full"
    renamed = change("pretrain.yaml", ("torch_dtype: bfloat16", "dtype: float32"))
    assert read(renamed).get("precision", "params") == "float32"
    deep = change("experts.yaml", ("dispatcher: hybridep", "enable_deepep: true"))
    assert read(deep).get("layout", "ep_dispatcher") == "deepep"


def test_gpus_are_those_of_the_degrees_the_command_or_another_section():
    assert read(change("lora.yaml"), 16).get("layout", "dp_shard") == 16
    with pytest.raises(InvalidConfig, match="the degrees multiply to 16, and the job has 32 GPUs"):
        read(change("release-0.2.yaml"), 32)
    assert read(change("release-0.2.yaml"), 16).num_gpus == 16
    ranks = read(change("experts.yaml", ("  ntasks_per_node: 8\n", "")))
    assert (ranks.num_gpus, ranks.gpus_per_node) == (16, 8)
    command = (FOLDER / "start.sh").read_text()
    for text, gpus in (
        (command.replace("NODES:-2", "NODES:-4"), 32),
        ("automodel lora.yaml --nproc-per-node 4", 4),
        ("automodel finetune llm -c lora.yaml --nproc-per-node=2 --distributed.cp_size 2", 2),
        ("torchrun --nproc-per-node 8 examples/llm_finetune/finetune.py --config lora.yaml", 8),
        ("automodel lora.yaml", 0),
    ):
        assert read(text, path=FOLDER / "start.sh").num_gpus == gpus
    for text, problem in (
        ("automodel none.yaml --nproc-per-node 4", "the file none.yaml is not there, beside the script"),
        ("automodel $FILE.yaml", "names no YAML file that is known"),
        ("automodel lora.yaml --new 4", "new is not understood here"),
    ):
        with pytest.raises(InvalidConfig, match=problem):
            read(text, path=FOLDER / "start.sh")


def test_a_model_that_is_not_here_is_asked_for(tmp_path):
    unknown = read(change("lora.yaml", ("meta-llama/Llama-3.2-1B", "company/own-model")))
    assert "model" not in unknown.tables
    note = list_rows(unknown, "assumed")["model.pretrained_model_name_or_path"]
    assert note == "its sizes are not known here: --model M says them"
    names = ("NeMoAutoModelForCausalLM.from_pretrained", "components.models.gpt2.build_gpt2_model")
    builder = change("lora.yaml", names, ("  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B\n", ""))
    assert list_rows(read(builder), "assumed")["model._target_"].startswith("the sizes are in the program's code")
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 256,
    }))  # fmt: skip
    text = change("lora.yaml", ("meta-llama/Llama-3.2-1B", "company/own-model"))
    assert read(text, path=tmp_path / "job.yaml").get("model", "name") == str(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["pretrain.yaml", "pipeline.yaml", "qlora.yaml"])
def test_no_value_of_an_option_ends_in_anything_but_a_sentence(name):
    assert check_any_value(read_automodel.read, FOLDER / name) > 500


def test_only_its_own_files_are_taken():
    for text in (
        "model: {_target_: nemo.collections.llm.LlamaModel}\ntrainer: {devices: 8}",
        "model_name_or_path: gpt2\nlearning_rate: 1.0e-5\nbf16: true",
        "base_model: NousResearch/Llama-3.2-1B\nadapter: qlora\nmicro_batch_size: 2",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8",
        "experiment: {exp_name: nemo_automodel.x}\ntrain: {system: {tensor_model_parallel_size: 1}}",
        "step_scheduler: {global_batch_size: 8}\nmodel: {name: llama}",
        "torchrun --nproc-per-node 8 train.py --config job.yaml",
        "pip install automodel && python setup.py\ncat notes.yaml",
    ):
        assert not read_automodel.is_ours(OtherFile(Path("x"), text, read_tree(text, {}))), text
    for ours in (Path(__file__).parents[2] / "configs").glob("*.toml"):
        assert read_program(ours, {}) is None


GAPS = {
    "layout.recompute": {"recompute"}, "precision.matmuls": {"matmuls"}, "precision.compute": {"compute"},
    "layout.cp_method": {"cp_method"}, "layout.schedule": {"schedule"},
}  # fmt: skip
"""Beginning of a gap → what of a job it names."""


def compare(job: Job) -> None:
    """Fail unless a job is read back as it was written, but for what its gaps name."""
    arguments = PROGRAMS["automodel"].write(job)
    differ = {
        each for gap in arguments.gaps for start, names in GAPS.items() if gap.startswith(start) for each in names
    }
    found = read("\n".join(arguments.lines))
    compare_job(job, found, differ)
    kernels = job.estimate.kernels
    for key in ("attention", "compile"):
        if not any(gap.startswith(f"kernels.{key}=") for gap in arguments.gaps):
            assert found.get("kernels", key) == getattr(kernels, key)


@st.composite
def draw_jobs(draw: Any) -> Job:
    """A job that AutoModel can be told, or nearly so."""
    models = ["llama3.1-8b", "llama-13b", "llama3.2-1b", "qwen2.5-7b", "qwen3-8b", "qwen3-0.6b"]
    model = draw(st.sampled_from(models))
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 1, 2, 4]))
    dp, copies = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 1, 2]))
    virtual = draw(st.sampled_from([1, 2])) if pp > 1 and PRESETS[model].num_layers % (2 * pp) == 0 else 1
    sharded = draw(st.booleans())
    layout = Layout(
        tp=tp, pp=pp, cp=draw(st.sampled_from([1, 1, 2])), dp_shard=dp, dp_replicate=copies if dp > 1 else 1,
        virtual_stages=virtual, micro_batch=draw(st.sampled_from([1, 2])), sequence_parallel=sharded,
        schedule="interleaved-1f1b" if virtual > 1 else draw(st.sampled_from(["1f1b", "gpipe"])),
        tp_overlap=sharded and draw(st.booleans()), cp_method=draw(st.sampled_from(["ring", "gather"])),
        zero=draw(st.sampled_from([1, 2, 3])),
        recompute=draw(st.sampled_from(["none", "full", "selective", "every-2"])),
        offload=draw(st.sampled_from(["none", "none", "optimizer"])),
    )  # fmt: skip
    rate, norm = draw(st.sampled_from([1e-4, 3e-3, 2.5e-5])), draw(st.sampled_from([1.0, 0.5]))
    adam = AdamW(lr=rate, beta1=0.8, beta2=0.98, eps=1e-7, weight_decay=0.05, max_norm=norm)
    optimizer = draw(st.sampled_from([adam, SGD(lr=rate, momentum=0.8, max_norm=norm)]))
    formats = draw(st.sampled_from([
        {}, {"matmuls": "fp8-tensorwise"}, {"matmuls": "fp8-rowwise"}, {"matmuls": "mxfp8"}, {"compute": "float16"},
        {"params": "bfloat16"}, {"reduce": "bfloat16"},
    ]))  # fmt: skip
    kernels = Kernels(attention=draw(st.sampled_from(["sdpa-cudnn", "sdpa-flash", "fa3"])),
                      compile=draw(st.sampled_from(["none", "blocks", "model"])))  # fmt: skip
    return job_of("automodel", layout, model=model, optimizer=optimizer, kernels=kernels, **formats)


@ROUND_TRIPS
@given(draw_jobs())
def test_what_is_written_is_read_back(job):
    try:
        PROGRAMS["automodel"].write(job)
    except DtlayoutError:
        assume(False)
    compare(job)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "copies"])
def test_each_kind_of_layout_is_read_back(name):
    compare(job_of("automodel", LAYOUTS[name]))


def test_the_options_of_a_job_are_those_that_are_written():
    for name, layout in LAYOUTS.items():
        job = job_of("automodel", layout, matmuls="fp8-rowwise", optimizer=AdamW(max_norm=0.3))
        options, _ = PROGRAMS["automodel"].options(job)
        tree = read_tree("\n".join(PROGRAMS["automodel"].write(job).lines), {})
        assert tree is not None
        written = {key: value for key, value in options.items() if value is not None}
        assert written.items() <= tree.values.items(), name
        assert {option.name for option in OPTIONS} <= options.keys()


def test_explain_and_read_take_a_file(tmp_path, capsys):
    file, config = str(FOLDER / "experts.yaml"), tmp_path / "job.toml"
    assert main(["explain", file, "--gpu", "h100-80g-sxm", "--json"]) == 0
    said = capsys.readouterr()
    assert "is read as a job of NeMo AutoModel; dtlayout read shows how" in said.err
    document = json.loads(said.out)
    assert document["engine"] == "automodel" and document["gpus"] == 16
    lora = [str(FOLDER / "lora.yaml"), "--gpu", "h100-80g-sxm"]
    assert main(["explain", *lora]) == 2
    said = capsys.readouterr().err
    assert "--batch.seq_len=N does" in said and "--world N does" in said
    assert main(["explain", *lora, "--batch.seq_len=2048", "--world", "8"]) == 0
    assert main(["read", str(FOLDER / "qlora.yaml"), "--output", str(config)]) == 0
    assert "NeMo AutoModel, 8 GPUs" in capsys.readouterr().out
    tables = toml.loads(config.read_text())
    assert tables["adapter"]["rank"] == 16 and tables["precision"]["base"] == "nf4"
    assert main(["explain", str(config), "--engine", "automodel", "--gpus", "8", "--gpu", "h100-80g-sxm"]) == 0
