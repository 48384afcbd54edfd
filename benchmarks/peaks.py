"""Formulas of peaks against dry runs on layouts that nobody has chosen, as Markdown: these find where they are wrong.

    make bench NAME=peaks ARGS="--seed 3 --layouts 60"

Any legal mix of degrees, schedule, sharding, recomputation and offload of a small Llama at the widths of a real one.
The rank that is predicted to hold most is run, by an excerpt of its step.
"""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from random import Random
from typing import NamedTuple

from benchmarks.dryrun import Subject as Rehearsal
from benchmarks.pages.markdown import made_by, table
from dtlayout.base.formatting import GIB, plural
from dtlayout.config.config import Config
from dtlayout.costmodel.scenario import find_refusals
from dtlayout.dryrun.ranks import Subject, find_peaks
from dtlayout.planner.prediction import own_scenario, predict
from dtlayout.schedules.schedules import SCHEDULES
from dtlayout.spec.cluster import find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import Precision

_GPU, _MODEL = "h100-80g-sxm", "llama3.1-8b"
_CLOSE = 0.005
"""Share of the peak up to which a formula counts as right."""


def draw_layouts(random: Random) -> Iterator[tuple[Config, Layout]]:
    """Runs with legal layouts, without end."""
    gpu = find_gpu(_GPU)
    while True:
        schedule = random.choice(list(SCHEDULES.values()))
        pp = schedule.num_ranks or random.choice([1, 2, 4, 8])
        v = int(min(schedule.most_virtual_stages, max(schedule.least_virtual_stages, random.choice([1, 2, 3, 5]))))
        cp, m = random.choice([1, 1, 2]), random.choice([1, 2, 3, 5])
        layout = Layout(
            pp=pp, tp=random.choice([1, 1, 2, 4]), cp=cp, cp_method=random.choice(["ring", "gather", "all-to-all"]),
            dp_replicate=random.choice([1, 1, 2]), dp_shard=random.choice([1, 2, 8]), zero=random.choice([1, 2, 3]),
            schedule=schedule.name if pp > 1 else "1f1b", virtual_stages=v if pp > 1 else 1,
            recompute=random.choice(["none", "selective", "full", "every-2", "keep-attention", "keep-matmuls"]),
            micro_batch=1 if cp > 1 else random.choice([1, 2]), sequence_parallel=random.choice([True, True, False]),
            tp_overlap=random.choice([False, False, True]),
            offload=random.choice(["none"] * 6 + ["activations", "optimizer", "both"]),  # type: ignore[arg-type]
        )  # fmt: skip
        depth = ("num_layers", layout.num_stages * random.choice([1, 2, 3, 7]) + random.choice([0, 1]))
        head = ("vocab_size", random.choice([1024, 32_000, 128_256]))
        batch = m * pp * layout.micro_batch * layout.dp
        run = Rehearsal(_MODEL, _GPU, random.choice([1024, 8192]), batch, layout, (depth, head))
        config = replace(run.config, precision=Precision(reduce=random.choice(["float32", "bfloat16"])))
        scenario = own_scenario(config, layout.world_size, gpu)
        if layout.is_legal(scenario.model, scenario.batch) and not find_refusals(scenario, layout, Kernels()):
            yield config, layout


class Row(NamedTuple):
    """A layout's peak on the rank that is predicted to hold most."""

    difference: float
    """Predicted over dry-run, - 1."""
    peak_bytes: int
    subject: Subject

    @property
    def cells(self) -> list[str]:
        """Cells of the comparison in the page's table."""
        config, layout = self.subject.config, self.subject.layout
        return [
            str(layout), str(self.subject.rank), str(config.model.num_layers), f"{config.model.vocab_size:,}",
            config.precision.reduce, str(layout.num_microbatches(config.batch)), f"{self.peak_bytes / GIB:.3f}",
            f"{self.difference:+.2%}",
        ]  # fmt: skip


def compare(runs: Iterable[tuple[Config, Layout]]) -> list[Row]:
    """Predicted beside dry-run, the furthest off first."""
    gpu, predicted = find_gpu(_GPU), list[tuple[Subject, float]]()
    for config, layout in runs:
        estimate = predict(config, layout, gpu)
        assert estimate is not None, "the GPU type is known"
        overhead = own_scenario(config, layout.world_size, gpu).engine.constants.overhead_bytes
        rank = estimate.busiest_rank * (layout.world_size // layout.pp)
        predicted.append((Subject(config, layout, Kernels(), rank), estimate.peak_bytes - overhead))
    subjects = [subject for subject, _ in predicted]
    found = {
        id(subject): peak_bytes
        for subject, peak_bytes in find_peaks(subjects, device_type=gpu.device_type, gpus_per_node=gpu.gpus_per_node)
    }
    rows = [Row(size / found[id(subject)] - 1, found[id(subject)], subject) for subject, size in predicted]
    return sorted(rows, key=lambda row: -abs(row.difference))


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="benchmarks.peaks")
    parser.add_argument("--seed", type=int, default=1, help="of the layouts")
    parser.add_argument("--layouts", type=int, default=40, help="how many")
    options = parser.parse_args()
    rows = compare(islice(draw_layouts(Random(options.seed)), options.layouts))
    close = sum(abs(row.difference) <= _CLOSE for row in rows)
    print("# Formulas of peaks against dry runs of random layouts\n")
    print(f"{made_by('peaks', f'--seed {options.seed} --layouts {options.layouts}')}.\n")
    print(f"Of {plural(len(rows), 'layout')} {close} are within {_CLOSE:.1%}. The others, or the worst five:\n")
    heading = ["layout", "rank", "blocks", "vocabulary", "reduce", "microbatches", "dry run, GiB", "difference"]
    print(*table(heading, [row.cells for row in rows[: max(5, len(rows) - close)]]), sep="\n")


if __name__ == "__main__":
    main()
