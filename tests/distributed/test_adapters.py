"""Every layout of a frozen model with an adapter computes what one process computes."""

from dataclasses import replace
from math import lcm
from pathlib import Path

import pytest
from drawn import legal_cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity import (
    BF16,
    EXACT,
    MIXTURE,
    QWEN2,
    SHAPE,
    TIED,
    Case,
    build_step,
    largest_difference,
    local_rows,
    local_starts,
    merge,
    run_layout,
    run_reference,
    skip_between_steps,
)
from ranks import Ranks
from resuming import SAVED_AFTER, resume
from thorough import mostly_thorough, thorough

from dtlayout.spec.adapter import Adapter
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape

SHALLOW = replace(SHAPE, num_layers=2)
"""Blocks have adapters of their own, and a layout with more stages gets more blocks."""
LORA, IA3 = Adapter(rank=3), Adapter(method="ia3")
SOME = Adapter(rank=2, alpha=7.0, rslora=True, targets=("q_proj", "o_proj", "up_proj"))
ALL_SCALED = Adapter(
    method="ia3", targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
)
LAYOUTS = {
    "zero 1": Layout(dp_shard=4, micro_batch=2),
    "zero 3": Layout(dp_shard=4, zero=3, recompute="full"),
    "hsdp": Layout(dp_replicate=2, dp_shard=2, zero=2, recompute="selective"),
    "tp": Layout(dp_shard=2, tp=2, zero=3, sequence_parallel=False),
    "tp alone": Layout(tp=4, sequence_parallel=False, recompute="keep-matmuls"),
    "tp with sequence parallelism": Layout(dp_shard=2, tp=2, zero=2, recompute="full"),
    "tp and cp": Layout(tp=2, cp=2, recompute="selective"),
    "cp by heads": Layout(cp=2, cp_method="all-to-all", tp=2, zero=3),
    "pp": Layout(pp=2, dp_shard=2, zero=3),
    "pp and tp": Layout(pp=2, tp=2, zero=2, sequence_parallel=False),
    "interleaved": Layout(pp=2, tp=2, schedule="interleaved-1f1b", virtual_stages=3, recompute="every-2"),
    "split backwards": Layout(pp=2, tp=2, schedule="zb-h1", zero=3),
    "split backwards of copies": Layout(pp=2, dp_replicate=2, schedule="zb-h1", recompute="full"),
    "split backwards in a V": Layout(pp=2, dp_shard=2, schedule="zb-v", virtual_stages=2, zero=2),
    "offloaded": Layout(dp_shard=2, tp=2, zero=3, offload="both", recompute="selective"),
}  # fmt: skip
MODELS = {
    "lora": replace(SHALLOW, adapter=LORA),
    "lora of some": replace(TIED, num_layers=2, adapter=SOME),
    "lora beside biases": replace(QWEN2, num_layers=2, adapter=LORA),
    "ia3": replace(SHALLOW, adapter=IA3),
    "ia3 everywhere": replace(QWEN2, num_layers=2, adapter=ALL_SCALED),
}
SELDOM = (
    "zero 1", "tp alone", "tp and cp", "pp", "pp and tp", "split backwards of copies", "split backwards in a V",
    "offloaded",
)  # fmt: skip
"""Layouts whose axes others have too."""
RESCALED = tuple(name for name in LAYOUTS if name not in ("zero 3", "hsdp", "cp by heads", "interleaved", "offloaded"))
"""Layouts with (IA)³ too: what it adds is a vector, placed like LoRA's matrices."""
FIVE_UPDATES = (*SELDOM, "tp with sequence parallelism")
QUANTIZED = ("zero 3", "split backwards")
"""Layouts that always run with a quantized base."""


def compare(ranks4: Ranks, case: Case) -> None:
    size, whose = largest_difference(merge(ranks4.run(run_layout, case)), run_reference(case))
    assert size <= 1e-10, (case, whose)


@pytest.mark.parametrize("name", mostly_thorough(LAYOUTS, lambda _, name: name not in SELDOM))
def test_updates_of_adapters_are_exact_in_float64(ranks4: Ranks, name: str) -> None:
    """Three, or five where A and B lie in most ways: B is zero at first, and so A's gradient."""
    for model in ("lora", *["ia3"] * (name in RESCALED)):
        num_steps = 5 if name in FIVE_UPDATES else 3
        compare(ranks4, Case(LAYOUTS[name], model=MODELS[model], num_steps=num_steps))


