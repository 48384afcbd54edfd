"""Measure one GPU: ceilings of its operations, kernels one by one, micro-batch and recomputation, each predicted too.

    PYTHONPATH=. python -m benchmarks.gpu [--only GROUP[,GROUP]] [--out FOLDER] [--debug]

Needs torch and numpy alone; matplotlib draws pictures where it is installed. The trainer's own parts run, as a world of
one rank, on synthetic data: bf16 compute, fp32 masters, fused AdamW. Out of memory is a result, a cell that fails is a
row, and after 450 s what is left is not run.

cells.py says what is measured and in which order, ceilings.py and training.py measure, processes.py survives.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.cells import CPU, GPU
from benchmarks.gpu.processes import Worker, measure_all
from benchmarks.gpu.report import Report, count_by_status


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write the report; exit code 1 if a row is an error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0])
    groups = ",".join(GPU.groups)
    parser.add_argument("--only", metavar="GROUP", default=groups, help=f"some of {groups}, with commas")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="folder of the report")
    parser.add_argument("--debug", action="store_true", help="at debug size on the CPU, to see that all of this runs")
    options = parser.parse_args(arguments)
    suite = CPU if options.debug else GPU
    only = options.only.split(",")
    if unknown := set(only) - set(suite.groups):
        parser.error(f"--only={','.join(sorted(unknown))} is no group; use some of {groups}")
    if suite.device_type == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here; use --debug to run the same at debug size on the CPU", file=sys.stderr)
        return 2
    report = Report(options.out, shlex.join(["python", "-m", "benchmarks.gpu", *arguments]), suite)
    worker = Worker(suite)
    try:
        for row in measure_all(suite.cells(only), worker.run, suite):
            report.add(row)
    finally:
        worker.close()
    report.draw()
    print(f"{count_by_status(report.rows)}; {report.path}.md")
    return 1 if any(row.status == "error" for row in report.rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
