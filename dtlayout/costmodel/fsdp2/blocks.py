"""Bytes that autograd holds while a block, the head or the embedding runs, operation by operation: sizes as phases.

Sizes are those of fsdp2_sizes.py. Left out: what a kernel allocates and frees inside one call.
"""

from typing import NamedTuple

from dtlayout.costmodel.fsdp2.phase import MemoryKind, Phase, changes
from dtlayout.costmodel.fsdp2.sizes import Sizes
from dtlayout.models.description import Activation, Linear, Norm, Rotary, RoutedExperts, SelfAttention, Weight

Steps = list[tuple[MemoryKind, float]]

_A, _G, _L = MemoryKind.ACTIVATIONS, MemoryKind.GRADIENTS, MemoryKind.LOGITS


class WeightGradients(NamedTuple):
    """How the gradients of a unit's weights come: each one beside the others, or added at once to what is there."""

    num_bytes: dict[str, float]
    """Bytes of each weight's gradient, in the compute format."""
    pile_up: bool
    """Whether they stay until the unit's backward is over."""

    def come(self, *weights: Weight) -> Steps:
        """The gradients of some weights arrive."""
        sizes = [self.num_bytes.get(weight.name, 0.0) for weight in weights]
        return [(_G, size) for size in sizes] if self.pile_up else [(_G, s) for size in sizes for s in (size, -size)]

    @property
    def left(self) -> float:
        """Bytes of all gradients that lie there in the end."""
        return sum(self.num_bytes.values()) if self.pile_up else 0.0


def block_forward(size: Sizes, kept: float, in_last_branch: float) -> Phase:
    """Leaves `kept`; before that what attention needs, then the last branch."""
    in_attention = size.in_attention
    return changes((_A, in_attention), (_A, in_last_branch - in_attention), (_A, kept - in_last_branch))


def block_backward(
    size: Sizes, weights: WeightGradients, kept: float, recomputed: float, *, splits: bool = False
) -> Phase:
    """From the gradient of its output, which lies there, to that of its input in its place.

    `splits` leaves what the gradients of its matmuls' weights are made of.
    """
    operations = size.description.block
    steps: Steps = [(_A, size.in_attention), (_A, recomputed - size.in_attention)] if recomputed else []
    stream = output = 0.0  # what stays of the stream's gradient, and of attention's result, when others let it go
    for operation, after in zip(reversed(operations), [None, *reversed(operations[1:])], strict=True):
        stays = put_off(size, operation) if splits and isinstance(operation, Linear) else _NOTHING
        match operation:
            case Norm():
                steps += _norm_backward(size, operation, weights)
                if not (operation.is_of_heads or operation.is_latent):
                    steps.append((_A, stream - size.stream))  # added to the residual stream's
                    stream = 0.0
            case Linear(style="rowwise"):
                if not operation.keeps_input:
                    output, stays = stays.read, stays._replace(read=0.0)
                steps += _closing_backward(size, operation, weights, stays)
                stream += 0.0 if size.shards_sequence else stays.gradient
            case Linear(style="replicated"):
                is_second = operation.keeps_input or isinstance(after, RoutedExperts)  # that reads the same
                steps += _replicated_backward(size, operation, weights, stays, adds=is_second)
            case Linear():
                adds = isinstance(after, Linear) and after.style == "colwise"
                steps += _opening_backward(size, operation, weights, stays, adds=adds)
            case Rotary(shared_width=shared, num_copies=num_copies) if shared:
                steps += [(_A, size.element * shared / size.stream_ranks - size.split(num_copies * shared))]
            case SelfAttention():
                written, inputs = size.split(operation.output_width), size.split(operation.input_width)
                steps += [
                    (_A, size.backward_work),
                    (_A, inputs - size.backward_work - size.attention - written + output),
                ]
                output = 0.0
            case Activation():
                steps += _activation_backward(size.split(operation.width), size.count_kept(operation))
            case RoutedExperts():
                steps += _experts_backward(size, operation, weights, adds=isinstance(after, Linear))
    return changes(*steps, (_A, stream + output), (_A, size.block - recomputed - kept))


