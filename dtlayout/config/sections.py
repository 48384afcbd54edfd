"""Sections of a config that are a value of their own nowhere else: data, training, checkpoints, metrics, cluster."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from dtlayout.base.refusals import Refusal, describe
from dtlayout.base.validators import Ranged, one_of, path_key, ranged
from dtlayout.spec.batch import RampStage
from dtlayout.spec.cluster import Gpu, find_gpu, known_gpus, load_cluster
from dtlayout.spec.trackers import TRACKERS, name_problems


@dataclass(frozen=True, kw_only=True)
class Source(Ranged, section="data.mixture"):
    """One of several sources of samples."""

    source: str = path_key()
    """Source of tokens, named as `data.source` is."""
    weight: float | Literal["size"] = ranged('must be above 0 and finite, or "size"', 1.0)
    """Share of the samples; the weights of all sources need not add up to 1. "size", for all
    sources or none, stands for the number of samples that a source holds: each has the same number of epochs then.
    Packed samples are in proportion to the tokens of each source."""
    split: str = ranged("must not be empty or hold a NUL", "train")
    """Split of a dataset of the HF hub, or of a local one that has splits; other local files have one, train."""
    text_field: str = "text"
    """Field that holds a document's text."""
    messages_field: str = ""
    """Field that holds a conversation; empty for text."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Ranged, section="data"):
    """Documents to train on, and how they become tokens and samples."""

    source: str = path_key("python-stdlib")
    """Source of tokens: a .txt, .jsonl, .json, .parquet or .arrow file, a folder or glob of them, a clone of a dataset
    of the HF hub or its name there, or python-stdlib."""
    split: str = ranged("must not be empty or hold a NUL", "train")
    """Split of a dataset of the HF hub, or of a local one that has splits; other local files have one, train."""
    text_field: str = "text"
    """Field that holds a document's text."""
    messages_field: str = ""
    """Field that holds a conversation, a list of messages with role and content; empty for text."""
    mixture: tuple[Source, ...] = ()
    """Several sources, each with a weight, in the place of `source`."""
    chat_template: str = path_key("")
    """A Jinja file that writes conversations as text; empty for the tokenizer's own template."""
    loss_on: Literal["answers", "last", "all"] = "answers"
    """Tokens of a conversation that are targets: those of the answers, of the last answer, or all. In text all tokens
    are targets."""
    samples: Literal["packed", "padded", "best-fit"] = "packed"
    """How documents become samples. packed: one row of all documents is cut into samples. padded: each document is a
    sample, which is cut or filled up. best-fit: whole documents fill each sample, and only one that is longer than a
    sample is cut."""
    tokenizer: str = path_key("bytes")
    """Tokenizer: bytes, or the path of a tokenizer.json or of its folder. Where none is named, it is the tokenizer of
    `train.init_from`."""
    end_of_document: str = ""
    """Token that follows each document, where the tokenizer has none of the usual ones."""
    document_mask: bool = False
    """Whether documents that share a sample do not attend to each other; the loss and its targets stay the same."""
    max_tokens: int = ranged("must not be negative", 0)
    """Most tokens to prepare of each source; 0 for all."""
    max_bad_rows: int = ranged("must not be negative", 0)
    """Most rows of each source that are left out since they cannot be read or lack a field. One more is refused, by its
    file and number."""
    folder: str = path_key("data/tokens")
    """Folder of prepared tokens, which later runs use again."""

    def find_broken(self) -> list[Refusal]:
        """A refusal for a mixture beside a source, or in which some sources alone are weighed by their size."""
        if self.mixture and self.source != DataConfig.source:
            what = f"data.source={self.source!r} and [[data.mixture]] both say what is read"
            return [Refusal("source", what, "use one of them; --data.mixture=[] takes a file's mixture away")]
        by_size = [each.source for each in self.mixture if each.weight == "size"]
        if len(by_size) in (0, len(self.mixture)):
            return []
        what = f'data.mixture has weight = "size" for {by_size[0]!r} and a number for another source'
        return [Refusal("mixture", what, "give all sources size or all a number, which is 1 where none is named")]

    @property
    def has_conversations(self) -> bool:
        """True if a source has conversations, which a chat template writes as text."""
        return any(each.messages_field for each in self.sources)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Weight of each of `sources`; None where each is as large as its source."""
        numbers = tuple(each.weight for each in self.mixture if each.weight != "size")
        return None if len(numbers) < len(self.mixture) else numbers or (1.0,)

    @property
    def sources(self) -> "tuple[DataConfig, ...]":
        """This section for each source by itself, since each source is prepared by itself."""
        names = ("source", "split", "text_field", "messages_field")
        own = ({name: getattr(each, name) for name in names} for each in self.mixture or (self,))
        return tuple(replace(self, mixture=(), **each) for each in own)


@dataclass(frozen=True, kw_only=True)
class ValidationSet(Ranged, section="validation.sets"):
    """One of several sets of documents on which the loss is measured, each by itself."""

    name: str = ranged("must be of letters, digits, -, _ and .")
    """Name of the set's loss in lines, files and trackers."""
    source: str = path_key()
    """Source of tokens, named as `data.source` is."""
    split: str = ""
    """Split, as `validation.split`."""
    text_field: str = ""
    """Field that holds a document's text, as `validation.text_field`."""
    messages_field: str = ""
    """Field that holds a conversation, as `validation.messages_field`."""
    batches: int = ranged("must not be negative", 0)
    """Global batches that are measured; 0 for as many as `validation.batches` says."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig(Ranged, section="validation"):
    """Documents on which the loss is also measured, without training on them; they are tokenized as the data is."""

    source: str = path_key("")
    """Source of tokens, named as `data.source` is; empty for none."""
    sets: tuple[ValidationSet, ...] = ()
    """Several sets, each with a name and a loss of its own, beside `source` or in its place. The loss of the run is
    that of `source`, or else of the first set."""
    split: str = ""
    """Split of a dataset of the HF hub or of a local one that has splits, by default validation; other local files have
    one, train."""
    text_field: str = ""
    """Field that holds a document's text. If it is named, documents are read as text even where the data are
    conversations. Empty for the field of the data."""
    messages_field: str = ""
    """Field that holds a conversation; empty for the field of the data, if `text_field` is empty too."""
    every: int = ranged("must not be negative", 100)
    """Steps between measurements; with 0 the loss is measured at the end alone."""
    at_start: bool = False
    """Whether the loss is also measured before the first step of a new run, as step 0."""
    batches: int = ranged("must not be negative", 8)
    """Global batches that are measured, the same ones each time, drawn from the whole source; fewer where it has no
    more. With 0 all of it is measured."""

    def find_broken(self) -> list[Refusal]:
        """A refusal for names of sets that are not different."""
        names = [each.name for each in self.sets]
        twice = sorted({name for name in names if names.count(name) > 1})
        return [Refusal("sets", f"validation.sets has {name!r} twice", "give each a name of its own") for name in twice]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Ranged, section="train"):
    """Length, first weights, folder, device and seed of a run, and when it ends early."""

    steps: int = ranged("must not be negative", 0)
    """Optimizer steps of the whole run, including those before it was resumed; 0 where `epochs` says how many."""
    epochs: float = ranged("must be at least 0 and finite", 0.0)
    """Length of the whole run in passes over the samples, in the place of `steps`: steps follow, rounded up, from the
    number of samples, that of all sources together."""
    batch_ramp: tuple[RampStage, ...] = ()
    """Smaller global batches at the begin of the run, one after the other: each until a run has seen so many samples.
    Behind the last one `batch.global_batch` holds, which is what is predicted. Learning rates go by steps of any size.
    """
    init_from: str = path_key("")
    """Weights from which a new run starts: a Hugging Face folder, owner/name of a repository in the hub's cache, a run
    folder, whose newest checkpoint is taken, or one checkpoint; empty for random weights. The model's sizes come from
    there too, where the config has no [model]. Of a PEFT folder, or a run with an adapter, the adapter is trained
    further, beside its frozen model."""
    new_rows: Literal["mean", "normal"] = "mean"
    """First values of rows of embedding and head that the model of `init_from` lacks, because the tokenizer has more
    tokens or tp does not divide the rows. mean: that of the rows that are there. normal: drawn as first weights are."""
    run_folder: str = path_key("runs/latest")
    """Folder for metrics, summary, config and checkpoints, by default named like the config file. A run in the same
    folder is resumed."""
    seed: int = 0
    """Seed of the initial weights and of the order of the samples."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device; auto takes CUDA where there is any."""
    timeout_s: float = ranged("must be above 0 and at most 2592000, thirty days", 600.0)
    """Seconds after which a collective that does not finish ends the run."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Consequence of a step whose loss or gradient norm is not finite, which updates nothing. stop: the run ends. skip:
    the step is left out."""
    loss_scale: float = ranged("must be at least 0 and finite", 0.0)
    """First factor of the loss with precision.compute=float16, whose small gradients would be 0 without one. 0 stands
    for 65536 times the sequences of a batch, down to a power of two, since the gradient of each is divided by their
    number. A step whose gradients overflow updates nothing and halves the factor, down to 1."""
    loss_scale_steps: int = ranged("must be at least 1", 2000)
    """Steps in a row without an overflow after which the loss's factor doubles."""
    collect_every: int = ranged("must not be negative", 50)
    """Steps after which all ranks collect Python's garbage at once; in between none does. 0 leaves it to Python, which
    stops each rank at another moment, while the others wait."""
    deterministic: bool = False
    """Whether CUDA runs only kernels that give the same bits each time, which are slower. A CPU always does so."""
    force: bool = False
    """Whether to start even a layout that is predicted to need far more memory than the GPU has."""

    def find_broken(self) -> list[Refusal]:
        """A refusal unless exactly one key says the length, and where a ramp does not go on."""
        broken = [
            Refusal("ramp", f"train.batch_ramp has until={after.until} after {stage.until}", "let each be more")
            for stage, after in pairwise(self.batch_ramp)
            if after.until <= stage.until
        ]
        if self.steps and self.epochs:
            what = f"train.steps={self.steps} and train.epochs={self.epochs:g} both say the length of the run"
            return [*broken, Refusal("steps", what, "use one of them, and 0 for the other")]
        missing = Refusal("steps", "train.steps is missing", "say how many, or how many train.epochs")
        return broken + [missing] * (not self.steps and not self.epochs)


