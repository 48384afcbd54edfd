"""Everything that changes files, one operation after another, for who wants to count, fail or stop them.

What passes: opening to write, each write of a buffer, fsync, new folders, renames, links and removals, from any thread
of this process and through any library, as long as that goes through Python. What is read does not.
"""

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

Before = Callable[[str, Path], None]
"""Called with the operation and what it changes, for a rename the new name, before it is done; may raise."""


@contextmanager
def watched_disk(before: Before) -> Iterator[None]:
    """A block in which each operation is announced."""

    def announce(name: str, place: int) -> Callable[..., Any]:
        original = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            before(name, _find_path(arguments[place], options.get("dir_fd")))
            return original(*arguments, **options)

        return call

    def open_announced(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+"):
            return original_open(file, mode, *arguments, **options)
        path = _find_path(file)
        before("open", path)
        raw = _Raw(path, mode.replace("b", "").replace("t", ""), before)
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding=options.get("encoding") or "utf-8", newline=options.get("newline"))

    original_open = builtins.open
    with ExitStack() as patches:
        for name, place in _CHANGING.items():
            patches.enter_context(mock.patch.object(os, name, announce(name, place)))
        for module in (builtins, io):
            patches.enter_context(mock.patch.object(module, "open", open_announced))
        yield


_CHANGING = {"mkdir": 0, "rename": 1, "replace": 1, "symlink": 1, "unlink": 0, "remove": 0, "rmdir": 0, "fsync": 0}
"""Functions of os, and which of their arguments is what they change."""


class _Raw(io.FileIO):
    """A file below its buffer."""

    def __init__(self, path: Path, mode: str, before: Before):
        super().__init__(path, mode)
        self._path, self._before = path, before

    def write(self, data: Any) -> int:
        self._before("write", self._path)
        return super().write(data)


def _find_path(file: Any, folder: int | None = None) -> Path:
    """Of a path, of one below an open folder, or of an open file."""
    if isinstance(file, int):
        return Path(os.readlink(f"/proc/self/fd/{file}"))
    path = Path(os.fsdecode(file))
    return path if folder is None else Path(os.readlink(f"/proc/self/fd/{folder}")) / path
