"""Names of sources of documents: local files, the standard library of this Python, or a dataset on the hub.

Local files have one split, "train", as `datasets` calls that of plain files; a folder may have others
(`dtlayout.base.dataset_folders`).
"""

import re
from collections.abc import Collection
from pathlib import Path

from dtlayout.base.files import expand

STDLIB = "python-stdlib"
KINDS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
"""Suffix of a local file → kind, which says how it is read."""
PACKINGS = {".gz": "gzip", ".zst": "zstd"}
"""Suffix behind that of a text or JSON file → how it is packed."""
SUFFIXES = ".txt, .json, .jsonl (these also .gz or .zst), .parquet, .arrow"
LOCAL_SPLIT = "train"
HELD_OUT_SPLIT = "validation"
"""Split of a hub dataset that validation reads where the user names none."""
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?")


def is_hub_name(source: str) -> bool:
    """Whether `source` names a dataset on the hub, as `owner/name` or `owner/name:config`, and no local file."""
    path = split_config(source)[0]
    return not path.exists() and find_kind(path)[0] == "" and _HUB_NAME.fullmatch(source) is not None


def find_kind(path: Path) -> tuple[str, str]:
    """Kind of a file, and how it is packed, by its name; empty where it cannot be read, and where it is not packed.

    >>> [find_kind(Path(name)) for name in ("a.jsonl.gz", "a.parquet", "a.parquet.gz", "a.csv")]
    [('json', 'gzip'), ('parquet', ''), ('', ''), ('', '')]
    """
    packing = PACKINGS.get(path.suffix, "")
    kind = KINDS.get(Path(path.stem).suffix if packing else path.suffix, "")
    return (kind, packing) if not packing or kind in ("text", "json") else ("", "")


def split_config(source: str) -> tuple[Path, str]:
    """Path of a local source and the config behind a colon, which only a folder has; empty without one."""
    path, (folder, colon, config) = expand(source), source.rpartition(":")
    if colon and not path.exists() and folder and expand(folder).is_dir():
        return expand(folder), config
    return path, ""


def describe_missing_split(source: object, split: str, splits: Collection[str] = (LOCAL_SPLIT,)) -> str:
    """Reason why a split of local files is refused; empty if it is one of `splits`.

    >>> describe_missing_split("a.txt", "train")
    ''
    """
    if split in splits:
        return ""
    asked = f"split={split!r} asked of {source!r}: "
    if set(splits) != {LOCAL_SPLIT}:
        return f"{asked}it has {', '.join(splits)}, and none of them can be sliced"
    return (
        f"{asked}local files are one split, {LOCAL_SPLIT!r}, and cannot be sliced; leave "
        f"split out, and give [data] and [validation] files of their own"
    )


def is_unread_data(path: Path) -> bool:
    """Whether a file that is not read looks like documents all the same: packed, of another kind, or half written.

    Files that only accompany documents, such as a checksum, are no documents.

    >>> [is_unread_data(Path(name)) for name in ("a.jsonl.bz2", "a.JSONL", "a.csv", "a.jsonl.md5", "a.jsonl.gz")]
    [True, True, True, False, False]
    """
    suffixes = {suffix.lower() for suffix in path.suffixes}
    is_other = find_kind(path)[0] == "" and path.suffix.lower() not in _COMPANIONS
    return is_other and bool(suffixes & _DATA_SUFFIXES)


_PACKED = {".gz", ".bz2", ".xz", ".zst", ".lz4", ".lzma", ".br", ".zip", ".tar", ".tgz", ".7z", ".rar"}
_OTHER_KINDS = {
    ".csv", ".tsv", ".ndjson", ".jsonlines", ".jl", ".json5", ".feather", ".orc", ".avro", ".pq", ".text",
    ".tfrecord", ".msgpack", ".h5", ".hdf5", ".sqlite", ".xlsx",
}  # fmt: skip
_DATA_SUFFIXES = _PACKED | _OTHER_KINDS | set(KINDS)
_COMPANIONS = {
    ".md5", ".sha1", ".sha256", ".sha512", ".crc", ".asc", ".sig", ".idx", ".index", ".meta", ".metadata", ".lock",
    ".bak", ".orig", ".license",
}  # fmt: skip
"""Suffixes of files that accompany documents, and hold none."""