@dataclass(frozen=True, kw_only=True)
class SpikesConfig(Ranged, section="spikes"):
    """Limits of a step's loss and gradient norm, and what happens after a step above one, a spike.

    limit = median + factor * max(quantile - median, median / 100), of the losses and of the norms by themselves.
    """

    action: Literal["off", "warn", "skip", "save"] = "warn"
    """Answer to a spike. off: none. warn: a line says so. skip: the step also updates nothing. save: the state that met
    the spike is also kept in RUN/spikes."""
    window: int = ranged("must be at least 1", 128)
    """Number of recent steps that make a limit."""
    min_steps: int = ranged("must be at least 1", 64)
    """Steps before there is a limit."""
    quantile: float = ranged("must lie between 0.5 and 1", 0.9)
    """Quantile of the recent steps that a limit counts from. A rise that lasts for the rest of a window is a new level,
    and no spike any more."""
    factor: float = ranged("must be above 0 and finite", 10.0)
    """Distance of a limit from the median, as a multiple of the quantile's distance."""

    def find_broken(self) -> list[Refusal]:
        """A refusal where the recent steps would never be enough for a limit."""
        what = f"spikes.min_steps={self.min_steps} is more than spikes.window={self.window}"
        broken = Refusal("min_steps", f"{what}, so that there would never be a limit", "use a longer window")
        return [broken] * (self.min_steps > self.window)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Ranged, section="checkpoint"):
    """When the run's state is saved, and whether its weights are exported."""

    every: int = ranged("must not be negative", 0)
    """Steps between checkpoints; with 0 the state is saved at the end alone."""
    timeout_s: float = ranged("must be above 0 and at most 2592000, thirty days", 3600.0)
    """Seconds after which ranks that wait for others to save or load end the run."""
    keep: int = ranged("must be at least 1", 2)
    """Number of newest checkpoints that stay on disk."""
    fallback: Literal["previous", "refuse"] = "previous"
    """How a run starts whose newest checkpoint is damaged. previous: it goes on from the one before. refuse: it is
    refused."""
    background: bool = True
    """Whether checkpoints within a run are written while training goes on, from a copy of the state on the host."""
    save: bool = True
    """Whether anything is saved; without it a run cannot be resumed."""
    export: bool = False
    """Whether the weights of a run that is done are also written to RUN/hf, a Hugging Face folder in the compute
    format; of a run with [adapter] that is the adapter alone, a PEFT folder."""

    @property
    def is_in_background(self) -> bool:
        """True if checkpoints are written while training goes on, from a copy of the state."""
        return self.save and self.background and self.every > 0


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Ranged, section="metrics"):
    """Measurements beside the loss: how often they are made, and where they go."""

    log_every: int = ranged("must be at least 1", 10)
    """Steps between progress lines on a terminal that shows no progress bar."""
    memory_every: int = ranged("must be at least 1", 100)
    """Steps between memory measurements, which slow a step. The second and the last step are measured too."""
    memory: bool = False
    """Whether the curve of memory over the first steps is written to memory.json in the run folder."""
    timeline: bool = False
    """Whether the times of each pipeline rank's actions are written to timeline.json in the run folder. It holds the
    third step and the last eight of those that `memory_every` measures after it. dtlayout timeline RUN draws them."""
    to: tuple[str, ...] = one_of(TRACKERS, ())
    """Trackers to which every number of a step also goes; their files lie in the run folder."""

    def find_broken(self) -> list[Refusal]:
        """A refusal for each name of a tracker that cannot be."""
        return [Refusal("to", problem) for problem in name_problems(self.to)]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Ranged, section="cluster"):
    """Facts about the hardware that a run cannot see."""

    gpu: str = one_of(lambda: ("auto", "cpu", *known_gpus()), "auto")
    """GPU type, whose peak MFU is measured against. auto asks the device; cpu has no peak."""
    gpus_per_node: int = ranged("must be at least 1", 8)
    """Ranks that share a node's fast links. If the links of a GPU type join several nodes, the type says how many GPUs
    they join."""
    file: str = path_key("")
    """A cluster's TOML file, such as dtlayout calibrate writes; it goes before the other two keys."""

    @property
    def known_gpu(self) -> Gpu | None:
        """The GPU type of the file or of the name, the CPU included; None if the device is to be asked."""
        if self.file:
            cluster = load_cluster(self.file)
            return replace(cluster.gpu, gpus_per_node=cluster.gpus_per_node)
        return None if self.gpu == "auto" else find_gpu(self.gpu)

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a node's fast links: the number in the file if there is one, else `gpus_per_node`."""
        return load_cluster(self.file).gpus_per_node if self.file else self.gpus_per_node

    @property
    def ranks_linked(self) -> int:
        """Ranks that fast links join: those of a node, or of a rack that is one domain, full or not."""
        gpu = self.known_gpu
        return max(self.ranks_per_node, gpu.gpus_linked if gpu else 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.file:
            load_cluster(self.file)  # raises a line on anything that is wrong with it

    def range_problems(self) -> list[str]:
        """A line for a GPU type that is unknown, and one for each number that is outside its range."""
        known = ("auto", "cpu", *known_gpus())
        unknown = Refusal("gpu", f"cluster.gpu={self.gpu!r} is unknown", f"use one of {', '.join(known)}")
        return describe([unknown] * (self.gpu not in known)) + super().range_problems()
