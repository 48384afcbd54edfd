"""Seconds of a block and of the loss for one microbatch on one rank, and what tp sends in them.

T tokens, s sequence, h hidden, f FFN, V vocabulary, a heads, t = tp; E experts, of which k compute a token.
docs/theory/time-model.md derives every formula; forward is one third of elementwise traffic, backward two.
"""

from functools import cache, lru_cache, partial
from math import inf
from typing import NamedTuple

from dtlayout.costmodel.attention import attention_s, flash_s
from dtlayout.costmodel.cache_keys import ComputeLayout, TensorLayout, key_of
from dtlayout.costmodel.comm import copied_bytes, count_exchanges, exchange_s, half_all_reduce_s, message_link, tp_link
from dtlayout.costmodel.context import block_cp_s
from dtlayout.costmodel.operators import choice_s, linear_s, matmul_s, pass_s, state_s
from dtlayout.costmodel.scenario import (
    Scenario,
    activation_size,
    fullest_share,
    sends_cast,
    tokens_of,
)
from dtlayout.costmodel.traffic import (
    base_bytes,
    cast_bytes,
    count_eager_norms,
    elementwise_bytes,
    own_part,
    permuted_bytes,
    rank_tape,
    ranks_by_spread,
    rounding_bytes,
    weight_cast_bytes,
)
from dtlayout.models.families import block_tape, describe
from dtlayout.models.kernel_calls import AttentionCall, KernelCall, Matmul
from dtlayout.models.operations import Norm
from dtlayout.plans.plan import OVERLAPPED_PIECES
from dtlayout.spec.fake_quant import FAKE_QUANT_FORMATS
from dtlayout.spec.kernel_records import ExpertsKernel, LossKernel
from dtlayout.spec.kernel_table import find_kernel
from dtlayout.spec.kernels import Kernels, count_loss_chunks
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.recompute import Recompute

_FUSED_PASSES = 4
"""Passes over the logits of a fused loss: one for each maximum, one for each sum, and two that make gradients."""

_MAXIMUM_BYTES = 4.0
"""A largest number in fp32."""
_SUM_BYTES = 4.0
"""A sum of squares in fp32."""


class BlockTime(NamedTuple):
    """Seconds of one microbatch, computing and sending apart."""

    forward_s: float
    """Matmuls, attention and elementwise kernels of forward."""
    backward_s: float
    """Matmuls, attention and elementwise kernels of backward, without recomputation."""
    forward_tp_s: float
    """tp's collectives, cp's messages and ep's exchanges that forward waits for."""
    backward_tp_s: float
    """tp's collectives, cp's messages and ep's exchanges that backward waits for."""
    routing_wait_s: float = 0.0
    """Time that the GPU waits for the host in forward and backward together, whatever it has to compute."""
    attention_s: float = 0.0
    """Attention's part of forward."""
    elementwise_s: float = 0.0
    """The part of norms, rotary embedding, activation function, permutations and states in forward."""
    last_matmul_s: float = 0.0
    """The last matmul's part of forward."""
    forward_cp_s: float = 0.0
    """cp's messages, a part of `forward_tp_s`."""
    forward_ep_s: float = 0.0
    """ep's exchanges, a part of `forward_tp_s`."""
    frozen_s: float = 0.0
    """The part of matmuls with frozen weights in forward: backward has one matmul for each, not two."""
    hidden_ep_s: float = 0.0
    """ep's exchanges of forward and backward that another microbatch's computation hides."""

    @property
    def forward_only(self) -> "BlockTime":
        """Times of such a block without a backward."""
        return self._replace(backward_s=0.0, backward_tp_s=0.0, routing_wait_s=self.routing_wait_s / 3)

    @property
    def weight_s(self) -> float:
        """Time of weights' gradients, a part of backward: that of forward's matmuls with trained weights."""
        return self.forward_s - self.attention_s - self.elementwise_s - self.frozen_s

    @property
    def gpu_s(self) -> float:
        """Forward and backward, in which nothing waits for the host."""
        return self.forward_s + self.forward_tp_s + self.backward_s + self.backward_tp_s


