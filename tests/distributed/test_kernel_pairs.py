"""Every pair of values of the axes that a user chooses from is exact, or refused for a reason that is true."""

import traceback
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any, get_args

import pytest
import torch
from codes import TAKES_CODES
from parity import EXACT, SHAPE, Case, compiling_with, largest_difference, merge, run_layout, run_reference
from ranks import Ranks
from thorough import mostly_thorough
from torch.torch_version import TorchVersion

from dtlayout.base.errors import InvalidLayout
from dtlayout.config.checking import check_layout
from dtlayout.config.loading import parse_config
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.device import Device
from dtlayout.spec.kernel_records import KernelRequest
from dtlayout.spec.kernel_table import KERNELS
from dtlayout.spec.kernels import Compile, Kernels
from dtlayout.spec.layout import Layout

AXES: dict[str, tuple[Any, ...]] = {
    "attention": ("sdpa-flash", "sdpa-math", "blockwise"),
    "norm": ("fused", "eager"),
    "loss": tuple(name for name, known in KERNELS["loss"].items() if known.formats()),
    "compile": get_args(Compile),
    "recompute": ("none", "full", "selective", "keep-attention", "keep-matmuls"),  # every-N: tests of parity
    "zero": (1, 2, 3),
    "pp": (1, 2, 4),
    "tp": (1, 2, 4),
}
"""On a CPU; kernels that need CUDA have their tests in tests/ops."""
KERNELS = ("attention", "norm", "loss", "compile")
SLOW = (("blocks", 4), ("model", 4))
"""Compile and tp of which one case each, among WITH_DOCUMENTS and SINGLE, stands for all: tp=2 compiles the same
operators."""


def is_possible(choice: dict[str, Any]) -> bool:
    """Whether 4 ranks can be laid out so, nothing refuses it, and it takes no half a minute."""
    if 4 % (choice["pp"] * choice["tp"]) > 0 or (choice["compile"], choice["tp"]) in SLOW:
        return False
    case = to_case(choice)
    tp, recompute, compute = case.layout.tp, case.layout.recompute, case.precision.compute
    request = KernelRequest(device=Device("cpu"), compute=compute, tp=tp, recompute=recompute)
    return not case.kernels.problems(request)


def pairs_of(choice: dict[str, Any]) -> set[tuple[Any, ...]]:
    return set(combinations(sorted(choice.items()), 2))


def cover_pairs() -> Iterator[dict[str, Any]]:
    """Few choices that hold every pair of values which any possible choice holds: each time one with most new pairs."""
    possible = [c for values in product(*AXES.values()) if is_possible(c := dict(zip(AXES, values, strict=True)))]
    pairs = {id(choice): pairs_of(choice) for choice in possible}
    left = set().union(*pairs.values())
    while left:
        best = max(possible, key=lambda choice: len(pairs[id(choice)] & left))
        left -= pairs[id(best)]
        yield best


