"""Config: one TOML file, typed and frozen, and the command line's overrides of it.

`load_config` reads a file, puts `--section.key=value` overrides on top, and checks every section; all problems come in
one InvalidConfig. `[model]` starts from the preset that `name` names. No torch.
"""

import difflib
import os
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.base.files import expand, find_path_problem
from dtlayout.base.source_names import find_held_out_split
from dtlayout.base.validators import Ranged, one_of, path_key, ranged
from dtlayout.models.beside import KEPT, TOKENIZER, has_other_tokenizer
from dtlayout.models.families import find_family
from dtlayout.models.files import complete
from dtlayout.models.presets import PRESETS
from dtlayout.models.weights import check_init_from
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Gpu, find_gpu, known_gpus, load_cluster
from dtlayout.spec.device import Device, expect_device
from dtlayout.spec.kernel_table import KernelRequest
from dtlayout.spec.kernels import OpenKernels, ResolvedKernels
from dtlayout.spec.layout import Layout, OpenLayout
from dtlayout.spec.model_shape import ModelShape, divisors
from dtlayout.spec.optimizers import AdamW, Optimizer
from dtlayout.spec.precision import Precision
from dtlayout.spec.trackers import TRACKERS, name_problems, package_problems


@dataclass(frozen=True, kw_only=True)
class Source(Ranged, section="data.mixture"):
    """One of several sources."""

    source: str = path_key()
    """As `data.source`."""
    weight: float = ranged("must be above 0 and finite", 1.0)
    """Share of the samples, whatever the weights add up to."""
    split: str = ranged("must not be empty or hold a NUL", "train")
    """Split of a hub dataset; local files are one, train."""
    text_field: str = "text"
    """Field that holds a document's text."""
    messages_field: str = ""
    """Field that holds a conversation; empty for text."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Ranged, section="data"):
    """Where the tokens come from."""

    source: str = path_key("python-stdlib")
    """A .txt, .jsonl, .json or .parquet file, a folder or glob of them, a dataset on the HF hub, or python-stdlib."""
    split: str = ranged("must not be empty or hold a NUL", "train")
    """Split of a hub dataset; local files are one, train."""
    text_field: str = "text"
    """Field that holds a document's text."""
    messages_field: str = ""
    """Field that holds a conversation, a list of messages with role and content; empty for text."""
    mixture: tuple[Source, ...] = ()
    """Several sources, in place of the one above, each with a weight."""
    chat_template: str = path_key("")
    """A Jinja file that writes conversations; empty for the tokenizer's own."""
    loss_on: Literal["answers", "all"] = "answers"
    """Which tokens of a conversation are targets; of text all are."""
    samples: Literal["packed", "padded"] = "packed"
    """packed cuts one row of all documents, padded makes each document a sample, cut or filled up."""
    tokenizer: str = path_key("bytes")
    """bytes, or the path of a tokenizer.json or of its folder; where none is named, that of `train.init_from`."""
    end_of_document: str = ""
    """Token after each document, where the tokenizer has none of the usual ones."""
    document_mask: bool = False
    """Whether documents that share a sample do not see each other; the loss and its targets stay the same."""
    max_tokens: int = ranged("must not be negative", 0)
    """Tokens to prepare of each source at most; 0 for all."""
    folder: str = path_key("data/tokens")
    """Where prepared tokens lie, to be used again."""

    @property
    def weights(self) -> tuple[float, ...]:
        """Of each of `sources`."""
        return tuple(each.weight for each in self.mixture) or (1.0,)

    @property
    def sources(self) -> "tuple[DataConfig, ...]":
        """The same for each source by itself, which is prepared by itself."""
        names = ("source", "split", "text_field", "messages_field")
        own = ({name: getattr(each, name) for name in names} for each in self.mixture or (self,))
        return tuple(replace(self, mixture=(), **each) for each in own)


