"""A lower bound of a pipeline's time, against which times and the bounds that schedules know are held."""

from itertools import accumulate

from dtlayout.schedules.fast_timing import StageTimes
from dtlayout.schedules.schedules import find_schedule


def lower_bound(schedule: str, num_ranks: int, virtual_stages: int, num_microbatches: int, times: StageTimes) -> float:
    """Seconds that the pipeline takes at least; exact for equal stages without messages, unless backwards are split.

    Rank r starts after the first microbatch has come down to it, and ends before the last one has gone back up from it.
    Where the weights' part of a backward may wait, only the first of these counts. A schedule may know of more waits.
    """
    played = find_schedule(schedule)
    placement = played.place(num_ranks, virtual_stages)
    ways = zip(times.forward_s, times.backward_s, times.message_s, strict=False)
    hops_s = (f + message + (0.0 if played.splits_backward else b + message) for f, b, message in ways)
    away_s = accumulate(hops_s, initial=0.0)
    own = ([placement.take(s, r) for s in (times.forward_s, times.backward_s)] for r in range(num_ranks))
    busy_s = (num_microbatches * (sum(forward_s) + sum(backward_s)) for forward_s, backward_s in own)
    least_s = max(away + busy for away, busy in zip(away_s, busy_s, strict=False))
    return max(least_s, played.least(num_microbatches, times)) if played.least else least_s
