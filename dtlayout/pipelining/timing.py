"""Timing: how long the pipeline of one training step takes, from the seconds of each stage. Pure Python.

p pipeline ranks, v virtual stages on each, m microbatches; stage s of n = p·v lives on rank s mod p, as chunk s // p.
`time_pipeline` times a schedule of `dtlayout.pipelining.schedule`, `lower_bound` bounds it without playing it,
`in_flight_peaks` counts the microbatches whose activations it holds. A rank does its actions in order; a forward waits
for the stage before, a backward for the stage after, and for the message between them.
Left out: that messages share a link, and that a rank's kernels slow down while it sends.

[Note: waves]
1F1B is played in waves. In each wave a rank does at most one forward and then one backward, and all that they wait for
is in the wave before (or is the forward of the rank before, in the same one), so a wave needs only the ends of the last
one. Forwards and backwards of a rank numbered in their order, wave t is, on rank r,

    1f1b              forward t      and  backward t - (p - 1) + r
    interleaved-1f1b  forward t - r  and  backward t - w + r,       w = (v - 1)·p + 2·(p - 1), the warm-up of rank 0

where a number below 0 or past the last one is no action. That is the order of `make_orders`: rank r does its first
forward p - 1 - r (1f1b) or w - 2r waves before its first backward, which is its warm-up.

[Note: skipping equal periods]
From the end of the warm-up until forwards run out, waves repeat: each is like the last under 1f1b, like the p·v-th
before under interleaved-1f1b. So the ends x after a period follow from those before it by one function, x' = A(x), of
sums and maxima only, and what comes after the steady part follows from its last x by another. Both commute with adding
a constant to all of x. So once all ends lie one same growth g above those of c periods ago, they do so again every c
periods, for ever, and any number of times c periods can be skipped by adding that many g. Nothing can overtake later: a
loop that is slower by 0.01 % but not yet in the lead moves some end by that much more than the others, and as long as
any end differs we don't skip. c is often 1, but a critical loop through L stages, F…F B…B, holds L microbatches and
repeats only every L waves; so x is compared with a mark whose distance doubles (R. Brent, BIT 20 (1980), 176-184),
which finds any c. Ends that agree up to e each give an error up to e per skip, since A never widens a difference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import inf
from operator import sub

_TOLERANCE = 1e-11
"""Ends that differ by this share of a period's growth are equal; it bounds the relative error of the total."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds that one microbatch takes on each of the n stages."""

    forward_s: tuple[float, ...]
    """Forward of each stage."""

    backward_s: tuple[float, ...]
    """Backward of each stage."""

    message_s: tuple[float, ...]
    """From stage i to stage i + 1 or back, n - 1 entries: the receiver waits that long, the sender goes on at once."""


@dataclass(frozen=True)
class PipelineTime:
    """When the pipeline ranks work, from the start of the first action on."""

    total_s: float
    """End of the last action."""

    busy_s: tuple[float, ...]
    """Per rank: its forwards and backwards, without the waits between them."""

    finished_s: tuple[float, ...]
    """Per rank: end of its last action; what comes after the pipeline may begin there."""


def time_pipeline(
    schedule: str, num_ranks: int, virtual_stages: int, num_microbatches: int, times: StageTimes
) -> PipelineTime:
    """Play a schedule with the given times; a long step soon repeats itself, [Note: skipping equal periods].

    >>> time_pipeline("1f1b", 2, 1, 4, StageTimes((1.0, 1.0), (2.0, 2.0), (0.5,)))
    PipelineTime(total_s=17.0, busy_s=(12.0, 12.0), finished_s=(17.0, 14.5))
    """
    p, v, m = num_ranks, virtual_stages, num_microbatches
    _check(schedule, p, v, m, times)
    finished_s = _FINISH[schedule](p, v, m, times)
    return PipelineTime(total_s=max(finished_s), busy_s=_busy(p, m, times), finished_s=tuple(finished_s))


def lower_bound(schedule: str, num_ranks: int, virtual_stages: int, num_microbatches: int, times: StageTimes) -> float:
    """Seconds that the pipeline takes at least; exact for equal stages without messages.

    Rank r is busy after the first microbatch has come down to it and before the last one has gone back up from it.
    """
    _check(schedule, num_ranks, virtual_stages, num_microbatches, times)
    to_last_rank = slice(num_ranks - 1)
    hops = zip(
        times.forward_s[to_last_rank], times.backward_s[to_last_rank], times.message_s[to_last_rank], strict=True
    )
    fill_and_drain_s = accumulate((f + b + 2 * message for f, b, message in hops), initial=0.0)
    busy_s = _busy(num_ranks, num_microbatches, times)
    return max(away + busy for away, busy in zip(fill_and_drain_s, busy_s, strict=True))


