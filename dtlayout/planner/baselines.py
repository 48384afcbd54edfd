"""Baselines: the layouts that two well-known procedures would choose, to see what the search is worth.

`choose_by_thumb`: data parallel with a distributed optimizer; if that does not fit, tensor and sequence parallel inside
a node; then pipeline stages (the order of arXiv:2104.04473, sec. 5, as most recipes shorten it). Nothing is computed
again where it need not be.

`choose_by_playbook`: the procedure of the Ultra-Scale Playbook, "Finding the best training configuration": fit a step
in memory by the size of the model and the number of GPUs, reach the global batch, then raise the throughput.

Both try micro-batches from the largest on and take the first layout that is legal and fits; None if there is none.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from dtlayout.base.formatting import plural
from dtlayout.costmodel.estimate import Estimate
from dtlayout.models.counting import count_parameters
from dtlayout.planner.neighbours import MICRO_BATCHES, list_playbook_changes, spread
from dtlayout.planner.search import Search
from dtlayout.planner.space import Space
from dtlayout.spec.context_parallel import DEFAULT_CONTEXT_METHOD
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import divisors

_GAIN = 0.002
"""Relative gain of a change below which the Playbook's last step stops."""


class Baseline(NamedTuple):
    """A layout, and the steps by which a procedure came to it."""

    estimate: Estimate
    steps: tuple[str, ...]
    """Steps of the procedure, one line each."""


def choose_by_thumb(search: Search) -> Baseline | None:
    """The layout by rule of thumb: data parallel; else tp with sequence parallelism on fast links; else pp as well.

    If none fits, the same are tried with every block recomputed.
    """
    cluster, layers = search.space.scenario.cluster, search.space.scenario.model.num_layers
    linked = divisors(min(cluster.gpus_linked, cluster.num_gpus))
    stages = [pp for pp in divisors(cluster.num_gpus) if 1 < pp <= layers]
    attempts: dict[str, list[dict[str, Any]]] = {
        "data parallel with a distributed optimizer fits": [{}],
        "data parallel alone does not fit; tp={tp} on fast links does": [{"tp": tp} for tp in linked[1:]],
        "no tp on fast links fits; tp={tp} with pp={pp} does": [
            {"tp": tp, "pp": pp} for pp in stages for tp in reversed(linked)
        ],
    }
    for recompute, (text, choices) in product(("none", "full"), attempts.items()):
        if found := _find_first(search, ({**choice, "recompute": recompute} for choice in choices)):
            before = [f"recompute {recompute}"] * (recompute != "none")
            return Baseline(found, (*before, text.format_map(vars(found.layout))))
    return None


def choose_by_playbook(search: Search) -> Baseline | None:
    """The layout by the Playbook: fit in memory, reach the batch, raise the throughput."""
    space = search.space
    best = _find_first(search, _fit_by_size(space))
    if not best:
        return None
    m, layout = best.layout.num_microbatches(space.scenario.batch), best.layout
    batch = f"{plural(layout.dp, 'dp rank')} times {plural(m, 'microbatch')} of {layout.micro_batch}"
    steps = [f"1. a step fits with {layout}", f"2. the global batch is {batch}"]
    for name in ("tp", "dp", "pp", "micro_batch"):
        improved = _improve(search, best, list_playbook_changes(name, space, best.layout))
        if improved is not best:
            gain = best.step_time_s / improved.step_time_s - 1
            steps.append(f"3. {name}: {improved.layout} is {gain:.1%} faster")
            best = improved
    return Baseline(best, tuple(steps))


def _fit_by_size(space: Space) -> Iterator[dict[str, Any]]:
    """Choices that the Playbook's step 1 tries for a model of this size on so many GPUs, in its order."""
    cluster, layers = space.scenario.cluster, space.scenario.model.num_layers
    num_parameters, num_gpus = count_parameters(space.scenario.model), cluster.num_gpus
    tensor = [tp for tp in divisors(min(cluster.gpus_linked, num_gpus)) if tp > 1]
    full = max([tp for tp in tensor if space.allows_tensor(tp, 1, DEFAULT_CONTEXT_METHOD, True)], default=1)
    stages = [pp for pp in divisors(num_gpus) if 1 < pp <= layers]
    sharded = {"zero": 3, "recompute": "full"}
    pipelines = [{"tp": full, "pp": pp} for pp in stages]
    if num_gpus >= 1024:
        yield from ({"tp": full, "zero": 2, **({"pp": pp} if pp > 1 else {})} for pp in [*stages, 1])
    if num_gpus >= 512:
        yield from ({"tp": tp} for tp in [1, *tensor])
        yield from pipelines
    if num_parameters < 10e9:
        yield {}
        yield from ({"tp": tp} for tp in tensor)
        yield {"zero": 3}
        yield sharded
    elif num_gpus > 8:
        yield from pipelines
        yield {"tp": full, "zero": 3}
        yield {"zero": 3}
    # "GPU poor": what is left is to recompute everything and to shard whatever can be.
    yield sharded
    yield {"tp": full, **sharded}
    yield from ({**pipeline, "recompute": "full"} for pipeline in pipelines)


def _try(search: Search, layout: Layout) -> Estimate | None:
    """The layout with data parallelism over all GPUs that are left; None if it is illegal or does not fit."""
    scenario = search.space.scenario
    whole = spread(layout, scenario.cluster.num_gpus)
    if whole is None or not whole.is_legal(scenario.model, scenario.batch):
        return None
    kernels = next(filter(search.space.allows_kernels, search.space.kernels), Kernels())
    found = search.estimator.estimate(whole, kernels)
    return found if found.needed_bytes <= search.allowed_bytes else None


def _find_first(search: Search, choices: Iterable[dict[str, Any]]) -> Estimate | None:
    """The first of several choices that works, with the largest micro-batch that does."""
    tried = (_try(search, Layout(**choice, micro_batch=n)) for choice in choices for n in MICRO_BATCHES)
    return next(filter(None, tried), None)


def _improve(search: Search, best: Estimate, changes: Iterable[dict[str, Any]]) -> Estimate:
    """The best after each change that makes the step shorter."""
    for change in changes:
        found = _try(search, replace(best.layout, **change))
        if found and found.step_time_s < best.step_time_s * (1 - _GAIN):
            best = found
    return best
