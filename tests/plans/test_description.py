"""A description says what the modules do: which placements, which operations and FLOPs, and what they keep."""

from dataclasses import replace
from math import prod

import pytest
import torch
from memory_ranks import make_scenario
from parity import BF16, FP32, QWEN2, QWEN3, SEQ_LEN, SHAPE, Case
from rehearsal import rehearse
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtlayout.costmodel.fsdp2.sizes import Sizes
from dtlayout.dryrun.report import RankReport
from dtlayout.dryrun.world import fake_world
from dtlayout.mesh.axes import TP
from dtlayout.mesh.build import build_mesh
from dtlayout.models.families import describe
from dtlayout.models.kernel_calls import AttentionCall, Matmul, Pass
from dtlayout.models.llama import Llama
from dtlayout.models.operations import Linear, Norm, SelfAttention
from dtlayout.pipelining.schedule import Kind
from dtlayout.plans.apply import split_tensors
from dtlayout.plans.plan import tensor_styles
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.recompute import Recompute

MODELS = pytest.mark.parametrize("model", [SHAPE, QWEN2, QWEN3], ids=lambda model: model.family)


@MODELS
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tensor_parallelism_splits_what_the_description_says(model: ModelShape, sequence_parallel: bool) -> None:
    layout = Layout(tp=2, sequence_parallel=sequence_parallel)
    with fake_world(0, 2), torch.device("meta"):
        llama = Llama(model, Kernels(), SEQ_LEN)
        split_tensors(llama, tensor_styles(model, layout), build_mesh(layout, "cpu")[TP])
        for name, parameter in llama.named_parameters():
            weight = describe(model).find(name)
            if isinstance(parameter, DTensor):
                expected = Replicate() if weight.split is None else Shard(weight.split)
                assert parameter.placements == (expected,), name
                assert tuple(parameter.to_local().shape) == weight.local_shape(2)
            else:  # each rank has all of it and knows its whole gradient
                assert weight.split is None and not sequence_parallel, name


@MODELS
@pytest.mark.parametrize("tp", [1, 2])
def test_a_dry_run_does_the_operations_of_the_description(model: ModelShape, tp: int) -> None:
    case = Case(Layout(tp=tp, pp=2), model=model, precision=BF16, global_batch=2)
    report = rehearse(case, [0])[0]
    operations = describe(model).block
    matmuls = {f"model.layers.0.{o.module}": o for o in operations if isinstance(o, Linear)}
    assert matmuls.keys() == {
        module for module, what in forwards(report) if isinstance(what, Matmul) and ".layers.0." in module
    }
    for module, linear in matmuls.items():
        outputs, inputs = (
            size // (tp if linear.style == style else 1)
            for size, style in ((linear.outputs, "colwise"), (linear.inputs, "rowwise"))
        )
        assert forwards(report).count((module, Matmul(SEQ_LEN, outputs, inputs))) == 1
        assert report.flops[module] == 2 * 6 * SEQ_LEN * outputs * inputs  # two microbatches, backward twice forward
    (attention,) = (o for o in operations if isinstance(o, SelfAttention))
    flops = SEQ_LEN * attention.flops_per_token(SEQ_LEN) / tp
    assert forwards(report).count(("model.layers.0.self_attn", AttentionCall(int(flops)))) == 1
    for norm in (o for o in operations if isinstance(o, Norm)):
        assert any(m == f"model.layers.0.{norm.module}" and isinstance(w, Pass) for m, w in forwards(report))


def forwards(report: RankReport) -> list[tuple[str, object]]:
    """Module and operation of the first microbatch's forward, each as often as it was done."""
    return [
        (done.place.module, done.what)
        for done in report.done if done.place.action
        and done.place.action.kind is Kind.FORWARD and done.place.action.microbatch == 0
        for _ in range(done.count)
    ]  # fmt: skip


@MODELS
@pytest.mark.parametrize("precision", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kernels", [Kernels(), Kernels(norm="eager"), Kernels(attention="sdpa-math")], ids=str)
def test_a_block_keeps_what_the_description_says(model: ModelShape, precision, kernels: Kernels) -> None:
    case = Case(Layout(micro_batch=2), 2, model, precision, kernels)
    dtype = getattr(torch, precision.compute)
    llama = Llama(replace(model, num_layers=1), kernels, SEQ_LEN, dtype=dtype)
    saved: list[torch.Tensor] = []
    hidden = torch.zeros(2, SEQ_LEN, model.hidden_size, dtype=dtype, requires_grad=True)
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        llama.model.layers["0"](hidden, llama.model.rotary.cos, llama.model.rotary.sin)
    known = {t.untyped_storage().data_ptr() for t in [*llama.parameters(), *llama.buffers()]}
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    found = sum(nbytes for place, nbytes in kept.items() if place not in known)
    expected = Sizes(make_scenario(case), case.layout, kernels).kept(Recompute.parse("none"), 0)
    assert found == pytest.approx(expected, rel=0.01)


@MODELS
def test_a_weight_without_a_split_is_as_large_on_every_rank(model: ModelShape) -> None:
    for weight in describe(model).block_weights:
        assert prod(weight.local_shape(2)) == weight.numel // (1 if weight.split is None else 2)
