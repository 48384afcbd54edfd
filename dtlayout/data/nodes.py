"""Tokens on every node: prepared once; each node's first process looks whether they are there, else prepares them.

Rank 0 prepares. Then the first process of every other node looks for the folder that rank 0 left. On a filesystem that
the nodes share it is there, whole and with the same content. On a disk of its own it may be there from an earlier run.
Only a node that does not see it asks for the source's files and prepares too. The messages between nodes, and between
the ranks of a node, go through the store by which the ranks have found each other: it needs no lock, belongs to this
start of the run alone, and is there before any process group.
"""

import json
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from dtlayout.base.errors import DataError, DtlayoutError
from dtlayout.config.sections import DataConfig
from dtlayout.data.prepare import INFO_NAME, prepare_tokens

if TYPE_CHECKING:
    import torch.distributed as dist


PATIENCE = timedelta(days=1)
"""Time that others wait for tokens. A process that fails says so; torchrun ends those that wait for one that died."""


def prepare_on_node(
    data: DataConfig, store: "dist.Store", what: str = "tokens", finish: Callable[[Path], object] = lambda folder: None
) -> Path:
    """The folder of `prepare_tokens`, as this node sees it; all ranks call this, and rank 0 prepares.

    Local rank 0 of each node calls `finish` with the folder before the other ranks of the node go on.

    Local rank 0 of another node prepares only if it does not see the folder of rank 0. If preparing fails on a node, or
    gives other tokens there, all ranks of all nodes get a DataError with the reason. All wait for the slowest, so that
    none is alone in a process group. However many nodes there are, a rank asks the store for only two answers, by names
    that begin with `what`.
    """
    node, num_nodes = os.environ.get("GROUP_RANK", socket.gethostname()), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    first, own, everywhere = f"{what}/first", f"{what}/node/{node}", f"{what}/everywhere"
    if os.environ.get("LOCAL_RANK", "0") != "0":
        if num_nodes > 1:
            _hear(data, store, everywhere)
        return Path(_hear(data, store, own)["folder"])
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        folder = prepare_tokens(data) if is_first else _find_or_prepare(data, _hear(data, store, first))
        if is_first:
            store.set(first, json.dumps({"folder": str(folder), "info": _read_info(folder)}))
        finish(folder)
        store.set(own, json.dumps({"folder": str(folder.absolute())}))
    except BaseException as error:
        reason = f"local rank 0 could not prepare the tokens: {type(error).__name__} {error}"
        for key in (first, own, everywhere):
            store.set(key, json.dumps({"error": str(error) if isinstance(error, DtlayoutError) else reason}))
        raise
    if store.add(f"{what}/ready", 1) == num_nodes:
        store.set(everywhere, "{}")
    if num_nodes > 1:
        _hear(data, store, everywhere)
    return folder.absolute()


def _find_or_prepare(data: DataConfig, found: dict[str, str]) -> Path:
    """The folder of the first node if this node sees the same tokens there, else an own folder with the same tokens.

    Nobody looks for a folder before it is there: some network filesystems remember for a while that it was not.
    """
    if _read_info(folder := Path(found["folder"])) == found["info"]:  # an info is there only beside whole tokens
        return folder
    folder = prepare_tokens(data)
    if _read_info(folder) != found["info"]:
        raise DataError(
            f"the tokens of data.source={data.source!r} in {str(folder)!r} on {socket.gethostname()} are not those of "
            f"the first node: compare {INFO_NAME}; give all nodes the same files, or a data.folder that they share"
        )
    return folder


def _read_info(folder: Path) -> str:
    """Text of the info file in a folder of tokens, which includes their digest; empty if there is none."""
    try:
        return (folder / INFO_NAME).read_text(encoding="utf-8")
    except OSError:
        return ""


def _hear(data: DataConfig, store: "dist.Store", key: str) -> dict[str, str]:
    """The answer under `key` of the store, waited for up to `PATIENCE`.

    DataError if the answer holds an error, or if none comes in time.
    """
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
