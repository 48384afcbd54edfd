"""A checkpoint that somebody has made to harm who reads it is refused in a line, and the process is as it was."""

import builtins
import hashlib
import json
import os
import pathlib
import pickle
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import ADAMW, build, message_of, save, train_and_save, update
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SHAPE
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dtlayout.base.checkpoint_names import MANIFEST_NAME, list_checkpoints
from dtlayout.base.errors import CheckpointError
from dtlayout.checkpoint.folder import clean, set_aside
from dtlayout.checkpoint.manifest import _hash_document, find_damage
from dtlayout.checkpoint.metadata import parse_metadata
from dtlayout.checkpoint.opcodes import RefusedPickle
from dtlayout.checkpoint.sharded import load_checkpoint, read_origin
from dtlayout.spec.layout import Layout

HEAD = b"\x80\x04"
METADATA, FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"


def text(value: str) -> bytes:
    return pickle.BINUNICODE + len(value.encode()).to_bytes(4, "little") + value.encode()


def name(module: str, word: str) -> bytes:
    return text(module) + text(word) + pickle.STACK_GLOBAL


def mapping(*pairs: tuple[str, bytes]) -> bytes:
    return pickle.EMPTY_DICT + b"".join(text(key) + value + pickle.SETITEM for key, value in pairs)


def slots(*pairs: tuple[str, bytes]) -> bytes:
    """A state whose second part is set attribute by attribute, whatever the object is."""
    return pickle.NONE + mapping(*pairs) + pickle.TUPLE2


def doubled(times: int) -> bytes:
    """A tuple of two that are one tuple of two that are one …"""
    keep_and_repeat = [pickle.MEMOIZE + pickle.BINGET + bytes([number]) + pickle.TUPLE2 for number in range(times)]
    return pickle.EMPTY_TUPLE + b"".join(keep_and_repeat)


def of_path(path: Path) -> bytes:
    return name("pathlib", "PosixPath") + pickle.MARK + b"".join(map(text, path.parts)) + pickle.TUPLE + pickle.REDUCE


def describe(chunk: int = 4, file: str = "__0_0.distcp", **more: object) -> bytes:
    """The metadata of one tensor as DCP pickles it."""
    size = torch.Size([chunk])
    tensor = TensorStorageMetadata(TensorProperties(), size, [ChunkStorageMetadata(torch.Size([0]), size)])
    places = {MetadataIndex("weight", torch.Size([0])): _StorageInfo(file, 0, 16, **more)}
    return pickle.dumps(Metadata({"weight": tensor}, storage_data=places), protocol=4)


def before(attack: bytes) -> bytes:
    """A whole description, read after an attack whose value is dropped."""
    return HEAD + attack + pickle.POP + describe()[2:]


