"""Pieces of training on modules of one's own: what is refused, and what a rank alone does; examples have several."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import dtlayout as dl
from dtlayout.api.pieces import _check_shared, _cut, _find_boundary
from dtlayout.base.errors import DtlayoutError, InvalidConfig, InvalidLayout
from dtlayout.plans.context import apply_context


def test_a_sequential_is_cut_into_equal_parts_that_keep_their_names():
    stages = _cut(nn.Sequential(*(nn.Linear(2, 2) for _ in range(5))), 2)
    assert [[name for name, _ in stage.named_children()] for stage in stages] == [["0", "1"], ["2", "3", "4"]]


class Shifted(nn.Module):
    """A layer that takes the context of its microbatch, and for the loss what a step gets by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2)

    def forward(self, x, shift, targets=None):
        x = self.up(x) + shift
        return x if targets is None else (x - targets).square().sum()


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_names_in_a_sequential_are_the_same_for_every_cut(num_stages):
    stages = _cut(nn.Sequential(*(Shifted() for _ in range(4))), num_stages)
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert names == [f"{i}.up.{kind}" for i in range(4) for kind in ("weight", "bias")]


def test_children_of_a_stage_get_the_context_and_the_last_one_the_targets():
    first, second = Shifted(), Shifted()
    (stage,) = _cut(nn.Sequential(first, second), 1)
    x, shift, targets = torch.ones(3, 2), torch.tensor(5.0), torch.zeros(3, 2)
    assert torch.equal(stage(x, shift, targets=targets), second(first(x, shift), shift, targets=targets))


@pytest.mark.usefixtures("two_fake_ranks")
@pytest.mark.parametrize("layout", [dl.Layout(dp_shard=2), dl.Layout(dp_replicate=2), dl.Layout(cp=2)])
def test_without_a_plan_ranks_with_other_tokens_are_refused(layout):
    module, mesh = nn.Sequential(nn.Linear(4, 4)), dl.build_mesh(layout, "cpu")
    said = f"plan=None sums no gradients over the 2 ranks of dp={layout.dp} · cp={layout.cp}, and each would train"
    with pytest.raises(InvalidConfig, match=re.escape(said)) as refused:
        dl.pipeline(module, layout, mesh, torch.ones(1, 4), global_batch=2)
    advice = re.search(r"give a plan: (Plan\(.*\)) splits", str(refused.value))
    assert advice is not None
    plan = eval(advice[1], {"Plan": dl.Plan, "Precision": dl.Precision})
    runtime = dl.pipeline(module, layout, mesh, torch.ones(1, 4), global_batch=2, plan=plan)
    assert len(runtime.sync) == 1 and all(hasattr(p, "full_tensor") for p in runtime.parameters)


@pytest.mark.parametrize("stages", [[nn.Linear(2, 2)], nn.Sequential(nn.Linear(2, 2)), [nn.Linear(2, 2)] * 3])
def test_another_number_of_stages_than_the_layout_has_is_refused(stages):
    with pytest.raises(InvalidLayout, match=f"the layout has 2 stages, and here are {len(stages)}; bring one module"):
        _cut(stages, 2)


def test_stages_hand_on_one_shape_and_an_example_is_a_microbatch():
    stages = [nn.Linear(2, 4), nn.Linear(4, 8), nn.Linear(8, 1)]
    with pytest.raises(DtlayoutError, match=r"stage 1 gives \(3, 8\) torch.float32, and stage 0 \(3, 4\)"):
        _find_boundary(stages, torch.zeros(3, 2), 3)
    with pytest.raises(DtlayoutError, match="the example has 3 rows, and a microbatch of this layout 2"):
        _find_boundary(stages, torch.zeros(3, 2), 2)
    assert _find_boundary(stages[:2], torch.zeros(3, 2), 3).shape == (3, 4)


@pytest.mark.usefixtures("one_rank")
def test_a_step_clips_and_one_that_is_not_finite_updates_nothing():
    layout = dl.Layout(micro_batch=2)
    model, x, y = nn.Sequential(nn.Linear(3, 1)), torch.randn(4, 3), torch.randn(4, 1)
    runtime = dl.pipeline(
        model, layout, dl.build_mesh(layout, "cpu"), x[:2], global_batch=4,
        loss=lambda out, targets: (out - targets).square().sum(),
    )  # fmt: skip
    optimizer = torch.optim.SGD(runtime.parameters, lr=1.0)
    before = model[0].weight.detach().clone()
    expected = (model(x) - y).square().sum().item()
    result = dl.train_step(runtime, optimizer, x, targets=y, max_norm=0.5)
    assert result.loss == pytest.approx(expected) and result.grad_norm > 0.5
    assert 0 < float((model[0].weight - before).norm()) <= 0.5 + 1e-4
    before = model[0].weight.detach().clone()
    assert not dl.train_step(runtime, optimizer, x * torch.inf, targets=y).is_finite
    assert torch.equal(model[0].weight, before) and model[0].weight.grad is None


