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


def prepare_on_node(data: DataConfig, store: "dist.Store", *, timeout_s: float) -> Path:
    """The folder that `prepare_tokens` leaves; it is called by local rank 0 of each node alone.

    DataError on all ranks of the node, with the reason, if it fails there, and on those that wait longer for it than
    `timeout_s`. Nodes that share a filesystem may each prepare the same.
    """
    key = f"tokens/{os.environ.get('GROUP_RANK', socket.gethostname())}"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return _prepare(data, store, key)
    return _hear(data, store, key, timeout_s)


def _prepare(data: DataConfig, store: "dist.Store", key: str) -> Path:
    """Prepare, and tell the others of this node however it ends."""
    try:
        folder = prepare_tokens(data)
    except BaseException as error:
        reason = str(error)
        if not isinstance(error, DtlayoutError):
            reason = f"local rank 0 could not prepare the tokens: {type(error).__name__} {error}"
        store.set(key, json.dumps({"error": reason}))
        raise
    store.set(key, json.dumps({"folder": str(folder.absolute())}))
    return folder


def _hear(data: DataConfig, store: "dist.Store", key: str, timeout_s: float) -> Path:
    """What local rank 0 of this node says."""
    import torch.distributed as dist

    try:
        store.wait([key], timedelta(seconds=timeout_s))
        answer = json.loads(store.get(key))
    except dist.DistError as error:
        raise DataError(
            f"local rank 0 of this node said nothing in {timeout_s:g} s about the tokens of "
            f"data.source={data.source!r} below data.folder={data.folder!r} ({str(error).splitlines()[0]}); "
            f"prepare them beforehand with dtlayout prepare, or raise train.timeout_s"
        ) from error
    if "error" in answer:
        raise DataError(answer["error"])
    return Path(answer["folder"])
