"""Validation: predictions for measured runs, with the shipped constants or with some that never saw a run.

`predict` answers for each row of a table, also where no schedule of ours plays the layout, see `make_playable`.
`leave_one_out` scores a model with constants fitted to the others; `ablate` asks what each fitted constant is worth. A
*group* is the runs of one engine on one GPU type: constants belong to a group.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from dtlayout.cluster import Cluster
from dtlayout.costmodel.engine import OWN_ENGINE, Engine, find_engine, find_engine_on
from dtlayout.costmodel.estimate import Estimate, Estimator, TimeEstimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.errors import DtlayoutError
from dtlayout.pipelining.schedules import find_schedule, schedule_with
from dtlayout.planner.runs import Run
from dtlayout.planner.scores import Prediction, Scores, score

Progress = Callable[[str], None]
"""Told what is being fitted, since a fit takes minutes."""


def predict(runs: Iterable[Run]) -> list[Prediction]:
    """A prediction for every run; runs of one scenario share an `Estimator`.

    MFU is over the tokens and the GPUs that the table gives, as the measured one is, whatever the layout leaves idle
    (over more GPUs only if the layout needs more).
    """
    find = cache(Estimator)
    return [Prediction(run, _estimate(run, find)) for run in runs]


def make_playable(run: Run) -> Run:
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
    """What `make_playable` changes of a run; a sentence each, the same for all rows with that change."""
    playable = make_playable(run)
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
    changes |= {f"not stated: {assumed}, what {scenario.engine.name} usually does": True for assumed in run.assumed}
    return [sentence for sentence, applies in changes.items() if applies]


def _estimate(run: Run, find: Callable[[Scenario], Estimator]) -> Estimate:
    """The playable run's estimate, with the time of the microbatches that there are and the table's tokens and GPUs."""
    playable = make_playable(run)
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
    """An engine that was fitted to runs."""

    engine: Engine
    before: Scores
    """Scores of the runs with the constants that the engine had."""
    predictions: Sequence[Prediction]
    """Predictions for the runs, those of a group, with the fitted constants."""


@dataclass(frozen=True)
class Ablation:
    """The predictions without one constant."""

    constant: str
    neutral: float
    """The value that it has where nothing was measured, and has now."""
    scores: Scores
    """Scores of all runs, with the other constants fitted again."""


def group_runs(runs: Iterable[Run]) -> dict[tuple[str, str], list[Run]]:
    """Engine and GPU type → runs, in their first order."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.scenario.engine.name, run.scenario.cluster.gpu.name), []).append(run)
    return groups


def on_cluster(runs: Iterable[Run], cluster: Cluster) -> list[Run]:
    """Move runs of our own engine on a cluster's GPU type to it, with what is known of its machines now; all runs."""
    engine = find_engine_on(OWN_ENGINE, cluster.gpu)

    def move(scenario: Scenario) -> Scenario:
        if (scenario.engine.name, scenario.cluster.gpu.name) != (engine.name, cluster.gpu.name):
            return scenario
        here = replace(cluster, num_gpus=scenario.cluster.num_gpus, records=())
        return replace(scenario, cluster=here, engine=engine)

    return [replace(run, scenario=move(run.scenario)) for run in runs]


def with_engine(runs: Iterable[Run], engine: Engine) -> list[Run]:
    """Runs with other constants."""
    return [replace(run, scenario=replace(run.scenario, engine=engine)) for run in runs]


def fit_engine(runs: Sequence[Run], start: Engine) -> Engine:
    """The engine with its fitted constants fitted to these runs alone.

    Runs that had to be made playable in batch or stages are left out: what they measured is not quite what is played.
    """
    from dtlayout.planner.fit import refit  # only now: it imports scipy

    played = [make_playable(run) for run in runs]
    usable = [new for new, run in zip(played, runs, strict=True) if new.scenario == run.scenario and run.mfu != 0]
    return refit(usable, start)


def fit_group(runs: Sequence[Run], progress: Progress = lambda line: None) -> Fitted:
    """Fit the engine of a group's runs to them."""
    start = runs[0].scenario.engine
    progress(f"fitting {start.name} on {start.gpu}")
    engine = fit_engine(runs, start)
    return Fitted(engine, score(predict(runs)), predict(with_engine(runs, engine)))


def without_fit(engine: Engine) -> Engine:
    """The engine before any run was seen: general values, with the names of the constants that are fitted."""
    return replace(engine, constants=find_engine(engine.name, gpu="none").constants)


def leave_one_out(runs: Sequence[Run], progress: Progress = lambda line: None) -> dict[str, list[Prediction]]:
    """Model → predictions for its runs, with constants that were fitted to the other models' runs of the same group.

    A fit starts at general values, so that nothing of the shipped ones, which saw all runs, is left in it. An engine
    without fitted constants is scored as it is. DtlayoutError if a group with some has one model alone.
    """
    groups = group_runs(runs)
    for (name, gpu), group in groups.items():
        models = sorted({run.scenario.model.name for run in group})
        if len(models) == 1 and group[0].scenario.engine.fitted:
            raise DtlayoutError(
                f"--leave-one-out needs runs of two models, but those of engine {name} on {gpu} are all of {models[0]}"
            )
    left_out: dict[str, list[Prediction]] = {}
    for group in groups.values():
        engine = group[0].scenario.engine
        for model in dict.fromkeys(run.scenario.model.name for run in group):
            own = [run for run in group if run.scenario.model.name == model]
            others = [run for run in group if run.scenario.model.name != model]
            fitted = engine
            if engine.fitted:
                progress(f"fitting {engine.name} on {engine.gpu} without {model}")
                fitted = fit_engine(others, start=without_fit(engine))
            left_out.setdefault(model, []).extend(predict(with_engine(own, fitted)))
    return left_out


def ablate(runs: Sequence[Run], engine: Engine, progress: Progress = lambda line: None) -> list[Ablation]:
    """For each constant of `engine`, which is fitted to these runs: the scores with its neutral value instead.

    The engine's constants are those that are fitted, and those that its file sets otherwise than general ones. The
    fitted ones of its kind, memory or time, are fitted again; those of the other kind don't see it, and stay.
    """
    from dtlayout.planner.fit import MEMORY_CONSTANTS

    own, start_values = vars(engine.constants), vars(without_fit(engine).constants)
    general = vars(engine.features.kind_of_constants())
    neutral = {name: start_values[name] for name in engine.fitted}
    neutral |= {name: general[name] for name in general if name not in neutral and own[name] != general[name]}
    ablations = []
    for name, value in neutral.items():
        progress(f"fitting {engine.name} on {engine.gpu} without {name}")
        is_memory = name in MEMORY_CONSTANTS
        kind = tuple(n for n in engine.fitted if n != name and (n in MEMORY_CONSTANTS) == is_memory)
        start = replace(engine.with_constants(**{name: value}), fitted=kind)
        fitted = fit_engine(runs, start) if kind else start
        ablations.append(Ablation(name, value, score(predict(with_engine(runs, fitted)))))
    return ablations
