"""Seconds of a block and of the loss for one microbatch on one rank, and what tp sends in them.

T tokens, s sequence, h hidden, f FFN, V vocabulary, a heads, t = tp. docs/time-model.md derives every formula; forward
is one third of elementwise traffic, backward two.
"""

from dataclasses import dataclass

from dtlayout.costmodel.comm import data_link, half_all_reduce_s, message_link, tp_link
from dtlayout.costmodel.memory import activation_size, tokens_of
from dtlayout.costmodel.scenario import Scenario
from dtlayout.kernels import Kernels, count_loss_chunks
from dtlayout.layout import Layout
from dtlayout.recompute import Recompute

_ROPE_KERNEL_TRAFFIC_BYTES = 20.0
"""Moved by a rotary embedding in one kernel and its backward, for each token and unit of width."""
_FFN_TRAFFIC_BYTES = 12.0
"""Moved by the activation function and its backward for each token and unit of the FFN, over t."""


FLASH = {
    "sdpa-flash": "flash2_efficiency",
    "flash-attn": "flash2_efficiency",
    "fa3": "flash3_efficiency",
    "sdpa-cudnn": "flash3_efficiency",
    "sdpa-efficient": "efficient_efficiency",
    "flash1": "flash1_efficiency",
}
"""Attention that holds no scores → the constant that says how fast it is."""


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one microbatch, computing and sending apart."""

    forward_s: float
    """Matmuls, attention and elementwise kernels of forward."""
    backward_s: float
    """The same of backward, without recomputation."""
    forward_tp_s: float
    """tp's collectives and cp's messages that forward waits for."""
    backward_tp_s: float
    """Those that backward waits for."""
    host_s: float = 0.0
    """Least time that the host needs for forward and backward together."""
    attention_s: float = 0.0
    """Of forward, attention's part."""
    score_traffic_s: float = 0.0
    """Of attention's, what moves scores between its matmuls; none in flash kernels."""
    elementwise_s: float = 0.0
    """Of forward, norms, rotary embedding and activation function."""
    last_matmul_s: float = 0.0
    """Of forward, the last matmul."""
    forward_cp_s: float = 0.0
    """Of `forward_tp_s`, cp's messages."""


def matmul_s(scenario: Scenario, m: float, n: float, k: float) -> float:
    """m×k times k×n: 2·m·n·k FLOPs at the peak's reachable share, each size lengthened by what fills the machine."""
    constants = scenario.engine.constants
    fill = constants.matmul_fill
    flops = 2.0 * (m + fill) * (n + fill) * (k + fill)
    moved_s = pass_s(scenario, activation_size(scenario) * (m * n + n * k + m * k))
    return max(flops / (matrix_flops_per_s(scenario) * constants.matmul_efficiency), moved_s)


def matrix_flops_per_s(scenario: Scenario) -> float:
    """The peak for matrices in the format that is computed in."""
    gpu = scenario.cluster.gpu
    if scenario.precision.compute == "float32" and gpu.peak_fp32_flops_per_s is not None:
        return gpu.peak_fp32_flops_per_s
    return gpu.peak_flops_per_s


def block_time(scenario: Scenario, layout: Layout, kernels: Kernels) -> BlockTime:
    """A block without recomputation."""
    model, constants, t = scenario.model, scenario.engine.constants, layout.tp
    tokens, h, f = tokens_of(scenario, layout), model.hidden_size, model.ffn_size
    kv = model.num_kv_heads * model.head_dim
    last_matmul_s = matmul_s(scenario, tokens, h, f / t)
    ffn = (2 if model.gated_ffn else 1) * matmul_s(scenario, tokens, f / t, h) + last_matmul_s
    matmuls = matmul_s(scenario, tokens, (h + 2 * kv) / t, h) + matmul_s(scenario, tokens, h, h / t) + ffn
    attention_forward_s, attention_backward_s = attention_s(scenario, layout, kernels)
    shared = t if layout.shards_sequence else 1
    is_eager_norm = kernels.norm == "eager" and not kernels.compiles_blocks
    norm_traffic = constants.norm_traffic_bytes if is_eager_norm else 0.0
    rope_traffic = constants.rope_traffic_bytes
    if kernels.rope == "liger" or kernels.compiles_blocks:
        rope_traffic = min(rope_traffic, _ROPE_KERNEL_TRAFFIC_BYTES)
    widening = activation_size(scenario) / 2  # the constants count passes in bf16
    traffic = (widening * constants.width_traffic_bytes + norm_traffic) * h / shared + (
        rope_traffic * h + widening * _FFN_TRAFFIC_BYTES * f
    ) / t
    elementwise_s = pass_s(scenario, traffic * tokens)
    launch_s = constants.norm_launch_s if is_eager_norm else 0.0
    forward_tp_s, backward_tp_s = block_tp_s(scenario, layout)
    forward_cp_s, backward_cp_s = block_cp_s(scenario, layout, attention_forward_s, attention_backward_s)
    return BlockTime(
        forward_s=matmuls + attention_forward_s + elementwise_s / 3 + launch_s,
        backward_s=2 * (matmuls + elementwise_s / 3 + launch_s) + attention_backward_s,
        forward_tp_s=forward_tp_s + forward_cp_s,
        backward_tp_s=backward_tp_s + backward_cp_s,
        host_s=host_s(scenario, layout),
        attention_s=attention_forward_s,
        score_traffic_s=score_traffic_s(scenario, layout, kernels),
        elementwise_s=elementwise_s / 3 + launch_s,
        last_matmul_s=last_matmul_s,
        forward_cp_s=forward_cp_s,
    )


