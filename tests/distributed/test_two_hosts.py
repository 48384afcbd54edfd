"""Two hosts on one machine, by scripts/two_hosts.sh and as nodes of a cluster; they leave nothing. Needs root."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from launching import finish, launch, losses, read_summary, wait_for_steps
from slurm import Slurm
from tiny import write_tiny

from dtlayout.sweep import processes

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
    times_s = []
    for _ in range(6):  # the fastest is that of the link, whatever else the machine does
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        times_s.append(time.perf_counter() - started)
    return min(times_s)

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
    """Start ranks on two hosts and wait for their end; AssertionError if hosts of this call are left."""
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [str(SCRIPT), "-n", "2", "-r", "200mbit", "-p", sys.executable, "--"]
    command += [str(tmp_path / "ranks.py"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    before = hosts()  # another process of tests may have its own
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert hosts() <= before
    return ended


def hosts() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith("dtl-")}


@needs_hosts
def test_the_link_between_two_hosts_is_slower_than_those_inside(tmp_path):
    ended = start(tmp_path)
    assert ended.returncode == 0, ended.stderr
    words, ratio = ended.stdout.strip().split(": ")
    assert words == "local ranks 2 of 4" and float(ratio) > 4


@needs_hosts
def test_a_host_that_fails_ends_both_and_leaves_nothing(tmp_path):
    assert start(tmp_path, "fail").returncode == 1


def test_without_arguments_it_says_how_it_is_used():
    ended = subprocess.run([str(SCRIPT)], capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "scripts/two_hosts.sh [-n RANKS_OF_A_HOST]" in ended.stderr


NOTES_PREPARING = """
import os
from pathlib import Path
from dtlayout.data import nodes

prepare = nodes.prepare_tokens

def note(data):
    with Path(os.environ["PREPARED"]).open("a") as file:
        file.write(os.environ["GROUP_RANK"])
    return prepare(data)

nodes.prepare_tokens = note
"""
"""A plugin that notes which node prepares tokens."""


SLOW = """
import os
import time
from dtlayout.training.watchdog import Watchdog

begin = Watchdog.begin_step

def begin_step(watch, step):
    begin(watch, step)
    if os.environ["WORLD_SIZE"] == "2":
        time.sleep(1)

Watchdog.begin_step = begin_step
"""
"""A plugin: steps of both nodes take a second at least, so that a link can be cut within a run."""


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces, each with an interface `wire` to the other and the addresses 10.78.0.1 and 10.78.0.2."""
    names = [f"dtl-{os.getpid()}-{side}" for side in (0, 1)]
    first, second = names
    commands = [f"ip netns add {name}" for name in names]
    commands += [f"ip link add wire netns {first} type veth peer name wire netns {second}"]
    for side, name in enumerate(names):
        commands += [f"ip -n {name} addr add 10.78.0.{side + 1}/24 dev wire"]
        commands += [f"ip -n {name} link set {interface} up" for interface in ("lo", "wire")]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@needs_hosts
def test_two_nodes_of_a_job_train_one_run_on_tokens_that_one_prepared(namespaces, tmp_path):
    (tmp_path / "notes_preparing.py").write_text(NOTES_PREPARING)
    slurm = Slurm(tmp_path / "slurm", ["10.78.0.1", "10.78.0.2"], namespaces)
    run, corpus = tmp_path / "run", write_tiny(tmp_path).corpus
    slurm.environment["PYTHONPATH"] += f":{tmp_path}"
    environment = {"DTLAYOUT_PLUGINS": "notes_preparing", "PREPARED": str(tmp_path / "prepared")}
    small = ["--layout.pp=2", "--layout.tp=1", "--layout.micro_batch=1", "--batch.global_batch=2", "--batch.seq_len=64"]
    arguments = [
        *small,
        f"--data.source={corpus}",
        f"--data.folder={tmp_path / 'tokens'}",
        "--train.steps=3",
        "--optimizer.warmup_steps=1",
    ]
    exit_code = slurm.submit(
        "configs/debug.toml", *arguments, f"--train.run_folder={run}", "--checkpoint.save=false",
        GLOO_SOCKET_IFNAME="wire", **environment,
    )  # fmt: skip
    assert exit_code == 0, slurm.log.read_text()
    summary = read_summary(run)
    assert (summary["outcome"], summary["world_size"], summary["steps"]) == ("done", 2, 3) and len(losses(run)) == 3
    assert (tmp_path / "prepared").read_text() == "0" and slurm.num_requeued == 0
    assert json.loads(next(tmp_path.glob("tokens/*/tokens.json")).read_text())["num_tokens"] > 0
    assert processes.find(str(slurm.folder)) == []


@needs_hosts
def test_a_node_whose_link_is_cut_is_named_and_the_other_goes_on_alone_with_the_same_batches(namespaces, tmp_path):
    files, logs = write_tiny(tmp_path, steps=12, num_layers=1), [tmp_path / f"log{side}" for side in (0, 1)]
    (tmp_path / "slow.py").write_text(SLOW)
    environment = {
        "GLOO_SOCKET_IFNAME": "wire", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{tmp_path}",
        "DTLAYOUT_PLUGINS": "slow",
    }  # fmt: skip
    torchrun = f"{sys.executable} -m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 2"
    torchrun += " --rdzv-id mine --rdzv-backend c10d --rdzv-endpoint 10.78.0.1:29500"
    options = f"train.py {files.config} --checkpoint.every=1 --checkpoint.keep=1 --train.timeout_s=15"
    quick, agents = "last_call_timeout=20,keep_alive_interval=3", []  # a busy node may come late, and be silent for 9 s
    with ExitStack() as stack, mock.patch.dict(os.environ, environment):
        stack.callback(processes.end, str(tmp_path), grace_s=0.1)
        for side, name in enumerate(namespaces):
            own = f"--local-addr 10.78.0.{side + 1} --rdzv-conf is_host={1 - side},{quick}"
            command = f"ip netns exec {name} {torchrun} {own} {options}".split()
            agents.append(processes.start(command, stack.enter_context(logs[side].open("wb")), str(tmp_path)))
        wait_for_steps(agents[0], files.run, 3, logs[0])
        subprocess.run(["ip", "-n", namespaces[1], "link", "set", "wire", "down"], check=True)
        assert finish(agents[0], logs[0]) == 0, logs[0].read_text()
    text = logs[0].read_text()
    assert re.search(r"^rank 1 on \S+ is out of reach; last heard of in (step \d+, )?\w+", text, re.MULTILINE), text
    other = logs[1].read_text()
    cut = r"^the link of \S+, or that of the host of rank 0, is cut: nothing was heard of other nodes within 15 s; rank"
    assert re.search(cut, other, re.MULTILINE) and not re.search(r"^rank 1 on ", other, re.MULTILINE), other
    assert "resumed from" in text
    summary = read_summary(files.run)
    assert (summary["outcome"], summary["steps"], summary["world_size"]) == ("done", 12, 1)
    straight = tmp_path / "straight"
    assert launch(1, files.config, f"--train.run_folder={straight}", log=logs[0]) == 0
    assert losses(files.run) == pytest.approx(losses(straight), rel=1e-4)
