"""recommend --verify: dry runs of the best layouts, so that no layout is recommended that runs out of memory."""

import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress

from dtlayout.base import toml
from dtlayout.base.errors import InvalidLayout
from dtlayout.base.formatting import plural
from dtlayout.base.terminal import open_console
from dtlayout.commands.emit import make_config
from dtlayout.commands.recommend_text import describe_dry_run
from dtlayout.config.loading import parse_config
from dtlayout.costmodel.estimate import Estimate, Estimator
from dtlayout.costmodel.scenario import Scenario
from dtlayout.dryrun.choose import choose_kernels, fullest_ranks
from dtlayout.dryrun.ranks import Subject, find_peaks
from dtlayout.planner.search import SearchResult
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout


class Verified(NamedTuple):
    """A layout and the memory that a dry run of it held."""

    estimate: Estimate
    peak_bytes: int
    """Most bytes that one of the fullest ranks held, less what torch.compile spares by the formula."""
    fits: bool
    """Whether that fits, with what the engine's allocator holds beside tensors."""

    def to_document(self) -> dict[str, Any]:
        """The entry of the document."""
        return {
            "layout": asdict(self.estimate.layout), "peak_memory_bytes": self.peak_bytes,
            "predicted_peak_memory_bytes": self.estimate.peak_bytes, "fits": self.fits,
        }  # fmt: skip


def verify(scenario: Scenario, result: SearchResult, number: int) -> list[Verified]:
    """Dry-run the first `number` of the best layouts at once, and further ones until one fits.

    Each with the config that `--emit` writes, and what differs in compiling alone once; refuses what a dry run cannot
    execute, and layouts of which none fits.
    """
    found, peaks, waiting = list[Verified](), dict[tuple[Layout, Kernels], int](), list(result.ranked)
    while waiting and not any(v.fits for v in found):
        count = max(1, number - len(found))
        several, waiting = waiting[:count], waiting[count:]
        runs = [_prepare(scenario, estimate) for estimate in several]
        peaks |= _find_peaks(scenario, {_key(subjects[0]): subjects for subjects in runs}, known=peaks)
        for estimate, subjects in zip(several, runs, strict=True):
            eager = Estimator(scenario).estimate(estimate.layout, subjects[0].kernels)
            peak_bytes = peaks[_key(subjects[0])] - round(eager.peak_bytes - estimate.peak_bytes)
            fits = peak_bytes + scenario.engine.constants.overhead_bytes <= result.allowed_bytes
            found.append(Verified(estimate, peak_bytes, fits))
    if any(v.fits for v in found):
        return found
    advice = "use a larger --top or a smaller --max-memory"
    held = [describe_dry_run(each.to_document()) for each in found]
    raise InvalidLayout([f"none of the {len(found)} best fits when it is dry-run; {advice}", *held])


def _prepare(scenario: Scenario, estimate: Estimate) -> list[Subject]:
    """The dry runs of one layout."""
    config = parse_config(toml.loads(make_config(Path("verified.toml"), scenario, estimate, ())))
    kernels, _ = choose_kernels(config, estimate.layout, scenario.cluster.gpu)
    return [Subject(config, estimate.layout, kernels, rank) for rank in fullest_ranks(estimate.layout, estimate)]


def _key(subject: Subject) -> tuple[Layout, Kernels]:
    """The layout and kernels, on which the memory of eager blocks depends."""
    return subject.layout, subject.kernels


def _find_peaks(
    scenario: Scenario, runs: Mapping[tuple[Layout, Kernels], Sequence[Subject]], known: Container[object]
) -> dict[tuple[Layout, Kernels], int]:
    """The largest peak of each run that is not known yet, with progress on stderr."""
    subjects = [subject for key, several in runs.items() if key not in known for subject in several]
    peaks = dict[tuple[Layout, Kernels], int]()
    if not subjects:
        return peaks
    start, console, cluster = time.monotonic(), open_console(stderr=True, highlight=False), scenario.cluster
    num_layouts = len({_key(subject) for subject in subjects})
    console.print(f"dry run of {plural(num_layouts, 'layout')} as {plural(len(subjects), 'rank')}", soft_wrap=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("steps", total=1.0)
        found = find_peaks(
            subjects, device_type=cluster.gpu.device_type, gpus_per_node=cluster.gpus_per_node,
            on_progress=lambda share: progress.update(task, completed=share),
        )  # fmt: skip
        for number, (subject, peak_bytes) in enumerate(found, start=1):
            done = f"{number} of {len(subjects)}, {time.monotonic() - start:.0f} s"
            console.print(f"rank {subject.rank} of {subject.layout} done, {done}", soft_wrap=True)
            peaks[_key(subject)] = max(peak_bytes, peaks.get(_key(subject), 0))
    return peaks
