"""Layout: every rule, and that each refusal names what was asked and values that work."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dtlayout.base.errors import InvalidLayout
from dtlayout.spec.batch import Batch
from dtlayout.spec.layout import Layout, OpenLayout
from dtlayout.spec.layout_keys import AXES
from dtlayout.spec.model_shape import Experts, ModelShape

MODEL = ModelShape(name="m", hidden_size=96, num_layers=6, num_heads=12, num_kv_heads=4, ffn_size=40, vocab_size=56)
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b")

degree = st.integers(1, 9)
layouts = st.builds(
    Layout,
    pp=degree,
    dp_replicate=st.integers(1, 3),
    dp_shard=st.integers(1, 3),
    cp=st.sampled_from([1, 1, 1, 2, 3]),
    cp_method=st.sampled_from(["ring", "gather", "all-to-all"]),
    tp=degree,
    sequence_parallel=st.booleans(),
    micro_batch=st.integers(1, 4),
    schedule=st.sampled_from(SCHEDULES),
    virtual_stages=st.integers(1, 3),
    stage_layers=st.just(())
    | st.lists(st.integers(1, 4), min_size=1, max_size=4).map(lambda inner: (0, *inner, 0))
    | st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
)
batches = st.builds(Batch, global_batch=st.integers(1, 60), seq_len=st.integers(1, 30))
changes = st.sampled_from(
    [("tp", 3), ("tp", 8), ("pp", 1), ("pp", 4), ("pp", 7), ("micro_batch", 5), ("cp", 2), ("stage_layers", (1, 2))]
    + [("schedule", name) for name in SCHEDULES]
    + [("virtual_stages", 1), ("virtual_stages", 2), ("seq_len", 7), ("global_batch", 7), ("global_batch", 10)]
)
open_layouts = st.builds(OpenLayout, pp=degree, dp_replicate=degree, dp_shard=st.just(-1) | degree, tp=degree)


@st.composite
def legal_steps(draw) -> tuple[Layout, Batch]:
    """A layout and a batch that keep every rule of MODEL."""
    pp = draw(st.integers(1, 3))
    schedule = draw(st.sampled_from(SCHEDULES if pp > 1 else SCHEDULES[:2]))
    layout = Layout(
        pp=pp,
        dp_replicate=draw(st.integers(1, 2)),
        dp_shard=draw(st.integers(1, 3)),
        tp=draw(st.sampled_from([1, 2, 4])),
        micro_batch=draw(st.integers(1, 3)),
        schedule=schedule,
        virtual_stages=2 if schedule == "interleaved-1f1b" else 1,
    )
    size = layout.dp * layout.micro_batch * pp * draw(st.integers(1, 3))
    return layout, Batch(global_batch=size, seq_len=4 * draw(st.integers(1, 5)))


def change_one(step: tuple[Layout, Batch], name: str, value: object) -> tuple[Layout, Batch]:
    """The step with another value of one field of its layout or its batch."""
    layout, batch = step
    if hasattr(batch, name):
        return layout, replace(batch, **{name: value})
    return replace(layout, **{name: value}), batch


def is_legal(layout: Layout, batch: Batch) -> bool:
    """The rules, said once more: every size splits evenly, every stage has blocks, every schedule its microbatches."""
    tp, dp = layout.tp, layout.dp_replicate * layout.dp_shard
    split_by_tp = [MODEL.num_heads, MODEL.num_kv_heads, MODEL.ffn_size, MODEL.vocab_size]
    if layout.sequence_parallel:
        split_by_tp.append(batch.seq_len)
    if layout.cp > 1 and not shares_sequence(layout, batch):
        return False
    if any(size % tp for size in split_by_tp):
        return False
    if batch.global_batch % (dp * layout.micro_batch):
        return False
    stages = layout.pp * layout.virtual_stages
    counts = layout.stage_layers
    if stages > MODEL.num_layers or (counts and (len(counts), sum(counts)) != (stages, MODEL.num_layers)):
        return False
    microbatches = batch.global_batch // (dp * layout.micro_batch)
    if layout.schedule == "interleaved-1f1b":
        return layout.pp > 1 and layout.virtual_stages > 1 and microbatches % layout.pp == 0
    return layout.virtual_stages == 1 and (layout.schedule == "gpipe" or microbatches >= layout.pp)


def shares_sequence(layout: Layout, batch: Batch) -> bool:
    """Whether cp's ranks have as many tokens each, or heads, and whether tp can split those again."""
    cp, tp = layout.cp, layout.tp
    if batch.seq_len % cp or (layout.sequence_parallel and batch.seq_len // cp % tp):
        return False
    if layout.cp_method == "all-to-all":
        return MODEL.num_heads % (cp * tp) == MODEL.num_kv_heads % (cp * tp) == 0
    return batch.seq_len // cp % 2 == 0


def rule(problem: str) -> str:
    """What a problem complains about, without its numbers."""
    return re.sub(r"[\d\[\], ]+", " ", problem.partition(";")[0])


def follow_advice(problem: str, layout: Layout, batch: Batch) -> list[tuple[Layout, Batch]]:
    """Every change that the part after "use" proposes, each done alone: "use a=1 or b=2 with c=x"."""
    advice = problem.partition("; use ")[2]
    changed = []
    for alternative in advice.split(" or ") if advice else []:
        changes = {}
        for text in alternative.split(" with "):
            name, _, value = text.partition("=")
            is_data = value[0] == "[" or value.isdigit() or value in ("true", "false")
            read = json.loads(value) if is_data else value
            changes[name] = tuple(read) if isinstance(read, list) else read
        global_batch = changes.pop("global_batch", batch.global_batch)
        changed.append((replace(layout, **changes), replace(batch, global_batch=global_batch)))
    return changed


@given(layouts, batches)
def test_a_layout_is_legal_exactly_when_everything_divides(layout, batch):
    problems = layout.problems(MODEL, batch)
    assert (problems == []) == is_legal(layout, batch)
    if problems:
        with pytest.raises(InvalidLayout) as caught:
            layout.check(MODEL, batch)
        assert str(caught.value) == "\n".join(problems)
    else:
        layout.check(MODEL, batch)


@given(layouts, batches)
def test_a_refusal_quotes_what_was_asked(layout, batch):
    for problem in layout.problems(MODEL, batch):
        quoted = re.findall(r"(\w+)=([\w-]+)", problem.partition(";")[0])
        assert quoted or problem.startswith("stage_layers=[")
        for name, value in quoted:
            owner = next(o for o in (layout, batch, MODEL) if hasattr(o, name))
            assert value == str(getattr(owner, name))


@given(layouts, batches)
def test_following_the_advice_removes_the_problem_and_adds_none(layout, batch):
    problems = layout.problems(MODEL, batch)
    for problem in problems:
        for new_layout, new_batch in follow_advice(problem, layout, batch):
            left = {rule(p) for p in new_layout.problems(MODEL, new_batch)}
            assert rule(problem) not in left, f"{problem!r} advises {new_layout} with {new_batch}"
            assert len(left) < len(problems)


@given(legal_steps(), changes)
@example((Layout(pp=1, schedule="gpipe"), Batch(global_batch=4, seq_len=4)), ("schedule", "interleaved-1f1b"))
@example((Layout(pp=1), Batch(global_batch=4, seq_len=4)), ("virtual_stages", 2))
@example((Layout(tp=4), Batch(global_batch=4, seq_len=4)), ("seq_len", 7))
@example((Layout(pp=3), Batch(global_batch=9, seq_len=4)), ("micro_batch", 4))
def test_a_single_problem_has_advice_that_makes_the_layout_legal(step, change):
    layout, batch = change_one(step, *change)
    problems = layout.problems(MODEL, batch)
    if len(problems) != 1:
        return
    changed = follow_advice(problems[0], layout, batch)
    assert changed, f"no advice in {problems[0]!r}"
    for new_layout, new_batch in changed:
        assert new_layout.problems(MODEL, new_batch) == [], problems[0]


def test_where_no_single_change_helps_the_refusal_says_so():
    model = replace(MODEL, num_layers=1)
    (problem, *_) = Layout(pp=2, virtual_stages=2, dp_shard=3, cp=2).problems(model, Batch(global_batch=4, seq_len=4))
    assert "no change of one setting mends it" in problem


def test_every_rule_reports_at_once():
    layout = Layout(
        pp=4, cp=2, tp=5, dp_shard=3, virtual_stages=2, schedule="gpipe", stage_layers=(1, 2), sequence_parallel=True
    )
    problems = layout.problems(replace(MODEL, ffn_size=36), Batch(global_batch=4, seq_len=9))
    assert [rule(p) for p in problems] == [
        "tp= does not divide num_heads= ",
        "tp= does not divide num_kv_heads= ",
        "tp= does not divide ffn_size= ",
        "tp= does not divide vocab_size= ",
        "tp= does not divide seq_len= ",
        "pp= * virtual_stages= makes stages more than num_layers= ",
        "virtual_stages= has no meaning for schedule=gpipe",
        "stage_layers= names stages but pp= * virtual_stages= makes ",
        "global_batch= is not a multiple of dp * micro_batch = * = ",
        " * cp = does not divide seq_len= as cp_method=ring needs it",
    ]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            Layout(tp=8, dp_shard=4),
            "tp=8 does not divide num_heads=12; use tp=4 or tp=2",
        ),
        (
            Layout(pp=4, dp_shard=2, micro_batch=2),
            "schedule=1f1b needs at least pp=4 microbatches, but global_batch=8 with dp=2 and micro_batch=2 gives 2; "
            "use micro_batch=1 or global_batch=16 or global_batch=20",
        ),
        (
            Layout(pp=3, virtual_stages=2, schedule="interleaved-1f1b"),
            "schedule=interleaved-1f1b needs a multiple of pp=3 microbatches, but global_batch=8 with dp=1 and "
            "micro_batch=1 gives 8; use global_batch=9 or global_batch=6 or schedule=1f1b with virtual_stages=1",
        ),
        (
            Layout(dp_shard=4, micro_batch=3),
            "global_batch=8 is not a multiple of dp * micro_batch = 4 * 3 = 12; "
            "use micro_batch=2 or micro_batch=1 or global_batch=12",
        ),
        (
            Layout(dp_shard=3),
            "global_batch=8 is not a multiple of dp * micro_batch = 3 * 1 = 3; use global_batch=9 or global_batch=6",
        ),
        (Layout(cp=3), "2 * cp = 6 does not divide seq_len=16, as cp_method=ring needs it; use cp=2 or cp=4"),
        (
            Layout(cp=3, cp_method="all-to-all"),
            "cp=3 does not divide seq_len=16, as cp_method=all-to-all needs it; use cp=2 or cp=4",
        ),
        (
            Layout(cp=4, tp=2, cp_method="all-to-all"),
            "cp=4 * tp=2 does not divide num_kv_heads=4, which cp_method=all-to-all splits; "
            "use cp_method=ring or cp_method=gather or cp=2",
        ),
        (
            Layout(cp=8, tp=4),
            "cp=8 * tp=4 does not divide seq_len=16; use cp=4 or cp=2 or sequence_parallel=false",
        ),
        (Layout(dp_shard=4, ep=2), f"ep=2, but model {MODEL.name} has no experts; use ep=1"),
    ],
)
def test_a_refusal_reads_like_this(layout, message):
    assert message in layout.problems(MODEL, Batch(global_batch=8, seq_len=16))


