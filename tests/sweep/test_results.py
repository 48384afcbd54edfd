"""What a log says of how a trial ended, and what its steps say of how fast it was."""

import json

import pytest

from dtlayout.spec.batch import Batch
from dtlayout.sweep.results import diagnose, measure

ROOT_CAUSE = """
traceback : Signal 15 (SIGTERM) received by PID 8
------------------------------------------------------------
Root Cause (first observed failure):
  exitcode  : {code} (pid: 7)
  traceback : {trace}
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
PEER = "[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:12\n"
SIGKILL = ROOT_CAUSE.format(code=-9, trace="Signal 9 (SIGKILL) received by PID 7")
SIGSEGV = ROOT_CAUSE.format(code=-11, trace="Signal 11 (SIGSEGV) received by PID 7")
SIGABRT = ROOT_CAUSE.format(code=-6, trace="Signal 6 (SIGABRT) received by PID 7")
FAILED = ROOT_CAUSE.format(code=1, trace="To enable traceback see: ...")


@pytest.mark.parametrize(
    ("log", "exit_code", "outcome", "cause"),
    [
        ("[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB" + FAILED, 1, "oom", "2 GiB"),
        ("torch.AcceleratorError: CUDA error: out of memory" + FAILED, 1, "oom", "AcceleratorError"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling" + FAILED, 1, "oom", "CUBLAS"),
        ("RuntimeError: cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling" + FAILED, 1, "oom", "CUSOLVER"),
        ("NCCL error\nncclUnhandledCudaError\nCuda failure 2 'out of memory'" + FAILED, 1, "oom", "Cuda failure 2"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0", 137, "oom", "oom_kill"),
        ("[rank2]: torch.OutOfMemoryError: CUDA out of memory", None, "oom", "OutOfMemory"),  # the others wait for it
        ("step 3", None, "hung", "no end within the time limit; 0 steps were done"),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)" + SIGABRT, 1, "hung", "SeqNum=3"),
        (PEER + SIGKILL, 1, "killed", "SIGKILL; 0 steps"),
        ("RuntimeError: Connection was likely closed. Broken pipe" + SIGKILL, 1, "killed", "SIGKILL"),
        ("", -9, "killed", "SIGKILL"),
        ("", 137, "killed", "SIGKILL"),
        (PEER + SIGSEGV, 1, "crashed", "SIGSEGV"),
        (PEER + "[rank0]: ValueError: heads" + FAILED, 1, "crashed", "ValueError: heads"),
        ("terminate called without an active exception" + SIGABRT, 1, "crashed", "terminate called without"),
        ("", 7, "crashed", "exit code 7"),
    ],
)
def test_a_log_tells_what_came_first(tmp_path, log, exit_code, outcome, cause):
    (tmp_path / "log.txt").write_text(log)
    found, why, tail = diagnose(tmp_path / "run", tmp_path / "log.txt", exit_code)
    assert (found, cause in why) == (outcome, True), why
    assert tail == log.splitlines()[-40:]


@pytest.mark.parametrize("exit_code", [0, 1, None])
def test_a_run_that_did_all_its_steps_is_ok_however_its_processes_end(tmp_path, exit_code):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text('{"outcome": "done"}')
    (tmp_path / "log.txt").write_text("terminate called without an active exception" + SIGABRT)
    assert diagnose(tmp_path / "run", tmp_path / "log.txt", exit_code) == ("ok", "", [])


def test_all_numbers_belong_to_the_median_step_that_neither_warms_up_nor_watches_memory(tmp_path):
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step_time_s, peak in ((9.0, None), (9.0, 5), (1.0, None), (1.0, None), (2.0, None), (2.0, None), (7.0, 5)):
            line = {"step_time_s": step_time_s, "peak_memory_bytes": peak, "mfu": 0.3 / step_time_s}
            file.write(json.dumps(line) + "\n")
    steps, found = measure(tmp_path, 2, Batch(global_batch=3, seq_len=10))
    assert (steps, found.step_time_s, found.mfu) == (7, 1.5, pytest.approx(0.2))
    assert found.tokens_per_s == pytest.approx(20)
    assert found.step_time_spread_s == pytest.approx(1.0)
    assert found.expert_imbalance is None


def test_how_full_the_fullest_rank_was_is_what_the_run_summed_up(tmp_path):
    line = {"step_time_s": 1.0, "peak_memory_bytes": None, "mfu": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "summary.json").write_text('{"outcome": "done", "expert_imbalance": 1.25, "peak_reserved_bytes": 9}')
    _, found = measure(tmp_path, 0, Batch(global_batch=1, seq_len=1))
    assert (found.expert_imbalance, found.peak_reserved_bytes) == (1.25, 9)