@lru_cache(maxsize=1024)
def in_flight_peaks(
    schedule: str, num_ranks: int, virtual_stages: int, num_microbatches: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each rank the moments at which it can hold most: microbatches in flight of each of its chunks, chunk 0 first.

    A microbatch is held from the start of its forward to the end of its backward. Whatever one of them takes in each
    chunk, the most that is ever held is the largest sum over these vectors; none is below another. Moments that are a
    mix of two others, and so never hold more than both, are left out.

    >>> in_flight_peaks("interleaved-1f1b", 2, 2, 4)
    (((4, 1), (3, 2)), ((3, 0), (2, 1)))
    """
    p, v, m = num_ranks, virtual_stages, num_microbatches
    _check_sizes(schedule, p, v, m)
    if schedule == "gpipe":
        return (((m,),),) * p
    if schedule == "1f1b":
        return tuple(((min(p - rank, m),),) for rank in range(p))
    return tuple(_interleaved_peaks(p, v, m, warm_up=_warm_up(rank, p, v)) for rank in range(p))


def _interleaved_peaks(p: int, v: int, m: int, warm_up: int) -> tuple[tuple[int, ...], ...]:
    """After the warm-up it holds most between a forward and the backward that follows, warm_up + 1 in all.

    From one such moment to the next the chunk of the forward gains one and the chunk of the backward loses one. That
    changes where either goes on to another chunk, and all repeats after p·v moments. Where the forward goes on it holds
    what it holds at some moment where the backward does: those, every p moments, are enough.
    """

    def started(num_actions: int) -> list[int]:
        rounds, rest = divmod(num_actions, p * v)
        num_full, part = divmod(rest, p)
        return [(rounds + 1) * p] * num_full + [rounds * p + part] + [rounds * p] * (v - num_full - 1)

    if m * v <= warm_up:
        return ((m,) * v,)
    num_moments = min(p * v, m * v - warm_up)
    held = {tuple(map(sub, started(warm_up + n + 1), reversed(started(n)))) for n in range(0, num_moments, p)}
    return tuple(sorted(held, reverse=True))


def _warm_up(rank: int, p: int, v: int) -> int:
    """Forwards of a rank before the one that its first backward follows, under interleaved-1f1b."""
    return (v - 1) * p + 2 * (p - 1 - rank)


def _check_sizes(schedule: str, p: int, v: int, m: int) -> None:
    assert schedule in _FINISH, f"{schedule} is no schedule; one of {', '.join(_FINISH)}"
    assert p > 0 and v > 0 and m > 0, f"a pipeline of {p} ranks, {v} virtual stages and {m} microbatches does nothing"
    if schedule == "interleaved-1f1b":
        assert m % p == 0, f"interleaved-1f1b goes in rounds of {p} microbatches, which do not divide {m}"
    else:
        assert v == 1, f"{schedule} has one stage on each rank, not {v}"


def _check(schedule: str, p: int, v: int, m: int, times: StageTimes) -> None:
    _check_sizes(schedule, p, v, m)
    lengths = len(times.forward_s), len(times.backward_s), len(times.message_s)
    expected = p * v, p * v, p * v - 1
    assert lengths == expected, f"{p * v} stages take {expected} forwards, backwards and messages, not {lengths}"


def _busy(p: int, m: int, times: StageTimes) -> tuple[float, ...]:
    return tuple(m * (sum(times.forward_s[rank::p]) + sum(times.backward_s[rank::p])) for rank in range(p))


def _finish_gpipe(p: int, v: int, m: int, times: StageTimes) -> list[float]:
    """All forwards flow to the last rank, then all backwards flow back: the first one's way, then the slowest's pace.

    No rank is still at its forwards when its first backward comes.
    """
    turn_s = sum(times.forward_s) + sum(times.message_s) + (m - 1) * max(times.forward_s)
    from_last = list(zip(times.backward_s, (*times.message_s, 0.0), strict=True))[::-1]
    way_s = accumulate(backward + message for backward, message in from_last)
    pace_s = accumulate((backward for backward, _ in from_last), max)
    return [turn_s + way + (m - 1) * pace for way, pace in zip(way_s, pace_s, strict=True)][::-1]


_Work = tuple[float, float]  # seconds of an action; seconds from the end of what it waits for to its start
_Wave = list[tuple[_Work, _Work]]  # per rank: forward, backward
_IDLE: _Work = (0.0, -inf)


def _work_of_stages(times: StageTimes) -> tuple[list[_Work], list[_Work]]:
    """Forward and backward of each stage. The first forward waits for no stage, nor does the last backward."""
    forwards = zip(times.forward_s, (-inf, *times.message_s), strict=True)
    backwards = zip(times.backward_s, (*times.message_s, -inf), strict=True)
    return list(forwards), list(backwards)


def _finish_1f1b(p: int, v: int, m: int, times: StageTimes) -> list[float]:
    forwards, backwards = _work_of_stages(times)

    def wave(t: int) -> _Wave:
        return [
            (forwards[r] if t < m else _IDLE, backwards[r] if 0 <= t - (p - 1) + r < m else _IDLE) for r in range(p)
        ]

    return _play(_advance_1f1b, [0.0] * p, wave, num_waves=m + p - 1, steady=range(p - 1, m), period=1)


def _advance_1f1b(ends: list[float], wave: _Wave) -> list[float]:
    """One wave on: `ends` has for each rank the end of what it did last."""
    after = []
    forward_end = 0.0
    for own, behind, ((forward_s, forward_delay), (backward_s, backward_delay)) in zip(
        ends, [*ends[1:], 0.0], wave, strict=True
    ):
        ready = forward_end + forward_delay
        forward_end = (own if own > ready else ready) + forward_s
        ready = behind + backward_delay
        after.append((forward_end if forward_end > ready else ready) + backward_s)
    return after


def _finish_interleaved_1f1b(p: int, v: int, m: int, times: StageTimes) -> list[float]:
    forwards, backwards = _work_of_stages(times)
    warm_up = _warm_up(0, p, v)

    def wave(t: int) -> _Wave:
        works = []
        for rank in range(p):
            nth_forward, nth_backward = t - rank, t - warm_up + rank
            forward_chunk, backward_chunk = nth_forward // p % v, v - 1 - nth_backward // p % v
            works.append(
                (
                    forwards[forward_chunk * p + rank] if 0 <= nth_forward < m * v else _IDLE,
                    backwards[backward_chunk * p + rank] if 0 <= nth_backward < m * v else _IDLE,
                )
            )
        return works

    ends = _play(
        _advance_interleaved, [0.0] * (2 * p), wave,
        num_waves=m * v + warm_up, steady=range(warm_up, m * v), period=p * v,
    )  # fmt: skip
    return ends[p:]


def _advance_interleaved(ends: list[float], wave: _Wave) -> list[float]:
    """One wave on: `ends` has for each rank the end of its forward of the last wave, then, for each, of all it did."""
    p = len(wave)
    sent, own = ends[:p], ends[p:]
    forward_ends = []
    after = []
    for free, before, behind, ((forward_s, forward_delay), (backward_s, backward_delay)) in zip(
        own, [sent[-1], *sent[:-1]], [*own[1:], own[0]], wave, strict=True
    ):
        ready = before + forward_delay
        forward_end = (free if free > ready else ready) + forward_s
        forward_ends.append(forward_end)
        ready = behind + backward_delay
        after.append((forward_end if forward_end > ready else ready) + backward_s)
    return forward_ends + after


_FINISH: dict[str, Callable[[int, int, int, StageTimes], list[float]]] = {
    "gpipe": _finish_gpipe,
    "1f1b": _finish_1f1b,
    "interleaved-1f1b": _finish_interleaved_1f1b,
}


def _play(
    advance: Callable[[list[float], _Wave], list[float]],
    ends: list[float],
    wave: Callable[[int], _Wave],
    num_waves: int,
    steady: range,
    period: int,
) -> list[float]:
    """The ends after all waves, of which those in `steady` repeat with `period`."""
    num_periods = len(steady) // period
    for t in range(steady.start):
        ends = advance(ends, wave(t))
    if num_periods:
        ends = _play_periods(advance, ends, [wave(steady.start + t) for t in range(period)], num_periods)
    for t in range(steady.start + num_periods * period, num_waves):
        ends = advance(ends, wave(t))
    return ends


def _play_periods(
    advance: Callable[[list[float], _Wave], list[float]], ends: list[float], waves: list[_Wave], num_periods: int
) -> list[float]:
    """The ends after so many rounds through the waves, see [Note: skipping equal periods]."""
    mark, marked_at = ends, 0
    done = 0
    while done < num_periods:
        for wave in waves:
            ends = advance(ends, wave)
        done += 1
        growth = ends[0] - mark[0]
        slack = _TOLERANCE * growth
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
