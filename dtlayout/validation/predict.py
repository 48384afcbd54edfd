"""Validation: predictions for measured runs, and constants fitted to them.

`predict` answers for each row of a table, also where no schedule of ours plays the layout, see `normalise_run`;
`fit_group` fits, and `ablate` asks what each constant is worth. A *group* is the runs that constants are fitted to:
those of one engine on one GPU type, or on all of them if the engine has constants that hold on any.
"""

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache

from dtlayout.base.errors import DtlayoutError
from dtlayout.costmodel.engine import ANY_GPU, OWN_ENGINE, Engine, find_engine_on, without_fit
from dtlayout.costmodel.estimate import Estimate, Estimator, TimeEstimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.records.run import Run
from dtlayout.schedules.schedules import find_schedule, schedule_with
from dtlayout.spec.cluster import Cluster
from dtlayout.validation.scores import Prediction, Scores, score

Progress = Callable[[str], None]
"""Function that is called with a line on what is being fitted, since a fit takes minutes."""


def predict(runs: Iterable[Run]) -> list[Prediction]:
    """A prediction for every run; runs of one scenario share an `Estimator`.

    MFU is over the tokens and the GPUs that the table gives, as the measured one is, whatever the layout leaves idle
    (over more GPUs only if the layout needs more).
    """
    find = cache(Estimator)
    return [Prediction(run, _estimate(run, find)) for run in runs]


