"""Plans: patterns name what they should, and every module has the style that Megatron's scheme gives it."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtlayout.models.description import BLOCKS
from dtlayout.models.llama import Llama
from dtlayout.models.presets import find_preset
from dtlayout.plans.plan import make_plan, match_names, tensor_styles
from dtlayout.spec.context_parallel import CONTEXT_METHODS
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import Precision

MODEL = find_preset("debug")
part = st.text("ab0.", min_size=1, max_size=3).filter(lambda t: not (t.startswith(".") or t.endswith(".") or ".." in t))


def plan_of(layout: Layout, model=MODEL):
    return make_plan(model, layout, Kernels(), Precision())


def module_names(model=MODEL) -> list[str]:
    with torch.device("meta"):
        return [name for name, _ in Llama(model, Kernels(), 8).named_modules()]


def style_of_each_module(layout: Layout) -> dict[str, str]:
    names = module_names()
    return {name: style for pattern, style in plan_of(layout).tensor.items() for name in match_names(pattern, names)}


@given(st.lists(st.sampled_from(["a", "b0", "layers", "*"]), min_size=1, max_size=4), st.lists(part, max_size=8))
def test_a_star_stands_for_exactly_one_part_of_a_name(pattern, names):
    def means(name: str) -> bool:
        parts = name.split(".")
        return len(parts) == len(pattern) and all(p in ("*", n) for p, n in zip(pattern, parts, strict=True))

    names = [*names, ".".join(pattern).replace("*", "x"), ".".join([*pattern, "more"]).replace("*", "x")]
    assert match_names(".".join(pattern), names) == [name for name in names if means(name)]


def test_dots_in_a_pattern_are_dots():
    assert match_names("a.b", ["a.b", "axb"]) == ["a.b"]


def test_without_tensor_parallelism_no_module_is_split():
    assert plan_of(Layout(dp_shard=4)).tensor == {}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_every_pattern_names_a_module_and_every_weight_has_a_style(sequence_parallel):
    layout = Layout(tp=2, sequence_parallel=sequence_parallel)
    names = module_names()
    for pattern in plan_of(layout).tensor:
        assert match_names(pattern, names), f"{pattern} names no module"
    with torch.device("meta"):
        weights = {name.rpartition(".")[0] for name, _ in Llama(MODEL, Kernels(), 8).named_parameters()}
    unsplit = weights - style_of_each_module(layout).keys()
    norms = {name for name in weights if name.endswith("norm")}
    assert unsplit == (set() if sequence_parallel else norms)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_each_pair_of_matmuls_opens_by_columns_and_closes_by_rows(sequence_parallel):
    styles = style_of_each_module(Layout(tp=2, sequence_parallel=sequence_parallel))
    opening, closing = ("input-gather", "rowwise-scatter") if sequence_parallel else ("input", "rowwise")
    for i in range(MODEL.num_layers):
        block = f"model.layers.{i}"
        assert {styles[f"{block}.self_attn"], styles[f"{block}.mlp"]} == {opening}
        split = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        assert {styles[f"{block}.{name}"] for name in split} == {"colwise"}
        assert {styles[f"{block}.self_attn.o_proj"], styles[f"{block}.mlp.down_proj"]} == {closing}
    assert styles["model.embed_tokens"] == ("embedding-scatter" if sequence_parallel else "embedding")
    assert styles["lm_head"] == ("head-gather" if sequence_parallel else "head")


def test_sequence_parallelism_without_tensor_parallelism_changes_nothing():
    on, off = (tensor_styles(MODEL, Layout(tp=1, sequence_parallel=sp)) for sp in (True, False))
    assert on == off


@pytest.mark.parametrize("tied", [True, False])
def test_no_parameter_is_in_two_units(tied):
    model = replace(MODEL, tied_embeddings=tied)
    with torch.device("meta"):
        llama = Llama(model, Kernels(), 8)
    owners: dict[int, set[str]] = {}
    for unit in plan_of(Layout(), model).units:
        for name in (n for pattern in unit for n in match_names(pattern, module_names(model))):
            for parameter in llama.get_submodule(name).parameters():
                owners.setdefault(id(parameter), set()).add(name if unit == (BLOCKS,) else str(unit))
    assert all(len(units) == 1 for units in owners.values())
    left_to_the_root = {name for name, p in llama.named_parameters() if id(p) not in owners}
    assert left_to_the_root == ({"model.embed_tokens.weight", "model.norm.weight"} if tied else set())


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("recompute", "every", "selective"), [("none", 0, False), ("selective", 1, True)])
def test_the_plan_carries_what_the_layout_asks(zero, recompute, every, selective):
    plan = plan_of(Layout(dp_shard=2, zero=zero, recompute=recompute))
    assert (plan.zero, plan.recompute.every, plan.recompute.is_selective) == (zero, every, selective)
    assert plan.precision == Precision()


def test_a_printed_plan_has_a_row_for_every_decision():
    lines = str(plan_of(Layout(tp=2, dp_shard=2, zero=2, recompute="every-3"))).splitlines()
    rows = {name.strip(): text.strip() for name, text in (line.split("  ", 1) for line in lines)}
    assert rows["model.layers.*.mlp.down_proj"] == "tp rowwise-scatter"
    assert rows["model.norm + lm_head"] == "fsdp unit, zero 2"
    assert rows["(all)"] == "params float32, compute bfloat16, gradients summed in float32"
    assert lines[-2].split("  ", 1)[1].strip() == "recomputed in full, 1 of 3"
    assert len({line.index(line.split("  ", 1)[1].strip()) for line in lines}) == 1  # one column of texts
    assert "recomputed" not in str(plan_of(Layout()))
    assert "recomputed but for attention and matmuls" in str(plan_of(Layout(recompute="selective")))


@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_a_plan_says_where_cps_ranks_meet_and_where_their_tokens_stand(method):
    plan = make_plan(MODEL, Layout(cp=2, cp_method=method), Kernels(), Precision())
    assert plan.context["model.layers.*.self_attn.attend"] == method
    assert plan.context["model.rotary"] == ("contiguous" if method == "all-to-all" else "zig-zag")
    assert re.search(rf"^model\.layers\.\*\.self_attn\.attend +cp {method}$", str(plan), re.MULTILINE)
    assert not make_plan(MODEL, Layout(tp=2, cp_method=method), Kernels(), Precision()).context
