"""Sources: every kind is read in order, every refusal says what would work."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dtlayout.base.errors import DataError
from dtlayout.data import sources
from dtlayout.data.readers import BadRow
from dtlayout.data.sources import STDLIB, find_shared_folder, list_files

pytestmark = pytest.mark.usefixtures("offline")


def open_corpus(source, split):
    files = list_files(source, split)
    return sources.open_corpus(source, files, split, folder=find_shared_folder(files) if files else Path())


def read_rows(source, split="train"):
    corpus = open_corpus(source, split)
    for unit in range(corpus.num_units):
        for row in corpus.read(unit):
            if isinstance(row, BadRow):
                raise DataError(corpus.describe_bad(unit, row))
            yield row


def read(source, text_field="text", split="train"):
    return [row[text_field] for row in read_rows(source, split)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "b.txt").write_text("second\n\nstill second\n")
    (tmp_path / "a.txt").write_text("first")
    assert read(str(tmp_path / "*.txt")) == ["first", "second\n\nstill second\n"]


def test_names_with_glob_characters_are_names(tmp_path):
    for name in ("a[1].txt", "a1.txt", "__a*.txt"):
        (tmp_path / name).write_text(name)
    assert read(str(tmp_path / "a[1].txt")) == ["a[1].txt"]
    assert read(str(tmp_path)) == ["__a*.txt", "a1.txt", "a[1].txt"]


def test_json_lines_give_a_document_a_line(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"body": "x", "n": 1}, {"body": "y", "n": 2}])
    assert read(path, text_field="body") == ["x", "y"]


def test_a_json_array_gives_a_document_an_element(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "x"}, {"text": "y"}]')
    write_lines(tmp_path / "b.jsonl", [{"text": "z"}])
    assert read(str(tmp_path)) == ["x", "y", "z"]


def test_parquet_gives_a_document_a_row(tmp_path):
    table = pa.table({"id": [1, 2, 3], "text": ["x", "y", "z"]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert read(str(tmp_path / "a.parquet")) == ["x", "y", "z"]


def test_a_folder_is_read_in_the_order_of_names_without_hidden_and_foreign_files(tmp_path):
    (tmp_path / "z").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b.txt", "a.txt", "z/c.txt", ".hidden.txt", ".git/d.txt", "README.md"):
        (tmp_path / name).write_text(name)
    assert read(str(tmp_path)) == ["a.txt", "b.txt", "z/c.txt"]


def test_a_list_is_read_in_its_own_order_and_no_file_twice(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    assert read([str(tmp_path / "b.txt"), str(tmp_path)]) == ["b.txt", "a.txt"]


@pytest.mark.parametrize("split", ["nonsense", "validation", "test", "train[:90%]", "Train", "train+test", ""])
def test_local_files_are_one_split_and_another_is_refused(tmp_path, split):
    (tmp_path / "a.txt").write_text("first")
    assert read(str(tmp_path), split="train") == ["first"]
    for source in (str(tmp_path), str(tmp_path / "*.txt"), [str(tmp_path / "a.txt")], STDLIB):
        with pytest.raises(
            DataError, match=r"^split='.*' asked of .*: local files are one split, 'train'.*leave split"
        ):
            list_files(source, split)


def test_a_hub_dataset_has_the_splits_that_it_says(monkeypatch):
    assert list_files("owner/name", "train[:90%]") == []


UNREAD = (
    "b.jsonl.bz2", "b.parquet.gz", "b.JSONL", "b.Parquet", "b.csv", "b.ndjson", "b.tar", "b.jsonl.part", "z/b.feather",
    "b.txt.1",
)  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_a_folder_with_data_that_would_be_left_out_is_refused_by_name(tmp_path, name):
    write_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    (tmp_path / "z").mkdir()
    (tmp_path / name).write_bytes(b"whatever")
    with pytest.raises(
        DataError, match=rf"holds 1 file that cannot be read, such as '.*{re.escape(name)}', beside 1 file that can; un"
    ):
        list_files(str(tmp_path))
    assert read(str(tmp_path / "*.jsonl")) == ["x"]


@pytest.mark.parametrize("name", ["README.md", ".gitattributes", "a.jsonl.md5", "a.jsonl.idx", "a.json.lock"])
def test_what_goes_along_with_documents_is_passed_over(tmp_path, name):
    write_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    (tmp_path / name).write_bytes(b"whatever")
    assert list_files(str(tmp_path)) == [tmp_path / "a.jsonl"]


def test_a_linked_folder_is_read_and_one_that_leads_back_once(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.txt").write_text("linked")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("own")
    (folder / "more").symlink_to(tmp_path / "elsewhere")
    (folder / "back").symlink_to(folder)
    assert read(str(folder)) == ["own", "linked"]


def test_local_data_leaves_no_copy_in_the_cache(tmp_path, offline):
    (tmp_path / "a.txt").write_text("first" * 100)
    read(str(tmp_path / "a.txt"))
    assert sum(file.stat().st_size for file in offline.rglob("*") if file.is_file()) == 0


def test_the_standard_library_is_at_hand_and_sorted():
    files = list_files(STDLIB)
    names = [file.as_posix() for file in files]
    assert names == sorted(names)
    assert any(name.endswith("/asyncio/tasks.py") for name in names)
    assert not any("/test/" in name or "/site-packages/" in name or "/idlelib/" in name for name in names)


def test_the_standard_library_skips_what_is_not_utf8(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("print('a')\n")
    (tmp_path / "b.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text("c")
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda _: str(tmp_path))
    assert read(STDLIB) == ["print('a')\n"]


def test_the_standard_library_is_looked_through_once(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("a")
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda _: str(tmp_path))
    first = list_files(STDLIB)
    monkeypatch.setattr(sources, "_is_utf8", None)
    assert list_files(STDLIB) == first == [tmp_path / "a.py"]


def test_documents_are_streamed(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x"}, {"text": "y"}])
    rows = open_corpus(path, "train").read(0)
    assert next(rows) == {"text": "x"}


@pytest.mark.parametrize("name", ["nowhere/*.txt", "missing.jsonl", "/no/such/folder", "not a name!", "json"])
def test_no_match_is_an_error(name):
    with pytest.raises(DataError, match=r"no file matches .*give a file, a folder or a glob of \.txt"):
        open_corpus(name, "train")


def test_a_folder_without_documents_is_an_error(tmp_path):
    (tmp_path / "README.md").write_text("hello")
    with pytest.raises(DataError, match="no file matches"):
        open_corpus(str(tmp_path), "train")


def test_an_empty_list_is_an_error():
    with pytest.raises(DataError, match="empty list"):
        open_corpus([], "train")


def test_an_unknown_suffix_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("text\nx\n")
    with pytest.raises(
        DataError,
        match=r"a\.csv'.*'\.csv' is not one of \.txt, \.json, \.jsonl \(these also \.gz or \.zst\), \.parquet, \.arrow",
    ):
        open_corpus(str(tmp_path / "a.csv"), "train")


def test_mixed_suffixes_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    write_lines(tmp_path / "b.jsonl", [{"text": "y"}])
    with pytest.raises(
        DataError, match=r"mixes \.jsonl and \.txt files \(2 in all\); .*'\*\*/\*\.jsonl', or .* \[\[data\.mixture\]\]$"
    ):
        open_corpus(str(tmp_path), "train")


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    for name in ("a.parquet", "b.parquet"):
        (tmp_path / name).write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"cannot read '.*a\.parquet' as parquet: Arrow"):
        read(str(tmp_path))


def test_a_text_file_that_breaks_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"^'b\.txt': UnicodeDecodeError"):
        read(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "broken", "line"),
    [
        ("b.jsonl", '{"text": "x"}\n\n{"text": "never closed\n{"text": "y"}\n', 3),
        ("b.jsonl", '{"text": "x"}\n{"text": "y"\n{"text": "z"}\n', 2),
        ("b.json", '[{"text": "x"},\n {"text": }]\n', 2),
        ("b.jsonl", '{"text": "x"}\n{"text": "\udcff"}\n', 2),
    ],
)
def test_json_that_breaks_is_named_with_its_line(tmp_path, caplog, name, broken, line):
    write_lines(tmp_path / "a.jsonl", [{"text": "fine"}])
    (tmp_path / name).write_bytes(broken.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=rf"line {line} of '.*{name}': "):
        read(str(tmp_path / "*.json*"))
    assert caplog.messages == []  # no line of `datasets` beside ours


def test_a_parquet_file_that_breaks_says_how_far_it_was_read(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x" * 1000, "y" * 1000]}), path)
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(50) + content[54:])  # the first page, while what describes the file is whole
    with pytest.raises(DataError, match=r"reading '.*a\.parquet' broke after 0 rows of '.*a\.parquet': "):
        read(str(path))


def test_a_row_is_found_in_its_file(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"text": "x"}] * 3)
    write_lines(tmp_path / "b.jsonl", [{"text": "y"}] * 2)
    corpus = open_corpus(str(tmp_path), "train")
    assert corpus.place(0, 2) == "row 3 of 'a.jsonl'"
    assert corpus.place(1, 1) == "row 2 of 'b.jsonl'"


@pytest.mark.parametrize("name", ["nobody/no-such-corpus", "nobody/no-such-corpus:part"])
def test_a_hub_name_out_of_reach_says_what_would_work(name):
    assert list_files(name) == []
    with pytest.raises(DataError, match=r"is no local path, and opening split 'train'.*give \.txt") as error:
        open_corpus(name, "train")
    assert "\n" not in str(error.value)


def test_a_hub_name_is_streamed_with_its_config_and_split(monkeypatch):
    import datasets

    calls = []

    def load_dataset(*arguments, **options):
        calls.append((arguments, options))
        return [{"text": "x"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("owner/name:part", split="validation") == ["x"]
    assert read("owner/name") == ["x"]
    assert open_corpus("owner/name", "train").place(0, 4) == "row 5"
    assert calls[:2] == [
        (("owner/name", "part"), {"split": "validation", "streaming": True}),
        (("owner/name", None), {"split": "train", "streaming": True}),
    ]


@pytest.mark.parametrize("suffix", [".txt", ".json", ".jsonl", ".parquet"])
def test_empty_files_are_called_empty(tmp_path, suffix):
    for number in range(2):
        (tmp_path / f"{number}{suffix}").touch()
        with pytest.raises(DataError, match=rf"holds no byte in {number + 1} files?; give files that hold documents"):
            list_files(str(tmp_path))
    (tmp_path / f"1{suffix}").write_text("x")
    assert len(list_files(str(tmp_path))) == 2
