"""A measured speed beside a prediction: --measured and --log, and what would explain the difference."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from math import isinf
from pathlib import Path
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import align, fold, plural, three_digits
from dtlayout.commands.arguments import JsonDocument
from dtlayout.commands.side_question import Asked, SideQuestion
from dtlayout.planner.measured import FULL, judge, parse_measured
from dtlayout.programs.logs import read_log


def _add(parser: argparse.ArgumentParser) -> None:
    """Add a speed that was measured, or the log that has it."""
    text = "a measured speed: 1234 (tokens/s/GPU), 12.3s or 850ms (a step), or 41%% (MFU)"
    parser.add_argument("--measured", metavar="SPEED", help=text)
    text = "a log of Megatron-LM, torchtitan, nanotron or Hugging Face's Trainer with the measured speed"
    parser.add_argument("--log", type=Path, metavar="FILE", help=text)


def _answer(asked: Asked) -> dict[str, Any]:
    """The keys of a document on a measured speed; {} without one. InvalidConfig for two, or for one that is none."""
    options, scenario, now = asked.options, asked.case.scenario, asked.explanation.estimate
    if options.measured is not None and options.log is not None:
        raise InvalidConfig("--measured and --log both say a speed; give one of them")
    if options.measured is None and options.log is None:
        return {}
    if not now.knows_time:
        raise InvalidConfig("no seconds are predicted here, so no measured speed can be compared with them")
    source = "as given"
    if options.log is not None:
        speeds = read_log(options.log)
        text = f"{speeds.median}s" if speeds.unit == "s" else f"{speeds.median}"
        source = f"the median of {plural(len(speeds.values), 'step')} in a log of {speeds.title}"
        measured_s = parse_measured(text, scenario, now)
    else:
        measured_s = parse_measured(options.measured, scenario, now)
    verdict = judge(scenario, now, measured_s)
    tokens = scenario.batch.tokens_per_s_per_gpu(measured_s, now.layout.world_size)
    return {
        "measured": {
            "step_time_s": measured_s, "tokens_per_s_per_gpu": tokens, "source": source,
            "mfu": now.mfu * now.step_time_s / measured_s if scenario.cluster.gpu.has_mfu else None,
            "slower": measured_s / now.step_time_s - 1, "lost_s": verdict.lost_s, "place": verdict.place,
            "range_s": verdict.interval.around(now.step_time_s), "basis": verdict.interval.basis,
            "memory_is_full": verdict.is_full,
            "causes": [
                {**asdict(each), "factor": None if isinf(each.factor) else each.factor} for each in verdict.causes
            ],
        }
    }  # fmt: skip


def _describe(document: JsonDocument) -> Iterator[str]:
    """Lines on the measured speed."""
    if not (found := document.get("measured")):
        return
    mfu = "" if found["mfu"] is None else f", MFU {found['mfu']:.1%}"
    speed = f"{found['step_time_s']:.3f} s, {three_digits(found['tokens_per_s_per_gpu'])} tokens/s/GPU{mfu}"
    slower = found["slower"]
    than = f"{abs(slower):.0%} {'longer' if slower > 0 else 'shorter'} than predicted"
    low_s, high_s = found["range_s"]
    where = {
        "inside": "inside the range", "slower": "slower than the range", "faster": "faster than the range",
    }[found["place"]]  # fmt: skip
    yield ""
    yield from fold(f"measured: {speed}, {found['source']}")
    yield from fold(f"  The step is {than}, {where}: {low_s:.3f} to {high_s:.3f} s for {found['basis']}.")
    if found["place"] == "faster":
        beyond = "No GPU computes so much. " if (found["mfu"] or 0) > 1 else ""
        yield from fold(f"  {beyond}See whether both count the same GPUs, and the same tokens and FLOPs.")
    if not found["causes"]:
        return
    yield f"  It loses {found['lost_s']:.3f} s. One of these alone would explain it:"
    rows = [
        (f"    {each['meaning']}", f"{each['factor']:.1f} times slower",
         f"{each['part']} takes {each['part_s']:.3f} s, not {each['part_before_s']:.3f}")
        for each in found["causes"]
        if each["factor"] is not None
    ]  # fmt: skip
    rows.append(("    a wait in each step", f"{found['lost_s']:.3f} s", "for data, a save, or another rank"))
    if found["memory_is_full"]:
        rows.append(("    the allocator", "", f"the peak is above {FULL:.0%} of the memory: it may free and ask again"))
    yield from align(rows, ("<", "<", "<"))
    none = [each["meaning"].split(",")[0] for each in found["causes"] if each["factor"] is None]
    if none:
        yield from fold(f"  None of these alone, however slow: {'; '.join(none)}.")


MEASURED = SideQuestion(_add, _answer, _describe)
