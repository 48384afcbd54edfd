"""What autograd holds in a block, the head and the embedding of our Llama, operation by operation.

Legend: T tokens of a microbatch on one cp rank, h hidden, v width of all key-value heads, f FFN, V vocabulary, a heads,
s sequence, t = tp; e bytes of the compute format, w of the exact one (fp32 or finer) in which norms, RoPE and the loss
compute. To be read with models/llama.py and ops/*.py. Left out: what a kernel allocates and frees inside one call.

[Note: what a compiled block keeps]
torch.compile sees forward and backward together and keeps what is cheapest to go on from: the results of matmuls and
attention and what they read, one number a token for each norm, and the result of o instead of the second norm's input.
It computes silu(gate) again. Its norms are so as if one kernel did them. `tests/plans/test_compile.py` counts.
"""

import math
from dataclasses import dataclass

from dtlayout.costmodel.phase import Part, Phase, changes
from dtlayout.costmodel.scenario import Scenario
from dtlayout.kernel import AttentionKernel, LossKernel, NormKernel, SwigluKernel, find_kernel
from dtlayout.kernels import Kernels, count_loss_chunks
from dtlayout.layout import Layout
from dtlayout.precision import BYTES
from dtlayout.recompute import Kept, Recompute

Steps = list[tuple[Part, float]]

_A, _G, _L = Part.ACTIVATIONS, Part.GRADIENTS, Part.LOGITS


@dataclass(frozen=True)
class Sizes:
    """Bytes of one microbatch's tensors on one rank."""

    whole: float
    """Hidden states in the compute format, T·h·e."""
    share: float
    """That part of them which lies outside of matmuls: over t under sequence parallelism."""
    exact: float
    """That part in the exact format."""
    norm_output: float
    """What matmuls keep of their input."""
    query: float
    """Queries, over t; attention's output is as large."""
    key: float
    """Keys, over t; values are as large."""
    ffn: float
    """Gate, up or their product, over t."""
    norm_input: float
    """What a norm keeps of its input: the hidden states themselves, or an exact copy."""
    norm_rest: float
    """What it keeps beside it: one number a token and, as separate operations, input · scale."""
    attention: float
    """What attention keeps, its output included."""
    attention_results: float
    """What of it are results of kernels that selective recomputation keeps, instead of q and k."""
    mask: float
    """What keeps documents apart in all layers of a stage, s numbers a token; 0 where there is none."""
    keeps_mask: bool
    """Whether attention keeps it for its backward."""
    forward_work: float
    """What its forward needs beside what it keeps, when it is fullest."""
    backward_work: float
    """What its backward needs beside that: gradients of q, k and v, or of scores."""
    logits: float
    """As many as are there at once, in the compute format; their gradient is as large."""
    logit_work: float
    """What the loss needs beside them, when it is fullest: their exponentials in the exact format."""
    head_weight: float
    """The head's weight, and its gradient; 0 where that is not computed in forward."""
    is_split: bool
    """Whether tp splits matmuls."""
    shards_sequence: bool
    """Whether it splits the hidden states between them too."""
    casts: bool
    """Whether the compute format is not the exact one."""
    has_norm_kernel: bool
    """Whether a norm is one kernel."""
    has_gate: bool
    """Whether the FFN has one."""
    num_ffn: int
    """Tensors of that size that the FFN keeps: liger-kernel's and a compiled block compute silu(gate) again."""
    keeps_last: bool
    """Whether selective recomputation keeps the last matmul's result too, of which backward needs nothing."""

    @property
    def keeps_stream(self) -> bool:
        """Whether a norm keeps the hidden states themselves, which a checkpoint or the runtime then need not keep."""
        return self.has_norm_kernel or not self.casts

    @property
    def loss(self) -> float:
        """What the loss holds at its fullest moment beside the final norm and what that keeps."""
        early = self.head_weight + self.whole if self.head_weight else 0.0
        return early + 2 * self.logits + self.logit_work

    @property
    def norm(self) -> float:
        """What a norm keeps."""
        return self.norm_input + self.norm_rest

    @property
    def block(self) -> float:
        """What a block keeps: norms and their outputs, attention, then gate, up, silu(gate) and the product."""
        return 2 * (self.norm + self.norm_output) + self.attention + self.num_ffn * self.ffn

    @property
    def in_attention(self) -> float:
        """What a block's forward holds while attention runs: first norm, residual stream, projections."""
        return (
            self.norm + self.norm_output + self.share + self.query + 2 * self.key + self.attention + self.forward_work
        )

    def kept(self, recompute: Recompute, layer: int) -> float:
        """What a block leaves for its backward: everything, its input, or also results that are kept.

        With matmuls kept, under tp the results of o and down are there twice, this rank's part and the sum.
        """
        if not recompute.covers(layer):
            return self.block
        num_results = 2 if self.keeps_last else 1
        sums = num_results * self.share if self.is_split and recompute.is_selective else 0.0
        matmuls = self.query + 2 * self.key + (2 if self.has_gate else 1) * self.ffn + num_results * self.whole
        kept: dict[Kept, float] = {"matmuls": matmuls, "attention": self.attention_results}
        return self.share + sums + sum(kept[kind] for kind in recompute.kept)

    def recomputed(self, recompute: Recompute, layer: int) -> float:
        """What comes to what a block has kept when it is computed again, up to the last thing that backward needs.

        With matmuls kept v, gate and up are there; q, k and the result of o are let go on the way.
        """
        if not recompute.covers(layer):
            return 0.0
        again = self.block - (self.share if self.keeps_stream else 0.0)
        reused = self.key + (2 if self.has_gate else 1) * self.ffn
        saved: dict[Kept, float] = {
            "matmuls": reused + self.query + self.key + self.whole,
            "attention": self.attention_results,
        }
        return again - sum(saved[kind] for kind in recompute.kept)