def recompute_time(scenario: Scenario, layout: Layout, kernels: Kernels, block: BlockTime) -> tuple[float, float]:
    """A covered block's forward in its backward: seconds of computing, and of what tp and cp send.

    torch.utils.checkpoint leaves out the last matmul and its reduction, of which backward needs nothing, and what is
    kept; around a compiled block it leaves out nothing. With anything kept tp sends half of what forward sends, the
    gathers of sequence parallelism, and cp nothing where that is attention. Separate attention keeps no softmax.
    """
    recompute = Recompute.parse(layout.recompute)
    if scenario.engine.habits.checkpointing == "megatron":
        return (block.attention_s, 0.0) if recompute.is_selective else (block.forward_s, block.forward_tp_s)
    if kernels.compile == "blocks" and not recompute.is_selective:
        return block.forward_s, block.forward_tp_s
    matmuls_s = block.forward_s - block.attention_s - block.elementwise_s - block.last_matmul_s
    again_s, again_cp_s = block.elementwise_s, 0.0
    if "matmuls" not in recompute.kept:
        again_s += matmuls_s
    if "attention" in recompute.kept:
        again_s += block.score_traffic_s
    else:
        again_s, again_cp_s = again_s + block.attention_s, block.forward_cp_s
    tp_s = block.forward_tp_s - block.forward_cp_s
    if recompute.is_selective:
        return again_s, again_cp_s + tp_s * (0.5 if layout.shards_sequence else 0.0)
    return again_s, again_cp_s + tp_s * (0.75 if layout.shards_sequence else 0.5)


def attention_s(scenario: Scenario, layout: Layout, kernels: Kernels) -> tuple[float, float]:
    """Scores, softmax and weighted values, forward and backward.

    Flash kernels skip the half that the causal mask hides and compute the scores again in backward, 2.5 times the FLOPs
    of forward (arXiv:2307.08691, sec. 4.1). Separate operations compute all of it and move every score through memory.
    """
    model, constants, t = scenario.model, scenario.engine.constants, layout.tp
    peak, seq_len = matrix_flops_per_s(scenario), scenario.batch.seq_len
    tokens = tokens_of(scenario, layout)
    flops = 4.0 * tokens * seq_len * model.hidden_size / t
    if kernels.attention in FLASH:
        forward = flash_s(scenario, kernels.attention, flops)
        return forward, 2.5 * forward
    assert kernels.attention in ("torch", "sdpa-math", "megatron-softmax"), "auto is resolved before it is predicted"
    fill = constants.matmul_fill
    lengthened = (1 + fill / model.head_dim) * (1 + fill / seq_len) ** 2
    matmuls = flops * lengthened / (peak * constants.matmul_efficiency)
    moved = score_traffic_s(scenario, layout, kernels)
    return matmuls + moved, 2 * matmuls + 1.5 * moved


def flash_s(scenario: Scenario, attention: str, flops: float) -> float:
    """A flash kernel, which computes the half that the mask leaves of so many FLOPs."""
    efficiency = getattr(scenario.engine.constants, FLASH[attention])
    return flops / 2 / float(matrix_flops_per_s(scenario) * efficiency)


def pass_s(scenario: Scenario, moved_bytes: float) -> float:
    """An elementwise kernel that reads and writes so many bytes."""
    return moved_bytes / (scenario.cluster.gpu.memory_bytes_per_s * scenario.engine.constants.memory_efficiency)


