"""Formulas of memory and time against a dry run of every stage, on layouts that people ask about, as Markdown.

    make bench NAME=dryrun

The study's best of each sweep (arXiv:2311.05610), and Llama-3.1 8B, Llama-2 70B and Llama-3.1 405B. The first rank of
each stage is run; the others of a stage hold the same but for shards that do not come out even.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from benchmarks.pages.markdown import made_by, table
from dtlayout.base.formatting import GIB
from dtlayout.config.config import Config
from dtlayout.config.loading import parse_config
from dtlayout.dryrun.findings import Findings
from dtlayout.dryrun.ranks import dry_run_ranks
from dtlayout.dryrun.report import RankReport
from dtlayout.models.presets import find_preset
from dtlayout.planner.prediction import own_scenario, predict
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import find_gpu
from dtlayout.spec.kernels import Kernels, OpenKernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import Precision


@dataclass(frozen=True)
class Subject:
    """A run to rehearse."""

    model: str
    gpu: str
    seq_len: int
    global_batch: int
    layout: Layout
    changes: tuple[tuple[str, Any], ...] = ()
    """To the model's preset."""

    @property
    def config(self) -> Config:
        """The run's config, as a file would say it, but for the layout."""
        blank = parse_config(
            {"model": {"name": "debug"}, "batch": {"global_batch": 8, "seq_len": 16}, "train": {"steps": 1}}
        )
        return replace(
            blank,
            model=replace(find_preset(self.model), **dict(self.changes)),
            batch=Batch(global_batch=self.global_batch, seq_len=self.seq_len),
            precision=Precision(reduce="bfloat16"),
            kernels=OpenKernels.of(Kernels()),  # none of them compiled, as a dry run has it
        )


_A100, _H100 = "a100-80g-sxm", "h100-80g-sxm"
_VOCAB = (("vocab_size", 128_000),)
SUBJECTS = (
    Subject("llama-13b", _A100, 2048, 2048, Layout(dp_shard=64), _VOCAB),
    Subject("llama-13b", _A100, 8192, 512, Layout(pp=2, dp_shard=32, tp=2), _VOCAB),
    Subject("llama-30b", _A100, 2048, 2048, Layout(pp=4, dp_shard=32, tp=2), _VOCAB),
    Subject("llama-30b", _A100, 8192, 512, Layout(pp=4, dp_shard=8, tp=4), _VOCAB),
    Subject("llama-65b", _A100, 2048, 2048, Layout(pp=4, dp_shard=16, tp=2), _VOCAB),
    Subject("llama3.1-8b", _H100, 8192, 128, Layout(dp_shard=64, zero=3, recompute="selective")),
    Subject("llama2-70b", _H100, 4096, 1024, Layout(pp=4, dp_shard=16, tp=8)),
    Subject(
        "llama3.1-405b", _H100, 8192, 2048,
        Layout(
            pp=16, dp_shard=128, tp=8, schedule="interleaved-1f1b", virtual_stages=7, recompute="full",
        ),
    ),
)  # fmt: skip


def main() -> None:
    """Print the report."""
    print("# Dry runs against formulas\n")
    print(f"{made_by('dryrun')}.\n")
    print(
        "Peaks of the first rank of each stage, in GiB. Of the components that make it up, the one whose formula is\n"
        "furthest off, as a share of the peak. Steps are priced with the cluster's constants, from what the dry run\n"
        "did and by the cost model. The last column is the dry run's own time, as many ranks at once as cores.\n"
    )
    names = "model|sequence|layout|stage|dry run|predicted|difference|components|step, dry|step, predicted|ran for"
    for line in table(names.split("|"), chain.from_iterable(map(rehearse, SUBJECTS)), num_words=3):
        print(line, flush=True)


def rehearse(subject: Subject) -> Iterator[list[str]]:
    """A row for each stage."""
    config, layout, gpu = subject.config, subject.layout, find_gpu(subject.gpu)
    estimate = predict(config, layout, gpu)
    assert estimate is not None, "the GPU type is known"
    ranks = range(0, layout.world_size, layout.world_size // layout.pp)
    start = time.monotonic()
    reports = sorted(
        dry_run_ranks(config, layout, Kernels(), ranks, device_type=gpu.device_type, gpus_per_node=gpu.gpus_per_node),
        key=lambda report: report.rank,
    )
    seconds = f"{time.monotonic() - start:.0f} s"
    print(f"{subject.model} {layout}: {seconds}", file=sys.stderr, flush=True)
    scenario = own_scenario(config, layout.world_size, gpu)
    findings = Findings(scenario=scenario, layout=layout, reports=reports, estimate=estimate)
    assert findings.time is not None, "all stages were run"
    for stage, report in enumerate(reports):
        step = [f"{findings.time.total:.2f} s", f"{estimate.step_time_s:.2f} s", seconds]
        cells = [subject.model, f"{subject.seq_len:,}", str(layout), str(stage), *_compare(findings, report)]
        yield cells + (step if stage == 0 else ["", "", ""])


def _compare(findings: Findings, report: RankReport) -> list[str]:
    """Peak, dry and predicted, their difference, and that of the component that is furthest off."""
    components = findings.components(report)
    dry, predicted = components.pop("peak")
    worst = max((formula - found for found, formula in components.values()), key=abs)
    return [f"{dry / GIB:.3f}", f"{predicted / GIB:.3f}", f"{predicted / dry - 1:+.2%}", f"{worst / dry:+.2%}"]


if __name__ == "__main__":
    main()