@dataclass(frozen=True, kw_only=True)
class ValidationConfig(Ranged, section="validation"):
    """What the loss is also measured on, without training on it; tokenized as the data is."""

    source: str = path_key("")
    """As `data.source`; empty for no validation."""
    split: str = ""
    """Split of a hub dataset, by default validation; local files are one, train."""
    text_field: str = ""
    """Field that holds a document's text, which makes it text even beside conversations; empty for that of the data."""
    messages_field: str = ""
    """Field that holds a conversation; empty for that of the data, where `text_field` is empty too."""
    every: int = ranged("must not be negative", 100)
    """Steps between measurements; 0 measures at the end alone."""
    batches: int = ranged("must be at least 1", 8)
    """Global batches to measure, the same ones each time; fewer where the source has no more."""


PLANNED_STEPS = 1_000_000_000
"""Steps of a plan that says none: more than any warm-up has."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Ranged, section="train"):
    """How long, where and from which seed."""

    steps: int = ranged("must be at least 1")
    """Optimizer steps of the whole run, those before a resume included."""
    init_from: str = path_key("")
    """A Hugging Face folder whose weights a new run starts from, with its sizes where no [model] is; empty for random
    ones."""
    run_folder: str = path_key("runs/latest")
    """Where metrics, summary, config and checkpoints go, by default named like the file; the same folder resumes."""
    seed: int = 0
    """Decides the initial weights and the order of the samples."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is any."""
    timeout_s: float = ranged("must be above 0 and at most 2592000, thirty days", 600.0)
    """Seconds after which a collective that does not finish ends the run."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Whether a step whose loss or gradient norm is not finite, which updates nothing, ends the run or is left out."""
    deterministic: bool = False
    """Whether CUDA runs only kernels that give the same bits each time, which are slower; a CPU always does."""
    force: bool = False
    """Whether to start even a layout that is predicted to need far more memory than the GPU has."""


