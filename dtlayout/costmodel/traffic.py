"""Traffic: bytes that the elementwise kernels of a block move, and those of casts, quantized weights and permutations.

Every step of a block's tape that is no matmul, no attention and no message is a pass over memory. Seconds of a pass are
`compute.pass_s`; docs/theory/time-model.md derives every number.
"""

from functools import lru_cache
from itertools import zip_longest

from dtlayout.costmodel.operators import choose_moved
from dtlayout.costmodel.scenario import (
    Scenario,
    activation_size,
    fullest_share,
    gathers_weights_cast,
    matmul_alignment,
    scales_experts,
    weigh_base,
)
from dtlayout.models.families import block_tape, describe
from dtlayout.models.tape import PLAIN, BlockTensor, TapeEntry
from dtlayout.spec.base_format import BASE_FORMATS
from dtlayout.spec.fake_quant import FAKE_QUANT_FORMATS
from dtlayout.spec.kernel_records import NormKernel, RopeKernel
from dtlayout.spec.kernel_table import find_kernel
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape

_ROPE_KERNEL_TRAFFIC_BYTES = 20.0
"""Moved by a rotary embedding in one kernel and its backward, for each token and unit of width."""
_PASS_BYTES, _GATED_BYTES, _SEPARATE_NORM_BYTES = 4.0, 10.0, 32.0
"""Moved in bf16 by forward for each element: in one pass; by a gate's activation and the product; and by an RMSNorm of
separate operations beside one pass, which is what `norm_traffic_bytes` prices."""
_FFN_TRAFFIC_BYTES = 12.0
"""Moved by the activation function and its backward for each token and unit of the FFN, over t."""
_ADDED_TRAFFIC_BYTES = 12.0
"""Moved by an adapter's sum for each token and unit of its width, in bf16: two reads and a write, and in backward as
many where the gradients of what both matmuls read are added."""
_RESCALED_TRAFFIC_BYTES = 16.0
"""Moved by an adapter's vector likewise: a read and a write, and in backward as many, two reads and a write of the
products that make the vector's gradient, and a read of these."""
_ANY = Kernels()
"""Kernels for a caller that asks nothing of experts."""
_WITHOUT_PASSES = frozenset({"scale", "matmul", "gather", "sum", "attention", "dispatch", "experts", "alias"})
"""Kinds of entries that are priced elsewhere: as matmuls, collectives, attention, permutations or a part of a norm. An
alias moves nothing."""


def own_part(tensor: BlockTensor, layout: Layout) -> float:
    """Elements of a token that one rank multiplies or makes: a part of those inside a branch."""
    return tensor.width / (layout.tp if tensor.spread == "branch" else 1)


def ranks_by_spread(layout: Layout) -> dict[str, int]:
    """tp ranks that share a tensor, by its spread on a tape without collectives."""
    return {"stream": layout.tp if layout.shards_sequence else 1, "branch": layout.tp, "whole": 1}


def rank_tape(scenario: Scenario, kernels: Kernels = _ANY, fullest: float = 1.0) -> tuple[TapeEntry, ...]:
    """Steps of a block on one rank; of `kernels` that of experts decides whether they are cast, `fullest` as in
    `TapeOptions`."""
    options = PLAIN._replace(
        fullest=fullest, alignment=matmul_alignment(scenario), scales_experts=scales_experts(scenario, kernels)
    )
    return block_tape(scenario.model, options)


def fullest_tape(scenario: Scenario, layout: Layout, kernels: Kernels) -> tuple[TapeEntry, ...]:
    """Steps of a block on the fullest of ep's ranks."""
    return rank_tape(scenario, kernels, fullest_share(scenario, layout))


def elementwise_bytes(scenario: Scenario, layout: Layout, kernels: Kernels) -> float:
    """Bytes moved for each token by the elementwise kernels of a block, forward and backward."""
    return sum(list_elementwise_bytes(scenario, layout, kernels))


