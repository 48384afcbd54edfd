"""A job as people say it in Python: a model, a layout, GPUs and a batch, as names, strings, mappings or keywords.

Everything is read by what reads configs and command lines. So names, defaults and refusals are those of the commands.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.toml import describe_unknown_key
from dtlayout.commands.arguments import name_gpu
from dtlayout.commands.case import Case, make_case
from dtlayout.config.config import Config
from dtlayout.config.loading import PLANNED_STEPS, parse_config
from dtlayout.costmodel.engine import OWN_ENGINE
from dtlayout.models.files import find_model
from dtlayout.planner.choices import parse_choices
from dtlayout.planner.space import KERNEL_NAMES
from dtlayout.spec.cluster import list_gpus_called, load_cluster
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape

Model = ModelShape | str | Path | Mapping[str, Any] | None
"""A shape, a preset's name, a Hugging Face folder or file, or sizes by name; None where keywords say all sizes."""
Choices = str | Mapping[str, Any] | Layout | None
"""A layout as it is printed, choices such as "tp4 mb2", fields by name, or a layout; None where keywords say all."""
SIZES = tuple(f.name for f in fields(ModelShape))
"""Keywords that are sizes of the model."""
DEGREES = tuple(f.name for f in fields(Layout))
"""Keywords that are fields of the layout."""

ARGUMENTS = (
    "model", "seq_len", "global_batch", "gpu", "gpus", "cluster", "gpus_per_node", "engine", "engine_set", "kernels",
    "precision", "optimizer",
)  # fmt: skip
"""Arguments of their own, which a keyword that is misspelt may mean."""

_TOLD = set[str | None]()
"""Names of GPU types of which this process has told once what they are taken for; each answer says it too."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """The arguments that all questions take, as they were given."""

    model: Model
    gpu: str | None
    gpus: int | None
    seq_len: int
    global_batch: int
    cluster: str | Path | None = None
    gpus_per_node: int | None = None
    engine: str = OWN_ENGINE
    engine_set: Mapping[str, Any] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)
    precision: Mapping[str, str] = field(default_factory=dict)
    optimizer: str | Mapping[str, Any] = "adamw"
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the model, and fields of the layout."""

    def __post_init__(self) -> None:
        if self.cluster and self.gpu:
            raise InvalidConfig("cluster names the GPU type itself; give cluster or gpu, not both")
        if not self.cluster and not self.gpu:
            raise InvalidConfig('the GPU type is missing; give gpu="h100", or cluster="FILE.toml"')
        for name, value in (("gpus", self.gpus), ("gpus_per_node", self.gpus_per_node)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InvalidConfig(f"{name}={value!r} must be a whole number above 0")

    def read_config(self, layout: Choices = None) -> Config:
        """The job as a config of our trainer; InvalidConfig with everything that is unknown or cannot be."""
        sizes, choices = _split(self.keywords)
        shape, table = _read_model(self.model, sizes)
        said, kernels = _read_choices(layout)
        config = parse_config({
            "model": table, "batch": {"seq_len": self.seq_len, "global_batch": self.global_batch},
            "layout": {**said, **choices}, "kernels": {**kernels, **self.kernels}, "precision": dict(self.precision),
            "optimizer": self._optimizer, "train": {"steps": PLANNED_STEPS},
            "cluster": self._cluster,
        })  # fmt: skip
        return config if shape is None else replace(config, model=shape)

    def read_case(self, layout: Choices = None) -> Case:
        """The scenario, the layout and the kernels; InvalidLayout if the engine does not run that layout."""
        return make_case(self.read_config(layout), self.precision, self.options)

    @property
    def options(self) -> Namespace:
        """The machines and the engine as options of a command."""
        told = [f"{name}={_show(value)}" for name, value in self.engine_set.items()]
        world = load_cluster(self.cluster).num_gpus if self.cluster and self.gpus is None else self.gpus
        gpu = None if self.gpu is None else name_gpu(self.gpu, tells=self.gpu not in _TOLD)
        _TOLD.add(self.gpu)
        return Namespace(gpu=gpu, world=world, engine=self.engine, engine_set=told)

    @property
    def _cluster(self) -> dict[str, Any]:
        """The section [cluster]: nodes are the vendor's, unless somebody says how large they are."""
        if self.cluster:
            return {"file": str(self.cluster)}
        found = list_gpus_called(self.gpu or "")
        per_node = self.gpus_per_node or (found[0].gpus_per_node if found else None)
        return {} if per_node is None else {"gpus_per_node": per_node}

    @property
    def _optimizer(self) -> dict[str, Any]:
        return {"name": self.optimizer} if isinstance(self.optimizer, str) else dict(self.optimizer)


def read_names(choices: str | Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Choices as texts, as `recommend` takes them in --fix and --avoid.

    >>> read_names({"tp": 2, "recompute": "full"}), read_names("tp2")
    (['tp=2', 'recompute=full'], ['tp2'])
    """
    if isinstance(choices, str):
        return [choices] if choices else []
    if isinstance(choices, Mapping):
        return [f"{name}={_show(value)}" for name, value in choices.items()]
    return list(choices)


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(list(value) if isinstance(value, tuple) else value)


def _split(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords as sizes of the model and fields of the layout; InvalidConfig for one that is neither."""
    unknown = [name for name in keywords if name not in (*SIZES, *DEGREES)]
    if unknown:
        raise InvalidConfig([describe_unknown_key(name, (*ARGUMENTS, *DEGREES, *SIZES)) for name in unknown])
    sizes = {name: value for name, value in keywords.items() if name in SIZES}
    return sizes, {name: value for name, value in keywords.items() if name in DEGREES}


def _read_model(model: Model, sizes: Mapping[str, Any]) -> tuple[ModelShape | None, dict[str, Any]]:
    """The shape if it is one already, and what a [model] says of it."""
    if isinstance(model, ModelShape):
        return replace(model, **sizes), {"name": "debug"}
    if isinstance(model, Mapping):
        return None, {"name": "own", **model, **sizes}
    if model is None:
        return None, {"name": "own", **sizes}
    if not isinstance(model, str | Path):
        kind = type(model).__name__
        raise InvalidConfig(f"model is a {kind}; give a name, a folder, sizes, or describe_module(…) of a module")
    return (None, {"name": str(model), **sizes}) if sizes else (find_model(str(model)), {"name": "debug"})


def _read_choices(layout: Choices) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the layout, and kernels, that a layout or its text says."""
    if layout is None:
        return {}, {}
    if isinstance(layout, Layout):
        said = {name: value for name, value in asdict(layout).items() if name != "offload_folder" or value}
    else:
        said = parse_choices(layout) if isinstance(layout, str) else dict(layout)
    said = {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()}
    kernels = {name: said.pop(name) for name in KERNEL_NAMES if name in said}
    return said, kernels
