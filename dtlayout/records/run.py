"""Run: one record of a layout's results, whoever ran it, predicted and measured under the same names.

A row of a table, a trial of a sweep, a dry run and a training run are each a `Run`. Its JSON form (`to_dict`,
`from_dict`) stands under "run" in each line of trials.jsonl, in summary.json, memory.json and what `dtlayout dryrun
--json` prints, and needs nothing beside it.

| outcome | |
|---|---|
| ok | its steps were done, or it was stopped after some |
| oom | memory ran out, of a GPU or of the host |
| crashed | a process failed otherwise |
| crashed_or_oom | one of the two, and the source does not say which |
| killed | a process was ended by SIGKILL, which is also what a host that is short of memory does |
| hung | no end within the time limit |
| non_finite | the loss or the gradients became NaN or infinite |
| running | it has not ended, or its end left no word |
| refused | the layout or a kernel is not possible; nothing was started, or the trainer said so |
| skipped | it was not tried: predicted not to fit, or the source has no number |
| dry | a dry run, which takes no time and counts bytes |
"""

import re
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal, get_type_hints

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.engine import find_engine_on
from dtlayout.costmodel.estimate import TimeEstimate
from dtlayout.costmodel.memory import MemoryEstimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.counting import count_model_flops_per_token
from dtlayout.records.intervals import Interval
from dtlayout.spec.cluster import Cluster, Gpu, gpu_named
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

FORMAT = 1
"""Version of a run's JSON; another one is refused."""

Outcome = Literal[
    "ok", "oom", "crashed", "crashed_or_oom", "killed", "hung", "non_finite", "running", "refused", "skipped", "dry"
]
UNTRIED: tuple[Outcome, ...] = ("running", "refused", "skipped")
"""Outcomes that do not tell how a layout ends."""


@dataclass(frozen=True, kw_only=True)
class Performance:
    """Time and memory of a step; None where a value is not known."""

    step_time_s: float | None = None
    """Seconds of a step; measured, the median of those that count."""
    step_time_spread_s: float | None = None
    """Difference between the quartiles of the measured steps, in seconds; None if there is a single step."""
    tokens_per_s: float | None = None
    """Tokens a second of all GPUs together."""
    mfu: float | None = None
    """Model FLOPs utilization, 0 to 1, by the study's convention; None where the peak is not known, as on a CPU."""
    peak_memory_bytes: tuple[int | None, ...] | None = None
    """Peak of each pipeline rank, the largest over its other axes."""
    peak_reserved_bytes: int | None = None
    """The most that PyTorch's allocator of any rank has reserved, fragments included."""
    time: TimeEstimate | None = None
    """The step's seconds by component."""
    memory: tuple[MemoryEstimate | None, ...] | None = None
    """Peak of each pipeline rank by component, in bytes."""
    expert_imbalance: float | None = None
    """Copies of tokens that the fullest of ep's ranks computes, over the mean of these ranks; measured, the mean of the
    last ten steps. None without experts."""


