"""Preparing tokens: what is written, once, whole, whoever else is writing."""

import gzip
import hashlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dtlayout.data.documents
import dtlayout.data.prepare
import dtlayout.data.tokenizing
from dtlayout.base.errors import DataError
from dtlayout.config.sections import DataConfig
from dtlayout.data.prepare import prepare_shard, prepare_tokens
from dtlayout.data.sources import Corpus
from dtlayout.data.tokenizing import TokenizingCounts, TokenizingProgress
from dtlayout.data.tokens import TokenFile


def as_corpus(source, documents):
    return Corpus(source, [], ({"text": text, "body": text} for text in documents))


@pytest.fixture
def serve(monkeypatch):
    """Replaces the corpus by these documents, so that only the tests of the whole path open `datasets`."""

    def serve(documents):
        monkeypatch.setattr(dtlayout.data.prepare, "list_files", lambda *_: [])
        monkeypatch.setattr(dtlayout.data.tokenizing, "open_corpus", lambda source, *_: as_corpus(source, documents))

    return serve


def prepare(source, tokenizer, folder, **options):
    return prepare_tokens(DataConfig(source=source, tokenizer=tokenizer, folder=str(folder), **options))


def read(folder):
    info = json.loads((folder / "tokens.json").read_text())
    return info, np.fromfile(folder / "tokens.bin", dtype=np.dtype(info["dtype"]).newbyteorder("<"))


@pytest.mark.parametrize("messages_field", ["", "messages"])
def test_a_byte_that_is_another_one_is_found_by_who_reads_all(tmp_path, offline, monkeypatch, messages_field):
    monkeypatch.setattr(dtlayout.data.tokenizing, "_PART_TOKENS", 100)
    monkeypatch.setattr(dtlayout.data.documents, "_BATCH_CHARACTERS", 1)
    talk = [{"role": "user", "content": "one and one?"}, {"role": "assistant", "content": "two, or nearly"}]
    row = json.dumps({"text": "some words", "messages": talk}) + "\n"
    (tmp_path / "a.jsonl").write_text(row * 50)
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    data = DataConfig(
        source=str(tmp_path / "a.jsonl"), folder=str(tmp_path / "tokens"), messages_field=messages_field,
        chat_template=str(tmp_path / "t.jinja"),
    )  # fmt: skip
    folder = prepare_tokens(data)
    TokenFile.open(folder).verify()
    for path in sorted(folder.glob("*.bin")):
        whole = path.read_bytes()
        for place in (0, 8 * (len(whole) // 16), len(whole) - 1):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(
                DataError,
                match=rf"is damaged: its files are not those that tokens\.json has the checksum of: {path.name};",
            ):
                TokenFile.open(folder).verify()
        path.write_bytes(whole)
    TokenFile.open(folder).verify()


@pytest.mark.parametrize("loss_mask", [(), (0, 1, 1)])
def test_tokens_of_older_versions_are_read_and_what_cannot_be_compared_is_said(write_tokens, loss_mask):
    folder = write_tokens([1, 2, 256], loss_mask=loss_mask)
    sha256 = hashlib.sha256((folder / "tokens.bin").read_bytes() + bytes(loss_mask)).hexdigest()
    info = json.loads((folder / "tokens.json").read_text()) | {"sha256": sha256}
    (folder / "tokens.json").write_text(json.dumps(info))
    tokens = TokenFile.open(folder)
    assert tokens.tokens.tolist() == [1, 2, 256]
    assert tokens.fingerprint == sha256  # as checkpoints of that version have it
    if loss_mask:
        with pytest.raises(DataError, match=r"cannot be compared: an older version prepared it, .* delete that folder"):
            tokens.verify()
    else:
        tokens.verify()


def test_local_files_become_tokens_with_an_end_after_every_document(tmp_path, offline):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "hi"}\n{"text": ""}\n{"text": "you"}\n')
    folder = prepare(str(corpus), "bytes", tmp_path / "tokens")
    info, ids = read(folder)
    assert ids.tolist() == [*b"hi", 256, 256, *b"you", 256]
    assert info == {
        "dtype": "uint16",
        "num_tokens": 8,
        "num_documents": 3,
        "vocab_size": 257,
        "end_of_document": 256,
        "sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
        "documents_sha256": hashlib.sha256((folder / "documents.bin").read_bytes()).hexdigest(),
        "tokenizer": "bytes",
        "source": str(corpus),
        "text_field": "text",
        "split": "train",
        "max_tokens": 0,
    }
    assert np.fromfile(folder / "documents.bin", "<i8").tolist() == [0, 3, 4, 8]
    assert sorted(file.name for file in folder.iterdir()) == [
        "documents.bin",
        "tokens.bin",
        "tokens.json",
        "units.json",
    ]
    assert list(folder.parent.iterdir()) == [folder]


