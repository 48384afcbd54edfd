"""Why a layout stands before the next one, in words."""

from dataclasses import replace

import pytest

from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.estimate import estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.presets import PRESETS
from dtlayout.planner.verdicts import describe_lead
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout


@pytest.mark.parametrize(
    ("own", "following", "words"),
    [
        (Layout(), Layout(tp=2), ", and leaves the model whole instead of cutting it into 2 parts"),
        (Layout(pp=2), Layout(pp=2, tp=2), ", and cuts the model into 2 parts instead of 4"),
        (Layout(tp=2), Layout(pp=2), ""),
    ],
)
def test_of_two_layouts_that_are_alike_the_one_that_cuts_the_model_less_is_praised_for_it(own, following, words):
    gpu = find_gpu("h100-80g-sxm")
    scenario = Scenario(
        model=PRESETS["llama3.2-1b"], batch=Batch(global_batch=8, seq_len=2048),
        cluster=Cluster(gpu=gpu, num_gpus=1, gpus_per_node=8), engine=find_engine("dtlayout", gpu.name),
    )  # fmt: skip
    alike = estimate(scenario, Layout(), Kernels())
    before, after = (replace(alike, layout=layout) for layout in (own, following))
    assert describe_lead(before, after, 2).endswith(f" and as full{words}")
