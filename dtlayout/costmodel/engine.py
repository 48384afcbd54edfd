"""Engine: a training program with its features, and the physical constants that were measured on it.

Features (engine_features.py) say what a program does: what it shards, sends and keeps. Constants (engine_constants.py)
say how fast and how large. They are fitted by `dtlayout validate --fit` to runs of that engine: those that hold on any
GPU type to all of its runs, others to those on one type. Where no runs are known, general values stand and a prediction
is called uncalibrated.
constants/engines/*.toml holds both, and `register_engine` takes a file of the same form. A program that does what
another one does, but for some features, says `like = "that one"`: it has that one's features and constants where it
names none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.engine_constants import BOUNDS, Constants, list_outside
from dtlayout.costmodel.engine_features import CHOICES, Defaults, Features
from dtlayout.spec.cluster import Gpu, gpu_named
from dtlayout.spec.precision import BYTES, Precision

OWN_ENGINE = "dtlayout"
"""The engine whose features are this trainer's."""

ANY_GPU = "any"
"""Name in the place of a GPU type's, for constants that are fitted to runs on all types together."""
_NOTES = {"source": str, "gpus": list[str]}
"""Keys beside an engine's fitted constants, and their types; `gpus` are the GPU types of runs under ANY_GPU."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A training program on one GPU type."""

    name: str
    """Name in tables and commands."""
    gpu: str
    """The GPU type that the constants are for."""
    features: Features
    """Facts about the program, whatever the hardware."""
    constants: Constants
    """Speeds and sizes, fitted or general."""
    fitted: tuple[str, ...]
    """Names of the constants that were fitted to runs on this GPU type alone."""
    shared: tuple[str, ...] = ()
    """Names of other constants, which were fitted to runs on all GPU types together."""
    shared_by: tuple[str, ...] = ()
    """GPU types of the runs on all types together."""
    source: str
    """The runs that its constants were fitted to."""

    @property
    def is_calibrated(self) -> bool:
        """Whether runs of this engine on this GPU type stand behind the constants."""
        return bool(self.fitted) or self.gpu in self.shared_by

    def told_formats(self, named: Mapping[str, str]) -> tuple["Engine", Precision]:
        """This engine with the formats in `named` (key of `Precision` → format), and its precision. A format that is
        not named is the engine's usual one. `reduce` alone changes the engine, in the bytes of its gradients.

        InvalidConfig for a format that is unknown, or that the engine does not have.
        """
        known, asked = self.features.formats, Precision(**named)  # type: ignore[arg-type]
        problems = [
            f"precision.{key}={getattr(asked, key)} is nothing that {self.name} has; "
            f"use precision.{key}={' or '.join(formats)}"
            for key, formats in known.items()
            if key in named and getattr(asked, key) not in formats
        ]
        if problems:
            raise InvalidConfig(problems)
        by_default = {"params": self.features.default_params, "reduce": self.features.default_reduce}
        usual = {key: formats[0] for key, formats in known.items()} or by_default
        engine, precision = self, Precision(**{**usual, **named})  # type: ignore[arg-type]
        if known and precision.reduce != usual["reduce"]:
            size = BYTES[precision.reduce]
            engine = replace(self, features=replace(self.features, gradient_bytes=size, reduce_bytes=size))
        return engine, precision

    def told(self, choices: Mapping[str, str]) -> "Engine":
        """This engine with what a run of it is told (`Features.told`); InvalidConfig as there."""
        try:
            return replace(self, features=self.features.told(choices)) if choices else self
        except InvalidConfig as error:
            raise InvalidConfig([f"engine {self.name}: {problem}" for problem in error.problems]) from None

    def assumptions(self, precision: Precision) -> dict[str, tuple[str, str]]:
        """Assumptions of a prediction beside layout and kernels: name → value and what it is, in words."""
        gradients = precision.reduce if self.features.sharding == "fsdp2" else self.features.gradients
        said = {"precision.reduce": (gradients, "the format in which gradients are added up and reduced")}
        if self.features.default_params != Precision().params:
            said["precision.params"] = (precision.params, "the format of the parameters that the optimizer updates")
        values = {name: getattr(self.features, name) for name in CHOICES}
        for name in ("fused_loss", "recompute_modules"):  # which mean nothing where there is no choice
            if name not in self.features.choices:
                del values[name]
        return said | {name: (CHOICES[name].word(value), CHOICES[name].meaning) for name, value in values.items()}

    def with_constants_of(self, other: "Engine") -> "Engine":
        """This engine, told what it is told, with the constants of another state of it."""
        same = {f.name: getattr(other, f.name) for f in fields(Engine) if f.name != "features"}
        return Engine(features=self.features, **same)

    @property
    def at_bounds(self) -> tuple[str, ...]:
        """The fitted constants that stand at a bound: the runs don't determine them, or the formula is wrong."""
        names = (*self.shared, *self.fitted)
        values = ((name, getattr(self.constants, name), *BOUNDS[name]) for name in names)
        return tuple(name for name, value, low, high in values if min(value - low, high - value) < 1e-3 * (high - low))

    def with_constants(self, **values: float) -> "Engine":
        """This engine with other constants; InvalidConfig if one is outside its bounds."""
        return replace(self, constants=replace(self.constants, **values))