@pytest.mark.parametrize("name", ["lora of some", thorough("lora beside biases"), "ia3 everywhere"])
def test_targets_biases_and_tied_embeddings_are_exact_too(ranks4: Ranks, name: str) -> None:
    for layout in ("tp", *["interleaved"] * (name == "lora of some")):
        compare(ranks4, Case(LAYOUTS[layout], model=MODELS[name], num_steps=2))


def test_documents_are_exact_too(ranks4: Ranks) -> None:
    compare(ranks4, Case(LAYOUTS["tp with sequence parallelism"], model=MODELS["lora"], documents=True, num_steps=3))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=4, ep=2, zero=3, recompute="full"),
        Layout(dp_shard=2, tp=2, ep=4, recompute="selective"),
        thorough(Layout(pp=2, dp_shard=2, ep=2, schedule="zb-h1", zero=2)),
    ],
    ids=str,
)
def test_adapters_beside_frozen_experts_are_exact(ranks4: Ranks, layout: Layout) -> None:
    for adapter in (LORA, *[Adapter(method="ia3", targets=("k_proj", "down_proj"))] * (layout.tp > 1)):
        compare(ranks4, Case(layout, model=replace(MIXTURE, adapter=adapter), num_steps=2))


WIDE = ModelShape(
    name="wide", hidden_size=128, num_layers=2, num_heads=8, num_kv_heads=4, ffn_size=128, vocab_size=88, adapter=LORA
)
"""With matrices of which tp = 2 splits rows between blocks of 64."""


@pytest.mark.parametrize("name", mostly_thorough(LAYOUTS, lambda _, name: name in QUANTIZED))
def test_updates_on_a_quantized_base_are_exact_in_float64(ranks4: Ranks, name: str) -> None:
    for base in ("nf4", *["int8"] * (name == "zero 3")):
        compare(ranks4, Case(LAYOUTS[name], model=WIDE, precision=replace(EXACT, base=base), num_steps=3))


@pytest.mark.parametrize("num_examples", [2, thorough(30)])
def test_adapters_go_on_exactly_under_another_random_layout(ranks4: Ranks, num_examples: int, tmp_path: Path) -> None:
    """Two steps, a checkpoint and a third step, of a base in the compute format or in few bits."""
    of_few_bits = legal_cases([WIDE], overlaps_tp=False, bases=("nf4", "int8"))
    cases = legal_cases(list(MODELS.values()), overlaps_tp=False) | of_few_bits

    @settings(max_examples=num_examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(saved=cases, data=st.data())
    def goes_on(saved: Case, data: st.DataObject) -> None:
        drawn = data.draw(legal_cases([saved.model], overlaps_tp=False, bases=(saved.precision.base,)))
        batch = lcm(saved.global_batch, drawn.global_batch)
        saved, resumed = (replace(each, model=drawn.model, global_batch=batch) for each in (saved, drawn))
        resumed = replace(resumed, documents=saved.documents)
        outcome = merge(ranks4.run(resume, saved, resumed, tmp_path))
        reference = replace(run_reference(replace(resumed, num_steps=SAVED_AFTER + 1)), gradients={})
        size, whose = largest_difference(outcome, reference)
        assert size <= 1e-10, (saved, resumed, whose)

    goes_on()


def test_a_loss_that_is_not_finite_changes_no_bit_of_an_adapter(ranks4: Ranks) -> None:
    quantized = replace(EXACT, base="nf4")
    for case in (Case(LAYOUTS["pp and tp"], model=MODELS["lora"]), Case(LAYOUTS["tp"], 0, WIDE, quantized)):
        assert ranks4.run(skip_between_steps, case) == [True] * 4


def formats_after_steps(case: Case) -> dict[str, str]:
    """Format of each of a rank's parameters after the steps of a case."""
    assembly, step = build_step(case)
    for _ in range(case.num_steps):
        step(*local_rows(case), local_starts(case))
    return {name: str(parameter.dtype) for each in assembly.modules for name, parameter in each.named_parameters()}


def test_a_frozen_base_lies_in_the_compute_format(ranks4: Ranks) -> None:
    case = Case(LAYOUTS["tp with sequence parallelism"], model=MODELS["lora"], precision=BF16, num_steps=2)
    for formats in ranks4.run(formats_after_steps, case):
        trained = {name for name in formats if "lora" in name}
        assert {formats[name] for name in trained} == {"torch.float32"}
        assert {formats[name] for name in formats.keys() - trained} == {"torch.bfloat16"}
