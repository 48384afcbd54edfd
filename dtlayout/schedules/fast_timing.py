"""Fast timing of the shipped schedules: the results of playing all actions, in closed form or wave by wave.

p pipeline ranks, v virtual stages on each, m microbatches, looped: stage s of n = p·v lies on rank s mod p as chunk s
// p. A schedule without a fast path is played action by action (timing.py), which is right for any schedule, and
slower.

[Note: waves]
1F1B is played in waves. In each wave a rank does at most one forward and then one backward. Their inputs come from the
wave before, or from the forward of the rank before in the same wave. So a wave needs only the ends of the last one.
With the forwards and backwards of a rank numbered in their order, wave t is on rank r

    1f1b              forward t      and  backward t - (p - 1) + r
    interleaved-1f1b  forward t - r  and  backward t - w + r,       w = (v - 1)·p + 2·(p - 1), the warm-up of rank 0

where a number below 0 or past the last one is no action. That is the order of schedules.py: rank r does its first
forward p - 1 - r (1f1b) or w - 2r waves before its first backward, which is its warm-up.

[Note: skipping equal periods]
From the end of the warm-up until forwards run out, waves repeat. Each is like the last one under 1f1b, and like the
p·v-th before under interleaved-1f1b. So the ends x after a period follow from those before it by one function, x' =
A(x), of sums and maxima only. Another such function gives the end of the step from the last x of the steady part. Both
commute with adding a constant to all of x.

So once all ends lie by one same growth g above those of c periods ago, they do so again every c periods, for ever. Then
any number of times c periods can be skipped by adding that many g. Nothing can overtake later: take a loop that is
slower by 0.01 % but not yet in the lead. It moves some end by that much more than the others, and while any end
differs, nothing is skipped. c is often 1. But a critical loop through L stages, F…F B…B, holds L microbatches and
repeats only every L waves. So x is compared with a mark whose distance doubles (R. Brent, BIT 20 (1980), 176-184),
which finds any c. Ends that agree up to e each give an error of up to e per skip, since A never widens a difference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from math import inf
from operator import itemgetter, sub

from dtlayout.schedules.actions import Action, Kind

TOLERANCE = 1e-11
"""Ends that differ by this fraction of a period's growth count as equal; it bounds the relative error of the total."""

Moment = tuple[tuple[int, int], ...]
"""Microbatches that a rank holds at one moment, as runs of equal counts from chunk 0 on: (count, chunks in the run)."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds that one microbatch takes on each of the n stages."""

    forward_s: tuple[float, ...]
    """Forward of each stage."""
    backward_s: tuple[float, ...]
    """Whole backward of each stage."""
    message_s: tuple[float, ...]
    """Seconds from stage i to stage i + 1 or back, n - 1 entries: the receiver waits that long, the sender goes on at
    once."""
    backward_weight_s: tuple[float, ...] = ()
    """Part of each stage's backward that makes the weights' gradients; empty where no backward is split in two."""

    @cached_property
    def backward_input_s(self) -> tuple[float, ...]:
        """Part of each stage's backward that makes the gradient of its input."""
        return tuple(map(sub, self.backward_s, self.backward_weight_s))

    def seconds(self, action: Action) -> float:
        """Seconds of a forward, a backward or a part of one."""
        match action.kind:
            case Kind.FORWARD:
                return self.forward_s[action.stage]
            case Kind.BACKWARD:
                return self.backward_s[action.stage]
            case Kind.BACKWARD_INPUT:
                return self.backward_input_s[action.stage]
        return self.backward_weight_s[action.stage]


def finish_gpipe(p: int, v: int, m: int, times: StageTimes) -> list[float]:
    """End of each rank's last action: all forwards flow to the last rank, then all backwards flow back.

    Each way takes the first microbatch's time plus m - 1 times the slowest stage. No rank is still at its forwards when
    its first backward comes.
    """
    turn_s = sum(times.forward_s) + sum(times.message_s) + (m - 1) * max(times.forward_s)
    from_last = list(zip(times.backward_s, (*times.message_s, 0.0), strict=True))[::-1]
    way_s = accumulate(backward + message for backward, message in from_last)
    pace_s = accumulate((backward for backward, _ in from_last), max)
    return [turn_s + way + (m - 1) * pace for way, pace in zip(way_s, pace_s, strict=True)][::-1]


