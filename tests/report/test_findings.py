"""Findings say what rows carry, with their numbers, and nothing of rows whose columns were shuffled."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import pytest

from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.presets import find_preset
from dtlayout.records.run import Performance, Run
from dtlayout.report.findings import Finding, find, find_common
from dtlayout.report.questions import QUESTIONS, Question
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

GPU = find_gpu("a100-80g-sxm")
WORLD = 64


def make_run(
    table: str, layout: Layout, kernels: Kernels, speed: float, *, fits: bool = True, world: int = WORLD
) -> Run:
    scenario = Scenario(
        model=find_preset("llama-13b"),
        batch=Batch(global_batch=2048, seq_len=2048),
        cluster=Cluster(gpu=GPU, num_gpus=world, gpus_per_node=8),
        engine=find_engine("megatron", GPU.name),
    )
    step_time_s = scenario.batch.num_tokens / world / speed
    return Run(
        table=table, row="", scenario=scenario, layout=layout, kernels=kernels, outcome="ok" if fits else "oom",
        measured=Performance(step_time_s=step_time_s, mfu=0.0001 * speed) if fits else Performance(),
    )  # fmt: skip


def sweep(speed: Callable[[Layout, Kernels], float], fits: Callable[[Layout], bool] = lambda layout: True) -> list[Run]:
    """Two sweeps over everything, with 1 % of noise."""
    noise = random.Random(0)
    return [
        make_run(table, layout, kernels, speed(layout, kernels) * noise.uniform(0.995, 1.005), fits=fits(layout))
        for table in ("one", "two")
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4)
        for micro_batch in (1, 2)
        for recompute in ("none", "full")
        for layout in [Layout(pp=pp, tp=tp, dp_shard=WORLD // (tp * pp), micro_batch=micro_batch, recompute=recompute)]
        for kernels in (Kernels(attention="sdpa-flash", norm="eager"), Kernels(attention="sdpa-flash"))
    ]


def like_the_study(layout: Layout, kernels: Kernels) -> float:
    factor = 0.76 if layout.recompute == "full" else 1.0
    factor *= 1.15 if kernels.norm == "fused" else 1.0
    return 1000 * factor * 0.9 ** (layout.tp.bit_length() - 1)


def shuffle(runs: Sequence[Run], seed: int) -> list[Run]:
    """How each run ended is dealt out anew among the runs of its sweep."""
    dealer = random.Random(seed)
    ends = {table: [run for run in runs if run.table == table] for table in ("one", "two")}
    for rows in ends.values():
        dealer.shuffle(rows)
    taken = {table: iter(rows) for table, rows in ends.items()}
    return [
        replace(run, outcome=end.outcome, measured=end.measured) for run in runs for end in [next(taken[run.table])]
    ]


def answer(question: Question, runs: Sequence[Run]) -> Finding:
    [found] = find(runs, [question])
    return found


def test_what_rows_carry_is_said_with_its_numbers():
    runs = sweep(like_the_study, fits=lambda layout: layout.recompute == "full" or layout.tp > 1)
    says = {found.question.name: found.describe() for found in find(runs)}
    assert says["A fused RMSNorm"].startswith(
        "the speed with a fused norm is 1.15 times that with an eager norm (median of 84 pairs, half of them 1.1"
    )
    assert says["A fused RMSNorm"].endswith(" and higher in every pair")
    recomputed = says["Full recomputation"]
    assert "is 0.76 times that with no recomputation" in recomputed and "higher in no pair" in recomputed
    assert recomputed.endswith("24 layouts fit only with full recomputation")
    assert "less tp and as much more pp is 1.1" in says["Less tp and more pp"]
    assert "is 0.90 times that with tp=2" in says["Tensor parallelism from 2 to 4"]
    assert says["Larger micro-batches"].startswith("not supported: 1.00 times as fast (median of ")
    assert says["Pipeline parallelism from 1 to 2"].startswith("not supported: 1.00 times as fast")
    assert says["Sequence parallelism"].startswith("not supported: no two layouts that ran")
    common = {each.name: each.describe() for each in find_common(runs)}
    assert common["recompute"].startswith("100% have recompute=none")
    assert "have norm=fused, and " in common["norm"]
    assert common["pp"].startswith("not supported")


@pytest.mark.parametrize("seed", range(4))
def test_shuffled_rows_carry_nothing(seed):
    runs = shuffle(sweep(like_the_study, fits=lambda layout: layout.recompute == "full" or layout.tp > 1), seed)
    assert [found.describe() for found in find(runs) if found.speaks_of_speed or found.speaks_of_fit] == []
    assert all(each.describe().startswith("not supported") for each in find_common(runs))


def sweep_gpus(lost: float) -> list[Run]:
    """The same training in a sweep of its own on 64, 128 and 256 GPUs: 1F1B's bubble, and so much lost by doubling."""
    noise = random.Random(0)
    runs = []
    for doubling, world in enumerate((64, 128, 256)):
        for tp, pp, micro_batch in product((1, 2, 4), (2, 4, 8), (8, 16)):
            layout = Layout(pp=pp, tp=tp, dp_shard=world // (tp * pp), micro_batch=micro_batch)
            m = 2048 // (layout.dp_shard * micro_batch)
            speed = 1000 * m / (m + pp - 1) * (1 - lost) ** doubling * noise.uniform(0.998, 1.002)
            runs.append(make_run(f"{world} GPUs", layout, Kernels(), speed, world=world))
    return runs


def test_more_gpus_are_held_to_what_the_bubble_explains():
    """The bubble of 2 to 8 stages takes a part; only what goes beyond it is a finding."""
    question = next(q for q in QUESTIONS if q.name.startswith("Twice the GPUs"))
    found = answer(question, sweep_gpus(lost=0.1))
    assert found.num_pairs == 36 and found.beyond == pytest.approx(0.9, abs=0.003)
    assert f"the speed with twice the GPUs is {found.factor:.2f} times that with half as many" in found.describe()
    assert found.describe().endswith(f"higher in no pair; the bubble alone explains {found.explained:.2f}")
    only_bubble = answer(question, sweep_gpus(lost=0.0))
    assert only_bubble.factor < 0.95 and only_bubble.describe().startswith("not supported")
    runs = sweep_gpus(lost=0.1)
    for seed in range(4):
        ends = random.Random(seed).sample(runs, len(runs))
        by_time = [replace(run, measured=end.measured) for run, end in zip(runs, ends, strict=True)]
        by_mfu = [replace(run, measured=replace(run.measured, step_time_s=None)) for run in by_time]
        for dealt in (by_time, by_mfu):
            assert not answer(question, dealt).speaks_of_speed


def test_few_pairs_carry_nothing():
    runs = [run for run in sweep(like_the_study) if run.layout.tp == run.layout.pp == 1 and run.table == "one"]
    found = answer(next(q for q in QUESTIONS if q.name == "A fused RMSNorm"), runs)
    assert found.num_pairs == 4 and found.share_faster == 1.0
    assert not found.speaks_of_speed and found.describe().startswith("not supported: only 4 pairs, and fewer than 6 ")


def test_a_small_sweep_says_what_all_its_pairs_agree_on():
    """A dozen pairs, as a sweep on one machine has them."""
    runs = [run for run in sweep(like_the_study) if run.table == "one" and run.layout.micro_batch == 1]
    runs = [run for run in runs if run.kernels.norm == "fused" and run.layout.tp * run.layout.pp <= 16]
    found = answer(next(q for q in QUESTIONS if q.name == "Full recomputation"), runs)
    assert 9 <= found.num_pairs <= 12 and found.speaks_of_speed


def test_effects_that_cancel_are_none():
    up = {1: 1.3, 2: 0.77, 4: 1.3, 8: 0.77}
    runs = sweep(lambda layout, _: 1000 * up[layout.tp] ** (layout.micro_batch - 1))
    found = answer(next(q for q in QUESTIONS if q.name == "Larger micro-batches"), runs)
    assert not found.speaks_of_speed and "half of them 0.77 to 1.30" in found.describe()


def test_only_rows_that_share_everything_else_are_a_pair():
    one, other = sweep(like_the_study)[0], sweep(like_the_study)[1]
    question = next(q for q in QUESTIONS if q.name == "A fused RMSNorm")
    assert answer(question, [one, other]).num_pairs == 1
    assert answer(question, [one, replace(other, table="two")]).num_pairs == 0
    batch = Batch(global_batch=1024, seq_len=2048)
    assert answer(question, [one, replace(other, scenario=replace(other.scenario, batch=batch))]).num_pairs == 0


def test_speed_comes_from_time_or_from_mfu():
    run = sweep(like_the_study)[0]
    assert run.tokens_per_s_per_gpu == pytest.approx(1000, rel=0.01)
    assert replace(run, measured=Performance(mfu=0.5)).tokens_per_s_per_gpu == pytest.approx(
        0.5 * GPU.peak_flops_per_s / (6 * 13_015_864_320 + 12 * 40 * 5120 * 2048), rel=0.01
    )
    assert replace(run, outcome="oom").tokens_per_s_per_gpu is None
