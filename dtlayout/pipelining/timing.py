"""Timing: how long the pipeline of one training step takes, from the seconds of each stage. Pure Python.

p pipeline ranks, v virtual stages on each, m microbatches. `simulate` plays the actions that the runtime executes: a
rank does its own actions in order, and each action waits for its input and for the message that brings it.
`time_pipeline` does so too, or takes the schedule's fast path, which gives the same. Two things are left out: messages
share links, and a rank's kernels slow down while it sends.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, chain, groupby
from math import inf
from operator import le
from typing import NamedTuple

from dtlayout.schedules.actions import COMPUTE, RELEASE, Action, Kind, Result, input_of, result_of
from dtlayout.schedules.fast_timing import TOLERANCE, Moment, StageTimes
from dtlayout.schedules.placement import Placement
from dtlayout.schedules.schedules import PipelineSchedule, find_schedule


class Span(NamedTuple):
    """Start and end of a rank's work on an action, in the unit of the durations that were simulated."""

    rank: int
    action: Action
    start: float
    end: float


class PipelineTime(NamedTuple):
    """Times of the pipeline ranks, in seconds from the start of the first action."""

    total_s: float
    """End of the last action."""
    busy_s: tuple[float, ...]
    """Seconds of each rank's forwards and backwards, without the waits between them."""
    finished_s: tuple[float, ...]
    """End of each rank's last action; work that comes after the pipeline may begin there."""


def simulate(
    orders: Sequence[Sequence[Action]],
    placement: Placement,
    duration: Callable[[Action], float],
    delay: Callable[[Result, Action], float] = lambda needed, action: 0.0,
) -> list[list[Span]]:
    """Times of each rank's forwards and backwards; an input is there `delay` after it was made.

    AssertionError if an order waits for itself.
    """
    num_stages = placement.num_stages
    end_of: dict[Result, float] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    free = [0.0] * len(orders)
    runnable = list(range(len(orders)))
    while runnable:
        rank = runnable.pop()
        while len(spans[rank]) < len(orders[rank]):
            action = orders[rank][len(spans[rank])]
            needed = input_of(action, num_stages)
            start = free[rank]
            if needed is not None:
                if needed not in end_of:
                    break
                start = max(start, end_of[needed] + delay(needed, action))
            free[rank] = start + duration(action)
            spans[rank].append(Span(rank, action, start, free[rank]))
            if (result := result_of(action)) is not None:
                end_of[result] = free[rank]
                if (receiver := placement.receiver_of(result)) is not None:
                    runnable.append(receiver)
    waiting = [str(order[len(done)]) for order, done in zip(orders, spans, strict=True) if len(done) < len(order)]
    assert not waiting, f"an order waits for itself, at {', '.join(waiting)}"
    return spans


def _message_delay_s(placement: Placement, times: StageTimes, needed: Result, action: Action) -> float:
    """Seconds of the message that brings an action its input; 0 where the input comes from the same rank."""
    if placement.rank_of(needed.stage) == placement.rank_of(action.stage):
        return 0.0
    return times.message_s[min(needed.stage, action.stage)]


def time_pipeline(
    schedule: str, num_ranks: int, virtual_stages: int, num_microbatches: int, times: StageTimes
) -> PipelineTime:
    """Times of the pipeline ranks under a schedule; with a fast path a long step costs no more than a short one.

    >>> time_pipeline("1f1b", 2, 1, 4, StageTimes((1.0, 1.0), (2.0, 2.0), (0.5,)))
    PipelineTime(total_s=17.0, busy_s=(12.0, 12.0), finished_s=(17.0, 14.5))
    """
    p, v, m = num_ranks, virtual_stages, num_microbatches
    played = _check(schedule, p, v, m, times)
    placement = played.place(p, v)
    if played.fast:
        finished_s = played.fast(p, v, m, times)
    elif played.enough:
        finished_s = play_rounds(played, placement, m, times)
    else:
        finished_s = play_actions(played, placement, m, times)
    busy_s = _busy(placement, m, times)
    return PipelineTime(total_s=max(finished_s), busy_s=busy_s, finished_s=tuple(finished_s))


