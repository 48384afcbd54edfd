"""Phases of a block, the head and the embedding: bytes that autograd holds while each of them runs.

Sizes are those of sizes.py, and liveness.py says when they come and go.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from dtlayout.costmodel.fsdp2.liveness import BackwardWalk, Steps
from dtlayout.costmodel.fsdp2.phase import MemoryKind, Phase, changes, sequence
from dtlayout.costmodel.fsdp2.sizes import Sizes
from dtlayout.costmodel.fsdp2.tape import SizedEntry, SizedTape

_NONE: Mapping[str, float] = MappingProxyType({})
_A, _G, _L = MemoryKind.ACTIVATIONS, MemoryKind.GRADIENTS, MemoryKind.LOGITS


class WeightGradients(NamedTuple):
    """Arrival of the gradients of a unit's weights: each one beside the others, or added at once to what is there."""

    num_bytes: dict[str, float]
    """Bytes of each weight's gradient, in the compute format."""
    pile_up: bool
    """Whether they stay until the unit's backward is over."""
    summed: Mapping[str, float] = _NONE
    """Bytes of a sum that begins, for each weight whose matmul adds to the sum; 0 where it is there."""

    @classmethod
    def of(cls, units: "Iterable[WeightGradients]") -> "WeightGradients":
        """Gradients of several units together, of which one step says whether they stay."""
        own = [*units]
        num_bytes = {name: size for each in own for name, size in each.num_bytes.items()}
        return cls(num_bytes, own[0].pile_up, {name: size for each in own for name, size in each.summed.items()})

    def come(self, weights: Iterable[str]) -> Steps:
        """Changes of held bytes when the gradients of some weights arrive, by their names."""
        steps: Steps = []
        for name in weights:
            if name in self.summed:
                steps.append((_G, self.summed[name]))
                continue
            size = self.num_bytes.get(name, 0.0)
            steps += [(_G, size)] if self.pile_up else [(_G, size), (_G, -size)]
        return steps

    @property
    def left(self) -> float:
        """Bytes of all gradients that lie there in the end, beside sums."""
        return sum(self.num_bytes.values()) if self.pile_up else 0.0


class Recomputed(NamedTuple):
    """Bytes that a block which is computed again adds to what it has kept; none of a block that is not."""

    at_most: float
    """Most bytes on the way."""
    left: float
    """Bytes held in the end."""

    @property
    def steps(self) -> Steps:
        """Changes of held bytes."""
        return [(_A, self.at_most), (_A, self.left - self.at_most)] if self.left else []


def block_forward(kept: float, at_most: float) -> Phase:
    """Phase of a block's forward, which holds `at_most` bytes on its way and `kept` in the end."""
    return changes((_A, at_most), (_A, kept - at_most))


def forward_with_experts(size: Sizes, kept: float, begin: float, fullest: float) -> tuple[Phase, Phase]:
    """`block_forward` until its experts, which hold `begin` bytes then and at most `fullest`, and from there on."""
    first = size.in_first_branch
    return changes((_A, first), (_A, begin - first)), changes((_A, fullest - begin), (_A, kept - fullest))


def backward_with_experts(
    size: Sizes, weights: Sequence[WeightGradients], kept: float, recomputed: Recomputed, *, puts_off: bool
) -> tuple[Phase, Phase]:
    """`block_backward` of a block's experts, and of the rest; `weights` are the rest's and theirs.

    With `puts_off` the first part of a split one, in which no weights' gradients come.
    """
    place = next(i for i, each in enumerate(size.tape) if each.kind == "dispatch") + 1
    come, come_of_experts = [_put_off if puts_off else each.come for each in weights]
    walk = BackwardWalk(puts_off=puts_off)
    last, first = walk.over(size.tape[place:], come_of_experts), walk.over(size.tape[:place], come)
    return changes(*recomputed.steps, *last), changes(*first, (_A, size.block - recomputed.left - kept))


def _put_off(names: Iterable[str]) -> Steps:
    """No gradients come of these weights."""
    return []


