"""Seconds of computing a block, or modules of it, again in its backward, and of what is sent for that.

docs/theory/time-model.md derives every formula.
"""

from collections.abc import Collection

from dtlayout.costmodel.attention import name_kept, score_traffic_s
from dtlayout.costmodel.comm import count_exchanges
from dtlayout.costmodel.compute import BlockTime, list_matmuls, rank_matmul_s
from dtlayout.costmodel.operators import pass_s
from dtlayout.costmodel.recompute_modules import find_again
from dtlayout.costmodel.scenario import Scenario, tokens_of
from dtlayout.costmodel.traffic import list_cast_bytes, list_elementwise_bytes, permuted_bytes, rank_tape
from dtlayout.models.families import describe
from dtlayout.models.tape import TapeEntry
from dtlayout.spec.context_parallel import CONTEXT_METHODS
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.recompute import Recompute


def recompute_time(scenario: Scenario, layout: Layout, kernels: Kernels, block: BlockTime) -> tuple[float, float]:
    """Seconds in which a covered block is computed again in its backward, and seconds of what it sends for that.

    torch.utils.checkpoint leaves out whatever is kept, and the last matmul with its reduction, which backward does not
    need; of a mixture of ours it leaves out nothing else, for the last matmul is what saves its input. Around a
    compiled block it leaves out nothing; nor does it leave out a matmul that overlaps its reduction. If anything is
    kept, tp sends the gathers of sequence parallelism alone, half of what forward sends. If attention is kept, cp sends
    nothing, unless it splits the heads around it. ep sends tokens again, unless they are kept, and no results. Separate
    attention keeps no softmax. Megatron's selective recomputation is that of its modules, `modules_time`.
    """
    recompute, description = Recompute.parse(layout.recompute), describe(scenario.model)
    if scenario.engine.features.checkpointing == "megatron":
        if recompute.is_selective:
            return modules_time(scenario, layout, kernels, block)
        return block.forward_s, block.forward_tp_s
    if (kernels.compile == "blocks" or layout.overlaps_tp) and not recompute.is_selective:
        return block.forward_s, block.forward_tp_s
    matmuls_s = block.forward_s - block.attention_s - block.elementwise_s
    is_own_mixture = scenario.engine.features.nests_experts and description.experts is not None
    matmuls_s -= 0.0 if layout.overlaps_tp or is_own_mixture else block.last_matmul_s
    recompute_s, again_cp_s = block.elementwise_s, block.forward_cp_s
    recompute_s += matmuls_s * (1 - scenario.engine.features.kept_matmuls * ("matmuls" in recompute.kept))
    if name_kept(scenario, kernels) in recompute.kept:
        recompute_s += score_traffic_s(scenario, layout, kernels)[0]
        again_cp_s *= CONTEXT_METHODS[layout.cp_method].splits_heads
    else:
        recompute_s += block.attention_s
    tp_s = block.forward_tp_s - block.forward_cp_s - block.forward_ep_s
    exchanges = count_exchanges(scenario, recompute)
    again_beside_s = again_cp_s + block.forward_ep_s / exchanges.forward * exchanges.again
    if recompute.is_selective:
        return recompute_s, again_beside_s + tp_s * (0.5 if layout.shards_sequence else 0.0)
    # The last reduction, half an all-reduce.
    left_out = 0.0 if is_own_mixture else description.tp_closes_block / max(1, description.num_branches)
    return recompute_s, again_beside_s + tp_s * (1 - left_out * (0.5 if layout.shards_sequence else 1.0))


def modules_time(scenario: Scenario, layout: Layout, kernels: Kernels, block: BlockTime) -> tuple[float, float]:
    """Seconds in which Megatron computes the modules of a block again that it is told, and seconds of what it sends.

    Each runs its whole forward once more: matmuls, attention, the third of elementwise traffic that forward has, and
    both permutations of tokens where experts are exchanged. tp sends what a branch sends whose last matmul is among
    them, and ep what it sends in forward. cp's messages are left out: kernels keep keys and values of other ranks.
    """
    tape = rank_tape(scenario, kernels)
    places = find_again(tape, scenario.engine.features.recompute_modules).places
    again = [tape[place] for place in places]
    matmuls_s = sum([
        rank_matmul_s(scenario, each) for each in list_matmuls(scenario, layout, kernels) if each.place in places
    ])  # fmt: skip
    moved = _sum_at(places, list_elementwise_bytes(scenario, layout, kernels))
    moved += _sum_at(places, list_cast_bytes(scenario, layout, kernels))
    permuted = permuted_bytes(scenario, layout) if _exchanges(again) else 0.0
    recompute_s = matmuls_s + pass_s(scenario, tokens_of(scenario, layout) * (moved / 3 + permuted))
    recompute_s += block.attention_s if any(entry.kind == "attention" for entry in again) else 0.0
    num_closed = sum(_closes_branch(entry) for entry in again)
    tp_s = block.forward_tp_s - block.forward_cp_s - block.forward_ep_s
    sent_s = tp_s * num_closed / max(1, describe(scenario.model).num_branches)
    return recompute_s, sent_s + (block.forward_ep_s if _exchanges(again) else 0.0)


def _sum_at(places: Collection[int], values: list[float]) -> float:
    return sum([value for place, value in enumerate(values) if place in places])


def _exchanges(entries: list[TapeEntry]) -> bool:
    return any(entry.kind == "dispatch" for entry in entries)


def _closes_branch(entry: TapeEntry) -> bool:
    return entry.kind == "matmul" and entry.in_branch and entry.reads[0].spread == "branch"
