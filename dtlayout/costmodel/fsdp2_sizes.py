"""Bytes of the tensors of a block, the head and the embedding, from the operations of `models.description`.

Legend: T tokens of a microbatch on one cp rank, h hidden, q width of all query heads, a heads, s sequence, t = tp; e
bytes of the compute format, w of the exact one (fp32 or finer) in which norms, RoPE and the loss compute. To be read
with models/llama.py and ops/*.py. fsdp2_blocks.py says when they come and go.

[Note: what a compiled block keeps]
torch.compile sees forward and backward together and keeps what is cheapest to go on from: the results of matmuls and
attention and what they read, one number a token for each norm, and the result of o instead of the second norm's input.
It computes silu(gate) again. Its norms are so as if one kernel did them. `tests/plans/test_compile.py` counts.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from dtlayout.costmodel.scenario import Scenario
from dtlayout.kernel import AttentionKernel, LossKernel, NormKernel, SwigluKernel, find_kernel
from dtlayout.kernels import Kernels, count_loss_chunks
from dtlayout.layout import Layout
from dtlayout.models.description import Activation, Description, Linear, Norm, Operation, SelfAttention
from dtlayout.models.families import describe
from dtlayout.precision import BYTES
from dtlayout.recompute import Recompute


@dataclass(frozen=True)
class NormBytes:
    """Bytes of a norm's tensors."""

    gradient: float
    """The gradient of its output or of its input, in the compute format."""
    exact: float
    """Its output or its input in the exact format."""
    input: float
    """Kept for backward: its input itself, or an exact copy."""
    rest: float
    """Kept beside the input: one number for each row and, as separate operations, input · scale."""

    @property
    def kept(self) -> float:
        """All that it keeps."""
        return self.input + self.rest