def operation_s(scenario: Scenario, kernels: Kernels, operation: KernelCall) -> float:
    """Seconds of an operator on the device."""
    match operation:
        case Matmul(m, n, k, batch, is_scaled):
            return batch * (linear_s if is_scaled else matmul_s)(scenario, m, n, k)
        case AttentionCall(flops):
            return flash_s(scenario, kernels.attention, flops)
    return pass_s(scenario, operation.moved_bytes)


def block_time(scenario: Scenario, layout: Layout, kernels: Kernels) -> BlockTime:
    """Times of a block without recomputation."""
    return BlockTimes(scenario)(layout, kernels)


class BlockTimes:
    """`block_time` for many layouts of one scenario. What does not change with the overlap of messages, or with the way
    in which tokens are exchanged, is computed once."""

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self._computed = cache(partial(_compute_block, scenario))
        self._tp_s = cache(partial(block_tp_s, scenario))

    def __call__(self, layout: Layout, kernels: Kernels) -> BlockTime:
        """Times of a block of a layout, or of a BlockLayout, without recomputation."""
        scenario, part = self.scenario, key_of(layout, ComputeLayout)
        block, attention_backward_s = self._computed(part, kernels)
        ep_s = block_ep_s(scenario, layout)  # as much in backward
        hidden = scenario.engine.constants.overlap if layout.overlaps_ep and not scenario.is_on_host else 0.0
        forward_ep_s = max(0.0, ep_s - hidden * block.forward_s)
        backward_ep_s = max(0.0, ep_s - hidden * block.backward_s)
        forward_tp_s, backward_tp_s = self._tp_s(key_of(layout, TensorLayout))
        forward_cp_s, backward_cp_s = block_cp_s(scenario, layout, block.attention_s, attention_backward_s)
        return block._replace(
            forward_tp_s=forward_tp_s + forward_cp_s + forward_ep_s,
            backward_tp_s=backward_tp_s + backward_cp_s + backward_ep_s,
            routing_wait_s=_routing_wait_s(scenario, layout, kernels),
            forward_cp_s=forward_cp_s,
            forward_ep_s=forward_ep_s,
            hidden_ep_s=2 * ep_s - forward_ep_s - backward_ep_s,
        )


def _compute_block(scenario: Scenario, layout: Layout, kernels: Kernels) -> tuple[BlockTime, float]:
    """Times of a block in which nothing is sent, and attention's part of its backward."""
    tokens = tokens_of(scenario, layout)
    tape = rank_tape(scenario, kernels)
    sizes = list_matmuls(scenario, layout, kernels)
    matmuls_s = [rank_matmul_s(scenario, each) for each in sizes]
    frozen_s = sum([
        each.frozen / each.outputs * each_s for each_s, each in zip(matmuls_s, sizes, strict=True) if each.frozen
    ])  # fmt: skip
    traffic = elementwise_bytes(scenario, layout, kernels) + cast_bytes(scenario, layout, kernels)
    elementwise_s = pass_s(scenario, tokens * traffic) / 3
    elementwise_s += tokens * sum([state_s(scenario, each) for each in describe(scenario.model).mixers])
    if num_norms := count_eager_norms(scenario, kernels, tape):
        elementwise_s += scenario.engine.constants.norm_launch_s * num_norms / 2
    attention_forward_s, attention_backward_s = attention_s(scenario, layout, kernels)
    permuting_s = pass_s(scenario, tokens * permuted_bytes(scenario, layout))  # as much in backward
    permuting_s += pass_s(scenario, base_bytes(scenario, layout, kernels))  # as much in backward
    casting_s, casting_again_s = (pass_s(scenario, each) for each in weight_cast_bytes(scenario, layout, kernels))
    rounding_s, rounding_again_s = (pass_s(scenario, each) for each in rounding_bytes(scenario, layout, kernels))
    choosing_s = tokens * sum([
        choice_s(scenario, each, scenario.batch.seq_len) for each in describe(scenario.model).choices
    ])  # fmt: skip
    forward_s = sum(matmuls_s) + choosing_s + attention_forward_s + elementwise_s + permuting_s + casting_s + rounding_s
    backward_s = 2 * (sum(matmuls_s) + elementwise_s) + attention_backward_s + permuting_s - frozen_s
    backward_s += casting_again_s + rounding_again_s
    backward_s += _expert_gradients_s(scenario, layout)
    computed = BlockTime(
        forward_s=forward_s,
        backward_s=backward_s,
        forward_tp_s=0.0,
        backward_tp_s=0.0,
        attention_s=attention_forward_s,
        elementwise_s=elementwise_s + permuting_s + rounding_s,
        last_matmul_s=matmuls_s[-1],
        frozen_s=frozen_s,
    )
    return computed, attention_backward_s


