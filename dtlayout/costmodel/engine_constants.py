"""Physical constants of a training program: shares of a data sheet's peak, seconds, bytes.

They are fitted by `dtlayout validate --fit`, inside bounds that physics sets.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from dtlayout.base.errors import InvalidConfig


def _constant(default: float, low: float, high: float, unit: str) -> Any:
    """A constant: its value where nothing was measured, and the bounds that a measured one keeps."""
    return field(default=default, metadata={"bounds": (low, high), "unit": unit})


@dataclass(frozen=True, kw_only=True)
class Constants:
    """How fast and how large; a share is of the data sheet's number."""

    matmul_efficiency: float = _constant(0.8, 0.4, 0.95, "share")
    """Share of the peak that a large matmul achieves."""
    matmul_share: float = _constant(1.0, 0.5, 1.2, "share")
    """Share of a GPU type's matmul efficiency that a program reaches: its libraries, gaps between kernels and falling
    clocks take the rest."""
    experts_efficiency: float = _constant(1.0, 0.2, 1.2, "share")
    """Efficiency of experts' matmuls, grouped in one kernel or many, over that of other matmuls of their sizes."""
    matmul_fill: float = _constant(64.0, 0.0, 400.0, "elements")
    """A matmul takes as long as if each of its sizes were this much larger: half a tile of 128, and what runs empty."""
    fp8_efficiency: float = _constant(0.6, 0.2, 0.9, "share")
    """Share of the peak in fp8 that a large matmul achieves, casts not counted."""
    fp4_efficiency: float = _constant(0.5, 0.2, 0.9, "share")
    """Share of the peak in fp4 that a large matmul achieves, casts not counted."""
    flash2_efficiency: float = _constant(0.65, 0.02, 0.9, "share")
    """Share of the peak that FlashAttention-2 achieves, the half that the mask hides not counted."""
    flash3_efficiency: float = _constant(0.65, 0.2, 0.9, "share")
    """Share for FlashAttention-3 and cuDNN's attention, which are made for Hopper; on older GPUs as fast as 2."""
    efficient_efficiency: float = _constant(0.4, 0.1, 0.8, "share")
    """Share of the peak that memory-efficient attention achieves, PyTorch's or blockwise, without the masked half."""
    flash1_efficiency: float = _constant(0.28, 0.1, 0.7, "share")
    """Share of the peak that the first FlashAttention achieves, without the masked half."""
    odd_scores_share: float = _constant(1.0, 0.02, 1.0, "share")
    """Share of a matmul's speed that unfused attention keeps where the bytes of a head's row (width times bytes of a
    number) are no multiple of 16: old libraries then take no tensor cores."""
    memory_efficiency: float = _constant(0.85, 0.5, 1.0, "share")
    """Share of the memory's bandwidth that elementwise kernels achieve."""
    softmax_traffic_bytes: float = _constant(18.0, 4.0, 60.0, "byte/score")
    """Moved for each attention score by mask, scale and softmax as separate operations, in forward."""
    fused_softmax_traffic_bytes: float = _constant(2.0, 0.0, 20.0, "byte/score")
    """Moved for each attention score by one kernel for mask, scale and softmax, in forward."""
    width_traffic_bytes: float = _constant(60.0, 30.0, 4000.0, "byte/width")
    """Moved by fused norms, residual adds and their backward, for each token and unit of width: 30 bf16 passes."""
    rope_traffic_bytes: float = _constant(20.0, 10.0, 300.0, "byte/width")
    """Moved by the rotary embedding and its backward, for each token and unit of width; by default one kernel's."""
    norm_traffic_bytes: float = _constant(216.0, 40.0, 400.0, "byte/width")
    """Moved by both norms of a block as separate operations, for each token and unit of width: 36 bytes forward, in
    fp32 copy, square, mean, product, cast and weight, and twice that backward."""
    norm_launch_s: float = _constant(0.0, 0.0, 1e-3, "s")
    """Start of both norms' separate operations in a block's forward; twice that in backward."""
    logit_traffic_bytes: float = _constant(28.0, 10.0, 400.0, "byte/logit")
    """Moved by the loss for each logit, forward and backward: seven passes in fp32."""
    layer_host_s: float = _constant(0.0, 0.0, 0.1, "s")
    """Host's time for one layer of one microbatch, forward and backward; the GPU waits where it is faster, and a CPU
    computes nothing meanwhile."""
    layer_host_tp_s: float = _constant(0.0, 0.0, 0.2, "s")
    """Host's time for one layer of one microbatch at tp > 1, whose collectives the host starts too."""
    routing_wait_s: float = _constant(1e-3, 0.0, 0.03, "s")
    """Time that the GPU waits in a layer with experts, forward and backward: the host reads how many tokens each is
    sent, and starts what follows only then."""
    expert_wait_s: float = _constant(0.15e-3, 0.0, 1e-3, "s")
    """Added to that for each expert of a rank: its casts and matmuls are kernels of their own."""
    experts_host_s: float = _constant(0.0, 0.0, 0.05, "s")
    """Host's time for a layer with experts of one microbatch, forward and backward, where it is more than that of other
    layers; the GPU waits where it is faster."""
    latent_host_s: float = _constant(0.0, 0.0, 0.05, "s")
    """Host's time added to that for latent attention, whose queries and keys take several matmuls and norms."""
    graphed_share: float = _constant(0.5, 0.0, 1.0, "share")
    """Share of a layer's host time that is left where its attention and router start as one graph."""
    expert_bias_traffic_bytes: float = _constant(300.0, 0.0, 600.0, "byte/width")
    """Moved for each copy of a token where experts add biases, forward and backward: passes in fp32, and those of a
    clamped activation."""
    gradient_traffic_bytes: float = _constant(0.0, 0.0, 20.0, "byte/parameter")
    """Moved in every microbatch for each trained parameter but experts', where its gradient is added to a sum in fp32;
    to one in bf16 half of it. In a pass of its own 2 bytes of bf16 are read, and 4 of fp32 read and written."""
    matmul_sum_traffic_bytes: float = _constant(0.0, 0.0, 20.0, "byte/parameter")
    """Moved instead of these where the matmul that makes the gradient adds it to the sum: 4 bytes are read, and 4
    written."""
    expert_gradient_traffic_bytes: float = _constant(0.0, 0.0, 40.0, "byte/parameter")
    """Moved in a microbatch's backward for each parameter of experts that a rank has, where gradients are added up."""
    compiled_host_s: float = _constant(0.1, 0.0, 0.1, "s")
    """Host's time for one layer of one microbatch whose block is compiled, where that is less."""
    full_host_s: float = _constant(0.0, 0.0, 0.1, "s")
    """Host's time for recomputing a whole layer."""
    full_host_tp_s: float = _constant(0.0, 0.0, 0.2, "s")
    """Host's time for recomputing a whole layer at tp > 1."""
    selective_host_s: float = _constant(0.0, 0.0, 0.2, "s")
    """Host's time for a layer whose recomputation decides for each operation, and so looks at each."""
    selective_host_tp_s: float = _constant(0.0, 0.0, 0.4, "s")
    """Host's time for a layer under selective recomputation at tp > 1."""
    exchange_efficiency: float = _constant(0.95, 0.02, 1.0, "share")
    """Share of the bandwidth of links and network that an exchange among all of ep achieves."""
    head_host_s: float = _constant(0.0, 0.0, 0.1, "s")
    """Host's time for embedding, head and loss of one microbatch."""
    message_host_s: float = _constant(0.0, 0.0, 0.02, "s")
    """Host's time for sending or receiving one message of a pipeline."""
    layer_sync_s: float = _constant(0.0, 0.0, 0.1, "s")
    """Host's time for gathering the parameters of a layer once, or for reducing its gradients."""
    layer_update_s: float = _constant(0.0, 0.0, 0.1, "s")
    """Host's time in each step for norm, clipping and update of a layer's parameters."""
    layer_host_message_s: float = _constant(0.0, 0.0, 4e-3, "s")
    """Host's time added to a layer for each tp rank where pipeline messages cross nodes."""
    step_host_s: float = _constant(0.0, 0.0, 0.5, "s")
    """Fixed time of a step: data, metrics, norm of the gradients."""
    link_efficiency: float = _constant(0.7, 0.2, 1.0, "share")
    """Share of the links' bandwidth that collectives inside a node achieve."""
    collective_start_s: float = _constant(7e-5, 0.0, 2e-2, "s")
    """Until all ranks of a collective inside a node have met."""
    link_latency_s: float = _constant(5e-6, 0.0, 5e-3, "s")
    """Each hop of a collective inside a node."""
    tp_exposed: float = _constant(1.0, 0.2, 1.0, "share")
    """Part of tp's communication that no computation hides, where it is overlapped."""
    network_efficiency: float = _constant(0.7, 0.05, 1.0, "share")
    """Share of a GPU's network bandwidth that one ring achieves on few nodes."""
    network_sharing: float = _constant(0.5, 0.0, 1.0, "exponent")
    """k ranks of a ring in one node together achieve k to this power times as much."""
    network_congestion: float = _constant(0.0, 0.0, 0.3, "1/node")
    """Fraction of its first speed by which each node of the job makes the network slower."""
    tp_network_efficiency: float = _constant(0.36, 0.02, 1.0, "share")
    """Share of a whole node's network bandwidth that tp's collectives across nodes achieve."""
    tp_network_latency_s: float = _constant(2e-5, 0.0, 2e-2, "s")
    """Each hop of tp's collectives across nodes, the host's part included."""
    message_efficiency: float = _constant(0.5, 0.05, 1.0, "share")
    """Share of a GPU's network bandwidth that a pipeline's message achieves."""
    overlap: float = _constant(0.8, 0.0, 1.0, "share")
    """Part of the computation behind which data-parallel communication can hide."""
    overlap_slowdown: float = _constant(0.08, 0.0, 0.5, "share")
    """Share of the communication hidden on the network by which the computation that hides it takes longer."""
    score_saved_bytes: float = _constant(6.6, 2.0, 12.0, "byte/score")
    """Kept for backward of each attention score by separate operations."""
    fused_score_saved_bytes: float = _constant(5.8, 2.0, 8.0, "byte/score")
    """Kept for backward of each attention score by one kernel for mask, scale and softmax."""
    flash1_saved_bytes: float = _constant(4.0, 0.0, 8.0, "byte/width")
    """Kept by the first FlashAttention beside q, k and v: their packed copy."""
    norm_saved_bytes: float = _constant(16.0, 8.0, 30.0, "byte/width")
    """Kept by both norms of a block as separate operations: copies in fp32."""
    block_saved_bytes: float = _constant(0.0, 0.0, 4.0, "byte/width")
    """Kept by a block for each token beside what its formula counts: masks, copies in another format."""
    logit_bytes: float = _constant(12.0, 4.0, 30.0, "byte/logit")
    """Needed for each logit at the loss's peak."""
    gathered_logit_bytes: float = _constant(7.0, 0.0, 16.0, "byte/logit")
    """Added to `logit_bytes` where logits are gathered over tp: in bf16, their gradient, and own columns of both."""
    copy_bytes: float = _constant(0.0, 0.0, 16.0, "byte/parameter")
    """Held by a distributed optimizer for each parameter that it updates, beside its state: gradients in fp32, what is
    flattened."""
    overhead_bytes: float = _constant(0.5e9, 0.0, 6e9, "byte")
    """In the allocator's peak, whatever the layout: workspaces, fragments, inputs."""
    fragment_share: float = _constant(0.11, 0.0, 0.5, "share")
    """Reserved by PyTorch's allocator in pieces that nothing fits, of all that comes and goes but logits."""
    context_bytes: float = _constant(1.0e9, 0.0, 4e9, "byte")
    """On the GPU, but not in the allocator's peak: CUDA context, NCCL."""
    thrash_share: float = _constant(1.0, 0.8, 1.0, "share")
    """Share of the memory above which the allocator frees and asks anew."""
    thrash_s: float = _constant(0.0, 0.0, 4.0, "s")
    """Time that freeing and asking anew costs a microbatch."""

    def __post_init__(self) -> None:
        if problems := [line for f in fields(self) for line in list_outside(f.name, getattr(self, f.name))]:
            raise InvalidConfig(problems)