def input_backward(size: Sizes, kept: float, recomputed: float) -> Phase:
    """As `block_backward`, of a backward that is split: in the end what `put_off` says is there, and no gradients."""
    return block_backward(size, WeightGradients({}, pile_up=False), kept, recomputed, splits=True)


def weight_backward(size: Sizes, weights: WeightGradients) -> Phase:
    """The gradients of a block's matmuls, which were put off; the first one's comes first."""
    norms = [weight for each in size.description.block if isinstance(each, Norm) for weight in each.weights]
    steps = weights.come(*norms)
    for matmul in size.description.block:
        if isinstance(matmul, Linear):
            steps += [*weights.come(*matmul.weights), (_A, -sum(put_off(size, matmul)))]
    return changes(*steps)


class DelayedWeightGradients(NamedTuple):
    """Bytes that a matmul keeps for the gradients of its weights."""

    read: float
    """What it read, if no other one did so before."""
    gradient: float
    """The gradient of what it wrote."""


_NOTHING = DelayedWeightGradients(0.0, 0.0)


def put_off(size: Sizes, matmul: Linear) -> DelayedWeightGradients:
    """What a matmul of a block keeps when the gradients of its weights are put off."""
    if matmul.style == "rowwise":
        return DelayedWeightGradients(size.split(matmul.inputs), size.whole)
    if matmul.style == "colwise":
        return DelayedWeightGradients(size.kept_by(matmul), size.split(matmul.outputs))
    return DelayedWeightGradients(size.kept_by(matmul), size.element * matmul.outputs / size.stream_ranks)


def head_forward(size: Sizes) -> Phase:
    """Final norm, head and loss, which leaves the gradient of the logits, or that of hidden states and weight.

    Whoever calls the head holds what the norm gave until the loss is there, also where the head gathers it first.
    """
    left = size.whole + size.head_weight if size.head_weight else size.logits
    dropped = size.norm_output if size.head_weight else 0.0
    held = size.stream if size.shards_sequence else 0.0
    kept = size.norm(size.description.final_norm).kept + size.norm_output
    return changes((_A, kept + held), (_L, size.loss), (_L, left - size.loss), (_A, -dropped - held))


def head_backward(size: Sizes, weights: WeightGradients) -> Phase:
    """From what the loss left to the gradient of the hidden states."""
    head, norm = size.description.head, size.description.final_norm
    if size.head_weight:
        to_input: Steps = [(_L, -size.whole - size.head_weight), (_A, size.whole), *weights.come(head)]
    else:
        to_input = [(_A, size.whole), *weights.come(head), (_L, -size.logits), (_A, -size.norm_output)]
    return changes(*to_input, *_sum_over_tp(size, size.whole), *_norm_backward(size, norm, weights))


def embedding_backward(size: Sizes, weights: WeightGradients) -> Phase:
    """From the gradient of the hidden states, which it lets go, to that of the weight."""
    come = weights.come(size.description.embedding)
    return changes(*_gather(size), *come, *_drop_gathered(size), (_A, -size.stream))


def _closing_backward(size: Sizes, matmul: Linear, weights: WeightGradients, stays: DelayedWeightGradients) -> Steps:
    """A matmul that closes a branch: the stream's gradient is gathered, and becomes that of what the matmul read."""
    come, read = weights.come(*matmul.weights), size.split(matmul.inputs)
    steps: Steps = [*_gather(size), (_A, read), *come, (_A, stays.read - size.kept_by(matmul))]
    return [*steps, (_A, stays.gradient - size.whole)] if size.shards_sequence else steps


def _opening_backward(
    size: Sizes, matmul: Linear, weights: WeightGradients, stays: DelayedWeightGradients, *, adds: bool
) -> Steps:
    """A matmul that opens a branch; `adds` where another one has left a gradient of their common input."""
    read = size.element * matmul.inputs
    steps: Steps = [(_A, read), *weights.come(*matmul.weights), (_A, stays.gradient - size.split(matmul.outputs))]
    steps += _add_two(size) if adds else []
    kept = stays.read - size.kept_by(matmul)
    return steps + ([(_A, kept), *_sum_over_tp(size, read)] if matmul.keeps_input else [])