def sizes_of(scenario: Scenario, layout: Layout, kernels: Kernels) -> Sizes:
    """The sizes of a layout, [Note: what a compiled block keeps]. On CPU no kernel of PyTorch does a whole norm."""
    model, habits, t = scenario.model, scenario.engine.habits, layout.tp
    e = BYTES[scenario.precision.compute]
    w = max(e, 4)
    tokens = layout.micro_batch * scenario.batch.seq_len / layout.cp
    width = tokens * model.hidden_size
    shared = t if layout.shards_sequence else 1
    device_type = scenario.cluster.gpu.device_type
    norm, loss = find_kernel(NormKernel, kernels.norm), find_kernel(LossKernel, kernels.loss)
    has_norm_kernel = device_type not in norm.separate or kernels.compiles_blocks
    product = 0 if has_norm_kernel else w if norm.keeps_exact else e
    columns = model.vocab_size / (t if habits.loss == "vocab-parallel" else 1)
    kernel, swiglu = find_kernel(AttentionKernel, kernels.attention), find_kernel(SwigluKernel, kernels.swiglu)
    has_mask = scenario.document_mask and kernel.needs_mask(device_type)
    at_once = 1 if not loss.in_chunks else math.ceil(tokens / count_loss_chunks(tokens)) / tokens
    query, key = width * e / t, tokens * model.num_kv_heads * model.head_dim * e / t
    attention, results, forward_work, backward_work = _attention(scenario, layout, kernels, query, key)
    return Sizes(
        whole=width * e,
        share=width * e / shared,
        exact=width * w / shared,
        norm_output=width * e / (shared if habits.regathers_inputs else 1),
        query=query,
        key=key,
        ffn=tokens * model.ffn_size * e / t,
        norm_input=width * (e if has_norm_kernel else w) / shared,
        norm_rest=(width * product + tokens * w) / shared,
        attention=attention,
        attention_results=results,
        mask=tokens * scenario.batch.seq_len * e if has_mask else 0.0,
        keeps_mask=kernel.keeps_mask,
        forward_work=forward_work,
        backward_work=backward_work,
        logits=tokens * columns * e * (at_once if loss.joins_matmul else 1),
        logit_work=tokens * columns * w * at_once,
        head_weight=columns * model.hidden_size * e if loss.joins_matmul else 0.0,
        is_split=t > 1,
        shards_sequence=layout.shards_sequence,
        casts=e < w,
        has_norm_kernel=has_norm_kernel,
        has_gate=model.gated_ffn,
        num_ffn=(3 if kernels.compiles_blocks else swiglu.num_kept) if model.gated_ffn else 2,
        keeps_last=not kernels.compiles_blocks,
    )


