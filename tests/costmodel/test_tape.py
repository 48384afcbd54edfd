"""A tape says what modules save, module by module; and walking it backwards follows the rules of autograd."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from memory_ranks import make_scenario
from parity import BF16, FP32, QWEN2, QWEN3, SEQ_LEN, SHAPE, Case
from small import scenario as round_scenario
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from dtlayout.costmodel.compute import block_time
from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.engine_features import Features
from dtlayout.costmodel.fsdp2.liveness import BackwardWalk
from dtlayout.costmodel.fsdp2.phase import MemoryKind, changes
from dtlayout.costmodel.fsdp2.sizes import Sizes
from dtlayout.costmodel.fsdp2.tape import SizedEntry
from dtlayout.costmodel.memory import block_bytes_per_token
from dtlayout.costmodel.scenario import format_sizes
from dtlayout.models import families
from dtlayout.models.description import describe_llama
from dtlayout.models.families import find_weight
from dtlayout.models.llama import Block, Llama
from dtlayout.models.tape import HIDDEN, BlockTensor, TapeEntry
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import Precision

A, G = MemoryKind.ACTIVATIONS, MemoryKind.GRADIENTS
FSDP2 = Features(sharding="fsdp2", checkpointing="torch")


def trace(block: Block, *inputs: torch.Tensor) -> Counter[str]:
    """Bytes that each module of a block is the first to save in its forward, parameters and tables left out."""
    running, saved = [""], Counter[str]()
    known = {t.untyped_storage().data_ptr() for t in [*block.parameters(), *inputs[1:]]}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            alive.append(tensor)  # so that no later one has its address
            saved[running[-1]] += storage.nbytes()
        return tensor

    def enter(name: str):
        return lambda *_: running.append(name)

    alive: list[torch.Tensor] = []
    for name, module in block.named_modules():
        module.register_forward_pre_hook(enter(name))
        module.register_forward_hook(lambda *_: running.pop() and None)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        block(*inputs)
    return saved


def module_of(entry: SizedEntry) -> str:
    """Module that does a step: the one that has its weights; attention and the activation are their parents' own."""
    if entry.weights:
        return entry.weights[0].rpartition(".")[0]
    return {"attention": "self_attn", "activation": "mlp"}.get(entry.kind, "")


