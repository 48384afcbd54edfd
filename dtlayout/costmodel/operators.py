"""Seconds of one operator on the device: a pass over memory, a matmul, the products of a state."""

from math import inf

from dtlayout.costmodel.scenario import Scenario, activation_size
from dtlayout.models.choice import TokenChoice
from dtlayout.models.mixer import Mixer


def pass_s(scenario: Scenario, moved_bytes: float) -> float:
    """Seconds of an elementwise kernel that reads and writes so many bytes."""
    return moved_bytes / (scenario.cluster.gpu.memory_bytes_per_s * scenario.engine.constants.memory_efficiency)


def matmul_s(scenario: Scenario, m: float, n: float, k: float) -> float:
    """m×k times k×n: 2·m·n·k FLOPs at the peak's reachable share, each size lengthened by what fills the machine."""
    constants = scenario.engine.constants
    fill = constants.matmul_fill
    flops = 2.0 * (m + fill) * (n + fill) * (k + fill)
    moved_s = pass_s(scenario, activation_size(scenario) * (m * n + n * k + m * k))
    efficiency = constants.matmul_efficiency * constants.matmul_share
    return max(flops / (matrix_flops_per_s(scenario) * efficiency), moved_s)


def linear_s(scenario: Scenario, m: float, n: float, k: float) -> float:
    """`matmul_s` of a linear layer in a block, in the format in which these multiply; casts are no part of it.

    What multiplies faster is filled as slowly: the sizes are lengthened as bf16's are, and by as much more as the
    peak is higher, along the sum.
    """
    if (fmt := scenario.precision.matmul_format) is None or scenario.is_on_host:  # a CPU multiplies what it casts back
        return matmul_s(scenario, m, n, k)
    constants, gpu = scenario.engine.constants, scenario.cluster.gpu
    if not (peak := gpu.peak_of(fmt)):
        return inf
    efficiency = constants.fp8_efficiency if fmt.peak == "fp8" else constants.fp4_efficiency
    fill = constants.matmul_fill
    flops = 2.0 * (m + fill) * (n + fill) * (k + fill * peak / gpu.peak_flops_per_s)
    moved_s = pass_s(scenario, activation_size(scenario) * m * n + fmt.held_bytes * (n * k + m * k))
    return max(flops / (peak * efficiency * constants.matmul_share), moved_s)


def state_s(scenario: Scenario, state: Mixer) -> float:
    """Seconds of a token in the matmuls and convolutions of a state, in forward: by their FLOPs in each format, or by
    the bytes that they move. Its passes are no part of it."""
    constants, gpu = scenario.engine.constants, scenario.cluster.gpu
    efficiency = constants.matmul_efficiency * constants.matmul_share
    exact_peak = gpu.peak_fp32_flops_per_s or gpu.peak_flops_per_s
    flops_s = (state.flops / matrix_flops_per_s(scenario) + state.exact_flops / exact_peak) / efficiency
    return max(flops_s, pass_s(scenario, choose_moved(scenario, state.product_moves)))


def choice_s(scenario: Scenario, choice: TokenChoice, seq_len: int) -> float:
    """Seconds of a token in a product that chooses what attention reads, by its FLOPs in its format."""
    constants, gpu = scenario.engine.constants, scenario.cluster.gpu
    exact_peak = gpu.peak_fp32_flops_per_s or gpu.peak_flops_per_s
    peak = exact_peak if choice.exact else matrix_flops_per_s(scenario)
    return choice.flops_per_token(seq_len) / (peak * constants.matmul_efficiency * constants.matmul_share)


def choose_moved(scenario: Scenario, moves: tuple[float, float]) -> float:
    """Bytes in the scenario's format, of those in a format of two bytes and in fp32; fp64 moves twice as many."""
    size = activation_size(scenario)
    return moves[0] if size <= 2 else moves[1] * size / 4


def matrix_flops_per_s(scenario: Scenario) -> float:
    """The peak for matrices in the format that is computed in."""
    gpu = scenario.cluster.gpu
    if scenario.precision.compute == "float32" and gpu.peak_fp32_flops_per_s is not None:
        return gpu.peak_fp32_flops_per_s
    if scenario.precision.compute == "float16" and gpu.peak_fp16_flops_per_s is not None:
        return gpu.peak_fp16_flops_per_s
    return gpu.peak_flops_per_s
