"""What was done in a dry run, priced by hand: 50 TFLOP/s of matmuls, 1 TB/s of memory, links of 50 and 5 GB/s."""

from dataclasses import replace

import pytest
from small import scenario

from dtlayout.costmodel.engine_features import Features
from dtlayout.dryrun.report import Done, Message, Place, RankReport
from dtlayout.dryrun.roofline import roofline_time
from dtlayout.measure.ledger import Footprint
from dtlayout.mesh.axes import coordinate
from dtlayout.models.kernel_calls import AttentionCall, KernelCall, Matmul, Pass
from dtlayout.schedules.actions import Action, Kind
from dtlayout.spec.batch import Batch
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

KERNELS = Kernels(attention="sdpa-flash")
MATMUL, MATMUL_S = Matmul(10_000, 10_000, 10_000), 2e12 / 50e12
ATTENTION, ATTENTION_S = AttentionCall(int(1e12)), 0.5e12 / 50e12
PASS, PASS_S = Pass(int(1e9)), 1e-3
GATHER, GATHER_S = Message("all_gather", "tp", int(1e9), crosses_node=False), 10e-6 + 0.5e9 / 50e9 + 5e-6


def did(kind: Kind | None, stage: int, microbatch: int, *work: KernelCall | Message, module="", again=False):
    action = None if kind is None else Action(kind, stage, microbatch)
    return [Done(Place(action, module, again), what, 1) for what in work]


def report_of(rank: int, layout: Layout, done: list[Done], *, run: int = 2, whole: int = 2) -> RankReport:
    return RankReport(
        rank=rank, coordinate=coordinate(rank, layout), peak_bytes=0, parts=Footprint(), module="", action="",
        curve=[], done=done, num_microbatches=whole, num_microbatches_run=run,
    )  # fmt: skip


def a_scenario(layout: Layout, microbatches: int, **constants):
    found = scenario(num_gpus=8, features=Features(sharding="fsdp2"), **constants)
    return replace(found, batch=Batch(global_batch=microbatches * layout.dp * layout.micro_batch, seq_len=1000))


F, B = Kind.FORWARD, Kind.BACKWARD


def test_one_rank_takes_the_sum_and_the_second_microbatch_stands_for_those_left_out():
    layout = Layout(tp=2)
    done = [
        *did(F, 0, 0, MATMUL), *did(B, 0, 0, MATMUL, PASS), *did(B, 0, 0, ATTENTION, again=True),
        *did(F, 0, 1, MATMUL, GATHER), *did(B, 0, 1, MATMUL, MATMUL),
        *did(None, 0, 0, PASS, PASS),
    ]  # fmt: skip
    time = roofline_time(a_scenario(layout, 5), layout, KERNELS, [report_of(0, layout, done, run=2, whole=5)])
    assert time is not None
    assert time.compute == pytest.approx(2 * MATMUL_S + PASS_S + 4 * 3 * MATMUL_S)
    assert time.recompute == pytest.approx(ATTENTION_S)
    assert time.tp == pytest.approx(4 * GATHER_S)
    assert time.optimizer == pytest.approx(2 * PASS_S)
    assert time.dp == time.bubble == time.pp == 0


def test_gathers_and_reductions_wait_only_for_what_their_action_does_not_hide():
    layout = Layout(dp_shard=2)
    reduction = Message("reduce_scatter", "dp_shard", int(8e9), crosses_node=False)
    reduction_s = 10e-6 + 4e9 / 50e9 + 5e-6
    done = [*did(F, 0, 0, MATMUL), *did(B, 0, 0, MATMUL, reduction)]
    time = roofline_time(
        a_scenario(layout, 1, overlap=0.5), layout, KERNELS, [report_of(0, layout, done, run=1, whole=1)]
    )
    assert time is not None and time.dp == pytest.approx(reduction_s - 0.5 * MATMUL_S)
    hidden = roofline_time(
        a_scenario(layout, 1, overlap=0.5), layout, KERNELS,
        [report_of(0, layout, [*done, *did(B, 0, 0, *[MATMUL] * 4)], run=1, whole=1)],
    )  # fmt: skip
    assert hidden is not None and hidden.dp == 0


def pipeline(stage: int, *work: KernelCall, module: str = "model.layers.0.mlp") -> list[Done]:
    both = [did(kind, stage, i, *work, module=module) for kind in (F, B) for i in range(2)]
    return [done for part in both for done in part]


def test_stages_that_nobody_ran_are_like_the_first_without_its_embedding():
    """Four stages of one block: 1 ms each way, and 1 ms more for the embedding and for the head."""
    layout = Layout(pp=4, stage_layers=(1, 1, 1, 1))
    first = report_of(0, layout, pipeline(0, PASS) + pipeline(0, PASS, module="model.embed_tokens"))
    last = report_of(3, layout, pipeline(3, PASS, PASS, module="lm_head"))
    time = roofline_time(a_scenario(layout, 2), layout, KERNELS, [first, last])
    assert time is not None
    # The last stage does F0 B0 F1 B1 from 4 to 12 ms, and the last gradient is back at the first after 2 ms more.
    assert time.compute == pytest.approx(8 * PASS_S)
    assert time.total == pytest.approx((12 + 2 + 2) * PASS_S)
    assert time.bubble == pytest.approx(8 * PASS_S)


def test_stages_that_exchange_a_tied_gradient_wait_for_it_once_and_no_message_waits_longer():
    layout = Layout(pp=2)
    between, tied = (Message("send", "pp", int(size), crosses_node=False) for size in (1e6, 1e9))
    ends = [
        report_of(
            rank, layout, [*pipeline(rank, PASS), *did(Kind.SEND_FORWARD, rank, 0, between), *did(None, 0, 0, *of)]
        )
        for rank in (0, 1)
        for of in [(tied, replace(tied, name="recv"))]
    ]
    without = [replace(end, done=[done for done in end.done if done.place.action]) for end in ends]
    with_tied, plain = (roofline_time(a_scenario(layout, 2), layout, KERNELS, reports) for reports in (ends, without))
    assert with_tied is not None and plain is not None
    assert with_tied.bubble == pytest.approx(plain.bubble)
    assert with_tied.dp == pytest.approx(1e9 / 50e9 + 5e-6) and plain.dp == 0


def test_without_both_ends_of_the_pipeline_there_is_no_price():
    layout = Layout(pp=4)
    first = report_of(0, layout, pipeline(0, PASS))
    assert roofline_time(a_scenario(layout, 2), layout, KERNELS, [first]) is None


def test_a_small_all_reduce_over_all_ranks_takes_microseconds():
    layout = Layout(dp_shard=4, tp=2)
    numbers = Message("all_reduce", "all", 24, crosses_node=False)
    time = roofline_time(a_scenario(layout, 1), layout, KERNELS, [
        report_of(0, layout, [*did(F, 0, 0, PASS), *did(None, 0, 0, numbers)], run=1, whole=1)
    ])  # fmt: skip
    assert time is not None and 10e-6 < time.dp < 1e-4
