"""The formulas of memory and time, and the messages of theory, against dry runs of models that people train.

A change that holds more or sends more by accident fails here. As many microbatches as fill the pipeline, and few of
the blocks, for speed; whole steps of whole models, and five more runs, are in benchmarks/dryrun.py.
"""

from collections import Counter
from dataclasses import replace

import pytest
from thorough import thorough

from benchmarks.dryrun import SUBJECTS, Subject
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.fsdp2.memory import estimate_curve
from dtlayout.dryrun.choose import default_ranks
from dtlayout.dryrun.findings import Findings
from dtlayout.dryrun.ranks import dry_run_ranks
from dtlayout.dryrun.report import RankReport
from dtlayout.pipelining.partition import count_blocks, layer_costs, partition
from dtlayout.planner.prediction import own_scenario, predict
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.cluster import find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts

STUDY_13B, LLAMA_8B, LLAMA_70B = (
    replace(subject, global_batch=max(2, subject.layout.pp) * subject.layout.dp)
    for subject in (SUBJECTS[i] for i in (0, 5, 6))
)


def shorten(subject: Subject) -> Subject:
    """A subject with a first block, a last one and two between on each stage: what is between is the same in each."""
    return replace(subject, changes=(*subject.changes, ("num_layers", 4 * subject.layout.pp)))


@pytest.mark.parametrize(
    "subject",
    [*map(shorten, (STUDY_13B, LLAMA_8B, LLAMA_70B)), *map(thorough, (STUDY_13B, LLAMA_8B, LLAMA_70B))],
    ids=lambda subject: f"{subject.model} {subject.config.model.num_layers}",
)
def test_the_formulas_agree_and_messages_are_those_of_theory(subject: Subject) -> None:
    config, layout, gpu = subject.config, subject.layout, find_gpu(subject.gpu)
    estimate = predict(config, layout, gpu)
    assert estimate is not None
    ranks = default_ranks(layout, estimate) if layout.pp > 1 else [0]  # without a pipeline all hold the same
    blocks = count_blocks(partition(layer_costs(config.model, config.batch), layout))
    options = {"device_type": gpu.device_type, "gpus_per_node": gpu.gpus_per_node}
    reports = list(dry_run_ranks(config, layout, Kernels(), ranks, **options))
    scenario = own_scenario(config, layout.world_size, gpu)
    findings = Findings(scenario=scenario, layout=layout, reports=reports, estimate=estimate)
    for report in reports:
        stage = report.coordinate["pp"]
        for dry, predicted in findings.components(report).values():
            assert predicted == pytest.approx(dry, rel=0.05)
        assert count_messages(report) == expect_messages(subject, stage, blocks[stage])
    assert findings.time is not None and findings.time.total == pytest.approx(estimate.step_time_s, rel=0.15)


STEPS = [
    Layout(dp_shard=2, tp=2, micro_batch=2, zero=2, recompute="keep-matmuls"),
    Layout(pp=2, tp=4, schedule="gpipe", zero=3, recompute="keep-attention"),
    Layout(dp_shard=2, zero=3, micro_batch=2, recompute="full", offload="optimizer"),
    Layout(micro_batch=2, zero=3, offload="optimizer"),
    Layout(dp_shard=2, tp=2, zero=2, micro_batch=2, recompute="selective", offload="disk"),
    Layout(pp=2, tp=4, micro_batch=2, schedule="gpipe", zero=2, recompute="selective", offload="activations"),
    Layout(pp=2, dp_replicate=2, dp_shard=2, schedule="zb-h1", zero=3, recompute="selective"),
    Layout(pp=4, dp_shard=2, schedule="v-min", virtual_stages=2, zero=2, sequence_parallel=False, tp=2),
    Layout(tp=2),  # matmuls add to sums
    Layout(pp=2, tp=2, schedule="zb-h1"),
]
ON_DISK = [
    Layout(pp=2, dp_shard=2, zero=3, recompute="full", offload="disk"),
    Layout(dp_replicate=2, dp_shard=2, cp=2, micro_batch=2, recompute="keep-matmuls", offload="disk"),
]
LORA, IA3 = Adapter(), Adapter(method="ia3")
ADAPTED = [
    (Layout(dp_shard=2, tp=2, zero=3, recompute="selective", offload="both"), LORA),
    (Layout(tp=4, micro_batch=2, sequence_parallel=False, recompute="keep-matmuls"), LORA),
    (Layout(cp=2, cp_method="all-to-all", dp_shard=2, zero=3), IA3),
    (Layout(pp=2, tp=2, schedule="zb-h1", micro_batch=2, zero=3), Adapter(targets=("o_proj", "up_proj"))),
]
SCALED = [
    (Layout(pp=2, tp=2, schedule="zb-h1", zero=3), None, "fp8-tensorwise"),
    (Layout(pp=2, dp_shard=2, zero=3, recompute="keep-matmuls"), None, "fp8-rowwise"),
    thorough((Layout(dp_shard=2, tp=2, micro_batch=2, zero=2, recompute="full"), None, "fp8-tensorwise")),
    thorough((Layout(dp_shard=2, tp=2, zero=3), LORA, "fp8-tensorwise")),
]