@dataclass(frozen=True, kw_only=True)
class RunAheadConstants(Constants):
    """Constants of a program with the feature `runs_ahead`."""

    run_ahead_bytes: float = _constant(0.0, 0.0, 300.0, "byte/width")
    """Full-width buffers, for each token of a microbatch, of tp collectives that the host started early."""
    message_saved_bytes: float = _constant(0.0, 0.0, 40.0, "byte/width")
    """Full-width buffers at tp > 1, for each token of each microbatch in flight in a pipeline."""
    run_ahead_microbatches: float = _constant(0.0, 0.0, 1.5, "microbatches")
    """More microbatches in flight than the schedule has, in pipelines at tp > 1, where the host is ahead."""
    run_ahead_host_s: float = _constant(2e-3, 1e-4, 8e-3, "s")
    """Host's time for a layer from which on it is not ahead."""


BOUNDS: dict[str, tuple[float, float]] = {f.name: f.metadata["bounds"] for f in fields(RunAheadConstants)}
"""Name → the least and the most that a constant can be."""


def list_outside(name: str, value: float) -> list[str]:
    """A line if a constant's value is out of bounds, else none."""
    low, high = BOUNDS[name]
    return [] if low <= value <= high else [f"{name}={value} lies outside [{low}, {high}]"]