def _attention(
    scenario: Scenario, layout: Layout, kernels: Kernels, query: float, key: float
) -> tuple[float, float, float, float]:
    """What attention keeps, what of it selective recomputation keeps, and the work space of forward and of backward.

    Flash: q, k, v, the output and a number a row. sdpa-math: exact copies of q, k and v, each for every query head, and
    the softmax; results of its two matmuls are exact. Forward has also the scores with the mask, and k as it was, but
    no output yet; backward the gradients of softmax and scores.
    """
    model, constants = scenario.model, scenario.engine.constants
    w = max(BYTES[scenario.precision.compute], 4)
    heads = layout.micro_batch * scenario.batch.seq_len / layout.cp * model.num_heads / layout.tp
    scores, copy = heads * scenario.batch.seq_len, w * heads * model.head_dim
    kernel = find_kernel(AttentionKernel, kernels.attention)
    inputs = query + 2 * (query if kernel.repeats_heads else key)
    if kernel.copies_exactly:
        kept = 3 * copy + w * scores + query
        return kept, w * scores + copy, w * scores + key, max(inputs, 2 * w * scores)
    saved: float = getattr(constants, kernel.saved) if kernel.saved else 0.0
    if kernel.holds_scores:
        return inputs + query + saved * scores, query, 0.0, inputs
    rows, packed = w * heads, saved * heads * model.head_dim
    return inputs + query + rows + packed, query + rows, 0.0, inputs


@dataclass(frozen=True)
class WeightGradients:
    """How the gradients of a unit's weights come: each one beside the others, or added at once to what is there."""

    num_bytes: dict[str, float]
    """Of each weight, in the compute format."""
    pile_up: bool
    """Whether they stay until the unit's backward is over."""

    def come(self, name: str) -> Steps:
        """One more weight's."""
        size = self.num_bytes.get(name, 0.0)
        return [(_G, size)] if self.pile_up else [(_G, size), (_G, -size)]

    @property
    def left(self) -> float:
        """All that lie there in the end."""
        return sum(self.num_bytes.values()) if self.pile_up else 0.0


def block_forward(size: Sizes, kept: float) -> Phase:
    """Leaves `kept`. Beside it: what attention needs, then the residual stream, down's output and its sum over tp."""
    in_attention = size.in_attention
    dropped = min(size.block - kept, size.num_ffn * size.ffn + size.norm_output) if kept < size.block else 0.0
    summing = (size.share + size.whole * size.shards_sequence) if size.is_split else 0.0
    at_end = kept + dropped + size.whole + summing + 2 * size.share
    return changes((_A, in_attention), (_A, at_end - in_attention), (_A, kept - at_end))


