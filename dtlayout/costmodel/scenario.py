"""Scenario: what stays the same while layouts are compared, and how an engine cuts its model into stages for one."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from dtlayout.base.refusals import Refusal, describe
from dtlayout.costmodel.engine import OWN_ENGINE, Engine, find_usual
from dtlayout.costmodel.engine_partition import STAGE_SPLITS
from dtlayout.costmodel.engine_rules import (
    check_base,
    check_fake_quant,
    check_fake_quant_model,
    check_matmuls,
    check_scaled,
    check_scaled_model,
    find_layout_lacks,
    find_model_lacks,
)
from dtlayout.pipelining.partition import StageSlice, to_slices
from dtlayout.plans.plan import gathers_cast, gathers_scaled
from dtlayout.spec.base_format import BASE_FORMATS
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster
from dtlayout.spec.device import Device, check_compute_format, check_update_format, device_of
from dtlayout.spec.kernel_records import ExpertsKernel, KernelRequest
from dtlayout.spec.kernel_table import find_kernel
from dtlayout.spec.kernels import Kernels, OpenKernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import AdamW, Optimizer, check_state_format
from dtlayout.spec.precision import ALIGNMENT, BYTES, MATMUL_FORMATS, Precision


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A model, a batch, the GPUs and the program that trains."""

    model: ModelShape
    """The model that is trained."""
    batch: Batch
    """Samples and tokens of a step."""
    cluster: Cluster
    """The GPUs that it runs on."""
    engine: Engine
    """The program that runs it."""
    precision: Precision = field(default_factory=Precision)
    """Number formats. For engines that are not fsdp2 only `matmuls` counts; `Engine.told_formats` reads the others."""
    optimizer: Optimizer = field(default_factory=AdamW)
    """The optimizer of the parameters; its learning rate changes nothing here."""
    document_mask: bool = False
    """Whether documents packed into a sample do not attend to each other; only the memory of fsdp2 engines reads it."""

    @property
    def is_on_host(self) -> bool:
        """Whether the device is the host's CPU, so that the host's own time is not hidden behind a GPU."""
        return self.cluster.gpu.device_type == "cpu"

    @property
    def knows_time(self) -> bool:
        """Whether predicted seconds may be shown; on a CPU that nobody calibrated, general constants give no time."""
        return self.engine.is_calibrated or not self.is_on_host

    @property
    def capacity_bytes(self) -> float:
        """Bytes that the allocator of a GPU may hold."""
        return self.cluster.gpu.memory_bytes - self.engine.constants.context_bytes

    @cached_property
    def kinds(self) -> dict[ModelShape, "Scenario"]:
        """Each model of `ModelShape.kinds` → this scenario with that model, whose blocks are all alike."""
        first, *others = [kind for kind, _ in self.model.kinds(range(self.model.num_layers))]
        return {first: self, **{kind: replace(self, model=kind) for kind in others}}

    @cached_property
    def device(self) -> Device:
        """The kind of device that its ranks run on."""
        return device_of(self.cluster.gpu)


NO_TIME = "no step time: dtlayout calibrate has not measured this CPU"
"""Sentence in the place of seconds, where a scenario knows none."""


def engine_kernels(scenario: Scenario, kernels: OpenKernels, layout: Layout) -> Kernels:
    """The kernels that the engine runs on this device. For an auto, ours runs the fastest, others their usual one."""
    if scenario.engine.name != OWN_ENGINE:
        return kernels.or_else(find_usual(scenario.engine.name).kernels)
    return kernels.resolve(request_kernels(scenario, layout)).kernels


def request_kernels(scenario: Scenario, layout: Layout) -> KernelRequest:
    """Everything that a scenario with a layout asks of kernels."""
    device, compute = scenario.device, scenario.precision.compute
    return KernelRequest.of(device, scenario.model, compute, layout, document_mask=scenario.document_mask)


def find_refusals(scenario: Scenario, layout: Layout, kernels: Kernels) -> list[str]:
    """Everything that keeps the engine from running `kernels` with a legal layout on this device; one line each."""
    request = request_kernels(scenario, layout)
    return find_kernel_refusals(scenario, kernels, request) + find_unsupported(scenario, layout)


def find_kernel_refusals(scenario: Scenario, kernels: Kernels, request: KernelRequest) -> list[str]:
    """Everything that keeps the engine from running `kernels` where they are requested; one line each."""
    if scenario.engine.name == OWN_ENGINE:
        return kernels.problems(request)
    known = known_kernels(scenario.engine)
    lacks = describe([
        Refusal(
            operation,
            f"kernels.{operation}={name} is nothing that {scenario.engine.name} has",
            f"use kernels.{operation}={' or '.join(known[operation])}",
        )
        for operation, name in vars(kernels).items()
        if name not in known[operation]
    ])  # fmt: skip
    tried = replace(kernels, **_own_ones(scenario.engine.name, kernels))
    return lacks + tried.problems(replace(request, in_parts=False))


