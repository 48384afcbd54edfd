"""Verify: does each of the best layouts of a search really fit? A dry run of it says."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dtlayout import toml
from dtlayout.commands.emit import make_config
from dtlayout.config import parse_config
from dtlayout.costmodel.estimate import Estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.dryrun.choose import choose_kernels, default_ranks
from dtlayout.dryrun.ranks import dry_run_ranks


@dataclass(frozen=True)
class Verified:
    """A layout and what a dry run of it held."""

    estimate: Estimate
    peak_bytes: int
    """Most bytes that one of the default ranks held."""
    fits: bool
    """Whether that fits, with what the engine's allocator holds beside tensors."""


def verify(scenario: Scenario, estimates: Iterable[Estimate], allowed_bytes: float) -> Iterator[Verified]:
    """Dry-run each layout with the config that `--emit` writes; refuses what a dry run cannot execute."""
    gpu, overhead_bytes = scenario.cluster.gpu, scenario.engine.constants.overhead_bytes
    for estimate in estimates:
        config = parse_config(toml.loads(make_config(Path("verified.toml"), scenario, estimate, ())))
        kernels, _ = choose_kernels(config, gpu)
        reports = dry_run_ranks(
            config, estimate.layout, kernels, default_ranks(estimate.layout, estimate),
            device_type=gpu.device_type, gpus_per_node=scenario.cluster.gpus_per_node,
        )  # fmt: skip
        peak_bytes = max(report.peak_bytes for report in reports)
        yield Verified(estimate, peak_bytes, peak_bytes + overhead_bytes <= allowed_bytes)
