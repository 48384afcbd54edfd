"""A sweep as SWEEP.toml describes it, and the trials that it makes.

    config = "../debug.toml"           # the config that all trials share, relative to this file
    world = 4                          # ranks of each trial
    [axes.layout]                      # every combination of these is a trial
    tp = [1, 2, 4]
    recompute = ["none", "full"]

`from = "recommend:20"` takes the 20 best layouts of a search instead, with their kernels; axes may vary other sections,
and kernels, of each. Trials with the same config become one.
"""

import hashlib
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dtlayout.base import toml
from dtlayout.base.errors import DtlayoutError, InvalidConfig
from dtlayout.base.interpreter import SAFE_PATH, torchrun
from dtlayout.config.checking import check_layout
from dtlayout.config.config import Config
from dtlayout.config.loading import load_config
from dtlayout.costmodel.estimate import Estimate
from dtlayout.measure.devices import ask_device_names
from dtlayout.planner.explain import find_overrides
from dtlayout.planner.prediction import own_scenario, predict, to_predicted
from dtlayout.planner.search import Search
from dtlayout.planner.space import Space
from dtlayout.records.run import Run
from dtlayout.spec.cluster import Gpu, find_gpu, find_gpu_by_device, gpu_named
from dtlayout.spec.device import device_of, expect_device
from dtlayout.spec.layout import OpenLayout
from dtlayout.sweep.halving import Halving
from dtlayout.sweep.results import AnyTrial

_OWN_MODULE = re.compile(r"(^|\s)-m\s*dtlayout\.")
"""Finds `-m dtlayout.…` in a command, with which Python would import from the working directory first."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep, with the keys of its file."""

    path: Path
    """Path of the sweep's file."""
    config: Path
    """Path of the config that all trials share."""
    world: int
    """Number of ranks of a trial."""
    axes: dict[str, list[Any]] = field(default_factory=dict)
    """section.key → the values that trials take."""
    source: str = field(default="", metadata={"key": "from"})
    """"recommend:K" for the K best layouts of a search; the key is `from` in the file."""
    overrides: tuple[str, ...] = ()
    """Overrides for all trials, as on the command line of `dtlayout train`."""
    steps: int = 12
    """Optimizer steps of a trial."""
    warmup_steps: int = 4
    """First steps of a trial that are not counted."""
    timeout_s: float = 600.0
    """Seconds after which a trial is ended, since it hangs."""
    grace_s: float = 15.0
    """Seconds that a trial's processes get to end by themselves."""
    launch: str = ""
    """Command of a trial with the fields {python}, {world} and {config}; empty for torchrun on this host."""
    halving: Halving | None = None
    """Successive halving instead of running every trial to its end; its steps replace `steps`."""

    def __post_init__(self) -> None:
        problems = [f"axes.{key} needs a list with values" for key, values in self.axes.items() if not values]
        problems += [f"axes.{key}: {why}" for key, why in _SET.items() if key in self.axes]
        if not self.axes and not self.source:
            problems.append('nothing is swept: give [axes.layout] with lists, or from = "recommend:20"')
        if self.source and not re.fullmatch(r"recommend:[1-9]\d*", self.source):
            problems.append(f"from={self.source!r} must be recommend:K, such as recommend:20")
        if self.source and any(key.startswith("layout.") for key in self.axes):
            problems.append("[axes.layout] and from both say which layouts; leave one of them out")
        for name, least in (("world", 1), ("steps", 1), ("warmup_steps", 0), ("timeout_s", 0), ("grace_s", 0)):
            if not getattr(self, name) >= least:
                problems.append(f"{name}={getattr(self, name)} must be at least {least}")
        if self.launch and not _is_command(self.launch):
            what = "a command, with {python}, {world} and {config} in it"
            problems.append(f"launch={self.launch!r} must be {what}")
        if self.warmup_steps >= self.steps:
            problems.append("warmup_steps leaves no step to count; use more steps")
        if self.halving and (first := self.halving.steps[0]) <= self.warmup_steps:
            problems.append(f"halving.steps[0]={first} leaves no step after {self.warmup_steps} to warm up")
        if problems:
            raise InvalidConfig(problems)


@dataclass(frozen=True, kw_only=True)
class Trial(AnyTrial):
    """A config to run, with its prediction."""

    config: Config | None = None
    """The config with its layout resolved; None if the trial is not possible."""
    problems: tuple[str, ...] = ()
    """Reasons why the trial is not possible."""
    estimate: Estimate | None = None
    """Prediction for the trial; None where the GPU type is not known."""


def read_sweep(path: Path) -> Sweep:
    """The sweep in a file; InvalidConfig with every problem."""
    tables = toml.read(path, "sweep")
    if isinstance(axes := tables.get("axes"), dict):
        tables["axes"] = dict(_flatten(axes))
    with toml.problems_of(str(path)):
        sweep = toml.parse(tables, Sweep, path=path)
    return replace(sweep, config=(path.parent / sweep.config).resolve())


_LONG_RUN_STEPS = 100_000
"""Steps of the long run whose learning rates a trial uses: its own steps are too few for a warm-up."""
_SET = {
    "train.steps": "a sweep says how many, with steps",
    "train.epochs": "a sweep says how many steps, with steps",
    "train.batch_ramp": "a sweep measures steps of the whole batch",
    "train.run_folder": "each trial has its own",
    "checkpoint.save": "a trial saves none",
}
"""Keys that a sweep sets in each trial's config, so that no axis may set them → the reason."""


