"""dtlayout compare: layouts side by side, and in which parts their steps and their memory differ."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from dtlayout.base.files import expand
from dtlayout.base.formatting import align, choose_unit, three_digits
from dtlayout.base.refusals import show_value
from dtlayout.commands.arguments import add_config, show
from dtlayout.commands.case import Case, add_machines, read_case
from dtlayout.costmodel.estimate import Estimate, estimate
from dtlayout.costmodel.scenario import NO_TIME
from dtlayout.planner.choices import parse_choices
from dtlayout.planner.space import KERNEL_NAMES

EXAMPLE = "dtlayout compare configs/llama-13b-64xa100.toml tp=2 pp=2,micro_batch=2 --gpus 64"
_MOST = 2.0
"""Times the change of the whole as which a part's may be to be most of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The configs, the GPUs and the engine."""
    add_config(parser)
    parser.add_argument(
        "others",
        nargs="+",
        metavar="other",
        help="a TOML file, or what differs in config: tp=2,recompute=full or pp2·tp4",
    )
    add_machines(parser)


class _Side(NamedTuple):
    """One of those that are compared."""

    name: str
    case: Case
    estimate: Estimate

    @property
    def tokens_per_s_per_gpu(self) -> float:
        step_time_s, cluster = self.estimate.step_time_s, self.case.scenario.cluster
        return self.case.scenario.batch.tokens_per_s_per_gpu(step_time_s, cluster.num_gpus)

    @property
    def mfu(self) -> float | None:
        return self.estimate.mfu if self.case.scenario.cluster.gpu.has_mfu else None

    @property
    def memory(self) -> Mapping[str, float]:
        """Bytes of the fullest rank by component."""
        return self.estimate.memory[self.estimate.busiest_rank].as_dict()


def run(options: argparse.Namespace) -> int:
    """Print all sides beside each other."""
    sides = [_read(str(options.config), options, ())]
    for text in options.others:
        sides.append(_read(text, options, ()) if _is_file(text) else _change(text, options, sides[0].case))
    return show(options, {"ok": True, "compared": [_to_document(side) for side in sides]}, _describe(sides))


def _is_file(text: str) -> bool:
    return Path(text).suffix == ".toml" or os.path.isfile(expand(text))


def _change(text: str, options: argparse.Namespace, first: Case) -> _Side:
    """The first config with some choices made otherwise; data parallelism that is not named takes up its GPUs."""
    choices = parse_choices(text)
    if not {"dp_shard", "dp_replicate"} & choices.keys():
        choices["dp_shard"] = -1
        options = argparse.Namespace(**{**vars(options), "world": first.scenario.cluster.num_gpus})
    sections = {name: "kernels" if name in KERNEL_NAMES else "layout" for name in choices}
    overrides = [f"--{sections[name]}.{name}={show_value(value)}" for name, value in choices.items()]
    return _read(str(options.config), options, overrides)._replace(name=text)


def _read(path: str, options: argparse.Namespace, overrides: Sequence[str]) -> _Side:
    case = read_case(Path(path), [*options.overrides, *overrides], options)
    return _Side(Path(path).stem, case, estimate(*case))


