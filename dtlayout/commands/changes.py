"""Changes of another program's file: the best of them in its own options, and --patch, which writes one."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import fold, format_bytes, wrap
from dtlayout.commands.arguments import JsonDocument
from dtlayout.commands.case import Case
from dtlayout.commands.side_question import Asked, SideQuestion
from dtlayout.commands.their_file import TheirFile, find_unsaid_kernels
from dtlayout.costmodel.estimate import Estimate, estimate
from dtlayout.planner.sizing import find_fitting
from dtlayout.planner.space import Space

_SHOWN = 3
"""Changes that are said in the file's words."""
_TRIED = 8
"""Best layouts of different kinds among which one is looked for that the file can say."""


def _add(parser: argparse.ArgumentParser) -> None:
    """Add the file to write, and the change that it gets."""
    text = "write another program's file with a change; to FILE.patch or FILE.diff, the difference"
    parser.add_argument("--patch", type=Path, metavar="FILE", help=text)
    parser.add_argument("--take", default="1", metavar="N", help="the change of --patch: its number, or best")


def _answer(asked: Asked) -> dict[str, Any]:
    """The keys of a document on changes of the file: the first three that it can say, and the best layout of all."""
    options, case, found = asked.options, asked.case, asked.found
    if found is None and options.patch is not None:
        raise InvalidConfig(f"--patch changes a file of another program, and {options.config} is a config of ours")
    if found is None:
        return {}
    file = TheirFile(found, options.config, options.overrides, options)
    changes = [each.estimate for each in asked.explanation.changes]
    changes = [each for each in changes if file.says_otherwise(case, each.layout, each.kernels)][:_SHOWN]
    best, now = find_best(file, case), estimate(case.scenario, case.layout, case.kernels)

    def describe(each: Estimate) -> dict[str, Any]:
        return {
            "layout": str(each.layout), "step_time_s": each.step_time_s if each.knows_time else None,
            "faster": 1 - each.step_time_s / now.step_time_s, "peak_memory_bytes": each.peak_bytes,
            "change": file.describe_patch(case, each),
        }  # fmt: skip

    said: dict[str, Any] = {
        "path": str(file.path), "program": file.found.title, "changes": [describe(each) for each in changes],
        "best": None if best is None else describe(best),
    }  # fmt: skip
    if options.patch is not None:
        wanted = _choose(options.take, changes, best)
        said |= {
            "written": str(options.patch),
            "written_change": file.write_patch(options.patch, case, wanted),
        }
    return {"file": said}


def _choose(take: str, changes: Sequence[Estimate], best: Estimate | None) -> Estimate:
    """The layout that --take names; InvalidConfig where there is none."""
    if take == "best" and best is not None:
        return best
    if take.isdecimal() and 1 <= int(take) <= len(changes):
        return changes[int(take) - 1]
    known = [*map(str, range(1, len(changes) + 1)), *["best"] * (best is not None)]
    raise InvalidConfig(f"--take {take} is no change here; there is {' or '.join(known) or 'none'}")


def _describe(document: JsonDocument) -> Iterator[str]:
    """Lines on changes of the file."""
    if not (file := document.get("file")):
        return
    yield from ("", f"as changes of {file['path']}:")
    for place, each in enumerate(file["changes"], start=1):
        yield from _describe_change(str(place), each)
    if file["best"] is None:
        yield "no layout fits on these GPUs"
    else:
        yield from _describe_change("best", file["best"])
    if written := file.get("written"):
        yield from wrap(f"written to {written}: ", file["written_change"] or ["nothing to change"])


def _describe_change(place: str, change: JsonDocument) -> Iterator[str]:
    gain = f"{abs(change['faster']):.1%} {'faster' if change['faster'] > 0 else 'slower'}"
    what = f"{place:>4}  {change['layout']}, {gain}, {format_bytes(change['peak_memory_bytes'])}"
    yield from fold(what, column=6)
    yield from wrap("      ", change["change"] or ["nothing to change"])


def find_best(file: TheirFile, case: Case) -> Estimate | None:
    """The best layout of a search on a case's GPUs that the file can say, or else the best of all; None where none
    fits."""
    search, _ = find_fitting(Space(case.scenario, *find_unsaid_kernels(file, case)), None, _TRIED)
    ranked = search.run_kinds(_TRIED).ranked
    return next((each for each in ranked if file.can_say(case, each)), next(iter(ranked), None))


CHANGES = SideQuestion(_add, _answer, _describe)