def normalise_run(run: Run) -> Run:
    """The nearest run that the cost model can play, most often the run itself.

    * Degrees that do not multiply to the GPUs: dp is what tp, pp and cp leave of them, if that is whole.
    * More stages than blocks: fewer virtual stages. More ranks than blocks: as many blocks as ranks, since stages with
      one block or none have the pace and the highest peak of one block; MFU credits the real ones alone.
    * Virtual stages on one pipeline rank are none.
    * A batch that makes no whole microbatches: the last one counts as whole, and there is at least one.
    * Interleaved stages go in rounds of pp microbatches: the last round counts as whole, see `_estimate`.
    """
    layout, scenario = run.layout, run.scenario
    dp, left = divmod(scenario.cluster.num_gpus, layout.pp * layout.cp * layout.tp)
    if dp and not left and dp != layout.dp:
        is_sharded = layout.dp_shard > 1 or layout.dp_replicate == 1
        layout = replace(layout, dp_shard=dp if is_sharded else 1, dp_replicate=1 if is_sharded else dp)
    num_layers = scenario.model.num_layers
    virtual_stages = 1 if layout.pp == 1 else max(1, min(layout.virtual_stages, num_layers // layout.pp))
    if virtual_stages != layout.virtual_stages:
        goes_on = find_schedule(layout.schedule).takes(layout.pp, virtual_stages)
        schedule = layout.schedule if goes_on else schedule_with(virtual_stages)
        layout = replace(layout, virtual_stages=virtual_stages, schedule=schedule)
    if layout.pp > num_layers and scenario.engine.features.stage_split != "threshold":  # which may leave stages empty
        scenario = replace(scenario, model=replace(scenario.model, num_layers=layout.pp))
    rounds_of = layout.pp if find_schedule(layout.schedule).whole_rounds else 1
    unit = layout.dp * layout.micro_batch
    m = math.ceil(scenario.batch.global_batch / (unit * rounds_of)) * rounds_of
    if m * unit != scenario.batch.global_batch:
        scenario = replace(scenario, batch=replace(scenario.batch, global_batch=m * unit))
    if layout is run.layout and scenario is run.scenario:
        return run
    return replace(run, layout=layout, scenario=scenario)


def describe_changes(run: Run) -> list[str]:
    """Changes that `normalise_run` makes to a run, a sentence each; a change has one sentence for all rows."""
    playable = normalise_run(run)
    layout, scenario = playable.layout, playable.scenario
    changes = {
        "its degrees do not make its GPUs: dp is what the others leave of them": layout.dp != run.layout.dp,
        "fewer virtual stages, for there are no blocks for all or no pipeline":
            layout.virtual_stages != run.layout.virtual_stages,
        "more pipeline ranks than blocks: as many blocks as ranks": scenario.model != run.scenario.model,
    }  # fmt: skip
    if scenario.batch != run.scenario.batch:
        is_odd = run.scenario.batch.global_batch % (layout.dp * layout.micro_batch) > 0
        changes["global_batch is no multiple of dp * micro_batch: the last microbatch counts as whole"] = is_odd
        changes["interleaved stages without whole rounds of pp microbatches"] = not is_odd
    changes |= dict.fromkeys(run.assumed, True)
    return [sentence for sentence, applies in changes.items() if applies]


def _estimate(run: Run, find: Callable[[Scenario], Estimator]) -> Estimate:
    """The playable run's estimate, with the time of the microbatches that there are and the table's tokens and GPUs."""
    playable = normalise_run(run)
    layout, scenario = playable.layout, playable.scenario
    estimate = find(scenario).estimate(layout, run.kernels)
    if scenario is run.scenario and layout.world_size == scenario.cluster.num_gpus:
        return estimate
    unit = layout.dp * layout.micro_batch
    missing = scenario.batch.global_batch // unit - math.ceil(run.scenario.batch.global_batch / unit)
    time = estimate.time
    if missing:  # of the last round: each takes off what it would add in a further round
        one_round_more = scenario.batch.global_batch + unit * layout.pp
        longer = replace(scenario, batch=replace(scenario.batch, global_batch=one_round_more))
        added_s = (find(longer).time(layout, run.kernels, estimate.memory).total - time.total) / layout.pp
        share = max(0.0, 1 - missing * added_s / time.total)
        time = TimeEstimate(**{name: share * seconds for name, seconds in time.as_dict().items()})
    num_gpus = max(layout.world_size, scenario.cluster.num_gpus)
    return replace(estimate, time=time, mfu=find(run.scenario).mfu(time.total, num_gpus))


# Fits.


@dataclass(frozen=True)
class Fitted:
    """An engine that was fitted to the runs of a group."""

    starts: Sequence[Engine]
    """The engine on each GPU type of the group, as it was."""
    engines: Sequence[Engine]
    """The engine on each GPU type, with the fitted constants."""
    before: Scores
    """Scores of the runs with the constants that the engine had."""
    predictions: Sequence[Prediction]
    """Predictions for the runs with the fitted constants."""


@dataclass(frozen=True)
class Ablation:
    """The predictions without one constant."""

    gpu: str
    """GPU type of the constant; ANY_GPU if it holds on any type."""
    constant: str
    neutral: float
    """Value of the constant in the ablation: that of an engine that was never measured, on the first GPU type."""
    scores: Scores
    """Scores of all runs of the group, with the other constants fitted again."""


def group_runs(runs: Iterable[Run]) -> dict[tuple[str, str], list[Run]]:
    """Engine and GPU type → runs, in their first order."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.scenario.engine.name, run.scenario.cluster.gpu.name), []).append(run)
    return groups


def group_for_fit(runs: Iterable[Run]) -> dict[tuple[str, str], list[Run]]:
    """Engine and GPU type → runs that its constants are fitted to; ANY_GPU where some of them hold on any type."""
    by_gpu = group_runs(runs)
    sharing = {name for (name, _), group in by_gpu.items() if group[0].scenario.engine.shared}
    groups: dict[tuple[str, str], list[Run]] = {}
    for (name, gpu), group in by_gpu.items():
        groups.setdefault((name, ANY_GPU if name in sharing else gpu), []).extend(group)
    return groups


def describe_group(name: str, gpu: str) -> str:
    """A group in words."""
    return f"{name} on {'all GPU types' if gpu == ANY_GPU else gpu}"


def on_cluster(runs: Iterable[Run], cluster: Cluster) -> list[Run]:
    """All runs; those of our own engine on a cluster's GPU type with what is known of the cluster now."""
    engine = find_engine_on(OWN_ENGINE, cluster.gpu)

    def move(scenario: Scenario) -> Scenario:
        if (scenario.engine.name, scenario.cluster.gpu.name) != (engine.name, cluster.gpu.name):
            return scenario
        here = replace(cluster, num_gpus=scenario.cluster.num_gpus, records=())
        return replace(scenario, cluster=here, engine=engine)

    return [replace(run, scenario=move(run.scenario)) for run in runs]


def with_engines(runs: Iterable[Run], *engines: Engine) -> list[Run]:
    """Runs with other constants: each with those of the engine that is for its GPU type."""
    by_gpu = {engine.gpu: engine for engine in engines}

    def change(scenario: Scenario) -> Scenario:
        return replace(scenario, engine=scenario.engine.with_constants_of(by_gpu[scenario.cluster.gpu.name]))

    return [replace(run, scenario=change(run.scenario)) for run in runs]


def find_engines(runs: Iterable[Run]) -> list[Engine]:
    """The engine of one program's runs on each GPU type: that of the first run there."""
    by_gpu: dict[str, Engine] = {}
    for run in runs:
        by_gpu.setdefault(run.scenario.cluster.gpu.name, run.scenario.engine)
    return list(by_gpu.values())


def fit_engines(runs: Sequence[Run], starts: Sequence[Engine]) -> list[Engine]:
    """One program on several GPU types with its fitted constants fitted to these runs alone.

    Runs that had to be made playable in batch or stages are left out: what they measured is not quite what is played.
    """
    from dtlayout.validation.fit import refit  # only now: it imports scipy

    played = [normalise_run(run) for run in runs]
    usable = [new for new, run in zip(played, runs, strict=True) if new.scenario == run.scenario and run.mfu != 0]
    return refit(usable, starts)


def fit_group(runs: Sequence[Run], progress: Progress = lambda line: None) -> Fitted:
    """Fit the engine of a group's runs to them; DtlayoutError if none ran."""
    starts = find_engines(runs)
    where = describe_group(starts[0].name, ", ".join(engine.gpu for engine in starts))
    if not any(run.ran for run in runs):
        raise DtlayoutError(f"no run of engine {where} to fit to")
    progress(f"fitting {where}")
    engines = fit_engines(runs, starts)
    return Fitted(starts, engines, score(predict(runs)), predict(with_engines(runs, *engines)))


def ablate(runs: Sequence[Run], engines: Sequence[Engine], progress: Progress = lambda line: None) -> list[Ablation]:
    """For each constant of a group's engine, fitted to these runs: the scores with its neutral value instead.

    Its constants are those that are fitted, and those that its file sets otherwise than general ones. The fitted ones
    of its kind, memory or time, are fitted again; those of the other kind don't see it, and stay.
    """
    from dtlayout.validation.fit import MEMORY_CONSTANTS, Parameter, list_parameters

    first, fitted = engines[0], list_parameters(engines)
    own, general = vars(first.constants), vars(first.features.kind_of_constants())
    names = {name for _, name in fitted}
    by_hand = [Parameter(ANY_GPU, name) for name in general if name not in names and own[name] != general[name]]
    ablations = []
    for gpu, name in (*fitted, *by_hand):
        progress(f"fitting {describe_group(first.name, gpu)} without {name}")
        kind = MEMORY_CONSTANTS if name in MEMORY_CONSTANTS else general.keys() - MEMORY_CONSTANTS
        starts = [_fit_only(engine, kind) for engine in engines]
        for i, engine in enumerate(engines):
            if gpu == engine.gpu or (gpu == ANY_GPU and name not in engine.fitted):
                neutral = getattr(without_fit(engine).constants, name) if name in names else general[name]
                starts[i] = _fit_only(starts[i].with_constants(**{name: neutral}), kind - {name})
        changed = next(engine for engine in starts if gpu in (ANY_GPU, engine.gpu))
        again = fit_engines(runs, starts) if list_parameters(starts) else starts
        scores = score(predict(with_engines(runs, *again)))
        ablations.append(Ablation(gpu, name, getattr(changed.constants, name), scores))
    return ablations


def _fit_only(engine: Engine, names: Set[str]) -> Engine:
    """The engine with fewer constants that are fitted."""
    fitted, shared = (tuple(name for name in each if name in names) for each in (engine.fitted, engine.shared))
    return replace(engine, fitted=fitted, shared=shared)