def list_elementwise_bytes(scenario: Scenario, layout: Layout, kernels: Kernels) -> list[float]:
    """Bytes moved for each token by the elementwise kernel of each entry of a block's tape, forward and backward.

    `width_traffic_bytes` are those of two norms and two residual adds, a quarter for each. KeyError for a kind of entry
    that nobody has priced.
    """
    constants, ranks = scenario.engine.constants, ranks_by_spread(layout)
    widening = activation_size(scenario) / 2  # the constants count passes in bf16
    width_traffic = widening * constants.width_traffic_bytes / 4
    rope_traffic = constants.rope_traffic_bytes
    if is_rope_fused(scenario, kernels):
        rope_traffic = min(rope_traffic, _ROPE_KERNEL_TRAFFIC_BYTES)
    experts = describe(scenario.model).experts
    moved = {
        "norm": width_traffic + (constants.norm_traffic_bytes / 2 if has_eager_norms(kernels) else 0.0),
        "residual": width_traffic,
        "rope": rope_traffic,
        "activation": widening * _FFN_TRAFFIC_BYTES,
        "combine": widening * constants.expert_bias_traffic_bytes if experts and experts.bias else 0.0,
        "add": widening * _ADDED_TRAFFIC_BYTES,
        "rescale": widening * _RESCALED_TRAFFIC_BYTES,
    }
    per_norm_byte = constants.norm_traffic_bytes / 2 / _SEPARATE_NORM_BYTES
    tape = fullest_tape(scenario, layout, kernels)
    found = list[float]()
    for entry, after in zip_longest(tape, tape[1:]):
        if entry.kind in _WITHOUT_PASSES or (entry.kind == "activation" and entry.continues):
            found.append(0.0)  # the second half of an activation is priced with the first
            continue
        if entry.kind == "mixer":
            found.append(3 * choose_moved(scenario, entry.moves) * entry.makes[0].width)
            continue
        tensor, price = entry.reads[0], moved[entry.kind]
        if any(entry.moves) and not kernels.compiles_blocks:
            tensor = entry.makes[0]
            if entry.kind == "norm":
                more = max(0.0, choose_moved(scenario, entry.moves) - widening * _PASS_BYTES)
                price = width_traffic + per_norm_byte * more
            else:
                is_gated = tensor.width < sum(each.width for each in entry.reads) or (after and after.continues)
                usual = widening * (_GATED_BYTES if is_gated else _PASS_BYTES)
                price += 3 * max(0.0, choose_moved(scenario, entry.moves) - usual)
        found.append(price * tensor.width / ranks[tensor.spread])
    return found


def is_rope_fused(scenario: Scenario, kernels: Kernels) -> bool:
    """True if the rotary embedding is one kernel; a traced model has its own code, which a compiler alone fuses."""
    fused = find_kernel(RopeKernel, kernels.rope).is_fused and not scenario.model.trace
    return fused or kernels.compiles_blocks


def cast_bytes(scenario: Scenario, layout: Layout, kernels: Kernels) -> float:
    """Bytes moved for each token of a block by casts for its linear layers, forward and backward."""
    return sum(list_cast_bytes(scenario, layout, kernels))


def list_cast_bytes(scenario: Scenario, layout: Layout, kernels: Kernels) -> list[float]:
    """Bytes moved for each token by casts for each entry of a block's tape, forward and backward.

    Cast are the input of each layer, once where several read the same, and the gradient of its output. Our trainer
    casts it for each layer, unless a compiler sees that the casts are the same: under tp each layer has a scale of its
    own for a tensor. No compiler sees into the loop over its experts, where gate and up cast each for itself. Weights
    are apart (`weight_cast_bytes`); a router stays as it is.
    """
    if (fmt := scenario.precision.matmul_format) is None:
        return []
    ranks, found, cast = ranks_by_spread(layout), list[float](), set[str]()
    merges = kernels.compiles_blocks and (layout.tp == 1 or scenario.precision.matmuls != "fp8-tensorwise")
    is_own = scenario.engine.features.casts_itself
    repeats = is_own and not merges
    for entry in fullest_tape(scenario, layout, kernels):
        elements = 0.0
        if entry.casts:
            new = [each for each in entry.reads if repeats or each.name not in cast]
            new *= len(entry.makes) if is_own and entry.kind == "experts" else 1
            elements = sum([each.width / ranks[each.spread] for each in (*new, *entry.makes)])
            cast.update(each.name for each in new)
        found.append(fmt.cast_bytes * elements)
    return found