@dataclass(frozen=True)
class Sizes:
    """Bytes of one microbatch's tensors on one rank."""

    description: Description
    """The operations whose tensors these are."""
    element: float
    """One element a token in the compute format, T·e."""
    exact_element: float
    """One element a token in the exact format, T·w."""
    tp: int
    """Ranks that share what lies inside a branch."""
    stream_ranks: int
    """Ranks that share the residual stream outside of branches: t under sequence parallelism."""
    regathers: bool
    """Whether matmuls that read the gathered stream keep their own part alone, and gather it again in backward."""
    has_norm_kernel: bool
    """Whether a norm is one kernel."""
    product_element: float
    """One element a token of input · scale, which a norm of separate operations keeps."""
    attention: float
    """Kept by attention, its output included."""
    attention_results: float
    """Results of attention's kernels, which selective recomputation keeps instead of q and k."""
    mask: float
    """The mask that keeps documents apart in all layers of a stage, s numbers a token; 0 where there is none."""
    keeps_mask: bool
    """Whether attention keeps the mask for its backward."""
    forward_work: float
    """Work space of attention's forward at its fullest, beside what it keeps."""
    backward_work: float
    """Work space of attention's backward: gradients of q, k and v, or of scores."""
    logits: float
    """Logits that are there at once, in the compute format; their gradient is as large."""
    logit_work: float
    """The loss's work space at its fullest: exponentials of the logits in the exact format."""
    head_weight: float
    """The head's weight, and its gradient; 0 where that is not computed in forward."""
    num_gated_kept: int
    """Tensors that a gated activation keeps beside its result: what it reads and, if it is not computed again, silu."""
    keeps_last: bool
    """Whether selective recomputation keeps the last matmul's result too, of which backward needs nothing."""

    @cached_property
    def whole(self) -> float:
        """Hidden states, T·h·e."""
        return self.element * self.description.final_norm.width

    @cached_property
    def stream(self) -> float:
        """The residual stream: hidden states outside of branches."""
        return self.whole / self.stream_ranks

    @cached_property
    def norm_output(self) -> float:
        """The output of a norm as the matmuls that read it keep it."""
        return self.stream if self.regathers else self.whole

    @property
    def is_split(self) -> bool:
        """Whether tp splits matmuls."""
        return self.tp > 1

    @property
    def shards_sequence(self) -> bool:
        """Whether tp splits the residual stream too."""
        return self.stream_ranks > 1

    @property
    def casts(self) -> bool:
        """Whether the compute format is not the exact one."""
        return self.element < self.exact_element

    @property
    def keeps_stream(self) -> bool:
        """Whether a norm keeps its input itself, which a checkpoint or the runtime then need not keep."""
        return self.has_norm_kernel or not self.casts

    @property
    def loss(self) -> float:
        """Held by the loss at its fullest moment, beside the final norm and what that keeps."""
        early = self.head_weight + self.whole if self.head_weight else 0.0
        return early + 2 * self.logits + self.logit_work

    @cached_property
    def block(self) -> float:
        """Kept by a block without recomputation."""
        return sum(map(self.kept_by, self.description.block))

    @cached_property
    def in_attention(self) -> float:
        """Held by a block's forward while attention runs: the stream, projections, and what is kept until then."""
        held = self.stream + self.attention + self.forward_work
        for operation in takewhile(lambda each: not isinstance(each, SelfAttention), self.description.block):
            held += self.kept_by(operation)
            if isinstance(operation, Linear):
                held += self.result_of(operation)
            elif isinstance(operation, Norm) and operation.is_of_heads and self.keeps_stream:
                held -= self.split(operation.width)  # a projection, which is there anyway
        return held

    @cached_property
    def last_branch(self) -> float:
        """Kept by a block after its last norm."""
        after = takewhile(lambda each: not isinstance(each, Norm), reversed(self.description.block))
        return sum(map(self.kept_by, after))

    def split(self, width: int) -> float:
        """A tensor inside a branch with so many elements a token, over t."""
        return self.element * width / self.tp

    def norm(self, norm: Norm) -> NormBytes:
        """A norm of the residual stream, or of heads."""
        ranks = self.tp if norm.is_of_heads else self.stream_ranks
        width, num_rows = norm.width / ranks, max(1, norm.num_heads) / ranks
        compute, exact = self.element * width, self.exact_element * width
        rest = self.product_element * width + self.exact_element * num_rows
        return NormBytes(compute, exact, compute if self.has_norm_kernel else exact, rest)

    def result_of(self, operation: Operation) -> float:
        """What recomputation may keep of an operation: of a matmul its outputs, or a term of the branch's sum."""
        if not isinstance(operation, Linear):
            return self.attention_results
        return self.split(operation.outputs) if operation.style == "colwise" else self.whole

    def results(self, recompute: Recompute, *, last: bool) -> float:
        """Results that a recomputed block keeps, that of its last matmul only if `last`."""
        skipped = None if last else next(each for each in reversed(self.description.block) if isinstance(each, Linear))
        kept = (each for each in self.description.block if each.kept_as in recompute.kept and each is not skipped)
        return sum(map(self.result_of, kept))

    def kept_by(self, operation: Operation) -> float:
        """Kept by an operation for its backward, and by no other one."""
        match operation:
            case Norm():
                return self.norm(operation).kept
            case Linear(keeps_input=True):
                return self.norm_output if operation.style == "colwise" else self.split(operation.inputs)
            case SelfAttention():
                return self.attention
            case Activation():
                return self.count_kept(operation) * self.split(operation.width)
        return 0.0

    def count_kept(self, activation: Activation) -> int:
        """Tensors that an activation keeps beside its result."""
        return self.num_gated_kept if activation.gated else 1

    def kept(self, recompute: Recompute, layer: int) -> float:
        """Left by a block for its backward: everything, its input, or also results that are kept.

        With anything kept, under tp so are the sums that close a branch; with matmuls also each rank's term of them.
        """
        if not recompute.covers(layer):
            return self.block
        num_sums = self.description.num_branches - (not self.keeps_last)
        sums = num_sums * self.stream if self.is_split and recompute.is_selective else 0.0
        return self.stream + sums + self.results(recompute, last=self.keeps_last)

    def recomputed(self, recompute: Recompute, layer: int) -> float:
        """Added to what a block has kept when it is computed again, up to the last thing that backward needs.

        The matmuls' results that it needs are there already, and the others are let go on the way.
        """
        if not recompute.covers(layer):
            return 0.0
        again = self.block - (self.stream if self.keeps_stream else 0.0)
        return again - self.results(recompute, last=False)


