"""Whose fault it is that a run stands still, and what ranks of one node know of each other."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from waiting import wait_until

from dtlayout.base.errors import CheckpointError
from dtlayout.training import watchdog as module
from dtlayout.training.culprit import find_culprit
from dtlayout.training.links import Node
from dtlayout.training.progress import RankProgress, SharedStatus
from dtlayout.training.watchdog import Watchdog

WAITS = RankProgress(rank=0, step=17, doing="backward of stage 0, microbatch 1", age_s=61.0, state="running")


def node(host: str, *records: RankProgress, is_silent: bool = False) -> Node:
    return module._parse(module._to_json(Node(host=host, records=records)).encode(), is_silent=is_silent)


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [
        ("gone", "", "is gone: its process ended without a word, killed perhaps; it was in step 17, backward of stage"),
        ("failed", "ValueError: odd", "failed in step 17, backward of stage 0, microbatch 1: ValueError: odd"),
        ("refused", "tokens.bin is damaged", "ended in step 17, backward of stage 0, microbatch 1: tokens.bin is dama"),
        ("stopped", "", "is stopped by a signal, for 2 s, in step 17, backward of stage 0, microbatch 1"),
        ("cut off", "Connection reset", "lost a connection in step 17, backward of stage 0, microbatch 1: Connection"),
    ],
)
def test_a_rank_that_did_something_is_to_blame_before_those_that_wait(state, reason, said):
    other = replace(WAITS, rank=3, age_s=2.0, state=state, reason=reason)
    culprit, _, line = find_culprit(
        [node("a", WAITS, replace(WAITS, rank=1)), node("b", replace(WAITS, rank=2), other)]
    )
    assert culprit == 3
    assert line.startswith(f"rank 3 on b {said}")


def test_the_state_that_explains_the_others_is_the_one_to_blame():
    states = ["running", "cut off", "stopped", "refused", "failed", "gone"]
    ranks = [replace(WAITS, rank=i, state=state) for i, state in enumerate(states)]
    for number in range(len(states), 0, -1):
        assert find_culprit([node("a", *ranks[:number])])[0] == number - 1


def test_where_all_wait_the_one_that_stood_still_first_is_named():
    culprit, _, line = find_culprit(
        [node("a", WAITS, replace(WAITS, rank=1, doing="reading the next batch", age_s=62.5))]
    )
    assert (culprit, line) == (1, "rank 1 on a stood still first, for 62 s, in step 17, reading the next batch")


def test_a_rank_that_only_waits_is_named_after_one_that_stands_still_by_itself():
    """Ranks come out of a save at different times: the last one to begin a step may be the one that sticks there."""
    sum_up = replace(WAITS, rank=1, doing="counting its targets", age_s=62.0, waits=True)
    beginning = replace(WAITS, doing="beginning", age_s=61.5)
    assert find_culprit([node("a", beginning, sum_up)]).line == (
        "rank 0 on a stood still first, for 62 s, in step 17, beginning"
    )
    assert find_culprit([node("a", sum_up, replace(sum_up, rank=2, age_s=63.0))]).rank == 2


def test_a_node_of_which_nothing_is_heard_is_named_with_its_ranks():
    silent = node("b", *(replace(WAITS, rank=rank, step=0, doing="building the model") for rank in (4, 5, 6)),
                  is_silent=True)  # fmt: skip
    line = "rank 4 on b is out of reach, with 5, 6 of the same node; last heard of in building the model"
    assert find_culprit([node("a", replace(WAITS, state="cut off")), silent])[::2] == (4, line)
    assert find_culprit([]).line == "no rank is left"


@pytest.fixture
def board(tmp_path) -> Path:
    return tmp_path / "board"


def test_ranks_of_a_node_see_what_each_does_even_after_its_death(board):
    here = SharedStatus(board, 2, local_rank=0, rank=6)
    code = (
        "import sys; from pathlib import Path; from dtlayout.training.progress import SharedStatus; "
        f"b = SharedStatus(Path({str(board)!r}), 2, local_rank=1, rank=7); b.step = 12; b.write('forward'); "
        "print(b.claim(), flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "True\n"
        assert not here.claim()
        assert here.find_process(7) == child.pid
        for number, state in ((signal.SIGSTOP, "stopped"), (signal.SIGCONT, "running"), (signal.SIGKILL, "gone")):
            os.kill(child.pid, number)
            wait_until(lambda expected=state: here.read()[1].state == expected)
        own, other = here.read()
        assert (other.rank, other.where) == (7, "step 12, forward")
        assert (own.state, own.where) == ("running", "starting")
        assert here.claim()
    finally:
        child.kill()
        child.communicate()


def test_a_record_holds_as_much_as_there_is_room_and_a_rank_that_left_has_none(board):
    here = SharedStatus(board, 1, local_rank=0, rank=0)
    here.write("é" * 500)
    here.fail("failed", "long " * 500)
    assert here.read()[0].doing.startswith("é" * 40) and here.read()[0].reason.startswith("long long")
    here.leave()
    assert here.read() == [] and here.find_process(0) is None
    assert here.culprit is None
    here.culprit = 0
    assert here.culprit == 0


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """A watch of one rank, and the lines that were noted; ending is an exception."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    noted, ended = [], []
    monkeypatch.setattr(module, "POLL_S", 0.02)
    monkeypatch.setattr(module, "SETTLE_S", 0.02)
    monkeypatch.setattr(module.os, "_exit", lambda code: (ended.append(code), sys.exit()))
    watch = Watchdog(dist.HashStore(), 60.0, 0.2, note=lambda *said: noted.append(said), flight=tmp_path / "flight")
    yield watch, noted, ended
    watch._is_over.set()
    if watch._thread.ident is not None:  # or it would end this process, once `_exit` is the real one again
        watch._thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_that_gets_on_is_left_alone_and_one_that_does_not_is_ended_with_what_it_did(alone, capsys):
    watch, noted, ended = alone
    with watch:
        watch.begin_step(3)
        for _ in range(30):
            watch.at("reading a batch", is_long=True)
            time.sleep(0.02)
        assert not ended
        wait_until(lambda: ended)
    assert ended == [1]
    assert noted == [(capsys.readouterr().err.strip(), False)]
    assert noted[0][0].endswith("stood still first, for 0 s, in step 3, reading a batch")


