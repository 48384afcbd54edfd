"""Orders of zero-bubble schedules, whose backwards are split: gradients of inputs come early, those of weights late.

    forwards and gradients of inputs, in an order of their own ─▶ gradients of weights where a rank would be idle

The first part is 1F1B's order (plain or interleaved), or a *building block* that each microbatch repeats some time
after the one before it (arXiv:2405.15362, sec. 3). The distance of its steps between neighbouring ranks decides how
long a rank keeps a microbatch, and so how much memory the pipeline needs. A rank that holds as many chunks of
microbatches as it may makes weights' gradients before its next forward. All orders are played with steps of equal
length.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import count
from math import ceil
from typing import NamedTuple

from dtlayout.schedules.actions import Action, Kind
from dtlayout.schedules.orders import order_1f1b, order_interleaved_1f1b
from dtlayout.schedules.placement import Placement

OrderFunction = Callable[[Placement, int, int], list[Action]]
"""A rank's actions, from the placement, the rank and m."""
_PERIOD = 6
"""Steps of one microbatch on a rank with two chunks: for each chunk a forward and both parts of a backward."""


class Offsets(NamedTuple):
    """Steps between neighbouring ranks for one microbatch, on each of the four ways down and up a V of two chunks."""

    forward_down: int
    forward_up: int
    backward_down: int
    backward_up: int


def order_zb_h1(placement: Placement, rank: int, m: int) -> list[Action]:
    """1F1B with split backwards; each rank holds as much as the first one, p microbatches."""
    return _fill_all(order_1f1b, placement, m, placement.num_ranks)[rank]


def order_interleaved_zb(placement: Placement, rank: int, m: int) -> list[Action]:
    """Interleaved 1F1B with split backwards; each rank holds as much as the first one."""
    p, v = placement.num_ranks, placement.virtual_stages
    return _fill_all(order_interleaved_1f1b, placement, m, (v - 1) * p + 2 * (p - 1) + 1)[rank]


def order_zb_v(placement: Placement, rank: int, m: int) -> list[Action]:
    """V-shaped; each rank holds as much as the first one under 1F1B: 2p halves of a microbatch."""
    return _fill_all(_ZB_V, placement, m, 2 * placement.num_ranks)[rank]


def order_v_half(placement: Placement, rank: int, m: int) -> list[Action]:
    """V-shaped; each rank holds p + 2 halves of a microbatch, little more than half of `order_zb_v`."""
    return _fill_all(_V_HALF, placement, m, placement.num_ranks + 2)[rank]


def order_v_min(placement: Placement, rank: int, m: int) -> list[Action]:
    """V-shaped; each rank holds little more than a third of `order_zb_v`.

    That is the least where forwards and backwards go on at once.
    """
    return _fill_all(_V_MIN, placement, m, ceil(2 * placement.num_ranks / 3) + 2)[rank]


def order_dualpipe_v(placement: Placement, rank: int, m: int) -> list[Action]:
    """DualPipe cut in half (arXiv:2412.19437, sec. 3.2.1): backwards are whole but where the pipeline fills and drains.

    Each forward and the whole backward after it are meant to overlap; here they follow each other.
    """
    p, (down, up) = placement.num_ranks, placement.stages_of(rank)
    later = p - 1 - rank
    numbers = {stage: (count(), count()) for stage in (down, up)}
    put_off = deque[Action]()

    def forward(stage: int) -> Action:
        return Action(Kind.FORWARD, stage, next(numbers[stage][0]))

    def backward(stage: int, *, is_split: bool = False) -> Action:
        microbatch = next(numbers[stage][1])
        if is_split:
            put_off.append(Action(Kind.BACKWARD_WEIGHT, stage, microbatch))
        return Action(Kind.BACKWARD_INPUT if is_split else Kind.BACKWARD, stage, microbatch)

    def steps() -> Iterator[Action]:
        for _ in range(2 * later):
            yield forward(down)
        for _ in range(rank + 1):
            yield from (forward(down), forward(up))
        for _ in range(later):
            yield from (backward(up, is_split=True), put_off.popleft(), forward(up))
        for _ in range(m - 2 * p + rank + 1):
            yield from (forward(down), backward(up), forward(up), backward(down))
        for _ in range(later):
            yield from (backward(up), forward(up), backward(down))
        for place in range(2 * (rank + 1)):  # the second half of these is split
            yield backward((up, down)[place % 2], is_split=place > rank)
        for _ in range(later):
            yield from (put_off.popleft(), backward(down, is_split=True))
        yield from put_off

    return list(steps())


