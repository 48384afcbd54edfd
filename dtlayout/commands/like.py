"""A job like that of a file: the scenario of a config, or of another program's file, with its own layout to compare."""

import argparse
from dataclasses import dataclass, replace
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.commands.case import Case, find_other, read_case
from dtlayout.commands.their_file import TheirFile, find_unsaid_kernels
from dtlayout.config.loading import read_sections
from dtlayout.costmodel.estimate import Estimate, estimate
from dtlayout.costmodel.scenario import Scenario


@dataclass(frozen=True)
class Like:
    """The job of a file, as it stands."""

    case: Case
    """Scenario, layout and kernels of the job."""
    file: TheirFile | None
    """The file of another program; None for a config of ours."""
    sections: dict[str, Any] | None = None
    """Sections of a config of ours, with what other options change; None for the file of another program."""

    def scenario_on(self, num_gpus: int | None) -> Scenario:
        """The scenario, on another number of GPUs if one is given."""
        cluster = self.case.scenario.cluster
        return replace(self.case.scenario, cluster=replace(cluster, num_gpus=num_gpus or cluster.num_gpus))

    def list_unsaid(self) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """Kernels that stay, and kernels that are left out, since no option of the file says them."""
        return ({}, {}) if self.file is None else find_unsaid_kernels(self.file, self.case)

    def estimate(self) -> Estimate:
        """The file's own layout, as it is predicted."""
        return estimate(*self.case)


def read_like(options: argparse.Namespace) -> Like:
    """The job of --like, where other options of recommend say another batch, model, optimizer or format; refused where
    its program does not have its layout."""
    if options.cluster or options.gpus_per_node:
        raise InvalidConfig("--like takes the GPU type from --gpu; leave out --cluster and --gpus-per-node")
    if options.vocab or options.adapter:
        raise InvalidConfig("--like has the model of the file: --model.vocab_size=V and --adapter.method=M change it")
    batch = {"seq_len": options.seq_len, "global_batch": options.global_batch}
    overrides = [f"--batch.{name}={value}" for name, value in batch.items() if value is not None]
    overrides += [f"--precision.{text.removeprefix('precision.')}" for text in options.precision]
    if options.optimizer:
        name, *pairs = options.optimizer.split(",")
        overrides += [f"--optimizer.{pair}" for pair in (f"name={name}", *pairs)]
    asked = argparse.Namespace(**{**vars(options), "world": options.gpus})
    overrides = [*options.overrides, *overrides]
    found = find_other(options.like, asked)
    case = read_case(options.like, overrides, asked)
    if found is None:
        return Like(case, None, read_sections(options.like, overrides))
    return Like(case, TheirFile(found, options.like, overrides, asked))
