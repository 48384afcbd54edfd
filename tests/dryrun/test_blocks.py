"""The peak that two shorter dry runs give is that of the whole one, to the byte."""

from dataclasses import replace

import pytest
from parity import BF16, FP32, SHAPE, Case
from rehearsal import to_config
from thorough import mostly_thorough

from dtlayout.dryrun.blocks import Heights, extrapolate, find_cut
from dtlayout.dryrun.ranks import Subject, dry_run_ranks, find_peaks
from dtlayout.dryrun.report import Place
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout

DEEP = replace(SHAPE, num_layers=16)
DEEPER = replace(SHAPE, num_layers=32)
WIDE_HEAD = replace(DEEP, vocab_size=2048)
CASES = [
    Case(Layout(dp_shard=4, zero=2, recompute="selective"), model=DEEP, precision=FP32),
    Case(Layout(dp_replicate=2, dp_shard=2, zero=3), model=WIDE_HEAD, precision=BF16),
    Case(Layout(dp_shard=2, tp=2, micro_batch=2, recompute="full"), model=DEEP, precision=BF16),
    Case(Layout(dp_shard=4, zero=3, recompute="every-2"), model=DEEPER, precision=BF16),
    Case(Layout(pp=2, dp_shard=2), model=DEEPER, precision=BF16),
    Case(
        Layout(pp=2, dp_shard=2, zero=2, schedule="interleaved-1f1b", virtual_stages=2),
        model=replace(SHAPE, num_layers=40), precision=BF16,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "case", mostly_thorough(CASES, lambda i, _: i % 2 > 0), ids=[str(case.layout) for case in CASES]
)
def test_shorter_stages_say_the_peak_of_the_whole_ones(case: Case) -> None:
    config, options = to_config(case), {"device_type": "cuda", "gpus_per_node": 2}
    ranks = [0, 2] if case.layout.schedule == "1f1b" and case.layout.pp > 1 else [0]
    subjects = [Subject(config, case.layout, case.kernels, rank) for rank in ranks]
    assert all(find_cut(case.model, case.batch, case.layout, subject.rank) for subject in subjects)
    whole = dry_run_ranks(config, case.layout, case.kernels, ranks, **options)
    found = {subject.rank: peak_bytes for subject, peak_bytes in find_peaks(subjects, **options)}
    assert found == {report.rank: report.peak_bytes for report in whole}


def test_what_is_left_out_lies_between_blocks_like_it() -> None:
    layout = Layout(pp=2, recompute="every-2")
    cut = find_cut(DEEPER, Case(layout).batch, layout, rank=1)
    assert cut is not None
    assert (cut.times, len(cut.of_shorter), len(cut.of_longer)) == (5, 10, 8)
    assert cut.of_shorter[0] == 16 + 3 and cut.of_shorter[-1] == 28
    assert set(cut.of_longer) < set(cut.of_shorter)


@pytest.mark.parametrize(
    "layout",
    [Layout(pp=8), Layout(recompute="every-8"), Layout(pp=2, schedule="interleaved-1f1b", virtual_stages=4)],
    ids=str,
)
def test_stages_of_few_blocks_are_run_whole(layout: Layout) -> None:
    assert find_cut(DEEPER, Case(layout, global_batch=16).batch, layout, rank=0) is None


def test_the_peak_of_a_short_stage_is_that_of_its_whole_run() -> None:
    case = Case(Layout(pp=2), precision=BF16)
    [(subject, peak_bytes)] = find_peaks(
        [Subject(to_config(case), case.layout, Kernels(), 1)], device_type="cpu", gpus_per_node=2
    )
    [report] = dry_run_ranks(to_config(case), case.layout, Kernels(), [1], device_type="cpu", gpus_per_node=2)
    assert (subject.rank, peak_bytes) == (1, report.peak_bytes)


def test_another_moment_may_become_the_fullest() -> None:
    """The head's 100 stay below the blocks' 10 each as soon as there are more than ten."""
    head, last = Place(None, "lm_head", False), Place(None, "model.layers.9", False)
    shorter, longer = Heights(), Heights()
    for heights, blocks in ((shorter, 4), (longer, 5)):
        heights.peak_bytes = 100
        heights.moments[head, "mm"] = [100, 60]
        heights.moments[last, "mm"] = [10 * blocks, 10 * blocks - 5]
    longer.moments[Place(None, "model.layers.2", False), "mm"] = [1]
    assert extrapolate(shorter, longer, times=2) == 100
    assert extrapolate(shorter, longer, times=8) == 120
