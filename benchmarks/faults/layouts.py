"""Random pairs of layouts: what one saves the other loads to the bit, on other numbers of ranks too."""

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.faults.events import Amounts, Event, Kind
from dtlayout.base.checkpoint_names import list_checkpoints
from dtlayout.schedules.schedules import SCHEDULES
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import SGD, AdamW
from tests.support.checkpoint_ranks import BATCH, State, load_each, merge, train_and_save
from tests.support.ranks import RankFailure, Ranks

MODEL = ModelShape(name="pairs", hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=4, ffn_size=48, vocab_size=260)
WORLDS = (1, 2, 4)
ZERO: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)


def find_layouts(num_ranks: int) -> list[Layout]:
    """All that are legal and differ in where parameters or their state lie."""
    degrees = [each for each in product((1, 2, 4), repeat=4) if np.prod(each) == num_ranks]
    schedules = [(schedule.name, 1 if schedule.takes(2, 1) else 2) for schedule in SCHEDULES.values()]
    layouts = [
        Layout(pp=pp, tp=tp, dp_replicate=replicate, dp_shard=shard, zero=zero, schedule=name, virtual_stages=stages)
        for (pp, tp, replicate, shard), zero, (name, stages) in product(degrees, ZERO, schedules)
        if (pp > 1 or name == "1f1b") and (shard > 1 or zero == 1)
    ]
    return [layout for layout in layouts if layout.is_legal(MODEL, BATCH)]


def provoke(folder: Path, amounts: Amounts, done: Sequence[Event]) -> Iterator[Event]:
    """Pairs, drawn by their number."""
    pools = {num_ranks: Ranks(num_ranks) for num_ranks in WORLDS}
    layouts = {num_ranks: find_layouts(num_ranks) for num_ranks in WORLDS}
    known = {event.what.partition(":")[0] for event in done}
    try:
        for number in range(1, amounts.pairs + 1):
            if (what := f"pair {number}") in known:
                continue
            chance = random.Random(number)
            saved, loaded = (chance.choice(layouts[chance.choice((1, 2, 4, 4))]) for _ in range(2))
            model = replace(MODEL, tied_embeddings=chance.random() < 0.5)
            settings = chance.choice((AdamW(), AdamW(), SGD()))
            shutil.rmtree(folder / "pair", ignore_errors=True)
            try:
                steps = chance.randint(1, 3)
                by_rank = pools[saved.world_size].run(train_and_save, saved, model, folder / "pair", steps, 1, settings)
                (path,) = list_checkpoints(folder / "pair")
                results = pools[loaded.world_size].run(load_each, [loaded], model, path, settings)
                problem = find_difference(
                    merge([state for state, _ in by_rank]),
                    merge([each[0][1] for each in results]),
                    steps,
                    {each[0][0] for each in results},
                )
            except (RankFailure, AssertionError) as error:
                problem = str(error).strip().splitlines()[-1]
            tied = ", tied" if model.tied_embeddings else ""
            yield Event(kind="layouts", what=f"{what}: {saved} → {loaded}, {settings.name}{tied}", problem=problem)
    finally:
        for pool in pools.values():
            pool.close()


def find_difference(saved: State, loaded: State, steps: int, found_steps: set[int]) -> str:
    """Description of what is not as it was saved; empty if all is."""
    if found_steps != {steps}:
        return f"{steps} steps were saved, {found_steps} loaded"
    if saved.keys() != loaded.keys():
        return f"other names: {sorted(saved.keys() ^ loaded.keys())[:3]}"
    others = [name for name, array in saved.items() if not np.array_equal(array, loaded[name]) or not np.any(array)]
    return f"{len(others)} tensors differ: {others[:3]}" if others else ""


KIND = Kind(
    name="layouts",
    title="random pairs of layouts on 1, 2 and 4 ranks",
    promise="parameters, moments and steps that one saves the other loads to the bit",
    provoke=provoke,
    expected=lambda amounts: amounts.pairs,
)