def test_adapters_stand_beside_what_is_named_and_all_else_is_frozen():
    model = nn.ModuleDict({"q_proj": nn.Linear(4, 4), "down_proj": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
    assert dl.add_adapters(model, dl.Adapter(rank=2, targets=("q_proj",))) == ["q_proj"]
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"q_proj.lora_A.weight", "q_proj.lora_B.weight"}
    other = nn.ModuleDict({"q_proj": nn.Linear(4, 4), "down_proj": nn.Linear(4, 6)})
    assert dl.add_adapters(other, dl.Adapter(method="ia3")) == ["q_proj", "down_proj"]
    assert [other[name].ia3.weight.shape for name in other] == [(4,), (4,)]  # of down_proj's input
    with pytest.raises(InvalidConfig, match=r"adapter\.targets: 'q_prj' is unknown; did you mean 'q_proj'\?"):
        dl.add_adapters(nn.ModuleDict({"q_proj": nn.Linear(4, 4)}), dl.Adapter(targets=("q_prj",)))


@pytest.mark.usefixtures("one_rank")
def test_a_place_without_a_function_that_attends_is_refused():
    mesh = dl.build_mesh(dl.Layout(), "cpu")["cp"]
    with pytest.raises(
        InvalidConfig, match=r"plan\.context: Linear has no function 'attend'; name the one that attends"
    ):
        apply_context(nn.Sequential(nn.Linear(2, 2)), {"*.attend": "ring"}, "sdpa-math", mesh)


class Ends(nn.Module):
    """One end of a model whose embedding and head are one parameter."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = weight


def test_a_trained_parameter_of_two_stages_is_refused_by_its_names():
    weight = nn.Parameter(torch.ones(4, 4))
    stages = [nn.Sequential(nn.Linear(4, 4), Ends(weight)), nn.Linear(4, 4), Ends(weight)]
    said = "stage 0 as '1.tied.weight' and stage 2 as 'tied.weight' share one trained parameter, and each would train"
    with pytest.raises(InvalidLayout, match=re.escape(said)):
        _check_shared(stages, ())
    _check_shared(stages, ("*.tied.weight", "tied.weight"))  # a plan freezes it
    with pytest.raises(InvalidLayout):
        _check_shared(stages, ("*.tied.weight",))
    with pytest.raises(InvalidLayout):
        _check_shared(stages[:2] * 2, ())
    weight.requires_grad_(False)
    _check_shared(stages, ())
    twice = nn.Parameter(torch.ones(4, 4))
    _check_shared([nn.Sequential(Ends(twice), Ends(twice)), nn.Linear(4, 4)], ())  # one stage uses it twice


@pytest.mark.usefixtures("two_fake_ranks")
@pytest.mark.parametrize(
    ("stages", "layout", "global_batch", "said"),
    [
        (2, dl.Layout(pp=2, micro_batch=2), 9, "global_batch=9 makes no equal microbatches: bring a multiple of 2, of"),
        (2, dl.Layout(pp=2, micro_batch=2), 0, "global_batch=0 makes no equal microbatches"),
        (1, dl.Layout(dp_shard=2, micro_batch=2), 6, "no equal microbatches: bring a multiple of 4, of dp=2"),
        (
            2, dl.Layout(pp=2, tp=2, micro_batch=2), 8,
            "the layout has pp=2 dp_replicate=1 dp_shard=1 cp=1 tp=2, and the mesh pp=2 dp_replicate=1 dp_shard=1 cp=1 "
            "tp=1; build the mesh of this layout",
        ),
    ],
)  # fmt: skip
def test_a_batch_or_a_mesh_that_does_not_fit_the_layout_is_refused(stages, layout, global_batch, said):
    mesh = dl.build_mesh(replace(layout, tp=1), "cpu")
    with pytest.raises(InvalidLayout, match=re.escape(said)):
        dl.pipeline([nn.Linear(4, 4) for _ in range(stages)], layout, mesh, torch.ones(2, 4), global_batch=global_batch)


@pytest.mark.usefixtures("two_fake_ranks")
def test_tied_embeddings_of_ones_own_modules_make_no_pipeline():
    layout, weight = dl.Layout(pp=2, micro_batch=2), nn.Parameter(torch.ones(4, 4))
    with pytest.raises(
        dl.InvalidLayout, match=r"stage 0 as 'tied.weight' and stage 1 as 'tied.weight' share one trained"
    ):
        dl.pipeline(
            [Ends(weight), Ends(weight)], layout, dl.build_mesh(layout, "cpu"), torch.ones(2, 4), global_batch=4
        )


@pytest.mark.usefixtures("one_rank")
def test_an_unknown_style_of_context_is_refused_as_a_plan_refuses_it():
    mesh = dl.build_mesh(dl.Layout(), "cpu")["cp"]
    said = r"plan\.context\['\*\.attend'\]: the style 'rings' is unknown; did you mean 'ring'\?"
    with pytest.raises(dl.InvalidConfig, match=said):
        dl.apply_context(nn.Sequential(nn.Linear(2, 2)), {"*.attend": "rings"}, "sdpa-math", mesh)


@pytest.mark.usefixtures("one_rank")
def test_a_step_takes_the_rows_of_its_rank_and_gives_a_loss():
    layout, x = dl.Layout(micro_batch=2), torch.randn(8, 3)
    mesh = dl.build_mesh(layout, "cpu")
    runtime = dl.pipeline(
        nn.Sequential(nn.Linear(3, 1)), layout, mesh, x[:2], global_batch=4, loss=lambda out: out.square().sum()
    )
    optimizer = torch.optim.SGD(runtime.parameters, lr=0.1)
    said = r"8 rows, and this rank takes 4 \(2 microbatches of 2\); bring those of its data-parallel rank alone"
    with pytest.raises(dl.DtlayoutError, match=said):
        dl.train_step(runtime, optimizer, x)
    assert dl.train_step(runtime, optimizer, x[:4]).is_finite
    assert runtime.evaluate(x) is not None  # which takes as many rows as there are
    without = dl.pipeline(nn.Sequential(nn.Linear(3, 1)), layout, mesh, x[:2], global_batch=4)
    with pytest.raises(dl.DtlayoutError, match=r"the last stage gave \(2, 1\), and no scalar; give loss="):
        without.step(x[:4])
    with pytest.raises(dl.InvalidLayout, match="Linear is one module, and nothing says where to cut it; bring"):
        dl.pipeline(nn.Linear(3, 1), layout, mesh, x[:2], global_batch=4)
