"""The rows that a report is made of: tables of measured runs, and what sweeps of our own have left."""

from collections.abc import Sequence
from pathlib import Path

from dtlayout.cluster import find_gpu
from dtlayout.config import load_config
from dtlayout.errors import InvalidConfig
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.planner.runs import Run, Status
from dtlayout.planner.tables import read_tables
from dtlayout.sweep.results import Journal, Outcome, TrialResult, keep_longest
from dtlayout.sweep.spec import trial_folder
from dtlayout.training.prediction import own_scenario

_STATUS: dict[Outcome, Status] = {
    "ok": "ok", "oom": "oom", "crashed": "error", "killed": "error", "hung": "error", "non_finite": "error",
}  # fmt: skip
"""What was tried; the rest says nothing of how it would have ended."""


def read_rows(paths: Sequence[Path], engine: str | None = None) -> list[Run]:
    """Rows of CSV tables (columns as in planner/runs.py) and folders of sweeps; InvalidConfig for what is neither.

    `engine` goes before what a table says; sweeps are all our own.
    """
    tables = [path for path in paths if not path.is_dir()]
    return [
        *read_tables(tables, engine),
        *(run for path in dict.fromkeys(paths) if path.is_dir() for run in _read_sweep(path)),
    ]


def _read_sweep(folder: Path) -> list[Run]:
    journal = Journal(folder)
    if not journal.path.exists():
        raise InvalidConfig(f"{folder} is no folder of a sweep: there is no trials.jsonl")
    tried = [result for result in journal.read().values() if result.outcome in _STATUS]
    return [_to_run(folder, result) for result in keep_longest(tried)]


def _to_run(folder: Path, result: TrialResult) -> Run:
    assert result.layout is not None and result.kernels is not None, "what was tried was possible"
    path = trial_folder(folder, result.key) / "config.toml"
    try:
        config = load_config(path)
    except InvalidConfig:  # the cluster's file may be gone since
        config = load_config(path, ["--cluster.file="])
    layout = Layout(**{**result.layout, "stage_layers": tuple(result.layout["stage_layers"])})
    if result.predicted is None:
        raise InvalidConfig(f"{folder} ran on a GPU type that is not known; set cluster.gpu in the sweep's config")
    known = config.cluster.known_gpu
    gpu = known if known and known.name == result.predicted.gpu else find_gpu(result.predicted.gpu)
    return Run(
        table=str(folder),
        row=result.key,
        scenario=own_scenario(config, layout.world_size, gpu),
        layout=layout,
        kernels=Kernels(**result.kernels),
        status=_STATUS[result.outcome],
        step_time_s=result.step_time_s,
        mfu=result.mfu,
        peak_bytes=result.peak_memory_bytes[0] if result.peak_memory_bytes else None,
    )