def time_shared_pipeline(
    schedule: str, num_ranks: int, virtual_stages: int, num_microbatches: int, times: StageTimes, at_once: float
) -> PipelineTime:
    """Times of ranks that share cores, of which `at_once` ranks have their full speed at the same time.

    While n ranks compute, each has `at_once`/n of its speed, or all of it where n is no more than `at_once`. So a rank
    that waits speeds up the others, and a bubble costs little. `times` are those of a rank alone. `busy_s` counts the
    time in which a rank works, at whatever speed. Every action is played, which is meant for the few ranks of one
    machine.

    >>> time_shared_pipeline("1f1b", 2, 1, 4, StageTimes((1.0, 1.0), (2.0, 2.0), (0.5,)), at_once=2).total_s
    17.0
    >>> time_shared_pipeline("1f1b", 2, 1, 4, StageTimes((1.0, 1.0), (2.0, 2.0), (0.0,)), at_once=1).total_s
    24.0
    """
    played = find_schedule(schedule)
    placement = played.place(num_ranks, virtual_stages)
    orders = played.orders(placement, num_microbatches)
    next_of, left_s = [0] * num_ranks, [0.0] * num_ranks  # for each rank: the action that it does or waits for
    end_of: dict[Result, float] = {}
    working: set[int] = set()
    busy_s, finished_s = [0.0] * num_ranks, [0.0] * num_ranks
    now = 0.0

    def ready_s(rank: int) -> float:
        """Time at which the next action of a rank has its input; inf while that is not known."""
        if next_of[rank] == len(orders[rank]):
            return inf
        action = orders[rank][next_of[rank]]
        needed = input_of(action, placement.num_stages)
        if needed is None:
            return 0.0
        return end_of[needed] + _message_delay_s(placement, times, needed, action) if needed in end_of else inf

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


def play_actions(schedule: PipelineSchedule, placement: Placement, m: int, times: StageTimes) -> list[float]:
    """End of each rank's last action; every action is played."""
    return [ends[-1] for ends in find_ends(schedule.orders(placement, m), placement, m, times)]


def find_ends(orders: Sequence[Sequence[Action]], placement: Placement, m: int, times: StageTimes) -> list[list[float]]:
    """The ends of `play_spans`, of each rank's actions in their order, for a third of its time.

    Results have numbers, and all that is alike for the microbatches of a stage is looked up once.
    """
    n = placement.num_stages
    facts = {}
    for stage in range(n):
        for kind in COMPUTE:
            action = Action(kind, stage, 0)
            needed, made = input_of(action, n), result_of(action)
            delay_s = 0.0 if needed is None else _message_delay_s(placement, times, needed, action)
            receiver = None if made is None else placement.receiver_of(made)
            needed_at = None if needed is None else (needed.is_gradient * n + needed.stage) * m
            made_at = None if made is None else (made.is_gradient * n + made.stage) * m
            seconds = 0.0 if kind in _HALVES and not times.backward_weight_s else times.seconds(action)
            facts[kind, stage] = seconds, needed_at, delay_s, made_at, receiver
    end_of: list[float | None] = [None] * (2 * n * m)
    ends: list[list[float]] = [[] for _ in orders]
    free = [0.0] * len(orders)
    runnable = list(range(len(orders)))
    while runnable:
        rank = runnable.pop()
        order, own, now = orders[rank], ends[rank], free[rank]
        for place in range(len(own), len(order)):
            kind, stage, microbatch = order[place]
            seconds, needed_at, delay_s, made_at, receiver = facts[kind, stage]
            if needed_at is not None:
                if (ready := end_of[needed_at + microbatch]) is None:
                    break
                ready += delay_s
                now = ready if ready > now else now
            now += seconds
            own.append(now)
            if made_at is not None:
                end_of[made_at + microbatch] = now
                if receiver is not None:
                    runnable.append(receiver)
        free[rank] = now
    waiting = [str(order[len(done)]) for order, done in zip(orders, ends, strict=True) if len(done) < len(order)]
    assert not waiting, f"an order waits for itself, at {', '.join(waiting)}"
    return ends


