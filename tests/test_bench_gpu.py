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

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import processes, report
from benchmarks.gpu.blocks import Blocks
from benchmarks.gpu.cells import CPU, GPU, Cell, Copy, Matmul, Suite, Training
from benchmarks.gpu.predict import predict
from benchmarks.gpu.processes import Worker, attempt, measure_all
from benchmarks.gpu.rows import Prediction, Reached, Row, Trained
from benchmarks.gpu.training import PRECISION, measure_training
from dtlayout.cluster import find_gpu
from dtlayout.device import Device
from dtlayout.models.counting import count_block_parameters, count_model_flops_per_token
from dtlayout.models.llama import Llama
from dtlayout.models.presets import find_preset
from dtlayout.training.devices import join_ranks

ROOT = Path(__file__).parents[1]
CELL = Training(model="debug", seq_len=32, global_batch=16, micro_batch=1)
BLOCKS = replace(CELL, num_blocks=2, global_batch=2)
ONE_CELL = Suite(device_type="cpu", groups={"sweep": [CELL]})
ON_CPU = Device("cpu", "cpu", 1e12)


def test_debug_size_runs_every_cell(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--debug", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    found = json.loads((tmp_path / "bench_gpu-cpu.json").read_text())
    assert found["device"] == "cpu" and found["torch"] == torch.__version__
    rows = found["rows"]
    assert [row["name"] for row in rows] == [str(cell) for cell in CPU.cells(CPU.groups)]
    for row in rows:
        if "sdpa-cudnn" in row["name"] or "sdpa-efficient" in row["name"]:
            assert row["status"] == "not run" and "runs on CUDA alone" in row["note"]
            continue
        assert row["status"] == "ok", row
        if row["kind"] == "Training":
            trained, cell = row["measured"], row["cell"]
            assert trained["mfu"] is None and trained["peak_memory_bytes"] > 0
            assert trained["tokens_per_s"] == pytest.approx(2 * cell["seq_len"] / trained["step_time_s"])
            assert trained["attention_kernels"] == ["math" if "sdpa-math" in row["name"] else "flash"]
            assert (trained["loss"] is None) == (cell["num_blocks"] is not None)
            assert row["predicted"]["peak_bytes"] == pytest.approx(trained["peak_memory_bytes"], rel=0.3)
        else:
            assert row["measured"]["per_second"] > 0
    text = (tmp_path / "bench_gpu-cpu.md").read_text()
    lines = [line for line in run.stdout.splitlines() if line.startswith("| ") and "result |" not in line]
    assert len(lines) == len(rows) and all(line in text for line in lines)
    assert {path.name for path in tmp_path.glob("*.png")} == {"bench_gpu-cpu-mfu.png", "bench_gpu-cpu-predicted.png"}


def test_the_most_valuable_cells_come_first_and_none_twice() -> None:
    cells = GPU.cells(GPU.groups)
    assert [str(cell) for cell in cells[:3]] == [
        "llama3.2-3b, sequence 4096, 1 rank mb2 zero1, best",
        "llama3.1-8b, 18 blocks, sequence 4096, 1 rank mb1 zero1, best",
        "llama3.1-8b, 8 blocks, sequence 8192, 1 rank mb1 zero1, best",
    ]
    assert len(set(cells)) == len(cells) and set(cells) == {cell for group in GPU.groups.values() for cell in group}
    assert GPU.cells(["sweep"])[0] == cells[0]
    assert all(isinstance(cell, Training) and cell.num_blocks for cell in GPU.cells(["blocks"]))


def test_every_cell_of_the_gpu_is_legal_and_the_best_kernels_are_predicted_to_fit() -> None:
    gpu = find_gpu("h200-141g-sxm")
    for cell in GPU.cells(["blocks", "kernels"]):
        assert isinstance(cell, Training)
        cell.kernels.check(PRECISION, Device("cuda"))
        cell.layout.check(cell.shape, cell.batch)
        if cell.variant == "best":
            predicted = predict(cell, gpu)
            assert predicted.peak_bytes < 0.95 * predicted.capacity_bytes, cell


def test_blocks_alone_are_credited_with_their_own_parameters() -> None:
    preset = find_preset("debug")
    whole = replace(BLOCKS, num_blocks=None)
    assert whole.flops_per_token == count_model_flops_per_token(preset, 32)
    assert BLOCKS.flops_per_token == 2 * (6 * count_block_parameters(preset) + 12 * preset.hidden_size * 32)


def test_a_matmul_and_a_copy_count_their_work() -> None:
    assert Matmul(label="square", m=2, n=3, k=5).work == 60
    assert Copy(num_bytes=8).work == 16


@pytest.fixture
def ranks_of_one() -> Iterator[None]:
    join_ranks(ON_CPU, timeout_s=60)
    yield
    torch.distributed.destroy_process_group()


def test_recomputing_in_full_takes_less_memory_than_recomputing_nothing(ranks_of_one: None) -> None:
    longer = replace(CELL, seq_len=256, global_batch=2)
    none, full = (
        measure_training(replace(longer, recompute=recompute), ON_CPU, num_steps=1) for recompute in ("none", "full")
    )
    assert full.peak_memory_bytes < none.peak_memory_bytes
    assert none.mfu == pytest.approx(none.model_tflops_per_gpu)  # of a peak of 1 TFLOP/s


def test_blocks_alone_begin_backward_with_the_gradient_that_is_given() -> None:
    blocks = Blocks(BLOCKS.shape, BLOCKS.kernels, BLOCKS.seq_len, layers=range(2), embedding=False, head=False)
    assert {name.split(".")[1] for name, _ in blocks.named_parameters()} == {"layers"}
    hidden, gradient = torch.randn(2, 2, BLOCKS.seq_len, BLOCKS.shape.hidden_size)
    blocks(hidden, targets=gradient).backward()
    found = [p.grad for p in blocks.parameters()]
    blocks.zero_grad()
    Llama.forward(blocks, hidden).backward(gradient)
    torch.testing.assert_close(found, [p.grad for p in blocks.parameters()])


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied\nmore"), "error"),
    ],
)
def test_a_failure_is_a_result(error: Exception, status: str) -> None:
    def fail(cell: Cell) -> Trained:
        raise error

    first_line = str(error).splitlines()[0]
    assert attempt(CELL, fail) == Row(cell=CELL, status=status, note=f"{type(error).__name__}: {first_line}")


