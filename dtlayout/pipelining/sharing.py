"""Sharing: how long the pipeline of a step takes where ranks share cores. Pure Python.

Actions are played as in `timing`, but ranks that compute at the same time slow each other down: while n of them do,
each has `at_once`/n of its speed, and all of it as long as n is no more than `at_once`. So a rank that waits speeds up
the others, and a bubble costs little. Every action is played, which is meant for the few ranks of one machine.
"""

from math import inf

from dtlayout.pipelining.actions import Result, input_of, result_of
from dtlayout.pipelining.schedules import find_schedule
from dtlayout.pipelining.timing import PipelineTime, message_delay_s
from dtlayout.pipelining.waves import StageTimes


def time_shared_pipeline(
    schedule: str, num_ranks: int, virtual_stages: int, num_microbatches: int, times: StageTimes, at_once: float
) -> PipelineTime:
    """Play a schedule in which so many ranks have their full speed at the same time; `times` are those of one alone.

    `busy_s` is how long a rank is at work, at whatever speed.

    >>> time_shared_pipeline("1f1b", 2, 1, 4, StageTimes((1.0, 1.0), (2.0, 2.0), (0.5,)), at_once=2).total_s
    17.0
    >>> time_shared_pipeline("1f1b", 2, 1, 4, StageTimes((1.0, 1.0), (2.0, 2.0), (0.0,)), at_once=1).total_s
    24.0
    """
    played = find_schedule(schedule)
    placement = played.place(num_ranks, virtual_stages)
    orders = played.orders(placement, num_microbatches)
    next_of, left_s = [0] * num_ranks, [0.0] * num_ranks  # of each rank: the action that it does or waits for
    end_of: dict[Result, float] = {}
    working: set[int] = set()
    busy_s, finished_s = [0.0] * num_ranks, [0.0] * num_ranks
    now = 0.0

    def ready_s(rank: int) -> float:
        """When the next action of a rank has what it needs."""
        if next_of[rank] == len(orders[rank]):
            return inf
        action = orders[rank][next_of[rank]]
        needed = input_of(action, placement.num_stages)
        if needed is None:
            return 0.0
        return end_of[needed] + message_delay_s(needed, action, placement, times) if needed in end_of else inf

    while True:
        waiting = {rank: ready_s(rank) for rank in range(num_ranks) if rank not in working}
        for rank in (rank for rank, ready in waiting.items() if ready <= now):
            left_s[rank] = times.seconds(orders[rank][next_of[rank]])
            working.add(rank)
        coming = min((ready for ready in waiting.values() if ready > now), default=inf)
        if not working and coming == inf:
            return PipelineTime(total_s=max(finished_s), busy_s=tuple(busy_s), finished_s=tuple(finished_s))
        speed = min(1.0, at_once / len(working)) if working else 1.0
        ending = min((now + left_s[rank] / speed for rank in working), default=inf)
        until = min(coming, ending)
        for rank in sorted(working):
            busy_s[rank] += until - now
            left_s[rank] = 0.0 if now + left_s[rank] / speed <= until else left_s[rank] - (until - now) * speed
            if left_s[rank] == 0.0:
                if (result := result_of(orders[rank][next_of[rank]])) is not None:
                    end_of[result] = until
                finished_s[rank] = until
                next_of[rank] += 1
                working.discard(rank)
        now = until