def sizes_of(scenario: Scenario, layout: Layout, kernels: Kernels) -> Sizes:
    """The sizes of a layout, [Note: what a compiled block keeps]. On CPU no kernel of PyTorch does a whole norm."""
    model, features, t = scenario.model, scenario.engine.features, layout.tp
    e = BYTES[scenario.precision.compute]
    w = max(e, 4)
    tokens = layout.micro_batch * scenario.batch.seq_len / layout.cp
    device_type = scenario.cluster.gpu.device_type
    norm, loss = find_kernel(NormKernel, kernels.norm), find_kernel(LossKernel, kernels.loss)
    kernel, swiglu = find_kernel(AttentionKernel, kernels.attention), find_kernel(SwigluKernel, kernels.swiglu)
    has_norm_kernel = device_type not in norm.separate or kernels.compiles_blocks
    columns = model.vocab_size / (t if features.loss == "vocab-parallel" else 1)
    has_mask = scenario.document_mask and kernel.needs_mask(device_type)
    at_once = math.ceil(tokens / count_loss_chunks(tokens)) / tokens if loss.in_chunks else 1
    query, key = tokens * model.query_width * e / t, tokens * model.kv_width * e / t
    attention, results, forward_work, backward_work = _attention(scenario, layout, kernels, query, key)
    return Sizes(
        description=describe(model),
        element=tokens * e,
        exact_element=tokens * w,
        tp=t,
        stream_ranks=t if layout.shards_sequence else 1,
        regathers=features.regathers_inputs,
        has_norm_kernel=has_norm_kernel,
        product_element=0.0 if has_norm_kernel else tokens * (w if norm.keeps_exact else e),
        attention=attention,
        attention_results=results,
        mask=tokens * scenario.batch.seq_len * e if has_mask else 0.0,
        keeps_mask=kernel.keeps_mask,
        forward_work=forward_work,
        backward_work=backward_work,
        logits=tokens * columns * e * (at_once if loss.joins_matmul else 1),
        logit_work=tokens * columns * w * at_once,
        head_weight=columns * model.hidden_size * e if loss.joins_matmul else 0.0,
        num_gated_kept=2 if kernels.compiles_blocks else swiglu.num_kept - 1,
        keeps_last=not kernels.compiles_blocks,
    )


def _attention(
    scenario: Scenario, layout: Layout, kernels: Kernels, query: float, key: float
) -> tuple[float, float, float, float]:
    """Kept by attention, kept of it by selective recomputation, and the work space of forward and of backward.

    Flash: q, k, v, the output and a number a row. sdpa-math: exact copies of q, k and v, each for every query head, and
    the softmax; results of its two matmuls are exact. Forward has also the scores with the mask, and k as it was, but
    no output yet; backward the gradients of softmax and scores.
    """
    model, constants = scenario.model, scenario.engine.constants
    w = max(BYTES[scenario.precision.compute], 4)
    heads = layout.micro_batch * scenario.batch.seq_len / layout.cp * model.num_heads / layout.tp
    scores, copy = heads * scenario.batch.seq_len, w * heads * model.head_width
    kernel = find_kernel(AttentionKernel, kernels.attention)
    inputs = query + 2 * (query if kernel.repeats_heads else key)
    if kernel.copies_exactly:
        kept = 3 * copy + w * scores + query
        return kept, w * scores + copy, w * scores + key, max(inputs, 2 * w * scores)
    saved: float = getattr(constants, kernel.saved) if kernel.saved else 0.0
    if kernel.holds_scores:
        return inputs + query + saved * scores, query, 0.0, inputs
    rows, packed = w * heads, saved * heads * model.head_width
    return inputs + query + rows + packed, query + rows, 0.0, inputs
