"""Tape of our own mixture of experts: every tensor of models/feed_forward.py, ops/routing.py and plans/experts.py.

Legend: T tokens, D model width, F inner width, E experts, K experts of a token; R = T·K copies of a rank's tokens, N
copies that its experts get, R of them where one rank has all experts.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from dtlayout.models.tape import BlockTensor, TapeEntry, TapeOptions


class MixtureSizes(NamedTuple):
    """Sizes and rules of a mixture that decide its tape."""

    module: str
    """Name of the experts' module in the block."""
    reads: str
    """Tensor whose tokens they compute."""
    router: str
    """Tensor of the router's logits."""
    number: int
    """Experts, E."""
    per_token: int
    """Experts of a token, K."""
    width: int
    """Elements of a token outside of an expert, D."""
    inner_width: int
    """Elements of a token inside one, F."""
    normalized: bool
    """Whether a token's scores are divided by their sum."""
    keeps_logits: bool
    """Whether a loss of the router's logits keeps them in the exact format."""


RecordActivation = Callable[[tuple[BlockTensor, ...], BlockTensor, TapeOptions], tuple[TapeEntry, ...]]
"""(results of gate and up, the activation's result, options) → entries between them."""


def record_mixture(
    experts: MixtureSizes, trained: Sequence[str], options: TapeOptions, record_activation: RecordActivation
) -> Iterator[TapeEntry]:
    """Entries from the router's logits to the sum of a token's results; `trained` names the stacks that are."""
    copies_N = experts.per_token * options.fullest
    outer = partial(BlockTensor, width=copies_N * experts.width, spread="branch")
    inner = partial(BlockTensor, width=copies_N * experts.inner_width, spread="branch")
    name = experts.module
    yield from _record_dispatch(experts, options)
    given, opened, active = outer(f"{name}.given"), [], inner(f"{name}.active")
    saves = bool(trained) or options.trains_all
    for module in (f"{name}.gate_proj", f"{name}.up_proj"):
        opened.append(inner(module))
        weights = tuple(each for each in trained if each.startswith(f"{module}."))
        # A kind of matmul: backwards in two parts put its gradients off.
        yield TapeEntry("matmul", (given,), (opened[-1],), (given,) * saves, weights, kept_as="matmuls")
    yield from record_activation(tuple(opened), active, options)
    scores = BlockTensor(f"{name}.scores_N", copies_N, "branch", "exact")
    exact = active._replace(format="exact")
    yield TapeEntry(
        "matmul", (active,), (outer(f"{name}.results"),), (active, scores),
        tuple(each for each in trained if each.startswith(f"{name}.down_proj.")),
        # Gradients of the product with the scores and of what it multiplied; both factors of the scores' are exact.
        (active, active, exact, *[exact] * options.casts_norms),
        weight_scratch=(active,),  # times scores
        kept_as="matmuls",
    )  # fmt: skip
    yield from _record_combine(experts, options)


def _record_dispatch(experts: MixtureSizes, options: TapeOptions) -> Iterator[TapeEntry]:
    """Scores, the order of copies by expert, and copies that go to their experts, which are put in order again."""
    name, width, k = experts.module, experts.width, experts.per_token
    copies_N = k * options.fullest
    stream, branch = partial(BlockTensor, spread="stream"), partial(BlockTensor, spread="branch")
    tokens, logits = stream(experts.reads, width), stream(experts.router, experts.number)
    scores, weights = (
        stream(f"{name}.{what}", size, format="exact") for what, size in (("scores", experts.number), ("weights", k))
    )
    kept = [scores, stream(f"{name}.chosen", k, format="index")]
    if experts.normalized:
        kept.append(stream(f"{name}.normalized", k + 1, format="exact"))
    if experts.keeps_logits:
        kept.append(stream(f"{name}.logits", experts.number + 1, format="exact"))
    yield TapeEntry("dispatch", (logits,), (weights,), tuple(kept), scratch=(scores, scores))
    copies, given = branch(f"{name}.copies", k * width), branch(f"{name}.given", copies_N * width)
    orders = [branch(f"{name}.{order}", k, format="index") for order in ("order", "inverse")]
    if not options.exchanges:
        yield TapeEntry("dispatch", (tokens, weights), (given,), tuple(orders), scratch=(copies, tokens))
        return
    received = branch(f"{name}.received", copies_N * width)
    yield TapeEntry("dispatch", (tokens, weights), (copies,), tuple(orders), scratch=(copies, tokens))
    with_copies = branch(f"{name}.received_scores", copies_N, format="exact")
    yield TapeEntry("dispatch", (copies,), (received, with_copies), kept_as="matmuls")
    again = tuple(branch(f"{name}.{order}_N", copies_N, format="index") for order in ("order", "inverse"))
    yield TapeEntry("dispatch", (received,), (given,), again)


def _record_combine(experts: MixtureSizes, options: TapeOptions) -> Iterator[TapeEntry]:
    """Results in the order in which copies came, that go back, and their sums."""
    name, k = experts.module, experts.per_token
    branch = partial(BlockTensor, spread="branch")
    results = branch(f"{name}.results", k * options.fullest * experts.width)
    returned, summed = branch(f"{name}.returned", k * experts.width), BlockTensor(name, experts.width, "stream")
    if options.exchanges:
        by_rank = results._replace(name=f"{name}.by_rank")
        yield TapeEntry("combine", (results,), (by_rank,))
        yield TapeEntry("combine", (by_rank,), (returned,), kept_as="matmuls")
    else:
        returned = results
    yield TapeEntry("combine", (returned,), (summed,), scratch=(returned, branch(f"{name}.places", k, format="index")))
