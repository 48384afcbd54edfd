"""Where nothing fits, recommend and explain name the optimizer's state in bf16, before offload, and what it costs."""

import json
from dataclasses import replace

import pytest
from small import scenario

from dtlayout.base.errors import InvalidLayout
from dtlayout.cli import main
from dtlayout.config.loading import load_config
from dtlayout.costmodel.estimate import Estimator
from dtlayout.models.presets import find_preset
from dtlayout.planner.coarse_state import find_coarse_state
from dtlayout.planner.prediction import own_scenario, predicted_kernels, refuse_hopeless
from dtlayout.planner.search import Search
from dtlayout.planner.space import Space
from dtlayout.planner.suggestions import list_ways_to_fit
from dtlayout.spec.cluster import find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.optimizers import SGD, AdamW, Muon
from dtlayout.spec.precision import Precision

ON_ONE = ("--gpu", "h200-141g-sxm", "--gpus", "1", "--seq-len", "4096", "--global-batch", "4")
PLAN = """
model = {name = "llama3.1-8b"}
batch = {global_batch = 4, seq_len = 4096}
layout = {micro_batch = 1, recompute = "selective"}
kernels = {loss = "linear", compile = "none"}
train = {steps = 1, device = "cuda"}
data = {source = "python-stdlib"}
"""


def answer(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    main([*arguments])
    return "".join(capsys.readouterr())


def test_explain_offers_it_with_what_it_changes_and_what_it_says_is_right(capsys, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    asked = ("explain", str(path), "--gpu", "h200-141g-sxm", "--world", "1")
    text = answer(capsys, *asked)
    assert "--optimizer.state_format=bfloat16 keeps the optimizer's state in bf16, which changes the numbers" in text
    offered = [each["knob"] for each in json.loads(answer(capsys, *asked, "--json"))["changes"]]
    assert offered.index("state_format") < offered.index("offload"), "the fastest is first"
    (change,) = (e for e in json.loads(answer(capsys, *asked, "--json"))["changes"] if e["knob"] == "state_format")
    taken = json.loads(answer(capsys, *asked, *change["overrides"], "--json"))
    assert taken["fits"] and taken["peak_memory_bytes"] == change["peak_memory_bytes"]
    assert "state_format" not in [each["knob"] for each in taken["changes"]]


def test_a_start_that_is_hopeless_names_it_as_other_numbers(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    config, layout = load_config(path, ["--batch.seq_len=128"]), Layout(recompute="selective")
    gpu = find_gpu("h200-141g-sxm")
    coarse = find_coarse_state(own_scenario(config, 1, gpu))
    estimate = Estimator(coarse.scenario).estimate(layout, predicted_kernels(config, layout, gpu))
    room = int(estimate.needed_bytes) + gpu.memory_bytes - int(estimate.capacity_bytes)
    with pytest.raises(InvalidLayout, match=r"--optimizer\.state_format=bfloat16 \([0-9.]+ GiB, which changes the num"):
        refuse_hopeless(config, layout, replace(gpu, memory_bytes=room + 2**20))


def test_recommend_names_it_before_offload_and_takes_it_as_it_is_named(capsys):
    base = scenario()
    estimate = Estimator(base).estimate(layout := Layout(dp_shard=base.cluster.num_gpus, zero=3), Kernels())
    spared = estimate.memory[0].optimizer / 2
    fixed = {**vars(layout), "recompute": "none", "micro_batch": 1}
    lacking = estimate.capacity_bytes - estimate.needed_bytes + spared / 2
    gpu = replace(base.cluster.gpu, memory_bytes=base.cluster.gpu.memory_bytes - int(lacking))
    search = Search(Space(replace(base, cluster=replace(base.cluster, gpu=gpu)), fixed))
    ways = list(list_ways_to_fit(search, search.find_smallest_oom()))
    assert ways[0].startswith(
        "--optimizer adamw,state_format=bfloat16 keeps the optimizer's state in bf16, which chang"
    )
    text = answer(capsys, "recommend", "--model", "llama3.2-1b", *ON_ONE, "--optimizer", "adamw,state_format=bfloat16")
    assert "a step, updated by adamw with state_format=bfloat16" in text
    refused = answer(capsys, "recommend", "--model", "llama3.2-1b", *ON_ONE, "--optimizer", "adamw,bfloat16")
    assert "'--optimizer.bfloat16' is not an override" in refused
    refused = answer(capsys, "recommend", "--model", "llama3.2-1b", *ON_ONE, "--optimizer", "adamw,state_format=fp8")
    assert "optimizer.state_format='fp8'" in refused


def test_nothing_is_offered_where_it_spares_nothing_or_is_refused():
    dense = replace(scenario(), model=find_preset("debug"))
    for optimizer in (AdamW(state_format="bfloat16"), AdamW(beta2=0.999), SGD(momentum=0.0)):
        assert find_coarse_state(replace(dense, optimizer=optimizer)) is None
    coarse = Precision(params="bfloat16", compute="bfloat16", reduce="bfloat16")
    assert find_coarse_state(replace(dense, precision=coarse)) is None
    assert find_coarse_state(replace(dense, optimizer=SGD())).option == "--optimizer sgd,state_format=bfloat16"


def test_the_option_keeps_what_was_asked_of_the_optimizer():
    asked = replace(scenario(), optimizer=Muon(lr=0.01, rest=AdamW(beta2=0.9)))
    coarse = find_coarse_state(asked)
    assert coarse is not None
    assert coarse.option == "--optimizer muon,lr=0.01,rest.beta2=0.9,rest.state_format=bfloat16"