def test_what_must_run_out_of_memory_is_not_run() -> None:
    cells = [
        replace(CELL, recompute=recompute, micro_batch=m) for recompute in ("none", "full") for m in (1, 2, 4, 8, 16)
    ]
    ran = []

    def run(cell: Cell, limit_s: float) -> Row:
        assert isinstance(cell, Training)
        ran.append((cell.recompute, cell.micro_batch))
        return Row(cell=cell, status="oom" if cell.recompute == "none" and cell.micro_batch > 1 else "ok")

    rows = list(measure_all(cells, run, ONE_CELL))
    assert [row.cell for row in rows] == cells
    # A single forward accumulates no gradients, so that 16 might fit where 2 does not.
    assert ran == [("none", 1), ("none", 2), ("none", 16), *(("full", m) for m in (1, 2, 4, 8, 16))]
    assert [row.cell.micro_batch for row in rows if row.status == "oom"] == [2, 4, 8, 16]  # type: ignore[union-attr]
    assert "micro_batch=2" in report.show(rows[2])


def test_what_is_far_too_large_by_prediction_is_not_tried() -> None:
    need = Prediction(step_time_s=1.0, peak_bytes=126 * 2**30, capacity_bytes=100 * 2**30)
    on_cuda = Device("cuda", "a GPU", 1e15)
    row = attempt(CELL, lambda cell: processes.measure(cell, on_cuda, 1, need))
    assert (row.status, row.note) == ("not run", "predicted to need 126 GiB of 100")


def test_a_kernel_that_the_cost_model_lacks_has_no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(cell: Training, gpu: object) -> Prediction:
        raise TypeError("unknown kernel")

    monkeypatch.setattr(processes, "predict", fail)
    assert processes.attempt_prediction(CELL, find_gpu("cpu")) == (None, "TypeError: unknown kernel")
    assert processes.attempt_prediction(CELL, None) == (None, "no numbers of this GPU are known")


def test_nothing_starts_after_the_time_limit() -> None:
    [row] = measure_all([CELL], Worker(ONE_CELL).run, replace(ONE_CELL, limit_s=0))
    assert (row.status, row.note) == ("not run", "0 s were over")


def test_a_process_that_says_nothing_is_an_error_unless_all_time_was_over() -> None:
    worker = Worker(replace(ONE_CELL, cell_limit_s=0))
    row = worker.run(CELL, 0)
    assert (row.status, row.note) == ("error", "no result within 0 s")
    worker = Worker(ONE_CELL)
    row = worker.run(CELL, 0)
    assert (row.status, row.note) == ("not run", "no result within 0 s")


class Deadly(Training):
    """A cell that ends the process which receives it."""

    def __reduce__(self):  # type: ignore[override]
        return os._exit, (3,)


def test_a_process_that_dies_is_an_error_and_the_next_one_goes_on() -> None:
    worker = Worker(ONE_CELL)
    row = worker.run(Deadly(**vars(CELL)), 60)
    assert (row.status, row.note) == ("error", "the process ended with exit code 3")
    row = worker.run(Matmul(label="square", m=8, n=8, k=8), 60)
    assert row.status == "ok" and isinstance(row.measured, Reached)
    worker.close()


def test_an_error_makes_the_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(worker: Worker, cell: Cell, limit_s: float) -> Row:
        return Row(cell=cell, status="error", note="RuntimeError: a | b")

    monkeypatch.setattr(Worker, "run", run)
    assert program.main(["--debug", "--only", "sweep", "--out", str(tmp_path)]) == 1
    assert "error: RuntimeError: a / b" in (tmp_path / "bench_gpu-unknown-device.md").read_text()


def test_an_unknown_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--only", "sweep,kernel"])
    assert "--only=kernel is no group; use some of ceilings,blocks,kernels,sweep" in capsys.readouterr().err


def test_needs_torch_and_numpy_alone() -> None:
    others = ("rich", "datasets", "tokenizers", "safetensors", "filelock", "tomli_w", "scipy", "matplotlib")
    code = f"import sys; sys.modules.update(dict.fromkeys({others})); import benchmarks.gpu.__main__"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_without_matplotlib_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    written = report.Report(tmp_path, "command", ONE_CELL)
    written.add(Row(cell=CELL, device="cpu"))
    written.draw()
    assert "Pictures: none, since matplotlib is not installed here." in (tmp_path / "bench_gpu-cpu.md").read_text()
    assert not list(tmp_path.glob("*.png"))
