"""A pseudo-random permutation of range(size), computed for single places without holding it.

[Note: the construction]
J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002. A balanced Feistel network on 2h bits,

    (left, right) -> (right, left xor F(right, key of the round)),

is a bijection of range(4^h) whatever F is. h is the smallest with 4^h >= size, and values that land outside
range(size) are sent through again until they land inside (cycle walking): the walk follows a cycle that began inside,
so it comes back, and the result is a bijection of range(size). As 4^h < 4 size, fewer than 4 passes are expected.
Luby and Rackoff (1988) need 4 rounds for domains that are large; 8 are used because ours may have a handful of places.

F is the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014),
which is good mixing and no secret: this shuffles data, it doesn't encrypt it. Integers only, so the order is the same
on every machine and version.
"""

import numpy as np
import numpy.typing as npt

from dtlayout.base.errors import DataError

_UInts = npt.NDArray[np.uint64]

_NUM_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LOW_64 = (1 << 64) - 1


def permute(index: npt.ArrayLike, size: int, seed: int) -> npt.NDArray[np.int64]:
    """Images of `index` under the permutation of range(size) that `seed` chooses; same shape as `index`.

    DataError if one of `index` is outside range(size).
    """
    places = np.asarray(index, dtype=np.int64)
    outside = places[(places < 0) | (places >= size)]
    if outside.size:
        raise DataError(f"index {outside.reshape(-1)[0]} is outside range({size}), which is to be permuted")
    half_bits = max(((size - 1).bit_length() + 1) // 2, 1)
    keys = _mix(np.uint64(seed & _LOW_64) + np.arange(1, _NUM_ROUNDS + 1, dtype=np.uint64) * _GOLDEN)
    walked = _scramble(places.reshape(-1).astype(np.uint64), half_bits, keys)
    while (beyond := walked >= size).any():
        walked[beyond] = _scramble(walked[beyond], half_bits, keys)
    return walked.astype(np.int64).reshape(places.shape)


def hash_integers(*values: int) -> int:
    """A 64-bit hash of integers in their order; inputs that differ in one value only never collide."""
    state = np.zeros(1, dtype=np.uint64)
    for value in values:
        state = _mix((state ^ np.uint64(value & _LOW_64)) + _GOLDEN)
    return int(state[0])


def _scramble(values: _UInts, half_bits: int, keys: _UInts) -> _UInts:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: _UInts) -> _UInts:
    """SplitMix64's finalizer. Always on arrays: numpy wraps them silently, while it warns for scalars."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
