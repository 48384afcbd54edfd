"""A family from outside of which some weights are frozen: one file that describes it, and everything knows it."""

import json
import re
from dataclasses import replace

import pytest
import torch
from plugged import ask_programs, count_files, plugged_in
from safetensors.torch import load_file
from tiny import SHAPE, write_tiny

from dtlayout import launch
from dtlayout.base.checkpoint_names import list_checkpoints
from dtlayout.checkpoint.reader import Reader
from dtlayout.costmodel.engine import find_engine, find_usual, known_engines
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.fsdp2.sizes import Sizes
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.counting import (
    count_active_frozen_parameters,
    count_model_flops_per_token,
    count_parameters,
)
from dtlayout.models.description import Description, describe_llama
from dtlayout.models.families import FAMILIES, Family, find_weight
from dtlayout.models.llama import Llama
from dtlayout.models.operations import Linear
from dtlayout.models.presets import find_preset
from dtlayout.models.weights import list_weights
from dtlayout.plans.init import initialize
from dtlayout.plans.plan import make_plan
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import BYTES, Precision
from dtlayout.spec.recompute import Recompute

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 48, "vocab_size": 260}  # fmt: skip
FROZEN = replace(SHAPE, family="partly-frozen")


@pytest.fixture(autouse=True)
def registered():
    with plugged_in("partly_frozen") as plugin:
        yield plugin


def test_it_takes_one_file():
    assert count_files("partly_frozen") == 1


def test_four_programs_know_it(tmp_path, capsys):
    config_json = tmp_path / "config.json"
    config_json.write_text(json.dumps({"model_type": "partly-frozen", "rms_norm_eps": 1e-5, **SIZES}))
    answers = ask_programs(capsys, tmp_path, model=config_json)
    assert answers.check["ok"]
    (rank,) = answers.dryrun["ranks"]
    for compared in rank["compared_bytes"].values():
        assert compared["dry"] == pytest.approx(compared["predicted"], rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_says_what_is_frozen_and_flops_leave_its_gradients_out(registered, tied):
    model = replace(FROZEN, tied_embeddings=tied)
    plan = make_plan(model, Layout(), Kernels(), Precision())
    frozen = [name for name, _ in list_weights(model) if not find_weight(model, name).trains]
    assert len(frozen) == 1 + 4 * len(registered.FROZEN)
    assert re.search(r"^model\.layers\.\*\.mlp\.gate_proj\.weight +frozen$", str(plan), re.MULTILINE)
    assert ("lm_head.weight" in plan.frozen) == tied
    sizes = dict(list_weights(model))
    numel = sum(torch.Size(sizes[name]).numel() for name in frozen)
    assert count_active_frozen_parameters(model) == numel
    all_trained = replace(model, family="llama")
    spared = count_model_flops_per_token(all_trained, 16) - count_model_flops_per_token(model, 16)
    assert spared == 2 * numel


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_forward_holds_what_matmuls_read_whether_they_are_trained_or_not(monkeypatch, recompute):
    def describe(model: ModelShape) -> Description:
        llama = describe_llama(model)
        block = [replace(each, trains=False) if isinstance(each, Linear) else each for each in llama.block]
        return replace(llama, block=tuple(block))

    monkeypatch.setitem(FAMILIES, "frozen-matmuls", Family(name="frozen-matmuls", describe=describe))

    def size(family: str) -> Sizes:
        scenario = Scenario(
            model=replace(find_preset("llama-7b"), family=family),
            batch=Batch(global_batch=16, seq_len=2048),
            cluster=Cluster(gpu=find_gpu("a100-80g-sxm"), num_gpus=8, gpus_per_node=8),
            engine=find_engine("dtlayout", "a100-80g-sxm"),
        )
        return Sizes(scenario, Layout(dp_shard=8, recompute=recompute), Kernels())

    frozen, trained, recomputed = size("frozen-matmuls"), size("llama"), Recompute.parse(recompute)
    assert frozen.block < trained.block
    # Variables of a branch are there in any case; what the first one no longer saves is gone when the second one runs.
    less = trained.kept(recomputed, 0) - frozen.kept(recomputed, 0)
    assert 0 <= trained.in_forward(recomputed, 0) - frozen.in_forward(recomputed, 0) <= less


@pytest.mark.parametrize("engine", known_engines())
def test_every_engine_is_predicted_to_spare_what_frozen_weights_do_not_need(engine):
    frozen, layout = replace(find_preset("llama-7b"), family="partly-frozen"), Layout(dp_shard=8)
    scenario = Scenario(
        model=frozen,
        batch=Batch(global_batch=16, seq_len=2048),
        cluster=Cluster(gpu=find_gpu("a100-80g-sxm"), num_gpus=8, gpus_per_node=8),
        engine=find_engine(engine, "a100-80g-sxm"),
    )
    kernels = find_usual(engine).kernels if engine != "dtlayout" else Kernels()
    trained = Estimator(replace(scenario, model=replace(frozen, family="llama"))).estimate(layout, kernels)
    found = Estimator(scenario).estimate(layout, kernels)
    num_frozen = count_active_frozen_parameters(frozen)
    share = 1 - num_frozen / count_parameters(frozen)
    is_fsdp2 = scenario.engine.features.sharding == "fsdp2"  # others keep bf16 weights, with masters in the optimizer
    # A shard of a frozen weight is one of its copy, or none, where each rank has all of that copy.
    of_copy = BYTES[scenario.precision.compute] * scenario.engine.features.shards_frozen
    narrower = (BYTES[scenario.precision.params] - of_copy) * is_fsdp2 * num_frozen / 8
    assert found.memory[0].optimizer == pytest.approx(share * trained.memory[0].optimizer, rel=1e-4)
    assert found.memory[0].parameters == trained.memory[0].parameters - narrower
    assert found.memory[0].gradients < trained.memory[0].gradients
    assert found.time.optimizer == pytest.approx(share * trained.time.optimizer)
    assert found.time.compute < trained.time.compute and found.time.dp <= trained.time.dp


def test_a_run_saves_frozen_weights_without_state_goes_on_and_exports_them_unchanged(tmp_path):
    files = write_tiny(tmp_path)
    files.config.write_text(files.config.read_text().replace("[model]\n", '[model]\nfamily = "partly-frozen"\n'))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    asked = [str(files.config), "--optimizer.decay_steps=2", "--checkpoint.export=true"]
    assert launch.main([*asked, f"--train.run_folder={whole}"]) == 0
    for steps in (1, 2):
        assert launch.main([*asked, f"--train.run_folder={parts}", f"--train.steps={steps}"]) == 0
    tensors = Reader(list_checkpoints(parts / "checkpoints")[-1] / "tensors").read_metadata().state_dict_metadata
    names = [name for name, _ in list_weights(FROZEN)]
    trained = [name for name in names if find_weight(FROZEN, name).trains]
    kinds = {"parameters": names, "exp_avg": trained, "exp_avg_sq": trained}
    assert tensors.keys() == {f"{kind}.{name}" for kind, some in kinds.items() for name in some}

    ends = [load_file(folder / "hf" / "model.safetensors") for folder in (whole, parts)]
    initial = Llama(FROZEN, Kernels(), 16)
    initialize([initial], FROZEN, 0, "cpu")
    for name, parameter in initial.named_parameters():
        assert torch.equal(ends[0][name], ends[1][name])
        assert torch.equal(ends[0][name], parameter.detach().to(ends[0][name].dtype)) == (name not in trained), name
