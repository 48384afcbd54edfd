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


class Rounding(NamedTuple):
    """Bytes of the tensors by which a weight is rounded before it multiplies, as ops/fake_quantized.py does."""

    peak: float
    """Bytes of an element while the rounded weight is made."""
    values: float
    """Bytes of an element of the rounded weight."""
    scales: float
    """Bytes of the scales of a group, which backward keeps."""
    group: int
    """Columns of a group; 0 where each row is one."""


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
    attention_copies: bool
    """Whether attention keeps copies of queries, keys and values."""
    forward_work: float
    """Bytes of the work space of attention's forward at its fullest, beside what it keeps."""
    backward_work: float
    """Bytes of the work space of attention's backward at its fullest."""
    rope_copies: int
    """Exact copies of the queries that the rotary embedding makes on its way; 0 in one kernel."""
    weight: float = 0.0
    """Bytes of an element of a frozen weight that is computed out of few bits; 0 where it is there."""
    lookup: float = 0.0
    """Bytes of an element of what its codes become first."""
    tokens: float = 0.0
    """Tokens whose tensors are cast for matmuls, as ops/scaled.py does; 0 where that is not known."""
    casting: float = 0.0
    """Bytes of an element while it is cast to fp8, which is one of them."""
    rounding: Rounding | None = None
    """Sizes of weights that are rounded; None where they multiply as they are."""
    sends_cast: bool = False
    """Whether tp gathers a block's tensors in fp8, which lie beside the result."""
    casts_weights: bool = True
    """Whether matmuls cast weights; else these come as they multiply."""
    num_experts: float = 1.0
    """Experts of a block that a rank has."""
    attention_kept_as: Kept = "attention"
    """Word of the recomputations that keep attention's results."""


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
    kept_as: Kept | None
    """Word of the recomputations that keep its results."""
    results: dict[str, float]
    """Bytes of each tensor that such a recomputation keeps."""
    adds_apart: bool
    """Whether two gradients of what it read are added in a third tensor."""
    shares_gradient: bool = False
    """Like that of `TapeEntry`, and so for a sum over tp where that gathers no gradient."""
    puts_off: bool = False
    ends_first: bool = False
    is_differentiated: bool = True
    is_local: bool = False
    continues: bool = False
    saves_made: tuple[str, ...] = ()
    """Results of entries before it that are among what it saves, under a name of its own."""
    is_alias: bool = False
    """Whether its forward makes no tensor: tp's ranks go on with the one that they have."""
    weight_work: float = 0.0
    """Held by its backward while its weights' gradients come, beside the new gradients."""
    weight_peak: float = 0.0
    """Held by its backward at the fullest before these gradients come, beside the new gradients."""

    @property
    def saved(self) -> float:
        """Bytes that it saves and no entry before it."""
        return sum(self.saves.values())


class SizedTape(tuple[SizedEntry, ...]):
    """A tape with bytes. It equals itself alone, so that what follows from it can be remembered."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@lru_cache(maxsize=1024)
def size_block(model: ModelShape, options: TapeOptions, measures: Measures) -> SizedTape:
    """Steps of a model's block, with bytes of their tensors."""
    return SizedTape(_size(block_tape(model, options), measures))


@lru_cache(maxsize=1024)
def size_end(model: ModelShape, options: TapeOptions, measures: Measures) -> tuple[SizedEntry, ...]:
    """Steps of the final norm, and the gather of its result for the head; with bytes of their tensors."""
    norm = describe(model).final_norm
    gather = gather_for(BlockTensor(f"{norm.module}{GATHERED}", norm.width, "whole"))
    return tuple(_size([*norm.record(options), *[gather] * options.is_split], measures._replace(sends_cast=False)))