class RankMatmul(NamedTuple):
    """A matmul of a block on one rank."""

    times: float
    rows: float
    outputs: float
    inputs: float
    frozen: float
    """Outputs whose weights are frozen."""
    casts: bool
    """True if it computes in `Precision.matmuls`."""
    place: int
    """Place of its entry on the block's tape, of the first one where several are fused."""

    @property
    def sizes(self) -> tuple[float, float, float]:
        """Arguments of `matmul_s`."""
        return self.rows, self.outputs, self.inputs


def list_matmuls(scenario: Scenario, layout: Layout, kernels: Kernels) -> list[RankMatmul]:
    """Each matmul of a block on one rank; fused ones are one.

    An adapter's two are not fused with others. Matmuls of experts count more often where they are slower than others.
    Each expert multiplies the rows that it is sent: T·k/E of each rank's tokens, and `experts.imbalance` times as many
    on the fullest of ep's ranks.
    """
    sizes: list[RankMatmul] = []
    base = 0  # the last one that is no adapter's
    tokens, fuses = tokens_of(scenario, layout), scenario.engine.features.fuses_qkv
    experts = describe(scenario.model).experts
    for place, entry in enumerate(rank_tape(scenario, kernels)):
        if entry.kind == "matmul":
            (read,), (made,) = entry.reads, entry.makes
            outputs, inputs = own_part(made, layout), own_part(read, layout)
            frozen = 0.0 if entry.weights else outputs
            if entry.fuses and fuses:
                before = sizes[base]
                sizes[base] = before._replace(outputs=before.outputs + outputs, frozen=before.frozen + frozen)
                continue
            base = len(sizes) if entry.in_branch else base
            # Each rank multiplies what it has of the stream.
            is_of_stream = read.spread == made.spread == "stream"
            rows = tokens / ranks_by_spread(layout)["stream"] if is_of_stream else tokens
            sizes.append(RankMatmul(1, rows, outputs, inputs, frozen, entry.casts, place))
        elif entry.kind == "experts" and experts:  # widths are those of all copies of a token
            times = experts.number / layout.ep / scenario.engine.constants.experts_efficiency
            rows, k = tokens / layout.tp * experts.active_share * layout.ep, experts.per_token
            rows *= fullest_share(scenario, layout)
            for made in entry.makes:
                outputs = made.width / k
                frozen = 0.0 if entry.weights else outputs
                sizes.append(RankMatmul(times, rows, outputs, entry.reads[0].width / k, frozen, entry.casts, place))
    return sizes


def rank_matmul_s(scenario: Scenario, matmul: RankMatmul) -> float:
    """Seconds of one forward of a matmul; routers of other programs are small, and count like the matmuls beside
    them."""
    in_format = matmul.casts or not scenario.engine.features.casts_itself
    return matmul.times * (linear_s if in_format else matmul_s)(scenario, *matmul.sizes)


