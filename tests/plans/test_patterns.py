"""A pattern that matches nothing and a style that nobody knows are refused by name, before anything is sharded."""

import pytest
from torch import nn

from dtlayout.base.errors import InvalidConfig
from dtlayout.mesh.axes import TP
from dtlayout.mesh.build import build_mesh
from dtlayout.models.presets import PRESETS
from dtlayout.models.weights import list_weights
from dtlayout.plans.apply import apply_plan, check_plan, split_tensors
from dtlayout.plans.patterns import check_parameters
from dtlayout.plans.plan import Plan
from dtlayout.plans.plan import make_plan as plan_for
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import Precision
from dtlayout.spec.recompute import Recompute


def build_module() -> nn.Module:
    blocks = [nn.ModuleDict({"widen": nn.Linear(4, 8), "narrow": nn.Linear(8, 4)}) for _ in range(2)]
    return nn.ModuleDict({"layers": nn.ModuleList(blocks), "head": nn.Linear(4, 2)})


def make_plan(**changes) -> Plan:
    fine = {
        "tensor": {"layers.*.widen": "colwise", "layers.*.narrow": "rowwise"}, "blocks": "layers.*",
        "recompute": Recompute.parse("none"), "units": (("layers.*",),), "zero": 3,
        "precision": Precision(compute="float32"),
    }  # fmt: skip
    return Plan(**{**fine, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"tensor": {"layers.*.widn": "colwise"}},
            "plan.tensor: 'layers.*.widn' matches nothing in the model; did you mean 'layers.*.widen'",
        ),
        ({"units": (("layer.*",),)}, "plan.units: 'layer.*' matches nothing in the model; did you mean 'layers.*'"),
        ({"blocks": "blocks.*"}, "plan.blocks: 'blocks.*' matches nothing in the model; "),
        (
            {"frozen": ("layers.*.widen.wieght",)},
            "plan.frozen: 'layers.*.widen.wieght' matches nothing in the model; did you mean 'layers.*.widen.weight'",
        ),
        (
            {"context": {"layers.*.mix.attend": "ring"}},
            "plan.context: 'layers.*.mix' matches nothing in the model; did you mean ",
        ),
        (
            {"tensor": {"layers.*.widen": "colwize"}},
            "plan.tensor['layers.*.widen']: the style 'colwize' is unknown; did you mean 'colwise'?",
        ),
        (
            {"context": {"layers.*.attend": "star"}},
            "plan.context['layers.*.attend']: the style 'star' is unknown; use one of 'gather', 'all-to-all', 'ring'",
        ),
    ],
)
def test_what_matches_nothing_is_refused_with_the_nearest_names(changes, said):
    with pytest.raises(InvalidConfig) as refused:
        check_plan(make_plan(**changes), [build_module()])
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("name", ["ColwiseParallel", "columnwise", "Colwise"])
def test_names_of_torchs_classes_are_taken_for_the_styles_that_they_mean(name):
    with pytest.raises(InvalidConfig, match=r"is unknown; did you mean 'colwise'\?$"):
        check_plan(make_plan(tensor={"layers.*.widen": name}), [])


def test_a_wrong_pattern_and_a_wrong_style_are_told_at_once():
    plan = make_plan(tensor={"layers.*.widn": "colwise", "head": "colwize"})
    with pytest.raises(InvalidConfig) as refused:
        check_plan(plan, [build_module()])
    assert [problem.split(";")[0] for problem in refused.value.problems] == [
        "plan.tensor['head']: the style 'colwize' is unknown",
        "plan.tensor: 'layers.*.widn' matches nothing in the model",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recompute": "every-2"}, "plan.recompute='every-2' is a str; give Recompute.parse('every-2')"),
        ({"recompute": None}, "plan.recompute=None is a NoneType; give Recompute.parse('every-2')"),
        (
            {"precision": "float32"},
            "plan.precision='float32' is a str; give a Precision, such as Precision(compute='float32')",
        ),
        (
            {"precision": {"compute": "float32"}},
            "plan.precision={'compute': 'float32'} is a dict; give a Precision, such as Precision(compute='bfloat16')",
        ),
        (
            {"units": ("layers.*",)},
            "plan.units: 'layers.*' stands where a tuple of patterns does; give units=(('layers.*',),)",
        ),
        ({"units": "head"}, "plan.units: 'head' stands where a tuple of patterns does; give units=(('head',),)"),
        ({"zero": 4}, "plan.zero=4 is unknown; use 1, 2 or 3"),
        ({"compile": "block"}, "plan.compile='block' is unknown; use 'none', 'blocks', 'loss' or 'model'"),
        ({"frozen": "a.weight"}, "plan.frozen='a.weight' is one pattern; give a tuple of them, ('a.weight',)"),
        ({"tensor": ["head"]}, "plan.tensor=['head'] is a list; give a mapping, pattern → style"),
        ({"blocks": ("layers.*",)}, "plan.blocks=('layers.*',) is a tuple; give one pattern"),
        (
            {"blocks": "", "recompute": Recompute.parse("full")},
            "plan.recompute is for blocks, and plan.blocks is empty; give the pattern of the blocks",
        ),
    ],
)
def test_a_value_of_another_kind_is_refused_in_one_line_when_the_plan_is_made(changes, said):
    with pytest.raises(InvalidConfig) as refused:
        make_plan(**changes)
    assert refused.value.problems == [said]