@dataclass(frozen=True, kw_only=True)
class Predicted(Performance):
    """A prediction made before the run, and what it rests on."""

    calibrated: bool
    """Whether runs of this engine on this GPU type stand behind it."""
    step_time_interval: Interval | None = None
    """Expected range of the measured step, and the rows that say so."""
    peak_memory_interval: Interval | None = None
    """Expected range of the measured peak, and the rows that say so."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A layout that ran: where, how it ended, what was predicted and what was measured."""

    table: str
    """The sweep, table or folder that the run belongs to."""
    row: str
    """Name of the run in its table."""
    scenario: Scenario
    """Model, batch, cluster, engine, precision and whether documents are masked."""
    layout: Layout
    """The layout that ran; other programs have some that our trainer does not take."""
    kernels: Kernels
    outcome: Outcome
    predicted: Predicted | None = None
    """Prediction that was made before it ran; None if there was none."""
    measured: Performance = Performance()
    """Time and memory that were measured while it ran."""
    source: str = ""
    """The publisher of the row; empty where nobody says."""
    note: str = ""
    """Remarks of the source on this row."""
    assumed: tuple[str, ...] = ()
    """Assumptions about facts that the source does not state, a sentence each."""
    tells_memory: bool = True
    """False if the source does not say how activations were kept (recomputed, or on the host): it does not count in
    `false_oom` then."""

    @property
    def site(self) -> str:
        """The organisation that measured the row, by its source, or by its table where no source is given."""
        return find_site(self.source or self.table)

    @property
    def step_time_s(self) -> float | None:
        """Measured seconds of a step."""
        return self.measured.step_time_s

    @property
    def mfu(self) -> float | None:
        """Measured MFU, 0 to 1."""
        return self.measured.mfu

    @property
    def peak_bytes(self) -> int | None:
        """Measured peak of the allocator on pipeline rank 0."""
        return self.measured.peak_memory_bytes[0] if self.measured.peak_memory_bytes else None

    @property
    def has_peak(self) -> bool:
        """Whether `peak_bytes` is the peak of whole steps."""
        return self.outcome in ("ok", "dry") and bool(self.peak_bytes)

    @property
    def ran(self) -> bool:
        """Whether the run ended well, with a measured speed."""
        return self.outcome == "ok" and self.speed is not None

    @property
    def speed(self) -> float | None:
        """MFU; on a CPU, which has none, steps a second."""
        if self.mfu is None and not self.scenario.cluster.gpu.has_mfu and self.step_time_s:
            return 1 / self.step_time_s
        return self.mfu

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        """Measured tokens a second of one GPU; from the MFU where no time is known, None if it did not run."""
        s = self.scenario
        if self.outcome != "ok":
            return None
        if self.step_time_s:
            return s.batch.tokens_per_s_per_gpu(self.step_time_s, s.cluster.num_gpus)
        if self.mfu:
            return self.mfu * s.cluster.gpu.peak_flops_per_s / count_model_flops_per_token(s.model, s.batch.seq_len)
        return None

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of the run, which `from_dict` reads."""
        gpu, cluster = self.scenario.cluster.gpu, self.scenario.cluster
        plain = vars(gpu_named(gpu.name))
        measured = {name: value for name, value in vars(gpu).items() if value != plain[name]}
        measured |= {"achieved": dict(gpu.achieved)} if gpu.achieved else {}
        machines = _Machines(gpu.name, measured, cluster.num_gpus, cluster.gpus_per_node)
        document = asdict(self)
        scenario = document.pop("scenario") | {"cluster": asdict(machines), "engine": self.scenario.engine.name}
        return {"format": FORMAT, **scenario, **document}

    @classmethod
    def from_dict(cls, document: Any) -> "Run":
        """The run from its JSON form; DtlayoutError if it is no such form, or one of another version."""
        found = document.get("format") if isinstance(document, dict) else None
        if found != FORMAT:
            raise InvalidConfig(
                f"run.format={found!r}, and this version of dtlayout reads {FORMAT}; use the version that wrote it"
            )
        types = get_type_hints(Scenario) | get_type_hints(cls) | {"cluster": _Machines, "engine": str, "format": int}
        del types["scenario"]
        problems: list[str] = []
        required = [f.name for f in (*fields(Scenario), *fields(cls)) if f.name != "scenario" and f.default is MISSING]
        values = toml.read_keys(document, types, required, "run", problems)
        if problems:
            raise InvalidConfig(problems)
        del values["format"]
        cluster = values["cluster"].to_cluster()
        values |= {"cluster": cluster, "engine": find_engine_on(values["engine"], cluster.gpu)}
        scenario = Scenario(**{f.name: values.pop(f.name) for f in fields(Scenario) if f.name in values})
        return cls(scenario=scenario, **values)


@dataclass(frozen=True)
class _Machines:
    """A cluster in JSON."""

    gpu: str
    """Name of the GPU type."""
    measured: dict[str, Any]
    """Fields of `Gpu` that were measured, and differ from the shipped constants."""
    num_gpus: int
    gpus_per_node: int

    def to_cluster(self) -> Cluster:
        problems: list[str] = []
        types = get_type_hints(Gpu) | {"achieved": dict[str, float]}
        numbers = toml.read_keys(self.measured, types, (), "run.cluster.measured", problems)
        if problems:
            raise InvalidConfig(problems)
        if "achieved" in numbers:
            numbers["achieved"] = tuple(numbers["achieved"].items())
        gpu = replace(gpu_named(self.gpu), **numbers)
        return Cluster(gpu=gpu, num_gpus=self.num_gpus, gpus_per_node=self.gpus_per_node)


def find_site(source: str) -> str:
    """The organisation of a source: the first part of its path, without what follows a dash or a space.

    >>> find_site("https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/README.md")
    'nvidia'
    >>> find_site("mosaicml/llm-foundry scripts/train/benchmarking/README.md")
    'mosaicml'
    """
    path = re.sub(r"^https?://(?:github\.com/|(?:docs|www)\.)?", "", source.lower())
    return re.split(r"[/\s.-]", path, maxsplit=1)[0]