def to_case(choice: dict[str, Any]) -> Case:
    degrees = {name: choice[name] for name in ("recompute", "zero", "pp", "tp")}
    layout = Layout(dp_shard=4 // (choice["pp"] * choice["tp"]), **degrees)
    model = replace(SHAPE, num_layers=max(2, layout.pp))
    return Case(layout, kernels=Kernels(**{name: choice[name] for name in KERNELS}), model=model)


def shorten(case: Case) -> Case:
    """The case with two blocks, or one a stage, unless it needs more than torch compiles one by one."""
    return replace(case, model=replace(case.model, num_layers=2)) if case.model.num_layers < 9 else case


CASES = list(cover_pairs())
SINGLE = {
    "tp4 model": Case(Layout(tp=4), kernels=Kernels(compile="model")),
    "offloaded blocks": Case(Layout(dp_shard=4, offload="both"), kernels=Kernels(compile="blocks")),
    "offloaded blocks pp2": Case(
        Layout(pp=2, tp=2, recompute="selective", offload="activations"), kernels=Kernels(compile="blocks")
    ),
    "tp2 overlapped blocks": Case(Layout(dp_shard=2, tp=2, tp_overlap=True), kernels=Kernels(compile="blocks")),
    "cp2 blocks": Case(Layout(cp=2, tp=2), kernels=Kernels(compile="blocks")),
    "cp4 gathered model": Case(Layout(cp=4, cp_method="gather"), kernels=Kernels(compile="model")),
    "cp2 by heads blocks": Case(
        Layout(cp=2, cp_method="all-to-all", tp=2, recompute="selective"), kernels=Kernels(compile="blocks")
    ),
    "tp2 overlapped model": Case(
        Layout(pp=2, tp=2, tp_overlap=True, recompute="selective"), kernels=Kernels(compile="model")
    ),
    "ia3 model": Case(
        Layout(pp=2, tp=2), kernels=Kernels(compile="model"), num_steps=2,
        model=replace(SHAPE, adapter=Adapter(method="ia3")),
    ),
    "lora blocks": Case(
        Layout(dp_shard=2, tp=2, recompute="selective"), kernels=Kernels(compile="blocks"), num_steps=2,
        model=replace(SHAPE, num_layers=10, adapter=Adapter(rank=2)),
    ),
    "lora on a quantized base blocks": Case(
        Layout(dp_shard=2, tp=2, recompute="full", zero=3), kernels=Kernels(compile="blocks"), num_steps=2,
        model=replace(SHAPE, hidden_size=128, ffn_size=128, num_layers=10, adapter=Adapter(rank=2)),
        precision=replace(EXACT, base="nf4" if TAKES_CODES else "compute"),
    ),
}  # fmt: skip


WITH_DOCUMENTS = [
    Case(Layout(pp=4, recompute="full"), kernels=Kernels(compile="blocks"), documents=True),
    Case(Layout(tp=4, recompute="selective"), kernels=Kernels(compile="blocks"), documents=True),
    Case(Layout(pp=2, tp=2), kernels=Kernels(compile="blocks", attention="sdpa-math"), documents=True),
    Case(Layout(dp_shard=4, zero=3), kernels=Kernels(compile="model"), documents=True),
    Case(Layout(dp_shard=2, cp=2, recompute="selective"), kernels=Kernels(compile="blocks"), documents=True),
]

SINGLE = {name: shorten(case) for name, case in SINGLE.items()}
WITH_DOCUMENTS = [*map(shorten, WITH_DOCUMENTS)]


@pytest.mark.parametrize(
    "case",
    [*map(to_case, CASES), *mostly_thorough(SINGLE.values(), lambda i, _: i % 4 == 0 and i < len(SINGLE) - 1)],
    ids=[*(" ".join(map(str, choice.values())) for choice in CASES), *SINGLE],
)
def test_every_pair_is_exact_in_float64(ranks4: Ranks, case: Case) -> None:
    found = merge(ranks4.run(run_compiled, case, timeout_s=180))
    size, whose = largest_difference(found, run_reference(replace(case, kernels=Kernels())))
    assert size <= 1e-10, whose


@pytest.mark.parametrize(
    "case", mostly_thorough(WITH_DOCUMENTS), ids=[f"{c.layout} {c.kernels.compile}" for c in WITH_DOCUMENTS]
)
def test_documents_that_do_not_see_each_other_are_exact_where_something_is_compiled(ranks4: Ranks, case: Case) -> None:
    found = merge(ranks4.run(run_compiled, case, timeout_s=180))
    size, whose = largest_difference(found, run_reference(replace(case, kernels=Kernels())))
    assert size <= 1e-10, whose


def run_compiled(case: Case) -> Any:
    """The step with everything of torch.compile but its code generation, which takes half a minute a graph.

    All blocks of a shape are one graph, or those after torch's limit of eight would run eagerly, without a word.
    """
    torch._dynamo.reset()  # what other layouts compiled would count as recompiles
    # Torch 2.11 compiles a whole model again, once, for another number of documents, where a CPU does not look at it.
    again = torch.__version__ < TorchVersion("2.12") and case.documents and case.kernels.compile == "model"
    limits: dict[str, Any] = {"error_on_recompile": not again}
    if case.model.adapter is not None:  # the first block, whose input has no gradient, is a graph of its own
        limits = {"recompile_limit": 2, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(**limits), compiling_with("aot_eager"):
        return run_layout(case)


def find_failure(case: Case) -> str:
    """Reason that a rank gives as it fails, so that the pool lives on; empty if it does not."""
    try:
        run_compiled(case)
    except Exception:
        return traceback.format_exc()
    return ""


def test_all_pairs_are_there_but_those_that_are_refused_and_those_of_too_many_ranks():
    covered = set().union(*(pairs_of(choice) for choice in CASES))
    every = {
        tuple(sorted([(a, x), (b, y)]))
        for a, b in combinations(AXES, 2)
        for x, y in product(AXES[a], AXES[b])
    }  # fmt: skip
    too_many = {(("pp", p), ("tp", t)) for p, t in ((2, 4), (4, 2), (4, 4))}
    assert every - covered == too_many | {(("compile", compile), ("tp", tp)) for compile, tp in SLOW}


REFUSED = {
    "kernels.compile=model .* layout.recompute=full .* use layout.recompute=selective": ("full", "model"),
    "kernels.compile=blocks .* use layout.recompute=selective": ("keep-matmuls", "blocks"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_torch_compile_fails_on_is_refused(reason: str) -> None:
    """It does: see `test_what_is_refused_fails`."""
    recompute, compile = REFUSED[reason]
    config = parse_config(
        {"model": {"name": "debug"}, "batch": {"global_batch": 8, "seq_len": 16},
         "train": {"steps": 1, "device": "cpu"}, "layout": {"tp": 2, "recompute": recompute},
         "kernels": {"attention": "sdpa-flash", "compile": compile}, "precision": {"compute": "float32"}}
    )  # fmt: skip
    with pytest.raises(InvalidLayout, match=reason):
        check_layout(config, world_size=4)


@pytest.mark.skipif(
    not TorchVersion("2.12") <= torch.__version__ < TorchVersion("2.15"), reason="this version of torch can do it"
)
@pytest.mark.parametrize(("recompute", "compile"), REFUSED.values())
def test_what_is_refused_fails(ranks4: Ranks, recompute: str, compile: Compile) -> None:
    """When this fails, torch has learnt it: take the refusal away."""
    case = shorten(Case(Layout(tp=4, recompute=recompute), kernels=Kernels(compile=compile)))
    assert all("DeviceMesh" in said for said in ranks4.run(find_failure, case, timeout_s=120))