def known_kernels(engine: Engine) -> dict[str, tuple[str, ...]]:
    """The kernels of another engine than ours by operation, its usual one first."""
    usual, more = vars(find_usual(engine.name).kernels), vars(engine.features.kernels)
    return {operation: tuple(dict.fromkeys((name, *more[operation]))) for operation, name in usual.items()}


def find_unsupported(scenario: Scenario, layout: Layout) -> list[str]:
    """A line for everything but kernels in a legal layout that the engine, or its GPUs, do not have."""
    problems = find_scenario_lacks(scenario) + find_missing_numbers(scenario, layout)
    problems += find_update_problems(scenario, layout)
    problems += describe(check_base(scenario.precision, scenario.model, layout.tp))
    problems += describe(check_scaled(scenario.engine, scenario.precision, scenario.model, layout))
    problems += describe(check_fake_quant(scenario.precision, scenario.model, layout))
    return problems + find_layout_lacks(scenario.engine, layout, scenario.model)


def find_update_problems(scenario: Scenario, layout: Layout) -> list[str]:
    """Reasons why the optimizer of our trainer would be wrong in a layout, one line each; others may have their own."""
    return scenario.optimizer.layout_problems(layout) if scenario.engine.name == OWN_ENGINE else []


def find_scenario_lacks(scenario: Scenario) -> list[str]:
    """A line for everything that the engine, or its GPUs, do not have whatever the layout."""
    gpu, precision = scenario.cluster.gpu, scenario.precision
    fmt = precision.matmul_format
    broken = check_matmuls(scenario.engine, precision)
    if fmt and not gpu.peak_of(fmt) and not scenario.is_on_host:
        known = scenario.engine.features.matmuls
        able = [name for name, each in MATMUL_FORMATS.items() if gpu.peak_of(each) and name in known]
        what = f"precision.matmuls={fmt.name} is no format that {gpu.name} multiplies in"
        broken = [Refusal("matmuls", what, f"use precision.matmuls={' or '.join(('compute', *able))}")]
    if scenario.engine.name == OWN_ENGINE:  # of others there are published runs in what they call bf16
        broken += check_compute_format(scenario.device, precision.compute)
        broken += check_update_format(scenario.device, scenario.optimizer)
        broken += check_state_format(scenario.optimizer)
        broken += check_scaled_model(scenario.engine, precision, scenario.model)
    broken += check_fake_quant_model(scenario.engine, precision, scenario.model)
    return describe(broken) + find_model_lacks(scenario.engine, scenario.model)


def find_missing_numbers(scenario: Scenario, layout: Layout) -> list[str]:
    """A line for each missing bandwidth, of the host link, the host's memory or its disk, that predicting this layout's
    offload needs.

    Empty without offload.
    """
    if layout.offload == "none" or scenario.is_on_host:
        return []
    gpu = scenario.cluster.gpu
    needed = {"host_link": gpu.host_link_bytes_per_s}
    if layout.offloads_state:
        needed["host_memory_bandwidth"] = gpu.host_memory_bytes_per_s
    if layout.has_state_on_disk:
        needed["disk_bandwidth"] = gpu.disk_bytes_per_s
    return describe([
        Refusal(
            name,
            f"layout.offload={layout.offload}: no {name} is known of {gpu.name}",
            "give one in a cluster file, or use layout.offload=none",
        )
        for name, number in needed.items()
        if number is None
    ])  # fmt: skip


def _own_ones(engine: str, kernels: Kernels) -> dict[str, Any]:
    """Operation → a kernel of ours that runs anywhere, for kernels that are the engine's usual ones or none of ours."""
    usual, ours = vars(find_usual(engine).kernels), vars(Kernels())
    foreign = {kernel.operation for kernel in kernels.records if not kernel.formats()}
    return {key: ours[key] for key, value in vars(kernels).items() if value == usual[key] or key in foreign}


def count_state_shards(layout: Layout) -> int:
    """Ranks that share the state: those of dp_shard and cp, in FSDP2 as in Megatron; 1 where it is not sharded."""
    return layout.dp_shard * layout.cp if layout.dp_shard > 1 or layout.dp == 1 else 1


