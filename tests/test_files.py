"""Files are replaced whole or not at all, and what cannot be written is known before the work."""

from pathlib import Path

import pytest

from dtlayout.errors import InvalidConfig
from dtlayout.files import check_writable, write_whole


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch):
    path = tmp_path / "summary.json"
    write_whole(path, "old")

    def fail(*_: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("dtlayout.files.os.replace", fail)
        with pytest.raises(OSError, match="killed"):
            write_whole(path, "new")
    assert path.read_text() == "old"
    write_whole(path, "newer")
    assert path.read_text() == "newer"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_refused_and_nothing_is(tmp_path: Path, monkeypatch):
    file = tmp_path / "file"
    check_writable(file)
    assert not file.exists()
    file.write_text("")
    check_writable(file)
    with pytest.raises(InvalidConfig, match="there is no folder"):
        check_writable(tmp_path / "none" / "file")
    with pytest.raises(InvalidConfig, match="it is a folder"):
        check_writable(tmp_path)
    monkeypatch.setattr("dtlayout.files.os.access", lambda path, mode: path != tmp_path)  # as for root, so for others
    check_writable(file)
    with pytest.raises(InvalidConfig, match="Permission denied"):
        check_writable(tmp_path / "other")