def _expert_gradients_s(scenario: Scenario, layout: Layout) -> float:
    """Seconds of adding a microbatch's gradients of experts to those of earlier ones: many weights for few tokens."""
    traffic = scenario.engine.constants.expert_gradient_traffic_bytes
    if not traffic or (experts := describe(scenario.model).experts) is None:
        return 0.0
    trained = sum(weight.numel for weight in experts.weights if weight.trains)
    return pass_s(scenario, traffic * trained / layout.ep)


def _routing_wait_s(scenario: Scenario, layout: Layout, kernels: Kernels) -> float:
    """Seconds that the GPU waits for the host in a layer with experts, forward and backward.

    They grow with experts, unless one kernel computes all of them. That one reads on the GPU how many rows each has, so
    that the host has nothing to read where no tokens are sent.
    """
    if (experts := describe(scenario.model).experts) is None:
        return 0.0
    constants, kernel = scenario.engine.constants, find_kernel(ExpertsKernel, kernels.experts)
    is_one_by_one = kernel.is_one_by_one_on(scenario.cluster.gpu.capability)
    if scenario.engine.features.cuda_graphs == "full":  # which has no place for a host that reads
        return 0.0
    read_s = constants.routing_wait_s if is_one_by_one or layout.ep > 1 else 0.0
    return read_s + (constants.expert_wait_s * experts.number / layout.ep if is_one_by_one else 0.0)


def block_tp_s(scenario: Scenario, layout: Layout) -> tuple[float, float]:
    """Seconds of tp's collectives in a block that nothing hides, forward and backward (arXiv:2205.05198, sec. 4.2.2).

    Forward closes attention and FFN with an all-reduce each, or under sequence parallelism with an all-gather before
    and a reduce-scatter after; backward does the same for the inputs' gradients, and gathers inputs again.
    """
    if layout.tp == 1:
        return 0.0, 0.0
    features, link = scenario.engine.features, tp_link(scenario, layout)
    # Buffers that all ranks of tp write to end with fast links.
    hides = features.runs_ahead or (layout.overlaps_tp and not link.crosses_nodes)
    exposed = scenario.engine.constants.tp_exposed if hides else 1.0
    size = tokens_of(scenario, layout) * scenario.model.hidden_size * activation_size(scenario)
    gathered_size = size
    if (fmt := scenario.precision.matmul_format) and sends_cast(scenario, layout):
        gathered_size = size * fmt.sent_bytes / activation_size(scenario)
    half_s, gather_s = (half_all_reduce_s(each, layout.tp, link) for each in (size, gathered_size))
    num_branches = describe(scenario.model).num_branches
    num_gathered = num_branches * (2 if features.regathers_inputs else 1)
    num_reduced = features.input_reductions * num_branches / 2
    forward_s, backward_s = num_branches * (half_s + gather_s), num_reduced * half_s
    backward_s += num_gathered * gather_s if layout.shards_sequence else num_reduced * half_s
    forward_maxima_s, backward_maxima_s = _maxima_s(scenario, layout)
    norms_s = _spread_norms_s(scenario, layout)
    forward_s, backward_s = forward_s + forward_maxima_s + norms_s, backward_s + backward_maxima_s + norms_s
    forward_hidden_s, backward_hidden_s = _hidden_tp_s(scenario, layout, size, gathered_size)
    return (forward_s - forward_hidden_s) * exposed, (backward_s - backward_hidden_s) * exposed


def _spread_norms_s(scenario: Scenario, layout: Layout) -> float:
    """Seconds of a block's norms over all that tp splits, in forward and again in backward: an all-reduce of a number a
    token for each."""
    num_norms = sum([isinstance(each, Norm) and each.over_ranks for each in describe(scenario.model).block])
    size = tokens_of(scenario, layout) * _SUM_BYTES
    return num_norms and num_norms * 2 * half_all_reduce_s(size, layout.tp, tp_link(scenario, layout))


