"""Files without a name as memory: pages that are read when they are touched, and written when they are told to be.

[Note: nothing is left over]
A file here has no name from the moment it exists (O_TMPFILE; where a filesystem lacks that, its name is removed at
once). Its blocks are freed when the last process that has it open ends, however that ends. So a killed run leaves
nothing to be cleaned.

[Note: what counts as memory]
Pages of a mapped file belong to the kernel's cache. Clean ones are taken back whenever memory is short. A page that is
dropped here leaves both the process and that cache, if it is clean; a page that is not yet written stays in the cache.
So no order of calls loses data.
"""

import errno
import mmap
import os
import tempfile

from dtlayout.base.errors import DtlayoutError, InvalidConfig
from dtlayout.base.formatting import format_bytes

PAGE = mmap.PAGESIZE
_CHUNK = 4 << 20
"""Bytes that are read at a time."""


def find_free_bytes(folder: str, key: str) -> int:
    """Bytes that this user may still write to the filesystem of a folder; InvalidConfig if there is no such folder."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise InvalidConfig(f"{key}={folder} cannot be used: {error.strerror}; name a folder on a local disk") from None
    return found.f_bavail * found.f_frsize


def _no_room(folder: str, key: str, needed_bytes: int, missing_bytes: int) -> InvalidConfig:
    return InvalidConfig(
        f"{key}={folder} has too little room for {format_bytes(needed_bytes)} ({needed_bytes} bytes): "
        f"{missing_bytes} bytes are missing; free them, or name a folder on a larger disk"
    )


class MappedFile:
    """A file without a name, of a fixed size, that is mapped into memory and begins as zeros."""

    def __init__(self, folder: str, nbytes: int, key: str):
        """Reserve `nbytes`, above 0, on the disk of `folder`; InvalidConfig if it has no room for them.

        `key` names the folder in errors.
        """
        self.nbytes, self._folder, self._key = nbytes, folder, key
        if (free_bytes := find_free_bytes(folder, key)) < nbytes:  # reserving would fill the disk before it fails
            raise _no_room(folder, key, nbytes, nbytes - free_bytes)
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 — [Note: nothing is left over]
            os.posix_fallocate(self._file.fileno(), 0, nbytes)
            self.memory = mmap.mmap(self._file.fileno(), nbytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                missing = max(1, nbytes - find_free_bytes(folder, key))
                raise _no_room(folder, key, nbytes, missing) from None
            problem = f"{key}={folder} cannot be used: {error.strerror}"
            raise InvalidConfig(f"{problem}; name a folder on a local disk") from None

    def fetch(self, first: int = 0) -> None:
        """Read the bytes from `first` on into the kernel's cache, and wait until they are there."""
        chunk = memoryview(bytearray(min(_CHUNK, self.nbytes)))
        try:
            for offset in range(first, self.nbytes, _CHUNK):
                os.preadv(self._file.fileno(), [chunk], offset)
        except OSError as error:
            raise DtlayoutError(f"{self._key}={self._folder} cannot be read: {error.strerror}") from None

    def write_out(self) -> None:
        """Write what has changed to the disk, wait until it is there, and drop all pages."""
        try:
            os.fdatasync(self._file.fileno())
        except OSError as error:
            raise DtlayoutError(f"{self._key}={self._folder} cannot be written: {error.strerror}") from None
        self.drop()

    def drop(self) -> None:
        """Let the process and the kernel's cache go of all pages that are written; the next use reads them again."""
        self.memory.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
