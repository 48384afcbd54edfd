"""Files that others read while they are written, or that minutes of work end in."""

import hashlib
import io
import os
from pathlib import Path

from dtlayout.errors import DtlayoutError, InvalidConfig

PAGE_MARK = "<!doctype html>"
"""What every page begins with."""
_HEAD_BYTES = 400


def expand(text: str) -> Path:
    """A path whose `~` is a home, where there is such a home."""
    return Path(os.path.expanduser(text))  # Path's own raises where there is none


def write(path: Path, text: str, what: str) -> None:
    """Write a file; DtlayoutError, with `what` it should be, if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DtlayoutError(f"{what} {path} cannot be written: {error.strerror}") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def hash_file(path: Path) -> str:
    """SHA-256 of what a file holds, in hexadecimal; OSError if it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def check_writable(path: Path) -> None:
    """InvalidConfig if no file can be written there; for those whose work before it takes long."""
    if not path.parent.is_dir():
        raise InvalidConfig(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise InvalidConfig(f"{path} cannot be written: it is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidConfig(f"{path} cannot be written: Permission denied")


def check_own(path: Path, mark: str, what: str) -> None:
    """InvalidConfig where something is there that is not `what`, which has a mark in its head."""
    try:
        with path.open("rb") if path.is_file() else io.BytesIO() as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise InvalidConfig(f"{path} is there already, and cannot be read: {error.strerror}") from None
    if head and mark.encode() not in head:
        raise InvalidConfig(f"{path} is there already, and is not {what}; name another file")


def check_page(path: Path) -> None:
    """InvalidConfig if no page can be written there, or something else would be lost."""
    check_writable(path)
    check_own(path, PAGE_MARK, "a page")