ATTACKS = {
    "BUILD on a class": before(name("pathlib", "PosixPath") + slots(("parent", pickle.NONE)) + pickle.BUILD),
    "BUILD on a class of ours": before(name(METADATA, "Metadata") + slots(("version", pickle.NONE)) + pickle.BUILD),
    "BUILD on an enum": before(name(METADATA, "_MEM_FORMAT_ENCODING") + slots(("_x", pickle.NONE)) + pickle.BUILD),
    "BUILD on a function": before(
        name("torch.serialization", "_get_layout") + mapping(("x", pickle.NONE)) + pickle.BUILD
    ),
    "BUILD on a number format": before(name("torch", "float32") + slots(("itemsize", pickle.NONE)) + pickle.BUILD),
    "BUILD on a path": before(of_path(Path("/tmp")) + slots(("_str", text("/"))) + pickle.BUILD),
    "BUILD on a module": before(name("builtins", "__dict__") + mapping(("len", pickle.NONE)) + pickle.BUILD),
    "BUILD on a list": before(pickle.EMPTY_LIST + mapping(("append", pickle.NONE)) + pickle.BUILD),
    "BUILD with slots": before(
        name(METADATA, "ChunkStorageMetadata") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
        + slots(("__class__", name("pathlib", "PosixPath"))) + pickle.BUILD
    ),
    "BUILD twice": before(
        name(METADATA, "StorageMeta") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
        + 2 * (mapping(("modules", pickle.NONE)) + pickle.BUILD)
    ),
    "SETITEM on a module": before(name("sys", "modules") + text("os") + pickle.NONE + pickle.SETITEM),
    "SETITEM on a class": before(name(METADATA, "Metadata") + text("version") + pickle.NONE + pickle.SETITEM),
    "SETITEM with a class as value": before(mapping(("x", name("pathlib", "PosixPath")))),
    "SETITEM with a tuple as key": before(pickle.EMPTY_DICT + pickle.EMPTY_TUPLE + pickle.NONE + pickle.SETITEM),
    "APPEND to a class": before(name(METADATA, "Metadata") + pickle.NONE + pickle.APPEND),
    "ADDITEMS": before(pickle.EMPTY_SET + pickle.MARK + pickle.NONE + pickle.ADDITEMS),
    "REDUCE of a class of ours": before(name(METADATA, "Metadata") + pickle.NONE + pickle.TUPLE1 + pickle.REDUCE),
    "REDUCE of a number format": before(name("torch", "float32") + pickle.EMPTY_TUPLE + pickle.REDUCE),
    "REDUCE of os.system": before(name("os", "system") + text("true") + pickle.TUPLE1 + pickle.REDUCE),
    "REDUCE by a dotted name": before(
        name("pathlib", "PosixPath.unlink") + of_path(Path("/nowhere")) + pickle.TUPLE1 + pickle.REDUCE
    ),
    "REDUCE of another layout": before(
        name("torch.serialization", "_get_layout") + text("torch.sparse_coo") + pickle.TUPLE1 + pickle.REDUCE
    ),
    "REDUCE of a size of tuples": before(
        name("torch", "Size") + pickle.EMPTY_TUPLE + 2 * pickle.TUPLE1 + pickle.REDUCE
    ),
    "NEWOBJ of a path": before(name("pathlib", "PosixPath") + pickle.EMPTY_TUPLE + pickle.NEWOBJ),
    "NEWOBJ with arguments": before(name(METADATA, "StorageMeta") + pickle.NONE + pickle.TUPLE1 + pickle.NEWOBJ),
    "NEWOBJ_EX": before(
        name(METADATA, "StorageMeta") + pickle.EMPTY_TUPLE + pickle.EMPTY_DICT + pickle.NEWOBJ_EX
    ),
    "GLOBAL": before(b"cos\nsystem\n"),
    "INST": before(b"(ipathlib\nPosixPath\n"),
    "OBJ": before(pickle.MARK + name("pathlib", "PosixPath") + pickle.OBJ),
    "EXT1": before(b"\x82\x01"),
    "PERSID": before(b"P1\n"),
    "a value of bytes": pickle.dumps(Metadata({"weight": BytesStorageMetadata()}, storage_data={}), protocol=4),
    "a bare class": HEAD + name(METADATA, "Metadata") + pickle.STOP,
    "an object without fields": HEAD + name(METADATA, "Metadata") + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.STOP,
    "a list in two places": before(pickle.EMPTY_LIST + pickle.MEMOIZE + pickle.TUPLE1 + b"h\x00" + pickle.TUPLE2),
    "a list that holds itself": before(pickle.EMPTY_LIST + pickle.MEMOIZE + b"h\x00" + pickle.APPEND + pickle.TUPLE1),
    "a list changed after it was used": before(
        pickle.EMPTY_LIST + pickle.MEMOIZE + pickle.TUPLE1 + b"h\x00" + pickle.NONE + pickle.APPEND
    ),
    "an unknown memo": before(b"j\xff\xff\xff\x7f"),
    "a memo of four billion": before(pickle.NONE + b"r\xff\xff\xff\xff"),
    "a text of four billion": HEAD + b"X\xff\xff\xff\xffabc",
    "a text of 2 ** 63": HEAD + b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc",
    "bytes of 2 ** 63": HEAD + b"\x96\xff\xff\xff\xff\xff\xff\xff\x7fabc",
    "a number of two billion bytes": HEAD + b"\x8b\xff\xff\xff\x7f" + bytes(100),
    "a number of 255 bytes": HEAD + b"\x8a\xff" + b"\xff" * 255 + pickle.STOP,
    "a number in decimals": HEAD + b"L" + b"9" * 100_000 + b"L\n" + pickle.STOP,
    "lists nested 200,000 deep": HEAD + pickle.EMPTY_LIST * 200_000 + pickle.APPEND * 199_999 + pickle.STOP,
    "tuples nested 200,000 deep": HEAD + pickle.EMPTY_TUPLE + pickle.TUPLE1 * 200_000 + pickle.STOP,
    "200,000 marks": HEAD + pickle.MARK * 200_000 + pickle.STOP,
    "2 ** 100 tuples as a key": before(
        pickle.EMPTY_DICT + doubled(100) + pickle.NONE + pickle.SETITEM
    ),
    "2 ** 100 tuples as a value": HEAD + doubled(100) + pickle.STOP,
    "a size of a thousand dims": before(
        name("torch", "Size") + pickle.MARK + 1000 * b"K\x01" + pickle.TUPLE + pickle.TUPLE1 + pickle.REDUCE
    ),
    "a negative size": before(name("torch", "Size") + b"J\xff\xff\xff\xff" + 2 * pickle.TUPLE1 + pickle.REDUCE),
    "a file elsewhere": describe(file="../../../other/__0_0.distcp"),
    "a file by its whole path": describe(file="/dev/zero"),
    "a file through a transform": describe(transform_descriptors=["zstd"]),
    "a place before the file": pickle.dumps(
        Metadata({}, storage_data={MetadataIndex("w", torch.Size([0])): _StorageInfo("__0_0.distcp", -1, 4)}),
        protocol=4,
    ),
    "no state": HEAD + pickle.NONE + pickle.STOP,
    "nothing": b"",
    "two values": HEAD + pickle.NONE + pickle.NONE + pickle.STOP,
    "an older pickle": pickle.dumps(Metadata({}, storage_data={}), protocol=2),
}  # fmt: skip


