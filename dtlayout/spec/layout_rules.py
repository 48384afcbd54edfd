"""The rules that a layout must keep to train a model with a batch.

Each rule returns a refusal for everything that breaks it, with the nearest values that may work. Keys of a repair are
keys of the layout, or `global_batch`.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from math import gcd, inf
from typing import Any

from dtlayout.base.formatting import plural
from dtlayout.base.refusals import Refusal
from dtlayout.schedules.schedules import DEFAULT_SCHEDULE, SCHEDULES, PipelineSchedule, find_schedule
from dtlayout.spec.batch import Batch
from dtlayout.spec.context_parallel import CONTEXT_METHODS
from dtlayout.spec.layout_keys import LayoutKeys
from dtlayout.spec.model_shape import ModelShape, divisors

_NO_VIRTUAL_STAGES: dict[str, Any] = {"schedule": DEFAULT_SCHEDULE, "virtual_stages": 1}


def find_broken(layout: LayoutKeys, model: ModelShape, batch: Batch) -> list[Refusal]:
    """A refusal for each rule that the layout breaks with this model and this batch; empty if it is legal."""
    broken = [*_check_tensor_parallel(layout, model, batch), *_check_pipeline(layout, model)]
    broken += _check_batch(layout, batch)
    return broken + _check_context_parallel(layout, model, batch) + _check_experts(layout, model)


def _check_tensor_parallel(layout: LayoutKeys, model: ModelShape, batch: Batch) -> list[Refusal]:
    tp = layout.tp
    sizes = {name: getattr(model, name) for name in ("num_heads", "num_kv_heads", "ffn_size", "vocab_size")}
    if model.experts is not None and model.experts.shared_ffn_size:
        sizes["experts.shared_ffn_size"] = model.experts.shared_ffn_size
    if layout.shards_sequence:
        sizes["seq_len"] = batch.seq_len
    broken = []
    if layout.tp_overlap and tp > 1 and not layout.sequence_parallel:
        what = "tp_overlap without sequence_parallel: only what lies split along the sequence goes in pieces"
        broken.append(Refusal("overlap", what, [{"sequence_parallel": True}, {"tp_overlap": False}]))
    if layout.overlaps_tp and layout.splits_backward:
        what = f"tp_overlap beside schedule={layout.schedule}: gradients of weights hide what tp sends, and cannot wait"
        broken.append(Refusal("overlap", what, [{"tp_overlap": False}, *_list_unsplit()]))
    if not any(size % tp for size in sizes.values()):
        return broken
    repairs: list[dict[str, Any]] = [{"tp": degree} for degree in _nearest(tp, divisors(gcd(*sizes.values())))]
    replicated: list[dict[str, Any]] = [{"sequence_parallel": False}]
    return broken + [
        Refusal(f"tp/{name}", f"tp={tp} does not divide {name}={size}", replicated * (name == "seq_len") + repairs)
        for name, size in sizes.items()
        if size % tp
    ]


def _check_context_parallel(layout: LayoutKeys, model: ModelShape, batch: Batch) -> list[Refusal]:
    """Each rank of cp has as many tokens of a sequence as any other, in two halves, or as many heads to attend for; and
    tp can share these tokens."""
    cp, method, seq_len = layout.cp, layout.context_method, batch.seq_len
    if cp == 1:
        return []
    in_parts = [{"cp_method": name} for name, other in CONTEXT_METHODS.items() if not other.splits_heads]
    broken = list[Refusal]()

    def list_repairs() -> list[dict[str, Any]]:
        return [{"cp": degree} for degree in _nearest(cp, divisors(seq_len))]

    if seq_len % (granule := method.granule(cp)):
        asked = f"cp={cp}" if granule == cp else f"{granule // cp} * cp = {granule}"
        by_heads = [{"cp_method": name} for name, other in CONTEXT_METHODS.items() if other.splits_heads]
        what = f"{asked} does not divide seq_len={seq_len}, as cp_method={method.name} needs it"
        broken.append(Refusal("cp", what, [*list_repairs(), *by_heads]))
    elif layout.shards_sequence and seq_len // cp % layout.tp:
        what = f"cp={cp} * tp={layout.tp} does not divide seq_len={seq_len}"
        broken.append(Refusal("cp", what, [*list_repairs(), {"sequence_parallel": False}]))
    if method.splits_heads:
        for name in ("num_heads", "num_kv_heads"):
            heads = getattr(model, name)
            if heads % (cp * layout.tp):
                fewer = [{"cp": degree} for degree in _nearest(cp, divisors(heads // layout.tp or 1))]
                ranks = f"cp={cp}" + f" * tp={layout.tp}" * (layout.tp > 1)
                what = f"{ranks} does not divide {name}={heads}, which cp_method={method.name} splits"
                broken.append(Refusal(f"cp/{name}", what, [*in_parts, *fewer]))
    return broken


def _check_experts(layout: LayoutKeys, model: ModelShape) -> list[Refusal]:
    ep = layout.ep
    if ep > 1 and model.experts is None:
        return [Refusal("ep", f"ep={ep}, but model {model.name} has no experts", [{"ep": 1}])]
    sizes = {"dp * cp * tp": layout.dp * layout.cp * layout.tp}
    if model.experts:
        sizes["experts.number"] = model.experts.number
    if not (broken := {name: size for name, size in sizes.items() if size % ep}):
        return []
    repairs = [{"ep": degree} for degree in _nearest(ep, divisors(gcd(*sizes.values())))]
    return [Refusal(f"ep/{name}", f"ep={ep} does not divide {name}={size}", repairs) for name, size in broken.items()]


def _check_pipeline(layout: LayoutKeys, model: ModelShape) -> list[Refusal]:
    pp, v, layers, stage_layers = layout.pp, layout.virtual_stages, model.num_layers, layout.stage_layers
    broken = []
    if layout.num_stages > layers and len(stage_layers) != layout.num_stages:
        repairs: list[dict[str, Any]] = [{"virtual_stages": fewer} for fewer in range(min(v, layers // pp), 1, -1)]
        repairs += [_NO_VIRTUAL_STAGES] * (v > 1) + [{"pp": fewer} for fewer in range(layers // v, 0, -1)]
        what = f"pp={pp} * virtual_stages={v} makes {layout.num_stages} stages, more than num_layers={layers}"
        broken.append(Refusal("stages", what, repairs))
    broken += _check_virtual_stages(layout, find_schedule(layout.schedule))
    if layout.offload != "none" and layout.splits_backward:
        what = f"offload={layout.offload} beside schedule={layout.schedule}: copies to the host follow whole backwards"
        broken.append(Refusal("offload", what, [{"offload": "none"}, *_list_unsplit()]))
    by_cost: dict[str, Any] = {"stage_layers": ()}
    if stage_layers and len(stage_layers) != layout.num_stages:
        what = (
            f"stage_layers={list(stage_layers)} names {plural(len(stage_layers), 'stage')}, but pp={pp} * "
            f"virtual_stages={v} makes {layout.num_stages}"
        )
        broken.append(Refusal("split", what, [by_cost]))
    elif stage_layers and sum(stage_layers) != layers:
        num_blocks = plural(sum(stage_layers), "block")
        what = f"stage_layers={list(stage_layers)} adds up to {num_blocks}, but num_layers={layers}"
        last = layers - sum(stage_layers[:-1])
        completed = [{"stage_layers": (*stage_layers[:-1], last)}] if last > 0 else []
        broken.append(Refusal("split", what, [*completed, by_cost]))
    return broken


def _list_unsplit() -> list[dict[str, Any]]:
    """Schedules whose backwards are whole."""
    return [{"schedule": other.name} for other in SCHEDULES.values() if not other.splits_backward]


def _check_virtual_stages(layout: LayoutKeys, schedule: PipelineSchedule) -> list[Refusal]:
    pp, v = layout.pp, layout.virtual_stages
    if schedule.num_ranks not in (None, pp):
        written: dict[str, Any] = {"pp": schedule.num_ranks, "virtual_stages": schedule.least_virtual_stages}
        what = f"schedule={layout.schedule} is written for pp={schedule.num_ranks}, but pp={pp}"
        return [Refusal("virtual", what, [written, _NO_VIRTUAL_STAGES])]
    least, most = schedule.least_virtual_stages, schedule.most_virtual_stages
    if schedule.takes(pp, v):
        return []
    if most == 1:
        others = [{"schedule": name} for name, other in SCHEDULES.items() if other.takes(pp, v)]
        what = f"virtual_stages={v} has no meaning for schedule={layout.schedule}"
        return [Refusal("virtual", what, [{"virtual_stages": 1}, *others])]
    number = f"= {least}" if least == most else f"> {least - 1}" if most == inf else f"from {least} to {most}"
    needs = "pp > 1 and " * (least > 1) + f"virtual_stages {number}"
    what = f"schedule={layout.schedule} needs {needs}, but pp={pp} and virtual_stages={v}"
    return [Refusal("virtual", what, [{"virtual_stages": int(min(max(v, least), most))}, _NO_VIRTUAL_STAGES])]


def _check_batch(layout: LayoutKeys, batch: Batch) -> list[Refusal]:
    """The global batch makes whole microbatches, as many as the schedule needs."""
    pp, size, unit = layout.pp, batch.global_batch, layout.dp * layout.micro_batch
    m, schedule = layout.num_microbatches(batch), find_schedule(layout.schedule)
    least = schedule.least_rounds * pp
    has_odd_microbatches = schedule.whole_rounds and m % pp > 0
    if schedule.num_microbatches not in (None, m) and layout.is_pipelined:
        written = schedule.num_microbatches
        what = (
            f"schedule={layout.schedule} is written for {plural(written, 'microbatch')}, but global_batch={size} with "
            f"dp={layout.dp} and micro_batch={layout.micro_batch} gives {m}"
        )
        return [Refusal("microbatches", what, [{"global_batch": unit * written}])]
    if not (size % unit or m < least or has_odd_microbatches):
        return []
    # Every schedule is content with some number of microbatches at most pp away from m, or from what it needs at least.
    near = range(max(1, m - pp) * unit, (max(m, pp, least) + pp + 1) * unit, unit)
    batches = ({"global_batch": n} for n in _nearest(size, near))
    smaller = ({"micro_batch": n} for n in _nearest(layout.micro_batch, divisors(size)))
    if size % unit:
        product = f"dp * micro_batch = {layout.dp} * {layout.micro_batch} = {unit}"
        what = f"global_batch={size} is not a multiple of {product}"
        return [Refusal("multiple", what, chain(smaller, batches))]
    times = f"{schedule.least_rounds} * " if schedule.least_rounds > 1 else ""
    needs = f"at least {times}pp={pp}" if m < least else f"a multiple of pp={pp}"
    what = (
        f"schedule={layout.schedule} needs {needs} microbatches, but global_batch={size} with dp={layout.dp} and "
        f"micro_batch={layout.micro_batch} gives {m}"
    )
    fewer = ({"pp": n} for n in range(min(m, pp - 1), 0, -1) if m < least)
    return [Refusal("microbatches", what, chain(smaller, batches, fewer, [_NO_VIRTUAL_STAGES] * has_odd_microbatches))]


def _nearest(value: int, candidates: Iterable[int]) -> Iterator[int]:
    """The candidates, those closest to `value` first; sorted when the first is asked for."""
    yield from sorted(candidates, key=lambda c: (abs(c - value), c))
