"""Peak bytes of each pipeline rank, by component; docs/theory/memory-model.md derives every formula.

Here with a distributed optimizer; under FSDP2 components are what they are at one moment (fsdp2/memory.py).

n parameters of a stage on one tp rank, S = dp_shard · cp, t = tp, T tokens of a microbatch on one cp rank, h hidden,
f FFN, V vocabulary, a heads, e bytes of an activation, k experts of a token. The tp, dp and cp ranks of a pipeline rank
hold the same. The peak is that of the fullest moment of the schedule; what an optimizer step or a reduction needs
beside it is not added, because activations are gone by then. Sources: ZeRO arXiv:1910.02054, sec. 3; activations
arXiv:2205.05198, sec. 4.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

from dtlayout.costmodel.engine_constants import RunAheadConstants
from dtlayout.costmodel.forward_only import find_differentiated
from dtlayout.costmodel.fsdp2.memory import fragment_bytes, fullest_finder, overhead_bytes, table_bytes
from dtlayout.costmodel.fsdp2.phase import MemoryKind
from dtlayout.costmodel.parameter_groups import NONE_APART, Apart, count_apart, list_trained
from dtlayout.costmodel.recompute_modules import find_again
from dtlayout.costmodel.scenario import (
    Scenario,
    activation_size,
    count_state_shards,
    format_sizes,
    fullest_share,
    tokens_of,
)
from dtlayout.models.counting import count_block_parameters, count_embedding_parameters
from dtlayout.models.description import NO_ATTENTION
from dtlayout.models.families import block_tape, describe
from dtlayout.models.tape import BlockTensor, TapeOptions
from dtlayout.models.weight import Weight
from dtlayout.pipelining.partition import StageSlice
from dtlayout.pipelining.timing import Moment, in_flight_peaks, weigh_moments
from dtlayout.spec.kernel_records import AttentionKernel, NormKernel, SwigluKernel
from dtlayout.spec.kernel_table import find_kernel
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.recompute import Recompute


class Components:
    """Amounts that add up."""

    @property
    def total(self) -> float:
        """All components."""
        return sum(vars(self).values())

    def as_dict(self) -> dict[str, float]:
        """Component → amount."""
        return dict(vars(self))


NOT_NEEDED = ("run_ahead", "fragments")
"""Components of memory that a rank has only where there is room."""


@dataclass(frozen=True)
class MemoryEstimate(Components):
    """Bytes of one rank at its fullest moment, by component; the total is the peak that its program reports."""

    parameters: float
    """Weights: sharded masters with gathered copies, and the tables of RoPE (fsdp2); or whole bf16 weights."""
    gradients: float
    """Gradients in the format in which they are accumulated."""
    optimizer: float
    """State that the optimizer keeps of each parameter, with fp32 masters where they belong to it."""
    activations: float
    """Kept for backward by all microbatches in flight, and the working set of a block that is recomputed."""
    logits: float
    """Logits, loss and their gradient on the last stage."""
    buffers: float
    """Communication: reduction buckets, units that are gathered for use."""
    run_ahead: float
    """Collectives that the host started early: it starts fewer where memory is short."""
    overhead: float
    """Held by the allocator whatever the layout, and (fsdp2) a step's tokens."""
    fragments: float = 0.0
    """Reserved and of no use, for programs that report what is reserved: given back where memory is short."""

    @property
    def needed(self) -> float:
        """Bytes that the rank cannot run without."""
        return self.total - sum(getattr(self, name) for name in NOT_NEEDED)


class RankMemory(Sized, Iterable[MemoryEstimate]):
    """Peak of each pipeline rank, computed when it is asked for."""

    def __init__(self, find: Callable[[int], MemoryEstimate], num_ranks: int, fullest: Sequence[int] = ()):
        """`find` says a rank's peak; one of the ranks in `fullest` holds most, any where none is named."""
        self._find, self._num_ranks, self._fullest = cache(find), num_ranks, fullest or range(num_ranks)

    def __len__(self) -> int:
        return self._num_ranks

    def __getitem__(self, rank: int) -> MemoryEstimate:
        return self._find(range(self._num_ranks)[rank])

    def __iter__(self) -> Iterator[MemoryEstimate]:
        return map(self._find, range(self._num_ranks))

    def __repr__(self) -> str:
        return f"RankMemory{tuple(self)}"

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, RankMemory) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    @property
    def may_be_fullest(self) -> Iterator[MemoryEstimate]:
        """Peaks among which are the highest and the greatest need of all ranks."""
        return map(self._find, self._fullest)

    @property
    def busiest_rank(self) -> int:
        """The pipeline rank with the highest peak."""
        return max(self._fullest, key=lambda rank: self._find(rank).total)

    @property
    def peak_bytes(self) -> float:
        """The highest peak of any rank."""
        return max(rank.total for rank in self.may_be_fullest)

    @property
    def needed_bytes(self) -> float:
        """Bytes that the fullest rank cannot run without."""
        return max(rank.needed for rank in self.may_be_fullest)