def _maxima_s(scenario: Scenario, layout: Layout) -> tuple[float, float]:
    """Seconds in which tp's ranks find scales that tensors have in common, forward and backward (plans/scale.py).

    An all-reduce of two numbers before each matmul but those of experts, and of one before the gradients of those that
    tp splits by outputs and before what is gathered in fp8. Where weights are rounded by rows, forward has one of a
    number for each row that tp splits (plans/fake_quantize.py).
    """
    if (rounds := FAKE_QUANT_FORMATS.get(scenario.precision.fake_quant)) and not rounds.group:
        rows = [
            each.makes[0].width for each in rank_tape(scenario) if each.in_branch and each.reads[0].spread == "branch"
        ]
        link = tp_link(scenario, layout)
        return sum([2 * half_all_reduce_s(rounds.scale_bytes * each, layout.tp, link) for each in rows]), 0.0
    fmt = scenario.precision.matmul_format
    if fmt is None or not fmt.scales_tensors or not scenario.engine.features.casts_itself:
        return 0.0, 0.0
    each_s = 2 * half_all_reduce_s(_MAXIMUM_BYTES, layout.tp, tp_link(scenario, layout))
    casting = [entry for entry in rank_tape(scenario) if entry.casts and entry.kind == "matmul"]
    num_split = sum(entry.makes[0].spread == "branch" for entry in casting)
    num_gathered = describe(scenario.model).num_branches * sends_cast(scenario, layout)  # in either direction
    return (len(casting) + num_gathered) * each_s, (num_split + num_gathered) * each_s


def _hidden_tp_s(scenario: Scenario, layout: Layout, size: float, gathered_size: float) -> tuple[float, float]:
    """Seconds that `tp_overlap` hides of a block's collectives, forward and backward; 0 on a CPU.

    A branch sums up `size` bytes and gathers `gathered_size`.

    Sent in p pieces beside a matmul, all but the first piece (or the last) can hide behind it; a branch's input
    gradients are also beside the matmuls of its weights' gradients. Below 0 where more messages cost more than that.
    """
    if not layout.overlaps_tp or scenario.is_on_host:
        return 0.0, 0.0
    p, link, tokens = OVERLAPPED_PIECES, tp_link(scenario, layout), tokens_of(scenario, layout)

    def hidden_s(sent_bytes: float, beside_s: float, after_s: float = 0.0) -> float:
        whole_s, piece_s = (half_all_reduce_s(each, layout.tp, link) for each in (sent_bytes, sent_bytes / p))
        last_matmul_or_message_s = max(beside_s + piece_s, beside_s / p + p * piece_s)
        return whole_s - max(0.0, last_matmul_or_message_s - beside_s - after_s)

    forward_s = backward_s = opening_s = 0.0
    for entry in rank_tape(scenario):
        if not entry.in_branch:
            continue
        sent_beside_s = linear_s(scenario, tokens, own_part(entry.makes[0], layout), own_part(entry.reads[0], layout))
        if entry.makes[0].spread == "branch":
            opening_s += sent_beside_s
        else:
            closing_s = sent_beside_s
            forward_s += hidden_s(gathered_size, opening_s) + hidden_s(size, closing_s)
            backward_s += hidden_s(gathered_size, closing_s) + hidden_s(size, opening_s, after_s=opening_s)
            opening_s = 0.0
    return forward_s, backward_s


def block_ep_s(scenario: Scenario, layout: Layout) -> float:
    """Seconds of ep's exchanges in a block's forward: k copies of each token go to their experts, and come back."""
    if (experts := describe(scenario.model).experts) is None:
        return 0.0
    size = copied_bytes(scenario, layout, experts) / experts.per_token
    count = count_exchanges(scenario, Recompute.parse("none")).forward
    return count * exchange_s(scenario, layout, size, experts.per_token)


