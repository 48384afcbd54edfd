"""Files without a name as memory: they keep what is written to them, leave nothing, and are refused on a full disk."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtlayout.base.errors import DtlayoutError, InvalidConfig
from dtlayout.base.mapped_file import PAGE, MappedFile, find_free_bytes

KEY = "layout.offload_folder"
HOLDER = """
import sys
from dtlayout.base.mapped_file import MappedFile
file = MappedFile(sys.argv[1], 1 << 20, "key")
file.memory[:] = b"x" * (1 << 20)
print("written", flush=True)
sys.stdin.read()
"""


def count_resident(folder: Path) -> int:
    """Bytes in memory of this process's mappings of files without a name that lie in a folder."""
    with open("/proc/self/smaps", encoding="utf-8") as maps:
        lines = maps.read().splitlines()
    found, is_ours = 0, False
    for line in lines:
        if "-" in line.split()[0]:
            is_ours = str(folder) in line and line.endswith("(deleted)")
        elif is_ours and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_what_is_written_is_there_after_its_pages_were_dropped(tmp_path):
    file = MappedFile(str(tmp_path), 3 * PAGE + 5, KEY)
    assert bytes(file.memory[:4]) == b"\0" * 4
    file.memory[:4], file.memory[-4:] = b"head", b"tail"
    file.drop()  # not yet written: nothing is lost
    assert bytes(file.memory[:4]) == b"head"
    file.memory[PAGE : PAGE + 4] = b"next"
    assert count_resident(tmp_path) > 0
    file.write_out()
    assert count_resident(tmp_path) == 0
    file.fetch(PAGE)
    assert (bytes(file.memory[:4]), bytes(file.memory[PAGE : PAGE + 4]), bytes(file.memory[-4:])) == (
        b"head", b"next", b"tail",
    )  # fmt: skip
    assert not os.listdir(tmp_path)


def test_a_killed_process_leaves_nothing(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "written\n"
        assert not os.listdir(tmp_path)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not os.listdir(tmp_path)


def test_a_full_disk_is_refused_with_the_bytes_that_are_missing(tmp_path, monkeypatch):
    with pytest.raises(InvalidConfig, match=rf"{KEY}=.* has too little room .* bytes are missing; free them"):
        MappedFile(str(tmp_path), 2 * find_free_bytes(str(tmp_path), KEY), KEY)

    def fill_up(*_):  # another process has taken the room meanwhile
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fill_up)
    with pytest.raises(InvalidConfig, match="bytes are missing"):
        MappedFile(str(tmp_path), PAGE, KEY)
    assert not os.listdir(tmp_path)


def test_a_folder_that_is_not_there_and_a_disk_that_fails_are_named(tmp_path, monkeypatch):
    with pytest.raises(InvalidConfig, match="No such file or directory; name a folder on a local disk"):
        MappedFile(str(tmp_path / "none"), PAGE, KEY)
    file = MappedFile(str(tmp_path), PAGE, KEY)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(DtlayoutError, match="cannot be written: Input/output error"):
        file.write_out()
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(DtlayoutError, match="cannot be read: Input/output error"):
        file.fetch()
