"""Seconds of a block's attention, in a kernel or with every score in memory.

docs/theory/time-model.md derives the formulas.
"""

from dtlayout.costmodel.operators import matrix_flops_per_s, pass_s
from dtlayout.costmodel.scenario import Scenario, activation_size, tokens_of
from dtlayout.models.counting import count_attention_flops_per_token
from dtlayout.models.families import describe
from dtlayout.models.scores import NONE, ScoreBytes, find_score_bytes
from dtlayout.spec.kernel_records import AttentionKernel
from dtlayout.spec.kernel_table import find_kernel
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.recompute import Kept

_ALIGNMENT = 16
"""Bytes: a head's row that is no multiple of it is not aligned for tensor cores."""
_MASKED = "sdpa-efficient"
"""The kernel that PyTorch takes where attention has a mask of its own."""


def attention_s(scenario: Scenario, layout: Layout, kernels: Kernels) -> tuple[float, float]:
    """Seconds of scores, softmax and weighted values, forward and backward.

    Flash kernels skip the half that the causal mask hides and compute the scores again in backward, 2.5 times the FLOPs
    of forward (arXiv:2307.08691, sec. 4.1), and what a window hides. Separate operations compute all of it and move
    every score through memory.
    """
    model, constants, seq_len = scenario.model, scenario.engine.constants, scenario.batch.seq_len
    peak, tokens = matrix_flops_per_s(scenario), tokens_of(scenario, layout)
    flops = tokens * count_attention_flops_per_token(model, seq_len) / layout.tp
    if not holds_scores(scenario, kernels):
        if scores_of(scenario, kernels).repeats_heads:  # a mask hides what it will from a kernel that computes all
            forward_s = flash_s(scenario, _MASKED, 2 * flops)
        else:
            forward_s = flash_s(scenario, kernels.attention, flops * describe(model).attention.seen_share(seq_len))
        return forward_s, 2.5 * forward_s
    fill = constants.matmul_fill
    lengthened = (1 + fill / model.head_width) * (1 + fill / seq_len) ** 2
    is_odd = model.head_width * activation_size(scenario) % _ALIGNMENT > 0 and not scenario.is_on_host
    efficiency = constants.matmul_efficiency * (constants.odd_scores_share if is_odd else 1.0)
    matmuls = flops * lengthened / (peak * efficiency)
    moved_s, moved_again_s = score_traffic_s(scenario, layout, kernels)
    return matmuls + moved_s, 2 * matmuls + moved_again_s


def scores_of(scenario: Scenario, kernels: Kernels) -> ScoreBytes:
    """Bytes of each score where our trainer runs a model's own attention; none where a kernel computes it in pieces."""
    if not scenario.engine.features.casts_itself:
        return NONE
    scores = describe(scenario.model).attention.scores
    found = find_score_bytes(scores, scenario.batch.seq_len, activation_size(scenario))
    return found.compile(activation_size(scenario)) if kernels.compiles_blocks else found


def holds_scores(scenario: Scenario, kernels: Kernels) -> bool:
    """True if each score lies in memory: of a model's own attention, or of a kernel of separate operations."""
    return scores_of(scenario, kernels).are_in_memory or find_kernel(AttentionKernel, kernels.attention).holds_scores


def name_kept(scenario: Scenario, kernels: Kernels) -> Kept:
    """Word of the recomputations that keep what attention's matmuls make.

    Of a model's own code these are batched matmuls: a part of attention to a kernel of separate operations, and else
    matmuls like others (`plans.apply`).
    """
    is_own = scores_of(scenario, kernels).are_in_memory
    return "matmuls" if is_own and not find_kernel(AttentionKernel, kernels.attention).holds_scores else "attention"


def flash_s(scenario: Scenario, attention: str, flops: float) -> float:
    """Seconds of a flash kernel, which computes the half of so many FLOPs that the mask leaves."""
    efficiency = getattr(scenario.engine.constants, find_kernel(AttentionKernel, attention).efficiency)
    return flops / 2 / float(matrix_flops_per_s(scenario) * efficiency)


def score_traffic_s(scenario: Scenario, layout: Layout, kernels: Kernels) -> tuple[float, float]:
    """Seconds of moving every score through memory between attention's matmuls, in forward and in backward; zeros for
    flash kernels."""
    scores = tokens_of(scenario, layout) * scenario.batch.seq_len * describe(scenario.model).attention.num_heads
    own, kernel = scores_of(scenario, kernels), find_kernel(AttentionKernel, kernels.attention)
    if own.are_in_memory:
        moved = own.moved_forward, own.moved_backward
    elif kernel.holds_scores:
        forward = getattr(scenario.engine.constants, kernel.traffic)
        moved = forward, 1.5 * forward
    else:
        return 0.0, 0.0
    forward_s, backward_s = (pass_s(scenario, each * scores / layout.tp) for each in moved)
    return forward_s, backward_s


def weigh_scores(scenario: Scenario, layout: Layout, kernels: Kernels) -> tuple[float, float]:
    """Bytes of scores that a block keeps of a microbatch on one rank, and those that it holds at its fullest; zeros
    where a kernel computes them in pieces."""
    own = scores_of(scenario, kernels)
    scores = tokens_of(scenario, layout) * scenario.batch.seq_len * describe(scenario.model).attention.num_heads
    scores /= layout.tp
    return scores * own.kept, scores * (own.kept + max(own.in_forward, own.in_backward))
