"""Chance: how likely measured rows would show an effect by chance.

[Note: chance]
Rows take part in several pairs, so a test that takes pairs as independent would believe too much. Instead the speeds of
a sweep's rows are permuted NUM_DEALS times, and the share of deals that show at least what was measured is the
p-value; up to MOST_CHANCE a finding stands. Some forty of them yield a false one in about one of 25 reports on noise.
What is compared is the mean of the log ratios over their root mean square, 1 where all pairs say the same, so that few
pairs are enough if they agree closely. "Fits" is treated alike, with the outcomes dealt out instead of the speeds. What
fits depends on all else more than on the choice, so that of its pairs few change; these few must pass a sign test too.
Where arithmetic alone foresees a part of the ratio, as the bubble of fewer microbatches, that part is taken off first.
Numbers of GPUs are compared between sweeps, so their speeds are dealt out among all sweeps of the same training: once
those of a GPU, and once those of all together, for step times dealt out anew would show half the speed of each GPU.
"""

from collections.abc import Hashable, Iterable, Sequence
from math import comb

import numpy as np

NUM_DEALS = 4999
MOST_CHANCE = 1e-3
"""p-value up to which a finding is supported."""


def group(names: Iterable[Hashable]) -> list[list[int]]:
    """The places of each name among those that differ."""
    places: dict[Hashable, list[int]] = {}
    for i, name in enumerate(names):
        places.setdefault(name, []).append(i)
    return list(places.values())


def deal(values: np.ndarray, pools: Sequence[Hashable]) -> np.ndarray:
    """The values as measured, and those of each pool's rows in NUM_DEALS random orders; rows × (1 + deals).

    What is not known, a NaN, stays so.
    """
    generator = np.random.default_rng(0)
    dealt = np.repeat(values[:, None], 1 + NUM_DEALS, axis=1)
    for pool in group(pools):
        places = [i for i in pool if not np.isnan(values[i])]
        dealt[places, 1:] = generator.permuted(dealt[places, 1:], axis=0)
    return dealt


def rarity(found: np.ndarray) -> float:
    """p-value: the share of values that are at least the first, which was measured and counts too; 1 + deals → 1."""
    return float((found >= found[0] - 1e-12).mean())


def sign_test(changes: np.ndarray) -> float:
    """How often coins agree at least as much as the signs of changes do; zeros are none.

    >>> sign_test(np.array([1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]))  # six heads, or six tails
    0.03125
    """
    num_up, num_down = int((changes > 0).sum()), int((changes < 0).sum())
    num_changed = num_up + num_down
    rarer = sum(comb(num_changed, k) for k in range(min(num_up, num_down) + 1))
    return min(1.0, 2 * rarer / 2**num_changed)
