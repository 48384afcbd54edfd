"""Record: what predictions of a sweep were worth, as they stood before its trials ran."""

from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from dtlayout.cluster import Record
from dtlayout.sweep.results import Journal, keep_longest


def make_record(folder: Path) -> Record | None:
    """The record of a sweep's folder; None if it was not predicted with a calibrated file, or nothing ran.

    All that ran there counts as one choice, so a folder should hold one model and batch.
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
    return Record(
        sweep=folder.resolve().name, date=f"{newest:%Y-%m-%d}", version=_find_version(), hardware=hardware,
        runs=len(pairs),
        error=round(median(abs(predicted_s / measured_s - 1) for predicted_s, measured_s, _ in pairs), 4),
        regret=round(chosen_s / best_s - 1, 4),
    )  # fmt: skip


def _find_version() -> str:
    try:
        return version("dtlayout")
    except PackageNotFoundError:
        return "a checkout"
