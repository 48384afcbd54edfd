"""Pieces of a matmul's result: the parts that a block's own code cuts it into, such as queries, keys and values.

A piece is a row of elements of each token that lie side by side. It is found by where a view lies in memory, whatever
calls have made the view.
"""

from typing import NamedTuple

from dtlayout.tracing.record import BlockRecord


class Range(NamedTuple):
    """Elements of each token that a view shows: `width` of them, from `first` on."""

    first: int
    width: int

    @property
    def end(self) -> int:
        """The element behind them."""
        return self.first + self.width

    def holds(self, other: "Range") -> bool:
        """True if the other elements are among these."""
        return self.first <= other.first and other.end <= self.end


def find_range(record: BlockRecord, tensor: int, result: int) -> Range | None:
    """The elements of each token of `result` that a view of it shows; None if they don't lie side by side, or the
    tensor is no view of it."""
    if tensor not in record.places or record.places[tensor].memory != record.places[result].memory:
        return None
    whole, place = record.shapes[result][-1], record.places[tensor]
    sizes = zip(record.shapes[tensor], place.strides, strict=True)
    inner = sorted((stride, size) for size, stride in sizes if size > 1 and stride < whole)
    width = 1
    for stride, size in inner:
        if stride != width:
            return None
        width *= size
    first = place.first - record.places[result].first
    is_of_all = record.count(tensor) == record.num_tokens * width
    return Range(first, width) if is_of_all and 0 <= first <= whole - width else None


def find_pieces(record: BlockRecord, result: int) -> tuple[Range, ...]:
    """The pieces that a result is cut into, in their order; none if its views don't cover it side by side."""
    whole = record.shapes[result][-1]
    found = {each for call in record.calls for made in call.makes if (each := find_range(record, made, result))}
    pieces, end = list[Range](), 0
    while end < whole:
        here = [each for each in found if each.first == end and each.width < whole]
        if not here:
            return ()
        pieces.append(max(here, key=lambda each: each.width))
        end += pieces[-1].width
    return tuple(pieces)
