"""The one-GPU benchmark runs at debug size and goes on where it ended; what fails is a row of its report."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import bits, calibration, processes, report
from benchmarks.gpu.blocks import Blocks
from benchmarks.gpu.cells import (
    BASE,
    Calibration,
    Cell,
    Check,
    Copy,
    HostTime,
    Matmul,
    OperationCheck,
    RepeatCheck,
    ResumeCheck,
    StepCheck,
    TrainerCheck,
    Training,
)
from benchmarks.gpu.checks import find_other_kernels, largest_error
from benchmarks.gpu.predict import predict
from benchmarks.gpu.processes import MOST_TRIES, Worker, attempt, find_open, measure_all
from benchmarks.gpu.report import Report, summarise
from benchmarks.gpu.rows import Checked, HostTimes, Prediction, Reached, Row, RowsFile, Trained
from benchmarks.gpu.suites import CPU, GPU, Suite
from benchmarks.gpu.training import PRECISION, measure_training
from dtlayout.calibrate.measured import AttentionTime, MatmulTime, Measured, ProbeTime
from dtlayout.calibrate.probes import plan_probes
from dtlayout.models.counting import count_block_parameters, count_model_flops_per_token
from dtlayout.models.llama import Llama
from dtlayout.models.presets import find_preset
from dtlayout.ops.norm import fused_rms_norm
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import find_gpu, load_cluster
from dtlayout.spec.device import Device, describe_gpu
from dtlayout.spec.kernel_records import KernelRequest, NormKernel
from dtlayout.spec.kernel_table import KERNELS, find_kernel, kernels_replaced
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.precision import Precision
from dtlayout.training.rendezvous import join_ranks

ROOT = Path(__file__).parents[1]
CELL = Training(model="debug", seq_len=32, global_batch=16, micro_batch=1)
BLOCKS = replace(CELL, num_blocks=2, global_batch=2)
ONE_CELL = Suite(device_type="cpu", groups={"sweep": [CELL]})
ON_CPU = Device("cpu", "cpu", 1e12)
HOUR = 3600.0
WRONG = Checked(error=0.5, where="loss", limit=0.1)
HIDE = """
from importlib.machinery import PathFinder
hidden = ("rich", "datasets", "tokenizers", "safetensors", "tomli_w", "scipy", "matplotlib", "pandas", "pyarrow")
find = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *at: None if name.partition(".")[0] in hidden else find(name, *at))
"""


def start(folder: Path, *arguments: str, python_path: str = str(ROOT)) -> "subprocess.Popen[str]":
    """The program on the CPU, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--debug", "--out", str(folder), *arguments]
    environment = os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


def test_with_torch_and_numpy_alone_calls_go_on_where_the_last_one_ended(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE)  # in the processes that measure too
    path, first, second = os.pathsep.join([str(tmp_path), str(ROOT)]), tmp_path / "first", tmp_path / "second"
    rows_file = RowsFile(first / "bench_gpu-cpu.jsonl")
    out, err = (process := start(first, "--only", "memory,host", python_path=path)).communicate(timeout=300)
    assert process.returncode == 0 and "Traceback" not in err, out + err
    rows = rows_file.read()
    assert [row.cell for row in rows] == CPU.cells(["memory", "host"]) and {row.status for row in rows} == {"ok"}

    resumed = start(second, "--only", "memory,host,blocks,ceilings", "--resume", str(rows_file.path), python_path=path)
    out, err = resumed.communicate(timeout=300)
    assert resumed.returncode == 0 and "Traceback" not in err, out + err
    found = RowsFile(second / "bench_gpu-cpu.jsonl").read()
    wanted = CPU.cells(["memory", "host", "blocks", "ceilings"])
    assert found[: len(rows)] == rows and [row.cell for row in found[len(rows) :]] == [
        cell for cell in wanted if cell not in CPU.cells(["memory", "host"])
    ]
    for row in found[len(rows) :]:
        if "sdpa-cudnn" in str(row.cell) or "fa3" in str(row.cell):
            assert row.status == "not run" and "runs on CUDA alone" in row.note
            continue
        assert row.status == "ok" and (row.device, row.torch) == ("cpu", torch.__version__)
        if isinstance(row.cell, Training):
            assert isinstance(row.measured, Trained) and row.predicted is not None
            assert row.measured.mfu is None and row.measured.attention_kernels == ("flash",)
            assert row.measured.tokens_per_s == pytest.approx(row.cell.batch.num_tokens / row.measured.step_time_s)
            assert (row.measured.loss is None) == (row.cell.num_blocks is not None)
            assert row.predicted.peak_bytes == pytest.approx(row.measured.peak_memory_bytes, rel=0.3)
        else:
            assert isinstance(row.measured, Reached) and row.measured.per_second > 0
    text = (second / "bench_gpu-cpu.md").read_text()
    assert all(report.show(row) in text for row in found)
    assert "Pictures: none, since matplotlib is not installed here." in text and not list(tmp_path.rglob("*.png"))
    assert f"0 of {len(wanted)} cells are still open" in out


