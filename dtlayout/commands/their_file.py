"""A file of another program that an answer is about: changes of its layout in its own options, and the changed file."""

import argparse
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import write
from dtlayout.commands.case import Case, read_other
from dtlayout.costmodel.estimate import Estimate, estimate
from dtlayout.planner.neighbours import other_kernels
from dtlayout.planner.space import KERNEL_NAMES
from dtlayout.programs.patches import Patch, find_patch, write_diff
from dtlayout.programs.program import Job
from dtlayout.programs.reading import read_again
from dtlayout.programs.understood import Understood
from dtlayout.spec.kernel_records import AttentionKernel
from dtlayout.spec.kernel_table import list_kernels
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

_STEPS = 1
"""Steps of the jobs that are compared: no option of a layout depends on them."""
_DIFFS = (".diff", ".patch")


class TheirFile(NamedTuple):
    """A file of another program, with what it was asked with."""

    found: Understood
    path: Path
    overrides: Sequence[str]
    options: argparse.Namespace

    def says_otherwise(self, case: Case, layout: Layout, kernels: Kernels) -> bool:
        """True if the program's options can say a layout with kernels, and are others than those of the case."""
        if self.found.options is None:
            return False
        (now, lacks), (other, other_lacks) = (
            self.found.options(Job(case.scenario, estimate(case.scenario, *each), _STEPS))
            for each in ((case.layout, case.kernels), (layout, kernels))
        )
        return now != other and {*other_lacks} <= {*lacks}

    def find_patch(self, case: Case, wanted: Estimate) -> Patch:
        """The patch that turns the file's job into a layout with its kernels; InvalidConfig where there is none.

        A patch changes nothing but the layout and the kernels: --section.key=value of the command line is not in it.
        """
        before = estimate(case.scenario, case.layout, case.kernels)

        def says(text: str, changed: Collection[str]) -> bool:
            assert self.found.file is not None, "a patch has a file"
            again = read_again(self.found.file._replace(num_gpus=self.found.num_gpus), text)
            if again is None or not self._leaves_others(again, changed):
                return False
            other = read_other(again, self.path, self.overrides, self.options, notes=False)
            # Rows of the vocabulary are padded for tp by some programs.
            model = replace(other.scenario.model, vocab_size=case.scenario.model.vocab_size)
            precision = other.scenario.precision
            if (case.layout.dp_shard > 1) != (wanted.layout.dp_shard > 1):  # FSDP reduces in a format of its own
                precision = replace(precision, reduce=case.scenario.precision.reduce)
            theirs = replace(other.scenario, cluster=case.scenario.cluster, model=model, precision=precision)
            same = theirs == case.scenario
            return same and other.kernels == wanted.kernels and _is_same(other.layout, wanted)

        return find_patch(self.found, Job(case.scenario, before, _STEPS), Job(case.scenario, wanted, _STEPS), says)

    def _leaves_others(self, again: Understood, changed: Collection[str]) -> bool:
        """True if all options but those that are changed are as before, also those that change no prediction."""
        apart = {*changed, *(name for name, own in self.found.names.items() if own in changed)}
        before, after = (
            {name: value for name, value in each.values.items() if name not in apart and value not in (None, {})}
            for each in (self.found, again)
        )
        return before == after

    def can_say(self, case: Case, wanted: Estimate) -> bool:
        """True if changes of the file's options say a layout with its kernels."""
        try:
            self.find_patch(case, wanted)
        except InvalidConfig:
            return False
        return True

    def describe_patch(self, case: Case, wanted: Estimate) -> list[str]:
        """The changes to a layout in words of the file, or why it has none."""
        try:
            return list(self.find_patch(case, wanted).describe(has_flags=self.found.takes_flags))
        except InvalidConfig as error:
            return error.problems

    def write_patch(self, path: Path, case: Case, wanted: Estimate) -> list[str]:
        """Write the file with a layout, or a diff of it to FILE.patch and FILE.diff; returns the changes in words."""
        if path.exists() and path.samefile(self.path):
            raise InvalidConfig(f"--patch {path} is the file itself; write another one")
        patch = self.find_patch(case, wanted)
        assert self.found.file is not None, "a patch has a file"
        before, text = self.found.file.text, patch.text
        if b"\r\n" in self.path.read_bytes():
            before, text = (each.replace("\n", "\r\n") for each in (before, text))
        if path.suffix in _DIFFS:
            text = write_diff(self.path, before, text)
        write(path, text, "the changed file")
        return list(patch.describe(has_flags=self.found.takes_flags))


def _is_same(layout: Layout, wanted: Estimate) -> bool:
    """True for the layout that is wanted, also where its stages are said by their blocks."""
    one, other = layout.effective, wanted.layout.effective
    stages = one.stage_layers or other.stage_layers
    if stages and tuple(stages) != tuple(wanted.stage_layers):
        return False
    return replace(one, stage_layers=()) == replace(other, stage_layers=())


def find_unsaid_kernels(file: TheirFile, case: Case) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Operation → kernel that stays, since the program's options say no other one; and operation → kernels that they
    do not say, of the other operations."""
    said, unsaid = set[str](), dict[str, list[Any]]()
    now = estimate(case.scenario, case.layout, case.kernels)
    needs_package = [
        ("attention", replace(case.kernels, attention=each.name))
        for each in list_kernels(AttentionKernel) if each.is_priced and each.package
    ]  # fmt: skip
    for name, others in (*other_kernels(case.kernels), *needs_package):
        if others == case.kernels:
            continue
        if _costs_as(now, estimate(case.scenario, case.layout, others)):  # nothing would be won by it
            unsaid.setdefault(name, []).append(getattr(others, name))
        elif file.says_otherwise(case, case.layout, others):
            said.add(name)
        else:
            unsaid.setdefault(name, []).append(getattr(others, name))
    kept = {name: getattr(case.kernels, name) for name in KERNEL_NAMES if name not in said}
    return kept, {name: values for name, values in unsaid.items() if name in said}


def _costs_as(now: Estimate, other: Estimate) -> bool:
    """True for a step that takes the time and the memory of another one."""
    return now.step_time_s == other.step_time_s and now.peak_bytes == other.peak_bytes
