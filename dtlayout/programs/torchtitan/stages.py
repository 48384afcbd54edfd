"""Stages of torchtitan: blocks of each, by its own rule, by names of modules, or by those that begin a stage."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from dtlayout.base.errors import InvalidConfig


def cut_stages(num_layers: int, num_stages: int, first: int = 1, last: int = 1) -> list[int]:
    """Blocks of each stage by its rule: the embedding counts as `first` blocks, norm and head as `last`.

    InvalidConfig for more stages than it would make.

    >>> cut_stages(32, 4)
    [8, 9, 8, 7]
    """
    each, more = divmod(num_layers + first + last, num_stages)
    if each < max(first, last, 1):
        raise InvalidConfig(f"{num_layers} blocks, with {first} and {last} for the ends, make no {num_stages} stages")
    sizes = [each + (stage < more) for stage in range(num_stages)]
    return [sizes[0] - first, *sizes[1:-1], sizes[-1] - last]


def count_named(parts: Any, num_layers: int) -> list[int]:
    """Blocks of each stage where each is a list of its modules; num_layers is 0 if it is not known.

    InvalidConfig unless the blocks are all of them in their order.

    >>> count_named([["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm", "output"]], 3)
    [1, 2]
    """
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        raise InvalidConfig(f"{parts} is no list of the modules of each stage")
    blocks = [[str(each) for each in part if str(each).startswith("layers.")] for part in parts]
    expected = num_layers or sum(map(len, blocks))
    if [name for part in blocks for name in part] != [f"layers.{number}" for number in range(expected)]:
        raise InvalidConfig(f"it has other blocks than all {expected} in their order, from layers.0 on")
    return [len(part) for part in blocks]


def count_between(points: Sequence[str], num_layers: int) -> list[int]:
    """Blocks of each stage where these modules begin all but the first; InvalidConfig if they are no blocks in order.

    >>> count_between(["layers.3", "layers.6"], 8)
    [3, 3, 2]
    """
    borders = [int(digits) for each in points if (digits := each.removeprefix("layers.")).isdigit()]
    sizes = [end - begin for begin, end in pairwise([0, *borders, num_layers])]
    if len(borders) != len(points) or min(sizes) < 0:
        raise InvalidConfig(f"{', '.join(points)} are no blocks of {num_layers} in their order")
    return sizes