@dataclass(frozen=True, kw_only=True)
class SpikesConfig(Ranged, section="spikes"):
    """When a step's loss or gradient norm is far above those of recent steps, and what comes of that.

    limit = median + factor * max(quantile - median, median / 100), of the losses and of the norms by themselves.
    """

    action: Literal["off", "warn", "skip", "save"] = "warn"
    """warn says so, skip also updates nothing, and save also keeps the state that met the spike in RUN/spikes."""
    window: int = ranged("must be at least 1", 128)
    """Steps that are recent."""
    min_steps: int = ranged("must be at least 1", 64)
    """Steps before there is a limit."""
    quantile: float = ranged("must lie between 0.5 and 1", 0.9)
    """How far recent steps reach; what lasts for the rest of a window is the new level, and no spike any more."""
    factor: float = ranged("must be above 0 and finite", 10.0)
    """How many times as far above the median is too far."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_steps > self.window:
            raise InvalidConfig(
                f"spikes.min_steps={self.min_steps} is more than spikes.window={self.window}, so that there would "
                "never be a limit; use a longer window"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Ranged, section="checkpoint"):
    """When the run's state is saved, and whether its weights leave it."""

    every: int = ranged("must not be negative", 0)
    """Steps between checkpoints; 0 saves at the end alone."""
    timeout_s: float = ranged("must be above 0 and at most 2592000, thirty days", 3600.0)
    """Seconds after which ranks that wait for others to save or load end the run."""
    keep: int = ranged("must be at least 1", 2)
    """Newest checkpoints that stay on disk."""
    fallback: Literal["previous", "refuse"] = "previous"
    """What a run does whose newest checkpoint is damaged: go on from the one before, or end."""
    background: bool = True
    """Whether checkpoints within a run are written while training goes on, from a copy of the state on the host."""
    save: bool = True
    """Whether anything is saved; without it a run cannot be resumed."""
    export: bool = False
    """Whether the weights of a run that is done also go to RUN/hf, a Hugging Face folder in the compute format."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Ranged, section="metrics"):
    """What is measured beside the loss."""

    log_every: int = ranged("must be at least 1", 10)
    """Steps between progress lines on a terminal that shows no progress bar."""
    memory_every: int = ranged("must be at least 1", 100)
    """Steps between memory measurements, which slow a step; the second and the last are measured too."""
    memory: bool = False
    """Write the curve of memory over the first steps to memory.json in the run folder."""
    timeline: bool = False
    """Write when each pipeline rank did what to timeline.json in the run folder, of the third step and of every
    `memory_every`-th after it the last eight; dtlayout timeline RUN draws them."""
    to: tuple[str, ...] = one_of(TRACKERS, ())
    """Where else every number of a step goes; their files lie in the run folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if problems := name_problems(self.to):
            raise InvalidConfig(problems)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Ranged, section="cluster"):
    """The hardware, as far as the run cannot see it."""

    gpu: str = one_of(lambda: ("auto", "cpu", *known_gpus()), "auto")
    """GPU type for MFU; auto asks the device, cpu has no peak."""
    gpus_per_node: int = ranged("must be at least 1", 8)
    """Ranks that share a node's fast links; of a GPU type whose links join several nodes it is known how many."""
    file: str = path_key("")
    """A cluster's TOML file, such as dtlayout calibrate writes; it goes before the other two."""

    @property
    def known_gpu(self) -> Gpu | None:
        """The GPU type of the file or of the name, the CPU included; None if the device is to be asked."""
        if self.file:
            cluster = load_cluster(self.file)
            return replace(cluster.gpu, gpus_per_node=cluster.gpus_per_node)
        return None if self.gpu == "auto" else find_gpu(self.gpu)

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a node's fast links, by the file if there is one, or `gpus_per_node`."""
        return load_cluster(self.file).gpus_per_node if self.file else self.gpus_per_node

    @property
    def ranks_linked(self) -> int:
        """Ranks that fast links join: those of a node, or of a rack that is one domain, full or not."""
        gpu = self.known_gpu
        return max(self.ranks_per_node, gpu.gpus_linked if gpu else 1)

    def __post_init__(self) -> None:
        known = ("auto", "cpu", *known_gpus())
        problems = [] if self.gpu in known else [f"cluster.gpu={self.gpu!r} is unknown; use one of {', '.join(known)}"]
        problems += self.range_problems()
        if problems:
            raise InvalidConfig(problems)
        self.expand_paths()
        if self.file:
            load_cluster(self.file)  # which says what is wrong with it


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run is made from; sections of the TOML file."""

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
        """What a run will use, as far as that is known before torch is asked: `expect_device`."""
        return expect_device(self.train.device, self.cluster.known_gpu)

    @property
    def validation_data(self) -> DataConfig | None:
        """Where the tokens of [validation] come from; None where nothing is validated."""
        if not self.validation.source:
            return None
        v, data = self.validation, self.data
        return replace(
            data, source=v.source, split=find_held_out_split(v.source, v.split), mixture=(), max_tokens=0,
            text_field=v.text_field or data.text_field,
            messages_field=v.messages_field or ("" if v.text_field else data.messages_field),
        )  # fmt: skip

    def choose_kernels(self, device: Device, layout: Layout) -> ResolvedKernels:
        """The kernels of a run there, each auto replaced."""
        need = KernelRequest(
            device=device, compute=self.precision.compute, head_width=self.model.head_width,
            deterministic=self.train.deterministic, document_mask=self.data.document_mask, **layout.asked_of_kernels,
        )  # fmt: skip
        return self.kernels.resolve(need)

    def to_toml(self) -> str:
        """A TOML file that loads to this config again."""
        tables = asdict(self)
        if self.data.mixture:  # which stands in place of them: defaults would say that they are read
            for key in ("source", "split"):
                if getattr(self.data, key) == getattr(DataConfig, key):
                    del tables["data"][key]
        return toml.dumps(tables)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a TOML file with `--section.key=value` overrides; InvalidConfig with every problem."""
    return parse_config(_read_tables(path, overrides))


