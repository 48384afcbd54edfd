"""The memory that a recommended layout leaves free."""

from dataclasses import replace

import pytest

from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.presets import find_preset
from dtlayout.planner import margin
from dtlayout.planner.margin import choose_margin
from dtlayout.planner.sizing import find_fitting, scale
from dtlayout.planner.space import Space
from dtlayout.records.intervals import find_intervals
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu


def scenario(gpu="h100-80g-sxm", engine="megatron", num_gpus=8):
    cluster = Cluster(gpu=find_gpu(gpu), num_gpus=num_gpus, gpus_per_node=8)
    batch = Batch(global_batch=64, seq_len=2048)
    return Scenario(
        model=find_preset("llama-7b"), batch=batch, cluster=cluster, engine=find_engine(engine, cluster.gpu.name)
    )


def with_quartile(monkeypatch, quartile):
    def find(asked):
        found = find_intervals(asked)
        return found._replace(peak_memory=replace(found.peak_memory, upper_quartile=quartile))

    monkeypatch.setattr(margin, "find_intervals", find)


@pytest.mark.parametrize(("quartile", "share"), [(1.1, 0.9), (0.9, 1.0), (2.0, 0.85)])
def test_three_of_four_peaks_fit_beside_the_margin_which_is_no_larger_than_makes_sense(monkeypatch, quartile, share):
    with_quartile(monkeypatch, quartile)
    assert choose_margin(scenario(), None).max_memory == pytest.approx(share)


def test_where_nobody_has_counted_peaks_a_share_stands_for_it_and_a_user_may_say_another(monkeypatch):
    with_quartile(monkeypatch, None)
    assert choose_margin(scenario(), None).max_memory == 0.92
    asked = choose_margin(scenario(), 0.5)
    assert (asked.max_memory, asked.is_asked) == (0.5, True)
    assert choose_margin(scenario("cpu", "dtlayout"), None).max_memory == 1.0


def test_what_fits_only_without_the_margin_is_still_found(monkeypatch):
    """The GPU is made so small that the best layout fills it."""
    with_quartile(monkeypatch, 1.1)
    space = Space(scenario(), {"tp": 1, "micro_batch": 1, "zero": 3, "recompute": "full", "compile": "none"})
    search, _ = find_fitting(space, None)
    (roomy,) = search.run(top=1).ranked
    context = search.estimator.capacity_bytes - space.scenario.cluster.gpu.memory_bytes
    memory = int(1.02 * roomy.needed_bytes - context)
    small = replace(space.scenario.cluster, gpu=replace(space.scenario.cluster.gpu, memory_bytes=memory))
    tight = replace(space, scenario=replace(space.scenario, cluster=small))
    search, kept = find_fitting(tight, None)
    assert kept.fits_only_without and kept.max_memory == search.max_memory == 1.0
    assert search.run(top=1).ranked
    assert not find_fitting(tight, 0.9)[0].run(top=1).ranked, "what was asked for holds"
    (row,) = scale([tight], None)
    assert row.estimate and row.margin.fits_only_without