def _repeat_block(offsets: Offsets, placement: Placement, rank: int, m: int) -> list[Action]:
    """Forwards and gradients of inputs of a rank in the order of their times."""
    stages, starts = placement.stages_of(rank), _block_starts(placement.num_ranks, offsets)[rank]
    kinds = (Kind.FORWARD, Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_INPUT)
    timed = [
        (start + _PERIOD * i, Action(kind, stage, i))
        for kind, stage, start in zip(kinds, (*stages, *reversed(stages)), starts, strict=True)
        for i in range(m)
    ]
    return [action for _, action in sorted(timed, key=lambda each: each[0])]


_ZB_V = partial(_repeat_block, Offsets(4, 2, 4, 2))
_V_HALF = partial(_repeat_block, Offsets(2, 1, 2, 1))
_V_MIN = partial(_repeat_block, Offsets(1, 1, 1, 1))


@lru_cache(maxsize=64)
def _block_starts(p: int, offsets: Offsets) -> list[tuple[int, int, int, int]]:
    """Start of the four steps of the first microbatch on each rank, as early as possible without collisions.

    Each of the four runs over all ranks starts after the end of the run before it, on the rank where that run turns
    back.
    """
    runs = [[rank * offsets.forward_down for rank in range(p)]]
    turns = ((offsets.forward_up, True), (offsets.backward_down, False), (offsets.backward_up, True))
    for offset, goes_up in turns:
        way = [(p - 1 - rank if goes_up else rank) * offset for rank in range(p)]
        first = p - 1 if goes_up else 0
        start = runs[-1][first] + 1
        while any((start + way[rank] - run[rank]) % _PERIOD == 0 for run in runs for rank in range(p)):
            start += 1
        runs.append([start + each for each in way])
    return [(a, b, c, d) for a, b, c, d in zip(*runs, strict=True)]


@lru_cache(maxsize=64)
def _fill_all(order: OrderFunction, placement: Placement, m: int, most_held: int) -> list[list[Action]]:
    """Each rank's order, with gradients of weights put where it would wait or hold more than `most_held` chunks.

    All ranks take their turns step by step. A result that was made in one step can be used from the next one on.
    """
    orders = [_split(order(placement, rank, m)) for rank in range(placement.num_ranks)]
    numbers = _number_results(placement.num_stages, m)
    # Of each action: whether it is a forward, the numbers of the result that it needs and of the one that it makes.
    facts = [[numbers(action) for action in own] for own in orders]
    made_at = [_NEVER] * (2 * placement.num_stages * m + 1)
    made_at[_NOTHING] = -1  # before the first step
    put_off = [deque[Action]() for _ in orders]
    filled: list[list[Action]] = [[] for _ in orders]
    places, held = [0] * len(orders), [0] * len(orders)
    active, now = list(range(len(orders))), 0
    while active:
        left = []
        for rank in active:
            place, waiting, is_taken = places[rank], put_off[rank], False
            is_over = place == len(orders[rank])
            if not is_over:
                is_forward, needed, made = facts[rank][place]
                if made_at[needed] < now and not (is_forward and waiting and held[rank] >= most_held):
                    is_taken, action = True, orders[rank][place]
                    places[rank] = place + 1
                    filled[rank].append(action)
                    made_at[made] = now
                    if is_forward:
                        held[rank] += 1
                    elif action.kind is Kind.BACKWARD_INPUT:
                        waiting.append(Action(Kind.BACKWARD_WEIGHT, action.stage, action.microbatch))
            if waiting and not is_taken:
                filled[rank].append(waiting.popleft())
                held[rank] -= 1
            if waiting or not is_over:
                left.append(rank)
        active, now = left, now + 1
    return filled


_NOTHING = 0
"""Number of the result that the first stage's forward needs, which is there from the beginning."""
_NEVER = 1 << 60
"""Step of a result that is not made yet."""


def _number_results(num_stages: int, m: int) -> Callable[[Action], tuple[bool, int, int]]:
    """A function from a forward or a gradient of inputs to whether it is a forward, and to the numbers of the result
    that it needs and of the one that it makes."""
    half = num_stages * m

    def number(action: Action) -> tuple[bool, int, int]:
        kind, stage, microbatch = action
        forward = 1 + stage * m + microbatch
        if kind is Kind.FORWARD:
            return True, forward - m if stage else _NOTHING, forward
        return False, forward if stage == num_stages - 1 else forward + half + m, forward + half

    return number


def _split(order: Sequence[Action]) -> list[Action]:
    """The order with input gradients in place of whole backwards."""
    return [action._replace(kind=Kind.BACKWARD_INPUT) if action.kind is Kind.BACKWARD else action for action in order]