def known_engines() -> list[str]:
    """Names of all engines, in the alphabet's order."""
    return sorted(_read_engines())


def find_usual(name: str) -> Defaults:
    """The defaults of the engine called `name`; for an unknown engine those of `Defaults`."""
    usual: Defaults = _read_engines().get(name, {}).get("usual", Defaults())
    return usual


def register_engine(file: str | Path) -> None:
    """Make known the engine of a file of the same form as constants/engines/*.toml.

    InvalidConfig with every problem of the file, or if the engine's name is taken.
    """
    tables = toml.read(file, "engine")
    engine = _parse_engine(tables, str(file))
    if engine["engine"] in _read_engines():
        raise InvalidConfig(f"{file}: engine {engine['engine']!r} is there already; give yours another name")
    _engine_tables()[engine["engine"]] = tables
    _read_engines()[engine["engine"]] = engine


def find_engine(name: str, gpu: str) -> Engine:
    """The engine called `name` on a GPU type; InvalidConfig names them all if there is none.

    Its constants are those before any fit (`find_unfitted`), then those fitted to its runs on any GPU type, then those
    fitted to its runs on this one.
    """
    unfitted, fits = find_unfitted(name, gpu), _read_engines()[name].get("fitted", {})
    alone, together = fits.get(gpu, {}), fits.get(ANY_GPU, {})
    values, shared_values = _constants_in(alone), _constants_in(together)
    found = replace(
        unfitted.with_constants(**{**shared_values, **values}),
        fitted=tuple(values),
        shared=tuple(name for name in shared_values if name not in values),
        shared_by=tuple(together.get("gpus", ())),
    )
    sources = [table["source"] for table in (alone, together) if "source" in table]
    if sources and found.is_calibrated:
        return replace(found, source="; ".join(sources))
    return replace(found, source="; ".join([found.source, *(f"constants from {source}" for source in sources)]))


def find_unfitted(name: str, gpu: str) -> Engine:
    """The engine called `name` on a GPU type before any of its runs was seen; InvalidConfig if there is none.

    Its constants are general ones, then those of the GPU type, then its own, with those that hold beside a GPU alone.
    """
    if (table := _read_engines().get(name)) is None:
        raise InvalidConfig(f"engine {name!r} is unknown; use one of {', '.join(known_engines())}")
    features = table.get("features", Features())
    return Engine(
        name=name,
        gpu=gpu,
        features=features,
        constants=features.kind_of_constants(**_unfitted_values(table, gpu)),
        fitted=(),
        source="uncalibrated: no run of this engine on this GPU type is known",
    )


def without_fit(engine: Engine) -> Engine:
    """The engine before any run was seen, with the names of the constants that are fitted."""
    return replace(engine, constants=find_unfitted(engine.name, engine.gpu).constants)