_Work = tuple[float, float]  # seconds of an action; seconds from the end of its input to its start
_Wave = tuple[list[_Work], list[_Work]]  # forwards and backwards, rank 0 first
_Advance = Callable[[list[float], _Wave], list[float]]
_IDLE: _Work = (0.0, -inf)


def finish_1f1b(p: int, v: int, m: int, times: StageTimes) -> list[float]:
    """End of each rank's last action, by [Note: waves]."""
    return _play(p, v, m, times, _advance_1f1b, [0.0] * p, warm_up=p - 1, is_skewed=False)


def _advance_1f1b(ends: list[float], wave: _Wave) -> list[float]:
    """Ends after one more wave; `ends` has for each rank the end of its last action."""
    after = []
    forward_end = 0.0
    for own, behind, (forward_s, forward_delay), (backward_s, backward_delay) in zip(
        ends, [*ends[1:], 0.0], *wave, strict=True
    ):
        ready = forward_end + forward_delay
        forward_end = (own if own > ready else ready) + forward_s
        ready = behind + backward_delay
        after.append((forward_end if forward_end > ready else ready) + backward_s)
    return after


def least_1f1b(m: int, times: StageTimes) -> float:
    """Lower bound of the step's seconds: one microbatch's way through all ranks and back, and the wait before it.

    A rank with n = p - r microbatches in flight does its forward k + n after its backward k. That backward comes once
    the forward k has gone from there to the last rank and back. Of the m - 1 = q·n + j microbatches before the last
    one, q cost that way around, and j cost the rank's own work. Where there is no backward between them, j cost the
    forwards alone.
    """
    around_s = longest_s = 0.0
    from_last = zip(times.forward_s[::-1], times.backward_s[::-1], (0.0, *times.message_s[::-1]), strict=True)
    for n, (forward_s, backward_s, message_s) in enumerate(from_last, start=1):
        around_s += forward_s + backward_s + 2 * message_s
        q, j = divmod(m - 1, n)
        waited_s = q * around_s + j * (forward_s + (backward_s if q else 0.0))
        longest_s = waited_s if waited_s > longest_s else longest_s
    return around_s + longest_s


def finish_interleaved_1f1b(p: int, v: int, m: int, times: StageTimes) -> list[float]:
    """End of each rank's last action, by [Note: waves]."""
    ends = [0.0] * (2 * p)
    return _play(p, v, m, times, _advance_interleaved, ends, warm_up=_warm_up(0, p, v), is_skewed=True)


def _advance_interleaved(ends: list[float], wave: _Wave) -> list[float]:
    """Ends after one more wave, in seconds.

    `ends` has two numbers for each rank: first the ends of all ranks' last forwards, and after these the ends of all
    ranks' last actions.
    """
    p = len(ends) // 2
    sent, own = ends[:p], ends[p:]
    forward_ends = []
    after = []
    for free, before, behind, (forward_s, forward_delay), (backward_s, backward_delay) in zip(
        own, [sent[-1], *sent[:-1]], [*own[1:], own[0]], *wave, strict=True
    ):
        ready = before + forward_delay
        forward_end = (free if free > ready else ready) + forward_s
        forward_ends.append(forward_end)
        ready = behind + backward_delay
        after.append((forward_end if forward_end > ready else ready) + backward_s)
    return forward_ends + after


