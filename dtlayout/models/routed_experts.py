"""Routed experts of a block as an operation, with two tapes: what any program holds, and all tensors of our own.

Legend of our own tape: T tokens, D model width, F inner width, E experts, K experts of a token; R = T·K copies of a
rank's tokens, N copies that its experts get, R of them where one rank has all experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

from dtlayout.models.operations import BaseOperation, name_trained, record_activation
from dtlayout.models.tape import BlockTensor, TapeEntry, TapeOptions
from dtlayout.models.weight import Weight


@dataclass(frozen=True)
class RoutedExperts(BaseOperation):
    """Feed-forwards, each for those tokens that the matmul before them, a router, sends it; and the sum of a token's.

    ep splits the experts and tokens travel to them; tp splits no expert, but shares out the tokens.
    """

    kept_as = "matmuls"
    module: str
    """The module's name in the block."""
    reads: str
    """Tensor whose tokens it computes."""
    router: str
    """Tensor of the experts' scores for each token."""
    number: int
    """Experts."""
    per_token: int
    """Experts that compute a token."""
    width: int
    """Elements of a token outside of an expert."""
    inner_width: int
    """Elements of a token inside one."""
    gated: bool
    """Whether the activation multiplies two tensors."""
    bias: bool = False
    """Whether each matmul adds one to its outputs."""
    trains: bool = True
    """Whether its weights are trained."""
    correction_bias: bool = False
    """Whether the choice of experts reads a bias of each, which no gradient moves."""
    normalized: bool = True
    """Whether a token's scores are divided by their sum."""
    keeps_logits: bool = False
    """Whether a loss of the router's logits keeps them in the exact format."""

    @property
    def num_opening(self) -> int:
        """Matmuls of an expert before its activation: gate and up, or up alone."""
        return 2 if self.gated else 1

    @property
    def active_share(self) -> float:  # type: ignore[override]
        """Experts of a token among all."""
        return self.per_token / self.number

    def is_scaled(self, alignment: int) -> bool:
        """True if experts can multiply below the compute format, in kernels for sizes that `alignment` divides."""
        return self.width % alignment == self.inner_width % alignment == 0

    @cached_property
    def weights(self) -> tuple[Weight, ...]:  # type: ignore[override]
        """A stack of each matrix."""
        opening, closing = (self.number, self.inner_width, self.width), (self.number, self.width, self.inner_width)
        names = ("gate_proj", "up_proj")[-self.num_opening :]
        stack = partial(Weight, is_of_experts=True, trains=self.trains)
        stacks = [stack(f"{self.module}.{name}.weight", opening, "normal", "expert") for name in names]
        stacks.append(stack(f"{self.module}.down_proj.weight", closing, "residual", "expert"))
        biases = [
            stack(each.name.replace(".weight", ".bias"), each.shape[:2], "zeros", "vector")
            for each in stacks * self.bias
        ]
        return (*stacks, *biases, *self._counters)

    @property
    def _counters(self) -> tuple[Weight, ...]:
        name = f"{self.module.rpartition('.')[0]}.correction_bias"
        counter = Weight(name, (self.number,), "zeros", "vector", trains=False, is_counter=True)
        return (counter,) * self.correction_bias

    def record(self, options: TapeOptions) -> tuple[TapeEntry, ...]:
        """Tokens are copied for their experts, which are a feed-forward, and their results are added up.

        Gate and up are one entry: both gradients of what they read come before those of their weights.
        """
        if options.is_own_mixture:
            return tuple(_record_own(self, options))
        tokens, scores = BlockTensor(self.reads, self.width, "stream"), BlockTensor(self.router, self.number, "stream")
        copies_of_token = self.per_token * options.fullest
        outer = partial(BlockTensor, width=copies_of_token * self.width, spread="branch")
        inner = partial(BlockTensor, width=copies_of_token * self.inner_width, spread="branch")
        copies, results = outer(f"{self.module}.copies"), outer(f"{self.module}.results")
        opened = tuple(inner(f"{self.module}.{name}") for name in ("gate_proj", "up_proj")[-self.num_opening :])
        active, summed = inner(f"{self.module}.active"), BlockTensor(self.module, self.width, "stream")
        closing = tuple(name for name in name_trained(self.weights) if f"{self.module}.down_proj." in name)
        opening = tuple(name for name in name_trained(self.weights) if name not in closing)
        casts = options.scales_experts and self.is_scaled(options.alignment)
        matmul = partial(TapeEntry, "experts", kept_as=self.kept_as, casts=casts)
        saves = self.trains or options.trains_all
        return (
            TapeEntry("dispatch", (tokens, scores), (copies,), scratch=(tokens,)),
            matmul(
                (copies,),
                opened,
                (copies._replace(format="cast" if casts else "compute"),) * saves,
                opening,
                (copies,) * self.num_opening,
            ),
            *record_activation(opened, active, options),
            matmul((active,), (results,), (active,) * saves, closing),  # keeps what the activation gave it as that is
            TapeEntry("combine", (results,), (summed,)),
        )


def _record_own(experts: RoutedExperts, options: TapeOptions) -> Iterator[TapeEntry]:
    """Entries of our own mixture: every tensor of models/feed_forward.py, ops/routing.py and plans/experts.py."""
    trained = name_trained(experts.weights)
    copies_N = experts.per_token * options.fullest
    outer = partial(BlockTensor, width=copies_N * experts.width, spread="branch")
    inner = partial(BlockTensor, width=copies_N * experts.inner_width, spread="branch")
    name = experts.module
    yield from _record_dispatch(experts, options)
    given, opened, active = outer(f"{name}.given"), [], inner(f"{name}.active")
    saves = bool(trained) or options.trains_all
    casts = options.scales_experts and experts.is_scaled(options.alignment)
    for module in (f"{name}.gate_proj", f"{name}.up_proj"):
        opened.append(inner(module))
        weights = tuple(each for each in trained if each.startswith(f"{module}."))
        matmul = TapeEntry("matmul", (given,), (opened[-1],), (given,) * saves, weights, kept_as="matmuls")
        yield matmul._replace(puts_off=True, casts=casts, copies=copies_N)
    yield from record_activation(tuple(opened), active, options)
    scores = BlockTensor(f"{name}.scores_N", copies_N, "branch", "exact")
    exact = active._replace(format="exact")
    yield TapeEntry(
        "matmul", (active,), (outer(f"{name}.results"),), (active, scores),
        tuple(each for each in trained if each.startswith(f"{name}.down_proj.")),
        # Gradients of the product with the scores and of what it multiplied; both factors of the scores' are exact.
        (active, active, exact, *[exact] * options.casts_norms),
        weight_scratch=(active,),  # times scores
        kept_as="matmuls", puts_off=True, casts=casts, copies=copies_N,
    )  # fmt: skip
    yield from _record_combine(experts, options)


def _record_dispatch(experts: RoutedExperts, options: TapeOptions) -> Iterator[TapeEntry]:
    """Scores, the order of copies by expert, and the copies that are dispatched, which are put in order again."""
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


def _record_combine(experts: RoutedExperts, options: TapeOptions) -> Iterator[TapeEntry]:
    """Results in the order in which copies came, the results that come back, and each token's sum."""
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
