"""Runs that are saved under one layout and go on under another, and the layouts that they are tried with."""

import random
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
from parity import (
    TIED,
    Case,
    Share,
    build_step,
    find_numbers,
    local_rows,
    local_starts,
    named_parameters,
    take_weights,
)

from dtlayout.checkpoint.sharded import collect_state, load_checkpoint, load_weights_alone, save_checkpoint
from dtlayout.models.families import find_weight
from dtlayout.plans.init import find_place
from dtlayout.schedules.placement import VShaped
from dtlayout.schedules.schedules import SCHEDULES
from dtlayout.spec.batch import Batch
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape

NUM_STEPS = 3
SAVED_AFTER = 2
MODEL = replace(TIED, num_layers=8)
BATCH = Batch(global_batch=8, seq_len=16)
_BESIDE: list[dict] = [
    {"tp": 2}, {"dp_shard": 2, "zero": 3}, {"dp_replicate": 2}, {"dp_shard": 2, "offload": "optimizer"}, {"cp": 2},
    {"dp_shard": 2, "offload": "disk", "offload_folder": gettempdir()},
]  # fmt: skip
"""What two ranks of each stage do."""


def list_scheduled() -> list[Layout]:
    """Four ranks under each schedule: two stages beside each axis in turn, and those that lie in a V as four too."""
    layouts = []
    for number, schedule in enumerate(SCHEDULES.values()):
        in_order = {"schedule": schedule.name, "virtual_stages": 1 if schedule.takes(2, 1) else 2}
        beside = (_BESIDE[(number + i) % len(_BESIDE)] for i in range(len(_BESIDE)))
        made = (Layout(pp=2, **in_order, **each) for each in beside)
        layouts.append(next(layout for layout in made if not layout.problems(MODEL, BATCH)))
        if schedule.place is VShaped:
            layouts.append(Layout(pp=4, **in_order))
    return layouts


def pair_randomly(layouts: list[Layout], seed: int) -> list[tuple[Layout, Layout]]:
    """Each layout once as what saves and once as what goes on, the same pairs for the same seed."""
    others = list(layouts)
    random.Random(seed).shuffle(others)
    return list(zip(layouts, others, strict=True))


def resume(saved: Case, resumed: Case, folder: Path) -> Share:
    """Two steps under one layout, one under another."""
    model = resumed.model
    assembly, step = build_step(saved)
    for _ in range(SAVED_AFTER):
        step(*local_rows(saved), local_starts(saved))
    tensors = collect_state(assembly.modules, step.optimizer, model, saved.optimizer)
    path = save_checkpoint(folder, SAVED_AFTER, tensors, model, saved.optimizer, keep=1)

    assembly, step = build_step(resumed)
    weights = list(named_parameters(assembly, resumed))
    # What is quantized is frozen.
    of_numbers = [parameter for _, parameter in weights if isinstance(parameter, torch.Tensor)]
    forget(weights, model)
    load_weights_alone(path, assembly.modules, model)  # as the first weights of another run
    alone = [find_place(parameter)[0].clone() for parameter in of_numbers]
    forget(weights, model)
    assert load_checkpoint(path, assembly.modules, step.optimizer, model, resumed.optimizer) == SAVED_AFTER
    assert all(torch.equal(find_place(w)[0], each) for w, each in zip(of_numbers, alone, strict=True))
    result = step(*local_rows(resumed), local_starts(resumed))
    dist.barrier()  # the folder is the next pair's
    return Share(find_numbers(assembly, result), {}, take_weights(assembly, resumed))


def forget(weights: list, model: ModelShape) -> None:
    """Put numbers into weights that are far from those of any checkpoint."""
    with torch.no_grad():
        for name, parameter in weights:
            if (known := find_weight(model, name)).trains or known.is_counter:
                parameter.fill_(0.5)
