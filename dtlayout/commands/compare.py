"""dtlayout compare: layouts side by side, and in which parts their steps and their memory differ."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtlayout.base.files import expand
from dtlayout.base.formatting import align, choose_unit, three_digits
from dtlayout.base.refusals import show_value
from dtlayout.commands.arguments import Answer, JsonDocument, add_config, show_answer
from dtlayout.commands.case import Case, add_machines, read_case
from dtlayout.costmodel.estimate import estimate
from dtlayout.costmodel.scenario import NO_TIME
from dtlayout.planner.choices import parse_choices
from dtlayout.planner.space import KERNEL_NAMES
from dtlayout.spec.layout import Layout

EXAMPLE = "dtlayout compare configs/llama-13b-64xa100.toml tp=2 pp=2,micro_batch=2 --gpus 64"
_MOST = 2.0
"""Most that a part may change, in multiples of the change of the whole, to be called most of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configs, the GPUs and the engine."""
    add_config(parser)
    parser.add_argument(
        "others",
        nargs="+",
        metavar="other",
        help="a TOML file, or what differs in config: tp=2,recompute=full or pp2·tp4",
    )
    add_machines(parser)


def run(options: argparse.Namespace) -> int:
    """Print the first config and each other config or choice beside each other, as text or JSON."""
    return show_answer(options, answer(options))


def answer(options: argparse.Namespace) -> Answer:
    """The first config and each other config or choice beside each other."""
    first = _read(str(options.config), options, ())
    sides = [(options.config.stem, first)]
    for text in options.others:
        is_file = _is_file(text)
        sides.append((Path(text).stem, _read(text, options, ())) if is_file else (text, _change(text, options, first)))
    return Answer(_to_document(sides), _describe)


def _is_file(text: str) -> bool:
    return Path(text).suffix == ".toml" or os.path.isfile(expand(text))


def _change(text: str, options: argparse.Namespace, first: Case) -> Case:
    """The first config with some choices made otherwise; data parallelism that is not named takes up its GPUs."""
    choices = parse_choices(text)
    if not {"dp_shard", "dp_replicate"} & choices.keys():
        choices["dp_shard"] = -1
        options = argparse.Namespace(**{**vars(options), "world": first.scenario.cluster.num_gpus})
    sections = {name: "kernels" if name in KERNEL_NAMES else "layout" for name in choices}
    overrides = [f"--{sections[name]}.{name}={show_value(value)}" for name, value in choices.items()]
    return _read(str(options.config), options, overrides)


def _read(path: str, options: argparse.Namespace, overrides: Sequence[str]) -> Case:
    return read_case(Path(path), [*options.overrides, *overrides], options)


def _to_document(sides: Sequence[tuple[str, Case]]) -> dict[str, Any]:
    """The document of all sides by their names; `_steps` and `_speeds` are there even where no seconds are known."""
    estimates = [estimate(*case) for _, case in sides]
    speeds = [
        case.scenario.batch.tokens_per_s_per_gpu(found.step_time_s, case.scenario.cluster.num_gpus)
        for (_, case), found in zip(sides, estimates, strict=True)
    ]
    compared = [
        {
            "name": name, "model": scenario.model.name, "batch": asdict(scenario.batch),
            "gpu": scenario.cluster.gpu.name, "gpus": scenario.cluster.num_gpus, "engine": scenario.engine.name,
            "layout": asdict(found.layout), "kernels": asdict(found.kernels), "fits": found.fits,
            "step_time_s": found.step_time_s if found.knows_time else None,
            "mfu": found.mfu if scenario.cluster.gpu.has_mfu else None,
            "tokens_per_s_per_gpu": speed if found.knows_time else None,
            "time_s": found.time.as_dict() if found.knows_time else None,
            "memory_bytes": found.memory[found.busiest_rank].as_dict(), "peak_memory_bytes": found.peak_bytes,
            "capacity_bytes": found.capacity_bytes,
        }
        for (name, (scenario, _, _)), found, speed in zip(sides, estimates, speeds, strict=True)
    ]  # fmt: skip
    steps = [{**found.time.as_dict(), "total": found.step_time_s} for found in estimates]
    has_experts = any(case.scenario.model.experts for _, case in sides)
    return {"ok": True, "compared": compared, "_steps": steps, "_speeds": speeds, "_has_experts": has_experts}


def _describe(document: JsonDocument) -> list[str]:
    sides, steps, speeds = document["compared"], document["_steps"], document["_speeds"]
    names = [str(place) for place, _ in enumerate(sides, start=1)]
    legend = [[place, side["name"], str(Layout(**side["layout"]))] for place, side in zip(names, sides, strict=True)]
    operations = [key for key in sides[0]["kernels"] if key != "experts" or document["_has_experts"]]
    facts: list[tuple[str, list[str]]] = [
        ("model", [side["model"] for side in sides]),
        ("sequences a step", ["{global_batch} of {seq_len:,}".format(**side["batch"]) for side in sides]),
        ("GPUs", [f"{side['gpus']} x {side['gpu']}" for side in sides]),
        *((key, [side["kernels"][key] for side in sides]) for key in operations),
        ("fits", ["yes" if side["fits"] else "no" for side in sides]),
        ("MFU", ["n/a" if side["mfu"] is None else f"{side['mfu']:.1%}" for side in sides]),
        ("tokens/s/GPU", [_say_speed(side["tokens_per_s_per_gpu"]) for side in sides]),
    ]
    always = ("fits", "MFU", "tokens/s/GPU")
    same = [(name, cells[0]) for name, cells in facts if len({*cells}) == 1 and name not in always]
    shown = [[name, *cells] for name, cells in facts if name in always or len({*cells}) > 1]
    knows_time = all(side["time_s"] for side in sides)
    memory = [{**side["memory_bytes"], "total": side["peak_memory_bytes"]} for side in sides]
    unit, size = choose_unit(max(side["peak_memory_bytes"] for side in sides))
    step_unit, step_size = ("s", 1.0) if knows_time else ("of 1's", steps[0]["total"])
    return [
        "alike: " + ", ".join(f"{name} {value}" for name, value in same), "",
        *align([["", "what", "layout"], *legend], ("<", "<", "<")), "",
        *align([["", *names], *shown]), "",
        *_table(f"step, {step_unit}", names, steps, step_size), "",
        *_table(f"fullest rank, {unit}", names, memory, float(size)), "",
        *[f"{NO_TIME}; what is compared are shares of the step of 1."] * (not knows_time),
        *(_conclude(place, side, sides[0], speed / speeds[0] - 1)
          for place, (side, speed) in enumerate(zip(sides[1:], speeds[1:], strict=True), start=2)),
    ]  # fmt: skip


def _say_speed(tokens_per_s_per_gpu: float | None) -> str:
    return "n/a" if tokens_per_s_per_gpu is None else three_digits(tokens_per_s_per_gpu)


def _table(title: str, names: Sequence[str], columns: Sequence[Mapping[str, float]], unit: float) -> list[str]:
    """A table of each side's parts, with differences to the first side; parts that are 0 everywhere are left out."""
    others = range(1, len(columns))
    rows = [[title, *names, *(f"{place + 1} - 1" for place in others)]]
    for part in columns[0]:
        values = [column[part] / unit for column in columns]
        if any(f"{value:.3f}" != "0.000" for value in values):
            changes = (round(values[place] - values[0], 3) + 0.0 for place in others)  # 0.0: none is -0.000
            differences = [f"{change:+.3f}" for change in changes]
            rows.append([part, *(f"{value:.3f}" for value in values), *differences])
    return align(rows)