def weight_cast_bytes(scenario: Scenario, layout: Layout, kernels: Kernels) -> tuple[float, float]:
    """Bytes moved by casts of a block's weights in each forward and each backward: our trainer casts them every time,
    in one of both orders, or copies into the other one in backward what was gathered as it multiplies. Other programs
    cast once a step, which is left out."""
    fmt = scenario.precision.matmul_format
    if fmt is None or not scenario.engine.features.casts_itself:
        return 0.0, 0.0
    casting = [entry for entry in rank_tape(scenario, kernels) if entry.casts]
    sizes = [(entry.reads[0], entry.makes[0]) for entry in casting if entry.kind == "matmul"]
    elements = sum([own_part(read, layout) * own_part(made, layout) for read, made in sizes])
    forward, backward = (0.0, 2.0) if gathers_weights_cast(scenario) else (fmt.cast_bytes / 2, fmt.cast_bytes / 2)
    of_experts = 0.0  # which are gathered as they come
    if (experts := describe(scenario.model).experts) and len(casting) > len(sizes):
        matrices = sum([weight.numel for weight in experts.weights if weight.role == "expert"])
        of_experts = fmt.cast_bytes / 2 * matrices / layout.ep
    return forward * elements + of_experts, backward * elements + of_experts


def base_bytes(scenario: Scenario, layout: Layout, kernels: Kernels) -> float:
    """Bytes moved when the weights of a block that are stored in few bits are computed, before each of their matmuls.

    Compiled blocks read codes and write the weight. Else codes become indices, a table is read with these, and what
    comes of it is multiplied by its scale: `ops.quantized`.
    """
    if (base := BASE_FORMATS.get(scenario.precision.base)) is None:
        return 0.0
    weight, lookup = weigh_base(scenario)
    passes = 0.0 if kernels.compiles_blocks else 2 * lookup + 2 * weight
    return (base.bits / 8 + weight + passes) * _count_quantized(scenario.model) / layout.tp


def rounding_bytes(scenario: Scenario, layout: Layout, kernels: Kernels) -> tuple[float, float]:
    """Bytes moved when a block's weights are rounded for its matmuls, in each forward and each backward.

    Forward reads a weight to find its scales. Compiled blocks then read it and write its values. Eager ones go several
    times through a copy in fp32 or finer: `ops.fake_quantized`.
    """
    if (fmt := FAKE_QUANT_FORMATS.get(scenario.precision.fake_quant)) is None:
        return 0.0, 0.0
    size = activation_size(scenario)
    exact = max(size, 4)
    passes = 2 * exact * (fmt.num_code_passes + 1 + fmt.num_value_passes)  # 1: codes are clamped
    made = 2 * size if kernels.compiles_blocks else size + exact + passes + (exact + size) * (size < exact)
    sizes = [(entry.reads[0], entry.makes[0]) for entry in rank_tape(scenario) if entry.in_branch]
    weights = sum([own_part(read, layout) * own_part(made_of, layout) for read, made_of in sizes])
    return (size + made) * weights, made * weights


@lru_cache(maxsize=256)
def _count_quantized(model: ModelShape) -> int:
    """Elements of a block's weights that a quantized base stores."""
    return sum(weight.numel for weight in describe(model).block_weights if weight.can_be_quantized)


def permuted_bytes(scenario: Scenario, layout: Layout) -> float:
    """Bytes moved for each token when forward sorts its k copies by expert, and adds their results up.

    With ep the copies are sorted by rank before they are sent and by expert afterwards, and again on their way back.
    The router's scores are left out: they are E numbers beside k·h.
    """
    if (experts := describe(scenario.model).experts) is None:
        return 0.0
    copies = experts.per_token
    sorted_again = 4 * copies * fullest_share(scenario, layout) if layout.ep > 1 else 0
    return activation_size(scenario) * (2 * (1 + copies) + sorted_again) * experts.width / layout.tp


def has_eager_norms(kernels: Kernels) -> bool:
    """True if each operation of a norm that `kernels.norm` computes is a pass of its own."""
    return find_kernel(NormKernel, kernels.norm).is_eager and not kernels.compiles_blocks


def count_eager_norms(scenario: Scenario, kernels: Kernels, tape: tuple[TapeEntry, ...]) -> int:
    """Norms of a block of which each operation is a pass of its own, by a kernel's code or by the model's."""
    norms = [entry for entry in tape if entry.kind == "norm"]
    if kernels.compiles_blocks:
        return 0
    widening = activation_size(scenario) / 2
    of_kernel = has_eager_norms(kernels)
    return sum(
        choose_moved(scenario, each.moves) > widening * _PASS_BYTES if any(each.moves) else of_kernel for each in norms
    )
