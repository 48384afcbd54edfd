"""Tokens on nodes: one prepares, who sees what it left takes it, and all end as the one that fails."""

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from node_ranks import prepare_as_one_of_two_nodes, write_tokens

from dtlayout.base.errors import DataError
from dtlayout.config.sections import DataConfig
from dtlayout.data import nodes
from dtlayout.data.nodes import prepare_on_node
from dtlayout.data.prepare import INFO_NAME

DATA = DataConfig(source="x/y", folder="somewhere")


@pytest.fixture
def call(monkeypatch):
    """Calls it as a local rank of a node; `prepared` is what preparing gives or raises there."""

    def call_as(local_rank, store, prepared=None, node="0"):
        def prepare_tokens(data):
            assert data is DATA and prepared is not None, "it should not prepare"
            if isinstance(prepared, BaseException):
                raise prepared
            return prepared

        monkeypatch.setattr(nodes, "prepare_tokens", prepare_tokens)
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setenv("RANK", str(8 * int(node) + local_rank))
        monkeypatch.setenv("GROUP_RANK", node)
        return prepare_on_node(DATA, store)

    return call_as


def test_the_ranks_of_a_node_get_what_its_first_one_prepared(call, tmp_path, monkeypatch):
    store = dist.HashStore()
    monkeypatch.chdir(tmp_path)
    here = write_tokens(tmp_path / "tokens" / "a")
    assert call(0, store, Path("tokens/a")) == here
    assert call(1, store) == call(7, store) == here


def test_a_node_takes_what_the_first_one_left_where_it_sees_it(call, tmp_path, monkeypatch):
    store = dist.HashStore()
    for name in ("shared", "own"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "shared")
    write_tokens(Path("tokens/a"))
    assert call(0, store, Path("tokens/a")) == call(0, store, node="1") == tmp_path / "shared" / "tokens" / "a"
    monkeypatch.chdir(tmp_path / "own")  # a disk of its own
    own = write_tokens(Path("tokens/b"))
    assert call(0, store, own, node="2") == call(3, store, node="2") == tmp_path / "own" / "tokens" / "b"
    write_tokens(Path("tokens/a"))  # from an earlier run
    assert call(0, store, node="3") == call(3, store, node="3") == tmp_path / "own" / "tokens" / "a"


def test_a_node_with_other_tokens_ends_all(call, tmp_path, monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    monkeypatch.setattr(nodes, "PATIENCE", timedelta(seconds=0.1))
    store = dist.HashStore()
    with pytest.raises(DataError, match="did not say"):
        call(0, store, write_tokens(tmp_path / "a"))
    write_tokens(tmp_path / "a", "other")  # the same name on a disk of its own
    said = r"'.*/a' on .* are not those of the first node: compare tokens.json; give all nodes the same files"
    with pytest.raises(DataError, match=said):
        call(0, store, tmp_path / "a", node="1")
    with pytest.raises(DataError, match=said):
        call(1, store)
    with pytest.raises(DataError, match=said):  # it need not prepare any more
        call(0, store, node="2")


def test_ranks_of_two_nodes_prepare_once_and_ask_for_two_answers_each(ranks4, tmp_path):
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30))
    results = ranks4.run(prepare_as_one_of_two_nodes, server.port, tmp_path / "tokens")
    folders, prepared, asked = zip(*results, strict=True)
    assert folders == (tmp_path / "tokens",) * 4
    assert (prepared, asked) == ((1, 0, 0, 0), (1, 2, 2, 2))


def test_without_torchrun_the_ranks_of_a_host_are_a_node(monkeypatch, tmp_path):
    monkeypatch.delenv("GROUP_RANK", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(nodes, "prepare_tokens", lambda data: write_tokens(tmp_path))
    store = dist.HashStore()
    monkeypatch.setenv("LOCAL_RANK", "0")
    prepare_on_node(DATA, store)
    assert store.check([f"tokens/node/{socket.gethostname()}"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert prepare_on_node(DATA, store) == tmp_path


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DataError("the disk fell out"), "^the disk fell out$"),
        (MemoryError("no more"), "^local rank 0 could not prepare the tokens: MemoryError no more$"),
        (KeyboardInterrupt(), "could not prepare the tokens: KeyboardInterrupt"),
    ],
)
def test_all_ranks_of_all_nodes_end_with_the_reason_of_the_first(call, error, said):
    store = dist.HashStore()
    with pytest.raises(type(error)):
        call(0, store, error)
    for local_rank, node in ((1, "0"), (0, "1"), (1, "1")):
        with pytest.raises(DataError, match=said):
            call(local_rank, store, node=node)


def test_all_nodes_wait_for_the_slowest_and_end_with_its_reason(call, monkeypatch, tmp_path):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setattr(nodes, "PATIENCE", timedelta(seconds=0.1))
    a, b = write_tokens(tmp_path / "a"), write_tokens(tmp_path / "b")
    store = dist.HashStore()
    missing = r"a node did not say where the tokens of data.source='x/y' lie .*dtlayout prepare"
    with pytest.raises(DataError, match=missing):
        call(0, store, b, node="1")
    with pytest.raises(DataError, match=missing):
        call(0, store := dist.HashStore(), a)
    (a / INFO_NAME).rename(a / "elsewhere")
    with pytest.raises(DataError, match="full"):
        call(0, store, DataError("the disk is full"), node="1")
    with pytest.raises(DataError, match=r"^the disk is full$"):
        call(3, store)
    (a / "elsewhere").rename(a / INFO_NAME)
    store = dist.HashStore()
    with pytest.raises(DataError, match="did not say"):
        call(0, store, a)
    assert call(0, store, node="1") == a == call(1, store, node="1") == call(1, store)


def test_a_store_that_is_gone_is_no_hang(call):
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5))
    store = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=5))
    del server  # with the process of rank 0, where no torchrun serves it
    with pytest.raises(DataError, match="a node did not say where the tokens"):
        call(1, store)