def _conclude(place: int, side: JsonDocument, first: JsonDocument, change: float) -> str:
    """A sentence on the speed and the memory of a side beside the first, and on the part of memory that changed most.

    `change` is how much more tokens a second and GPU it trains than the first, over those of the first.
    """
    speed = f"{abs(change):.1%} {'more' if change > 0 else 'fewer'} tokens a second and GPU than 1"
    if abs(change) < 0.0005:
        speed = "as many tokens a second and GPU as 1"
    bytes_more = side["peak_memory_bytes"] - first["peak_memory_bytes"]
    memory = "as much memory"
    if abs(bytes_more) >= 2**20:
        unit, size = choose_unit(abs(bytes_more))
        memory = f"{abs(bytes_more) / size:.1f} {unit} {'more' if bytes_more > 0 else 'less'}"
    changes = {part: nbytes - first["memory_bytes"][part] for part, nbytes in side["memory_bytes"].items()}
    largest = max(changes, key=lambda part: changes[part] * bytes_more)
    most = ""
    if abs(bytes_more) >= 2**20:  # no part is most of what others nearly make up for
        most = f", most of it {largest}" if abs(changes[largest]) < _MOST * abs(bytes_more) else ""
    misfit = "" if side["fits"] else "; it does not fit"
    return f"{place} trains {speed}, with {memory} on the fullest rank{most}{misfit}."