def find_engine_on(name: str, gpu: Gpu) -> Engine:
    """The engine called `name` on these GPUs: as `find_engine`, and our own with the constants measured on them.

    InvalidConfig if what was measured is no constant, or outside its bounds.
    """
    engine, measured = find_engine(name, gpu.name), dict(gpu.achieved)
    if name != OWN_ENGINE or not measured:
        return engine
    if problems := _problems(measured, "achieved", engine.features):
        raise InvalidConfig(problems)
    return replace(
        engine.with_constants(**measured),
        fitted=tuple(measured),
        shared=tuple(each for each in engine.shared if each not in measured),
        source="measurements on these machines",
    )


def _unfitted_values(table: Mapping[str, Any], gpu: str) -> dict[str, float]:
    """Constants of an engine's tables on a GPU type before any of its runs was seen, general ones left out."""
    own = table.get("constants", {})
    if gpu_named(gpu).device_type == "cuda":
        own = own | table.get("beside_gpu", {})
    if not (like := table.get("like")):
        return _achieved_on(gpu) | own
    other = _read_engines()[like]
    fits = [_constants_in(other.get("fitted", {}).get(each, {})) for each in (ANY_GPU, gpu)]
    return {**_unfitted_values(other, gpu), **fits[0], **fits[1], **own}


@cache
def _achieved_on(gpu: str) -> dict[str, float]:
    """Constants of a GPU type whatever the engine."""
    return _constants_in(toml.read_constant_file("achieved.toml").get(gpu, {}))


def _constants_in(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in _NOTES}


_FILE = {
    "engine": str, "like": str, "features": Features, "constants": dict[str, Any], "beside_gpu": dict[str, Any],
    "usual": Defaults, "fitted": dict[str, dict[str, Any]],
}  # fmt: skip
"""Keys of an engine's file; `beside_gpu` has constants of a host that computes nothing itself, and below `fitted` a GPU
type or ANY_GPU has constants and _NOTES."""


@cache
def _engine_tables() -> dict[str, dict[str, Any]]:
    """The tables of each engine's file as they stand there, by name; `register_engine` adds to them."""
    return {tables["engine"]: tables for tables in toml.read_constants("engines").values()}


@cache
def _read_engines() -> dict[str, dict[str, Any]]:
    """The tables of each engine, read and checked, by name; `register_engine` adds to them."""
    return {name: _parse_engine(tables, f"{name}.toml") for name, tables in _engine_tables().items()}


def _parse_engine(tables: dict[str, Any], file: str) -> dict[str, Any]:
    """The tables of an engine's file; InvalidConfig with every problem, each under the file's name."""
    problems: list[str] = []
    if like := tables.get("like"):
        known = _engine_tables()
        if like not in known:
            raise InvalidConfig(f"{file}: like={like!r} is unknown; use one of {', '.join(known)}")
        shared = ("features", "usual")
        tables = {**tables, **{name: _merge(known[like].get(name, {}), tables.get(name, {})) for name in shared}}
    found = toml.read_keys(tables, _FILE, ("engine",), "", problems)
    features = found.get("features", Features())
    for table in ("constants", "beside_gpu"):
        problems += _problems(found.get(table, {}), table, features)
    for gpu, values in found.get("fitted", {}).items():
        problems += _problems(_constants_in(values), f"fitted.{gpu}", features)
        notes = {key: value for key, value in values.items() if key in _NOTES}
        toml.read_keys(notes, _NOTES, (), f"fitted.{gpu}", problems)
    if problems:
        raise InvalidConfig([f"{file}: {problem}" for problem in problems])
    return found


def _merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two tables as one: where both have a value the second's, and where both have a table the two merged."""
    both = {key: _merge(first[key], value) for key, value in second.items() if isinstance(first.get(key), dict)}
    return {**first, **second, **both}


def _problems(values: Mapping[str, Any], name: str, features: Features) -> list[str]:
    """A line for each key that is no constant of a program with these features, and for each value out of bounds."""
    problems: list[str] = []
    types = {f.name: float for f in fields(features.kind_of_constants)}
    constants = toml.read_keys(values, types, (), name, problems)
    return problems + [f"{name}.{line}" for key, value in constants.items() for line in list_outside(key, value)]