def rank_estimator(
    scenario: Scenario, layout: Layout, kernels: Kernels, stages: Sequence[StageSlice]
) -> Callable[[int], MemoryEstimate]:
    """A function from a pipeline rank to its peak; `stages` as `scenario.cut` gives them."""
    is_fsdp2 = scenario.engine.features.sharding == "fsdp2"
    find = (_fsdp2_ranks if is_fsdp2 else _distributed_optimizer_ranks)(scenario, layout, kernels, stages)

    def estimate(rank: int) -> MemoryEstimate:
        wanted = find(rank)
        beside = {name: size for name in NOT_NEEDED if (size := getattr(wanted, name))}
        if not beside:
            return wanted
        room = max(0.0, scenario.capacity_bytes - wanted.needed)
        share = min(1.0, room / sum(beside.values()))
        return replace(wanted, **{name: share * size for name, size in beside.items()})

    return estimate


def _fsdp2_ranks(
    scenario: Scenario, layout: Layout, kernels: Kernels, stages: Sequence[StageSlice]
) -> Callable[[int], MemoryEstimate]:
    overhead, find_fullest = overhead_bytes(scenario, layout), fullest_finder(scenario, layout, kernels, stages)

    def find(rank: int) -> MemoryEstimate:
        # Bytes that came and went may leave a rounding error below 0.
        held = [max(0.0, size) for size in find_fullest(rank)]
        parts = {part.name.lower(): size for part, size in zip(MemoryKind, held, strict=True)}
        parts["parameters"] += table_bytes(scenario, layout)
        fragments = 0.0
        if scenario.engine.features.reports_reserved:
            has_head = any(chunk.head for chunk in layout.placement.take(stages, rank))
            fragments = fragment_bytes(scenario, layout, kernels, held, has_head=has_head)
        return MemoryEstimate(**parts, run_ahead=0.0, overhead=overhead, fragments=fragments)

    return find


def _distributed_optimizer_ranks(
    scenario: Scenario, layout: Layout, kernels: Kernels, stages: Sequence[StageSlice]
) -> Callable[[int], MemoryEstimate]:
    m = max(1, layout.num_microbatches(scenario.batch))

    def find(rank: int) -> MemoryEstimate:
        chunks = layout.placement.take(stages, rank)
        peaks = in_flight_peaks(layout.schedule, layout.pp, layout.virtual_stages, m, rank)
        n = sum(count_stage_parameters(scenario.model, chunk, layout.tp, layout.ep) for chunk in chunks)
        of_experts = sum(count_stage_experts(scenario.model, chunk, layout.ep) for chunk in chunks)
        unit = largest_unit(scenario.model, chunks, layout.tp, layout.ep)
        parts = (count_apart(scenario.model, scenario.optimizer, chunk, layout.tp, layout.ep) for chunk in chunks)
        return MemoryEstimate(
            **state_bytes(scenario, layout, n, unit, of_experts, Apart.add((each, 1) for each in parts)),
            activations=activation_bytes(scenario, layout, kernels, chunks, peaks),
            logits=logit_bytes(scenario, layout) if any(chunk.head for chunk in chunks) else 0.0,
            run_ahead=run_ahead_bytes(scenario, layout, kernels, chunks, peaks),
            overhead=scenario.engine.constants.overhead_bytes,
        )

    return find


def count_stage_parameters(model: ModelShape, stage: StageSlice, tp: int, ep: int = 1) -> float:
    """Parameters that one rank holds of a stage, experts included; a tied head counts once."""
    _, embedding, norm, head = _count_local_parameters(model, tp)
    is_tied = model.tied_embeddings and stage.embedding
    ends = embedding * stage.embedding + norm * stage.head + head * (stage.head and not is_tied)
    blocks = sum(count * _count_local_parameters(kind, tp)[0] for kind, count in model.kinds(stage.layers))
    return blocks + ends + count_stage_experts(model, stage, ep)


def count_stage_experts(model: ModelShape, stage: StageSlice, ep: int) -> float:
    """Parameters of experts that one rank holds of a stage."""
    return sum(count * _count_experts(kind) for kind, count in model.kinds(stage.layers)) / ep


def count_head_parameters(model: ModelShape, tp: int) -> float:
    """Parameters that one tp rank holds of the final norm and the head."""
    _, _, norm, head = _count_local_parameters(model, tp)
    return norm + head