def score_traffic_s(scenario: Scenario, layout: Layout, kernels: Kernels) -> float:
    """Of forward, moving every score through memory between attention's matmuls."""
    if kernels.attention in FLASH:
        return 0.0
    constants, scores = scenario.engine.constants, tokens_of(scenario, layout) * scenario.batch.seq_len
    is_fused = kernels.attention == "megatron-softmax"
    traffic = constants.fused_softmax_traffic_bytes if is_fused else constants.softmax_traffic_bytes
    return pass_s(scenario, traffic * scores * scenario.model.num_heads / layout.tp)


def block_tp_s(scenario: Scenario, layout: Layout) -> tuple[float, float]:
    """tp's collectives in a block, forward and backward, as far as nothing hides them (arXiv:2205.05198, sec. 4.2.2).

    Forward closes attention and FFN with an all-reduce each, or under sequence parallelism with an all-gather before
    and a reduce-scatter after; backward does the same for the inputs' gradients, and gathers inputs again.
    """
    if layout.tp == 1:
        return 0.0, 0.0
    habits, exposed = scenario.engine.habits, scenario.engine.constants.tp_exposed
    size = tokens_of(scenario, layout) * scenario.model.hidden_size * activation_size(scenario)
    half = half_all_reduce_s(size, layout.tp, tp_link(scenario, layout))
    if not layout.shards_sequence:
        return 4 * half * exposed, 2 * habits.input_reductions * half * exposed
    regathered = 2 if habits.regathers_inputs else 0
    return 4 * half * exposed, (2 + habits.input_reductions + regathered) * half * exposed


def block_cp_s(
    scenario: Scenario, layout: Layout, attention_forward_s: float, attention_backward_s: float
) -> tuple[float, float]:
    """What attention does not hide of the ring on which cp ranks hand on keys and values (arXiv:2310.01889, sec. 3).

    Each of cp - 1 hops sends a rank's keys and values, in backward also their gradients, while the chunk that came
    before is attended to.
    """
    cp = layout.cp
    if cp == 1:
        return 0.0, 0.0
    model, link = scenario.model, data_link(scenario, layout, layout.tp, cp)
    kv = 2 * tokens_of(scenario, layout) * model.num_kv_heads * model.head_dim / layout.tp * activation_size(scenario)

    def exposed_s(size: float, attention_s: float) -> float:
        return (cp - 1) * max(0.0, size / link.bytes_per_s + link.latency_s - attention_s / cp)

    return exposed_s(kv, attention_forward_s), exposed_s(2 * kv, attention_backward_s)


def head_time(scenario: Scenario, layout: Layout, kernels: Kernels) -> BlockTime:
    """Head and loss: a matmul with the vocabulary, and the loss's passes over the logits.

    The linear loss computes all gradients in forward, and adds the weight's up over its chunks.
    """
    model, constants, t = scenario.model, scenario.engine.constants, layout.tp
    tokens, size = tokens_of(scenario, layout), activation_size(scenario)
    matmul = matmul_s(scenario, tokens, model.vocab_size / t, model.hidden_size)
    is_replicated = scenario.engine.habits.loss == "replicated"
    logits = tokens * model.vocab_size / (1 if is_replicated else t)
    loss_s = pass_s(scenario, constants.logit_traffic_bytes * logits)
    adding_s = 0.0
    if kernels.loss == "linear":
        weight = model.vocab_size / t * model.hidden_size
        adding_s = pass_s(scenario, count_loss_chunks(tokens) * 2 * size * weight)
    forward_s, backward_s = matmul + loss_s / 2, 2 * matmul + loss_s / 2
    link = tp_link(scenario, layout)
    gather = half_all_reduce_s(tokens * model.vocab_size * size, t, link) if is_replicated else 0.0
    return BlockTime(
        forward_s=forward_s + (backward_s + adding_s if kernels.loss == "linear" else 0.0),
        backward_s=0.0 if kernels.loss == "linear" else backward_s,
        forward_tp_s=gather,
        backward_tp_s=2 * half_all_reduce_s(tokens * model.hidden_size * size, t, link),
    )


def host_s(scenario: Scenario, layout: Layout) -> float:
    """Least time of a layer, forward and backward: the host starts its kernels, and tp's collectives one by one."""
    constants = scenario.engine.constants
    if layout.tp == 1:
        return constants.layer_host_s
    waits = layout.is_pipelined and message_link(scenario, layout).crosses_nodes
    return constants.layer_host_tp_s + (constants.layer_host_message_s * layout.tp if waits else 0.0)
