"""Scenario: what stays the same while layouts are compared, and how an engine cuts its model into stages for one."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dtlayout.batch import Batch
from dtlayout.cluster import Cluster
from dtlayout.costmodel.engine import OWN_ENGINE, Engine, find_usual
from dtlayout.costmodel.stage_split import STAGE_SPLITS
from dtlayout.device import Device, device_of
from dtlayout.kernel import Need
from dtlayout.kernels import Kernels, OpenKernels
from dtlayout.layout import Layout
from dtlayout.model_shape import ModelShape
from dtlayout.optimizers import AdamW, Optimizer
from dtlayout.pipelining.partition import StageSlice, to_slices
from dtlayout.precision import BYTES, Precision


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
    """Number formats; engines other than fsdp2 ones keep bf16 weights and fp32 masters whatever it says."""
    optimizer: Optimizer = field(default_factory=AdamW)
    """The optimizer of the parameters; its learning rate changes nothing here."""
    document_mask: bool = False
    """Whether documents packed into a sample do not see each other; only the memory of fsdp2 engines knows it."""

    @property
    def is_on_host(self) -> bool:
        """Whether the host computes itself, so that nothing is behind which its own time could hide."""
        return self.cluster.gpu.device_type == "cpu"

    @cached_property
    def kinds(self) -> dict[ModelShape, "Scenario"]:
        """Each model of `ModelShape.kinds` → this scenario with that model: blocks are all alike there."""
        first, *others = [kind for kind, _ in self.model.kinds(range(self.model.num_layers))]
        return {first: self, **{kind: replace(self, model=kind) for kind in others}}

    @cached_property
    def device(self) -> Device:
        """The kind of device that its ranks run on."""
        return device_of(self.cluster.gpu)


def engine_kernels(scenario: Scenario, kernels: OpenKernels, layout: Layout) -> Kernels:
    """What the engine runs on this device where a kernel is an auto: ours the fastest, others the usual one."""
    if scenario.engine.name != OWN_ENGINE:
        return kernels.or_else(find_usual(scenario.engine.name).kernels)
    need = Need(
        device=scenario.device, compute=scenario.precision.compute, head_width=scenario.model.head_width, tp=layout.tp,
        recompute=layout.recompute, document_mask=scenario.document_mask,
    )  # fmt: skip
    return kernels.resolve(need).kernels


def find_refusals(scenario: Scenario, layout: Layout, kernels: Kernels) -> list[str]:
    """Everything that keeps the engine from running `kernels` with a legal layout on this device; one line each."""
    engine = scenario.engine
    tried = kernels if engine.name == OWN_ENGINE else replace(kernels, **_usual_ones(engine.name, kernels))
    problems = tried.problems(scenario.precision, scenario.device, tp=layout.tp, recompute=layout.recompute)
    return problems + find_lacks(scenario, layout)


def find_lacks(scenario: Scenario, layout: Layout) -> list[str]:
    """What the engine lacks for a legal layout beside kernels, or its GPUs for the format; one line each."""
    engine, problems = scenario.engine, list[str]()
    if (fmt := scenario.precision.matmul_format) and not scenario.cluster.gpu.peak_of(fmt):
        problems.append(f"precision.matmuls={fmt.name} is no format that {scenario.cluster.gpu.name} multiplies in")
    elif engine.name == OWN_ENGINE:
        problems += scenario.precision.training_problems
    problems += engine.model_problems(scenario.model)
    return problems + engine.layout_problems(layout)


def _usual_ones(engine: str, kernels: Kernels) -> dict[str, Any]:
    """The kernels that an engine usually has, each with one of ours in its place, which runs anywhere."""
    usual = vars(find_usual(engine).kernels)
    return {key: getattr(Kernels(), key) for key, value in vars(kernels).items() if value == usual[key]}


def count_state_shards(layout: Layout) -> int:
    """Ranks that share the state: those of dp_shard and cp, in FSDP2 as in Megatron; 1 where it is not sharded."""
    return layout.dp_shard * layout.cp if layout.dp_shard > 1 or layout.dp == 1 else 1


def count_expert_shards(layout: Layout) -> int:
    """Ranks that share the state of the experts that they all hold, as `count_state_shards` of everything else."""
    is_sharded = layout.dp_shard > 1 or layout.dp == 1
    return max(1, layout.dp_shard * layout.cp * layout.tp // layout.ep) if is_sharded else 1


def tokens_of(scenario: Scenario, layout: Layout) -> float:
    """Tokens of a microbatch on one cp rank."""
    return layout.micro_batch * scenario.batch.seq_len / layout.cp


def activation_size(scenario: Scenario) -> int:
    """Bytes of an activation: bf16, or what an fsdp2 engine is told."""
    return BYTES[scenario.precision.compute] if scenario.engine.features.sharding == "fsdp2" else 2


def cut(scenario: Scenario, layout: Layout) -> list[StageSlice]:
    """The stages of a layout as the engine cuts them, where the layout does not say so itself."""
    split = STAGE_SPLITS[scenario.engine.features.stage_split]
    return to_slices(layout.stage_layers or split(scenario.model, scenario.batch, layout.num_stages))
