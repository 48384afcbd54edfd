"""Tape with bytes: the steps of a block as `models.tape` has them, with bytes of their tensors on one rank.

A sized tape is a function of a model and of few numbers, which many layouts share; so it is remembered.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from dtlayout.models.families import block_tape, describe
from dtlayout.models.operations import ATTENDED
from dtlayout.models.tape import GATHERED, BlockTensor, TapeEntry, TapeOptions, gather_for
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.recompute import Kept


class Measures(NamedTuple):
    """Numbers of a layout, of formats and of kernels by which the tensors of a tape get bytes."""

    compute: float
    """Bytes of one element of all tokens in the compute format, T·e."""
    cast: float
    """Bytes of one element of all tokens of an input that a matmul keeps as it was cast."""
    exact: float
    """Bytes of one element of all tokens in the exact format, T·w."""
    int64: float
    """Bytes of an index of each token."""
    tp: int
    """Ranks that share what lies inside a branch."""
    stream_ranks: int
    """Ranks that share the residual stream: tp with sequence parallelism, else 1."""
    input_ranks: int
    """Ranks that share what a matmul that opens a branch keeps of its input."""
    reorders: bool
    """Whether a gather's or a scatter's tensor is copied between the order of ranks and that of tokens."""
    adds_apart: bool
    """Whether two gradients of a gathered tensor are added in a third one."""
    attention: float
    """Bytes that attention keeps, its output included."""
    attention_results: float
    """Bytes of the results of attention's kernels, which recomputation may keep."""
    forward_work: float
    """Bytes of the work space of attention's forward at its fullest, beside what it keeps."""
    backward_work: float
    """Bytes of the work space of attention's backward at its fullest."""
    weight: float = 0.0
    """Bytes of an element of a frozen weight that is computed out of few bits; 0 where it is there."""
    lookup: float = 0.0
    """Bytes of an element of what its codes become first."""


class SizedEntry(NamedTuple):
    """A step of a tape, with bytes of its tensors on one rank."""

    kind: str
    """Kind of the step, as in `TapeEntry`."""
    reads: dict[str, float]
    """Bytes of each new gradient, by the tensor that was read."""
    makes: dict[str, float]
    """Bytes of each result."""
    saves: dict[str, float]
    """Bytes of each tensor that it saves for backward and that no entry before it saves."""
    saves_again: tuple[str, ...]
    """Names of tensors that it saves, and that an entry before it saves too."""
    weights: tuple[str, ...]
    """Names of its trained parameters."""
    forward_work: float
    """Held by its forward at the fullest, beside what it reads, makes and saves."""
    work: float
    """Held by its backward at the fullest, the new gradients included."""
    used: float
    """Gradients of its results that go when it is over; 0 where the residual stream shares them."""
    kept_as: Kept | None
    """Word of the recomputations that keep its results."""
    results: tuple[float, ...]
    """Bytes of each tensor that such a recomputation keeps."""
    adds_apart: bool
    """Whether two gradients of what it read are added in a third tensor."""
    weight_work: float = 0.0
    """Held by its backward while its weights' gradients come, beside the new gradients."""

    @property
    def saved(self) -> float:
        """Bytes that it saves and no entry before it."""
        return sum(self.saves.values())


@lru_cache(maxsize=1024)
def size_block(model: ModelShape, options: TapeOptions, measures: Measures) -> tuple[SizedEntry, ...]:
    """Steps of a model's block, with bytes of their tensors."""
    return tuple(_size(block_tape(model, options), measures))


@lru_cache(maxsize=1024)
def size_end(model: ModelShape, options: TapeOptions, measures: Measures) -> tuple[SizedEntry, ...]:
    """Steps of the final norm, and the gather of its result for the head; with bytes of their tensors."""
    norm = describe(model).final_norm
    gather = gather_for(BlockTensor(f"{norm.module}{GATHERED}", norm.width, "whole"))
    return tuple(_size([*norm.record(options), *[gather] * options.is_split], measures))