@pytest.mark.parametrize("model", [SHAPE, QWEN2, QWEN3], ids=lambda model: model.family)
@pytest.mark.parametrize("precision", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kernels", [Kernels(), Kernels(norm="eager"), Kernels(attention="sdpa-math")], ids=str)
def test_each_module_saves_what_its_steps_on_the_tape_say(model, precision, kernels):
    case, dtype = Case(Layout(micro_batch=2), 2, model, precision, kernels), getattr(torch, precision.compute)
    llama = Llama(replace(model, num_layers=1), kernels, SEQ_LEN, dtype=dtype)
    hidden = torch.zeros(2, SEQ_LEN, model.hidden_size, dtype=dtype, requires_grad=True)
    rotary, block = llama.model.rotary, llama.model.layers["0"]
    found = trace(block, hidden, rotary.cos, rotary.sin)
    expected, owner = Counter[str](), ""
    for entry in Sizes(make_scenario(case), case.layout, kernels).tape:
        owner = owner if entry.kind == "scale" else module_of(entry)  # a scale is the end of the norm before it
        expected[owner] += entry.saved
    found["self_attn"] += found.pop("self_attn.o_proj", 0)  # attention's result, where its kernel does not save it
    assert {name for name, size in expected.items() if size} == set(found)
    for name, size in found.items():
        assert size == pytest.approx(expected[name], rel=0.01), name


ADAPTERS = [
    Adapter(rank=2), Adapter(method="ia3"), Adapter(rank=2, targets=("o_proj", "up_proj")),
    Adapter(method="ia3", targets=("q_proj", "o_proj", "gate_proj")),
]  # fmt: skip


@pytest.mark.parametrize("ends_gradients", [False, True])
@pytest.mark.parametrize("model", [replace(m, adapter=a) for m in (SHAPE, QWEN3) for a in ADAPTERS], ids=str)
def test_a_frozen_block_saves_what_its_tape_says_also_where_its_input_needs_no_gradient(model, ends_gradients):
    for norm in ("fused", "eager"):
        case = Case(Layout(micro_batch=2), 2, model, BF16, Kernels(norm=norm))
        llama = Llama(replace(model, num_layers=1), case.kernels, SEQ_LEN, dtype=torch.bfloat16)
        for name, parameter in llama.named_parameters():
            parameter.requires_grad_(find_weight(model, name).trains)
        hidden = torch.zeros(2, SEQ_LEN, model.hidden_size, dtype=torch.bfloat16, requires_grad=not ends_gradients)
        rotary, block = llama.model.rotary, llama.model.layers["0"]
        found = trace(block, hidden, rotary.cos, rotary.sin)
        sizes = Sizes(make_scenario(case), case.layout, case.kernels, ends_gradients=ends_gradients)
        assert sum(found.values()) == pytest.approx(sizes.block, rel=0.01)


@pytest.mark.parametrize("adapter", [None, *ADAPTERS], ids=str)
def test_all_that_comes_in_a_backward_goes_in_it(adapter):
    """The gradient of the block's input is in the place of that of its output; without one, the latter goes too."""
    model = replace(SHAPE, adapter=adapter)
    for layout in (Layout(micro_batch=2), Layout(tp=2), Layout(tp=2, sequence_parallel=False)):
        for ends in (False, True):
            sizes = Sizes(make_scenario(Case(layout, 2, model, BF16)), layout, Kernels(), ends_gradients=ends)
            whole, split = BackwardWalk().over(sizes.tape, nothing), BackwardWalk(puts_off=True)
            parts = [*split.over(sizes.tape, nothing), *split.finish(sizes.tape, nothing)]
            left = -sizes.block - sizes.stream * ends
            assert [sum(size for _, size in steps) for steps in (whole, parts)] == [left] * 2


@pytest.mark.parametrize("model", [SHAPE, QWEN3], ids=lambda model: model.family)
def test_the_modules_of_a_tape_are_those_of_the_block(model):
    modules = {name for name, _ in Llama(model, Kernels(), SEQ_LEN).model.layers["0"].named_modules()}
    tape = Sizes(make_scenario(Case(Layout(), 1, model, BF16, Kernels())), Layout(), Kernels()).tape
    assert {module_of(entry) for entry in tape} - {""} <= modules
    assert [entry.kind for entry in tape].count("matmul") == sum(
        isinstance(module, nn.Linear) for module in Llama(model, Kernels(), SEQ_LEN).model.layers["0"].modules()
    )


def nothing(names):
    return []


def step(kind="matmul", *, reads=None, makes=None, saves=None, **more) -> SizedEntry:
    """A step of a tape by hand; it makes a tensor of the size that it reads."""
    reads, makes = reads or {"x": 10.0}, makes or {"y": 10.0}
    known = {"saves_again": (), "weights": (), "forward_work": 0.0, "work": sum(reads.values()), "kept_as": None}
    known |= {"results": (), "adds_apart": False, "puts_off": kind == "matmul", "ends_first": kind == "norm", **more}
    return SizedEntry(kind=kind, reads=reads, makes=makes, saves=saves or {}, **known)


def come(names):
    return [(G, 100.0) for _ in names]


@pytest.mark.parametrize(("adds_apart", "most"), [(False, 10 + 10), (True, 10 + 10 + 10)])
def test_two_gradients_of_one_tensor_become_one_in_place_or_in_a_third(adds_apart, most):
    tape = [step(makes={name: 1.0}, adds_apart=adds_apart) for name in "ab"]
    phase = changes(*BackwardWalk().over(tape, come))
    num_gone = 2 if adds_apart else 1  # gradients of a and b that are there no more
    assert (phase.fullest[A], phase.left[A]) == (most - num_gone, 10 - 2)


def test_a_residual_shares_its_gradient_until_another_is_added_to_it():
    """The gradient of the stream is there before, and the norm's is added to it."""
    norm = step("norm", reads={HIDDEN: 10.0}, saves={"input": 10.0}, makes={"n": 10.0})
    opening = step(reads={"n": 10.0}, makes={"y": 40.0})
    closing = step(reads={"y": 40.0}, makes={"branch": 10.0}, saves={"y": 40.0})
    residual = step("residual", reads={HIDDEN: 10.0, "branch": 10.0}, makes={HIDDEN: 10.0}, shares_gradient=True)
    phase = changes(*BackwardWalk().over([norm, opening, closing, residual], come))
    assert (phase.fullest[A], phase.left[A]) == (40, -10 - 40)


def test_gradients_of_weights_come_beside_what_a_matmul_reads_but_after_what_a_norm_lets_go():
    for kind, beside in (("matmul", 10), ("norm", -10)):
        phase = changes(*BackwardWalk().over([step(kind, saves={"x": 10.0}, weights=("w",))], come))
        assert phase.fullest[:2] == (0, 100) and phase.fullest[A] == beside
        assert (phase.left[G], phase.left[A]) == (100, 10 - 10 - 10)


def test_a_matmul_whose_gradients_are_put_off_holds_what_they_are_made_of():
    """Its own input, one that attention saved too, and the gradient of its output."""
    attention = step("attention", saves={"attended": 10.0, "rest": 30.0}, makes={"attended": 10.0})
    matmul = step(reads={"attended": 10.0}, makes={"branch": 20.0}, saves_again=("attended",), weights=("w",))
    tape = [attention, matmul]
    walk = BackwardWalk(puts_off=True)
    held = changes(*walk.over(tape, nothing))
    assert held.left[A] == 10 - 30  # of its input's gradient, and what attention had beside its result
    assert changes(*walk.finish(tape, come)).left[A] == -10 - 20


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        (Layout(), ["norm", "matmul", "matmul", "matmul"]),
        (Layout(tp=2), ["norm", "gather", "matmul", "matmul"]),
    ],
    ids=["tp 1", "tp 2"],
)
def test_tp_gathers_once_what_several_matmuls_read(layout, kinds):
    setting = round_scenario(features=FSDP2)
    tape = Sizes(setting, layout, Kernels()).tape
    assert [entry.kind for entry in tape][:4] == kinds
    num_collectives = Counter(entry.kind for entry in tape)
    assert num_collectives["gather"] == num_collectives["sum"] == (2 if layout.tp > 1 else 0)


