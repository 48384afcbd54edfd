"""Questions: what the commands answer, asked from Python.

All take a job in the same words. `model` is a preset's name, the folder or config.json of a model of Hugging Face, a
TOML file, a `ModelShape` or a mapping of sizes. Sizes, and fields of the layout, may be keywords too. `gpu` is a GPU
type as people write it, `cluster` a cluster file in its place.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from dtlayout.api.answers import DryRunRanks, ExplainedLayout, PredictedLayout, RecommendedLayouts, to_prediction
from dtlayout.api.job import DEGREES, Choices, Model, TrainingJob, read_names
from dtlayout.base.errors import InvalidConfig
from dtlayout.commands import dryrun as dryrun_command
from dtlayout.commands import recommend as recommend_command
from dtlayout.commands.arguments import choose_gpu, choose_world
from dtlayout.commands.case import make_scenario
from dtlayout.config.checking import check_layout
from dtlayout.planner import explain as planner
from dtlayout.planner.choices import find_idle, read_avoided, read_fixed
from dtlayout.planner.space import Space
from dtlayout.spec.device import device_of


def predict(
    model: Model = None,
    layout: Choices = None,
    *,
    seq_len: int,
    global_batch: int,
    gpu: str | None = None,
    gpus: int | None = None,
    cluster: str | Path | None = None,
    gpus_per_node: int | None = None,
    engine: str = "dtlayout",
    engine_set: Mapping[str, Any] | None = None,
    kernels: Mapping[str, str] | None = None,
    precision: Mapping[str, str] | None = None,
    optimizer: str | Mapping[str, Any] = "adamw",
    **keywords: Any,
) -> PredictedLayout:
    """Predict the step time and the memory of one layout, without a GPU and without torch.

    `layout` is a layout as it is printed, such as "pp2·dp4·tp2+sp mb1 1f1b zero1", some choices such as "tp2 mb4", a
    mapping or a `Layout`. Degrees that nobody says are 1, and data-parallel ranks take the GPUs that are left. Without
    `gpus` it is predicted on the fewest that the layout needs. `engine` is the program that trains, `engine_set` what a
    run of it is told. InvalidConfig says what is unknown, InvalidLayout why the layout cannot train the model.

    >>> own = dict(hidden_size=1024, num_layers=8, num_heads=16, num_kv_heads=4, ffn_size=4096, vocab_size=32000)
    >>> found = predict(own, "tp2 mb2", gpu="h100-80g-sxm", gpus=8, seq_len=4096, global_batch=64)
    >>> str(found.layout), found.fits
    ('dp4·tp2+sp mb2 zero1', True)
    """
    job = TrainingJob(
        model=model, gpu=gpu, gpus=gpus, seq_len=seq_len, global_batch=global_batch, cluster=cluster,
        gpus_per_node=gpus_per_node, engine=engine, engine_set=engine_set or {}, kernels=kernels or {},
        precision=precision or {}, optimizer=optimizer, keywords=keywords,
    )  # fmt: skip
    return to_prediction(job.read_case(layout))


def explain(
    model: Model = None,
    layout: Choices = None,
    *,
    seq_len: int,
    global_batch: int,
    gpu: str | None = None,
    gpus: int | None = None,
    cluster: str | Path | None = None,
    gpus_per_node: int | None = None,
    engine: str = "dtlayout",
    engine_set: Mapping[str, Any] | None = None,
    kernels: Mapping[str, str] | None = None,
    precision: Mapping[str, str] | None = None,
    optimizer: str | Mapping[str, Any] = "adamw",
    **keywords: Any,
) -> ExplainedLayout:
    """Predict one layout, with the limit of it and the single changes that would make it fit or faster.

    The arguments are those of `predict`, the errors too.
    """
    job = TrainingJob(
        model=model, gpu=gpu, gpus=gpus, seq_len=seq_len, global_batch=global_batch, cluster=cluster,
        gpus_per_node=gpus_per_node, engine=engine, engine_set=engine_set or {}, kernels=kernels or {},
        precision=precision or {}, optimizer=optimizer, keywords=keywords,
    )  # fmt: skip
    case = job.read_case(layout)
    explanation = planner.explain(*case)
    return ExplainedLayout(case.scenario, explanation.estimate, explanation=explanation)


def recommend(
    model: Model = None,
    *,
    seq_len: int,
    global_batch: int,
    gpu: str | None = None,
    gpus: int | None = None,
    cluster: str | Path | None = None,
    gpus_per_node: int | None = None,
    fix: str | Sequence[str] | Mapping[str, Any] = (),
    avoid: str | Sequence[str] | Mapping[str, Any] = (),
    top: int = 5,
    max_memory: float | None = None,
    why_not: str | None = None,
    baseline: Literal["thumb", "playbook"] | None = None,
    tokens: float | None = None,
    price: float | None = None,
    emit: str | Path | None = None,
    engine: str = "dtlayout",
    engine_set: Mapping[str, Any] | None = None,
    precision: Mapping[str, str] | None = None,
    optimizer: str | Mapping[str, Any] = "adamw",
    **sizes: Any,
) -> RecommendedLayouts:
    """Search for the fastest layouts that fit on `gpus` GPUs, `top` of them.

    `fix` and `avoid` are choices that every layout, or none, may have: "tp2", ["tp=2", "recompute=none"] or {"tp": 2}.
    `max_memory` is the share of the capacity that may be filled, `why_not` a layout or choices to judge, `baseline` a
    procedure to compare with, `tokens` those of a whole training with the `price` of a GPU-hour. `emit` writes the best
    layout for the engine's program; a config for our own starts from the weights and the tokenizer of a folder. The
    other arguments are those of `predict`; fields of the layout are no keywords here. InvalidLayout if nothing fits,
    with what would.
    """
    job = TrainingJob(
        model=model, gpu=gpu, gpus=gpus, seq_len=seq_len, global_batch=global_batch, cluster=cluster,
        gpus_per_node=gpus_per_node, engine=engine, engine_set=engine_set or {}, precision=precision or {},
        optimizer=optimizer, keywords=sizes,
    )  # fmt: skip
    if unknown := [name for name in sizes if name in DEGREES]:
        raise InvalidConfig([f"{name}: the search finds it; fix={{{name!r}: …}} holds it" for name in unknown])
    options = _default_options(recommend_command)
    options.top, options.max_memory, options.why_not, options.baseline = top, max_memory, why_not, baseline
    options.tokens, options.price, options.engine = tokens, price, engine
    options.emit = None if emit is None else Path(emit)
    options.model = str(model) if isinstance(model, str | Path) and not sizes else ""  # of other sizes than a folder's
    options.seq_len, options.global_batch = seq_len, global_batch
    recommend_command.check(options)
    machines = job.options
    if machines.world is None:
        raise InvalidConfig("the number of GPUs is missing; give gpus=N")
    fixed = read_fixed(read_names(fix))
    scenario = make_scenario(job.read_config(), job.precision, machines)
    scenario = recommend_command.fill_rows(scenario, recommend_command.find_folder(options), fixed)
    space = Space(scenario, fixed, read_avoided(read_names(avoid), fixed))
    if idle := find_idle(space):
        raise InvalidConfig(idle)
    return RecommendedLayouts(scenario, recommend_command.search_space(space, options))


def dry_run(
    model: Model = None,
    layout: Choices = None,
    *,
    seq_len: int,
    global_batch: int,
    ranks: Literal["all"] | Sequence[int] | None = None,
    steps: int = 0,
    whole: bool = False,
    gpu: str | None = None,
    gpus: int | None = None,
    cluster: str | Path | None = None,
    gpus_per_node: int | None = None,
    kernels: Mapping[str, str] | None = None,
    precision: Mapping[str, str] | None = None,
    optimizer: str | Mapping[str, Any] = "adamw",
    **keywords: Any,
) -> DryRunRanks:
    """Build and step our own trainer as some ranks of a cluster that is not there, and count what they hold and send.

    `ranks` are all or some; by default the first, the last and the predicted fullest. `steps` takes a run's first
    steps in the place of a later one, `whole` runs the microbatches that repeat others too. The other arguments are
    those of `predict`. Each rank is a process of its own, so it takes seconds, and torch. The errors are those of
    `predict`.
    """
    job = TrainingJob(
        model=model, gpu=gpu, gpus=gpus, seq_len=seq_len, global_batch=global_batch, cluster=cluster,
        gpus_per_node=gpus_per_node, kernels=kernels or {}, precision=precision or {}, optimizer=optimizer,
        keywords=keywords,
    )  # fmt: skip
    if steps < 0:
        raise InvalidConfig(f"steps={steps} must not be negative")
    machines, config = job.options, job.read_config(layout)
    device_gpu = choose_gpu(config, machines.gpu)
    found = check_layout(config, choose_world(config, machines.world), device_of(device_gpu))
    options = _default_options(dryrun_command, "CONFIG")
    options.world, options.steps, options.whole = found.world_size, steps, whole
    options.ranks = ",".join(map(str, ranks)) if ranks is not None and ranks != "all" else ranks
    with _main_left_out():
        return DryRunRanks(dryrun_command.rehearse(config, found, device_gpu, options))


def _default_options(command: ModuleType, *needed: str) -> argparse.Namespace:
    """The options of a command where nobody gives any."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(needed)


@contextmanager
def _main_left_out() -> Iterator[None]:
    """A block in which processes that are started do not run the caller's script again, guarded or not."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