def head_time(scenario: Scenario, layout: Layout, kernels: Kernels) -> BlockTime:
    """Times of head and loss: a matmul with the vocabulary, and the loss's passes over the logits.

    The linear loss computes all gradients in forward, and adds the weight's up over its chunks.
    """
    model, constants, t = scenario.model, scenario.engine.constants, layout.tp
    tokens, size = tokens_of(scenario, layout), activation_size(scenario)
    matmul = matmul_s(scenario, tokens, model.vocab_size / t, model.hidden_size)
    is_replicated = scenario.engine.features.loss == "replicated"
    logits = tokens * model.vocab_size / (1 if is_replicated else t)
    is_fused = scenario.engine.features.fuses_loss(kernels)
    loss_s = pass_s(scenario, (_FUSED_PASSES * size if is_fused else constants.logit_traffic_bytes) * logits)
    trains = describe(model).head.trains
    forward_s, backward_s = matmul + loss_s / 2, (1 + trains) * matmul + loss_s / 2
    if find_kernel(LossKernel, kernels.loss).joins_matmul:
        weight = model.vocab_size / t * model.hidden_size * trains
        adding_s = pass_s(scenario, count_loss_chunks(tokens) * 2 * size * weight)
        forward_s, backward_s = forward_s + (backward_s + adding_s), 0.0
    link = tp_link(scenario, layout)
    gather_s = half_all_reduce_s(tokens * model.vocab_size * size, t, link) if is_replicated else 0.0
    reduce_s = 2 * half_all_reduce_s(tokens * model.hidden_size * size, t, link)
    return BlockTime(forward_s, backward_s, forward_tp_s=gather_s, backward_tp_s=reduce_s)


@lru_cache(maxsize=256)
def count_more_starts(model: ModelShape) -> float:
    """Kernels that the host starts for a block with its adapter, over those of one without that is trained whole.

    A step of the tape is one in forward and one in backward, and one more where a matmul's weight has a gradient. A
    LoRA scales what is between its matmuls, which is one in each direction too.
    """
    if model.adapter is None:
        return 1.0
    return _count_starts(model)[0] / _count_starts(model.base)[0]


@lru_cache(maxsize=256)
def weight_starts_share(model: ModelShape) -> float:
    """Kernels that compute weights' gradients, as a fraction of all that the host starts for a block."""
    number, of_weights = _count_starts(model)
    return of_weights / number


def _count_starts(model: ModelShape) -> tuple[int, int]:
    """Kernels that the host starts for a block by its tape, and those among them that compute weights' gradients."""
    tape = block_tape(model)
    trained = sum(entry.kind == "matmul" and bool(entry.weights) for entry in tape)
    return 2 * len(tape) + trained + 2 * sum(entry.kind == "add" for entry in tape), trained


def host_s(scenario: Scenario, layout: Layout, kernels: Kernels) -> float:
    """Least time of a layer, forward and backward: the host starts its kernels, and tp's collectives one by one."""
    constants = scenario.engine.constants
    is_alone, most_s = layout.tp == 1, constants.compiled_host_s if kernels.compiles_blocks else inf
    starts_s = min(most_s, constants.layer_host_s if is_alone else constants.layer_host_tp_s)
    if scenario.model.experts is not None:
        latent_s = constants.latent_host_s if scenario.model.latent_attention else 0.0
        starts_s = max(starts_s, constants.experts_host_s + latent_s)
    graphed = {"none": 1.0, "attention": constants.graphed_share, "full": 0.0}
    is_recorded = kernels.records_graphs and kernels.compiles_blocks and not scenario.is_on_host
    starts_s *= count_more_starts(scenario.model)
    starts_s *= graphed["full" if is_recorded else scenario.engine.features.cuda_graphs]
    waits = not is_alone and layout.is_pipelined and message_link(scenario, layout).crosses_nodes
    return starts_s + (constants.layer_host_message_s * layout.tp if waits else 0.0)
