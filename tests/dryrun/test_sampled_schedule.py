"""The peak that a sampled step gives is that of the whole one, to the byte."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from parity import BF16, FP32, SHAPE, Case
from rehearsal import to_config
from thorough import mostly_thorough

from dtlayout.dryrun.blocks import ActionMemory, Held
from dtlayout.dryrun.ranks import Subject, dry_run_ranks, find_peaks
from dtlayout.dryrun.sampled_schedule import SampledSchedule, peak_of_step, sample_schedule
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

DEEP = replace(SHAPE, num_layers=16)
DEEPER = replace(SHAPE, num_layers=32)
WIDE_HEAD = replace(DEEP, vocab_size=2048)
INTERLEAVED = Layout(pp=2, schedule="interleaved-1f1b", virtual_stages=8)
CASES = [
    Case(Layout(dp_shard=4, zero=2, recompute="selective"), model=DEEP, precision=FP32),
    Case(Layout(dp_replicate=2, dp_shard=2, zero=3), model=WIDE_HEAD, precision=BF16),
    Case(Layout(dp_shard=2, tp=2, micro_batch=2, recompute="full"), model=DEEP, precision=BF16),
    Case(Layout(dp_shard=4, zero=3, recompute="every-2"), model=DEEPER, precision=BF16),
    Case(Layout(dp_shard=4, zero=3, recompute="2-of-3"), model=DEEPER, precision=BF16),
    Case(Layout(pp=2, dp_shard=2), model=replace(SHAPE, num_layers=20), precision=BF16),
    Case(
        Layout(pp=2, dp_shard=2, zero=2, schedule="interleaved-1f1b", virtual_stages=2),
        model=replace(SHAPE, num_layers=40), precision=BF16,
    ),
    Case(replace(INTERLEAVED, tp=2, zero=3, dp_shard=2), model=DEEP, precision=BF16, global_batch=8),
    Case(replace(INTERLEAVED, recompute="selective", zero=1), model=WIDE_HEAD, precision=BF16, global_batch=8),
    Case(Layout(pp=2, dp_shard=2, zero=2, schedule="gpipe"), model=WIDE_HEAD, precision=BF16, global_batch=16),
    Case(Layout(pp=2, dp_shard=2, schedule="zb-v", virtual_stages=2), model=DEEP, precision=BF16, global_batch=24),
    Case(Layout(pp=4, schedule="zb-h1", zero=1), model=DEEP, precision=BF16, global_batch=12),
]  # fmt: skip


@pytest.mark.parametrize(
    "case", mostly_thorough(CASES, lambda i, _: i in (5, 7, 9)), ids=[str(case.layout) for case in CASES]
)
def test_a_sampled_schedule_says_the_peak_of_the_whole_step(case: Case) -> None:
    config, options = to_config(case), {"device_type": "cuda", "gpus_per_node": 2}
    ranks = [0, case.layout.world_size - 1] if case.layout.pp > 1 else [0]
    subjects = [Subject(config, case.layout, case.kernels, rank) for rank in ranks]
    whole = dry_run_ranks(config, case.layout, case.kernels, ranks, **options)
    found = {subject.rank: peak_bytes for subject, peak_bytes in find_peaks(subjects, **options)}
    assert found == {report.rank: report.peak_bytes for report in whole}


@pytest.mark.parametrize(("rank", "most"), [(0, 0.35), (3, 0.35)])
def test_of_many_stages_a_few_actions_are_run(rank: int, most: float) -> None:
    layout = replace(INTERLEAVED, pp=4, virtual_stages=8, dp_shard=1, zero=3)
    sample = sample_schedule(DEEPER, Case(layout, global_batch=64).batch, layout, rank)
    assert set(sample.kinds) == set(sample.of_whole)
    assert len(sample.kinds) <= most * len(sample.of_whole)
    assert sample.schedule.ranks[rank] and sample.share < 1


def test_of_a_long_gpipe_few_microbatches_are_run() -> None:
    layout = Layout(pp=2, schedule="gpipe")
    sample = sample_schedule(DEEP, Case(layout, global_batch=512).batch, layout, 0)
    assert len(sample.of_whole) > 1500 and len(sample.kinds) < 30


def test_nothing_is_put_together_of_actions_that_differ() -> None:
    layout = Layout(pp=2, schedule="gpipe")
    sample = sample_schedule(DEEP, Case(layout, global_batch=64).batch, layout, 0)
    memory = ActionMemory()
    memory.actions = [Held(0) for _ in sample.kinds]
    for held in memory.actions:
        held.fullest_bytes, held.left_bytes = 7, 1
    assert peak_of_step(sample, [memory]) == 7 + len(sample.of_whole) - 1
    alike = [place for place, kind in enumerate(sample.kinds) if sample.kinds.count(kind) > 1]
    memory.actions[alike[0]].fullest_bytes = 8
    assert peak_of_step(sample, [memory]) is None


def test_nothing_is_put_together_where_the_update_of_all_stages_may_be_fullest() -> None:
    layout = replace(INTERLEAVED, dp_shard=1)
    sample = sample_schedule(DEEP, Case(layout, global_batch=16).batch, layout, 0)
    memory = ActionMemory()
    memory.actions = [Held(0) for _ in sample.kinds]
    for held in memory.actions:
        held.fullest_bytes = 8
    memory.actions[-1].fullest_bytes = 1
    assert peak_of_step(sample, [memory]) == 8
    memory.actions[-1].fullest_bytes = 7
    assert peak_of_step(sample, [memory]) is None


def not_of_a_few(sample: SampledSchedule, runs: Sequence[ActionMemory]) -> int | None:
    return peak_of_step(sample, runs) if len(sample.kinds) == len(sample.of_whole) else None


@pytest.mark.parametrize("found", [peak_of_step, not_of_a_few], ids=["of a few", "of all"])
def test_where_a_few_actions_do_not_say_the_peak_all_are_executed(found, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(Layout(pp=2, schedule="gpipe"), model=replace(SHAPE, num_layers=4), precision=BF16, global_batch=8)
    sample = sample_schedule(case.model, case.batch, case.layout, 1)
    assert len(sample.kinds) < len(sample.of_whole) and sample.shortened is None
    monkeypatch.setattr("dtlayout.dryrun.ranks.peak_of_step", found)
    [(subject, peak_bytes)] = find_peaks(
        [Subject(to_config(case), case.layout, Kernels(), 1)], device_type="cpu", gpus_per_node=2
    )
    [report] = dry_run_ranks(to_config(case), case.layout, Kernels(), [1], device_type="cpu", gpus_per_node=2)
    assert (subject.rank, peak_bytes) == (1, report.peak_bytes)
