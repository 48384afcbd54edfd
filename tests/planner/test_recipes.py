"""Layouts that vendors published, beside those of a search."""

from dataclasses import replace

import pytest

from dtlayout.base import toml
from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.presets import find_preset
from dtlayout.planner.choices import parse_choices
from dtlayout.planner.recipes import FILE, find_usual
from dtlayout.planner.search import Search
from dtlayout.planner.space import Space
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import Precision


def search(model="llama3.1-70b", gpu="h100-80g-sxm", num_gpus=64, engine="megatron", seq_len=8192, **precision):
    cluster = Cluster(gpu=find_gpu(gpu), num_gpus=num_gpus, gpus_per_node=8)
    scenario = Scenario(
        model=find_preset(model), batch=Batch(global_batch=2 * num_gpus, seq_len=seq_len), cluster=cluster,
        engine=find_engine(engine, gpu), precision=Precision(**precision),
    )  # fmt: skip
    return Search(Space(scenario))


def test_the_vendors_layout_takes_the_gpus_that_are_left_and_has_its_own_prediction():
    asked = search()
    usual = find_usual(asked)
    assert str(usual.estimate.layout) == "pp4·dp2·cp2·tp4+sp+overlap mb1 interleaved-1f1b v5 zero1"
    assert usual.estimate == asked.estimator.estimate(usual.estimate.layout, usual.estimate.kernels)
    assert usual.recipe.who == "NVIDIA's recipe" and "dgxc-benchmarking" in usual.recipe.where


def test_the_format_and_the_program_choose_among_recipes():
    in_fp8 = find_usual(search(matmuls="fp8-tensorwise"))
    assert (in_fp8.estimate.layout.pp, in_fp8.estimate.layout.cp) == (8, 1)
    titan = find_usual(search(engine="torchtitan"))
    assert titan.recipe.program == "torchtitan" and titan.estimate.layout.zero == 3


@pytest.mark.parametrize(
    "other", [{"model": "llama-13b"}, {"gpu": "a100-80g-sxm"}, {"num_gpus": 48}, {"seq_len": 131072}]
)
def test_other_jobs_have_none(other):
    assert find_usual(search(**other)) is None


def test_every_recipe_is_a_layout_of_a_known_source():
    table = toml.read_constant_file(FILE)
    for job in table["recipe"]:
        for each in job["layouts"]:
            layout = Layout(**parse_choices(each["layout"]))
            assert layout.dp == 1 and each["source"] in table["sources"] and each["format"] in ("bf16", "fp8")
            named = replace(layout, dp_shard=1)
            assert Layout(**parse_choices(str(named))) == named, each["layout"]
