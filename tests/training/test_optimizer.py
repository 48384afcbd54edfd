"""The optimizer over the stages of a rank, and the learning rate of each step."""

from dataclasses import asdict, dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode

from dtlayout.base.errors import InvalidConfig
from dtlayout.measure.memory import StorageTracker
from dtlayout.measure.work import WorkCounter
from dtlayout.models.description import describe_llama
from dtlayout.models.families import FAMILIES, Family
from dtlayout.models.kernel_calls import Matmul
from dtlayout.models.presets import find_preset
from dtlayout.spec.newton_schulz import iteration_flops
from dtlayout.spec.optimizers import SGD, AdamW, Muon, RoleOptimizer
from dtlayout.training.coarse_state import _takes_all_formats
from dtlayout.training.muon import orthogonalize
from dtlayout.training.optimizer import LearningRate, build_optimizer, set_learning_rate

ADAMW = AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


MODEL = find_preset("debug")


class Stage(nn.Module):
    """One block, of which it has a matrix and a norm."""

    def __init__(self, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        block = nn.ModuleDict({"mlp": nn.ModuleDict({"up_proj": nn.Linear(3, 4, bias=False)})})
        block["input_layernorm"] = nn.RMSNorm(3)
        self.model = nn.ModuleDict({"layers": nn.ModuleDict({"0": block})})
        self.matrix_of(block).data = torch.randn(4, 3, generator=generator)

    @staticmethod
    def matrix_of(block):
        return block["mlp"]["up_proj"].weight

    @property
    def matrix(self):
        return self.matrix_of(self.model["layers"]["0"])

    @property
    def norm(self):
        return self.model["layers"]["0"]["input_layernorm"].weight


@given(
    num_steps=st.integers(1, 60),
    warmup_steps=st.integers(0, 20),
    peak=st.floats(1e-6, 1.0),
    min_ratio=st.floats(0, 1),
)
def test_the_learning_rate_rises_to_its_peak_and_falls_to_its_floor(num_steps, warmup_steps, peak, min_ratio):
    rate = LearningRate(lr=peak, min_lr_ratio=min_ratio, warmup_steps=warmup_steps, decay_steps=num_steps)
    rates = [rate.at(step) for step in range(num_steps)]
    rise, fall = rates[:warmup_steps], rates[warmup_steps:]
    assert rise == sorted(rise) and all(0 < rate <= peak * (1 + 1e-12) for rate in rise)
    assert fall == sorted(fall, reverse=True)
    assert all(min_ratio * peak * (1 - 1e-9) <= rate <= peak for rate in fall)
    if fall:
        assert fall[0] == pytest.approx(peak)
    if len(fall) > 1:
        assert fall[-1] == pytest.approx(min_ratio * peak)


def test_the_learning_rate_stays_at_its_floor_after_the_last_step():
    assert LearningRate(lr=1.0, min_lr_ratio=0.25, warmup_steps=0, decay_steps=5).at(9) == 0.25


def test_a_run_that_goes_on_for_longer_keeps_its_learning_rate_and_says_what_another_length_would_make_of_it():
    settings = AdamW(lr=1.0, min_lr_ratio=0.1)
    first = LearningRate.of(settings, 100, {})
    saved = asdict(first)
    longer = LearningRate.of(settings, 200, saved)
    assert longer == first and longer.at(100) == longer.at(199) == 0.1
    assert longer.describe_resume(saved, 100, 200) == [
        "the learning rate falls over 100 steps, as when this run began, to 1.00e-01: that of step 101 is 1.00e-01; "
        "with optimizer.decay_steps=200 it would be 5.46e-01"
    ]
    assert longer.describe_resume(saved, 50, 100) == longer.describe_resume(saved, 200, 200) == []


def test_a_learning_rate_that_the_config_changes_counts_and_is_said_beside_the_one_that_was_saved():
    saved = asdict(LearningRate.of(AdamW(lr=1.0, min_lr_ratio=0.1), 100, {}))
    asked = LearningRate.of(AdamW(lr=2.0, min_lr_ratio=0.1, decay_steps=200), 200, saved)
    assert (asked.lr, asked.decay_steps) == (2.0, 200)
    assert asked.describe_resume(saved, 100, 200) == [
        "optimizer.lr was 1.0 and is 2.0, optimizer.decay_steps was 100 and is 200: the learning rate of step 101 is "
        "1.09e+00, and was going to be 1.00e-01"
    ]


def test_a_checkpoint_that_says_nothing_of_the_learning_rate_changes_nothing():
    rate = LearningRate.of(AdamW(), 100, {})
    assert (rate.decay_steps, rate.describe_resume({}, 50, 100)) == (100, [])


def test_every_parameter_of_every_stage_is_updated_once_and_only_matrices_decay():
    stages = [Stage(1), Stage(2)]
    optimizer = build_optimizer(stages, MODEL, ADAMW)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {
        **{id(stage.matrix): ADAMW.weight_decay for stage in stages},
        **{id(stage.norm): 0.0 for stage in stages},
    }
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


def check_later_update(settings):
    """A later update of a matrix moves and keeps what its optimizer says; the matrix's state then."""
    stage = nn.ModuleDict({"lm_head": nn.Linear(64, 64, bias=False)})
    optimizer = build_optimizer([stage], MODEL, settings)
    (parameter,) = stage.parameters()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    counter = WorkCounter(lambda: None)
    with StorageTracker([stage], [optimizer], observers=[counter.observe]) as tracker:
        optimizer.step()
    moved = sum(what.moved_bytes * count for (_, what), count in counter.counts.items())
    assert moved == pytest.approx(parameter.numel() * settings.update_bytes, rel=1e-3)
    assert tracker.current.optimizer == parameter.numel() * settings.state_bytes(4) + settings.step_bytes
    return optimizer.state[parameter]


SETTINGS = [AdamW(), SGD(), SGD(momentum=0.0), SGD(weight_decay=0.1)]


@pytest.mark.parametrize("settings", SETTINGS, ids=["adamw", "sgd", "no momentum", "sgd that decays"])
def test_a_later_update_keeps_and_moves_what_is_said_of_it(settings):
    assert {name for name in check_later_update(settings) if name != "step"} == set(settings.state)


COARSE = [AdamW(state_format="bfloat16", weight_decay=0.2), SGD(state_format="bfloat16")]


@pytest.mark.parametrize("settings", COARSE, ids=["adamw", "sgd"])
def test_a_gpus_update_keeps_and_moves_what_is_said_of_state_in_bf16(settings):
    """A dry run's tensors stand for a GPU's, on which one kernel takes both formats."""
    with FakeTensorMode():
        check_later_update(settings)


def test_moments_in_bf16_are_rounded_once_a_step_whatever_chunks_they_are_converted_in(monkeypatch):
    monkeypatch.setattr("dtlayout.training.coarse_state._CHUNK", 7)
    settings, generator = AdamW(state_format="bfloat16", weight_decay=0.2), torch.Generator().manual_seed(1)
    stage, other = (nn.ModuleDict({"lm_head": nn.Linear(6, 5, bias=False)}).double() for _ in range(2))
    other.load_state_dict(stage.state_dict())
    optimizer = build_optimizer([stage], MODEL, settings)
    usual = build_optimizer([other], MODEL, AdamW(weight_decay=0.2))
    (parameter,), (expected,) = stage.parameters(), other.parameters()
    for each in (optimizer, usual):
        set_learning_rate(each, 0.1)
    for _ in range(4):
        parameter.grad = torch.randn(5, 6, generator=generator, dtype=torch.float64)
        expected.grad = parameter.grad.clone()
        optimizer.step()
        usual.step()
        for kind in settings.state:
            kept = usual.state[expected][kind]
            kept.copy_(kept.bfloat16())
            assert torch.equal(optimizer.state[parameter][kind], kept.bfloat16())
    assert torch.allclose(parameter, expected, rtol=1e-12, atol=0)
    assert optimizer.state[parameter]["step"] == 4


class Square(nn.Module):
    """A block's matrix with as many elements as its momentum."""

    def __init__(self, size):
        super().__init__()
        block = nn.ModuleDict({"mlp": nn.ModuleDict({"up_proj": nn.Linear(size, size, bias=False)})})
        self.model = nn.ModuleDict({"layers": nn.ModuleDict({"0": block})})


def test_an_update_by_muon_keeps_moves_and_multiplies_what_is_said_of_it():
    """Beside its elementwise passes it copies a matrix into the batch and back, normalizes it, and iterates."""
    stage, settings, size = Square(96), Muon(), 96
    optimizer = build_optimizer([stage], MODEL, settings)
    (parameter,) = stage.parameters()
    for _ in range(2):
        parameter.grad = torch.randn_like(parameter)
        counter = WorkCounter(lambda: None)
        with StorageTracker([stage], [optimizer], observers=[counter.observe]) as tracker:
            optimizer.step()
    matmuls = {what: count for (_, what), count in counter.counts.items() if isinstance(what, Matmul)}
    assert sum(2 * w.m * w.n * w.k * w.batch * n for w, n in matmuls.items()) == iteration_flops((size, size), 5)
    moved = sum(w.moved_bytes * n for (_, w), n in counter.counts.items() if not isinstance(w, Matmul))
    beside = 2 * (2 * 2 + 3)  # bf16: copies read and write, the norm reads, and scaling reads and writes
    assert moved == pytest.approx(size * size * (settings.update_bytes + beside), rel=2e-3)
    assert tracker.current.optimizer == size * size * settings.state_bytes(4)
    assert set(optimizer.state[parameter]) == set(settings.state)


def test_muon_takes_no_gradient_for_a_gradient_of_zero_and_refuses_a_vector_in_a_line():
    stages = Square(8), Square(8)
    for stage in stages:
        nn.init.ones_(next(stage.parameters()))
    first, second = (build_optimizer([stage], MODEL, Muon(nesterov=True)) for stage in stages)
    for optimizer in (first, second):
        set_learning_rate(optimizer, 0.1)
    for with_gradient in (True, False):
        weights = [next(stage.parameters()) for stage in stages]
        weights[0].grad = torch.eye(8) if with_gradient else None
        weights[1].grad = torch.eye(8) if with_gradient else torch.zeros(8, 8)
        first.step()
        second.step()
    assert torch.equal(*weights) and not torch.equal(weights[0], torch.ones(8, 8))

    class OfNorms(Muon):
        """Muon that says that it takes vectors."""

        roles = frozenset({"vector"})

    with pytest.raises(
        InvalidConfig, match=r"^optimizer.name=muon: .*:ShardedMuon refuses .* a parameter of shape \(3,\)"
    ):
        build_optimizer([Stage(1)], MODEL, OfNorms())


def test_singular_values_come_near_one_and_a_matrix_of_zeros_stays_zero():
    batch = torch.randn(3, 20, 50, dtype=torch.float64)
    batch[1] = 0
    done = orthogonalize([batch.clone()], steps=5, eps=1e-7)
    values = torch.linalg.svdvals(done)
    assert torch.equal(done[1], batch[1]) and values[0].min() > 0.5 and values.max() < 1.3
    left, _, right = torch.linalg.svd(batch[0], full_matrices=False)
    cosine = (done[0] * (left @ right)).sum() / done[0].norm() / (left @ right).norm()
    assert cosine > 0.95


def test_a_stage_without_matrices_or_without_vectors_has_one_group():
    head, norm = nn.ModuleDict({"lm_head": nn.Linear(3, 4, bias=False)}), nn.ModuleDict({"norm": nn.RMSNorm(3)})
    for stage in (head, nn.ModuleDict({"model": norm})):
        assert len(build_optimizer([stage], MODEL, ADAMW).param_groups) == 1


class FixedTable(AdamW):
    """Embeddings do not decay."""

    decayed_roles = AdamW.decayed_roles - {"embedding"}


@pytest.mark.parametrize("tied", [False, True])
def test_a_weight_decays_only_where_the_optimizer_says_so_of_its_role(tied):
    model = replace(MODEL, tied_embeddings=tied)
    first, last = make_ends()
    groups = build_optimizer([first, last], model, FixedTable()).param_groups
    decays = {p: g["weight_decay"] for g in groups for p in g["params"]}
    assert decays[first["model"]["embed_tokens"].weight] == 0.0
    assert decays[last["lm_head"].weight] == (0.0 if tied else FixedTable().weight_decay)


def make_ends():
    first = nn.ModuleDict({"model": nn.ModuleDict({"embed_tokens": nn.Embedding(4, 3)})})
    return first, nn.ModuleDict({"lm_head": nn.Linear(3, 4, bias=False)})


def describe_fixed_table(model):
    description = describe_llama(model)
    return replace(description, embedding=replace(description.embedding, trains=False))


@pytest.mark.parametrize("tied", [False, True])
def test_a_frozen_weight_is_in_no_group_and_a_stage_of_frozen_ones_alone_steps_over_nothing(monkeypatch, tied):
    monkeypatch.setitem(FAMILIES, "fixed-table", Family(name="fixed-table", describe=describe_fixed_table))
    first, last = make_ends()
    model = replace(MODEL, family="fixed-table", tied_embeddings=tied)
    both, alone = build_optimizer([first, last], model, ADAMW), build_optimizer([first], model, ADAMW)
    assert [p for group in both.param_groups for p in group["params"]] == ([] if tied else [last["lm_head"].weight])
    assert [p for group in alone.param_groups for p in group["params"]] == []
    set_learning_rate(alone, 1.0)
    alone.step()
    assert not alone.state


@dataclass(frozen=True, kw_only=True)
class MatricesBySgd(RoleOptimizer, SGD):
    """SGD with momentum for matrices, AdamW for the rest."""

    name: str = "matrices-by-sgd"

    roles = frozenset({"matrix"})


def test_two_optimizers_share_a_stage_by_role_and_the_learning_rate_by_their_own():
    settings = MatricesBySgd(lr=0.5, momentum=0.5, rest=AdamW(lr=0.125, eps=1e-8))
    stage = Stage(1)
    optimizer = build_optimizer([stage], MODEL, settings)
    set_learning_rate(optimizer, 0.25)
    assert [(len(g["params"]), g["lr"]) for g in optimizer.param_groups] == [(1, 0.25), (1, 0.0625)]
    matrix, norm = stage.matrix.detach().clone(), stage.norm.detach().clone()
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.testing.assert_close(stage.matrix.detach(), matrix - 0.25)
    torch.testing.assert_close(stage.norm.detach(), norm - 0.0625)
    kept = [{kind for kind in optimizer.state[p] if kind != "step"} for p in (stage.matrix, stage.norm)]
    assert kept == [set(settings.state_of("matrix")), set(settings.state_of("vector"))]
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in stage.parameters())