def load_plan(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a file that may leave out [train], for those who only predict; its steps are PLANNED_STEPS then."""
    tables = _read_tables(path, overrides)
    tables.setdefault("train", {})
    if isinstance(train := tables["train"], dict):
        train.setdefault("steps", PLANNED_STEPS)
    return parse_config(tables)


def load_formats(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What [precision] of a config file says, without what it leaves to the program."""
    return dict(_read_tables(path, overrides).get("precision", {}))


def _read_tables(path: str | Path, overrides: Sequence[str]) -> dict[str, Any]:
    tables = toml.read(path, "config")
    _override(tables, overrides)
    if isinstance(train := tables.get("train"), dict):
        train.setdefault("run_folder", f"runs/{Path(path).stem}")
    return tables


def parse_config(tables: dict[str, Any]) -> Config:
    """The config of parsed TOML; InvalidConfig with every problem."""
    problems = []
    try:
        model = _find_sizes(tables.get("model") or _name_source(tables.get("train")))
    except InvalidConfig as error:
        problems += error.problems
        model = asdict(PRESETS["debug"])  # so that the other sections are checked too
    try:
        tables = _choose_tokenizer(tables)
    except InvalidConfig as error:
        problems += error.problems
    needed: dict[str, Any] = {f.name: {} for f in fields(Config) if f.default_factory is MISSING}
    try:
        config = toml.parse({**needed, **tables, "model": model}, Config)
    except InvalidConfig as error:
        problems += error.problems
    if problems:
        raise InvalidConfig(problems)
    return config


def check_layout(config: Config, world_size: int, device: Device | None = None) -> Layout:
    """The config's layout on `world_size` ranks; InvalidLayout with everything that is wrong with it there.

    `device` is where it is to run, perhaps elsewhere; without one it runs here, on what `train.device` says by itself,
    since an auto is left to torch.
    """
    problems = package_problems(config.metrics.to) if device is None else []
    device = device or expect_device(config.train.device, None)
    try:
        layout = config.layout.resolve(world_size)
    except InvalidLayout:
        smallest = config.layout.smallest_world_size
        layout = config.layout.resolve(smallest)
        shards = divisors(config.batch.global_batch) if config.layout.dp_shard == -1 else [1]  # dp divides the batch
        sizes = [smallest * n for n in shards]
        legal = [size for size in sizes if config.layout.resolve(size).is_legal(config.model, config.batch)]
        nearest = sorted(sorted(legal, key=lambda size: abs(size - world_size))[:2])
        problems.append(config.layout.describe_mismatch(world_size, nearest or [smallest]))
    problems += layout.problems(config.model, config.batch)
    try:
        find_family(config.model.family)
    except InvalidConfig as error:
        problems += error.problems
    if config.train.init_from and not _has_begun(config.train.run_folder):
        problems += check_init_from(config.train.init_from, config.model)
    if config.checkpoint.export and not config.checkpoint.save:
        problems.append("checkpoint.export=true writes what was saved, but checkpoint.save=false; use save=true")
    if config.spikes.action == "save" and not config.checkpoint.save:
        problems.append('spikes.action="save" saves a state, but checkpoint.save=false; use save=true or action="skip"')
    warmup_steps, falls_over = config.optimizer.warmup_steps, config.optimizer.decay_steps or config.train.steps
    if warmup_steps > falls_over:
        name = "optimizer.decay_steps" if config.optimizer.decay_steps else "train.steps"
        problems.append(
            f"optimizer.warmup_steps={warmup_steps} is more than {name}={falls_over}, so that the learning rate would "
            f"never reach optimizer.lr; use fewer, or optimizer.decay_steps=N for the first steps of a run of N"
        )
    problems += config.precision.training_problems
    if not config.model.gated_ffn:
        problems.append("model.gated_ffn=false can be predicted, not trained; use gated_ffn=true")
    if config.model.window:
        problems.append(f"model.window={config.model.window} can be predicted, not trained; use window=0")
    if config.model.experts is not None:
        problems.append("model.experts: a mixture of experts can be predicted, not trained; use a model without them")
    if config.model.latent_attention is not None:
        problems.append("model.latent_attention can be predicted, not trained; use a model without it")
    kernels = config.choose_kernels(device, layout).kernels
    problems += kernels.problems(
        config.precision, device, document_mask=config.data.document_mask, **layout.asked_of_kernels
    )
    problems += kernels.unrepeatable(device) if config.train.deterministic else []
    if problems:
        raise InvalidLayout(problems)
    return layout


def _override(tables: dict[str, Any], overrides: Sequence[str]) -> None:
    """Put each `--section.key=value` into the tables; a value is TOML, or a string where it is not.

    `--layout=NAME` has all that a printed layout says, and `--model=M` puts another model in the place of [model].
    """
    for text in overrides:
        key, equals, value = text.removeprefix("--").partition("=")
        if key == "layout" and equals:
            table = tables.get("layout", {})
            tables["layout"] = (table if isinstance(table, dict) else {}) | Layout.read(value)
            continue
        if key == "model" and equals:
            tables["model"] = {"name": value}
            continue
        section, dot, name = key.partition(".")
        if not (text.startswith("--") and equals and dot and section and name):
            raise InvalidConfig(f"{text!r} is not an override; write --section.key=value, such as --layout.tp=2")
        *path, last = key.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise InvalidConfig(f"{text!r} cannot be set: {key.rpartition('.')[0]} is no table in the config")
        table[last] = toml.parse_value(value)


def _name_source(train: Any) -> dict[str, Any]:
    """A [model] that takes its sizes from where its weights come from, if they come from somewhere."""
    init_from = train.get("init_from") if isinstance(train, dict) else None
    if not init_from:
        return {}
    folder = expand(str(init_from)).absolute()  # whatever a preset is called
    if not os.path.isfile(folder / "config.json"):
        raise InvalidConfig(f"train.init_from={init_from!r} has no config.json, and the config no [model]")
    return {"name": str(folder)}


def _has_begun(run_folder: str) -> bool:
    """Whether a run has a checkpoint, with which it goes on."""
    try:
        return any((expand(run_folder) / "checkpoints").glob("step-*"))
    except (OSError, ValueError, InvalidConfig):  # no path at all
        return False


def _choose_tokenizer(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables with a `data.tokenizer`, where they name none and the model comes with one.

    A new run has that of `train.init_from`. One that has begun goes on with what its own config names, or has kept, or
    else with that of `train.init_from`. InvalidConfig if there is one of another form than tokenizer.json alone: the
    model's ids would mean other texts.
    """
    data, train = tables.get("data", {}), tables.get("train", {})
    if not isinstance(data, dict) or not isinstance(train, dict) or "tokenizer" in data:
        return tables
    init_from, run_folder = str(train.get("init_from", "")), str(train.get("run_folder", TrainConfig.run_folder))
    sources = _find_own_tokenizers(run_folder) if _has_begun(run_folder) else []
    sources = [source for source in [*sources, init_from] if source and not find_path_problem(source)]
    for source in sources:
        if source == "bytes" or os.path.isfile(expand(source)) or os.path.isfile(expand(source) / TOKENIZER):
            return {**tables, "data": {**data, "tokenizer": source}}
    for source in sources:
        if has_other_tokenizer(expand(source)):
            where = f"train.init_from={source!r}" if source == init_from else source
            raise InvalidConfig(
                f"{where} has a tokenizer, but no {TOKENIZER}; save it with AutoTokenizer.from_pretrained(FOLDER)."
                f"save_pretrained(FOLDER), or name another one as data.tokenizer"
            )
    return tables


def _find_own_tokenizers(run_folder: str) -> list[str]:
    """Where a run's tokenizer may be: the place that its own config names, and what it has kept."""
    kept = str(Path(run_folder, KEPT))
    try:
        said = toml.read(expand(run_folder) / "config.toml", "config")["data"]["tokenizer"]
    except (InvalidConfig, KeyError, TypeError):  # a run that was converted has none
        return [kept]
    return [str(said), kept]


def _find_sizes(table: Any) -> Any:
    """The table on top of the model that it names; another name needs all sizes."""
    if not isinstance(table, dict):
        return table
    with toml.problems_of("model.name"):
        table = complete(table)
    name = table.get("name")
    missing = [f.name for f in fields(ModelShape) if f.default is MISSING and f.name not in table]
    if missing:
        near = difflib.get_close_matches(str(name), PRESETS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"use one of {', '.join(PRESETS)}."
        what = (
            "model.name is missing"
            if name is None
            else f"model.name={name!r} is no preset and no Hugging Face folder, config.json or TOML file"
        )
        raise InvalidConfig(f"{what}; {advice} A model of your own needs {', '.join(missing)} too")
    return table