def _size(tape: Sequence[TapeEntry], measures: Measures) -> Iterable[SizedEntry]:
    elements = {"compute": measures.compute, "cast": measures.cast, "exact": measures.exact, "index": measures.int64}
    ranks = {"stream": measures.stream_ranks, "branch": measures.tp, "whole": 1, "input": measures.input_ranks}
    scatters = measures.stream_ranks > 1

    def size(tensors: Iterable[BlockTensor]) -> dict[str, float]:
        return {each.name: elements[each.format] * each.width / ranks[each.spread] for each in tensors}

    def cast(nbytes: float) -> float:
        """Bytes of a tensor of the compute format as it was gathered in fp8."""
        return nbytes * measures.tokens / measures.compute if measures.sends_cast else 0.0

    for entry in tape:
        reads, makes, saves = size(entry.reads), size(entry.makes), size(entry.saves)
        new, used = sum(reads.values()), sum(makes.values())
        work, forward_work, results = new, 0.0, makes
        if entry.forward_scratch:
            forward_work = sum(size(entry.forward_scratch).values())
        if entry.scratch is not None:
            work = sum([elements[each.format] * each.width / ranks[each.spread] for each in entry.scratch])
        if entry.kind == "attention" and entry.saves:
            saves = {ATTENDED: used, "attention": measures.attention - used}
            results = {ATTENDED: used, "attention": measures.attention_results - used}
            work, forward_work = measures.backward_work, measures.forward_work
        elif entry.kind == "rope":
            copies = measures.rope_copies * measures.exact / measures.compute * reads[entry.reads[0].name]
            forward_work = max(0.0, copies - used)  # the results among them
        elif entry.kind == "gather":  # its backward is a reduce-scatter or an all-reduce, which writes beside its input
            work, forward_work = new + used * measures.reorders, cast(used)
        elif entry.kind == "sum":
            work, forward_work = new * (1 + measures.reorders), new * measures.reorders
            work = new + cast(new) if measures.sends_cast else work
        if (
            measures.weight and entry.in_branch and not entry.weights
        ):  # of a quantized base; its codes become indices first
            tensors = (*entry.reads, *entry.makes)
            numel = prod(each.width / (measures.tp if each.spread == "branch" else 1) for each in tensors)
            weight, lookup = measures.weight * numel, measures.lookup * numel
            work = max(new, lookup) + weight
            forward_work = max(weight, weight + lookup - used)
        weight_work, weight_peak = sum(size(entry.weight_scratch).values()), 0.0
        if measures.tokens and entry.casts and entry.copies:
            forward_work, work, weight_work = _weigh_expert(entry, measures, max(work, new), weight_work)
        elif measures.tokens and entry.casts:
            forward_work, work, weight_peak, weight_work = _weigh_casts(entry, measures, new, used)
        if measures.rounding and entry.kind == "matmul" and entry.in_branch:
            forward_work, work, scales = _weigh_rounding(entry, measures.rounding, measures.tp, new, used)
            saves |= scales
        shares_gradient = entry.shares_gradient or (entry.kind == "sum" and not scatters)
        saves_made = (
            tuple(reads) + entry.saves_made if entry.kind == "attention" and not measures.attention_copies else ()
        )
        is_alias = entry.kind == "alias" or (entry.kind == "gather" and not scatters)
        yield SizedEntry(
            entry.kind, reads, makes, saves, tuple([each.name for each in entry.saves_again]),
            entry.weights, forward_work, work,
            measures.attention_kept_as if entry.kind == "attention" else entry.kept_as, results,
            adds_apart=measures.adds_apart and bool(entry.reads) and entry.reads[0].spread == "whole",
            shares_gradient=shares_gradient, puts_off=entry.puts_off, ends_first=entry.ends_first,
            is_differentiated=entry.is_differentiated, is_local=entry.is_local,
            continues=entry.continues, saves_made=saves_made, is_alias=is_alias,
            weight_work=weight_work, weight_peak=weight_peak,
        )  # fmt: skip


def _weigh_rounding(
    entry: TapeEntry, rounding: Rounding, tp: int, new: float, made: float
) -> tuple[float, float, dict[str, float]]:
    """Work of a matmul by a weight that is rounded: in forward beside the result of `made` bytes, in backward with the
    `new` gradients. Then the scales that backward keeps."""
    read, *_ = *entry.reads, *entry.saves, *entry.makes  # nothing before it may need a gradient
    inputs, outputs = (each.width / (tp if each.spread == "branch" else 1) for each in (read, entry.makes[0]))
    weight, groups = inputs * outputs, inputs / rounding.group if rounding.group else 1.0
    forward = max(rounding.peak * weight - made, rounding.values * weight)
    if not entry.reads:
        return forward, 0.0, {}
    work = max(rounding.peak * weight, rounding.values * weight + new)
    return forward, work, {f"{entry.makes[0].name}.scales": outputs * groups * rounding.scales}


def _weigh_casts(entry: TapeEntry, measures: Measures, new: float, made: float) -> tuple[float, float, float, float]:
    """Work of a matmul of cast tensors (ops/scaled.py), of which some are copied into another order for its kernel.

    In forward beside the result of `made` bytes; in backward with the `new` gradients, at the fullest before the
    weight's gradient comes, and while it comes.
    """
    read, *_ = *entry.reads, *entry.saves, *entry.makes  # nothing before it may need a gradient
    inputs, outputs = (each.width / (measures.tp if each.spread == "branch" else 1) for each in (read, entry.makes[0]))
    x, y, weight, casting = measures.tokens * inputs, measures.tokens * outputs, inputs * outputs, measures.casting
    cast = weight if measures.casts_weights else 0.0
    forward = max(casting * x - made, x + casting * cast - made, x + cast)
    work = max(casting * y, y + casting * cast, y + cast + weight + new) if entry.reads else 0.0
    if not entry.weights:
        return forward, work, 0.0, 0.0
    return forward, work, max(casting * y, y + casting * x), 2 * (x + y)


def _weigh_expert(entry: TapeEntry, measures: Measures, work: float, scored: float) -> tuple[float, float, float]:
    """Work of experts' matmuls of cast tensors (ops/scaled_groups.py): in forward, in backward, for weights' gradients.

    One expert is cast at a time, by eager kernels, and its product is copied into the result. `work` is backward's
    without casts, `scored` bytes of rows times scores.
    """
    read, *_ = *entry.reads, *entry.saves, *entry.makes  # nothing before it may need a gradient
    inputs, outputs = (each.width / entry.copies for each in (read, entry.makes[0]))
    rows, size = measures.tokens * entry.copies / measures.tp / measures.num_experts, measures.compute / measures.tokens
    x, y, weight, casting = rows * inputs, rows * outputs, inputs * outputs, 5.0
    forward = max(casting * x, x + casting * weight, x + weight + size * y)
    of_input = max(casting * y, y + casting * weight, y + 2 * weight + size * x)
    of_weight = max(casting * y, y + casting * x, 2 * (x + y) + size * weight)
    new = size * x * measures.num_experts
    return scored + forward, max(work, new + of_input) if entry.reads else work, scored + of_weight