@lru_cache(maxsize=256)
def _count_local_parameters(model: ModelShape, tp: int) -> tuple[float, float, float, float]:
    """Parameters that one tp rank holds of a block but its experts, the embedding, the final norm and the head."""

    def count(*weights: Weight) -> float:
        own = (weight for weight in weights if not weight.is_of_experts)
        return sum(weight.numel if weight.split is None else weight.numel / tp for weight in own)

    d = describe(model)
    return count(*d.block_weights), count(*d.before_blocks), count(*d.after_blocks), count(d.head)


@lru_cache(maxsize=256)
def _count_experts(model: ModelShape) -> int:
    """Parameters of all experts of a block."""
    return sum(weight.numel for weight in describe(model).block_weights if weight.is_of_experts)


def largest_unit(model: ModelShape, chunks: Sequence[StageSlice], tp: int, ep: int = 1) -> float:
    """Parameters of the largest FSDP unit: a block, or the embedding or head where there is one."""
    ends = any(chunk.embedding or chunk.head for chunk in chunks)
    experts = _count_experts(model)
    block = (count_block_parameters(model) - experts) / tp + experts / ep
    return max(block, count_embedding_parameters(model) / tp if ends else 0.0)


def state_bytes(
    scenario: Scenario, layout: Layout, n: float, unit: float, of_experts: float = 0.0, apart: Apart = NONE_APART
) -> dict[str, float]:
    """Component → bytes of n parameters and of their gradients and optimizer; the largest FSDP unit has `unit` of them.

    Weights are bf16, over S under ZeRO-3. Gradients are whole while they accumulate, and over S where each microbatch's
    are reduced at once (ZeRO-2 and -3). The optimizer has fp32 masters of bf16 weights, its state of them and copies of
    its own, over S. Buffers are reduction buckets, and the units that ZeRO-3 has gathered: one in use, one on its way.
    Parameters of experts, `of_experts` of the n, lie on as many ranks as hold the same experts instead of S. Frozen
    ones, which `apart` counts, have weights alone.
    """
    features, gathers, copy_bytes = scenario.engine.features, layout.zero == 3, scenario.engine.constants.copy_bytes
    groups = list_trained(scenario.optimizer, n, of_experts, apart)
    shards = [(each, own.shard(layout)) for each, own in groups]
    trained, shard, frozen = n - apart.frozen.total, sum([own for _, own in shards]), apart.frozen.shard(layout)
    spared = apart.spared / (count_state_shards(layout) if gathers else 1)
    return {
        "parameters": 2 * ((shard + frozen if gathers else n) - spared),
        "gradients": features.gradient_bytes * (shard if layout.zero > 1 and layout.pp == 1 else trained),
        "optimizer": sum([(4 + each.state_bytes(4) + copy_bytes) * own for each, own in shards]),
        "buffers": (features.bucket_bytes * trained if layout.dp > 1 else 0.0) + (2 * 2 * unit if gathers else 0.0),
    }


def activation_bytes(
    scenario: Scenario, layout: Layout, kernels: Kernels, chunks: Sequence[StageSlice], peaks: Sequence[Moment]
) -> float:
    """Held by all microbatches in flight at the fullest moment: Σ microbatches · layers · bytes a layer."""
    tokens, recompute = tokens_of(scenario, layout), Recompute.parse(layout.recompute)
    bytes_of = {kind: block_bytes_per_token(each, layout, kernels) for kind, each in scenario.kinds.items()}
    by_chunk, working_set = [], 0.0
    for chunk in chunks:
        layers = find_differentiated(scenario.model, chunk)
        held, covered = 0.0, recompute.count(layers)
        for kind, count in scenario.model.kinds(layers):
            block = bytes_of[kind]
            c = covered * count / max(1, len(layers))
            held += c * block.kept + (count - c) * block.whole
            working_set = max(working_set, block.again if c else 0.0)
        by_chunk.append(held)
    return tokens * (max(weigh_moments(peaks, by_chunk)) + working_set)


class KeptBytes(NamedTuple):
    """Bytes that a block keeps for its backward, for each token."""

    whole: float
    """Bytes that it keeps without recomputation."""
    kept: float
    """Bytes that are left where it is recomputed."""
    again: float
    """Most bytes that are there again at once while it is recomputed. Modules of the feed-forward are, and after its
    backward those of attention: output-discarding checkpoints of one half all run at the start of its backward."""