def test_every_wrong_pattern_is_named_at_once():
    plan = make_plan(tensor={"a": "colwise", "b": "rowwise"}, units=(("c", "layers.*"),))
    with pytest.raises(InvalidConfig) as refused:
        check_plan(plan, [build_module()])
    assert [problem.split("'")[1] for problem in refused.value.problems] == ["a", "b", "c"]


def test_a_stage_may_lack_what_another_stage_has():
    whole = build_module()
    first, second = nn.ModuleDict({"layers": whole.layers}), nn.ModuleDict({"head": whole.head})
    plan = make_plan(units=(("layers.*",), ("head",)))
    check_plan(plan, [first, second])
    with pytest.raises(InvalidConfig, match="'head' matches nothing"):
        check_plan(plan, [first])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("changes", [{"tensor": {"layers.*.widn": "colwise"}}, {"tensor": {"head": "colwize"}}])
def test_nothing_is_sharded_where_a_plan_is_refused(changes):
    module, mesh = build_module(), build_mesh(Layout(), "cpu")
    before = {name: (type(p), p.data_ptr()) for name, p in module.named_parameters()}
    with pytest.raises(InvalidConfig):
        apply_plan(module, make_plan(frozen=("head.*",), **changes), mesh)
    assert {name: (type(p), p.data_ptr()) for name, p in module.named_parameters()} == before
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.usefixtures("one_rank")
def test_what_is_frozen_stays_frozen_where_it_is_split():
    module, mesh = build_module(), build_mesh(Layout(), "cpu")
    module.layers.requires_grad_(False)
    module.head.requires_grad_(True)
    split_tensors(module, {"layers.*.widen": "colwise", "layers.*.narrow": "rowwise"}, mesh[TP])
    assert {name for name, p in module.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}
    assert type(module.layers[0].widen.weight).__name__ == "DTensor"


BLOCK = ["", "layers", "layers.0"]
PAIR = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
ADVICE = "say {!r}: 'head-norm' where a rank computes with its own heads or columns"


@pytest.mark.parametrize(
    ("styles", "trained", "said"),
    [
        (PAIR, "layers.0.norm.weight", ADVICE.format("layers.*.norm")),
        (PAIR, "layers.0.inner.deep.weight", ADVICE.format("layers.*.inner.deep")),
        (PAIR, "layers.0.gain", ADVICE.format("layers.*")),
        (PAIR | {"layers.*": "input"}, "layers.0.gain", "put 'gain' into a module of its own"),
        (
            {"layers.*.a.q": "colwise", "layers.*.b.o": "rowwise"},
            "layers.0.norm.weight",
            ADVICE.format("layers.*.norm"),
        ),
        ({"layers.*.a.q": "colwise"}, "layers.0.a.norm.weight", ADVICE.format("layers.*.a.norm")),
        ({"layers.*.a.q": "colwise"}, "layers.0.norm.weight", ""),
        (PAIR, "norm.weight", ""),
        (PAIR | {"layers.*.norm": "whole"}, "layers.0.norm.weight", ""),
        (PAIR | {"layers.*.inner": "whole"}, "layers.0.inner.deep.weight", ""),
        (PAIR | {"layers.*.inner": "head-norm"}, "layers.0.inner.deep.weight", ADVICE.format("layers.*.inner.deep")),
    ],
)
def test_a_trained_parameter_beside_split_matmuls_has_a_style(styles, trained, said):
    owners = [trained, *(name.replace("*", "0") for name in styles)]
    modules = {*BLOCK, *(name.rpartition(".")[0] for name in owners)}
    modules |= {name.replace("*", "0") for name in styles} | {name.rpartition(".")[0] for name in modules}
    plan = make_plan(tensor=styles)
    if not said:
        check_parameters(plan, modules, [trained])
        return
    with pytest.raises(InvalidConfig) as refused:
        check_parameters(plan, modules, [trained])
    assert said in str(refused.value)
    check_parameters(make_plan(tensor=styles, frozen=(trained.replace("0", "*"),)), modules, [trained])


@pytest.mark.parametrize(
    ("styles", "trained", "said"),
    [
        ({"layers.*.up": "colwise"}, "layers.0.down", "say 'layers.*.down': 'colwise' or 'rowwise' where tp splits it"),
        (PAIR, "layers.0.down.lora_A", "say 'layers.*.down.lora_A': 'rowwise-term', beside 'rowwise'"),
        (PAIR, "layers.0.down.lora_B", "say 'layers.*.down.lora_B': 'replicated', beside 'rowwise'"),
        (PAIR, "layers.0.up.lora_A", "say 'layers.*.up.lora_A': 'replicated', beside 'colwise'"),
        (PAIR, "layers.0.up.lora_B", "say 'layers.*.up.lora_B': 'colwise', beside 'colwise'"),
        (PAIR, "layers.0.down.first", "rowwise splits the module around it; 'rowwise-term' if it reads the same input"),
    ],
)
def test_a_linear_layer_without_a_style_is_offered_those_that_are_right_there(styles, trained, said):
    modules = [*BLOCK, "layers.0.up", "layers.0.down", trained]
    with pytest.raises(InvalidConfig) as refused:
        check_parameters(make_plan(tensor=styles), modules, [f"{trained}.weight"], [trained])
    assert said in str(refused.value)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_plans_of_described_models_have_a_style_for_all_of_them(sequence_parallel):
    layout = Layout(tp=2, sequence_parallel=sequence_parallel)
    for model in PRESETS.values():
        names = [name for name, _ in list_weights(model)]
        parts = [name.split(".") for name in names]
        modules = {".".join(each[:i]) for each in parts for i in range(len(each))}
        check_parameters(plan_for(model, layout, Kernels(), Precision()), modules, names)
