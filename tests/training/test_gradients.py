"""The gradient norm over every axis, and clipping by it, against torch on whole tensors."""

import pytest
import torch
from torch import nn
from training_ranks import PLACEMENTS, make_gradients, norm_and_clipped, norm_over_two_meshes

from dtlayout.mesh.build import build_mesh
from dtlayout.spec.layout import Layout
from dtlayout.training.gradients import clip_gradients, local_squared_norm


def plain_parameters() -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in make_gradients()]
    for parameter, gradient in zip(parameters, make_gradients(), strict=True):
        parameter.grad = gradient
    return [*parameters, nn.Parameter(torch.zeros(2))]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_one_rank_with_plain_tensors_does_what_torch_does(max_norm):
    ours, theirs = plain_parameters(), plain_parameters()
    norm = local_squared_norm(ours, build_mesh(Layout(), "cpu")).sqrt()
    clip_gradients(ours, norm, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, expected)
    for own, other in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    assert ours[-1].grad is None


@pytest.mark.usefixtures("one_rank")
def test_the_norm_is_of_all_gradients_and_of_nothing_is_zero():
    mesh = build_mesh(Layout(), "cpu")
    parameter = nn.Parameter(torch.zeros(2))
    assert local_squared_norm([parameter], mesh).item() == 0
    other = nn.Parameter(torch.zeros(2))
    parameter.grad, other.grad = torch.full((2,), 1e15), torch.full((2,), 1e15)
    total = local_squared_norm([parameter, other], mesh)
    assert total.dtype == torch.float64
    assert total.item() == pytest.approx(4e30)


@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=2, tp=2), Layout(pp=2, tp=2), Layout(pp=2, dp_replicate=2)], ids=str
)
def test_every_way_to_place_a_gradient_has_the_norm_of_the_whole(ranks4, layout):
    gradients = make_gradients()
    copies = layout.pp * len(PLACEMENTS)  # each stage holds every gradient in every way
    expected = (copies * sum(g.square().sum() for g in gradients)).sqrt().item()
    for norm, clipped_norm, whole in ranks4.run(norm_and_clipped, layout, 0.25):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert clipped_norm == pytest.approx(0.25, rel=1e-5)
        for got, gradient in zip(whole, gradients * len(PLACEMENTS), strict=True):
            torch.testing.assert_close(
                torch.tensor(got, dtype=torch.float64), gradient * 0.25 / (expected + 1e-6), rtol=1e-9, atol=0
            )


def test_gradients_of_different_meshes_count_alike(ranks4):
    expected = (2 * make_gradients()[0].square().sum()).sqrt().item()
    assert ranks4.run(norm_over_two_meshes) == pytest.approx([expected] * 4, rel=1e-12)
