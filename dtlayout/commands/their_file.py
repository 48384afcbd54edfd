"""A file of another program that an answer is about: changes of its layout in its own options, and the changed file."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import write
from dtlayout.base.formatting import format_bytes, wrap
from dtlayout.commands.arguments import JsonDocument
from dtlayout.commands.case import Case, read_other
from dtlayout.costmodel.estimate import Estimate, estimate
from dtlayout.planner.neighbours import other_kernels
from dtlayout.planner.sizing import find_fitting
from dtlayout.planner.space import KERNEL_NAMES, Space
from dtlayout.programs.patches import Patch, find_patch, write_diff
from dtlayout.programs.program import Job
from dtlayout.programs.reading import read_again
from dtlayout.programs.understood import Understood
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

_STEPS = 1
"""Steps of the jobs that are compared: no option of a layout depends on them."""
_DIFFS = (".diff", ".patch")
_SHOWN = 3
"""Changes that are said in the file's words."""


def add_patch(parser: argparse.ArgumentParser) -> None:
    """Add the file to write, and the change that it gets."""
    text = "write another program's file with a change; to FILE.patch or FILE.diff, the difference"
    parser.add_argument("--patch", type=Path, metavar="FILE", help=text)
    parser.add_argument("--take", default="1", metavar="N", help="the change of --patch: its number, or best")


class TheirFile(NamedTuple):
    """A file of another program, with what it was asked with."""

    found: Understood
    path: Path
    overrides: Sequence[str]
    options: argparse.Namespace

    @property
    def is_script(self) -> bool:
        """True for a script, whose options have dashes."""
        return self.found.file is not None and self.found.file.tree is None

    def says_otherwise(self, case: Case, layout: Layout, kernels: Kernels) -> bool:
        """True if the program's options for a layout with kernels are others than those of the case."""
        if self.found.options is None:
            return False
        jobs = [
            Job(case.scenario, estimate(case.scenario, *each), _STEPS)
            for each in ((case.layout, case.kernels), (layout, kernels))
        ]
        return self.found.options(jobs[0])[0] != self.found.options(jobs[1])[0]

    def find_patch(self, case: Case, wanted: Estimate) -> Patch:
        """The patch that turns the file's job into a layout with its kernels; InvalidConfig where there is none.

        A patch changes nothing but the layout and the kernels: --section.key=value of the command line is not in it.
        """
        before = estimate(case.scenario, case.layout, case.kernels)

        def says(text: str) -> bool:
            assert self.found.file is not None, "a patch has a file"
            again = read_again(self.found.file, text)
            if again is None:
                return False
            other = read_other(again, self.path, self.overrides, self.options, notes=False)
            same = replace(other.scenario, cluster=case.scenario.cluster) == case.scenario
            return same and other.kernels == wanted.kernels and _is_same(other.layout, wanted)

        return find_patch(self.found, Job(case.scenario, before, _STEPS), Job(case.scenario, wanted, _STEPS), says)

    def describe_patch(self, case: Case, wanted: Estimate) -> list[str]:
        """The changes to a layout in words of the file, or why it has none."""
        try:
            return list(self.find_patch(case, wanted).describe(is_script=self.is_script))
        except InvalidConfig as error:
            return error.problems

    def write_patch(self, path: Path, case: Case, wanted: Estimate) -> list[str]:
        """Write the file with a layout, or a diff of it to FILE.patch and FILE.diff; returns the changes in words."""
        if path.exists() and path.samefile(self.path):
            raise InvalidConfig(f"--patch {path} is the file itself; write another one")
        patch = self.find_patch(case, wanted)
        assert self.found.file is not None, "a patch has a file"
        text = patch.text
        if path.suffix in _DIFFS:
            text = write_diff(self.path, self.found.file.text, text)
        write(path, text, "the changed file")
        return list(patch.describe(is_script=self.is_script))


def _is_same(layout: Layout, wanted: Estimate) -> bool:
    """True for the layout that is wanted, also where its stages are said by their blocks."""
    one, other = layout.effective, wanted.layout.effective
    stages = one.stage_layers or other.stage_layers
    if stages and tuple(stages) != tuple(wanted.stage_layers):
        return False
    return replace(one, stage_layers=()) == replace(other, stage_layers=())


def find_best(file: TheirFile, case: Case) -> Estimate | None:
    """The layout that a search finds on a case's GPUs, with kernels that the file can say; None where none fits."""
    kept = {name: getattr(case.kernels, name) for name in find_unsaid_kernels(file, case)}
    search, _ = find_fitting(Space(case.scenario, kept), None)
    return next(iter(search.run_kinds(1).ranked), None)


def find_unsaid_kernels(file: TheirFile, case: Case) -> list[str]:
    """Operations whose kernel no option of the file's program says."""
    said = {name for name, others in other_kernels(case.kernels) if file.says_otherwise(case, case.layout, others)}
    return [name for name in KERNEL_NAMES if name not in said]


def answer(file: TheirFile, case: Case, changes: Sequence[Estimate]) -> dict[str, Any]:
    """The keys of a document on changes of the file: the first three that it can say, and the best layout of all."""
    changes = [each for each in changes if file.says_otherwise(case, each.layout, each.kernels)]
    best, now = find_best(file, case), estimate(case.scenario, case.layout, case.kernels)

    def describe(each: Estimate) -> dict[str, Any]:
        return {
            "layout": str(each.layout), "step_time_s": each.step_time_s if each.knows_time else None,
            "faster": 1 - each.step_time_s / now.step_time_s, "peak_memory_bytes": each.peak_bytes,
            "change": file.describe_patch(case, each),
        }  # fmt: skip

    said: dict[str, Any] = {
        "path": str(file.path), "program": file.found.title, "changes": [describe(each) for each in changes[:_SHOWN]],
        "best": None if best is None else describe(best),
    }  # fmt: skip
    if file.options.patch is not None:
        wanted = _choose(file.options.take, changes, best)
        said |= {
            "written": str(file.options.patch),
            "written_change": file.write_patch(file.options.patch, case, wanted),
        }
    return {"file": said}


def _choose(take: str, changes: Sequence[Estimate], best: Estimate | None) -> Estimate:
    """The layout that --take names; InvalidConfig where there is none."""
    if take == "best" and best is not None:
        return best
    if take.isdigit() and 1 <= int(take) <= len(changes):
        return changes[int(take) - 1]
    known = [*map(str, range(1, len(changes) + 1)), *["best"] * (best is not None)]
    raise InvalidConfig(f"--take {take} is no change here; there is {' or '.join(known) or 'none'}")


def describe_answer(document: JsonDocument) -> Iterator[str]:
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
    yield f"{place:>4}  {change['layout']}, {gain}, {format_bytes(change['peak_memory_bytes'])}"
    yield from wrap("      ", change["change"] or ["nothing to change"])
