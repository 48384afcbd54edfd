"""Writing files whole, line by line or early refused, reading JSON and checking paths that users give."""

import hashlib
import io
import os
from pathlib import Path
from typing import Any

from dtlayout.base.errors import DtlayoutError, InvalidConfig
from dtlayout.base.formatting import shorten

PAGE_MARK = "<!doctype html>"
"""First words of every page that we write."""
_HEAD_BYTES = 400
_PATH_BYTES, _NAME_BYTES = 4095, 255
"""Longest path that Linux takes, and longest name in a path."""
_MOST_NESTED = 100
"""Deepest nesting of tables and lists in a file; Python's own limit depends on the depth of its call stack."""


def expand(text: str | os.PathLike[str]) -> Path:
    """A path whose `~` is replaced by that home, if there is one; InvalidConfig if it is too long or has a NUL."""
    path = os.path.expanduser(text)  # Path's own raises where there is no such home
    if problem := find_path_problem(path):
        raise InvalidConfig(f"{shorten(repr(path))} {problem}")
    return Path(path)


def find_cache() -> Path:
    """The user's folder for what can be made again: $XDG_CACHE_HOME/dtlayout, by default ~/.cache/dtlayout."""
    return expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dtlayout"


def find_path_problem(text: str) -> str:
    """Reason why a text cannot be a path on any disk; empty if it can."""
    if "\0" in text:
        return "must not hold a NUL"
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        return "holds what no file's name can"
    size, longest = len(encoded), max(map(len, encoded.split(b"/")))
    if longest > _NAME_BYTES:
        return f"has a name of {longest:,} bytes, and no file's has more than {_NAME_BYTES}"
    return f"is {size:,} bytes long, and no path has more than {_PATH_BYTES:,}" if size > _PATH_BYTES else ""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON document; ValueError if the text is none, or is nested too deep."""
    import json  # only now: most commands read no JSON

    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {_MOST_NESTED} deep") from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raise ValueError if tables and lists are nested too deep."""
    level = [value]
    for _ in range(_MOST_NESTED + 1):
        level = [
            entry
            for each in level
            if isinstance(each, dict | list)
            for entry in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {_MOST_NESTED} deep")


def find_inside(folder: Path, name: str, *others: Path) -> Path:
    """Path of a file of that name in a folder that somebody else made; the file need not exist.

    InvalidConfig if the name or a link leads out of the folder and out of the `others`, which count as inside. Two
    kinds of links in the folder may lead elsewhere, since people link the files of a model: a link to a file with the
    name of the link, and a link to a blob in the cache of the Hugging Face hub. A link to a file of another name is
    refused: that could be a key.
    """
    try:
        home, file = folder.resolve(), (folder / name).resolve()
        place = (folder / name).parent.resolve()
        blobs = [(parent.parent / "blobs").resolve() for parent in home.parents if parent.name == "snapshots"]
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, a loop of links
        raise InvalidConfig(f"{name!r} is no file of {folder}: {error}") from None
    is_blob = file.parent.name == "blobs" and file.parent.parent.name.startswith("models--")
    is_link = place.is_relative_to(home) and (is_blob or file.name == Path(name).name)
    if not (is_link or any(file.is_relative_to(root) for root in (home, *blobs, *others))):
        raise InvalidConfig(f"{name!r} leads out of {folder}, to {str(file)!r}; copy that file into the folder")
    return folder / name


def write(path: Path, text: str, what: str) -> None:
    """Write a file; DtlayoutError if that fails, with `what` as the file's kind."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DtlayoutError(f"{what} {path} cannot be written: {error.strerror}") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a kill leaves either the old file or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file; it is on disk when this returns. A line that a kill left unfinished is removed before."""
    text = path.read_bytes() if path.exists() else b""
    with path.open("r+b" if text else "wb") as file:
        file.seek(text.rfind(b"\n") + 1)
        file.truncate()
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[str]:
    """All lines of a file but one that a kill left unfinished."""
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal; OSError if it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def check_writable(path: Path) -> None:
    """Raise InvalidConfig if no file can be written there; for callers whose work before writing takes long."""
    if not path.parent.is_dir():
        raise InvalidConfig(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise InvalidConfig(f"{path} cannot be written: it is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidConfig(f"{path} cannot be written: Permission denied")


def check_own(path: Path, mark: str, what: str) -> None:
    """Raise InvalidConfig if a file is there that is not `what`, that is, has no `mark` in its first bytes."""
    try:
        with path.open("rb") if path.is_file() else io.BytesIO() as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise InvalidConfig(f"{path} is there already, and cannot be read: {error.strerror}") from None
    if head and mark.encode() not in head:
        raise InvalidConfig(f"{path} is there already, and is not {what}; name another file")


def check_page(path: Path) -> None:
    """Raise InvalidConfig if no page can be written there, or if a file that is no page would be lost."""
    check_writable(path)
    check_own(path, PAGE_MARK, "a page")