def test_ep_divides_the_experts_and_the_ranks_of_a_stage():
    model, batch = (
        replace(MODEL, experts=Experts(number=12, per_token=2, ffn_size=8)),
        Batch(global_batch=8, seq_len=16),
    )
    for ep in (1, 2, 4):
        assert Layout(pp=2, dp_shard=4, tp=2, ep=ep).is_legal(model, batch)
    assert Layout(pp=2, dp_shard=4, tp=2, ep=8).problems(model, batch) == [
        "ep=8 does not divide experts.number=12; use ep=4 or ep=2"
    ]
    assert Layout(pp=2, dp_shard=4, tp=2, ep=3).problems(model, batch) == [
        "ep=3 does not divide dp * cp * tp=8; use ep=2 or ep=4"
    ]
    layout = Layout(dp_shard=4, tp=2, ep=4)
    assert (layout.world_size, layout.expert_dp, str(layout)) == (8, 2, "dp4·tp2+sp ep4 mb1 zero1")
    assert str(replace(layout, ep_overlap=True)) == "dp4·tp2+sp ep4+overlap mb1 zero1"
    assert str(replace(layout, ep_dispatcher="deepep")) == "dp4·tp2+sp ep4+deepep mb1 zero1"
    with pytest.raises(InvalidLayout, match=r"^layout\.ep_dispatcher='flex' is unknown; use one of"):
        replace(layout, ep_dispatcher="flex")