def test_the_flag_that_leaves_out_an_update_reaches_every_optimizer_or_is_not_claimed():
    class Both(MatricesBySgd):
        """AdamW twice."""

        torch_class, torch_arguments = AdamW.torch_class, AdamW().torch_arguments

    assert not build_optimizer([Stage(1)], MODEL, MatricesBySgd())._step_supports_amp_scaling
    optimizer = build_optimizer([stage := Stage(1)], MODEL, Both())
    assert optimizer._step_supports_amp_scaling
    set_learning_rate(optimizer, 0.25)
    before = [parameter.detach().clone() for parameter in stage.parameters()]
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert all(map(torch.equal, before, stage.parameters()))
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert not any(map(torch.equal, before, stage.parameters()))


def test_a_step_is_adamw_by_the_book_at_the_rate_that_was_set_last():
    stage, rates = Stage(3), [0.1, 0.01]
    optimizer = build_optimizer([stage], MODEL, ADAMW)
    parameter, decay = stage.matrix.detach().double().clone(), ADAMW.weight_decay
    first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
    for step, rate in enumerate(rates, start=1):
        gradient = parameter * 0.5 + 1
        stage.matrix.grad, stage.norm.grad = gradient.float(), torch.zeros(3)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        update = (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        parameter = parameter * (1 - rate * decay) - rate * update
    torch.testing.assert_close(stage.matrix.detach().double(), parameter, rtol=1e-5, atol=1e-6)
    assert torch.equal(stage.norm, torch.ones(3))


def test_on_cuda_the_fused_update_takes_moments_of_other_formats_beside_fp32_alone(cuda):
    assert _takes_all_formats(torch.zeros(2)) and not _takes_all_formats(torch.zeros(2, dtype=torch.bfloat16))
    assert not _takes_all_formats(cuda.on_host(torch.zeros(2)))
