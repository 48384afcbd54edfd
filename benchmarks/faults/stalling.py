"""A plug-in: leases that last seconds, and a run that stands still in its first save, or waits there for a sign.

FAULT_SIGNS is a folder. With FAULT_STALLS, `look` or `rename`, the process is one of another machine, and stops itself
before it does that to publish a checkpoint. With FAULT_WAITS it says that it saves, and goes on when it is told to.
"""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dtlayout.base import lease
from dtlayout.checkpoint import folder, sharded

_SIGNS, _STALLS = Path(os.environ["FAULT_SIGNS"]), os.environ.get("FAULT_STALLS", "")
lease.HEARTBEAT_S, lease.LOOKED_S, lease.EXPIRES_S = 0.5, 1.5, 5.0
_done: list[str] = []


def _stall(moment: str) -> None:
    if moment == _STALLS and not _done:
        _done.append(moment)
        os.kill(os.getpid(), signal.SIGSTOP)


def _replace(source: Path, target: Path) -> None:
    if Path(source).name.startswith("partial-"):
        _stall("rename")
    os.replace(source, target)


_publish, _write_manifest = folder.publish, sharded.write_manifest


def _publish_slowly(*arguments: Any) -> None:
    _stall("look")
    _publish(*arguments)


def _write_late(*arguments: Any) -> None:
    if not _done:
        _done.append("waited")
        (_SIGNS / "saving").touch()
        while not (_SIGNS / "go on").exists():
            time.sleep(0.05)
    _write_manifest(*arguments)


if _STALLS:
    lease._find_machine = lambda: "another boot"
    folder.os = SimpleNamespace(**{**vars(os), "replace": _replace})  # type: ignore[assignment]
    sharded.publish = _publish_slowly  # type: ignore[assignment]
elif os.environ.get("FAULT_WAITS"):
    sharded.write_manifest = _write_late  # type: ignore[assignment]