def count_expert_shards(layout: Layout) -> int:
    """Ranks that share the state of the experts that they all hold, as `count_state_shards` of everything else."""
    is_sharded = layout.dp_shard > 1 or layout.dp == 1
    return max(1, layout.dp_shard * layout.cp * layout.tp // layout.ep) if is_sharded else 1


def count_reductions(scenario: Scenario, layout: Layout, m: int) -> int:
    """How often gradients are summed over data-parallel ranks in a step of m microbatches."""
    features = scenario.engine.features
    is_each = layout.zero > 1 and (features.sharding == "fsdp2" or layout.pp == 1)
    return m if is_each and not features.adds_up_whole else 1


def leaves_frozen_whole(scenario: Scenario, layout: Layout) -> bool:
    """Whether each rank of a stage has all of its frozen parameters, although ranks share the others."""
    features = scenario.engine.features
    return layout.zero < 3 and (features.sharding != "fsdp2" or not features.shards_frozen)


def tokens_of(scenario: Scenario, layout: Layout) -> float:
    """Tokens of a microbatch on one cp rank."""
    return layout.micro_batch * scenario.batch.seq_len / layout.cp


def fullest_share(scenario: Scenario, layout: Layout) -> float:
    """Copies of tokens that the fullest of ep's ranks computes, over the mean; 1 without experts."""
    experts = scenario.model.experts
    return 1.0 if experts is None else experts.fullest_share(layout.ep)


def activation_size(scenario: Scenario) -> int:
    """Bytes of an activation: 2, those of bf16, or those of the compute format for an fsdp2 engine."""
    return BYTES[scenario.precision.compute] if scenario.engine.features.sharding == "fsdp2" else 2


class FormatSizes(NamedTuple):
    """Bytes of an element in each format of a tape (`BlockTensor.format`)."""

    compute: float
    """Activations."""
    cast: float
    """Inputs that matmuls below bf16 keep, as the engine keeps them."""
    exact: float
    """Statistics and copies of norms, RoPE and the loss: fp32 or finer."""


class BaseSizes(NamedTuple):
    """Bytes of one element of a frozen weight of few bits while it is computed; 0 where none is."""

    weight: float
    """Weight in the compute format."""
    lookup: float
    """Indices into a table that its codes become before that."""


def weigh_base(scenario: Scenario) -> BaseSizes:
    """Bytes of the tensors by which a quantized base is computed before a matmul, `ops.quantized`."""
    if (base := BASE_FORMATS.get(scenario.precision.base)) is None:
        return BaseSizes(0.0, 0.0)
    return BaseSizes(BYTES[scenario.precision.compute], base.lookup_bytes)


def matmul_alignment(scenario: Scenario) -> int:
    """Divisor of both sizes of a linear layer that the engine multiplies below the compute format."""
    return ALIGNMENT if scenario.engine.features.casts_itself else 1


def scales_experts(scenario: Scenario, kernels: Kernels) -> bool:
    """Whether routed experts multiply below the compute format where linear layers do; our trainer's kernel decides."""
    return not scenario.engine.features.casts_itself or find_kernel(ExpertsKernel, kernels.experts).scales


def sends_cast(scenario: Scenario, layout: Layout) -> bool:
    """Whether sequence parallelism gathers what matmuls read as it is cast for them, below the compute format."""
    features = scenario.engine.features
    if "activations" not in features.gathers_cast or not layout.shards_sequence or not scenario.precision.matmul_format:
        return False
    return not features.casts_itself or gathers_cast(scenario.model, scenario.precision)


def gathers_weights_cast(scenario: Scenario) -> bool:
    """Whether the weights that multiply in fp8 are gathered so by plans/cast_gather.py, and all others are not."""
    features = scenario.engine.features
    return features.casts_itself and "weights" in features.gathers_cast and gathers_scaled(scenario.precision)


def saved_by_casts(scenario: Scenario) -> float:
    """Bytes by which a gather is smaller for each parameter that multiplies in fp8 and is cast before it travels."""
    fmt = scenario.precision.matmul_format
    return activation_size(scenario) - fmt.gathered_bytes if fmt and gathers_weights_cast(scenario) else 0.0


def format_sizes(scenario: Scenario) -> FormatSizes:
    """Bytes of an element in each format; the only place that knows what an engine keeps of a matmul's input."""
    size, fmt = float(activation_size(scenario)), scenario.precision.matmul_format
    cast = fmt.held_bytes if fmt and scenario.engine.features.keeps_cast_inputs else size
    return FormatSizes(size, cast, max(size, 4.0))


def cut(scenario: Scenario, layout: Layout) -> list[StageSlice]:
    """The stages of a layout as the engine cuts them, where the layout does not say so itself."""
    split = STAGE_SPLITS[scenario.engine.features.stage_split]
    return to_slices(layout.stage_layers or split(scenario.model, scenario.batch, layout.num_stages))