@pytest.mark.parametrize("name", [*AXES, "ep", "micro_batch", "virtual_stages"])
@pytest.mark.parametrize("value", [0, -1])
def test_every_degree_is_positive(name, value):
    with pytest.raises(InvalidLayout, match=rf"^layout\.{name}={value} must be at least 1$"):
        Layout(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schedule", "zig-zag"),
        ("zero", 0),
        ("zero", 4),
        ("recompute", "every-0"),
        ("cp_method", "spiral"),
        ("offload", "tape"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_known_ones(name, value):
    with pytest.raises(InvalidLayout, match=rf"layout\.{name}={value!r} is unknown; use ") as caught:
        Layout(**{name: value})
    advice = str(caught.value).partition("use ")[2]
    for known in re.findall(r"[\w-]+", advice.partition("(")[0].replace("every-N", "every-3")):
        if known not in ("one", "of", "or"):
            Layout(**{name: int(known) if known.isdigit() else known})


def test_every_wrong_value_reports_at_once():
    with pytest.raises(InvalidLayout) as caught:
        Layout(pp=0, tp=-2, micro_batch=0, stage_layers=(3, 0, 1), schedule="?", zero=7, recompute="some")
    assert [re.match(r"layout\.(\w+)=", p)[1] for p in caught.value.problems] == [
        "pp", "tp", "micro_batch", "stage_layers", "schedule", "zero", "recompute",
    ]  # fmt: skip


@given(layouts)
def test_the_world_is_the_product_of_the_axes(layout):
    product = 1
    for axis in AXES:
        product *= getattr(layout, axis)
    assert layout.world_size == product
    assert layout.dp == layout.dp_replicate * layout.dp_shard


@given(legal_steps())
def test_all_microbatches_of_all_ranks_make_the_global_batch(step):
    layout, batch = step
    assert layout.problems(MODEL, batch) == []
    assert layout.num_microbatches(batch) * layout.micro_batch * layout.dp == batch.global_batch


def test_the_short_form_shows_what_is_on():
    assert str(Layout()) == "1 rank mb1 zero1"
    assert str(Layout(dp_replicate=2, dp_shard=4, tp=2, sequence_parallel=False, zero=3)) == (
        "replicate2·dp4·tp2 mb1 zero3"
    )
    assert str(Layout(pp=4, virtual_stages=2, schedule="interleaved-1f1b", recompute="full")) == (
        "pp4 mb1 interleaved-1f1b v2 zero1 recompute=full"
    )


@given(open_layouts, st.integers(1, 200))
def test_an_open_layout_fills_the_world_or_names_one_that_works(layout, world_size):
    others = layout.pp * layout.dp_replicate * layout.tp
    is_open = layout.dp_shard == -1
    assert layout.smallest_world_size == (others if is_open else others * layout.dp_shard)
    if world_size % others == 0 if is_open else world_size == others * layout.dp_shard:
        resolved = layout.resolve(world_size)
        assert type(resolved) is Layout
        assert resolved.world_size == world_size
        assert is_open or resolved.dp_shard == layout.dp_shard
        assert all(getattr(resolved, axis) == getattr(layout, axis) for axis in AXES if axis != "dp_shard")
        return
    with pytest.raises(InvalidLayout, match=f"world size {world_size} does not fit the layout") as caught:
        layout.resolve(world_size)
    proposed = re.search(r"start (\d+(?: or \d+)*),", str(caught.value))[1]
    for number in map(int, proposed.split(" or ")):
        assert layout.resolve(number).world_size == number


def test_an_open_layout_keeps_everything_but_dp_shard():
    values = {"sequence_parallel": False, "micro_batch": 2, "schedule": "gpipe", "zero": 3, "recompute": "full"}
    assert OpenLayout(tp=2, pp=2, stage_layers=(1, 5), **values).resolve(12) == Layout(
        tp=2, pp=2, stage_layers=(1, 5), dp_shard=3, **values
    )


@pytest.mark.parametrize(
    ("layout", "world_size", "message"),
    [
        (OpenLayout(dp_shard=1), 4, "every axis 1 needs 1 rank; start 1, or change the degrees"),
        (OpenLayout(pp=3, tp=2), 8, "pp=3 * tp=2 needs a multiple of 6 ranks; start 6 or 12, or change the degrees"),
        (OpenLayout(tp=4), 3, "tp=4 needs a multiple of 4 ranks; start 4, or change the degrees"),
        (OpenLayout(tp=4), 0, "tp=4 needs a multiple of 4 ranks; start 4, or change the degrees"),
    ],
)
def test_a_world_of_the_wrong_size_reads_like_this(layout, world_size, message):
    with pytest.raises(InvalidLayout) as caught:
        layout.resolve(world_size)
    assert str(caught.value) == f"world size {world_size} does not fit the layout: {message}"


def test_an_open_layout_checks_its_values_before_it_divides():
    with pytest.raises(InvalidLayout, match=r"layout\.tp=0 must be at least 1"):
        OpenLayout(tp=0).resolve(8)
    with pytest.raises(InvalidLayout, match=r"layout\.dp_shard=0 must be at least 1"):
        OpenLayout(dp_shard=0)


def test_an_open_layout_has_as_many_shards_as_ep_needs():
    layout = OpenLayout(tp=2, ep=8)
    assert (layout.smallest_world_size, layout.resolve(8).dp_shard, layout.resolve(24).dp_shard) == (8, 4, 12)
    with pytest.raises(InvalidLayout, match=r"tp=2 with ep=8 needs a multiple of 8 ranks; start 8 or 16"):
        layout.resolve(10)
    assert OpenLayout(tp=2, cp=2, ep=4).smallest_world_size == 4
