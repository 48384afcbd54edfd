"""Compiling in place: names stay, numbers stay, and torch.compile really gets what the plan says."""

import shutil
from dataclasses import replace

import pytest
import torch
from memory_ranks import make_scenario
from parity import BF16, SEQ_LEN, SHAPE, Case, compiling_with
from thorough import thorough
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from dtlayout.costmodel.fsdp2.sizes import Sizes
from dtlayout.models.description import BLOCKS
from dtlayout.models.families import find_weight
from dtlayout.models.llama import Llama
from dtlayout.plans.apply import compile_rest, prepare_blocks
from dtlayout.plans.init import initialize
from dtlayout.plans.plan import make_plan
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.kernels import Compile, Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import Precision
from dtlayout.spec.recompute import Recompute

MODEL = replace(SHAPE, num_layers=3)
TOKENS = torch.arange(32).view(2, 16)


def build(compile: Compile, recompute: str = "none") -> Llama:
    kernels = Kernels(compile=compile)
    model = Llama(MODEL, kernels, max_seq_len=16)
    initialize([model], MODEL, seed=0, device="cpu")
    plan = make_plan(MODEL, Layout(recompute=recompute), kernels, Precision())
    prepare_blocks(model, plan.blocks, plan.recompute, compiles=compile == "blocks")
    compile_rest(model, compile)
    return model


def train_step(model: nn.Module) -> dict[str, torch.Tensor]:
    loss = model(TOKENS, targets=TOKENS.roll(-1, 1))
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("compile", "graphs"), [("none", 0), ("loss", 1), ("model", 1), ("blocks", 2)])
def test_as_many_graphs_are_made_as_there_are_different_parts_and_none_breaks(compile, graphs):
    expected = train_step(build("none"))
    with compiling_with("aot_eager"):
        model = build(compile)
        found = train_step(model)
        again = train_step(model)
    assert list(found) == list(expected)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    torch.testing.assert_close(found["loss"], expected["loss"])
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient if name == "loss" else 2 * gradient)  # both steps add up
    assert again["loss"] == found["loss"]


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_is_compiled_with_its_block(recompute):
    expected = train_step(build("none"))
    with compiling_with("aot_eager"):
        found = train_step(build("blocks", recompute))
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"], "of blocks and of the loss"
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize(
    ("norm", "recompute"),
    [
        thorough(("eager", "none")),
        *(("fused", each) for each in ("none", "selective")),
        *(thorough(("fused", each)) for each in ("full", "keep-attention", "keep-matmuls")),
    ],
)
def test_a_compiled_block_keeps_what_the_cost_model_says(norm, recompute):
    check_kept(MODEL, norm, recompute)


@pytest.mark.parametrize("adapter", [Adapter(rank=2), Adapter(method="ia3")], ids=str)
@pytest.mark.parametrize("recompute", ["none", thorough("selective")])
def test_a_compiled_block_beside_an_adapter_keeps_what_the_cost_model_says(adapter, recompute):
    check_kept(replace(MODEL, adapter=adapter), "fused", recompute)


def check_kept(shape: ModelShape, norm: str, recompute: str) -> None:
    case = Case(Layout(micro_batch=2, recompute=recompute), 2, shape, BF16, Kernels(compile="blocks", norm=norm))
    model = Llama(shape, case.kernels, SEQ_LEN, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(find_weight(shape, name).trains)
    prepare_blocks(model, BLOCKS, Recompute.parse(recompute), compiles=True)
    saved: list[torch.Tensor] = []
    hidden = torch.zeros(2, SEQ_LEN, MODEL.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with compiling_with("aot_eager_decomp_partition"), saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model.model.layers["0"](hidden, model.model.rotary.cos, model.model.rotary.sin)
    known = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in saved if t.dtype is not torch.uint8}
    found = sum(storage.nbytes() for place, storage in storages.items() if place not in known)
    assert found == Sizes(make_scenario(case), case.layout, case.kernels).kept(Recompute.parse(recompute), 0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
def test_generated_code_computes_the_same():
    expected, found = train_step(build("none")), train_step(build("blocks"))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("compile", "row"), [("blocks", "model.layers.*"), ("loss", "(all)"), ("model", "(all)")])
def test_a_printed_plan_says_what_is_compiled(compile, row):
    lines = str(make_plan(MODEL, Layout(), Kernels(compile=compile), Precision())).splitlines()
    assert [line.split() for line in lines if "compiled" in line] == [[row, "compiled:", compile]]


@pytest.mark.parametrize("compile", ["blocks", "loss", "model"])
def test_options_of_the_plan_reach_torch_compile(monkeypatch, compile):
    seen = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: seen.append(options) or function)
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: seen.append(options))
    kernels = Kernels(compile=compile, compile_mode="max-autotune", compile_fullgraph=True)
    plan = make_plan(MODEL, Layout(), kernels, Precision())
    assert f"compiled: {compile}, max-autotune, whole" in str(plan)
    model = Llama(MODEL, kernels, max_seq_len=16)
    options = {"mode": plan.compile_mode, "fullgraph": plan.compile_fullgraph}
    prepare_blocks(model, BLOCKS, plan.recompute, compiles=compile == "blocks", compile_options=options)
    compile_rest(model, plan.compile, options)
    assert seen and all(each == {"mode": "max-autotune", "fullgraph": True} for each in seen)


def test_a_whole_graph_is_one_or_an_error():
    class Block(nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            return x + 1

    model = nn.Sequential(Block())
    prepare_blocks(model, "*", Recompute.parse("none"), compiles=True, compile_options={"fullgraph": True})
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(torch.zeros(2))
