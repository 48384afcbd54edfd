"""Ranks measure together, for real; the command fits what they found and says what is wrong with what it gets."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from machine import measure_machine
from tiny import ROOT
from trap import list_caught, set_trap

from dtlayout.base import toml
from dtlayout.base.interpreter import run_module
from dtlayout.base.mapped_file import PAGE, MappedFile
from dtlayout.calibrate import clock, disk, measures, probes, ranks
from dtlayout.calibrate.clock import ProcessorWatch, time_repeats
from dtlayout.calibrate.measured import Measured
from dtlayout.cli import main
from dtlayout.spec.cluster import load_cluster
from dtlayout.spec.device import Device
from dtlayout.sweep import processes


def test_two_ranks_measure_everything_and_their_file_becomes_a_cluster(tmp_path, capsys):
    path, lab, scratch = tmp_path / "measured.json", tmp_path / "lab.toml", tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*command, str(ROOT / "tests" / "support" / "calibrate_ranks.py"), str(path), str(scratch)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    measured = Measured.read(path)
    assert (measured.num_ranks, measured.ranks_per_node, measured.gpu, measured.device) == (2, 2, "cpu", "cpu")
    assert {t.format for t in measured.matmuls} == {"float32", "bfloat16"}
    assert {t.kind for t in measured.collectives} == {"all-reduce", "all-gather", "reduce-scatter", "message"}
    assert {(p.layout.tp, p.layout.pp) for p in measured.probes} >= {(1, 1), (2, 1)}
    times = [*measured.matmuls, *measured.collectives, *measured.probes]
    assert all(0 < each.seconds < 60 for each in times) and measured.contention >= 1 and 0 <= measured.steal <= 1

    assert main(["calibrate", "--measured", str(path), "--out", str(lab), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    cluster = load_cluster(lab)
    assert (cluster.num_gpus, cluster.gpus_per_node) == (2, 2)
    assert dict(cluster.gpu.achieved) == pytest.approx(told["achieved"], rel=1e-3, abs=1e-9)
    assert len(told["probe_errors"]) == len(measured.probes)
    assert measured.disk_folder == str(scratch) and not os.listdir(scratch)
    assert cluster.gpu.disk_bytes_per_s == pytest.approx(measured.disk_bytes_per_s, rel=1e-4)
    written = toml.read(lab, "cluster")["disk_bandwidth"]
    assert written["unit"] == "byte/s" and written["source"].endswith(f": an update of state in {scratch}")


def test_a_disk_is_as_fast_as_its_reads_one_after_another_and_the_last_write(one_rank, tmp_path, monkeypatch):
    """Each access takes 5 ms: eight units are read, and the last one is written when nothing is read any more."""
    moved, access_s = [], 0.005

    def wait(file: MappedFile, *_: int) -> None:
        time.sleep(access_s)
        moved.append(file.nbytes)

    monkeypatch.setattr(MappedFile, "fetch", wait)
    monkeypatch.setattr(MappedFile, "write_out", wait)
    monkeypatch.setattr(disk, "NODE_BYTES", 8 * PAGE)
    monkeypatch.setattr(disk, "time_together", lambda update, device_type: time_repeats(update, 1, device_type))
    speed = disk.measure_disk(str(tmp_path), "--offload-folder", "cpu", ranks_per_node=1)
    assert set(moved) == {PAGE} and speed <= 2 * 8 * PAGE / (9 * access_s)
    monkeypatch.setattr(disk, "NODE_BYTES", 4 * 8 * PAGE)
    assert disk.measure_disk(str(tmp_path), "--offload-folder", "cpu", ranks_per_node=4) <= 4 * 2 * 8 * PAGE / (
        9 * access_s
    )
    assert set(moved) == {PAGE}, "ranks of a node share what is moved"


@pytest.mark.parametrize(("capability", "name"), [((7, 0), "float16"), ((9, 0), "bfloat16"), ((), "bfloat16")])
def test_a_gpu_is_measured_in_the_format_of_16_bits_that_it_multiplies(monkeypatch, capability, name):
    """A CPU stands for it, and no time is taken."""
    device = Device("cuda", "a GPU", capability=capability)
    of_cpu = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, device, **options: of_cpu(*size, **options))
    monkeypatch.setattr(measures, "time_together", lambda work, device_type: work() is None or 1.0)
    monkeypatch.setattr(measures, "time_alone", lambda work, device_type: 1.0)
    monkeypatch.setitem(measures._TOKENS, "cuda", (8,))
    monkeypatch.setitem(measures._WIDTHS, "cuda", ((16, 16),))
    monkeypatch.setitem(measures._ATTENTION, "cuda", ((1, 2, 8, 16),))
    monkeypatch.setattr(probes, "_time_steps", lambda *arguments: [1.0])
    monkeypatch.setattr(probes.dist, "get_world_size", lambda: 1)
    (matmul,), attention = measures.measure_matmuls(device), [*measures.measure_attention(device)]
    assert matmul.format == name and attention and {each.format for each in attention} == {name}
    assert {probe.precision.compute for probe in probes.measure_probes(device)} == {name}


def test_the_command_says_what_it_found(tmp_path, capsys):
    measured, lab = tmp_path / "measured.json", tmp_path / "lab.toml"
    replace(measure_machine(), disk_bytes_per_s=2.5e9, disk_folder="/scratch").write(measured)
    assert main(["calibrate", "--measured", str(measured), "--out", str(lab)]) == 0
    text = capsys.readouterr().out
    assert re.search("^disk +2.5 GB/s in /scratch$", text, re.MULTILINE)
    assert "4 ranks on cpu, 4 a node" in text and "at once        2 ranks of a node at full speed" in text
    assert str(lab) in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--measured", "{old}", "--ranks", "2", "--out", "{lab}"], "--measured has its number of ranks"),
        (["--measured", "{old}", "--offload-folder", ".", "--out", "{lab}"], "--measured has its disk, if its ranks"),
        (["--offload-folder", "{none}", "--out", "{lab}"], "--offload-folder={none} cannot be used: No such file"),
        (["--ranks", "0", "--out", "{lab}"], "--ranks=0 must be at least 1"),
        (["--measured", "{none}", "--out", "{lab}"], "cannot be read: No such file"),
        (["--measured", "{old}", "--out", "{none}/lab.toml"], "there is no folder"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path, capsys, arguments, problem):
    measure_machine().write(tmp_path / "old.json")
    names = {"old": tmp_path / "old.json", "none": tmp_path / "none", "lab": tmp_path / "lab.toml"}
    assert main(["calibrate", *(text.format(**names) for text in arguments)]) == 2
    assert problem.format(**names) in capsys.readouterr().err and not (tmp_path / "lab.toml").exists()


def test_an_end_of_the_command_ends_its_ranks(tmp_path):
    caught = set_trap(tmp_path / "here")
    calibrate = subprocess.Popen(
        run_module("dtlayout.cli", "calibrate", "--ranks", "2", "--out", str(tmp_path / "lab.toml")),
        stderr=subprocess.PIPE, text=True, cwd=tmp_path / "here",
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert calibrate.stderr is not None and "measuring matmuls" in calibrate.stderr.readline()
    [mark] = [str(folder) for folder in tmp_path.iterdir() if processes.find(str(folder))]
    calibrate.send_signal(signal.SIGTERM)
    assert calibrate.wait(30) == 2
    assert processes.find(mark) == [] and not (tmp_path / "lab.toml").exists() and list_caught(caught) == []


def test_time_that_others_had_is_a_share(monkeypatch):
    ticks = iter([[100, 0, 50, 500, 20, 0, 0, 10], [160, 0, 80, 900, 30, 0, 0, 20]])
    monkeypatch.setattr("dtlayout.calibrate.clock._read_ticks", lambda: next(ticks))
    assert ProcessorWatch().steal() == 10 / 100  # 60 user, 30 system, 10 stolen; idle and waiting don't count


def test_on_cuda_times_are_from_an_idle_device_to_an_idle_device(cuda):
    seconds = time_repeats(lambda: cuda.note("action"), 2, "cuda")
    assert seconds > 0
    assert cuda.done == ["the host waits for all", "action", "action", "the host waits for all"]


def test_on_cuda_ranks_wait_for_each_other_with_their_own_gpu(cuda, monkeypatch):
    barrier = Mock()
    monkeypatch.setattr(clock.dist, "barrier", barrier)
    for device_type in ("cpu", "cuda"):
        clock._wait_for_all(device_type)
    assert [call.kwargs for call in barrier.call_args_list] == [{"device_ids": None}, {"device_ids": [0]}]


def test_a_gpus_memory_is_its_own_and_a_cpus_is_shared(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Mock(total_memory=80 << 30))
    monkeypatch.setattr(ranks, "find_host_bytes", lambda: 64 << 30)
    assert [ranks._find_memory_bytes(each, 4) >> 30 for each in ("cuda", "cpu")] == [80, 16]


def test_a_gpu_is_timed_in_the_format_that_it_computes_in():
    assert measures.list_formats(Device("cpu")) == ("float32", "bfloat16")
    assert measures.list_formats(Device("cuda", capability=(9, 0))) == ("bfloat16",)
    assert measures.list_formats(Device("cuda", capability=(7, 0))) == ("float16",)


def test_wide_models_are_probed_on_a_cpu_alone():
    on_gpu, on_cpu = ([model.hidden_size for model, *_ in probes.plan_probes(4, each)] for each in ("cuda", "cpu"))
    assert {*on_gpu} == {64} and {*on_cpu} > {64, 384} and on_cpu[: len(on_gpu)] == on_gpu