def block_bytes_per_token(scenario: Scenario, layout: Layout, kernels: Kernels) -> KeptBytes:
    """Bytes that a block keeps for its backward, for each token.

    The tape says what each step saves; a number for each row is left out. Sequence parallelism splits what norms read,
    and what they write where inputs are gathered again; tp what lies inside a branch, and the tokens of experts.
    Selective recomputation keeps all but what its modules free (recompute_modules.py); of attention alone that is what
    attention saves beside the tape (arXiv:2205.05198, sec. 5).
    """
    model, features, constants = scenario.model, scenario.engine.features, scenario.engine.constants
    h, t = model.hidden_size, layout.tp
    shared = t if layout.shards_sequence else 1
    ranks = {"stream": shared, "branch": t, "input": shared if features.regathers_inputs else 1, "whole": 1}
    beside = {"rope": float(features.rope_saved_bytes)}
    if find_kernel(NormKernel, kernels.norm).is_eager:
        beside["norm"] = constants.norm_saved_bytes / 2
    num_kept = 3 if features.fuses_swiglu else find_kernel(SwigluKernel, kernels.swiglu).num_kept
    held, sizes = constants.block_saved_bytes * h, format_sizes(scenario)._asdict()
    is_selective = "matmuls" in Recompute.parse(layout.recompute).kept
    tape = block_tape(model, TapeOptions(num_gated_kept=num_kept - 1, fullest=fullest_share(scenario, layout)))
    again = find_again(tape, features.recompute_modules if is_selective else ())

    def size(tensor: BlockTensor) -> float:
        return sizes[tensor.format] * tensor.width / ranks[tensor.spread]

    scores, freed = score_bytes(scenario, layout, kernels), {"attention": 0.0, "feed-forward": 0.0}
    for place, entry in enumerate(tape):
        own = [each for each in entry.saves if each.format != "exact" or entry.kind == "mixer"]
        read = entry.reads[0]
        more = beside[entry.kind] * read.width / ranks[read.spread] if entry.kind in beside else 0.0
        held += sum([size(each) for each in own]) + more
        for each in own:
            if half := again.freed.get(each.name):
                freed[half] += size(each)
        if place in again.places:
            freed["attention" if place < again.end else "feed-forward"] += more
            freed["attention"] += scores if entry.kind == "attention" else 0.0
    whole = held + scores
    if not is_selective:
        kept = sizes["compute"] * h / shared
        return KeptBytes(whole, kept, whole - kept)
    kept = whole - sum(freed.values()) + sum([size(each) for each in again.kept])
    return KeptBytes(whole, kept, max(freed.values()))


def score_bytes(scenario: Scenario, layout: Layout, kernels: Kernels) -> float:
    """Kept by attention for each token beside q, k, v and its output: per head a statistic, or a row of scores."""
    model, constants, t = scenario.model, scenario.engine.constants, layout.tp
    if describe(model).attention is NO_ATTENTION:
        return 0.0
    kernel = find_kernel(AttentionKernel, kernels.attention)
    saved: float = getattr(constants, kernel.saved) if kernel.saved else 0.0
    if kernel.holds_scores:
        return saved * model.num_heads * scenario.batch.seq_len / t
    return (4 * model.num_heads + saved * model.query_width) / t


def logit_bytes(scenario: Scenario, layout: Layout) -> float:
    """Logits, their fp32 copy, softmax and gradient at once; over t where the loss is vocabulary-parallel.

    Of a fused loss the logits alone, whose place their gradient takes.
    """
    constants, t = scenario.engine.constants, layout.tp
    logits = tokens_of(scenario, layout) * scenario.model.vocab_size
    if scenario.engine.features.fused_loss == "always":
        return activation_size(scenario) * logits / t
    if scenario.engine.features.loss == "vocab-parallel":
        return constants.logit_bytes * logits / t
    return (constants.logit_bytes + (constants.gathered_logit_bytes if t > 1 else 0.0)) * logits


def run_ahead_bytes(
    scenario: Scenario, layout: Layout, kernels: Kernels, chunks: Sequence[StageSlice], peaks: Sequence[Moment]
) -> float:
    """Full-width buffers that asynchronous tp collectives hold because the host starts them before the GPU gets there.

    The host is ahead only while a layer keeps the GPU longer than the host, so small work has none.
    """
    constants, t = scenario.engine.constants, layout.tp
    m, tokens, h = layout.num_microbatches(scenario.batch), tokens_of(scenario, layout), scenario.model.hidden_size
    if not isinstance(constants, RunAheadConstants) or t == 1 or m <= 1:
        return 0.0
    if layout.pp == 1:
        return constants.run_ahead_bytes * tokens * h
    flops = 6 * tokens * count_block_parameters(scenario.model) / t
    layer_s = flops / (0.55 * scenario.cluster.gpu.peak_flops_per_s)
    ahead = max(0.0, 1 - constants.run_ahead_host_s / layer_s)
    in_flight = max(weigh_moments(peaks, [1] * len(chunks)))
    more = min(constants.run_ahead_microbatches, max(0, m - in_flight)) if constants.run_ahead_microbatches else 0.0
    per_microbatch = sum(len(chunk.layers) for chunk in chunks) * block_bytes_per_token(scenario, layout, kernels).whole
    return ahead * tokens * (constants.message_saved_bytes * h * in_flight + more * per_microbatch)
