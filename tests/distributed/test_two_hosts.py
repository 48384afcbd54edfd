"""scripts/two_hosts.sh: two hosts with a slow link between them, which leave nothing behind. Needs root."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "two_hosts.sh"
RANKS = """
import os, sys, time
import torch
import torch.distributed as dist

if "fail" in sys.argv and os.environ["RANK"] == "3":
    sys.exit(3)  # the others wait for it
dist.init_process_group("gloo")
rank = dist.get_rank()
inside = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
tensor = torch.ones(500_000)

def time_all_reduce(group):
    dist.all_reduce(tensor, group=group)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(3):
        dist.all_reduce(tensor, group=group)
    return time.perf_counter() - started

near_s, far_s = time_all_reduce(inside), time_all_reduce(across)
if rank == 0:
    print(f"local ranks {os.environ['LOCAL_WORLD_SIZE']} of {dist.get_world_size()}: {far_s / near_s:.1f}")
dist.barrier()
"""


def _can_make_hosts() -> bool:
    """Whether this process may make network namespaces."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        return False
    name = f"try-{os.getpid()}"  # two processes of tests may ask at once
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made


needs_hosts = pytest.mark.skipif(not _can_make_hosts(), reason="network namespaces need root, ip and tc")


def start(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [str(SCRIPT), "-n", "2", "-r", "200mbit", "-p", sys.executable, "--"]
    command += [str(tmp_path / "ranks.py"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def hosts() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith("dtl-")]


@needs_hosts
def test_the_link_between_two_hosts_is_slower_than_those_inside(tmp_path):
    ended = start(tmp_path)
    assert ended.returncode == 0, ended.stderr
    words, ratio = ended.stdout.strip().split(": ")
    assert words == "local ranks 2 of 4" and float(ratio) > 4
    assert hosts() == []


@needs_hosts
def test_a_host_that_fails_ends_both_and_leaves_nothing(tmp_path):
    assert start(tmp_path, "fail").returncode == 1
    assert hosts() == []


def test_without_arguments_it_says_how_it_is_used():
    ended = subprocess.run([str(SCRIPT)], capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "scripts/two_hosts.sh [-n RANKS_OF_A_HOST]" in ended.stderr
