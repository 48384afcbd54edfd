"""The rows that a report is made of: tables of measured runs, sweeps, and single runs, each known by its record alone.

| given | holds |
|---|---|
| a CSV file | a table (columns as in validation/columns.py) |
| a sweep's folder, or its trials.jsonl wherever it lies | a trial a line |
| a run's folder, its summary.json, or what `dtlayout dryrun --json` printed | one run |
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dtlayout.base.errors import DtlayoutError, InvalidConfig
from dtlayout.base.files import parse_json
from dtlayout.records.run import UNTRIED, Run
from dtlayout.sweep.results import keep_longest, read_results
from dtlayout.training.metrics import SUMMARY_NAME
from dtlayout.validation.tables import Unpredicted, read_tables

ROWS = "CSV tables, folders of sweeps or runs, a trials.jsonl, a summary.json, what dryrun --json printed"
"""Sources of rows that commands read, as their help says."""
REPEATS = "measured again: by the note the same layout as in another of these tables"
"""Reason to leave out a row that repeats another one at a later date."""
_MOST_REASONS = 5
"""Most reasons that are listed."""


@dataclass(frozen=True)
class ReportRows:
    """The rows of a report."""

    runs: list[Run]
    """Rows that say how their layout ended."""
    left_out: Counter[str]
    """Reason why other rows are left out → number of these rows."""
    unpredicted: list[Unpredicted] = field(default_factory=list)
    """Rows among those left out that cannot be predicted."""

    def describe_left_out(self) -> str:
        """A line on the rows that were left out; empty if there are none."""
        listed = self.left_out.most_common(_MOST_REASONS)
        rest = self.left_out.total() - sum(count for _, count in listed)
        reasons = [f"{count} {reason}" for reason, count in listed] + [f"{rest} for other reasons"] * (rest > 0)
        return f"left out: {'; '.join(reasons)}" if reasons else ""


def read_rows(paths: Sequence[Path], engine: str | None = None) -> ReportRows:
    """All rows of these paths; `engine` replaces that of tables, while sweeps and runs know theirs.

    DtlayoutError for what is none of these, and where no row is left, nor one that only cannot be predicted.
    """
    documents = {path: document for path in paths if (document := _find_document(path))}
    tables = read_tables([path for path in paths if path not in documents], engine)
    rows = ReportRows(tables.runs, Counter(" and ".join(row.reasons) for row in tables.unpredicted), tables.unpredicted)
    if tables.num_repeats:
        rows.left_out[REPEATS] = tables.num_repeats
    for path, document in documents.items():
        for run, reason in _read_sweep(document, path) if document.suffix == ".jsonl" else [_read_run(document)]:
            if run is None or run.outcome in UNTRIED:
                rows.left_out[reason] += 1
            elif not (gpu := run.scenario.cluster.gpu).is_known:
                rows.left_out[f"on a GPU type that is not known, {gpu.name}: set cluster.gpu in the config"] += 1
            else:
                rows.runs.append(run)
    if not rows.runs and not rows.unpredicted:
        why = [f"{', '.join(map(str, paths))} has no row that says how a layout ended", rows.describe_left_out()]
        raise InvalidConfig("; ".join(filter(None, why)))
    return rows


def _find_document(path: Path) -> Path | None:
    """The file with records that a path stands for; None for a table."""
    if not path.is_dir():
        return path if path.suffix in (".json", ".jsonl") else None
    for name in ("trials.jsonl", SUMMARY_NAME):
        if (path / name).exists():
            return path / name
    raise InvalidConfig(f"{path} is no folder of a sweep or a run: there is no trials.jsonl and no {SUMMARY_NAME}")


def _read_sweep(journal: Path, given: Path) -> list[tuple[Run | None, str]]:
    """Each trial's run, None if the trial was not possible, and its outcome with the cause.

    Of the trials that were tried, the longest of each setting stays, and one that ended well is preferred. Untried ones
    follow.
    """
    found = read_results(journal).values()
    tried = keep_longest([result for result in found if result.outcome not in UNTRIED])
    rest = [result for result in found if result.outcome in UNTRIED]
    return [
        (result.run and replace(result.run, table=str(given)),
         "predicted not to fit" if result.outcome == "skipped" else f"{result.outcome}: {result.cause}")
        for result in (*tried, *rest)
    ]  # fmt: skip


def _read_run(path: Path) -> tuple[Run | None, str]:
    """The run of a document, or None with the reason."""
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
        run = document["run"]
        reason = f"{document['outcome']}: {'; '.join(document['problems'])}" if run is None else ""
        return run and Run.from_dict(run), reason.removesuffix(": ")
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise InvalidConfig(
            f"{path} has no record of a run; give a run's {SUMMARY_NAME}, or what dtlayout dryrun --json prints"
        ) from None
    except DtlayoutError as error:
        raise InvalidConfig(f"{path}: {error}") from None