def test_a_tokenizer_file_gives_its_own_ids(tmp_path, serve, write_tokenizer):
    serve(["to be", "or not"])
    _, ids = read(prepare("x/y", str(write_tokenizer()), tmp_path))
    assert ids.tolist() == [2, 3, 1, 4, 5, 1]


@pytest.mark.parametrize(("num_words", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_ids_are_as_wide_as_the_vocabulary_needs(tmp_path, serve, write_tokenizer, num_words, dtype):
    words = ["<unk>", "</s>", *(f"w{i}" for i in range(2, num_words))]
    serve([words[-1]])
    info, ids = read(prepare("x/y", str(write_tokenizer(words=words)), tmp_path))
    assert info["dtype"] == dtype
    assert ids.tolist() == [num_words - 1, 1]


def test_batches_of_documents_do_not_show_in_the_tokens(tmp_path, serve, monkeypatch):
    monkeypatch.setattr(dtlayout.data.documents, "_BATCH_CHARACTERS", 4)
    serve(["a", "bcdefg", "", "", "", "", "h"])
    _, ids = read(prepare("x/y", "bytes", tmp_path))
    assert ids.tolist() == [97, 256, *b"bcdefg", 256, 256, 256, 256, 256, 104, 256]


@pytest.mark.parametrize(("max_tokens", "expected"), [(1, b"a"), (3, b"ab\n"), (4, b"ab\nc"), (99, b"ab\ncd\n")])
def test_max_tokens_cuts_exactly(tmp_path, serve, max_tokens, expected):
    serve(["ab", "cd"])
    info, ids = read(prepare("x/y", "bytes", tmp_path, max_tokens=max_tokens))
    assert ids.tolist() == [256 if byte == ord("\n") else byte for byte in expected]
    assert info["num_tokens"] == len(expected)


def test_max_tokens_stops_reading_an_endless_corpus(tmp_path, serve):
    serve(itertools.repeat("x" * 1000))
    info, _ = read(prepare("x/y", "bytes", tmp_path, max_tokens=5000))
    assert (info["num_tokens"], info["num_documents"]) == (5000, 5)


def test_a_second_call_reads_nothing(tmp_path, serve):
    serve(["once"])
    first = prepare("x/y", "bytes", tmp_path)
    serve(None)
    assert prepare("x/y", "bytes", tmp_path) == first


def test_whatever_decides_the_ids_decides_the_folder(tmp_path, serve, write_tokenizer):
    serve(["to be"])
    path = str(write_tokenizer())
    folders = [
        prepare("x/y", "bytes", tmp_path),
        prepare("x/z", "bytes", tmp_path),
        prepare("x/y", "bytes", tmp_path, split="test"),
        prepare("x/y", "bytes", tmp_path, text_field="body"),
        prepare("x/y", "bytes", tmp_path, max_tokens=2),
        prepare("x/y", path, tmp_path),
        prepare("x/y", path, tmp_path, end_of_document="not"),
    ]
    write_tokenizer(words=("<unk>", "</s>", "be", "to"))  # same path, other content
    folders.append(prepare("x/y", path, tmp_path))
    assert len(set(folders)) == len(folders)


def test_a_changed_or_touched_file_is_prepared_again(tmp_path, monkeypatch):
    monkeypatch.setattr(dtlayout.data.tokenizing, "open_corpus", lambda source, *_: as_corpus(source, ["x"]))
    corpus = tmp_path / "a.txt"
    folders = set()
    for text, time_s in (("one", 1), ("three", 1), ("three", 2)):
        corpus.write_text(text)
        os.utime(corpus, (time_s, time_s))
        folders.add(prepare(str(corpus), "bytes", tmp_path))
    assert len(folders) == 3


CHILD = """
import os, sys, time
import dtlayout.data.documents as documents
import dtlayout.data.prepare as prepare, dtlayout.data.tokenizing as tokenizing
from dtlayout.data.sources import Corpus
from dtlayout.data.tokenizing import TokenizingCounts, TokenizingProgress

folder, ending = sys.argv[1:]

def slow_rows():
    for i in range(5):
        time.sleep(0.1)
        if ending == "killed" and i == 3:
            time.sleep(0.5)  # until what came before is tokenized
            os.kill(os.getpid(), 9)
        yield {"text": "x" * 10}

prepare.list_files = lambda *_: []
tokenizing.open_corpus = lambda source, *_: Corpus(source, [], slow_rows())
tokenizing._PART_TOKENS = documents._BATCH_CHARACTERS = 1
print(prepare.prepare_tokens(prepare.DataConfig(source="x/y", tokenizer="bytes", folder=folder)))
"""


def start_child(folder, ending):
    command = [sys.executable, "-c", CHILD, str(folder), ending]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_two_processes_leave_one_folder_that_is_whole(tmp_path):
    children = [start_child(tmp_path / "tokens", "done") for _ in range(2)]
    said = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert said[0] == said[1]
    info, ids = read(Path(said[0].strip()))
    assert info["num_tokens"] == ids.size == 55
    assert [file.name for file in (tmp_path / "tokens").iterdir()] == [Path(said[0].strip()).name]


def test_the_first_whole_preparation_wins_and_is_left_as_it_is(tmp_path, serve, monkeypatch):
    inside = []

    def slow_documents():
        serve(["first"])  # another process begins later and is done earlier
        inside.append(prepare("x/y", "bytes", tmp_path))
        assert (inside[0] / "tokens.json").exists()
        yield "second"

    serve(slow_documents())
    folder = prepare("x/y", "bytes", tmp_path)
    assert inside == [folder]
    assert read(folder)[1].tolist() == [*b"first", 256]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_somebody_took_the_description_out_of_is_an_error(tmp_path, serve):
    serve(["once"])
    folder = prepare("x/y", "bytes", tmp_path)
    (folder / "tokens.json").unlink()
    serve(["again"])
    with pytest.raises(DataError, match=r"has no tokens\.json, so it is not whole; delete it"):
        prepare("x/y", "bytes", tmp_path)
    assert list(tmp_path.iterdir()) == [folder]


def test_after_a_kill_only_what_was_not_whole_is_tokenized_again(tmp_path, serve, capsys):
    child = start_child(tmp_path / "tokens", "killed")
    child.communicate(timeout=60)
    assert child.returncode == -9
    (left,) = (tmp_path / "tokens").iterdir()
    parts = sorted(file.name for file in left.iterdir())
    assert left.suffix == ".parts" and parts[0].startswith("000000-")
    serve(["never read"] * len(parts) + ["x" * 10] * (5 - len(parts)))
    info, ids = read(prepare("x/y", "bytes", tmp_path / "tokens"))
    assert info["num_tokens"] == ids.size == 55
    assert ids.tolist() == [*b"x" * 10, 256] * 5
    assert f"x/y: going on after {11 * len(parts)} tokens" in capsys.readouterr().err
    assert len(list((tmp_path / "tokens").iterdir())) == 1


def break_after(texts):
    yield from texts
    raise OSError("the line is down")


def test_a_corpus_on_the_hub_that_breaks_off_is_gone_on_with(tmp_path, serve, monkeypatch):
    monkeypatch.setattr(dtlayout.data.tokenizing, "_PART_TOKENS", 1)
    monkeypatch.setattr(dtlayout.data.documents, "_BATCH_CHARACTERS", 1)
    serve(break_after(["a", "b", "c"]))
    with pytest.raises(DataError, match=r"reading 'x/y' broke after 3 rows: OSError: the line is down"):
        prepare("x/y", "bytes", tmp_path)
    serve(["?", "?", "c", "d"])
    info, ids = read(prepare("x/y", "bytes", tmp_path))
    assert bytes(ids[::2].tolist()) == b"abcd"
    assert info["num_documents"] == 4


def test_parts_that_a_crash_has_torn_are_made_again(tmp_path, serve, monkeypatch):
    monkeypatch.setattr(dtlayout.data.tokenizing, "_PART_TOKENS", 1)
    monkeypatch.setattr(dtlayout.data.documents, "_BATCH_CHARACTERS", 1)
    serve(break_after(["a", "b", "c"]))
    with pytest.raises(DataError):
        prepare("x/y", "bytes", tmp_path)
    (parts,) = tmp_path.iterdir()
    second = sorted(parts.iterdir())[1]
    second.write_bytes(second.read_bytes()[:50])
    serve(["a", "b", "c"])
    assert read(prepare("x/y", "bytes", tmp_path))[1].tolist() == [97, 256, 98, 256, 99, 256]


def test_a_part_whose_bits_have_flipped_is_an_error(tmp_path, serve, monkeypatch):
    monkeypatch.setattr(dtlayout.data.tokenizing, "_PART_TOKENS", 1)
    monkeypatch.setattr(dtlayout.data.documents, "_BATCH_CHARACTERS", 1)
    serve(break_after(["a" * 100, "b", "c"]))
    with pytest.raises(DataError):
        prepare("x/y", "bytes", tmp_path)
    (parts,) = tmp_path.iterdir()
    first = min(parts.iterdir())
    content = first.read_bytes()
    first.write_bytes(content.replace(b"a\0a\0a", b"a\0b\0a", 1))
    serve(["a" * 100, "b", "c"])
    with pytest.raises(DataError, match=r"000000-\w+\.npz' is damaged .*CRC.*; delete '.*parts'"):
        prepare("x/y", "bytes", tmp_path)


@pytest.mark.parametrize(
    ("second", "options", "said"),
    [
        (None, {}, r"row 2 of '.*b\.jsonl': there is nothing in field 'text'; set text_field or remove that row"),
        ("x", {"text_field": "a"}, r"row 1 of '.*a\.jsonl': there is no field 'a'; it has text: set text_field"),
        ("x", {"messages_field": "text"}, r"row 1 of '.*a\.jsonl': field 'text' holds no list of messages"),
    ],
)
def test_a_row_that_does_not_fit_is_named_and_no_tokens_are_left(tmp_path, offline, second, options, said):
    for name, texts in (("a", ["y"]), ("b", ["x", second])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    template = str(tmp_path / "t.jinja")
    with pytest.raises(DataError, match=said):
        prepare(str(tmp_path / "*.jsonl"), "bytes", tmp_path / "tokens", chat_template=template, **options)
    assert not list((tmp_path / "tokens").glob("*/tokens.json"))
    assert len(list((tmp_path / "tokens").iterdir())) == (second is None)  # what was fine before it


def test_what_takes_long_says_how_far_it_is(tmp_path, serve, monkeypatch, capsys):
    monkeypatch.setattr(dtlayout.data.tokenizing, "_SECONDS_BETWEEN_LINES", 0)
    serve(["abc", "de"])
    prepare("x/y", "bytes", tmp_path, max_tokens=7)
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"x/y: 57% of 7 tokens, 4 tokens of 1 document, [\d,]+ tokens/s, 0 s left", first)
    assert second.startswith("x/y: 100% of 7 tokens, 7 tokens of 2 documents, ")


@pytest.mark.parametrize("documents", [[], ["", ""]])
def test_an_empty_corpus_is_an_error(tmp_path, serve, documents):
    serve(documents)
    with pytest.raises(DataError, match=f"'x/y' holds no text: {len(documents)} documents"):
        prepare("x/y", "bytes", tmp_path)
    assert not list(tmp_path.rglob("tokens*"))


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, serve):
    serve(["x"])
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write tokens to"):
        prepare("x/y", "bytes", tmp_path / "file")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow"])
def test_how_far_it_is_counts_bytes_as_they_lie_on_disk(tmp_path, offline, monkeypatch, capsys, kind):
    monkeypatch.setattr(dtlayout.data.tokenizing, "_SECONDS_BETWEEN_LINES", 0)
    monkeypatch.setattr(dtlayout.data.documents, "_BATCH_CHARACTERS", 1)
    rng = random.Random(0)
    rows = [{"text": f"{rng.getrandbits(12_000):x}"} for _ in range(600)]
    for number in range(3):
        write_rows(tmp_path / "corpus" / f"{number}.{kind}", rows)
    total = sum(file.stat().st_size for file in (tmp_path / "corpus").iterdir())
    done = prepare_shard(DataConfig(source=str(tmp_path / "corpus"), folder=str(tmp_path / "tokens")), 0, 1)
    assert done.tokenized.num_read == total
    line = rf"{tmp_path}/corpus: (\d+)% of {total / 2**20:.1f} MiB, file (\d) of 3, .* tokens/s, \d+ s left"
    found = [re.fullmatch(line, each) for each in capsys.readouterr().err.splitlines() if " left" in each]
    shares = [int(each[1]) for each in found]
    assert shares == sorted(shares) and len(set(shares)) > 5 and shares[-1] > 99
    assert {int(each[2]) for each in found} == {1, 2, 3}


def write_rows(path, rows):
    path.parent.mkdir(exist_ok=True)
    table, lines = pa.Table.from_pylist(rows), "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=100)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=50)
    elif path.suffix == ".zst":
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(lines)
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


def test_the_speed_is_that_of_the_last_minute_and_what_was_there_before_is_no_speed(monkeypatch, capsys):
    clock = iter([0.0, *range(10, 200, 10)])
    monkeypatch.setattr(dtlayout.data.tokenizing.time, "perf_counter", lambda: next(clock))
    progress = TokenizingProgress(DataConfig(source="x/y"), TokenizingCounts(1, 1000, 2, 4000), 2**20, 9)
    progress.count(TokenizingCounts(1, 500, 0, 90_000, passed=80_000))
    for _ in range(9):
        progress.count(TokenizingCounts(1, 100, 0, 1000))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "x/y: 9% of 1.0 MiB, file 3 of 9, 1,500 tokens of 2 documents, 50 tokens/s, 16 min left"
    assert lines[-1].endswith(", 10 tokens/s, 2.6 h left")


def test_of_a_dataset_on_the_hub_rows_are_counted(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(dtlayout.data.tokenizing, "_SECONDS_BETWEEN_LINES", 0)
    monkeypatch.setattr(dtlayout.data.prepare, "list_files", lambda *_: [])
    corpus = replace(as_corpus("x/y", ["ab"] * 4), num_rows=4)
    monkeypatch.setattr(dtlayout.data.tokenizing, "open_corpus", lambda *_: corpus)
    prepare("x/y", "bytes", tmp_path)
    shares = [line.split(", ")[0] for line in capsys.readouterr().err.splitlines()]
    assert shares[:4] == [f"x/y: {share}% of 4 rows" for share in (25, 50, 75, 100)]


INTERRUPTED = CHILD.replace("os.kill(os.getpid(), 9)", "os.kill(os.getpid(), NUMBER); time.sleep(0.5)")


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_an_interrupt_is_answered_at_once_and_the_part_is_kept(number, exit_code, tmp_path):
    code = INTERRUPTED.replace("NUMBER", str(int(number))).replace("tokenizing._PART_TOKENS = documents", "documents")
    assert code != INTERRUPTED != CHILD
    command, environment = [sys.executable, "-c", code, str(tmp_path), "killed"], {"PYTHONPATH": ":".join(sys.path)}
    child = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)
    assert child.stderr.startswith("saving a part, ending\n") and child.returncode == exit_code
    (parts,) = tmp_path.iterdir()
    assert parts.suffix == ".parts" and len(list(parts.glob("*.npz"))) == 1


PEAK = """
import re, sys
from pathlib import Path
from dtlayout.config.sections import DataConfig
from dtlayout.data import tokenizing
from dtlayout.data.prepare import prepare_tokens
tokenizing._PART_TOKENS = int(sys.argv[3])
prepare_tokens(DataConfig(source=sys.argv[1], folder=sys.argv[2]))
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read as Linux says it")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Parts are small here, so that both sizes have many: 16 MiB instead of 4 took 0.2 MiB more.

    `ru_maxrss` would be that of pytest, from which a process is forked.
    """
    row = json.dumps({"text": "some words of a document " * 40}) + "\n"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def weigh(num_mib: int, part_tokens: int) -> int:
        """Bytes at the peak of a process that prepares a corpus of so many MiB."""
        corpus = tmp_path / f"{num_mib}.jsonl"
        corpus.write_text(row * (num_mib * 2**20 // len(row)))
        command = [
            sys.executable,
            "-c",
            PEAK,
            str(corpus),
            str(tmp_path / f"{num_mib}-{part_tokens}"),
            str(part_tokens),
        ]
        return 1024 * int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    part = 2**19
    assert weigh(16, part) - weigh(4, part) < 6 * 2**20, "half of the 12 MiB that holding the text would take"
    assert weigh(16, 2**25) - weigh(16, part) > 12 * 2**20, "a part as large as the corpus is seen"
