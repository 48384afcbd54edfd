"""Config: the sections of one TOML file, typed and frozen."""

from dataclasses import asdict, dataclass, field, replace

from dtlayout.base import toml
from dtlayout.base.dataset_folders import find_held_out_split
from dtlayout.config.sections import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    MetricsConfig,
    SpikesConfig,
    TrainConfig,
    ValidationConfig,
    ValidationSet,
)
from dtlayout.spec.batch import Batch
from dtlayout.spec.device import Device, expect_device
from dtlayout.spec.kernel_records import KernelRequest
from dtlayout.spec.kernels import OpenKernels, ResolvedKernels
from dtlayout.spec.layout import Layout, OpenLayout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import AdamW, Optimizer
from dtlayout.spec.precision import Precision


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything from which a run is made: the sections of the TOML file."""

    model: ModelShape
    batch: Batch
    train: TrainConfig
    layout: OpenLayout = field(default_factory=OpenLayout)
    kernels: OpenKernels = field(default_factory=OpenKernels)
    precision: Precision = field(default_factory=Precision)
    data: DataConfig = field(default_factory=DataConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    optimizer: Optimizer = field(default_factory=AdamW)
    spikes: SpikesConfig = field(default_factory=SpikesConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def device(self) -> Device:
        """The device of a run, as far as it is known before torch is asked (`expect_device`)."""
        return expect_device(self.train.device, self.cluster.known_gpu)

    @property
    def batches(self) -> list[Batch]:
        """Every size that a step may have: those of the ramp, and the last one, which is predicted."""
        return [*(replace(self.batch, global_batch=each.global_batch) for each in self.train.batch_ramp), self.batch]

    def describe_ramp(self) -> list[str]:
        """A line on the sizes of batches where they grow, and on the one that is predicted; none without a ramp."""
        if not (ramp := self.train.batch_ramp):
            return []
        smaller = ", ".join(f"{each.global_batch} until {each.until:,} samples" for each in ramp)
        size = self.batch.global_batch
        return [f"train.batch_ramp: global batches of {smaller}, then {size}; a step of {size} is what is predicted"]

    @property
    def validation_data(self) -> DataConfig | None:
        """A [data] section with the source of the run's validation loss; None where nothing is validated."""
        return next(iter(self.held_out_data.values()), None)

    @property
    def held_out_data(self) -> dict[str, DataConfig]:
        """For each set of [validation] a [data] section with its source; `validation.source` comes first, as ""."""
        own = {"": self.validation} if self.validation.source else {}
        return {name: self._hold_out(each) for name, each in (own | {s.name: s for s in self.validation.sets}).items()}

    def _hold_out(self, v: ValidationConfig | ValidationSet) -> DataConfig:
        data = self.data
        return replace(
            data, source=v.source, split=find_held_out_split(v.source, v.split), mixture=(), max_tokens=0,
            text_field=v.text_field or data.text_field,
            messages_field=v.messages_field or ("" if v.text_field else data.messages_field),
        )  # fmt: skip

    def count_held_out_batches(self, name: str) -> int:
        """Global batches of a set of [validation] that are measured; 0 for all."""
        own = {each.name: each.batches for each in self.validation.sets}.get(name, 0)
        return own or self.validation.batches

    def request_kernels(self, device: Device, layout: Layout) -> KernelRequest:
        """Everything that this run asks of kernels on a device, with a layout."""
        document_mask, deterministic = self.data.document_mask, self.train.deterministic
        return KernelRequest.of(
            device, self.model, self.precision.compute, layout, document_mask=document_mask, deterministic=deterministic
        )

    def choose_kernels(self, device: Device, layout: Layout) -> ResolvedKernels:
        """The kernels of this run on a device, with a layout: each auto is replaced."""
        return self.kernels.resolve(self.request_kernels(device, layout))

    def to_toml(self) -> str:
        """A TOML file that loads to this config again."""
        tables = asdict(self)
        if (adapter := tables["model"].pop("adapter")) is not None:
            tables["adapter"] = adapter
        if self.data.mixture:  # which stands in place of them: defaults would say that they are read
            for key in ("source", "split"):
                if getattr(self.data, key) == getattr(DataConfig, key):
                    del tables["data"][key]
        return toml.dumps(tables)