@pytest.mark.parametrize(("engine", "held"), [("torchtitan", 2.0), ("automodel", 2.0), ("megatron", 1.0)])
def test_transformer_engine_keeps_what_it_cast_and_torchao_what_was_there_before(engine, held):
    setting = replace(
        round_scenario(), engine=find_engine(engine, "h100-80g-sxm"), precision=Precision(matmuls="fp8-tensorwise")
    )
    assert format_sizes(setting).cast == held
    bf16 = replace(setting, precision=Precision())
    less = [block_bytes_per_token(each, Layout(), Kernels()).whole for each in (bf16, setting)]
    inputs = 1000 + 1000 + 1000 + 2000  # of q, of o, which attention has anyway, of gate, and of down
    assert less[0] - less[1] == (2 - held) * (inputs - 1000)


@dataclass(frozen=True)
class Twist:
    """An operation that no part of the cost model knows: it reads and writes the stream, and saves it exactly."""

    width: int
    weights = ()
    kept_as = None
    active_share = 1.0
    kind = "rope"

    def record(self, options):
        hidden = BlockTensor("twisted", self.width, "stream")
        return (TapeEntry(self.kind, (hidden,), (hidden,), (hidden._replace(format="exact"),), scratch=()),)


def test_an_operation_that_says_what_it_does_is_predicted_without_a_line_elsewhere(monkeypatch):
    """The residual stream once more in fp32, and RoPE's traffic over all of its width."""

    def describe(model):
        llama = describe_llama(model)
        return replace(llama, block=(*llama.block[:-1], Twist(model.hidden_size), llama.block[-1]))

    monkeypatch.setitem(families.FAMILIES, "twisted", families.Family(name="twisted", describe=describe))
    plain = round_scenario(features=FSDP2)
    twisted = replace(plain, model=replace(plain.model, family="twisted"))
    sizes = [Sizes(each, Layout(), Kernels()).block for each in (plain, twisted)]
    assert sizes[1] - sizes[0] == 4 * 1000 * 1000
    times = [block_time(each, Layout(), Kernels()).elementwise_s for each in (plain, twisted)]
    monkeypatch.setattr(Twist, "kind", "twist")
    with pytest.raises(KeyError, match="twist"):
        block_time(replace(twisted, model=replace(twisted.model, name="unpriced")), Layout(), Kernels())
    assert times[1] - times[0] == pytest.approx(20 * 1000 * 1000 / 1e12 / 3)
