"""Files of other programs: each is understood field by field; what is written for a job is read back as that job."""

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings

from dtlayout.base.errors import InvalidConfig
from dtlayout.config.loading import parse_config
from dtlayout.programs.files.trees import Tree, read_tree
from dtlayout.programs.program import Job
from dtlayout.programs.reading import read_program
from dtlayout.programs.shell.script import Unknown
from dtlayout.programs.understood import OtherFile, Understood
from dtlayout.spec.layout import Layout

ROUND_TRIPS = settings(
    max_examples=int(os.environ.get("ROUND_TRIPS", "100")), deadline=None, suppress_health_check=list(HealthCheck)
)
"""Random jobs that are written and read back, of each program; `make round-trips` takes 500."""
ODD = (None, "", "x", "none", "1e400", -1, 0, 1.5, float("nan"), 10**400, True, [], [1], ["a", None], {},
       Unknown("${oc.env:X}", "X", "nothing"))  # fmt: skip
"""Values that few options take."""
SECTIONS = ("model", "adapter", "batch", "layout", "precision", "kernels", "optimizer", "data")


def check_understood(
    path: Path, expected: Mapping[str, Any], given: Mapping[str, str] | None = None, num_gpus: int = 0
) -> Understood:
    """Fail unless a file says, in our words, exactly what is expected: gpus, told and each section; a job of ours."""
    found = read_program(path, given or {}, num_gpus)
    assert found is not None
    assert found.engine == expected.get("engine", found.engine)
    assert (found.num_gpus, found.gpus_per_node) == expected["gpus"] and found.told == expected.get("told", {})
    for section in SECTIONS:
        said = dict(found.tables.get(section, {}))
        if "hidden_size" in said:
            said.pop("name", None)  # sizes of its own, under any name
        assert said == expected.get(section, {}), section
    if found.tables.get("model"):
        parse_config({**found.tables, "train": {"steps": 1}})
    return found


def check_rows(found: Understood, options: Collection[str]) -> None:
    """Fail unless each option of a file has a row."""
    shown = {name for row in found.rows for name in row.option.replace(",", " ").split()}
    assert set(options) <= shown, set(options) - shown


def check_any_value(read: Callable[[OtherFile], Understood], path: Path) -> int:
    """Fail if a value of any option of a YAML file, or its lack, ends in anything but a job or an InvalidConfig; the
    number of files that were read."""
    tree = read_tree(path.read_text(encoding="utf-8"), {})
    assert tree is not None
    number = 0
    for name in tree.values:
        without = {other: value for other, value in tree.values.items() if other != name}
        for values in (without, *(without | {name: value} for value in ODD)):
            with suppress(InvalidConfig):
                read(OtherFile(path, "", Tree("", tree.language, values)))
            number += 1
    return number


def compare_job(job: Job, found: Understood, differ: Collection[str] = (), model: bool = True) -> None:
    """Fail unless a job was read back as it was; `differ` are fields of the layout, and sections, that its gaps name.

    `model=False` leaves out the model, where the program's file cannot say it.
    """
    tables = found.tables if model else {**found.tables, "model": {"name": job.model.name}}
    config = parse_config({**tables, "train": {"steps": 1}})
    layout, own = config.layout.resolve(found.num_gpus).effective, job.layout.effective
    assert config.batch == job.scenario.batch
    if model:
        shape = replace(config.model, name=job.model.name, rope_scaling=job.model.rope_scaling)
        if shape.experts and job.model.experts:  # where the model says none, the usual coefficient is written
            shape = replace(shape, experts=replace(shape.experts, balance_loss=job.model.experts.balance_loss))
        assert shape == job.model
    stages = layout.stage_layers or tuple(job.estimate.stage_layers)
    assert "stage_layers" in differ or stages == tuple(job.estimate.stage_layers)
    others = [each.name for each in fields(Layout) if each.name not in ("stage_layers", *differ)]
    wrong = {name: (getattr(layout, name), getattr(own, name)) for name in others}
    assert all(one == other for one, other in wrong.values()), {k: v for k, v in wrong.items() if v[0] != v[1]}
    assert "optimizer" in differ or config.optimizer == job.scenario.optimizer
    for name in ("params", "compute", "reduce", "matmuls"):
        if name not in differ:
            assert getattr(config.precision, name) == getattr(job.scenario.precision, name), name