def test_an_error_of_a_single_rank_is_noted_and_raised(alone):
    watch, noted, ended = alone
    with pytest.raises(ValueError, match="mine"), watch:
        watch.begin_step(4)
        raise ValueError("mine")
    assert not ended and len(noted) == 1
    assert noted[0][0].endswith("failed in step 4, beginning: ValueError: mine")


def test_a_refusal_is_raised_for_whoever_says_it(alone):
    watch, noted, ended = alone
    with pytest.raises(CheckpointError), watch:
        raise CheckpointError("damaged")
    assert not noted and not ended
    assert watch._status.read()[0].state == "refused"


def test_a_process_that_has_lost_its_folder_says_why_it_ends(alone):
    watch, _, _ = alone
    watch.begin_step(4)
    watch.note_refusal("RUN was taken over")
    (found,) = watch._status.read()
    assert find_culprit([node("a", found)]).line == "rank 0 on a ended in step 4, beginning: RUN was taken over"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_under_nccl_a_rank_that_ends_leaves_its_flight_record(alone, monkeypatch, tmp_path):
    watch, _, ended = alone
    monkeypatch.setattr(watch, "_is_alone", False)
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(module.torch._C._distributed_c10d, "_dump_nccl_trace", lambda: b"trace", raising=False)
    with pytest.raises(SystemExit), watch:
        raise RuntimeError("Connection closed by peer")
    assert ended == [1]
    assert (tmp_path / "flight" / "rank_0").read_bytes() == b"trace"


def test_over_gloo_there_is_no_flight_record(alone, monkeypatch, tmp_path):
    watch, _, _ = alone
    monkeypatch.setattr(watch, "_is_alone", False)
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "get_backend", lambda: "gloo")
    watch._write_flight_record()
    assert not (tmp_path / "flight").exists()


def test_a_rank_that_knows_its_host_but_of_no_node_waits_for_nobody(monkeypatch, tmp_path):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.5))
    Watchdog(store, 60.0, 0.2, note=print, flight=tmp_path / "flight")
