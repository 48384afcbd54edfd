"""Seconds of Muon's matmuls and messages, by hand: 50 TFLOP/s are reached, and 50 GB/s between GPUs."""

from dataclasses import replace

import pytest
from plugged import ask
from small import MODEL, scenario

from dtlayout.cli import main
from dtlayout.costmodel.comm import data_link, half_all_reduce_s
from dtlayout.costmodel.muon import iteration_s, workspace_bytes
from dtlayout.costmodel.parameter_groups import ParameterCount
from dtlayout.costmodel.update import Sent, find_update, update_times
from dtlayout.models.families import describe
from dtlayout.pipelining.partition import StageSlice
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts
from dtlayout.spec.newton_schulz import iteration_flops
from dtlayout.spec.optimizers import SGD, Muon
from dtlayout.spec.precision import Precision

MUON = Muon()
MATRICES = [weight.shape for weight in describe(MODEL).block_weights if weight.role == "matrix"] * MODEL.num_layers
NUM_PARAMETERS = sum(rows * columns for rows, columns in MATRICES)
FLOPS = sum(iteration_flops(shape, 5) for shape in MATRICES)
REACHED_FLOPS_PER_S = 50e12


def setting(num_gpus: int = 8, **changes):
    found = scenario(num_gpus=num_gpus)
    return replace(found, engine=replace(found.engine, name="dtlayout"), optimizer=MUON, **changes)


@pytest.mark.parametrize(
    ("layout", "num_ranks"),
    [
        (Layout(dp_shard=8), 8),
        (Layout(dp_shard=4, tp=2), 8),
        (Layout(dp_replicate=2, dp_shard=4), 4),
        (Layout(cp=8), 8),
    ],
    ids=str,
)
def test_matmuls_are_spread_over_the_ranks_that_share_a_matrix_and_bf16_is_sent_twice(layout, num_ranks):
    iterating_s, sending_s = iteration_s(setting(), layout, MUON, ParameterCount(NUM_PARAMETERS / layout.tp, 0.0))
    assert iterating_s == pytest.approx(FLOPS / num_ranks / REACHED_FLOPS_PER_S)
    link = data_link(setting(), layout, 1, num_ranks)
    assert sending_s == pytest.approx(2 * half_all_reduce_s(2 * NUM_PARAMETERS / num_ranks, num_ranks, link))


def test_the_largest_matrix_is_waited_for_and_copies_work_alone():
    own = ParameterCount(NUM_PARAMETERS, 0.0)
    iterating_s, _ = iteration_s(setting(64), Layout(dp_shard=64), MUON, own)
    assert iterating_s == pytest.approx(iteration_flops((2000, 1000), 5) / REACHED_FLOPS_PER_S)
    assert iteration_s(setting(), Layout(dp_replicate=8), MUON, own) == (pytest.approx(FLOPS / REACHED_FLOPS_PER_S), 0)
    half = iteration_s(setting(), Layout(pp=2, dp_shard=4), MUON, ParameterCount(NUM_PARAMETERS / 2, 0.0))
    assert half[0] == pytest.approx(FLOPS / 2 / 4 / REACHED_FLOPS_PER_S)


def test_whole_experts_are_not_sent_and_those_in_rows_are():
    experts = replace(MODEL, experts=Experts(number=8, per_token=2, ffn_size=1000))
    here, stacked = setting(model=experts), 3 * 8 * 1000 * 1000 * MODEL.num_layers
    each_s = iteration_flops((1000, 1000), 5) / REACHED_FLOPS_PER_S
    for layout, on_ep, sends in ((Layout(dp_shard=8), 1, False), (Layout(dp_shard=8, ep=4), 4, False),
                                 (Layout(dp_shard=2, tp=4, ep=2), 2, False)):  # fmt: skip
        found = iteration_s(here, layout, MUON, ParameterCount(0.0, stacked / on_ep))
        assert found[0] == pytest.approx(3 * MODEL.num_layers * each_s) and (found[1] > 0) is sends
    few = replace(MODEL, experts=Experts(number=2, per_token=1, ffn_size=1000))
    found = iteration_s(setting(model=few), Layout(dp_shard=8), MUON, ParameterCount(0.0, stacked / 4))
    assert found[0] == pytest.approx(3 * MODEL.num_layers * each_s / 4) and found[1] > 0


def test_an_update_has_both_and_nothing_hides_what_is_sent():
    layout, own = Layout(dp_shard=8), ParameterCount(NUM_PARAMETERS, 0.0)
    by_muon, by_sgd = (
        find_update(replace(setting(), optimizer=optimizer), layout, NUM_PARAMETERS, has_head=False)
        for optimizer in (MUON, SGD(weight_decay=0.1))
    )
    iterating_s, sending_s = iteration_s(setting(), layout, MUON, own)
    passes_s = (MUON.update_bytes - SGD(weight_decay=0.1).update_bytes) / 8 * NUM_PARAMETERS / 1e12
    assert by_muon.optimizer_s - by_sgd.optimizer_s == pytest.approx(iterating_s + passes_s)
    dp_s = [update_times(setting(), layout, each, 4, 1, 1e9, 1e9)[0] for each in (by_muon, by_sgd)]
    assert dp_s[0] - dp_s[1] == pytest.approx(sending_s) and sending_s == by_muon.exchange_s > 0
    alone = [Sent.of(setting(), layout, each, 1).alone_s for each in (by_muon, by_sgd)]
    assert alone[0] - alone[1] == pytest.approx(iterating_s + passes_s + sending_s)


def test_other_optimizers_and_other_programs_have_neither_time_nor_workspace_of_it():
    own, stage = ParameterCount(NUM_PARAMETERS, 0.0), [StageSlice(range(4), embedding=True, head=True)]
    assert iteration_s(setting(), Layout(dp_shard=8), SGD(), own) == (0, 0)
    assert iteration_s(scenario(), Layout(dp_shard=8), MUON, own) == (0, 0)
    assert workspace_bytes(replace(scenario(), optimizer=MUON), Layout(dp_shard=8), stage) == 0
    assert workspace_bytes(replace(setting(), optimizer=SGD()), Layout(dp_shard=8), stage) == 0


def test_a_bucket_is_two_messages_or_one_beside_a_batch():
    """One rank has all 28 matrices, of which 12 of sides 1000 and 2000 are a batch; float64 is sent as it is."""
    stage = [StageSlice(range(4), embedding=True, head=True)]
    elements = NUM_PARAMETERS + 12 * (2 * 1000 * 2000 + 1000**2)
    assert workspace_bytes(setting(), Layout(dp_replicate=8), stage) == 2 * elements
    exact = Precision(params="float64", compute="float64", reduce="float64")
    assert workspace_bytes(setting(precision=exact), Layout(dp_replicate=8), stage) == 8 * elements


SCENARIO = ("--model", "llama-7b", "--gpu", "h100-80g-sxm", "--gpus", "16", "--seq-len", "4096", "--global-batch", "64")


def test_a_search_takes_it_and_refuses_to_offload_its_state_in_a_line(capsys):
    best = {name: ask(capsys, "recommend", *SCENARIO, "--optimizer", name)["layouts"][0] for name in ("muon", "adamw")}
    assert best["muon"]["memory"][0]["optimizer"] < 0.6 * best["adamw"]["memory"][0]["optimizer"]
    assert best["muon"]["layout"]["dp_shard"] * best["muon"]["layout"]["tp"] > 1
    assert main(["recommend", *SCENARIO, "--optimizer", "muon", "--fix", "offload=optimizer"]) != 0
    assert "optimizer.name=muon iterates matrices on the device" in capsys.readouterr().err