def _describe(sides: Sequence[_Side]) -> list[str]:
    names = [str(place) for place, _ in enumerate(sides, start=1)]
    legend = [[place, side.name, str(side.case.layout)] for place, side in zip(names, sides, strict=True)]
    scenarios = [side.case.scenario for side in sides]
    facts: list[tuple[str, list[str]]] = [
        ("model", [s.model.name for s in scenarios]),
        ("sequences a step", [f"{s.batch.global_batch} of {s.batch.seq_len:,}" for s in scenarios]),
        ("GPUs", [f"{s.cluster.num_gpus} x {s.cluster.gpu.name}" for s in scenarios]),
        *((key, [getattr(side.case.kernels, key) for side in sides]) for key in asdict(sides[0].case.kernels)),
        ("fits", ["yes" if side.estimate.fits else "no" for side in sides]),
        ("MFU", ["n/a" if side.mfu is None else f"{side.mfu:.1%}" for side in sides]),
        ("tokens/s/GPU", [_say_speed(side) for side in sides]),
    ]
    always = ("fits", "MFU", "tokens/s/GPU")
    same = [(name, cells[0]) for name, cells in facts if len({*cells}) == 1 and name not in always]
    shown = [[name, *cells] for name, cells in facts if name in always or len({*cells}) > 1]
    times = [{**side.estimate.time.as_dict(), "total": side.estimate.step_time_s} for side in sides]
    knows_time = all(side.estimate.knows_time for side in sides)
    first_s = sides[0].estimate.step_time_s
    memory = [{**side.memory, "total": side.estimate.peak_bytes} for side in sides]
    unit, size = choose_unit(max(side.estimate.peak_bytes for side in sides))
    return [
        "alike: " + ", ".join(f"{name} {value}" for name, value in same), "",
        *align([["", "what", "layout"], *legend], ("<", "<", "<")), "",
        *align([["", *names], *shown]), "",
        *(_table("step, s", names, times, 1.0) if knows_time else _table("step, of 1's", names, times, first_s)), "",
        *_table(f"fullest rank, {unit}", names, memory, float(size)), "",
        *[f"{NO_TIME}; what is compared are shares of the step of 1."] * (not knows_time),
        *(_conclude(place, side, sides[0]) for place, side in enumerate(sides[1:], start=2)),
    ]  # fmt: skip


def _say_speed(side: _Side) -> str:
    return three_digits(side.tokens_per_s_per_gpu) if side.estimate.knows_time else "n/a"


def _table(title: str, names: Sequence[str], columns: Sequence[Mapping[str, float]], unit: float) -> list[str]:
    """Parts of each side, and how much more than the first each other one has; parts that all lack are left out."""
    others = range(1, len(columns))
    rows = [[title, *names, *(f"{place + 1} - 1" for place in others)]]
    for part in columns[0]:
        values = [column[part] / unit for column in columns]
        if any(f"{value:.3f}" != "0.000" for value in values):
            changes = (round(values[place] - values[0], 3) + 0.0 for place in others)  # 0.0: none is -0.000
            differences = [f"{change:+.3f}" for change in changes]
            rows.append([part, *(f"{value:.3f}" for value in values), *differences])
    return align(rows)


def _conclude(place: int, side: _Side, first: _Side) -> str:
    """A sentence on what a side gains or loses; of its memory the part that changed most in the same direction."""
    change = side.tokens_per_s_per_gpu / first.tokens_per_s_per_gpu - 1
    speed = f"{abs(change):.1%} {'more' if change > 0 else 'fewer'} tokens a second and GPU than 1"
    if abs(change) < 0.0005:
        speed = "as many tokens a second and GPU as 1"
    bytes_more = side.estimate.peak_bytes - first.estimate.peak_bytes
    memory = "as much memory"
    if abs(bytes_more) >= 2**20:
        unit, size = choose_unit(abs(bytes_more))
        memory = f"{abs(bytes_more) / size:.1f} {unit} {'more' if bytes_more > 0 else 'less'}"
    changes = {part: side.memory[part] - first.memory[part] for part in side.memory}
    largest = max(changes, key=lambda part: changes[part] * bytes_more)
    most = ""
    if abs(bytes_more) >= 2**20:  # no part is most of what others nearly make up for
        most = f", most of it {largest}" if abs(changes[largest]) < _MOST * abs(bytes_more) else ""
    misfit = "" if side.estimate.fits else "; it does not fit"
    return f"{place} trains {speed}, with {memory} on the fullest rank{most}{misfit}."


def _to_document(side: _Side) -> dict[str, Any]:
    found, scenario = side.estimate, side.case.scenario
    return {
        "name": side.name, "model": scenario.model.name, "batch": asdict(scenario.batch),
        "gpu": scenario.cluster.gpu.name, "gpus": scenario.cluster.num_gpus, "engine": scenario.engine.name,
        "layout": asdict(found.layout), "kernels": asdict(found.kernels), "fits": found.fits,
        "step_time_s": found.step_time_s if found.knows_time else None, "mfu": side.mfu,
        "tokens_per_s_per_gpu": side.tokens_per_s_per_gpu if found.knows_time else None,
        "time_s": found.time.as_dict() if found.knows_time else None,
        "memory_bytes": dict(side.memory), "peak_memory_bytes": found.peak_bytes,
        "capacity_bytes": found.capacity_bytes,
    }  # fmt: skip