def _replicated_backward(
    size: Sizes, matmul: Linear, weights: WeightGradients, stays: DelayedWeightGradients, *, adds: bool
) -> Steps:
    """A matmul of a rank's own part of the residual stream; `adds` where that has a gradient already."""
    written = size.element * matmul.outputs / size.stream_ranks
    steps: Steps = [(_A, size.stream), *weights.come(*matmul.weights), (_A, stays.gradient - written)]
    return [*steps, (_A, stays.read - size.stream * adds - size.kept_by(matmul))]


def _experts_backward(size: Sizes, experts: RoutedExperts, weights: WeightGradients, *, adds: bool) -> Steps:
    """From the gradient of the residual stream, copied for each expert of a token, to that of what the experts read.

    `adds` where a shared expert has left a gradient of the same.
    """
    copies, inside = size.copies(experts), size.split(experts.per_token * experts.inner_width)
    *opening, closing = experts.weights
    steps: Steps = [(_A, copies), (_A, inside), *weights.come(closing), (_A, -inside - copies)]
    steps += [*_activation_backward(inside, size.count_kept(experts)), (_A, copies)]
    steps += [(_A, copies), (_A, -copies)] * (experts.num_opening - 1)  # of gate, added to that of up
    steps += [*weights.come(*opening), (_A, -experts.num_opening * inside - copies), (_A, size.stream), (_A, -copies)]
    steps.append((_A, size.element * experts.number / size.stream_ranks))  # of the router's scores
    return steps + ([(_A, -size.stream)] if adds else [])


def _activation_backward(f: float, num_kept: int) -> Steps:
    """The gradient of its result, f bytes, gives way to those of what it reads, and what it keeps goes.

    By the number of tensors that it keeps: without a gate; both gradients in place; one after the other.
    """
    silu: Steps = [(_A, f), (_A, -2 * f)]
    steps: dict[int, Steps] = {1: silu, 2: [(_A, -f)], 3: [(_A, 2 * f), (_A, -3 * f), *silu]}
    return steps[num_kept]


def _gather(size: Sizes) -> Steps:
    """A gradient is gathered along the sequence: once as ranks lie, and once in the order of tokens."""
    copied: Steps = [(_A, size.whole), (_A, -size.whole)] if size.reorders else []
    return [(_A, size.whole), *copied] if size.shards_sequence else []


def _drop_gathered(size: Sizes) -> Steps:
    return [(_A, -size.whole)] if size.shards_sequence else []


def _add_two(size: Sizes) -> Steps:
    """The gradients of two uses become one."""
    return [(_A, -size.whole)] if size.adds_in_place else [(_A, size.whole), (_A, -2 * size.whole)]


def _sum_over_tp(size: Sizes, whole: float) -> Steps:
    """An all-reduce writes its result beside its input; a reduce-scatter first puts that in the order of ranks."""
    if size.shards_sequence:
        copied = whole * size.reorders
        return [(_A, copied + whole / size.stream_ranks), (_A, -copied - whole)]
    return [(_A, whole), (_A, -whole)] if size.is_split else []


def _norm_backward(size: Sizes, norm: Norm, weights: WeightGradients) -> Steps:
    """The gradient of its output gives way to that of its input.

    As separate operations: of the product, then with the weight, then through the product; in the end that one lies
    beside four copies for the way through the scale: the mean's gradient, the power, and both of their products.
    """
    own, come = size.norm(norm), weights.come(*norm.weights)
    if size.has_norm_kernel:
        return [(_A, own.gradient), (_A, -own.gradient - own.kept), *come]
    exact, cast = own.exact, own.exact if size.casts else 0.0
    return [
        (_A, cast + 2 * exact), (_A, -cast - exact - own.gradient - own.rest),
        (_A, 4 * exact), (_A, -4 * exact + own.gradient - exact),
        (_A, -own.input), *come,
    ]  # fmt: skip