_HALVES = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
"""Kinds of a backward in two parts, whose seconds are not known where none is split."""


def play_spans(schedule: PipelineSchedule, placement: Placement, m: int, times: StageTimes) -> list[list[Span]]:
    """Times of each rank's actions; every action is played."""
    delay_s = partial(_message_delay_s, placement, times)
    return simulate(schedule.orders(placement, m), placement, times.seconds, delay_s)


def play_rounds(schedule: PipelineSchedule, placement: Placement, m: int, times: StageTimes) -> list[float]:
    """`play_actions` for a schedule that repeats itself: only as many rounds are played as it takes until they repeat.

    A round is 2p microbatches, which is as far as an action depends on others. Suppose that all actions of a round end
    by the same growth later than those of c rounds before. Then so do all that follow, for any number of times c rounds
    (schedules/fast_timing.py, [Note: skipping equal periods]).
    """
    length = 2 * placement.num_ranks
    whole, rest = divmod(m, length)
    rounds = 4
    while rounds < whole:
        orders = schedule.orders(placement, rounds * length + rest)
        ends = find_ends(orders, placement, rounds * length + rest, times)
        cycle, growth = _find_cycle(orders, ends, length, rounds - 2)
        if cycle:
            num_skips, left = divmod(whole - rounds, cycle)
            finished_s = [own[-1] for own in ends]
            if left:
                finished_s = play_actions(schedule, placement, (rounds + left) * length + rest, times)
            return [end + num_skips * growth for end in finished_s]
        rounds *= 2
    return play_actions(schedule, placement, m, times)


def _find_cycle(
    orders: Sequence[Sequence[Action]], ends: Sequence[Sequence[float]], length: int, last: int
) -> tuple[int, float]:
    """(c, growth): all actions c rounds before the `last` one ended by the same growth earlier; (0, 0) if none."""
    ends_of = [dict[tuple[Kind, int, int], float]() for _ in range(last + 1)]
    for (kind, stage, microbatch), end in zip(chain.from_iterable(orders), chain.from_iterable(ends), strict=True):
        round_, place = divmod(microbatch, length)
        if round_ <= last:
            ends_of[round_][kind, stage, place] = end
    for cycle in range(1, last + 1):
        before, after = ends_of[last - cycle], ends_of[last]
        if before.keys() == after.keys():  # at first other backwards may be split
            growths = [end - before[action] for action, end in after.items()]
            if max(growths) - min(growths) <= TOLERANCE * growths[0]:
                return cycle, growths[0]
    return 0, 0.0


def in_flight_peaks(
    schedule: str,
    num_ranks: int,
    virtual_stages: int,
    num_microbatches: int,
    rank: int,
    until: tuple[Kind, ...] = RELEASE,
    *,
    with_gradients: bool = False,
) -> tuple[Moment, ...]:
    """The moments at which a rank can hold most: microbatches in flight of each of its chunks.

    A microbatch is held from the start of its forward to the end of its backward, or of the last part of it. `until`
    names the kinds of action that end it, if others. The most bytes that are ever held are the largest of
    `weigh_moments`, whatever a microbatch takes in each chunk; no moment is below another in all chunks.

    `with_gradients` asks only for moments at which gradients of all chunks accumulate: each chunk has had a backward,
    and its last one is not over. There may be none. A rank's actions are played, unless the schedule gives the moments
    itself.

    >>> in_flight_peaks("interleaved-1f1b", 2, 2, 4, rank=0)
    (((4, 1), (1, 1)), ((3, 1), (2, 1)))
    """
    played = _check(schedule, num_ranks, virtual_stages, num_microbatches)
    placement = played.place(num_ranks, virtual_stages)
    if played.is_breadth_first:  # its moments are a row of microbatches or none
        if with_gradients:  # all chunks have them only in the last row of backwards, which frees memory
            return ()
        return count_in_flight(played, placement, 1, rank, each=num_microbatches, until=until)
    shortened = played.shorten(num_ranks, virtual_stages, num_microbatches)
    if played.in_flight:
        return played.in_flight(num_ranks, virtual_stages, shortened, rank, with_gradients)
    return count_in_flight(played, placement, shortened, rank, until=until, with_gradients=with_gradients)


