"""Tokens on every node: its first process prepares them, the others hear from it where they lie, or why they don't.

So one process a node asks the filesystem for every source file and reads the tokenizer. What the others hear goes
through the store by which the ranks have found each other: it needs no lock, belongs to this start of the run alone,
and is there before any process group.
"""

import json
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from dtlayout.config import DataConfig
from dtlayout.data.prepare import prepare_tokens
from dtlayout.errors import DataError, DtlayoutError

if TYPE_CHECKING:
    import torch.distributed as dist


PATIENCE = timedelta(days=1)
"""How long others wait for tokens; a process that fails says so, and torchrun ends who waits for one that died."""


def prepare_on_node(data: DataConfig, store: "dist.Store", what: str = "tokens") -> Path:
    """The folder that `prepare_tokens` leaves; of all ranks, which call this, local rank 0 of each node prepares it.

    DataError on all ranks of all nodes, with the reason, if it fails on one. All wait for the slowest, so that none is
    alone in a process group. Nodes that share a filesystem may each prepare the same. However many nodes there are, a
    rank asks the store for two answers, by names that begin with `what`.
    """
    node, num_nodes = os.environ.get("GROUP_RANK", socket.gethostname()), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    own, everywhere = f"{what}/{node}", f"{what}/everywhere"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            store.set(own, json.dumps({"folder": str(prepare_tokens(data).absolute())}))
        except BaseException as error:
            reason = f"local rank 0 could not prepare the tokens: {type(error).__name__} {error}"
            for key in (own, everywhere):
                store.set(key, json.dumps({"error": str(error) if isinstance(error, DtlayoutError) else reason}))
            raise
        if store.add(f"{what}/ready", 1) == num_nodes:
            store.set(everywhere, "{}")
    if num_nodes > 1:
        _hear(data, store, everywhere)
    return Path(_hear(data, store, own)["folder"])


def _hear(data: DataConfig, store: "dist.Store", key: str) -> dict[str, str]:
    """An answer, once it is there; DataError if it is that something failed."""
    import torch.distributed as dist

    try:
        store.wait([key], PATIENCE)
        answer: dict[str, str] = json.loads(store.get(key))
    except dist.DistError as error:
        raise DataError(
            f"a node did not say where the tokens of data.source={data.source!r} lie "
            f"({str(error).splitlines()[0]}); prepare them beforehand with dtlayout prepare"
        ) from error
    if "error" in answer:
        raise DataError(answer["error"])
    return answer
