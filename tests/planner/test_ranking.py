"""Ranking of made-up layouts: what a search leaves out on the way changes nothing that is ranked."""

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from dtlayout.planner.best_first import BestFirstSearch, Refinement, SearchNode
from dtlayout.planner.ranking import (
    MAX_SLOWDOWN,
    LayoutKind,
    TimedLayout,
    choose_best,
    is_dominated,
    no_dominance,
    prefer,
)
from dtlayout.planner.space import Degrees, StateSharding
from dtlayout.planner.step_times import StepTimes
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

CAPACITY = 1000.0
LAYOUTS = (
    Layout(dp_shard=8), Layout(dp_shard=8, recompute="full"), Layout(tp=2, dp_shard=4), Layout(tp=4, dp_shard=2),
    Layout(tp=2, dp_shard=4, recompute="full"), Layout(pp=2, dp_shard=4),
    Layout(pp=2, dp_shard=4, schedule="interleaved-1f1b", virtual_stages=2), Layout(pp=2, tp=2, dp_shard=2),
)  # fmt: skip


@st.composite
def draw_layouts(draw) -> list[tuple[Layout, float, float, float]]:
    """Layouts with seconds, bytes and a lower bound of these; many are nearly as fast or nearly as full as others."""
    step, size = st.integers(0, 40), st.integers(0, 60)
    return [
        (layout, 1 + 0.002 * seconds, most := 400 + 9.7 * held, most * (1 - 0.01 * slack))
        for layout, seconds, held, slack in draw(
            st.lists(st.tuples(st.sampled_from(LAYOUTS), step, size, st.integers(0, 3)), min_size=1, max_size=12)
        )
    ]


class MadeUp(StepTimes):
    """Times of one layout that is known already."""

    def __init__(self, layout: Layout, least_bytes: float, kernels: Kernels):
        cost, mapping = SimpleNamespace(layout=layout, kernels=kernels), layout
        self.sharding = StateSharding(layout.dp_shard, layout.zero)
        least = {self.sharding: least_bytes}
        self.candidate = SimpleNamespace(cost=cost, mapping=mapping, layout=layout, least_bytes=least)

    def thrash_s(self, peak_bytes: float) -> float:
        return 0.0


def kind_of(layout: Layout, mapping: Layout) -> LayoutKind:
    return LayoutKind.with_degrees(Degrees.of(mapping), mapping.schedule, layout.recompute)


@settings(max_examples=400, deadline=None)
@given(draw_layouts(), st.integers(1, 5), st.booleans())
def test_what_a_search_leaves_out_changes_nothing_that_is_ranked(made_up, top, ranks_kinds):
    dominance, slowdown = (is_dominated, MAX_SLOWDOWN) if ranks_kinds else (no_dominance, float("inf"))
    # Kernels tell layouts apart that are alike; their text is the last part of a preference.
    kernels = [Kernels(compile=kind, norm=norm, loss=loss) for kind in ("none", "blocks") for norm in ("eager", "fused")
               for loss in ("eager", "chunked", "linear")]  # fmt: skip
    known = [(layout, own, *numbers) for (layout, *numbers), own in zip(made_up, kernels, strict=False)]
    everything = [
        TimedLayout(
            s, most, most, layout, own, kind_of(layout, layout), prefer(s, most, layout, CAPACITY, f"{layout} {own}")
        )
        for layout, own, s, most, _ in known
    ]
    needs = {(layout, own): most for layout, own, _, most, _ in known}
    candidates = SimpleNamespace(
        estimator=SimpleNamespace(capacity_bytes=CAPACITY), allowed_bytes=CAPACITY,
        need=lambda layout, own: 2 * (needs[layout, own],),
    )  # fmt: skip
    times = [MadeUp(layout, least, own) for layout, own, _, _, least in known]
    nodes = [
        SearchNode(s, serial, Refinement.CHECK_MEMORY, (each, each.sharding))
        for serial, (each, (_, _, s, _, _)) in enumerate(zip(times, known, strict=True))
    ]
    search = BestFirstSearch(candidates, iter(()), top, kind_of, slowdown, dominance)
    search.run(nodes)
    found, expected = (choose_best(each, top, slowdown, dominance) for each in (search.fitting, everything))
    assert [each.timed[:-1] for each in found] == [each.timed[:-1] for each in expected]
    groups = [each.timed.group for each in expected]
    assert len({*groups}) == len(groups)
    for place, each in enumerate(expected):
        assert not any(dominance(each.timed, better.timed) for better in expected[:place])
