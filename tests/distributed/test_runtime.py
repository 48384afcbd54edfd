"""What the runtime hands to every stage, and what it refuses."""

import pytest
from ranks import RankFailure, Ranks
from runtime_ranks import (
    build_with_too_many_stages,
    note_contexts,
    step_with_an_odd_batch,
    step_with_three_contexts,
    step_with_wrong_boundary,
)


def test_every_stage_gets_the_context_of_its_microbatch(ranks4: Ranks) -> None:
    assert ranks4.run(note_contexts) == [[(0.0, "a"), (1.0, "b"), (2.0, "c"), (3.0, "d")]] * 4


def test_contexts_that_are_not_one_for_each_microbatch_are_refused(ranks4: Ranks) -> None:
    with pytest.raises(RankFailure, match="3 contexts came for 4 microbatches; bring one for each, or none"):
        ranks4.run(step_with_three_contexts)


def test_a_wrong_boundary_is_refused_before_it_is_sent(ranks4: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"stage 0 gives \(1, 8\) torch.float32, but the boundary says \(1, 4\)"):
        ranks4.run(step_with_wrong_boundary)


def test_stages_that_the_schedule_does_not_have_are_refused(ranks4: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"holds stages \[\d\], but 2 modules and 0 gradient syncs came"):
        ranks4.run(build_with_too_many_stages)


def test_rows_that_make_no_equal_microbatches_are_refused(ranks4: Ranks) -> None:
    with pytest.raises(RankFailure, match="5 rows do not make 4 equal microbatches"):
        ranks4.run(step_with_an_odd_batch)
