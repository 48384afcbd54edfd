"""The one-GPU benchmark runs at debug size, and a failure of one cell is a row of its report."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import bench_gpu
from benchmarks.bench_gpu import Cell, Row, Settings

ROOT = Path(__file__).parents[1]
CELL = Cell(model="debug", seq_len=32, global_batch=16, micro_batch=1, recompute="none")
QUICK = Settings(device_type="cpu", num_steps=1)


def test_debug_size_runs_every_cell(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/bench_gpu.py", "--debug", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "bench_gpu-cpu.json").read_text())
    assert report["device"] == "cpu" and report["torch"] == torch.__version__
    rows = report["rows"]
    assert [(r["recompute"], r["micro_batch"]) for r in rows] == [
        (recompute, micro_batch) for recompute in ("none", "selective", "full") for micro_batch in (1, 2)
    ]
    for row in rows:
        assert row["status"] == "ok" and row["attention_kernels"] == ["flash"] and row["mfu"] is None, row
        assert row["tokens_per_s"] == pytest.approx(64 / row["step_time_s"])
        assert row["peak_memory_bytes"] > 0 and row["loss"] > 0
    table = [line for line in run.stdout.splitlines() if line.startswith("| debug")]
    assert len(table) == len(rows)
    assert "\n".join(table) in (tmp_path / "bench_gpu-cpu.md").read_text()


def test_recomputing_in_full_takes_less_memory_than_recomputing_nothing(ranks_of_one: None) -> None:
    device = bench_gpu.Device("cpu", "cpu", 1e12)
    longer = replace(CELL, seq_len=256, global_batch=2)
    none, full = (
        bench_gpu.measure(replace(longer, recompute=recompute), device=device, num_steps=1)
        for recompute in ("none", "full")
    )
    assert full.peak_memory_bytes < none.peak_memory_bytes
    assert none.mfu == pytest.approx(none.model_tflops_per_gpu)  # of a peak of 1 TFLOP/s


@pytest.fixture
def ranks_of_one() -> Iterator[None]:
    bench_gpu.join_ranks(bench_gpu.Device("cpu", "cpu", None), timeout_s=60)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied\nmore"), "error"),
    ],
)
def test_a_failure_is_a_result(error: Exception, status: str) -> None:
    def fail(cell: Cell) -> Row:
        raise error

    row = bench_gpu.attempt(CELL, fail)
    first_line = str(error).splitlines()[0]
    assert row == Row(cell=CELL, status=status, note=f"{type(error).__name__}: {first_line}")


def test_what_must_run_out_of_memory_is_not_run() -> None:
    cells = [
        replace(CELL, recompute=recompute, micro_batch=m) for recompute in ("none", "full") for m in (1, 2, 4, 8, 16)
    ]
    ran = []

    def run(cell: Cell) -> Row:
        ran.append((cell.recompute, cell.micro_batch))
        if cell.recompute == "none" and cell.micro_batch > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Row(cell=cell)

    def start(left: list[Cell]) -> Iterator[Row]:
        for cell in left:
            yield (row := bench_gpu.attempt(cell, run))
            if row.status != "ok":
                return

    rows = list(bench_gpu.measure_all(cells, start, limit_s=60))
    assert {row.cell for row in rows} == set(cells) and len(rows) == len(cells)
    # A single forward accumulates no gradients, so that 16 might fit where 2 does not.
    assert ran == [("none", 1), ("none", 2), ("none", 16), *(("full", m) for m in (1, 2, 4, 8, 16))]
    assert [row.cell.micro_batch for row in rows if row.status == "oom"] == [2, 4, 8, 16]
    assert "micro_batch=2" in bench_gpu.show(rows[2])


def test_nothing_starts_after_the_time_limit() -> None:
    [row] = bench_gpu.measure_all([CELL], lambda left: [], limit_s=0)
    assert (row.status, row.note) == ("not run", "0 s were over")


def test_a_process_that_says_nothing_is_an_error() -> None:
    [row] = bench_gpu.run_apart([CELL], replace(QUICK, cell_limit_s=0))
    assert (row.status, row.note) == ("error", "no result within 0 s")


class Deadly(Cell):
    """A cell that ends the process which receives it."""

    def __reduce__(self):  # type: ignore[override]
        return os._exit, (3,)


def test_a_process_that_dies_is_an_error() -> None:
    deadly = Deadly(model="debug", seq_len=32, global_batch=2, micro_batch=1, recompute="none")
    [row] = bench_gpu.run_apart([deadly], QUICK)
    assert (row.status, row.note) == ("error", "the process ended with exit code 3")


def test_an_error_makes_the_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_apart(cells: list[Cell], settings: Settings) -> list[Row]:
        return [Row(cell=cell, status="error", note="RuntimeError: a | b") for cell in cells]

    monkeypatch.setattr(bench_gpu, "run_apart", run_apart)
    assert bench_gpu.main(["--debug", "--out", str(tmp_path)]) == 1
    assert "error: RuntimeError: a / b" in (tmp_path / "bench_gpu-unknown-device.md").read_text()


def test_needs_torch_and_numpy_alone() -> None:
    others = ("pydantic", "rich", "datasets", "tokenizers", "safetensors", "filelock", "tomli_w")
    code = f"import sys; sys.modules.update(dict.fromkeys({others})); import benchmarks.bench_gpu"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
