"""Check and measure one GPU, in calls that go on where the last one ended, the most valuable first.

    PYTHONPATH=. python -m benchmarks.gpu [--seconds S] [--only GROUP[,GROUP]] [--out FOLDER] [--resume FILE] [--debug]

Needs torch and numpy alone. With scipy and tomli_w it fits constants, with matplotlib it draws pictures, and --report
does both elsewhere, from the rows; train.py is checked where rich and tomli_w are. The trainer's own parts run, as a
world of one rank, since NCCL takes no two ranks on one GPU: bf16 compute, fp32 masters, fused AdamW. Out of memory is a
result, and a cell that fails is a row, which one more try may replace.

suites.py says what is measured and in which order; checks.py, bits.py, training.py, ceilings.py and calibration.py
measure; processes.py survives; report.py writes the page.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.cells import Cell
from benchmarks.gpu.processes import PATIENCE_S, Worker, find_open, measure_all
from benchmarks.gpu.report import Report, count_by_status
from benchmarks.gpu.rows import RowsFile
from benchmarks.gpu.suites import CPU, GPU, Suite
from dtlayout.measure.devices import ask_device_names

FINISH_S = 30
"""Kept for the end of a call, for constants and pictures."""


def main(arguments: Sequence[str]) -> int:
    """Measure what has no row yet, print and write the report; exit code 1 if a cell's last row is an error."""
    started = time.monotonic()
    options = parse(arguments)
    suite = CPU if options.debug else GPU
    options.out.mkdir(parents=True, exist_ok=True)
    file = RowsFile(options.out / f"bench_gpu-{suite.device_type}.jsonl")
    known = file.read() if file.path.exists() else []
    if options.resume:
        known += [row for row in RowsFile(options.resume).read() if row not in known]
    if options.report:
        if not known:
            print(f"{file.path} has no rows; measure some first", file=sys.stderr)
            return 2
        device, version = known[-1].device, known[-1].torch
    elif suite.device_type == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here; use --debug to run the same at debug size on the CPU", file=sys.stderr)
        return 2
    else:
        # Another process asks for the name, for one that has asked keeps some of the GPU's memory.
        device, version = (ask_device_names()[0] if suite.device_type == "cuda" else "cpu"), torch.__version__
    assert device is not None, "every row gets one"
    file.write(known)  # without a line that a kill has cut
    here = [row for row in known if (row.device, row.torch) == (device, version)]
    report = Report(options.out, device, version, suite, here)
    cells = suite.cells(options.only)
    if not options.report:
        _measure(cells, suite, file, report, deadline=started + options.seconds - FINISH_S)
    report.finish()
    num_open = len(find_open(cells, report.rows))
    print(f"{count_by_status(report.rows)}; {num_open} of {len(cells)} cells are still open; {report.path}.md")
    return 1 if any(row.status == "error" for row in report.latest) else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; a wrong one ends the program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0])
    groups = ",".join(GPU.groups)
    parser.add_argument("--seconds", type=float, default=540, metavar="S", help="what a call may take; 540 by default")
    parser.add_argument("--only", metavar="GROUP", default=groups, help=f"some of {groups}, with commas")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="folder of the rows and the report")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="rows that an earlier call left elsewhere")
    parser.add_argument("--report", action="store_true", help="measure nothing, and write the report of the rows")
    parser.add_argument("--debug", action="store_true", help="at debug size on the CPU, to see that all of this runs")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(GPU.groups):
        parser.error(f"--only={','.join(sorted(unknown))} is no group; use some of {groups}")
    if options.resume and not options.resume.is_file():
        parser.error(f"--resume={options.resume} is no file; leave it out to begin anew")
    return options


def _measure(cells: Sequence[Cell], suite: Suite, file: RowsFile, report: Report, deadline: float) -> None:
    """Add a row to the file and the report for each cell that is open, until the deadline or a signal."""
    worker = Worker(suite)
    try:
        for row in measure_all(cells, report.rows, worker.run, deadline):
            row = replace(row, device=report.device, torch=report.torch)
            file.append(row)
            report.add(row)
        worker.close(PATIENCE_S)
    finally:
        worker.close()
        report.write()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
