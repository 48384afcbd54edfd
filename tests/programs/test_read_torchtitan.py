"""torchtitan's files and commands: each is understood field by field, and what is written is read back."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from program_files import ROUND_TRIPS, check_rows, check_understood, compare_job
from program_jobs import LAYOUTS, job_of

from dtlayout.base import toml
from dtlayout.base.errors import DtlayoutError, InvalidConfig
from dtlayout.cli import main
from dtlayout.config.loading import parse_config
from dtlayout.models.presets import PRESETS
from dtlayout.programs.files.trees import read_tree
from dtlayout.programs.program import Job
from dtlayout.programs.reading import read_program
from dtlayout.programs.registry import PROGRAMS
from dtlayout.programs.torchtitan import read as read_torchtitan
from dtlayout.programs.torchtitan.names import NAMED
from dtlayout.programs.torchtitan.stages import cut_stages
from dtlayout.programs.torchtitan.write import CONVERTERS, SCHEDULES
from dtlayout.programs.understood import OtherFile, Understood
from dtlayout.schedules.schedules import find_schedule
from dtlayout.spec.batch import Batch
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.optimizers import AdamW

FOLDER = Path(__file__).parent / "torchtitan"


def read(text: str, world: int = 0, **given: str) -> Understood:
    """A file as it is read; InvalidConfig with its problems."""
    found = read_torchtitan.read(OtherFile(FOLDER / "job", text, read_tree(text, given), given, world))
    if found.problems:
        raise InvalidConfig(found.problems)
    return found


def change(name: str, *pairs: tuple[str, str], world: int = 0, **given: str) -> Understood:
    """A file of the folder with other words, as it is read."""
    text = (FOLDER / name).read_text()
    for before, after in pairs:
        assert before in text, before
        text = text.replace(before, after)
    return read(text, world, **given)


def refuse(name: str, *pairs: tuple[str, str], world: int = 0, **given: str) -> list[str]:
    """The problems of a file of the folder with other words."""
    with pytest.raises(InvalidConfig) as caught:
        change(name, *pairs, world=world, **given)
    return list(caught.value.problems)


def list_rows(found: Understood, how: str) -> dict[str, str]:
    """Option → note, of the options that play one part."""
    return {each.option: each.note for each in found.rows if each.how == how}


LAYOUT = {"dp_replicate": 1, "dp_shard": -1, "tp": 1, "cp": 1, "pp": 1, "ep": 1, "tp_overlap": False}
PRECISION = {"params": "float32", "compute": "bfloat16", "reduce": "float32"}
ADAMW = {
    "name": "adamw", "lr": 8e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "max_norm": 1.0,
}  # fmt: skip
CUDNN = {"attention": "sdpa-cudnn", "compile": "none"}
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "llama3_8b.toml": {
        "gpus": (8, 0), "model": {"name": "llama3.1-8b"}, "batch": {"seq_len": 8192, "global_batch": 128},
        "layout": LAYOUT | {"dp_shard": 8, "micro_batch": 2, "zero": 2, "recompute": "every-2"},
        "precision": PRECISION, "kernels": CUDNN, "optimizer": ADAMW | {"lr": 2e-4},
    },
    "llama3_70b.toml": {
        "gpus": (64, 0), "model": {"name": "llama3.1-70b"}, "batch": {"seq_len": 8192, "global_batch": 32},
        "layout": LAYOUT | {"tp": 8, "tp_overlap": True, "micro_batch": 4, "zero": 3, "recompute": "full"},
        "precision": PRECISION | {"matmuls": "fp8-tensorwise"}, "kernels": CUDNN | {"compile": "blocks"},
        "optimizer": ADAMW | {"lr": 1.5e-4, "weight_decay": 0.05},
    },
    "llama3_405b.toml": {
        "gpus": (512, 0), "told": {"fused_loss": "always"}, "model": {"name": "llama3.1-405b"},
        "batch": {"seq_len": 16384, "global_batch": 32},
        "layout": LAYOUT | {
            "dp_replicate": 2, "dp_shard": 16, "tp": 8, "cp": 2, "cp_method": "gather", "micro_batch": 1, "zero": 3,
            "recompute": "full", "offload": "optimizer",
        },
        "precision": PRECISION | {"matmuls": "fp8-rowwise"}, "kernels": CUDNN,
        "optimizer": ADAMW | {"lr": 8e-5, "beta2": 0.98},
    },
    "interleaved.toml": {
        "gpus": (32, 0), "model": {"name": "llama3.1-8b"}, "batch": {"seq_len": 4096, "global_batch": 128},
        "layout": LAYOUT | {
            "dp_shard": 4, "tp": 2, "pp": 4, "schedule": "interleaved-1f1b", "virtual_stages": 2, "micro_batch": 2,
            "stage_layers": [3, 5, 4, 4, 4, 4, 4, 4], "zero": 1, "recompute": "selective",
        },
        "precision": PRECISION | {"params": "bfloat16"}, "kernels": CUDNN, "optimizer": ADAMW,
    },
    "qwen3_moe.toml": {
        "gpus": (16, 0), "model": {"name": "qwen3-30b-a3b"}, "batch": {"seq_len": 4096, "global_batch": 64},
        "layout": LAYOUT | {
            "dp_shard": 16, "ep": 16, "ep_dispatcher": "deepep", "micro_batch": 4, "zero": 3, "recompute": "selective",
        },
        "precision": PRECISION, "kernels": CUDNN | {"compile": "blocks"}, "optimizer": ADAMW,
    },
    "older.toml": {
        "gpus": (16, 0), "model": {"name": "llama3.1-8b"}, "batch": {"seq_len": 32768, "global_batch": 4},
        "layout": LAYOUT | {
            "dp_replicate": 2, "dp_shard": 2, "cp": 4, "cp_method": "ring", "micro_batch": 1, "zero": 3,
            "recompute": "none",
        },
        "precision": PRECISION | {"matmuls": "fp8-rowwise"}, "kernels": {"compile": "blocks"},
        "optimizer": ADAMW | {"lr": 3e-4, "max_norm": 0.5},
    },
    "earliest.toml": {
        "gpus": (64, 0), "model": {"name": "llama3.1-70b"}, "batch": {"seq_len": 8192, "global_batch": 32},
        "layout": LAYOUT | {
            "dp_shard": 4, "tp": 8, "pp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2, "micro_batch": 2,
            "stage_layers": [19, 21, 21, 19], "zero": 1, "recompute": "full",
        },
        "precision": PRECISION, "kernels": {"compile": "none"}, "optimizer": ADAMW | {"lr": 1e-4},
    },
    "named.sh": {
        "gpus": (8, 8), "model": {"name": "llama3.1-8b"}, "batch": {"seq_len": 8192, "global_batch": 8},
        "layout": LAYOUT | {"tp": 2, "tp_overlap": True, "micro_batch": 2, "zero": 3, "recompute": "full"},
        "precision": PRECISION, "kernels": {"compile": "blocks"},
        "optimizer": ADAMW | {"lr": 1e-4, "beta2": 0.98, "state_format": "bfloat16"},
    },
    "overrides.sh": {
        "gpus": (8, 8), "model": {"name": "llama3.1-8b"}, "batch": {"seq_len": 8192, "global_batch": 128},
        "layout": LAYOUT | {"dp_shard": 4, "tp": 2, "micro_batch": 4, "zero": 2, "recompute": "selective"},
        "precision": PRECISION | {"matmuls": "fp8-tensorwise"}, "kernels": CUDNN | {"compile": "blocks"},
        "optimizer": ADAMW | {"lr": 2e-4},
    },
    "nodes.slurm": {
        "gpus": (32, 8), "model": {"name": "qwen3-30b-a3b"}, "batch": {"seq_len": 4096, "global_batch": 256},
        "layout": LAYOUT | {"ep": 8, "micro_batch": 2, "zero": 2, "recompute": "full"},
        "precision": PRECISION, "kernels": {"compile": "none"}, "optimizer": ADAMW,
    },
}  # fmt: skip
"""File → what it says, in our words."""


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_field_of_a_file_is_understood(name):
    expected = UNDERSTOOD[name]
    world = 64 if name == "llama3_70b.toml" else 0  # the one that does not say its GPUs
    check_understood(FOLDER / name, {"engine": "torchtitan", **expected}, num_gpus=world)


def list_options(name: str) -> set[str]:
    """Names of the options that a file has."""
    text = (FOLDER / name).read_text()
    if name.endswith("toml"):
        tree = read_tree(text, {})
        assert tree is not None
        return set(tree.values)
    behind = text[text.index("torchtitan.train") if "torchtitan.train" in text else text.index("run_train.sh") :]
    names = {each.replace("-", "_").replace(".no_", ".") for each in re.findall(r"--([a-z][\w.-]+)", behind)}
    return {f"--{each}" if each in ("module", "config") else each for each in names}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_option_of_a_file_has_a_row(name):
    found = read_program(FOLDER / name, {})
    assert found is not None and len(list_options(name)) > 3
    check_rows(found, list_options(name))


def test_every_file_of_the_folder_is_held_against_what_it_says():
    assert {each.name for each in FOLDER.iterdir()} == set(UNDERSTOOD)


def test_what_has_no_effect_is_said():
    assert list_rows(change("llama3_8b.toml"), "no effect") == {
        "parallelism.context_parallel_rotate_method = alltoall": "cp is 1",
        "parallelism.pipeline_parallel_schedule = 1F1B": "pp is 1",
        "quantize.linear.float8.enable_fsdp_float8_all_gather = false": "its converter is not in model.converters",
        "quantize.linear.float8.filter_fqns = ['output']": "its converter is not in model.converters",
    }
    assert list_rows(change("older.toml"), "no effect") == {
        "parallelism.pipeline_parallel_layers_per_stage = 4": "pp is 1",
        "activation_checkpoint.selective_ac_option = op": "mode is none",
    }
    found = change("qwen3_moe.toml", ("30B-A3B", "8B"))
    assert list_rows(found, "no effect") == {
        "parallelism.expert_parallel_degree = 16": "the model has no experts",
        "parallelism.expert_parallel_comm_backend = deepep": "ep is 1",
        "parallelism.expert_tensor_parallel_degree = 1": "ep is 1",
    }
    assert found.get("layout", "ep") == 1 and found.get("layout", "ep_dispatcher") is None
    alone = change(
        "llama3_70b.toml", ("degree = -1", "degree = 1"), ('converters = ["quantize.linear.float8"]', "")
    )  # fmt: skip
    assert list_rows(alone, "no effect")["training.mixed_precision_param"] == "nothing is sharded, beside tp or pp"
    assert alone.get("precision", "compute") == "float32" and alone.get("layout", "zero") is None
    one = change("llama3_70b.toml", ("tensor_parallel_degree = 8", "tensor_parallel_degree = 1"), world=8)
    assert list_rows(one, "no effect")["parallelism.enable_async_tensor_parallel = true"] == "tp is 1"
    assert one.get("layout", "tp_overlap") is False
    copied = change(
        "llama3_405b.toml", ("shard_degree = 16", "shard_degree = 1"), ("context_parallel_degree = 2", ""),
        ("tensor_parallel_degree = 8", ""),
    )  # fmt: skip
    assert list_rows(copied, "no effect") == {
        "parallelism.fsdp_reshard_after_forward = always": "nothing is sharded",
        "training.enable_cpu_offload = true": "nothing is sharded",
    }
    assert copied.get("layout", "offload") == "none" and copied.num_gpus == 2


@pytest.mark.parametrize(
    ("components", "kind", "told"),
    [("['model', 'loss']", "blocks", {}), ("['model']", "blocks", {"fused_loss": "never"}),
     ("['loss']", "none", {"fused_loss": "always"}), ("[]", "none", {})],
)  # fmt: skip
def test_components_say_what_is_compiled(components, kind, told):
    found = change("llama3_405b.toml", ('components = ["loss"]', f"components = {components}"))
    assert found.get("kernels", "compile") == kind and found.told == told and not found.problems


def test_what_is_predicted_otherwise_is_marked():
    def assumed(name: str, *pairs: tuple[str, str]) -> dict[str, str]:
        found = list_rows(change(name, *pairs, world=64 if "70b" in name else 0), "assumed")
        return {option: note for option, note in found.items() if note != "its default"}

    assert assumed("interleaved.toml")["training.global_batch_size = 128"] == (
        "fills the pipeline 2 times, and is predicted as once"
    )
    assert assumed("qwen3_moe.toml")["parallelism.expert_parallel_comm_backend = deepep"] == (
        "0.2.2 itself has it for DeepSeek and Llama 4 alone"
    )
    rest = assumed("llama3_405b.toml")
    assert rest["quantize.linear.float8.filter_fqns"] == "predicted as if it named the head alone"
    assert assumed("older.toml")["optimizer.implementation = foreach"] == "predicted as if it were not there"
    fp8 = ("all_gather = true", "all_gather = false")
    assert assumed("llama3_70b.toml", fp8)["quantize.linear.float8.enable_fsdp_float8_all_gather"] == (
        "weights are predicted as gathered in fp8"
    )
    mixed = ("[training]", 'converters = ["quantize.linear.float8"]\n[training]')
    assert assumed("qwen3_moe.toml", mixed)["model.converters"] == (
        "experts are predicted in the format of linear layers"
    )
    grouped = ("[training]", 'converters = ["quantize.grouped_mm.float8"]\n[training]')
    assert assumed("qwen3_moe.toml", grouped)["model.converters = ['quantize.grouped_mm.float8']"] == (
        "experts are predicted as without it"
    )
    flex = assumed("llama3_8b.toml", ('flavor = "8B"', 'flavor = "8B_flex"'))
    assert flex["model.flavor = 8B_flex"] == "its attention is predicted as SDPA"
    graphs = assumed("named.sh", (" --training.disable-cuda-graphs", ""))
    assert graphs["training.disable_cuda_graphs"].startswith("CUDA graphs are on by default")
    assert "training.disable_cuda_graphs" not in assumed("named.sh")


CONTRADICTIONS = [
    ("llama3_8b.toml", ("seq_len = 8192", 'seq_len = "long"'), "training.seq_len=long is no whole number above 0"),
    ("llama3_8b.toml", ("tensor_parallel_degree = 1", "tensor_parallel_degree = 0"), "tensor_parallel_degree=0 is no"),
    ("llama3_8b.toml", ("shard_degree = 8", "shard_degree = 0"), "shard_degree=0 is neither -1 nor above 0"),
    ("llama3_8b.toml", ("batch_size = 128", "batch_size = 120"),
     "training.global_batch_size=120 is no multiple of local_batch_size * ranks of dp = 2 * 8"),
    ("llama3_8b.toml", ('mode = "selective"', 'mode = "memory_budget"'), "activation_checkpoint.mode=memory_budget is"),
    ("llama3_8b.toml", ('mode = "selective"', 'mode = "selective"\nselective_ac_option = "mm"'),
     "activation_checkpoint.selective_ac_option=mm is nothing that is known here"),
    ("llama3_8b.toml", ("in_backward = false", "in_backward = true"), "optimizer.early_step_in_backward is not"),
    ("llama3_8b.toml", ('name = "AdamW"', 'name = "Muon"'), "optimizer.name=Muon is nothing that is known here"),
    ("llama3_8b.toml", ("steps = 20_000", 'dtype = "float16"'), "training.dtype=float16 is nothing that is known here"),
    ("llama3_8b.toml", ('"never"', '"sometimes"'), "fsdp_reshard_after_forward=sometimes is nothing that is known"),
    ("llama3_8b.toml", ("[debug]", "[deepep]\nsync = 1\n[debug]"), "deepep.sync is not understood here"),
    ("llama3_70b.toml", ("enable = true", "enable = false"),
     "parallelism.enable_async_tensor_parallel=True takes compile.enable"),
    ("llama3_70b.toml", ('["model", "loss"]', '["loss"]'), "with model among compile.components"),
    ("llama3_70b.toml", ('"quantize.linear.float8"]', '"quantize.linear.mx"]'),
     "model.converters=['quantize.linear.mx'] with mx beside tp takes compile.enable = false"),
    ("llama3_70b.toml", ('"quantize.linear.float8"]', '"lora"]'), "model.converters=['lora'] has lora, which is"),
    ("llama3_70b.toml", ("[quantize.linear.float8]", '[quantize.linear.float8]\nrecipe_name = "rowwise"'),
     "quantize.linear.float8.enable_fsdp_float8_all_gather=True does not go with recipe_name"),
    ("llama3_70b.toml", ("[quantize.linear.float8]", "[quantize.linear.float8]\nemulate = true"), "emulate is not und"),
    ("llama3_70b.toml", ("steps = 1000", 'mixed_precision_param = "float32"'),
     "model.converters=['quantize.linear.float8'] computes in float32; fp8 is predicted beside bfloat16 alone"),
    ("llama3_405b.toml", ('"rowwise"', '"delayed"'), "quantize.linear.float8.recipe_name=delayed is nothing that is"),
    ("interleaved.toml", ("microbatch_size = 2", "microbatch_size = 3"),
     "training.local_batch_size=16 is no multiple of the pipeline's microbatch, 3"),
    ("interleaved.toml", ('"Interleaved1F1B"', '"ZBH9"'), "pipeline_parallel_schedule=ZBH9 is nothing that is known"),
    ("interleaved.toml", ('"Interleaved1F1B"', '"1F1B"'), "on 4 ranks takes no 8 stages, as parallelism.module_fqns"),
    ("interleaved.toml", ('    ["layers.3", ', "    ["), "parallelism.module_fqns_per_model_part: it has other blocks"),
    ("interleaved.toml", ("[activation", 'fsdp_reshard_after_forward = "always"\n[activation'),
     "parallelism.fsdp_reshard_after_forward=always in a pipeline is not predicted; never is"),
    ("interleaved.toml", ("[activation", 'pipeline_parallel_schedule_csv = "own.csv"\n[activation'),
     "parallelism.pipeline_parallel_schedule_csv=own.csv is nothing that is known here"),
    ("qwen3_moe.toml", ("expert_parallel_degree = 16", "expert_parallel_degree = 12"),
     "parallelism.expert_parallel_degree=12 does not divide the 16 ranks of dp_shard, cp and tp"),
    ("qwen3_moe.toml", ("expert_tensor_parallel_degree = 1", "expert_tensor_parallel_degree = 2"),
     "parallelism.expert_tensor_parallel_degree=2 cuts experts by tp, which is not predicted"),
    ("qwen3_moe.toml", ("expert_parallel_degree = 16", "tensor_parallel_degree = 2"),
     "parallelism.expert_parallel_degree leaves experts cut by tp"),
    ("qwen3_moe.toml", ('"deepep"', '"hybridep"'), "expert_parallel_comm_backend=hybridep is nothing that is known"),
    ("older.toml", ("compile = true", 'compile = "maybe"'), "training.compile=maybe is no true or false"),
    ("older.toml", ("batch_size = 1", "batch_size = 0"), "training.batch_size=0 is no whole number above 0"),
    ("older.toml", ('"float8"', '"fp4"'), "model.converters=fp4 has fp4, which is nothing that is known here"),
    ("earliest.toml", ("compile = false", "compile = false\nscaled = 3"), "training.scaled is not understood here"),
    ("earliest.toml", ("batch_size = 8", "batch_size = 6"),
     "training.batch_size=6 is no multiple of the pipeline's microbatch, 1"),
    ("earliest.toml", ("layers.40", "layers.10"),
     "experimental.pipeline_parallel_split_points: layers.19, layers.10, layers.61 are no blocks of 80 in their order"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "pair", "problem"), CONTRADICTIONS, ids=[f"{each[0]} {each[2][:50]}" for each in CONTRADICTIONS]
)
def test_what_contradicts_or_is_not_understood_is_refused_by_its_name(name, pair, problem):
    problems = refuse(name, pair, world=64 if name == "llama3_70b.toml" else 0)
    assert any(problem in each for each in problems), problems
    text = (FOLDER / name).read_text() + pair[1]
    options = {each for line in problems for each in re.findall(r"\b(\w+(?:\.\w+)+)\b", line)}
    assert any(each.rpartition(".")[2] in text for each in options), "an option of the file"


def test_degrees_that_do_not_multiply_to_the_gpus_are_refused():
    assert refuse("llama3_8b.toml", world=16) == [
        "parallelism.data_parallel_shard_degree=8 and the other degrees make 8 GPUs, and the job has 16"
    ]
    assert refuse("llama3_70b.toml", world=12) == [
        "12 GPUs are no multiple of 8, by parallelism.data_parallel_shard_degree = -1, "
        "parallelism.tensor_parallel_degree = 8"
    ]
    copies = ("shard_degree = -1", "shard_degree = 1\ndata_parallel_replicate_degree = 4")
    assert "parallelism.data_parallel_replicate_degree=4 beside tp or pp takes a shard degree above 1" in refuse(
        "llama3_70b.toml", copies
    )


def test_copies_of_what_only_cp_shards_are_marked():
    found = change("older.toml", ("shard_degree = 2", "shard_degree = 1"))
    assert list_rows(found, "assumed")["parallelism.context_parallel_degree"] == (
        "state that cp shards is predicted as copies"
    )


@pytest.mark.parametrize(
    ("text", "recompute"),
    [("", "every-2"), ('selective_ac_option = "op"', "selective"), ("selective_ac_option = 1", "full"),
     ('selective_ac_option = "0"', "full"), ('selective_ac_option = "4"', "every-4")],
)  # fmt: skip
def test_recomputation_is_that_of_the_option(text, recompute):
    found = change("llama3_8b.toml", ('mode = "selective"', text))
    assert found.get("layout", "recompute") == recompute
    rows = [row.how for row in found.rows if "layout.recompute" in row.ours]
    assert rows == ["read" if text else "assumed"]


def stages_of(*lines: str, layers: str = "", **given: str) -> Understood:
    """A pipeline of four ranks with further options."""
    pair = ('"Interleaved1F1B"', '"Interleaved1F1B"\n' + "\n".join(lines))
    text = (FOLDER / "interleaved.toml").read_text().replace(*pair)
    text = re.sub(r"module_fqns_per_model_part = \[.*?\n\]\n", "", text, flags=re.DOTALL)
    return read(text.replace('flavor = "8B"', f'flavor = "{layers or "8B"}"'), **given)


def test_stages_are_cut_by_the_programs_own_rule():
    assert cut_stages(6, 2) == [3, 3] and cut_stages(126, 16, 1, 1) == [7, *[8] * 14, 7]
    assert cut_stages(30, 4, 0, 2) == [8, 8, 8, 6]
    for arguments in ((4, 7), (8, 4, 4, 1), (8, 4, 1, 4)):
        with pytest.raises(InvalidConfig, match="make no"):
            cut_stages(*arguments)
    by_default = stages_of()
    assert by_default.tables["layout"]["stage_layers"] == [4, 5, 4, 4, 4, 4, 4, 3]
    assert list_rows(by_default, "assumed")["parallelism.pipeline_parallel_layers_per_stage"] == (
        "its rule, where embedding and head count as blocks"
    )
    named = stages_of("pipeline_parallel_layers_per_stage = 2", "pipeline_parallel_first_stage_less_layers = 0",
                      "pipeline_parallel_last_stage_less_layers = 0")  # fmt: skip
    assert named.tables["layout"]["stage_layers"] == [2] * 16 and named.get("layout", "virtual_stages") == 4
    with pytest.raises(InvalidConfig, match=r"takes no 9 stages, as parallelism\.pipeline_parallel_layers_per_stage"):
        stages_of("pipeline_parallel_layers_per_stage = 4")
    with pytest.raises(InvalidConfig, match="takes no 4 stages"):
        stages_of("pipeline_parallel_layers_per_stage = 9")
    with pytest.raises(InvalidConfig, match="pipeline_parallel_layers_per_stage: 32 blocks, with 4 and 0 for the ends"):
        stages_of("pipeline_parallel_layers_per_stage = 3", "pipeline_parallel_first_stage_less_layers = 4",
                  "pipeline_parallel_last_stage_less_layers = 0")  # fmt: skip


def test_blocks_of_an_unknown_model_are_asked_for():
    with pytest.raises(InvalidConfig, match=r"per_stage takes the number of blocks, .*: --given n_layers=N"):
        stages_of("pipeline_parallel_layers_per_stage = 2", layers="9B")
    found = stages_of("pipeline_parallel_layers_per_stage = 5", layers="9B", n_layers="38")
    assert found.tables["layout"]["stage_layers"] == [4, 5, 5, 5, 5, 5, 5, 4]
    unknown = stages_of(layers="9B")
    assert "model" not in unknown.tables and "stage_layers" not in unknown.tables["layout"]
    assert list_rows(unknown, "assumed")[""].startswith("stages are cut by cost: --given n_layers=N")


@pytest.mark.parametrize("ours", SCHEDULES)
def test_each_schedule_is_read_as_it_is_written(ours):
    virtual = find_schedule(ours).least_virtual_stages
    for theirs in (SCHEDULES[ours], SCHEDULES[ours].lower()):
        text = (FOLDER / "interleaved.toml").read_text().replace("Interleaved1F1B", theirs)
        text = re.sub(r"module_fqns_per_model_part = \[.*?\n\]\n", "", text, flags=re.DOTALL)
        found = read(text)
        assert found.get("layout", "schedule") == ours and found.get("layout", "virtual_stages") == virtual


RUN = "NGPU=8 CONFIG=llama3_8b ./run_train.sh"


def test_options_of_a_command_are_read_as_its_parser_does():
    found = read(f"{RUN} --parallelism.tensor-parallel-degree=2 --compile.no-enable --training.seq_len 4096")
    assert found.get("layout", "tp") == 2 and found.get("kernels", "compile") == "none"
    assert found.tables["batch"] == {"seq_len": 4096, "global_batch": 4} and found.num_gpus == 8
    for word, recompute in (
        ("activation-checkpoint:full", "full"), ("activation_checkpoint:selective", "selective"),
        ("activation-checkpoint:none", "none"), ("--activation_checkpoint.mode=full", "full"),
    ):  # fmt: skip
        assert read(f"{RUN} --metrics.enable_wandb {word}").get("layout", "recompute") == recompute
    with pytest.raises(InvalidConfig, match=r"activation_checkpoint\.mode=memory_budget is nothing that is known here"):
        read(f"{RUN} activation-checkpoint:memory-budget")
    with pytest.raises(InvalidConfig, match=r"parallelism\.enable_sequence_parallel is not understood here"):
        read(f"{RUN} --parallelism.tensor_parallel_degree 2 --parallelism.no-enable-sequence-parallel")
    alone = read(f"{RUN} --parallelism.no-enable-sequence-parallel")
    assert list_rows(alone, "no effect") == {"parallelism.enable_sequence_parallel = false": "tp is 1"}
    parts = read(f"{RUN} --parallelism.context_parallel_load_balancer None --compile.enable --compile.components loss")
    assert parts.get("kernels", "compile") == "none"
    assert "parallelism.context_parallel_load_balancer = null" in list_rows(parts, "assumed")
    with pytest.raises(InvalidConfig, match=r"param_groups\.0\.optimizer_kwargs\.betas=0\.9 is no pair of numbers"):
        read(f"{RUN} --optimizer.param-groups.0.optimizer-kwargs.betas 0.9")
    with pytest.raises(InvalidConfig, match=r"optimizer\.param_groups\.1\.optimizer_name is not understood here"):
        read(f"{RUN} --optimizer.param-groups.1.optimizer-name Adam")


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        (RUN, (8, 8)),
        ("export NGPU=4 CONFIG=llama3_8b MODULE=llama3\nbash run_train.sh", (4, 4)),
        ("CONFIG=llama3_8b ./run_train.sh", (8, 8)),
        ("torchrun --nnodes=2 --nproc_per_node 4 -m torchtitan.train --module llama3 --config llama3_8b", (8, 4)),
        ("python -m torch.distributed.run --nproc-per-node=2 -m torchtitan.train --module=llama3 --config=llama3_8b",
         (2, 2)),
        ("NGPU=2\ntorchrun --nnodes 4 --nproc_per_node ${NGPU} -m torchtitan.train --module llama3 --config llama3_8b",
         (8, 2)),
        ('CMD="torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b"\neval $CMD', (8, 8)),
        ("srun sh -c 'torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b'", (8, 8)),
        ("--module llama3 --config llama3_8b\n--parallelism.data_parallel_shard_degree 16", (16, 0)),
        ("torchrun --nnodes $N --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b", (0, 8)),
    ],
)  # fmt: skip
def test_a_command_starts_its_gpus(text, gpus):
    found = read(text)
    assert (found.num_gpus, found.gpus_per_node) == gpus
    assert found.tables["model"] == {"name": "llama3.1-8b"} and found.get("layout", "recompute") == "selective"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("CONFIG=llama3_9b ./run_train.sh", "--config llama3_9b is in the program's code; known here are llama3_"),
        ("MODULE=qwen3 CONFIG=llama3_8b ./run_train.sh", "--config llama3_8b of --module qwen3 is in the program's"),
        ("CONFIG=$RECIPE ./run_train.sh", "CONFIG is $RECIPE, set by no line of the script: --given RECIPE=VALUE says"),
        ("CONFIG_FILE=$FILE ./run_train.sh", "CONFIG_FILE is $FILE, set by no line of the script: --given FILE=VALUE"),
        ("NGPU=8 ./run_train.sh --training.steps 3", "run_train.sh is told no config: --given CONFIG_FILE=FILE"),
        ("CONFIG_FILE=./none.toml ./run_train.sh", "the config file ./none.toml is not there, beside the script"),
        (f"if cmd; then {RUN}; fi", "the command lies in the `if` of line 1"),
        ("cat torchtitan.train.log", "no command of the script starts the program"),
        (f"{RUN} --parallelism.tensor_parallel_degree $TP", "parallelism.tensor_parallel_degree is $TP, set by no"),
        (f"{RUN} --compile.enable yes", "compile.enable=yes is no true or false"),
        (f"{RUN} $MORE", "$MORE may hold options, and is set by no line of the script: --given MORE='…' says it"),
        (f"{RUN} --training.num_tokens_per_train_step 4096", "training.num_tokens_per_train_step is not understood"),
    ],
)  # fmt: skip
def test_what_a_command_does_not_say_is_asked_for(text, problem):
    with pytest.raises(InvalidConfig) as caught:
        read(text)
    assert any(problem in each for each in caught.value.problems), caught.value.problems


def test_values_that_are_given_take_the_place_of_the_scripts():
    other = ("--training.local_batch_size 4", "--training.local_batch_size 1")
    older = change("overrides.sh", other, ("shard_degree 4", "shard_degree 1"), NGPU="16", CONFIG_FILE="older.toml")
    assert older.num_gpus == 16 and older.get("batch", "seq_len") == 32768
    found = read(RUN + ' "$@"', CONFIG="llama3_70b")
    assert found.get("layout", "tp") == 8
    assert list_rows(found, "assumed")['"$@"'].startswith("options that the script itself is given are not known")
    more = read(RUN + ' "$@"', **{"@": "--parallelism.tensor_parallel_degree 4"})
    assert more.get("layout", "tp") == 4 and '"$@"' not in list_rows(more, "assumed")
    assert read(RUN, 32).tables["batch"]["global_batch"] == 32


@pytest.mark.parametrize("name", NAMED)
def test_each_config_of_the_code_is_a_job(name):
    module = NAMED[name]["model.name"]
    options = "--parallelism.data_parallel_shard_degree 8 --training.disable_cuda_graphs"
    found = read(f"torchrun -m torchtitan.train --module torchtitan.models.{module} --config {name} {options}")
    assert found.tables["batch"]["seq_len"] == NAMED[name]["training.seq_len"]
    if "model" not in found.tables:
        assert list_rows(found, "assumed")[f"model.name = {module}, model.flavor = {NAMED[name]['model.flavor']}"]
        found.tables["model"] = {"name": "qwen3-30b-a3b" if found.get("layout", "ep") > 1 else "llama3.1-8b"}
    parse_config({**found.tables, "train": {"steps": 1}})


def test_configs_say_what_the_code_does():
    big = read("torchrun --nproc_per_node 64 -m torchtitan.train --module llama3 --config llama3_405b")
    assert big.tables["layout"].items() >= {"tp": 8, "tp_overlap": True, "recompute": "full", "zero": 3}.items()
    assert big.get("precision", "matmuls") == "fp8-rowwise" and big.get("kernels", "compile") == "blocks"
    assert "quantize.linear.float8.filter_fqns" not in list_rows(big, "assumed")
    scaled = read("NGPU=8 CONFIG=llama3_8b_mxfp8 ./run_train.sh --parallelism.tensor_parallel_degree 2")
    assert scaled.get("precision", "matmuls") == "mxfp8"
    deep = read("NGPU=8 MODULE=qwen3 CONFIG=qwen3_moe_deepep ./run_train.sh")
    assert deep.tables["layout"].items() >= {"ep": 4, "ep_dispatcher": "deepep"}.items()
    own = read("NGPU=16 CONFIG=deepseek_v3_16b ./run_train.sh --parallelism.pipeline_parallel_degree 2", n_layers="27")
    assert own.tables["layout"].items() >= {"virtual_stages": 2, "ep": 8, "stage_layers": [7, 7, 7, 6]}.items()


def test_names_of_releases_are_told_apart():
    old = change("earliest.toml", ("enable_float8_linear = false", "enable_float8_linear = true"))
    assert old.get("precision", "matmuls") == "fp8-tensorwise" and "attention" not in old.tables["kernels"]
    later = read("torchrun -m torchtitan.train --job.config_file older.toml --training.local_batch_size 3")
    assert "training.local_batch_size = 3" in {row.option for row in later.rows}
    assert "training.batch_size" not in {row.option.partition(" ")[0] for row in later.rows}
    counted = change("earliest.toml", ("[checkpoint]", "pipeline_parallel_microbatches = 2\n[checkpoint]"))
    assert counted.get("layout", "micro_batch") == 4
    assert (
        change("interleaved.toml", ("microbatch_size = 2\n", "microbatch_size = 1\n")).get("layout", "micro_batch") == 1
    )
    dense = change("llama3_70b.toml", ("quantize.linear.float8]", "quantize.dense.float8]"), world=64)
    assert dense.get("precision", "matmuls") == "fp8-tensorwise"


def read_back(job: Job) -> Understood:
    """A job as its own file is read."""
    return read("\n".join(PROGRAMS["torchtitan"].write(job).lines))


DIFFER = {
    "layout.zero=": "zero", "layout.tp_overlap": "tp_overlap", "layout.sequence_parallel": "sequence_parallel",
    "layout.schedule=": "schedule", "layout.offload=": "offload", "precision.compute=": "compute",
    "precision.matmuls=": "matmuls",
}  # fmt: skip
"""Beginning of a gap → field that is written otherwise."""


def compare(job: Job, found: Understood) -> None:
    """Fail unless a job was read back as it was, but for what its gaps say."""
    gaps = PROGRAMS["torchtitan"].write(job).gaps
    differ = {field for begin, field in DIFFER.items() if any(gap.startswith(begin) for gap in gaps)}
    if job.layout.zero == 1 and not job.layout.is_pipelined and job.num_microbatches == 1:
        differ.add("zero")  # zero=2 is the same then
    compare_job(job, found, differ, model=not any("sizes are no options" in gap for gap in gaps))
    assert found.get("kernels", "compile") == job.estimate.kernels.compile


MODELS = ["llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "qwen3-235b-a22b",
          "llama-13b", "llama3.2-1b"]  # fmt: skip
FORMATS: list[dict[str, str]] = [
    {}, {"matmuls": "fp8-tensorwise"}, {"matmuls": "fp8-rowwise"}, {"matmuls": "mxfp8"}, {"params": "bfloat16"},
    {"compute": "float32"}, {"matmuls": "nvfp4"},
]  # fmt: skip
OPTIMIZERS = [AdamW(), AdamW(lr=1e-4, beta1=0.8, beta2=0.98, eps=1e-6, weight_decay=0.05, max_norm=0.5)]


@st.composite
def draw_jobs(draw: Any) -> Job:
    """A legal job for torchtitan."""
    few = st.sampled_from([1, 2, 4])
    model = draw(st.sampled_from(MODELS))
    shape = PRESETS[model]
    tp, cp, shards = draw(few), draw(few), draw(few)
    pp = draw(few) if shape.family == "llama" else 1
    copies = draw(few) if shards > 1 or tp * cp * pp == 1 else 1
    schedule = draw(st.sampled_from([*SCHEDULES, "zb-h1"])) if pp > 1 else "1f1b"
    least = find_schedule(schedule).least_virtual_stages
    layout = Layout(
        pp=pp, tp=tp, cp=cp, dp_shard=shards, dp_replicate=copies, schedule=schedule,
        virtual_stages=draw(st.sampled_from([2, 4])) if schedule == "interleaved-1f1b" else least,
        micro_batch=draw(few), zero=draw(st.sampled_from([1, 2, 3])) if shards * cp > 1 and pp == 1 else 1,
        cp_method=draw(st.sampled_from(["gather", "ring"])), tp_overlap=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "full", "selective", "every-2", "every-5"])),
        ep=draw(st.sampled_from([1, 2, 4, 8])) if shape.experts else 1,
        ep_dispatcher=draw(st.sampled_from(["alltoall", "deepep"])),
        offload=draw(st.sampled_from(["none", "none", "optimizer"])),
    )  # fmt: skip
    assume(not layout.problems(shape, Batch(global_batch=256, seq_len=4096)))
    kernels = Kernels(attention="sdpa-cudnn", compile=draw(st.sampled_from(["none", "blocks"])))
    formats, optimizer = draw(st.sampled_from(FORMATS)), draw(st.sampled_from(OPTIMIZERS))
    return job_of("torchtitan", layout, model=model, kernels=kernels, optimizer=optimizer, **formats)


@ROUND_TRIPS
@given(draw_jobs())
def test_what_is_written_is_read_back(job):
    try:
        gaps = PROGRAMS["torchtitan"].write(job).gaps
    except DtlayoutError:
        assume(False)
    is_scaled = job.scenario.precision.matmuls in CONVERTERS
    computes_in_fp32 = is_scaled and any(gap.startswith("precision.compute") for gap in gaps)
    if computes_in_fp32 or any(gap.startswith("it cuts each expert") for gap in gaps):
        with pytest.raises(InvalidConfig, match=r"leaves experts cut by tp|computes in float32"):
            read_back(job)
    else:
        compare(job, read_back(job))


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_kind_of_layout_is_read_back(name):
    job = job_of("torchtitan", LAYOUTS[name])
    compare(job, read_back(job))


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_file_is_predicted(name, capsys):
    world = ["--world", "64"] if name == "llama3_70b.toml" else []
    assert main(["explain", str(FOLDER / name), "--gpu", "b200-180g-sxm", *world]) == 0
    assert "engine        torchtitan" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["interleaved.toml", "named.sh"])
def test_explain_compare_timeline_and_read_take_a_file(name, tmp_path, capsys):
    path, machine = str(FOLDER / name), ["--gpu", "h100-80g-sxm"]
    assert main(["explain", path, *machine, "--json"]) == 0
    said = capsys.readouterr()
    assert "is read as a job of torchtitan; dtlayout read shows how" in said.err
    document = json.loads(said.out)
    assert document["engine"] == "torchtitan" and document["gpus"] == UNDERSTOOD[name]["gpus"][0]
    assert main(["compare", path, path, *machine]) == 0
    has_pipeline = UNDERSTOOD[name]["layout"]["pp"] > 1
    assert main(["timeline", path, *machine]) == (0 if has_pipeline else 2)
    assert has_pipeline or "pp" in capsys.readouterr().err
    config = tmp_path / "job.toml"
    assert main(["read", path, "--output", str(config)]) == 0
    assert "layout.recompute=" in capsys.readouterr().out
    assert toml.loads(config.read_text())["model"] == UNDERSTOOD[name]["model"]
    assert main(["explain", str(config), *machine, "--engine", "torchtitan", "--gpus", str(document["gpus"])]) == 0


def test_what_a_file_does_not_say_is_asked_for(tmp_path, capsys):
    path = str(FOLDER / "llama3_70b.toml")
    assert main(["explain", path, "--gpu", "h100-80g-sxm"]) == 2
    assert "does not say how many GPUs it starts: --world N does" in capsys.readouterr().err
    assert main(["explain", path, "--gpu", "h100-80g-sxm", "--world", "64", "--layout.cp=2"]) == 0
    assert "dp4·cp2" in capsys.readouterr().out
    other = tmp_path / "own.toml"
    other.write_text((FOLDER / "interleaved.toml").read_text().replace('"8B"', '"own"'))
    assert main(["explain", str(other), "--gpu", "h100-80g-sxm"]) == 2
    assert "does not say the sizes of the model: --model M does" in capsys.readouterr().err
    assert main(["explain", str(other), "--gpu", "h100-80g-sxm", "--model", "llama3.1-8b"]) == 0


def test_our_own_configs_are_none_of_torchtitans():
    for path in (Path(__file__).parents[2] / "configs").glob("*.toml"):
        assert read_program(path, {}) is None