def test_a_signal_ends_a_call_with_its_rows_and_its_page(tmp_path: Path) -> None:
    process = start(tmp_path, "--only", "kernels")
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]  # a header of two, and a row
    assert lines[2].endswith("ok |\n")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    rows = RowsFile(tmp_path / "bench_gpu-cpu.jsonl").read()
    assert report.show(rows[0]) + "\n" == lines[2] and lines[2] in (tmp_path / "bench_gpu-cpu.md").read_text()


def test_the_most_valuable_cells_come_first_and_none_twice() -> None:
    cells = GPU.cells(GPU.groups)
    assert [*GPU.groups] == [*report.TITLES] and next(iter(GPU.groups)) == "checks"
    assert [*CPU.groups] == [name for name in GPU.groups if name != "experts"], "no mixture is of debug size"
    assert str(GPU.groups["blocks"][0]) == "llama3.1-8b, 8 blocks, sequence 4096, 1 rank mb1 zero1, base"
    assert len(set(cells)) == len(cells) and set(cells) == {cell for group in GPU.groups.values() for cell in group}
    assert all(isinstance(cell, Training) and cell.num_blocks for cell in GPU.cells(["blocks"]))
    assert all(isinstance(cell, get_args(Check)) for cell in GPU.cells(["checks"]))
    kernels = {cell.kernels.attention for cell in GPU.groups["checks"] if isinstance(cell, StepCheck)}
    assert kernels == {name for name, kernel in KERNELS["attention"].items() if kernel.cuda}


def test_every_cell_of_the_gpu_is_legal_and_those_without_scores_are_predicted_to_fit() -> None:
    smaller, larger = find_gpu("h100-80g-sxm"), find_gpu("h200-141g-sxm")
    for cell in GPU.cells(["memory", "blocks", "models", "kernels"]):
        assert isinstance(cell, Training)
        cell.kernels.check(KernelRequest(device=Device("cuda"), compute=PRECISION.compute))
        cell.layout.check(cell.shape, cell.batch)
        if cell.kernels.attention != "sdpa-math":
            predicted = predict(cell, larger if cell.model == "llama2-7b" else smaller)
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


def measure(cell: Cell) -> Row:
    """The row of a cell in this process."""
    return attempt(cell, lambda cell: processes.measure(cell, ON_CPU, num_steps=1, predicted=None))


@pytest.mark.thorough  # one of each kind runs in the calls above, and kernels have tests of their own
def test_steps_operations_and_bits_are_right_here(ranks_of_one: None) -> None:
    operations = [cell for cell in CPU.groups["checks"] if isinstance(cell, OperationCheck)]
    assert {cell.operation for cell in operations} == set(KERNELS)
    step = StepCheck(documents=True)
    steps = [step, StepCheck(compute="float32", recompute="full"), StepCheck(model="qwen3"), StepCheck(model="tied")]
    for cell in (*operations, *steps, RepeatCheck(step=step), ResumeCheck(step=step)):
        row = measure(cell)
        assert row.status == "ok" and isinstance(row.measured, Checked), (str(cell), row.note)
        if isinstance(cell, StepCheck):
            assert row.measured.ran == ("attention flash", "norm fused", "swiglu eager")
            assert 0 < row.measured.error <= row.measured.limit / 3