def _play(
    p: int, v: int, m: int, times: StageTimes, advance: _Advance, ends: list[float], *, warm_up: int, is_skewed: bool
) -> list[float]:
    """The last p ends after all waves; the waves of the steady part repeat, see [Note: skipping equal periods].

    `warm_up` is the wave of rank 0's first backward. Where waves are skewed, each rank is one forward behind the rank
    before it.
    """
    messages_s = times.message_s if p > 1 else (0.0,) * (v - 1)  # one rank sends itself nothing
    # The first forward waits for no stage, nor does the last backward.
    forwards = _cut_rounds(p, list(zip(times.forward_s, (-inf, *messages_s), strict=True)))
    backwards = _cut_rounds(p, list(zip(times.backward_s, (*messages_s, -inf), strict=True)))[::-1]
    last_first = [each[::-1] for each in forwards]

    def rising(rounds: list[list[_Work]], n: int) -> list[_Work]:
        """Work of all ranks where rank r does its action n + r; the rounds are done in turn."""
        turn, start, end = p - n % p, max(0, min(p, -n)), max(0, min(p, m * v - n))
        works = rounds[n // p % v][:turn] + rounds[(n // p + 1) % v][turn:]
        return [_IDLE] * start + works[start:end] + [_IDLE] * (p - end)

    def wave(t: int) -> _Wave:
        if is_skewed:
            forward = rising(last_first, t - (p - 1))[::-1]
        else:
            forward = forwards[0] if t < m else [_IDLE] * p
        return forward, rising(backwards, t - warm_up)

    period = p * v if is_skewed else 1
    num_periods = max(0, m * v - warm_up) // period
    for t in range(warm_up):
        ends = advance(ends, wave(t))
    if num_periods:
        ends = _play_periods(advance, ends, [wave(warm_up + t) for t in range(period)], num_periods)
    for t in range(warm_up + num_periods * period, m * v + warm_up):
        ends = advance(ends, wave(t))
    return ends[-p:]


def _cut_rounds(p: int, works: list[_Work]) -> list[list[_Work]]:
    """Works of stages by chunk: the first of all ranks, then the second of all ranks, and so on."""
    return [works[start : start + p] for start in range(0, len(works), p)]


def _play_periods(advance: _Advance, ends: list[float], waves: list[_Wave], num_periods: int) -> list[float]:
    """Ends after `num_periods` rounds through the waves, see [Note: skipping equal periods]."""
    mark, marked_at = ends, 0
    done = 0
    while done < num_periods:
        for wave in waves:
            ends = advance(ends, wave)
        done += 1
        growth = ends[0] - mark[0]
        slack = TOLERANCE * growth
        if abs(ends[-1] - mark[-1] - growth) <= slack and all(
            abs(end - marked - growth) <= slack for end, marked in zip(ends, mark, strict=True)
        ):
            length = done - marked_at
            num_skips = (num_periods - done) // length
            ends = [end + num_skips * growth for end in ends]
            done += num_skips * length
        elif done >= 2 * marked_at:
            mark, marked_at = ends, done
    return ends


@lru_cache(maxsize=1024)
def hold_rounds(p: int, v: int, m: int, rank: int, with_gradients: bool) -> tuple[Moment, ...]:
    """`timing.in_flight_peaks` of interleaved-1f1b, or enough of its moments to hold the peak for any sizes of chunks.

    After the warm-up a rank holds most between a forward and the backward that follows, warm_up + 1 microbatches in
    all. From one such moment to the next, the chunk of the forward gains one and the chunk of the backward loses one.
    That changes where the forward or the backward goes on to another chunk, and all repeats after p·v moments. The
    moment at which the forward goes on equals some moment at which the backward goes on. So the latter, every p
    moments, are enough.

    Chunk 0 has gradients from the last p backwards of a round on. Those of the other chunks still accumulate if another
    round follows. If two rounds follow, a rank then holds all that it ever does. If one follows, few forwards are left.
    Then the moments count at which the forward or the backward goes on, and the first and the last moment.
    """
    warm_up = _warm_up(rank, p, v)
    if with_gradients and m >= 3 * p:
        return hold_rounds(p, v, m, rank, False)
    if with_gradients and m == p:
        return ()
    if m * v <= warm_up:
        return (((m, v),),)

    def started(num_actions: int, place: int) -> int:
        """Number of the first `num_actions` actions that belong to the chunk at this place of a round."""
        rounds, rest = divmod(num_actions, p * v)
        return rounds * p + min(p, max(0, rest - place * p))

    def held(n: int) -> Moment:
        num_forwards = warm_up + n + 1
        forward_place, backward_place = num_forwards // p % v, v - 1 - n // p % v
        ends = {0, v, forward_place, forward_place + 1, backward_place, backward_place + 1}
        cuts = [c for c in sorted(ends) if c <= v]
        runs = [(started(num_forwards, c) - started(n, v - 1 - c), end - c) for c, end in pairwise(cuts)]
        return tuple((count, sum(length for _, length in run)) for count, run in groupby(runs, key=itemgetter(0)))

    num_moments = m * v - warm_up
    if with_gradients:
        first, forward_goes_on = (v - 1) * p + 1, -(warm_up + 1) % p
        goes_on = [n for n in range(first, num_moments) if n % p in (0, forward_goes_on)]
        moments = [first, *goes_on, num_moments - 1]
    else:
        moments = [*range(0, min(p * v, num_moments), p)]
    return tuple(sorted({held(n) for n in moments}, reverse=True))


def _warm_up(rank: int, p: int, v: int) -> int:
    """Forwards of a rank before the forward that its first backward follows, under interleaved-1f1b."""
    return (v - 1) * p + 2 * (p - 1 - rank)
