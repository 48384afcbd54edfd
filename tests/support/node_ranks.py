"""What the tests of tokens on nodes run on the pool's ranks."""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from dtlayout.config.sections import DataConfig
from dtlayout.data import nodes
from dtlayout.data.nodes import prepare_on_node
from dtlayout.data.prepare import INFO_NAME


def write_tokens(folder: Path, digest: str = "abc") -> Path:
    """A folder that says what its tokens are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INFO_NAME).write_text(json.dumps({"sha256": digest}))
    return folder


class CountingStore:
    """A store that notes how many answers are asked of it."""

    def __init__(self, store: dist.Store):
        self.store, self.num_asked = store, 0

    def get(self, key: str) -> bytes:
        self.num_asked += 1
        return self.store.get(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def prepare_as_one_of_two_nodes(port: int, folder: Path) -> tuple[Path, int, int]:
    """As one of two ranks of two nodes: where tokens are, how often it prepared them, and how often it asked."""
    rank = dist.get_rank()
    place = {"RANK": rank, "LOCAL_RANK": rank % 2, "GROUP_RANK": rank // 2, "GROUP_WORLD_SIZE": 2}
    store = CountingStore(dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30)))
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in place.items()}),
        mock.patch.object(nodes, "prepare_tokens", side_effect=lambda data: write_tokens(folder)) as prepare,
    ):
        found = prepare_on_node(DataConfig(), store)  # type: ignore[arg-type]
    return found, prepare.call_count, store.num_asked
