"""What is seen of other processes, and ends that nothing can spoil once the work is done."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tomllib
from tiny import ROOT

from dtlayout.base import process
from dtlayout.base.process import find_birth, lives, name_process

ABORTS = """
import os, resource, sys

class Aborts:
    def __del__(self, abort=os.abort):
        abort()

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.aborts = Aborts()
"""
"""A sitecustomize: who takes the interpreter down dies of SIGABRT, as ranks do at times of collectives' threads."""


BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(ABORTS)
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_the_planted_end_aborts_who_leaves_in_pythons_way(tmp_path):
    assert run(tmp_path, "-c", "print('done')").returncode == -6


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
    [
        (["train.py", "--help"], 0, "usage: dtlayout train"),
        (["train.py", "configs/debug.toml", "--layout.tp=3"], 2, ""),
        (["-m", "dtlayout.launch", "--help"], 0, "usage: dtlayout train"),
        (["-m", "dtlayout.cli"], 0, "Which layout?"),
        (["-c", "from dtlayout.cli import run; run()"], 0, "Which layout?"),
    ],
)
def test_every_program_that_may_be_a_rank_ends_with_its_code_and_with_all_that_it_said(
    tmp_path, arguments, exit_code, said
):
    ended = run(tmp_path, *arguments)
    assert ended.returncode == exit_code, ended.stderr
    assert said in ended.stdout


def test_the_command_that_is_installed_ends_in_this_way():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"dtlayout": "dtlayout.cli:run"}


def test_every_module_that_is_a_program_leaves_in_the_same_way():
    """But one that becomes another program, and one that starts no collective."""
    sources = {path: path.read_text() for path in [*(ROOT / "dtlayout").rglob("*.py"), ROOT / "train.py"]}
    ends = {
        str(path.relative_to(ROOT)): text.partition('if __name__ == "__main__":')[2] for path, text in sources.items()
    }
    others = {"dtlayout/sweep/processes.py", "dtlayout/data/template_process.py"}
    found = {name: end for name, end in ends.items() if end and name not in others}
    starters = {"train.py", "dtlayout/launch.py", "dtlayout/cli.py", "dtlayout/__main__.py"}
    assert set(found) == starters | {"dtlayout/calibrate/ranks.py"}
    assert all("leave(main(" in end or end.strip() == "run()" for end in found.values())


def test_an_end_waits_for_threads_calls_what_asked_for_it_and_prints_what_is_buffered(tmp_path):
    code = """
import atexit, sys, threading, time
from dtlayout.base.process import leave
atexit.register(print, "called at the end")
threading.Thread(target=lambda: (time.sleep(0.3), print("a thread ended"))).start()
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
print("printed", end=" ")
leave(3)
"""
    ended = run(tmp_path, "-c", code)
    assert (ended.returncode, ended.stdout) == (3, "printed a thread ended\ncalled at the end\n"), ended.stderr


def test_an_end_is_the_same_where_nothing_can_be_printed(tmp_path):
    code = "import sys; from dtlayout.base.process import leave; print('x'); {} leave(0)"
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", code.format("")]
        ended = subprocess.run(command, cwd=ROOT, env=BUFFERED, stdout=full, timeout=60, check=False)
        assert ended.returncode == 0
    assert run(tmp_path, "-c", code.format("sys.stdout = None;")).returncode == 0


def test_a_command_whose_output_is_lost_has_failed():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "dtlayout.cli"]
        ended = subprocess.run(
            command, cwd=ROOT, env=BUFFERED, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert ended.returncode == 2
    assert "No space left on device" in ended.stderr and "Traceback" not in ended.stderr


def test_a_process_lives_if_it_is_the_one_that_began_then(monkeypatch):
    own = find_birth(os.getpid())
    assert lives(os.getpid(), own) is True
    assert lives(os.getpid(), "1") is False
    assert lives(10**30, "1") is False
    assert lives(os.getpid(), "") is None
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert lives(child.pid, "1") is False

    def forbid(*_):
        raise PermissionError

    monkeypatch.setattr(process, "_read", lambda pid: [])  # a /proc that shows one's own processes alone
    monkeypatch.setattr(process.os, "kill", forbid)
    assert lives(os.getpid(), own) is None


def test_a_process_has_one_name_and_every_other_one_another(tmp_path):
    names = set()
    thread = threading.Thread(target=lambda: names.add(name_process()))
    thread.start()
    thread.join()
    assert names == {name_process()}
    assert re.fullmatch(rf".+\.{os.getpid()}\.[0-9a-f]{{8}}", name_process())
    code = "from dtlayout.base.process import name_process; print(name_process())"
    other = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert other.strip() != name_process()
