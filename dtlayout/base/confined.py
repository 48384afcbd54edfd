"""Confined: a thread that opens no file of this machine but its own ones, whatever a text tells it to read.

Files of users name other files: a tokenizer, a schedule, a model's folder. A command reads these, since its user wrote
the file. A page's text may come from anybody, so what answers a page runs confined. Python tells an audit hook of each
file before it opens it (PEP 578), whoever opens it; the hook cannot be taken away again.
"""

import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import shorten

_LIBRARIES = [path for name, path in sysconfig.get_paths().items() if name.endswith("lib")]
_LIBRARIES += [path for path in sys.path[1:] if os.path.isabs(path) and os.path.realpath(path) != os.path.realpath(".")]
_OWN_FOLDERS = tuple({os.path.realpath(each) for each in (str(Path(__file__).parents[1]), *_LIBRARIES)})
"""Folders of this package, of Python's library and of installed packages, whose code is loaded when it is needed; not
the one in which somebody works, nor that of the script."""
_STARTS_PROGRAMS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork", "socket.connect")
"""Audit events of a thread that starts a program or asks another host."""
_confined = threading.local()


@contextmanager
def confined(folder: str | Path) -> Iterator[None]:
    """Inside, this thread reads Python, this package and files of `folder`; InvalidConfig for anything else."""
    _install()
    _confined.folders = (str(Path(folder).resolve()), *_OWN_FOLDERS)
    try:
        yield
    finally:
        _confined.folders = None


@cache
def _install() -> None:
    """Put the hook in place, once in a process."""
    sys.addaudithook(_check)


def _check(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise InvalidConfig if a confined thread opens another file, or starts a program."""
    folders = getattr(_confined, "folders", None)
    if folders is None:
        return
    if event == "open":
        path = arguments[0]
        if isinstance(path, int) or path is None:
            return
        _confined.folders = None  # finding the real path must not ask again
        try:
            real = os.path.realpath(os.fsdecode(path))
        finally:
            _confined.folders = folders
        if not any(real == each or real.startswith(each + os.sep) for each in folders):
            named = shorten(repr(os.fsdecode(path)))
            raise InvalidConfig(f"{named} is a file of this machine, and a page reads none; ask in a terminal")
    elif event in _STARTS_PROGRAMS:
        raise InvalidConfig("a page starts no program; ask in a terminal")
