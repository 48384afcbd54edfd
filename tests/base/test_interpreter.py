"""Pythons that are started import nothing from the working directory, where a stranger's ctypes.py may lie."""

import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import ROOT
from trap import list_caught, set_trap

from dtlayout.base.interpreter import elsewhere, run_code, run_module, torchrun
from dtlayout.measure.devices import ask_device_names
from dtlayout.sweep import processes
from dtlayout.sweep.spec import Sweep, to_environment

PACKAGES = "import ctypes, socket, json, numpy, rich; print('fine')"


@pytest.fixture
def caught(tmp_path, monkeypatch):
    """The working directory is a trap."""
    caught = set_trap(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return caught


def test_the_trap_catches_who_looks_there_first(caught):
    subprocess.run([sys.executable, "-c", "import ctypes"], check=False, capture_output=True)
    subprocess.run([sys.executable, "-m", "json.tool", "--help"], check=False, capture_output=True)
    assert list_caught(caught) == ["ctypes", "json"]


def test_modules_and_code_run_without_what_lies_there(caught, tmp_path):
    (tmp_path / "input.json").write_text("[1]")
    arguments = [str(tmp_path / "input.json"), str(tmp_path / "out put"), "--indent", "1"]
    subprocess.run(run_module("json.tool", *arguments), check=True)
    assert (tmp_path / "out put").read_text() == "[\n 1\n]\n"
    ended = subprocess.run(run_code(PACKAGES), capture_output=True, text=True, check=True)
    assert ended.stdout == "fine\n"
    ask_device_names.cache_clear()
    ask_device_names()
    with (tmp_path / "log").open("wb") as log:
        assert processes.run(run_code(PACKAGES), log, str(tmp_path), timeout_s=60) == 0
    subprocess.run(run_module("dtlayout.cli", "config"), stdout=subprocess.DEVNULL, check=True)
    assert list_caught(caught) == []


def test_servers_of_multiprocessing_start_elsewhere_and_their_workers_here(caught, tmp_path):
    code = """
import multiprocessing, os
from multiprocessing import forkserver
from dtlayout.base.interpreter import elsewhere

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    with elsewhere():
        forkserver.ensure_running()
    with context.Pool(1) as pool:
        print(pool.apply(os.getcwd))
"""
    (tmp_path / "program.py").write_text(code)
    ended = subprocess.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, check=True)
    assert ended.stdout == f"{tmp_path / 'here'}\n" and list_caught(caught) == []
    with pytest.raises(ZeroDivisionError), elsewhere():
        assert multiprocessing.current_process() and 1 / 0
    assert Path.cwd() == tmp_path / "here"


def test_torchrun_is_told_that_its_ranks_are_no_script():
    command = torchrun(["--standalone"], "dtlayout.launch", "a b.toml")
    assert command[-1] == "a b.toml" and command.count("--no-python") == 1 and "-m" not in command


@pytest.mark.parametrize(
    ("launch", "is_safe"),
    [
        ("", True),
        ("srun torchrun --nnodes 2 -m dtlayout.launch {config}", True),
        ("bash -c 'exec torchrun --nnodes 2 \\\n -m dtlayout.launch {config}'", True),
        ("torchrun train.py {config}", False),  # which may import what lies beside it
        ("{python} -m my_trainer {config}", False),
    ],
)
def test_trials_of_a_sweep_whose_launcher_names_our_module_are_safe_too(tmp_path, launch, is_safe):
    sweep = Sweep(path=tmp_path, config=tmp_path, world=2, axes={"layout.tp": [1]}, launch=launch)
    assert to_environment(sweep) == ({"PYTHONSAFEPATH": "1"} if is_safe else {})


def test_nothing_else_of_the_package_starts_a_python():
    """One module knows how; what a sweep's file calls {python}, and what it becomes, are not started by it."""
    for path in (ROOT / "dtlayout").rglob("*.py"):
        if path.name != "interpreter.py":
            source = path.read_text()
            assert "sys.executable" not in source or path.name == "spec.py", path
            assert not re.search(r"""["']-[mc]["']""", source), path
    for path in filter(Path.is_file, (ROOT / "scripts").rglob("*")):
        for line in path.read_text().splitlines() if not path.name.startswith("test_") else ():
            assert not re.search(r"python\}?\"? -m ", line.partition("# ")[0]), (path, line)
            if '" -c ' in line and "ython" in line:
                assert '"$run"' in line or '"$drop"' in line or "filter(None, sys.path)" in line, (path, line)