def _is_command(launch: str) -> bool:
    try:
        return bool(shlex.split(launch.format(python="python", world=1, config="config")))
    except (AttributeError, KeyError, IndexError, ValueError):
        return False


def _flatten(tables: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def make_trials(sweep: Sweep, folder: Path) -> list[Trial]:
    """All trials, each config once: first those that can run, by predicted time of a step; then the impossible ones."""
    found: dict[str, Trial] = {}
    for overrides in _combine(sweep):
        trial = make_trial(sweep, folder, overrides)
        found.setdefault(trial.key, trial)
    if all(trial.config is None for trial in found.values()):  # the sweep itself is wrong
        raise InvalidConfig(list(dict.fromkeys(problem for trial in found.values() for problem in trial.problems)))
    return sorted(found.values(), key=lambda t: (t.config is None, t.estimate.step_time_s if t.estimate else 0.0))


def _combine(sweep: Sweep) -> Iterator[tuple[str, ...]]:
    """Overrides of each trial: those of a layout that a search found, and one value of each axis."""
    starts = _search(sweep) if sweep.source else [()]
    for start, values in itertools.product(starts, itertools.product(*sweep.axes.values())):
        texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
        yield (*start, *(f"--{key}={text}" for key, text in zip(sweep.axes, texts, strict=True)))


def _search(sweep: Sweep) -> list[tuple[str, ...]]:
    """Overrides that turn the sweep's config into each of the best layouts of a search."""
    base = load_config(sweep.config, sweep.overrides)
    gpu = find_trial_gpu(base.train.device, base.cluster.known_gpu)
    if gpu is None:
        raise InvalidConfig(f"{sweep.path}: from={sweep.source!r} needs a GPU type that is known; use cluster.gpu")
    ranked = Search(Space(own_scenario(base, sweep.world, gpu), {}, {})).run(int(sweep.source.partition(":")[2])).ranked
    if not ranked:
        raise InvalidConfig(
            f"{sweep.path}: no layout of {base.model.name} is legal and fits on {sweep.world} x {gpu.name}; "
            f"dtlayout recommend says why"
        )
    return [find_overrides((base.layout, base.kernels), (found.layout, found.kernels)) for found in ranked]


@cache
def find_trial_gpu(device: Literal["cpu", "cuda", "auto"], known: Gpu | None) -> Gpu | None:
    """GPU type for which a run on this host is predicted, by `train.device` and [cluster]; None if unknown."""
    expected = expect_device(device, known)
    if expected.type == "cpu" or known is not None:
        return expected.gpu
    names = ask_device_names()
    if not names:
        return find_gpu("cpu") if device == "auto" else None  # this host is not part of the cluster with GPUs
    return find_gpu_by_device(names[0])


def make_trial(sweep: Sweep, folder: Path, overrides: tuple[str, ...]) -> Trial:
    """The trial with these overrides."""
    everything = [
        *sweep.overrides,
        *overrides,
        f"--train.steps={sweep.steps}",
        "--train.batch_ramp=[]",
        "--checkpoint.save=false",
    ]
    try:
        config = load_config(sweep.config, everything)
        length = config.optimizer.decay_steps or max(_LONG_RUN_STEPS, config.optimizer.warmup_steps)
        config = replace(config, optimizer=replace(config.optimizer, decay_steps=length))
        layout = check_layout(config, sweep.world)
    except DtlayoutError as error:
        problems = tuple(str(error).splitlines())
        key = _hash(f"{problems} {everything} {sweep.world}")
        return Trial(key=key, setting=key, overrides=overrides, problems=problems)
    config = replace(config, layout=OpenLayout(**asdict(layout)))
    key, setting = (
        _hash(
            f"{replace(config, train=replace(config.train, run_folder='trial', steps=steps)).to_toml()} {sweep.world}"
        )
        for steps in (config.train.steps, 1)
    )
    run_folder = str(trial_folder(folder, key) / "run")
    config = replace(config, train=replace(config.train, run_folder=run_folder))
    gpu = find_trial_gpu(config.train.device, config.cluster.known_gpu)
    scenario, estimate = own_scenario(config, sweep.world, gpu or gpu_named("unknown")), predict(config, layout, gpu)
    run = Run(
        table=sweep.path.stem, row=key, scenario=scenario, layout=layout,
        kernels=config.choose_kernels(device_of(gpu) if gpu else config.device, layout).kernels, outcome="running",
        predicted=to_predicted(estimate, scenario),
    )  # fmt: skip
    return Trial(key=key, setting=setting, overrides=overrides, config=config, run=run, estimate=estimate)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def trial_folder(folder: Path, key: str) -> Path:
    """Folder of one trial: its config, its log and its run."""
    return folder / "trials" / key


def to_command(sweep: Sweep, config: Path) -> Sequence[str]:
    """Command that starts a trial."""
    if not sweep.launch:
        return torchrun(["--standalone", f"--nproc-per-node={sweep.world}"], "dtlayout.launch", str(config))
    values = {"python": sys.executable, "world": sweep.world, "config": str(config)}
    return [part.format(**values) for part in shlex.split(sweep.launch)]


def to_environment(sweep: Sweep) -> dict[str, str]:
    """Variables that are added to the environment of a trial.

    For our own module, imports from the working directory are switched off. A script that the sweep names may need
    imports from its own folder, so nothing is added for it.
    """
    return SAFE_PATH if not sweep.launch or _OWN_MODULE.search(sweep.launch) else {}