def _size(tape: Sequence[TapeEntry], measures: Measures) -> Iterable[SizedEntry]:
    elements = {"compute": measures.compute, "cast": measures.cast, "exact": measures.exact, "index": measures.int64}
    ranks = {"stream": measures.stream_ranks, "branch": measures.tp, "whole": 1, "input": measures.input_ranks}
    scatters = measures.stream_ranks > 1
    shared = _find_shared(tape, scatters=scatters)
    without = {each.name for entry in tape if not entry.is_differentiated for each in entry.makes}

    def size(tensors: Iterable[BlockTensor]) -> dict[str, float]:
        return {each.name: elements[each.format] * each.width / ranks[each.spread] for each in tensors}

    for entry in tape:
        reads, makes, saves = size(entry.reads), size(entry.makes), size(entry.saves)
        new, used = sum(reads.values()), sum(makes.values())
        work, forward_work, results = new, 0.0, tuple(makes.values())
        if entry.scratch is not None:
            work = sum([elements[each.format] * each.width / ranks[each.spread] for each in entry.scratch])
        if entry.kind == "attention" and entry.saves:
            saves = {ATTENDED: used, "attention": measures.attention - used}
            work, forward_work, results = measures.backward_work, measures.forward_work, (measures.attention_results,)
        elif entry.kind == "gather":  # its backward is a reduce-scatter or an all-reduce, which writes beside its input
            work = new + used * measures.reorders
        elif entry.kind == "sum":
            work, forward_work = new * (1 + measures.reorders), new * measures.reorders
        if measures.weight and entry.casts and not entry.weights:  # of a quantized base; its codes become indices first
            tensors = (*entry.reads, *entry.makes)
            numel = prod(each.width / (measures.tp if each.spread == "branch" else 1) for each in tensors)
            weight, lookup = measures.weight * numel, measures.lookup * numel
            work = max(new, lookup) + weight
            forward_work = max(weight, weight + lookup - used)
        if entry.kind == "residual" or (entry.kind == "sum" and not scatters) or not entry.is_differentiated:
            reads, work = {}, 0.0  # pass their gradient on, or have none
        if entry.kind == "add":
            reads = {name: nbytes for name, nbytes in reads.items() if name not in without}
        yield SizedEntry(
            entry.kind, reads, makes, saves, tuple([each.name for each in entry.saves_again]),
            entry.weights, forward_work, work, 0.0 if entry.makes[0].name in shared else used,
            entry.kept_as, results, measures.adds_apart and bool(entry.reads) and entry.reads[0].spread == "whole",
            sum(size(entry.weight_scratch).values()),
        )  # fmt: skip


def _find_shared(tape: Sequence[TapeEntry], *, scatters: bool) -> set[str]:
    """Results whose gradient goes with no step: the residual stream's, to which a branch's end is added, or none.

    Of a matmul whose result an adapter rescales it is the product's, and of both terms of an adapter's sum the sum's.
    """
    closing = {entry.makes[0].name for entry in tape if _closes_branch(entry, scatters=scatters)}
    closing -= {each.name for entry in tape if entry.kind == "matmul" for each in entry.reads}  # an adapter's own
    for entry in tape:
        first = entry.reads[0].name if entry.reads else ""
        if entry.kind == "rescale" and first in closing:
            closing = closing - {first} | {entry.makes[0].name}
        if entry.kind == "add":
            names = {each.name for each in entry.reads}
            closing = closing | names if first in closing else closing - names
    return closing | {entry.makes[0].name for entry in tape if not entry.is_differentiated}


def _closes_branch(entry: TapeEntry, *, scatters: bool) -> bool:
    """True if the gradient of an entry's result is the residual stream's."""
    if not entry.reads:
        return False
    read, made = entry.reads[0].spread, entry.makes[0].spread
    if made == "stream":
        return read != "stream" or entry.kind == "residual"
    return (read, made) == ("branch", "whole") and not scatters