def block_backward(size: Sizes, weights: WeightGradients, kept: float, recomputed: float) -> Phase:
    """From the gradient of its output, which lies there, to that of its input in its place."""
    silu: Steps = [(_A, size.ffn), (_A, -2 * size.ffn)]
    activations: dict[int, Steps] = {  # by what is kept: without a gate; both gradients in place; one after the other
        2: silu, 3: [(_A, -size.ffn)], 4: [(_A, 2 * size.ffn), (_A, -3 * size.ffn), *silu],
    }  # fmt: skip
    gate: Steps = [(_A, size.whole), *weights.come("gate"), (_A, -size.ffn), *_add_two(size)]
    inputs = size.query + 2 * size.key
    table: Steps = [
        *([(_A, size.in_attention), (_A, recomputed - size.in_attention)] if recomputed else []),
        *_gather(size),
        (_A, size.ffn), *weights.come("down"), (_A, -size.ffn), *_drop_gathered(size),
        *activations[size.num_ffn],
        (_A, size.whole), *weights.come("up"), (_A, -size.ffn),
        *(gate if size.has_gate else []),
        (_A, -size.norm_output),
        *_sum_over_tp(size),
        *_norm_backward(size),
        (_A, -size.share),  # added to the residual stream's
        *_gather(size),
        (_A, size.query), *weights.come("o"), *_drop_gathered(size),
        (_A, size.backward_work), (_A, inputs - size.backward_work - size.attention - size.query),
        (_A, size.whole), *weights.come("v"), (_A, -size.key),
        (_A, size.whole), *weights.come("k"), (_A, -size.key), *_add_two(size),
        (_A, size.whole), *weights.come("q"), (_A, -size.query), *_add_two(size),
        (_A, -size.norm_output),
        *_sum_over_tp(size),
        *_norm_backward(size),
        *weights.come("norms"),
        (_A, -size.share),
    ]  # fmt: skip
    return changes(*table, (_A, size.block - recomputed - kept))


def head_forward(size: Sizes) -> Phase:
    """Final norm, head and loss, which leaves the gradient of the logits, or that of hidden states and weight.

    Whoever calls the head holds what the norm gave until the loss is there, also where the head gathers it first.
    """
    left = size.whole + size.head_weight if size.head_weight else size.logits
    dropped = size.norm_output if size.head_weight else 0.0
    held = size.share if size.shards_sequence else 0.0
    return changes(
        (_A, size.norm + size.norm_output + held), (_L, size.loss), (_L, left - size.loss), (_A, -dropped - held)
    )


def head_backward(size: Sizes, weights: WeightGradients) -> Phase:
    """From what the loss left to the gradient of the hidden states."""
    if size.head_weight:
        to_input: Steps = [(_L, -size.whole - size.head_weight), (_A, size.whole), *weights.come("head")]
    else:
        to_input = [(_A, size.whole), *weights.come("head"), (_L, -size.logits), (_A, -size.norm_output)]
    return changes(
        *to_input,
        *_sum_over_tp(size),
        *_norm_backward(size),
        *weights.come("final norm"),
    )


def embedding_backward(size: Sizes, weights: WeightGradients) -> Phase:
    """From the gradient of the hidden states, which it lets go, to that of the weight."""
    return changes(*_gather(size), *weights.come("embedding"), *_drop_gathered(size), (_A, -size.share))


def _gather(size: Sizes) -> Steps:
    """A gradient is gathered along the sequence: once as ranks lie, once in the order of tokens."""
    return [(_A, 2 * size.whole), (_A, -size.whole)] if size.shards_sequence else []


def _drop_gathered(size: Sizes) -> Steps:
    return [(_A, -size.whole)] if size.shards_sequence else []


def _add_two(size: Sizes) -> Steps:
    """The gradients of two uses become one: in place, but not as DTensors."""
    return [(_A, size.whole), (_A, -2 * size.whole)] if size.is_split else [(_A, -size.whole)]


def _sum_over_tp(size: Sizes) -> Steps:
    """An all-reduce writes its result beside its input; a reduce-scatter first puts that in the order of ranks."""
    if size.shards_sequence:
        return [(_A, size.whole + size.share), (_A, -2 * size.whole)]
    return [(_A, size.whole), (_A, -size.whole)] if size.is_split else []


def _norm_backward(size: Sizes) -> Steps:
    """The gradient of its output gives way to that of its input.

    As separate operations: of the product, then with the weight, then through the product; in the end that one lies
    beside four copies for the way through the scale: the mean's gradient, the power, and both of their products.
    """
    if size.has_norm_kernel:
        return [(_A, size.share), (_A, -size.share - size.norm)]
    exact, cast = size.exact, size.exact if size.casts else 0.0
    return [
        (_A, cast + 2 * exact), (_A, -cast - exact - size.share - size.norm_rest),
        (_A, 4 * exact), (_A, -4 * exact + size.share - exact),
        (_A, -size.norm_input),
    ]  # fmt: skip