@pytest.mark.parametrize(
    ("layout", "adapter", "matmuls"),
    [
        *((layout, None, "compute") for layout in STEPS),
        *(thorough((layout, None, "compute")) for layout in ON_DISK),
        *((*each, "compute") for each in ADAPTED),
        *SCALED,
    ],
    ids=str,
)
def test_each_action_of_a_step_holds_what_the_formula_says(
    layout: Layout, adapter: Adapter | None, matmuls: str
) -> None:
    """Forwards too, whose peaks are those of a step in few layouts."""
    short = ("num_layers", max(4, layout.num_stages)), ("vocab_size", 32_000), ("adapter", adapter)
    num_microbatches = {1: 3, 2: 4, 4: 6}[layout.pp]  # a first, a last and some between
    batch = num_microbatches * layout.micro_batch * layout.dp
    check_actions(Subject("llama3.1-8b", "h100-80g-sxm", 4096, batch, layout, short), matmuls)


WIDE_EXPERTS = (
    ("num_layers", 2), ("vocab_size", 32_000), ("experts", Experts(number=2, per_token=2, ffn_size=8192)),
)  # fmt: skip
"""Of a model whose experts hold more inside of them than outside."""


@pytest.mark.parametrize(
    ("schedule", "matmuls"), [("1f1b", "compute"), ("zb-h1", "fp8-tensorwise"), thorough(("1f1b", "fp8-rowwise"))]
)
def test_each_action_holds_what_the_formula_says_of_few_wide_experts(schedule: str, matmuls: str) -> None:
    layout = Layout(pp=2, dp_shard=2, ep=2, schedule=schedule)
    check_actions(Subject("qwen3-30b-a3b", "h100-80g-sxm", 4096, 2 * layout.dp, layout, WIDE_EXPERTS), matmuls)


def check_actions(subject: Subject, matmuls: str) -> None:
    layout = subject.layout
    config = replace(subject.config, precision=replace(subject.config.precision, matmuls=matmuls))
    scenario = own_scenario(config, layout.world_size, find_gpu(subject.gpu))
    estimator, m = Estimator(scenario), layout.num_microbatches(scenario.batch)
    stages, memory = estimator.stages(layout), estimator.memory(layout, Kernels())
    firsts = [rank * layout.world_size // layout.pp for rank in range(layout.pp)]
    options = {"device_type": "cuda", "gpus_per_node": 8, "folds": False}
    for report in dry_run_ranks(config, layout, Kernels(), firsts, **options):
        rank = report.coordinate["pp"]
        predicted = {str(a): fullest for a, fullest, _ in estimate_curve(scenario, layout, Kernels(), stages, rank, m)}
        held = {part.action: part.nbytes for part in report.curve if part.action in predicted}
        assert len(held) == m * (2 + layout.splits_backward) * layout.virtual_stages
        assert held == pytest.approx({action: predicted[action] for action in held}, rel=0.02)  # a message more or less
        assert memory[rank].total == pytest.approx(report.peak_bytes, rel=0.01)


def count_messages(report: RankReport) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for message, count in report.traffic.items():
        if message.name in ("all_gather", "reduce_scatter", "send", "recv"):
            counts[message.name, message.axis] += count
    return counts


def expect_messages(subject: Subject, stage: int, blocks: int) -> Counter[tuple[str, str]]:
    """Of each microbatch two gathers and two scatters a block in each direction, and one for either end of the model.

    A step gathers and reduces each unit once under ZeRO-1; under ZeRO-3 each microbatch does, and gathers twice what is
    not the head.
    """
    layout = subject.layout
    m, zero = subject.global_batch // (layout.dp * layout.micro_batch), layout.zero
    ends = (stage == 0) + (stage == layout.pp - 1)
    counts: Counter[tuple[str, str]] = Counter()
    if layout.dp_shard > 1:
        counts["all_gather", "dp_shard"] = (
            blocks + ends if zero == 1 else m * (2 * (blocks + ends) - (stage == layout.pp - 1))
        )
        counts["reduce_scatter", "dp_shard"] = (blocks + ends) * (1 if zero == 1 else m)
    if layout.tp > 1:
        counts["all_gather", "tp"] = counts["reduce_scatter", "tp"] = m * (4 * blocks + ends)
    if layout.pp > 1:
        counts["send", "pp"] = counts["recv", "pp"] = m * (2 - ends)
    return counts
