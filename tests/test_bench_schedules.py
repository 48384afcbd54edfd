"""Schedules of one layout beside predictions: which rows belong together, and which number of microbatches fits."""

import csv
from pathlib import Path

import pytest

from benchmarks.schedules import fit_microbatches, measured_speeds, predict, predicted_speeds, read_groups, report

ROW = {
    "table": "made", "model": "deep", "hidden": "4096", "layers": "32", "heads": "32", "kv_heads": "8", "ffn": "14336",
    "vocab": "128256", "seq_len": "4096", "engine": "megatron", "gpu": "h100-80g-sxm", "gpus": "8",
    "gpus_per_node": "8", "dp": "2", "tp": "1", "pp": "4", "status": "ok", "virtual_stages": "1", "optimizer": "adamw",
}  # fmt: skip
SCHEDULES = {"zero-bubble": "1", "1f1b": "1", "interleaved": "2", "zbv": "2"}


def write(folder: Path, rows: list[dict[str, str]]) -> Path:
    path = folder / "table.csv"
    names = ["row", "schedule", "global_batch", "micro_batch", "recompute", "kernel", "zero", "tokens_per_s_gpu",
             "peak_memory_gb", *ROW]  # fmt: skip
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, names, restval="")
        table.writeheader()
        table.writerows(rows)
    return path


@pytest.mark.parametrize("m", [8, 24])
def test_the_number_of_microbatches_is_found_again(tmp_path: Path, m: int) -> None:
    rows = [
        ROW | {"row": name, "schedule": name, "virtual_stages": v, "tokens_per_s_gpu": "1"}
        for name, v in SCHEDULES.items()
    ]
    (group,) = read_groups([write(tmp_path, [*rows, ROW | {"row": "alone", "schedule": "1f1b", "tp": "2", "dp": "1"}])])
    assert group[0]["schedule"] == "1f1b" and len(group) == len(SCHEDULES)
    speeds = predicted_speeds([predict(cells, m) for cells in group])
    measured = [cells | {"tokens_per_s_gpu": 1000 * speed} for cells, speed in zip(group, speeds, strict=True)]
    assert measured_speeds(measured) == pytest.approx(speeds)
    assert fit_microbatches(measured) == m
    lines = list(report(measured))
    assert f"{m} microbatches of one sequence fit best" in lines[2]
    for line in lines[6:-1]:
        _, _, _, found, predicted, *_ = line.split("|")
        assert found == predicted


def test_a_batch_that_is_stated_is_not_fitted(tmp_path: Path) -> None:
    rows = [ROW | {"row": n, "schedule": n, "virtual_stages": v, "global_batch": "32"} for n, v in SCHEDULES.items()]
    (group,) = read_groups([write(tmp_path, rows)])
    assert fit_microbatches(group) is None
    assert predict(group[0], None) == predict(group[0] | {"global_batch": None}, 16)
