"""Tokens on a node: local rank 0 prepares, the others read nothing and end as it does."""

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from dtlayout.config import DataConfig
from dtlayout.data import nodes
from dtlayout.data.nodes import prepare_on_node
from dtlayout.errors import DataError

DATA = DataConfig(source="x/y", folder="somewhere")


@pytest.fixture
def call(monkeypatch):
    """Calls it as a local rank of a node; `prepared` is what preparing gives or raises there."""

    def call_as(local_rank, store, prepared=None, node="0"):
        def prepare_tokens(data):
            assert data is DATA and prepared is not None, "only local rank 0 prepares"
            if isinstance(prepared, BaseException):
                raise prepared
            return prepared

        monkeypatch.setattr(nodes, "prepare_tokens", prepare_tokens)
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setenv("GROUP_RANK", node)
        return prepare_on_node(DATA, store)

    return call_as


def test_the_ranks_of_a_node_get_what_its_first_one_prepared(call, tmp_path, monkeypatch):
    store = dist.HashStore()
    monkeypatch.chdir(tmp_path)
    assert call(0, store, Path("tokens/a")) == tmp_path / "tokens" / "a"
    assert call(0, store, Path("/node1/b"), node="1") == Path("/node1/b")
    assert call(1, store) == call(7, store) == tmp_path / "tokens" / "a"
    assert call(1, store, node="1") == Path("/node1/b")


def test_without_torchrun_the_ranks_of_a_host_are_a_node(monkeypatch):
    monkeypatch.delenv("GROUP_RANK", raising=False)
    monkeypatch.setattr(nodes, "prepare_tokens", lambda data: Path("/tokens"))
    store = dist.HashStore()
    monkeypatch.setenv("LOCAL_RANK", "0")
    prepare_on_node(DATA, store)
    assert store.check([f"tokens/{socket.gethostname()}"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert prepare_on_node(DATA, store) == Path("/tokens")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DataError("the disk fell out"), "^the disk fell out$"),
        (MemoryError("no more"), "^local rank 0 could not prepare the tokens: MemoryError no more$"),
        (KeyboardInterrupt(), "could not prepare the tokens: KeyboardInterrupt"),
    ],
)
def test_all_ranks_of_a_node_end_with_the_reason_of_its_first(call, error, said):
    store = dist.HashStore()
    with pytest.raises(type(error)):
        call(0, store, error)
    with pytest.raises(DataError, match=said):
        call(1, store)


def test_all_nodes_wait_for_the_slowest_and_end_with_its_reason(call, monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setattr(nodes, "PATIENCE", timedelta(seconds=0.1))
    store = dist.HashStore()
    with pytest.raises(
        DataError, match=r"a node did not say where the tokens of data.source='x/y' lie .*dtlayout prepare"
    ):
        call(0, store, Path("/a"))
    with pytest.raises(DataError, match="full"):
        call(0, store, DataError("the disk is full"), node="1")
    with pytest.raises(DataError, match=r"^the disk is full$"):
        call(3, store)
    store = dist.HashStore()
    with pytest.raises(DataError, match="did not say"):
        call(0, store, Path("/b"), node="1")
    assert call(0, store, Path("/a")) == Path("/a") == call(1, store)
    assert call(1, store, node="1") == Path("/b")


def test_a_store_that_is_gone_is_no_hang(call):
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5))
    store = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=5))
    del server  # with the process of rank 0, where no torchrun serves it
    with pytest.raises(DataError, match="a node did not say where the tokens"):
        call(1, store)