def block_backward(size: Sizes, weights: WeightGradients, kept: float, recomputed: Recomputed) -> Phase:
    """Phase of a block's backward: from the gradient of its output, which is there before, to that of its input."""
    walked = _walk_back(size.tape, tuple(weights.num_bytes.items()), weights.pile_up, tuple(weights.summed.items()))
    return _play_backward(size, walked, kept, recomputed)


def input_backward(size: Sizes, kept: float, recomputed: Recomputed) -> Phase:
    """Phase of the first part of a split backward, which leaves what the gradients of matmuls' weights are made of."""
    return _play_backward(size, _walk_back_putting_off(size.tape), kept, recomputed)


@lru_cache(maxsize=4096)
def _walk_back(
    tape: SizedTape, num_bytes: tuple[tuple[str, float], ...], pile_up: bool, summed: tuple[tuple[str, float], ...]
) -> Phase:
    """Phase of a walk back over a block's tape, which many layouts share; `WeightGradients` say the rest."""
    return changes(*BackwardWalk().over(tape, WeightGradients(dict(num_bytes), pile_up, dict(summed)).come))


@lru_cache(maxsize=4096)
def _walk_back_putting_off(tape: SizedTape) -> Phase:
    """Phase of the first part of a split walk back over a block's tape."""
    return changes(*BackwardWalk(puts_off=True).over(tape, _put_off))


def _play_backward(size: Sizes, walked: Phase, kept: float, recomputed: Recomputed) -> Phase:
    """Phase of a backward's walk, behind a second forward if the block is recomputed; no kept bytes stay."""
    return sequence((changes(*recomputed.steps), walked, changes((_A, size.block - recomputed.left - kept))))


def weight_backward(size: Sizes, weights: WeightGradients) -> Phase:
    """Phase of the second part of a split backward: gradients of the block's weights, the first matmul's first."""
    first_part = BackwardWalk(puts_off=True)
    first_part.over(size.tape, _put_off)
    return changes(*first_part.finish(size.tape, weights.come))


def head_forward(size: Sizes, end: Sequence[SizedEntry]) -> Phase:
    """Phase of final norm, head and loss; it leaves the gradient of the logits, or those of hidden states and weight.

    `end` has the steps of the norm: `Sizes.end`, or `Sizes.first_end`.
    Whoever calls the head holds what the norm gave until the loss is there, also where the head gathers it first.
    """
    left = size.whole + size.head_weight if size.joins_loss else size.logits + size.capped
    is_needed = size.description.head.trains and not size.joins_loss  # by the gradient of the head's weight
    dropped = 0.0 if is_needed else size.norm_output
    held = size.stream if size.shards_sequence else 0.0
    kept = sum(entry.saved for entry in end) + size.norm_output
    return changes((_A, kept + held), (_L, size.loss), (_L, left - size.loss), (_A, -dropped - held))


def head_backward(size: Sizes, end: Sequence[SizedEntry], weights: WeightGradients) -> Phase:
    """Phase of the head's backward: from what the loss left to the gradient of the hidden states, if they have one.

    `end` as in `head_forward`; without steps the head's weight alone has a gradient.
    """
    head = weights.come([size.description.head.name])
    whole = size.whole if end else 0.0
    if size.joins_loss:
        to_input: Steps = [(_L, -size.whole - size.head_weight), (_A, whole), *head]
    else:
        read = size.norm_output if size.description.head.trains else 0.0
        uncapped = [(_L, size.capped), (_L, -2 * size.capped)]
        to_input = [*uncapped, (_A, whole), *head, (_L, -size.logits), (_A, -read)]
    return changes(*to_input, *BackwardWalk(has_gradient=()).over(end, weights.come))


def embedding_backward(size: Sizes, weights: WeightGradients) -> Phase:
    """Phase of the embedding's backward: from the gradient of the hidden states, which is gathered, to its weight's."""
    come = weights.come([size.description.embedding.name])
    if not size.shards_sequence:
        return changes(*come, (_A, -size.stream))
    copied = size.whole * size.reorders
    return changes((_A, size.whole + copied), (_A, -copied), *come, (_A, -size.whole), (_A, -size.stream))
