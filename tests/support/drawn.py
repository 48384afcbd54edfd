"""Cases drawn at random: legal layouts of four ranks over every axis, with a batch that they can train."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod

from hypothesis import strategies as st
from parity import EXACT, Case

from dtlayout.schedules.schedules import SCHEDULES
from dtlayout.spec.context_parallel import CONTEXT_METHODS
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape

NUM_RANKS = 4
RECOMPUTE = ["none", "full", "every-2", "every-3", "2-of-3", "selective", "keep-attention", "keep-matmuls"]
DEGREES = [each for each in product((1, 2, 4), repeat=5) if prod(each) == NUM_RANKS]
"""pp, dp_replicate, dp_shard, cp and tp."""


@st.composite
def legal_cases(
    draw: st.DrawFn,
    models: Sequence[ModelShape],
    *,
    overlaps_tp: bool = True,
    bases: Sequence[str] = ("compute",),
    fake_quants: Sequence[str] = ("none",),
) -> Case:
    """A case of one of the models; with experts ep too, with `overlaps_tp` also tp beside matmuls, in pieces.

    A base other than compute stands for a frozen model that is stored so; `fake_quants` are formats to which weights
    are rounded.
    """
    model, base, fake_quant = (draw(st.sampled_from(each)) for each in (models, bases, fake_quants))
    most_tp = 4 if model.experts is None and base == "compute" and fake_quant != "int4" else 2
    pp, copies, dp, cp, tp = draw(st.sampled_from([each for each in DEGREES if each[-1] <= most_tp]))
    schedule = draw(st.sampled_from([each for each in SCHEDULES.values() if each.takes(pp, each.least_virtual_stages)]))
    least = schedule.least_virtual_stages
    virtual_stages = draw(st.sampled_from([2, 3])) if schedule.most_virtual_stages > 2 else least
    splits = pp > 1 and schedule.splits_backward
    degrees_of_ep = [ep for ep in (1, 2, 4) if dp * cp * tp % ep == 0] if model.experts else [1]
    layout = Layout(
        pp=pp,
        dp_replicate=copies,
        dp_shard=dp,
        cp=cp,
        cp_method=draw(st.sampled_from(list(CONTEXT_METHODS))),
        tp=tp,
        sequence_parallel=(sharded := model.experts is not None or draw(st.booleans())),
        tp_overlap=overlaps_tp and sharded and not splits and draw(st.booleans()),
        ep=draw(st.sampled_from(degrees_of_ep)),
        micro_batch=draw(st.sampled_from([1, 2])),
        schedule=schedule.name,
        virtual_stages=virtual_stages,
        zero=draw(st.sampled_from([1, 2, 3])),
        recompute=draw(st.sampled_from(RECOMPUTE)),
        offload="none" if splits else draw(st.sampled_from(["none", "activations", "optimizer", "both"])),
    )
    rounds = max(schedule.least_rounds, draw(st.sampled_from([1, 2])))
    case = Case(
        layout,
        global_batch=max(2, layout.dp * layout.micro_batch * pp * rounds),
        model=replace(model, num_layers=max(model.num_layers, layout.num_stages)),
        precision=replace(EXACT, base=base, fake_quant=fake_quant),
        kernels=Kernels(attention=draw(st.sampled_from(["sdpa-flash", "sdpa-math", "blockwise"]))),
        documents=draw(st.booleans()),
    )
    layout.check(case.model, case.batch)
    return case
