"""Copies of tokens that experts get in a dry run, whose tensors have no numbers: as many as predictions take."""

from collections.abc import Sequence

from torch import Tensor, nn

from dtlayout.plans.experts import Dispatcher
from dtlayout.spec.model_shape import Experts


def hand_out_counts(modules: Sequence[nn.Module], experts: Experts | None) -> None:
    """Have each dispatch of tokens take balanced counts: as many copies go to each rank, and as many come from each.

    More come than go, by `experts.fullest_share`: this rank is taken for the fullest.
    """
    dispatches = (getattr(part, "dispatch", None) for module in modules for part in module.modules())
    for dispatcher in (each for each in dispatches if isinstance(each, Dispatcher)):
        assert experts is not None, "only a model with experts sends tokens to them"
        ranks, more = dispatcher.group.size, experts.fullest_share(dispatcher.group.size)

        def read_counts(sent: Tensor, received: Tensor, num_copies: int, ranks: int = ranks, more: float = more):  # type: ignore[no-untyped-def]
            return _share_out(num_copies, ranks), _share_out(round(more * num_copies), ranks)

        dispatcher.read_counts = read_counts


def _share_out(number: int, ranks: int) -> list[int]:
    """Whole parts of a number that differ by one at most.

    >>> _share_out(10, 4)
    [3, 3, 2, 2]
    """
    return [number // ranks + (rank < number % ranks) for rank in range(ranks)]