def weigh_moments(moments: Sequence[Moment], sizes: Sequence[float]) -> list[float]:
    """Size that a rank holds at each of these moments; `sizes` are those of a microbatch in each chunk."""
    if len(sizes) == 1:
        return [moment[0][0] * sizes[0] for moment in moments]
    if not any(sizes):  # for example of recomputed blocks, where no block is recomputed
        return [0.0] * len(moments)
    before = list(accumulate(sizes, initial=0.0))
    held = []
    for moment in moments:
        start, total = 0, 0.0
        for count, length in moment:
            total += count * (before[start + length] - before[start])
            start += length
        held.append(total)
    return held


@lru_cache(maxsize=1024)
def count_in_flight(
    schedule: PipelineSchedule,
    placement: Placement,
    m: int,
    rank: int,
    each: int = 1,
    until: tuple[Kind, ...] = RELEASE,
    with_gradients: bool = False,
) -> tuple[Moment, ...]:
    """The answer of `in_flight_peaks`, counted by playing the actions of `rank`.

    An action stands for `each` microbatches, so the step has `m` times `each`. `until` and `with_gradients` are as
    there.
    """
    counts, grows = [0] * placement.virtual_stages, False
    num_done = [0] * placement.virtual_stages
    moments: set[tuple[int, ...]] = set()
    for action in schedule.order(placement, rank, m):
        chunk = placement.chunk_of(action.stage)
        if action.kind is Kind.FORWARD:
            counts[chunk] += each
            grows = True
        elif action.kind in until:
            if grows and (not with_gradients or 0 < min(num_done) <= max(num_done) < m):
                moments.add(tuple(counts))
            counts[chunk] -= each
            grows = False
        if action.kind in RELEASE:
            num_done[chunk] += 1
            grows |= num_done[chunk] == 1  # gradients of one more chunk may be there now

    largest: list[tuple[int, ...]] = []
    for _, alike in groupby(sorted(moments, key=sum, reverse=True), key=sum):
        largest += [one for one in alike if not any(all(map(le, one, other)) for other in largest)]
    return tuple(tuple((n, len(list(run))) for n, run in groupby(moment)) for moment in sorted(largest, reverse=True))


def _check(schedule: str, p: int, v: int, m: int, times: StageTimes | None = None) -> PipelineSchedule:
    played = find_schedule(schedule)
    assert p > 0 and v > 0 and m > 0, f"a pipeline of {p} ranks, {v} virtual stages and {m} microbatches does nothing"
    most = played.most_virtual_stages
    assert v <= most, f"{schedule} has at most {most} stages on each rank, not {v}"
    fits = not played.whole_rounds or m % p == 0
    assert fits, f"{schedule} goes in rounds of {p} microbatches, which do not divide {m}"
    if times:
        lengths = len(times.forward_s), len(times.backward_s), len(times.message_s)
        expected = p * v, p * v, p * v - 1
        assert lengths == expected, f"{p * v} stages take {expected} forwards, backwards and messages, not {lengths}"
        are_split = len(times.backward_weight_s) == p * v or not played.splits_backward
        assert are_split, f"{schedule} splits backwards in two"
    return played


def _busy(placement: Placement, m: int, times: StageTimes) -> tuple[float, ...]:
    of_ranks = [[placement.take(s, r) for s in (times.forward_s, times.backward_s)] for r in range(placement.num_ranks)]
    return tuple([m * (sum(forward_s) + sum(backward_s)) for forward_s, backward_s in of_ranks])