def test_what_is_wrong_is_seen(ranks_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = find_kernel(NormKernel, "fused")
    with kernels_replaced(replace(fused, function=lambda x, weight, eps: fused_rms_norm(x, weight, eps) * 1.1)):
        step, operation = measure(StepCheck()), measure(OperationCheck(operation="norm", kernel="fused"))
    assert step.status == operation.status == "error"
    assert "is off by" in step.note and operation.note.endswith(" is off by 0.1, more than 0.04")
    with kernels_replaced(replace(fused, function=lambda x, weight, eps: x * weight)):
        assert "; norm=fused, but none with a name ran" in measure(StepCheck()).note
    numbers = iter(range(100))
    with kernels_replaced(replace(fused, function=lambda x, weight, eps: x * weight * (1 + 1e-2 * next(numbers)))):
        row = measure(RepeatCheck(step=StepCheck()))
    assert row.status == "error" and "; other bits in " in row.note
    assert isinstance(row.measured, Checked) and row.measured.error > 0


def test_kernels_that_the_profile_does_not_show_are_named() -> None:
    shown = {"attention": ["flash"], "norm": ["fused"], "swiglu": ["eager"]}
    find = partial(find_other_kernels, has_experts=False)
    assert find(BASE, shown) == ""
    assert find(replace(BASE, compile="blocks"), {"attention": ["flash"]}) == ""
    assert find(BASE, shown | {"attention": ["math"]}) == "attention=sdpa-flash, but math ran"
    assert find(replace(BASE, norm="eager"), shown) == "norm=eager, but fused ran"
    assert find(Kernels(attention="fa3"), shown) == "attention=fa3, but flash ran"
    mixture = replace(BASE, experts="grouped")
    assert find_other_kernels(mixture, shown, has_experts=True) == "experts=grouped, but none with a name ran"


def test_what_is_not_finite_is_infinitely_wrong() -> None:
    nan, one = torch.tensor([float("nan"), 1.0]), torch.ones(2)
    assert largest_error({"a": one, "b": nan}, {"a": one, "b": one}) == (float("inf"), "b")


def test_train_py_is_started_and_resumed() -> None:
    row = measure(TrainerCheck())
    assert row.status == "ok", row.note


def test_train_py_that_fails_is_an_error_and_without_rich_it_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("import sys; sys.exit('no GPU\\ntoday')")
    monkeypatch.setattr(bits, "ROOT", tmp_path)
    row = measure(TrainerCheck())
    assert row.status == "error" and row.note.endswith("train.py ended with exit code 1: today")
    monkeypatch.setattr(bits, "find_spec", lambda name: None)
    row = measure(TrainerCheck())
    assert row.status == "not run" and "needs the package rich" in row.note


def test_a_kernel_that_gives_other_bits_is_not_asked_for_the_same() -> None:
    step = StepCheck(kernels=replace(BASE, attention="sdpa-cudnn"))
    on_cuda = Device("cuda", "a GPU")
    row = attempt(RepeatCheck(step=step), lambda cell: processes.measure(cell, on_cuda, 1, None))
    assert row.status == "not run" and "sdpa-cudnn gives other bits each time on CUDA" in row.note


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

    def run(cell: Cell, left_s: float) -> Row:
        assert isinstance(cell, Training)
        ran.append((cell.recompute, cell.micro_batch))
        return Row(cell=cell, status="oom" if cell.recompute == "none" and cell.micro_batch > 1 else "ok")

    rows = list(measure_all(cells, [], run, time.monotonic() + HOUR))
    assert [row.cell for row in rows] == cells
    # A single forward accumulates no gradients, so that 16 might fit where 2 does not.
    assert ran == [("none", 1), ("none", 2), ("none", 16), *(("full", m) for m in (1, 2, 4, 8, 16))]
    assert [row.cell.micro_batch for row in rows if row.status == "oom"] == [2, 4, 8, 16]  # type: ignore[union-attr]
    assert "micro_batch=2" in report.show(rows[2])
    ran.clear()
    more = list(measure_all(cells, rows[:2], run, time.monotonic() + HOUR))  # which a later call knows too
    assert more == rows[2:] and ("none", 4) not in ran


def test_errors_are_tried_once_more_after_what_was_never_tried() -> None:
    cells = [replace(CELL, micro_batch=m) for m in (1, 2, 4)]
    error, done = Row(cell=cells[0], status="error"), Row(cell=cells[1])
    assert find_open(cells, [error, done]) == [cells[2], cells[0]]
    assert find_open(cells, [error, done, error]) == [cells[2]] and MOST_TRIES == 2
    assert find_open(cells, [error, replace(error, status="ok")]) == [cells[1], cells[2]]


def test_nothing_starts_after_the_time_limit_nor_does_what_it_cuts_leave_a_row() -> None:
    assert not list(measure_all([CELL], [], Worker(ONE_CELL).run, time.monotonic()))
    worker = Worker(ONE_CELL)
    assert not list(measure_all([CELL], [], worker.run, time.monotonic() + 0.01))


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


def test_a_process_that_says_nothing_is_an_error() -> None:
    worker = Worker(replace(ONE_CELL, cell_limit_s=0))
    row = worker.run(CELL, HOUR)
    assert row is not None and (row.status, row.note) == ("error", "no result within 0 s")


class Deadly(Training):
    """A cell that ends the process which receives it."""

    def __reduce__(self):  # type: ignore[override]
        return os._exit, (3,)


def test_a_process_that_dies_is_an_error_and_the_next_one_goes_on() -> None:
    worker = Worker(ONE_CELL)
    row = worker.run(Deadly(**vars(CELL)), HOUR)
    assert row is not None and (row.status, row.note) == ("error", "the process ended with exit code 3")
    row = worker.run(Matmul(label="square", m=8, n=8, k=8), HOUR)
    assert row is not None and row.status == "ok" and isinstance(row.measured, Reached)
    worker.close()


def test_an_error_makes_the_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(worker: Worker, cell: Cell, left_s: float) -> Row:
        return Row(cell=cell, status="error", note="RuntimeError: a | b")

    monkeypatch.setattr(Worker, "run", run)
    assert program.main(["--debug", "--only", "sweep", "--out", str(tmp_path)]) == 1
    assert "error: RuntimeError: a / b" in (tmp_path / "bench_gpu-cpu.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--only", "sweep,kernel"], f"--only=kernel is no group; use some of {','.join(GPU.groups)}"),
        (["--resume", "nowhere.jsonl"], "--resume=nowhere.jsonl is no file; leave it out to begin anew"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(arguments)
    assert reason in capsys.readouterr().err


def test_without_a_gpu_or_without_rows_it_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main(["--out", str(tmp_path)]) == 2
    assert "use --debug to run the same" in capsys.readouterr().err
    assert program.main(["--out", str(tmp_path), "--report"]) == 2
    assert "bench_gpu-cuda.jsonl has no rows; measure some first" in capsys.readouterr().err


def make_trained(cell: Training, gpu_name: str) -> Row:
    """A row of the GPU that was a fifth slower than predicted."""
    gpu = find_gpu(gpu_name)
    predicted = predict(cell, gpu)
    step_time_s = 1.2 * predicted.step_time_s
    trained = Trained(
        first_step_s=1.0, step_time_s=step_time_s, slowest_step_s=step_time_s, tokens_per_s=1.0,
        model_tflops_per_gpu=1.0, mfu=0.5, peak_memory_bytes=1 << 30, attention_kernels=("flash",), loss=None,
    )  # fmt: skip
    return Row(cell=cell, measured=trained, predicted=predicted, peak_flops_per_s=gpu.peak_flops_per_s)


def make_measured() -> Measured:
    """What calibration could measure on an H100."""
    sizes = [(8192, n, k) for n, k in ((4096, 4096), (14336, 4096))]
    matmuls = [
        MatmulTime(m=m, n=n, k=k, format="bfloat16", seconds=t, alone_s=t)
        for m, n, k in sizes
        for t in [2 * (m + 64) * (n + 64) * (k + 64) / 700e12]
    ]
    attention = AttentionTime(
        kernel="sdpa-flash", batch=1, heads=32, seq_len=8192, head_dim=128, format="bfloat16",
        forward_s=1.4e-3, backward_s=3.4e-3,
    )  # fmt: skip
    probes = [
        ProbeTime(
            model=model, batch=Batch(global_batch=m, seq_len=seq_len), layout=layout, kernels=Kernels(),
            precision=Precision(), seconds=2e-3 + 1e-3 * model.num_layers * m,
        )
        for model, layout, seq_len, m in plan_probes(1, "cuda")
    ]  # fmt: skip
    return Measured(
        device="NVIDIA H100 80GB HBM3", gpu="h100-80g-sxm", torch="2.11.0", date="2026-11-22", num_ranks=1,
        ranks_per_node=1, memory_bytes=84_930_000_000, steal=0.0, stream_bytes_per_s=2.9e12, host_s=1e-3,
        host_alone_s=1e-3, matmuls=tuple(matmuls), attention=(attention,), collectives=(), probes=tuple(probes),
    )  # fmt: skip


def make_rows() -> list[Row]:
    """Rows of a GPU, some of each kind."""
    device = describe_gpu("NVIDIA H100 80GB HBM3", None, (9, 0))
    trainings = [cell for cell in GPU.cells(["blocks", "models"]) if isinstance(cell, Training)][:8]
    rows = [
        Row(cell=StepCheck(), measured=Checked(error=1e-3, where="loss", limit=0.1, ran=("attention flash",))),
        Row(cell=StepCheck(recompute="full"), status="error", note=WRONG.wrong, measured=WRONG),
        Row(cell=HostTime(tp=8), measured=HostTimes(layer_s=4e-3)),
        Row(cell=Calibration(), measured=make_measured()),
        *(make_trained(cell, "h100-80g-sxm") for cell in trainings),
    ]
    return [replace(row, device=device.name, torch="2.11.0") for row in rows]


def test_rows_outlive_a_kill_and_another_version(tmp_path: Path) -> None:
    rows, file = make_rows(), RowsFile(tmp_path / "rows.jsonl")
    file.write(rows)
    assert file.read() == rows
    with file.path.open("a") as stream:
        stream.write(json.dumps(rows[0].flatten() | {"kind": "Gone"}) + "\n")
        stream.write(json.dumps(rows[0].flatten())[:50])
    assert file.read() == rows


def test_rows_from_elsewhere_become_a_page_with_constants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = make_rows()
    RowsFile(tmp_path / "rows.jsonl").write(rows)
    assert program.main(["--report", "--resume", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path)]) == 1
    path = tmp_path / "bench_gpu-nvidia-h100-80gb-hbm3.md"
    text = path.read_text()
    assert "- 1 of 2 checks are right; not: step of llama, bfloat16, base, recompute=full." in text
    assert "error: loss is off by 0.5, more than 0.1" in text
    assert "- llama3.1-8b, 8 blocks, sequence 4096: 50.0% MFU at best, " in text
    assert "| all | 8 | 16.7% | " in text
    assert Measured.read(path.with_name(f"{path.stem}-measured.json")) == make_measured()
    achieved = dict(load_cluster(path.with_suffix(".toml")).gpu.achieved)
    assert achieved["layer_host_tp_s"] == 4e-3 and achieved["matmul_efficiency"] == pytest.approx(700 / 989, rel=0.01)
    assert {path.name for path in tmp_path.glob("*.png")} == {f"{path.stem}-{name}.png" for name in report.PICTURES}


