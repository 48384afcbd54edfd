"""dtlayout refit: fit a cluster file to sweeps that ran with it, and keep how right their predictions were."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import check_writable
from dtlayout.base.formatting import find_version, plural
from dtlayout.calibrate.file import update
from dtlayout.commands.arguments import JsonDocument, show
from dtlayout.commands.validate import tell
from dtlayout.costmodel.engine import OWN_ENGINE, find_engine_on
from dtlayout.report.rows import read_rows
from dtlayout.spec.cluster import SweepRecord, load_cluster
from dtlayout.sweep.results import Journal, keep_longest
from dtlayout.validation.predict import fit_group, on_cluster, with_engines
from dtlayout.validation.scores import format_percent, score

EXAMPLE = "dtlayout refit sweeps/debug-4cpu --into lab.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sweeps and the cluster file."""
    parser.add_argument("sweeps", type=Path, nargs="+", metavar="SWEEP", help="folders of sweeps")
    parser.add_argument(
        "--into", type=Path, required=True, metavar="CLUSTER.toml", help="the cluster file that they ran with"
    )


def run(options: argparse.Namespace) -> int:
    """Put the fitted constants into the file; what was predicted before the sweeps ran goes on record."""
    from dtlayout.calibrate.fit import identifiable_constants  # only now: it imports scipy

    check_writable(options.into)
    if tables := [str(path) for path in options.sweeps if not path.is_dir()]:
        raise InvalidConfig(f"refit takes folders of sweeps, whose predictions are known; {', '.join(tables)} is none")
    cluster = load_cluster(options.into)
    if not cluster.gpu.achieved:
        raise InvalidConfig(f"{options.into} has no measured constants to fit; dtlayout calibrate writes such a file")
    runs = read_rows(options.sweeps).runs
    if strangers := {run.table for run in runs if run.scenario.cluster.gpu.name != cluster.gpu.name}:
        raise InvalidConfig(f"{', '.join(sorted(strangers))} ran on another GPU type than that of {options.into}")
    records = [record for folder in options.sweeps if (record := make_record(folder))]
    names = identifiable_constants([run.layout for run in runs], cluster.gpu.device_type)
    engine = replace(find_engine_on(OWN_ENGINE, cluster.gpu), fitted=names, shared=())
    fitted = fit_group(with_engines(on_cluster(runs, cluster), engine), tell)
    today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    update(options.into, fitted.engines[0], records, f"dtlayout refit, {today}, {plural(len(runs), 'run')}")
    before, after = fitted.before.median_ape, score(fitted.predictions).median_ape
    document = {"ok": True, "file": str(options.into), "records": list(map(asdict, records)),
                "median_error_before": before, "median_error_after": after}  # fmt: skip
    return show(options, document, _describe)


def _describe(document: JsonDocument) -> Iterator[str]:
    if not (records := document["records"]):
        yield "no record: these sweeps were not predicted with a calibrated file"
    yield from (str(SweepRecord(**record)) for record in records)
    before, after = (format_percent(document[f"median_error_{when}"]) for when in ("before", "after"))
    yield f"median error of speed {before} before the fit, {after} after, on the runs it saw"
    yield f"written: {document['file']}"


def make_record(folder: Path) -> SweepRecord | None:
    """The record of how far predictions of a sweep were right, as they stood before its trials ran.

    None if it was not predicted with a calibrated file, or nothing ran. All that ran there counts as one choice, so a
    folder should hold one model and batch.
    """
    pairs = [
        (run.predicted.step_time_s, run.step_time_s, run.scenario.cluster.gpu.name)
        for result in keep_longest(Journal(folder).read().values())
        if (run := result.run) and run.outcome == "ok" and run.step_time_s
        if run.predicted and run.predicted.calibrated and run.predicted.step_time_s
    ]
    if not pairs:
        return None
    best_s = min(measured_s for _, measured_s, _ in pairs)
    _, chosen_s, hardware = min(pairs)
    newest = datetime.fromtimestamp(Journal(folder).path.stat().st_mtime, timezone.utc)
    return SweepRecord(
        sweep=folder.resolve().name, date=f"{newest:%Y-%m-%d}", version=find_version("dtlayout"), hardware=hardware,
        runs=len(pairs),
        error=round(median(abs(predicted_s / measured_s - 1) for predicted_s, measured_s, _ in pairs), 4),
        regret=round(chosen_s / best_s - 1, 4),
    )  # fmt: skip