def snapshot() -> list[object]:
    """What the attacks reach for."""
    classes = (pathlib.PurePath, Path, pathlib.PosixPath, Metadata, ChunkStorageMetadata, TensorStorageMetadata,
               MetadataIndex, _StorageInfo, TensorProperties, dcp_metadata.StorageMeta, torch.Size)  # fmt: skip
    functions = (torch.serialization._get_layout,)
    return [
        *({**vars(each)} for each in (*classes, *functions)), {**vars(builtins)}, {**vars(os)},
        list(dcp_metadata._MEM_FORMAT_ENCODING),
    ]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_in_a_line_soon_and_leaves_the_process_as_it_was(attack):
    whole, used, started = snapshot(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ValueError) as refusal:
        parse_metadata(ATTACKS[attack])
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300
    assert time.process_time() - started < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 200 << 10  # KiB
    assert snapshot() == whole


def test_what_dcp_writes_is_read_as_pickle_reads_it():
    content = describe()
    ours, theirs = parse_metadata(content), pickle.loads(content)
    assert ours.state_dict_metadata == theirs.state_dict_metadata and ours.storage_data == theirs.storage_data
    assert [index.index for index in ours.storage_data] == [index.index for index in theirs.storage_data]


sizes = st.lists(st.integers(0, 2**40), min_size=2, max_size=2).map(torch.Size)
tensors = st.builds(
    TensorStorageMetadata,
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]).map(TensorProperties),
    sizes,
    st.lists(st.builds(ChunkStorageMetadata, sizes, sizes), max_size=3),
)
places = st.dictionaries(
    st.builds(MetadataIndex, st.text(st.characters(exclude_categories=["Cs"])), sizes, st.none() | st.integers(0, 9)),
    st.builds(
        _StorageInfo, st.from_regex(r"__[0-9]+_[0-9]+\.distcp", fullmatch=True), st.integers(0, 2**62),
        st.integers(0, 2**40),
    ),
    max_size=3,
)  # fmt: skip
written = st.builds(
    Metadata,
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), tensors, max_size=4),
    storage_data=places,
)


