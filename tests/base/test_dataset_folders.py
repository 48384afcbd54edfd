"""Folders with splits: what a card, saved datasets and names say, and what nobody has said stays one split."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from dtlayout.base.dataset_folders import find_held_out_split, find_splits
from dtlayout.base.errors import DataError
from dtlayout.data.sources import list_files


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


def names_of(folder: Path, config: str = "") -> dict[str, list[str]]:
    found = find_splits(folder, config)
    return {split: [file.relative_to(folder).as_posix() for file in files] for split, files in found.items()}


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (
            ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-00000-of-00001.jsonl"],
            {"train": [0, 1], "test": [2]},
        ),
        (["data/validation.jsonl", "data/train.jsonl"], {"train": [1], "validation": [0]}),
        (["train/a.txt", "train/deep/b.txt", "dev/a.txt"], {"train": [0, 1], "validation": [2]}),
        (["books_train.jsonl.gz", "books_val.jsonl.gz"], {"train": [0], "validation": [1]}),
        (["train/test-cases.txt", "train/a.txt"], {"train": [1], "test": [0]}),
        (["how-to-train.txt", "latest.txt"], {"train": [0, 1]}),
        (["test.txt", "a.txt"], {"train": [1, 0]}),
        (["trains.txt", "contest.txt"], {"train": [1, 0]}),
    ],
)
def test_names_say_splits_where_each_of_them_does(tmp_path, files, splits):
    make(tmp_path, *files)
    assert names_of(tmp_path) == {split: [files[i] for i in places] for split, places in splits.items()}


CARD = """---
license: mit
configs:
- config_name: small
  data_files:
  - split: train
    path: ["a/*.jsonl", "b.jsonl"]
  - split: dev
    path: c.jsonl
- config_name: large
  default: true
  data_dir: big
  data_files: "**"
- config_name: table
  data_files: {train: c.jsonl}
---
# A card
"""


def test_a_card_says_splits_and_configs(tmp_path):
    make(tmp_path, "a/1.jsonl", "a/0.jsonl", "b.jsonl", "c.jsonl", "big/x.jsonl", "other.csv")
    (tmp_path / "README.md").write_text(CARD)
    assert names_of(tmp_path, "small") == {"train": ["a/0.jsonl", "a/1.jsonl", "b.jsonl"], "dev": ["c.jsonl"]}
    assert names_of(tmp_path) == names_of(tmp_path, "large") == {"train": ["big/x.jsonl"]}
    assert names_of(tmp_path, "table") == {"train": ["c.jsonl"]}
    assert [file.name for file in list_files(f"{tmp_path}:small", "dev")] == ["c.jsonl"]
    with pytest.raises(DataError, match=r"split='test' asked of '.*:small': it has train, dev, and none of them can"):
        list_files(f"{tmp_path}:small", "test")
    with pytest.raises(DataError, match=r"has no config 'tiny'; use '.*':NAME with one of small, large, table"):
        list_files(f"{tmp_path}:tiny")
    (tmp_path / "README.md").write_text(CARD.replace("  default: true\n", ""))
    with pytest.raises(DataError, match="has several configs; use "):
        list_files(str(tmp_path))


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("---\nconfigs: [\n---\n", r"README\.md' begins with what is no YAML"),
        ("---\nconfigs: [{data_files: ../secret.jsonl}]\n---\n", "'../secret.jsonl', which is outside of the folder"),
        ("---\nconfigs: [{data_files: a.jsonl, data_dir: /etc}]\n---\n", "names '/etc', which is outside"),
        ("---\nconfigs: [{data_files: none.jsonl}]\n---\n", "names 'none.jsonl' for split 'train', which no file"),
        ("---\nconfigs: [{data_files: 3}]\n---\n", "data_files is 3, which names no files"),
    ],
)
def test_a_card_that_names_no_files_is_refused(tmp_path, card, said):
    make(tmp_path, "a.jsonl")
    (tmp_path / "README.md").write_text(card)
    with pytest.raises(DataError, match=said):
        list_files(str(tmp_path))


@pytest.mark.parametrize("card", ["# no head", "---\nlicense: mit\n---\n", "---\n3\n---\n", "---\nconfigs: 3\n---\n"])
def test_a_card_without_configs_says_nothing(tmp_path, card):
    make(tmp_path, "a.jsonl")
    (tmp_path / "README.md").write_text(card)
    assert names_of(tmp_path) == {"train": ["a.jsonl"]}
    with pytest.raises(DataError, match=r"has no config 'b': its card README\.md names none"):
        list_files(f"{tmp_path}:b")


def save(folder: Path, split: str | None, texts: list[str]) -> None:
    """What `save_to_disk` writes."""
    folder.mkdir(parents=True)
    name = "data-00000-of-00001.arrow"
    table = pa.table({"text": texts})
    with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
        writer.write_table(table)
    (folder / "cache-0.arrow").write_bytes(b"left by a map")
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}], "_split": split}))


def test_what_was_saved_to_disk_is_read_with_its_splits(tmp_path):
    save(tmp_path / "one", None, ["x"])
    assert [file.name for file in list_files(str(tmp_path / "one"))] == ["data-00000-of-00001.arrow"]
    for split in ("train", "validation"):
        save(tmp_path / "several" / split, split, [split])
    (tmp_path / "several" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "validation"]}))
    (file,) = list_files(str(tmp_path / "several"), "validation")
    assert file.parent.name == "validation"
    (file.parent / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"state\.json' names no files"):
        list_files(str(tmp_path / "several"))


def test_validation_takes_the_split_of_its_name_where_a_folder_has_it(tmp_path):
    clone = make(tmp_path / "clone", "train.jsonl", "dev.jsonl", "test.jsonl")
    plain = make(tmp_path / "plain", "a.jsonl")
    assert find_held_out_split(str(clone), "") == find_held_out_split(str(clone), "validation") == "validation"
    assert find_held_out_split(str(clone), "test") == "test"
    for source in (str(plain), str(plain / "a.jsonl"), "python-stdlib", str(tmp_path / "none")):
        assert find_held_out_split(source, "") == find_held_out_split(source, "validation") == "train"
    assert find_held_out_split("owner/name", "") == "validation"


def test_a_pointer_of_git_lfs_is_no_file(tmp_path):
    make(tmp_path, "b.jsonl")
    (tmp_path / "a.jsonl").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(DataError, match=r"1 file of '.*' are pointers of Git LFS, such as '.*a\.jsonl'; fetch"):
        list_files(str(tmp_path))
