"""Initial weights: normal, and a function of (seed, name, position) whoever computes which part of them."""

import math
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dtlayout.dryrun.world import fake_world
from dtlayout.measure.memory import StorageTracker
from dtlayout.models.llama import Llama
from dtlayout.models.presets import find_preset
from dtlayout.plans import init
from dtlayout.plans.init import INIT_STD, fill_normal, initialize
from dtlayout.spec.kernels import Kernels

NUM = 200_000


def normal(shape: tuple[int, ...], seed: int = 0, name: str = "w", std: float = 1.0) -> torch.Tensor:
    tensor = torch.full(shape, math.nan, dtype=torch.float64)
    fill_normal(tensor, std, seed, name)
    return tensor


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])


@pytest.mark.parametrize("seed", [0, 1, -5, 2**40])
def test_deviates_have_the_moments_and_the_quantiles_of_a_normal_distribution(seed):
    values = normal((200, NUM // 200), seed).flatten()
    assert abs(values.mean()) < 5 / math.sqrt(NUM)
    assert abs(values.std() - 1) < 5 / math.sqrt(2 * NUM)
    expected = torch.special.ndtr(values.sort().values)
    empirical = (torch.arange(NUM, dtype=torch.float64) + 0.5) / NUM
    assert (expected - empirical).abs().max() < 1.95 / math.sqrt(NUM)  # Kolmogorov and Smirnov, p = 0.001


def test_std_scales_the_same_deviates():
    assert torch.equal(normal((4, 5), std=0.02), 0.02 * normal((4, 5)))


def test_no_deviate_is_infinite_even_at_the_ends_of_the_uniform(monkeypatch):
    for bits in (0, -1):  # every bit off, every bit on
        monkeypatch.setattr(init, "_mix", lambda z, bits=bits: torch.full_like(z, bits))
        values = normal((1, 1))
        assert values.isfinite().all()
        assert 8 < values.abs() < 9  # 2^-53 of the distribution lies beyond


def test_the_mixer_is_splitmix64():
    """First outputs for seed 0 of the reference implementation (prng.di.unimi.it/splitmix64.c)."""
    gamma = -0x61C8864680B583EB
    states = torch.tensor([1, 2, 3]) * gamma
    got = [value % 2**64 for value in init._mix(states).tolist()]
    assert got == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("other", [{"seed": 1}, {"name": "v"}, {"seed": 1, "name": "v"}])
def test_another_seed_or_name_gives_unrelated_deviates(other):
    assert torch.equal(normal((100, 100)), normal((100, 100)))
    assert abs(correlation(normal((400, 500)), normal((400, 500), **other))) < 5 / math.sqrt(NUM)


def test_neighbours_in_a_tensor_are_unrelated():
    values = normal((400, 500))
    assert abs(correlation(values[:, 1:], values[:, :-1])) < 5 / math.sqrt(NUM)
    assert abs(correlation(values[1:], values[:-1])) < 5 / math.sqrt(NUM)


@pytest.mark.parametrize("chunk", [1, 6, 7, 13, 10_000])
@pytest.mark.parametrize("shape", [(9, 7), (1, 30), (30, 1), (30,)])
def test_the_size_of_the_chunks_changes_nothing(monkeypatch, shape, chunk):
    whole = normal(shape)
    monkeypatch.setattr(init, "CHUNK", chunk)
    assert torch.equal(normal(shape), whole)


@pytest.mark.parametrize("placements", [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0))])
@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (3, 9), (1, 4)])
def test_shards_that_fill_themselves_make_the_whole(shape, placements):
    whole = normal(shape)
    covered = torch.zeros(shape)
    for rank in range(4):
        with fake_world(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            expected = DTensor.from_local(whole.clone(), mesh, run_check=False).redistribute(placements=placements)
            index = torch.arange(whole.numel()).view(shape)
            places = DTensor.from_local(index, mesh, run_check=False).redistribute(placements=placements).to_local()
            shard = DTensor.from_local(
                torch.full_like(expected.to_local(), math.nan), mesh, placements, run_check=False,
                shape=whole.shape, stride=whole.stride(),
            )  # fmt: skip
            fill_normal(shard, 1.0, 0, "w")
            assert torch.equal(shard.to_local(), whole.flatten()[places])
            covered.view(-1)[places.flatten()] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_formats_get_the_same_deviates_rounded(dtype):
    tensor = torch.empty(20, 30, dtype=dtype)
    fill_normal(tensor, 1.0, 0, "w")
    assert torch.equal(tensor, normal((20, 30)).to(dtype))


def build(name: str, **part) -> Llama:
    with torch.device("meta"):
        return Llama(find_preset(name), Kernels(), 8, **part)


def test_initialize_gives_every_kind_of_weight_its_scale():
    shape, model = find_preset("debug"), build("debug")
    initialize([model], shape, seed=3, device="cpu")
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = INIT_STD / math.sqrt(2 * shape.num_layers) if residual else INIT_STD
        assert abs(parameter.std() / std - 1) < 5 / math.sqrt(2 * parameter.numel()), name
    expected = Llama(shape, Kernels(), 8).model.rotary
    assert torch.equal(model.model.rotary.cos, expected.cos)
    assert torch.equal(model.model.rotary.sin, expected.sin)


def test_a_stage_gets_the_weights_that_the_whole_model_has():
    shape, whole = find_preset("debug"), build("debug")
    stages = [build("debug", layers=[0, 1], head=False), build("debug", layers=[2, 3], embedding=False)]
    initialize([whole], shape, seed=3, device="cpu")
    initialize(stages, shape, seed=3, device="cpu")
    parts = {name: p for stage in stages for name, p in stage.named_parameters()}
    assert parts.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(parts[name], p) for name, p in whole.named_parameters())


def test_the_head_of_a_tied_model_gets_the_embedding_wherever_it_lies():
    shape = replace(find_preset("debug"), tied_embeddings=True)
    with torch.device("meta"):
        first = Llama(shape, Kernels(), 8, layers=[0], head=False)
        last = Llama(shape, Kernels(), 8, layers=[1], embedding=False)
    initialize([first, last], shape, seed=3, device="cpu")
    assert torch.equal(first.model.embed_tokens.weight, last.lm_head.weight)


def test_filling_a_tensor_takes_a_chunk_of_memory_more_than_the_tensor():
    tensor = torch.empty(5 * init.CHUNK // 1000, 1000)
    tracker = StorageTracker()
    with tracker, torch.no_grad():
        init.fill_normal(tensor, 1.0, seed=0, name="w")
    extra_bytes = tracker.ledger.peak_bytes - tensor.untyped_storage().nbytes()
    assert extra_bytes < 8 * 8 * init.CHUNK