@given(written, st.sampled_from([4, 5]))
def test_any_description_of_tensors_is_read_as_pickle_reads_it(metadata, protocol):
    ours = parse_metadata(pickle.dumps(metadata, protocol))
    assert ours.state_dict_metadata == metadata.state_dict_metadata and ours.storage_data == metadata.storage_data


@given(written, st.data())
@settings(max_examples=200)
def test_any_damage_is_refused_or_gives_a_description_of_tensors(metadata, data):
    content = bytearray(pickle.dumps(metadata, 4))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    whole = snapshot()
    with suppress(ValueError):
        assert type(parse_metadata(bytes(content))) is Metadata
    assert snapshot() == whole


def spoil_metadata(path: Path, attack: bytes) -> None:
    """Put an attack before what a checkpoint's metadata say, and make its manifest agree."""
    file = path / "tensors" / ".metadata"
    content = file.read_bytes()
    file.write_bytes(content[:2] + attack + pickle.POP + content[2:])
    document = json.loads((path / MANIFEST_NAME).read_text())
    del document["sha256"]
    document["files"]["tensors/.metadata"] = {
        "bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()
    }  # fmt: skip
    (path / MANIFEST_NAME).write_text(json.dumps({**document, "sha256": _hash_document(document)}))


@pytest.fixture
def others(tmp_path) -> Iterator[Path]:
    """Another run's folder with three checkpoints; what an attack has done to paths ends with the test."""
    folder = tmp_path / "others" / "checkpoints"
    for step in (1, 2, 3):
        (folder / f"step-{step:08d}" / "tensors").mkdir(parents=True)
    has_own, own = "parent" in vars(pathlib.PosixPath), vars(pathlib.PosixPath).get("parent")
    yield folder
    if has_own:
        pathlib.PosixPath.parent = own
    elif "parent" in vars(pathlib.PosixPath):
        del pathlib.PosixPath.parent


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_cannot_have_another_runs_checkpoints_removed_as_old_ones(tmp_path, others):
    """`PosixPath.parent` is the other run's folder from then on, so that old checkpoints are looked for there."""
    own = tmp_path / "own" / "checkpoints"
    train_and_save(Layout(), SHAPE, own, 1, 1)
    (path,) = list_checkpoints(own)
    attack = name("pathlib", "PosixPath") + slots(("parent", of_path(others))) + pickle.BUILD
    spoil_metadata(path, attack)
    assert find_damage(path) == []
    assembly, optimizer = build(Layout(), SHAPE, seed=2)
    message = message_of(lambda: load_checkpoint(path, assembly.modules, optimizer, SHAPE, ADAMW))
    update(assembly, optimizer)
    save(own, 2, assembly, optimizer, SHAPE, keep=1)
    assert [path.name for path in list_checkpoints(others)] == [f"step-{step:08d}" for step in (1, 2, 3)]
    assert message is not None and ".metadata sets fields of pathlib.PosixPath, which is refused" in message
    assert "parent" not in vars(pathlib.PosixPath)


@pytest.mark.usefixtures("one_rank")
def test_nothing_is_removed_or_renamed_through_a_link_out_of_the_run_folder(tmp_path, others):
    run = tmp_path / "own"
    run.mkdir()
    (run / "checkpoints").symlink_to(others)
    (others / "partial-00000009").mkdir()
    was_there = sorted(path.name for path in others.iterdir())
    assembly, optimizer = build(Layout(), SHAPE, seed=2)
    update(assembly, optimizer)
    tries: list[Callable[[], object]] = [
        lambda: save(run / "checkpoints", 4, assembly, optimizer, SHAPE, keep=1),
        lambda: clean(run / "checkpoints", lambda: None),
        lambda: set_aside(run / "checkpoints" / "step-00000001", lambda: None),
    ]
    for each in tries:
        message = message_of(each)
        assert message is not None and f"leads to {others}, outside the run folder" in message
        assert sorted(path.name for path in others.iterdir()) == was_there


