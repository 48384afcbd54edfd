"""Tape: the steps of a block's forward, each with the tensors that it reads, makes and saves for backward. No torch.

Operations of `models.operations` write it; nothing on it depends on the number of tokens or of ranks. The cost model
gives its tensors bytes, and walks it forwards and backwards.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from dtlayout.spec.recompute import Kept

HIDDEN = "hidden"
"""Name of the residual stream: a block reads it, and each residual adds to it."""
INPUT = ".input"
"""Ends the name of what a norm saves of the stream: the stream's own tensor."""
GATHERED = ".gathered"
"""Ends the name of a tensor of the stream that tp gathered, or copied to all of its ranks."""


class BlockTensor(NamedTuple):
    """A tensor of a block, by its part of one token."""

    name: str
    """The module that makes it, or a word of its own."""
    width: float
    """Elements of a token, over all tp ranks."""
    spread: Literal["stream", "branch", "whole", "input"]
    """How tp ranks share it. Branch: each has some of the elements. Whole: each has all. Stream: under sequence
    parallelism each has some of the tokens, else all. Input: like stream if the engine gathers it again, else whole."""
    format: Literal["compute", "exact", "cast", "index"] = "compute"
    """Number format. Exact: fp32 or finer. Cast: that of matmuls if the program keeps what they read as it was cast,
    else the compute format. Index: int64."""


EntryKind = Literal[
    "norm", "scale", "matmul", "rope", "attention", "activation", "residual", "gather", "sum",
    "dispatch", "experts", "combine", "add", "rescale", "alias", "mixer",
]  # fmt: skip


class TapeEntry(NamedTuple):
    """One step of a block's forward, and what its backward needs."""

    kind: EntryKind
    """Word for its computation or its message. A scale is the second half of a norm of separate operations. A gather
    and a sum are tp's collectives. A dispatch copies tokens for experts, and a combine adds up their results. An add
    joins an adapter to its matmul, and a rescale multiplies each element of a token by a factor. An alias is another
    name for a tensor. A mixer carries a state along the sequence."""
    reads: tuple[BlockTensor, ...]
    """Inputs that get a gradient."""
    makes: tuple[BlockTensor, ...]
    """Results."""
    saves: tuple[BlockTensor, ...] = ()
    """Tensors that its backward reads and that no entry before it on a tape saves."""
    weights: tuple[str, ...] = ()
    """Names of its trained parameters."""
    scratch: tuple[BlockTensor, ...] | None = None
    """Tensors that its backward holds at its fullest, the new gradients included; None: these gradients alone."""
    forward_scratch: tuple[BlockTensor, ...] = ()
    """Tensors that its forward holds at its fullest, beside what it reads, makes and saves."""
    weight_scratch: tuple[BlockTensor, ...] = ()
    """Tensors that its backward holds while its weights' gradients come, beside the new gradients."""
    kept_as: Kept | None = None
    """Word of the recomputations that keep its results; None where every one computes them again."""
    casts: bool = False
    """Whether a matmul computes in `Precision.matmuls` where that is another format; routers and adapters do not, and
    experts as the options of the tape say."""
    copies: float = 0.0
    """Copies of a token that experts multiply, one expert after the other; 0 for a matmul of each token."""
    fuses: bool = False
    """Whether some engines compute it together with the matmul before it."""
    saves_again: tuple[BlockTensor, ...] = ()
    """Tensors that its backward reads and that an entry before it saves; `join` finds them."""
    is_differentiated: bool = True
    """Whether it has a backward; not so where nothing that it reads needs a gradient and nothing of it is trained."""
    shares_gradient: bool = False
    """Whether it only adds: the gradient of each input is that of its result, in the same memory. It has no weights and
    saves nothing. A sum over tp gets this from the layout."""
    puts_off: bool = False
    """Whether a backward in two parts leaves the gradients of its trained weights to the second part. What it saved and
    the gradient of its result stay until then."""
    ends_first: bool = False
    """Whether the gradient of its result and what it saved go before the gradients of its weights come, not after."""
    in_branch: bool = False
    """Whether it is a linear layer that opens or closes a branch: no router, and no matmul of an adapter or expert."""
    is_local: bool = False
    """Whether its results are variables of a module's forward, which last until the branch is closed; else they last
    until the last entry that reads them."""
    continues: bool = False
    """Whether it belongs to the call that the entry before it begins, which holds its inputs until it returns."""
    saves_made: tuple[str, ...] = ()
    """Results of entries before it that it saves under a name of its own, as attention does with values."""
    moves: tuple[float, float] = (0.0, 0.0)
    """Bytes that its forward moves for each element, where it is a model's own code: in a format of two bytes, and in
    fp32. Zeros where a kernel computes it."""


