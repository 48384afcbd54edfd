"""Files are replaced whole or not at all, and what cannot be written is known before the work."""

from pathlib import Path

import pytest

from dtlayout.base.errors import DataError, InvalidConfig
from dtlayout.base.files import check_writable, expand, find_path_problem, parse_json, write_whole
from dtlayout.calibrate.measured import Measured
from dtlayout.data.chat import load_template
from dtlayout.models.stored import INDEX, find_weights
from dtlayout.report.rows import read_rows


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch):
    path = tmp_path / "summary.json"
    write_whole(path, "old")

    def fail(*_: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("dtlayout.base.files.os.replace", fail)
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
    monkeypatch.setattr(
        "dtlayout.base.files.os.access", lambda path, mode: path != tmp_path
    )  # as for root, so for others
    check_writable(file)
    with pytest.raises(InvalidConfig, match="Permission denied"):
        check_writable(tmp_path / "other")


@pytest.mark.parametrize("content", ["[" * 5000 + "]" * 5000, '{"a":' * 200 + "1" + "}" * 200, "[" * 5000])
def test_json_that_is_nested_too_deep_is_refused_by_each_who_reads_a_users_file(tmp_path: Path, content):
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        parse_json(content)
    assert parse_json("[" * 90 + "]" * 90)
    for name in (INDEX, "tokenizer_config.json", "rows.json", "measured.json"):
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidConfig, match="nested more than 100 deep"):
        find_weights(tmp_path)
    with pytest.raises(DataError, match="nested more than 100 deep"):
        load_template("", str(tmp_path))
    with pytest.raises(InvalidConfig, match="has no record of a run"):
        read_rows([tmp_path / "rows.json"])
    with pytest.raises(InvalidConfig, match="nested more than 100 deep"):
        Measured.read(tmp_path / "measured.json")


def test_a_path_is_one_that_a_disk_takes(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert expand("~/x") == expand(Path("~/x")) == Path("/home/me/x")
    assert (expand("~no-such-user/x"), expand("x~")) == (Path("~no-such-user/x"), Path("x~"))
    assert find_path_problem("é" * 127 + "/" + "a" * 255) == ""
    assert find_path_problem("é" * 128) == "has a name of 256 bytes, and no file's has more than 255"
    assert find_path_problem("a\0") == "must not hold a NUL"
    assert find_path_problem("\ud800") == "holds what no file's name can"
    with pytest.raises(InvalidConfig, match="is 4,096 bytes long, and no path has more than 4,095"):
        expand("a/" * 2048)