@pytest.mark.usefixtures("one_rank")
def test_a_run_folder_that_is_a_link_itself_keeps_the_newest(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    train_and_save(Layout(), SHAPE, tmp_path / "run" / "checkpoints", 3, 2)
    assert [path.name for path in list_checkpoints(tmp_path / "disk" / "checkpoints")] == [
        "step-00000002",
        "step-00000003",
    ]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("planted", ["step-00000001", "partial-00000002", "removed-step-00000001", "step-00000002"])
def test_of_a_link_in_the_folder_the_link_alone_goes(tmp_path, others, planted):
    own = tmp_path / "own" / "checkpoints"
    own.mkdir(parents=True)
    (own / planted).symlink_to(others / "step-00000001")
    was_there = sorted(others.rglob("*"))
    assembly, optimizer = build(Layout(), SHAPE, seed=2)
    update(assembly, optimizer)
    save(own, 2, assembly, optimizer, SHAPE, keep=1)
    clean(own, lambda: None)
    assert [path.name for path in list_checkpoints(own)] == ["step-00000002"]
    assert not (own / "step-00000002").is_symlink()
    assert sorted(path.name for path in own.iterdir()) == ["latest", "step-00000002"]
    assert sorted(others.rglob("*")) == was_there


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "files",
    [
        {"../../others/secret": {"bytes": 1, "sha256": ""}}, {"/dev/zero": {"bytes": 0, "sha256": ""}}, [], None,
        {"state.json": None}, {"state.json": {"bytes": "1", "sha256": 1}}, {"tensors/./x": {"bytes": 1, "sha256": ""}},
    ],
)  # fmt: skip
def test_a_manifest_that_lists_what_is_no_file_of_the_checkpoint_is_damaged(tmp_path, files):
    document = {"step": 1, "files": files}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({**document, "sha256": _hash_document(document)}))
    (problem,) = find_damage(tmp_path)
    assert problem.startswith("manifest.json ")


def become_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "state.json")
    document = {"files": {"state.json": {"bytes": 0, "sha256": ""}}}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({**document, "sha256": _hash_document(document)}))
    assert find_damage(tmp_path) == ["state.json is no file"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: (path / "state.json").write_text("[" * 200_000),
        lambda path: (path / "state.json").write_text('{"step": Infinity, "model": {}}'),
        lambda path: (path / "state.json").write_text('{"step": -1, "model": {}}'),
        lambda path: (path / "state.json").write_text('{"step": ' + "9" * 10_000 + "}"),
        lambda path: become_pipe(path / "tensors" / ".metadata"),
        lambda path: become_pipe(path / "tensors" / "__0_0.distcp"),
    ],
    ids=["nested", "infinite", "negative", "a long number", "a pipe as metadata", "a pipe as tensors"],
)  # fmt: skip
def test_files_of_another_kind_are_refused_in_a_line(tmp_path, spoil):
    train_and_save(Layout(), SHAPE, tmp_path, 1, 1)
    (path,) = list_checkpoints(tmp_path)
    spoil(path)
    assembly, optimizer = build(Layout(), SHAPE, seed=2)
    message = message_of(lambda: load_checkpoint(path, assembly.modules, optimizer, SHAPE, ADAMW))
    assert message is not None and message.startswith(f"{path} cannot be read: ") and "\n" not in message
    (path / MANIFEST_NAME).write_text("[" * 200_000)
    assert find_damage(path)[0].startswith("manifest.json cannot be read: ValueError it is nested more than 100 deep")


def test_a_refusal_shows_no_control_characters_of_the_file():
    with pytest.raises(RefusedPickle) as refusal:
        parse_metadata(HEAD + name("os\x1b[2J", "system\n") + pickle.STOP)
    assert str(refusal.value).isprintable()


@pytest.mark.usefixtures("one_rank")
def test_an_origin_that_cannot_be_read_is_refused(tmp_path):
    train_and_save(Layout(), SHAPE, tmp_path, 1, 1)
    (path,) = list_checkpoints(tmp_path)
    (path / "state.json").write_text("[]")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_origin(path)
