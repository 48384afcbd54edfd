"""Names of sources of documents: local files, the standard library of this Python, or a dataset on the hub.

Local files have one split, "train", as `datasets` calls that of plain files.
"""

import re
from pathlib import Path

from dtlayout.base.files import expand

STDLIB = "python-stdlib"
BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""Suffix of a local file → the builder with which `datasets` reads it."""
SUFFIXES = ", ".join(BUILDERS)
LOCAL_SPLIT = "train"
HELD_OUT_SPLIT = "validation"
"""Split of a hub dataset that validation reads where the user names none."""
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?")


def is_hub_name(source: str) -> bool:
    """Whether `source` names a dataset on the hub, as `owner/name` or `owner/name:config`, and no local file."""
    path = expand(source)
    return not path.exists() and path.suffix not in BUILDERS and _HUB_NAME.fullmatch(source) is not None


def find_held_out_split(source: str, asked: str) -> str:
    """Split that [validation] reads: `asked`, or if that is empty the hub's "validation".

    Local files then have "train". They have it also where "validation" is asked for: configs of older runs say so.
    """
    is_local = source == STDLIB or not is_hub_name(source)
    if is_local:
        return LOCAL_SPLIT if asked in ("", HELD_OUT_SPLIT) else asked
    return asked or HELD_OUT_SPLIT


def describe_missing_split(source: object, split: str) -> str:
    """Reason why a split of local files is refused; empty if they have it.

    >>> describe_missing_split("a.txt", "train")
    ''
    """
    if split == LOCAL_SPLIT:
        return ""
    return (
        f"split={split!r} asked of {source!r}: local files are one split, {LOCAL_SPLIT!r}, and cannot be sliced; leave "
        f"split out, and give [data] and [validation] files of their own"
    )


def is_unread_data(path: Path) -> bool:
    """Whether a file that is not read looks like documents all the same: packed, of another kind, or half written.

    Files that only accompany documents, such as a checksum, are no documents.

    >>> [is_unread_data(Path(name)) for name in ("a.jsonl.gz", "a.JSONL", "a.arrow", "a.jsonl.md5", "a.jsonl")]
    [True, True, True, False, False]
    """
    suffixes = {suffix.lower() for suffix in path.suffixes}
    is_other = path.suffix not in BUILDERS and path.suffix.lower() not in _COMPANIONS
    return is_other and bool(suffixes & _DATA_SUFFIXES)


_PACKED = {".gz", ".bz2", ".xz", ".zst", ".lz4", ".lzma", ".br", ".zip", ".tar", ".tgz", ".7z", ".rar"}
_OTHER_KINDS = {
    ".csv", ".tsv", ".ndjson", ".jsonlines", ".jl", ".json5", ".arrow", ".feather", ".orc", ".avro", ".pq", ".text",
    ".tfrecord", ".msgpack", ".h5", ".hdf5", ".sqlite", ".xlsx",
}  # fmt: skip
_DATA_SUFFIXES = _PACKED | _OTHER_KINDS | set(BUILDERS)
_COMPANIONS = {
    ".md5", ".sha1", ".sha256", ".sha512", ".crc", ".asc", ".sig", ".idx", ".index", ".meta", ".metadata", ".lock",
    ".bak", ".orig", ".license",
}  # fmt: skip
"""Suffixes of files that accompany documents, and hold none."""