def test_constants_bring_predictions_nearer_to_what_was_measured() -> None:
    rows = make_rows()
    gpu = calibration.derive(make_measured(), rows).gpu
    for row in rows:
        if isinstance(row.cell, Training) and isinstance(row.measured, Trained):
            assert predict(row.cell, gpu).step_time_s == pytest.approx(row.measured.step_time_s, rel=0.1)


def test_a_fit_that_fails_costs_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("singular")

    monkeypatch.setattr(report, "derive", fail)
    page = Report(tmp_path, "NVIDIA H100 80GB HBM3", "2.11.0", GPU, make_rows())
    page.finish()
    assert "None could be fitted: ValueError." in page.path.with_name(f"{page.path.name}.md").read_text()
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    page.finish()
    text = page.path.with_name(f"{page.path.name}.md").read_text()
    assert "None are fitted without scipy and tomli_w; " in text and "Pictures: none" in text


def test_nothing_is_said_of_what_was_not_measured() -> None:
    assert list(summarise([Row(cell=CELL)])) == []


def test_the_report_ends_with_which_savings_paid(tmp_path: Path) -> None:
    factors = {1: 1.05, 4: 1.0, 8: 0.9}  # of other items one row is missing, or has failed
    rows = {}
    for each in GPU.savings:
        base = make_trained(each.without, "h100-80g-sxm")
        assert isinstance(base.measured, Trained)
        rows.setdefault(each.without, base)
        found = rows[each.without]
        assert isinstance(found.measured, Trained)
        if each.item in factors and each.with_it not in rows:
            faster = replace(found.measured, step_time_s=found.measured.step_time_s / factors[each.item])
            rows[each.with_it] = replace(make_trained(each.with_it, "h100-80g-sxm"), measured=faster)
    failed = next(each for each in GPU.savings if each.item == 7)
    rows[failed.with_it] = Row(cell=failed.with_it, status="error", note="RuntimeError: a | b")
    lines = [*report.describe_savings(GPU.savings, rows)]
    text = "\n".join(lines)
    assert re.search(r"\| 1 +\| matmuls add to the sum +\| 1\.050 +\| 1\.0\d\d +\| paid", text), text
    assert re.search(r"\| 8 +\| CUDA graphs +\| 0\.900 .*cost", text) and "error: RuntimeError: a / b" in text
    assert "moments in bf16" not in text, "it has no row yet"
    page = Report(tmp_path, "NVIDIA H100", "2.13.0", GPU, [*rows.values()])
    page.write()
    assert "## Which savings paid" in page.path.with_suffix(".md").read_text()


def test_a_pair_differs_in_its_saving_alone_and_stands_together() -> None:
    assert [each.item for each in GPU.savings] == [1, 4, 2, 3, 8, 7]
    for each in GPU.savings:
        one, other = vars(each.with_it), vars(each.without)
        assert len([name for name in one if one[name] != other[name]]) == 1, each.what
    assert list(GPU.groups)[:2] == ["checks", "savings"]
    one, other = (predict(cell, find_gpu("h100-80g-sxm")) for cell in (GPU.savings[0].with_it, GPU.savings[0].without))
    assert one.step_time_s < other.step_time_s