class TapeOptions(NamedTuple):
    """Facts about kernels and ranks that decide which entries a tape has and what they save."""

    is_split: bool = False
    """Whether tp splits matmuls, so that their inputs are gathered or copied and their results summed."""
    separate_norms: bool = False
    """Whether a norm is several operations, each with a result in memory."""
    casts_norms: bool = False
    """Whether separate operations of a norm copy their input into the exact format, which is not the compute format."""
    keeps_exact_product: bool = False
    """Whether separate operations of a norm keep input · scale in the exact format."""
    num_gated_kept: int = 2
    """Tensors that a gated activation keeps beside its result: gate, up and, if 3, silu(gate)."""
    fullest: float = 1.0
    """Copies of tokens that the fullest of ep's ranks computes, over the mean."""
    is_own_mixture: bool = False
    """Whether experts are those of models/feed_forward.py, of which every tensor is known; else what any program
    holds."""
    exchanges: bool = False
    """Whether copies of tokens go to other ranks and come back."""
    compiles: bool = False
    """Whether a compiler sees the block whole, which computes again what elementwise operations make of results."""
    trains_all: bool = False
    """Whether entries save as if all weights were trained: forward holds what it reads, even if backward needs none."""
    ends_gradients: bool = False
    """Whether the block's input needs no gradient: nothing before it is trained."""
    alignment: int = 1
    """Divisor of both sizes of a linear layer, or of an expert, that multiplies below the compute format."""
    scales_experts: bool = True
    """Whether routed experts multiply below the compute format where linear layers do."""


PLAIN = TapeOptions()
"""Options of one rank whose norms and activations are one kernel each."""


def join(entries: Iterable[TapeEntry]) -> Iterator[TapeEntry]:
    """Entries of several operations as one tape.

    A gather comes before the first entry that reads a gathered tensor, and what an entry before has saved moves from
    `saves` to `saves_again`.
    """
    gathered, saved = set[str](), set[str]()
    for entry in entries:
        for read in entry.reads:
            if read.name.endswith(GATHERED) and read.name not in gathered:
                gathered.add(read.name)
                yield gather_for(read)
        again = tuple(each for each in entry.saves if each.name in saved)
        saved.update(each.name for each in entry.saves)
        yield entry._replace(saves=tuple(each for each in entry.saves if each not in again), saves_again=again)


def end_gradients(tape: Sequence[TapeEntry]) -> Iterator[TapeEntry]:
    """Entries of a block whose input needs no gradient: from the first trained weight on they have a backward.

    What attention reads has names of its own, which no entry makes. Such a tensor needs a gradient if any before it
    does; a result that no entry reads by its name lets go of that gradient where it needs none.
    """
    read, made = {each.name for entry in tape for each in entry.reads}, {HIDDEN}
    needed, saved, of_norm = set[str](), set[str](), tuple[str, ...]()
    for entry, can_let_go in zip(tape, _reads_unnamed_later(tape), strict=True):
        if entry.kind == "scale" and of_norm:  # of a norm whose weight alone has a gradient
            entry = entry._replace(reads=(), saves=entry.saves[:1], weights=of_norm)
        reads = tuple(each for each in entry.reads if each.name in needed or (needed and each.name not in made))
        is_first_half = entry.kind == "norm" and not reads and entry.makes[0].format == "exact"
        of_norm = entry.weights if is_first_half else ()
        made.update(each.name for each in entry.makes)
        if reads or (entry.weights and not is_first_half):
            needed.update(each.name for each in entry.makes)
            yield _keep_needed(entry, reads, saved)
        elif can_let_go and not any(each.name in read for each in entry.makes):
            yield entry._replace(reads=(), saves=(), saves_again=(), weights=())
        else:
            yield entry._replace(saves=(), saves_again=(), weights=(), is_differentiated=False)


def _keep_needed(entry: TapeEntry, needed: tuple[BlockTensor, ...], saved: set[str]) -> TapeEntry:
    """An entry of which only some inputs need a gradient; `saved` has what entries before it save, and gets its own."""
    first = tuple(each for each in entry.saves_again if each.name not in saved)
    kept = (*entry.saves, *first)
    if entry.kind == "activation" and len(needed) < len(entry.reads) and entry.scratch is None:
        kept = tuple(each for each in kept if each not in needed)  # a product saves the other factor
    saved.update(each.name for each in kept)
    again = tuple(each for each in entry.saves_again if each not in first)
    return entry._replace(reads=needed, saves=kept, saves_again=again)


def _reads_unnamed_later(tape: Sequence[TapeEntry]) -> list[bool]:
    """Whether an entry after each one has a weight before it that is trained, and reads what no entry makes by name."""
    made, trains, unnamed = {HIDDEN}, False, list[bool]()
    for entry in tape:
        unnamed.append(trains and any(each.name not in made for each in entry.reads))
        trains = trains or bool(entry.weights)
        made.update(each.name for each in entry.makes)
    return [any(unnamed[place + 1 :]) for place in range(len(tape))]


def gather_for(gathered: BlockTensor) -> TapeEntry:
    """The collective by which every tp rank gets a tensor of the stream."""
    own = gathered._replace(name=gathered.name.removesuffix(GATHERED), spread="stream")
    return TapeEntry("gather", (own,), (gathered,), is_local=True)
