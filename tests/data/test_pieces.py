"""Pieces: what a file became is kept when another file changes, and bad rows are left out up to a limit."""

import json
import os
import shutil
import signal
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dtlayout.data.documents
import dtlayout.data.prepare
import dtlayout.data.tokenizing
from dtlayout.base.errors import DataError
from dtlayout.config.sections import DataConfig
from dtlayout.data import sources
from dtlayout.data.extent import describe_sources
from dtlayout.data.prepare import prepare_shard, prepare_tokens
from dtlayout.data.readers import read_rows
from dtlayout.data.samples import SampledSource
from dtlayout.data.tokenizing import Units, cut_into_chunks
from dtlayout.data.tokens import TokenFile

pytestmark = pytest.mark.usefixtures("offline")

BROKEN = '{"text": "never closed'


@pytest.fixture
def files_read(monkeypatch) -> list[str]:
    """Names of the files that are read, in that order."""
    names: list[str] = []

    def note(file: Path, *more):
        names.append(file.name)
        return read_rows(file, *more)

    monkeypatch.setattr(sources, "read_rows", note)
    return names


def write(path: Path, rows) -> Path:
    """Rows as JSON lines; a text is a line as it is."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def prepare(folder: Path, **options) -> TokenFile:
    """The tokens of all files of FOLDER/corpus."""
    source = str(folder / "corpus" / "*.jsonl")
    return TokenFile.open(prepare_tokens(DataConfig(source=source, folder=str(folder / "tokens"), **options)))


def texts(*names: str) -> list[dict[str, str]]:
    return [{"text": name} for name in names]


def test_mending_one_file_reads_no_other_that_was_whole(tmp_path, files_read):
    corpus = tmp_path / "corpus"
    for name in "acd":
        write(corpus / f"{name}.jsonl", texts(name, name))
    write(corpus / "b.jsonl", [*texts("b"), {"body": "b"}])
    with pytest.raises(DataError, match=r"^reading '.*\.jsonl' broke at row 2 of 'b\.jsonl': there is no field 'text'"):
        prepare(tmp_path)
    assert files_read == ["a.jsonl", "b.jsonl"]
    write(corpus / "b.jsonl", texts("b", "mended"))
    found = prepare(tmp_path)
    assert files_read[2:] == ["b.jsonl", "c.jsonl", "d.jsonl"]
    write(corpus / "c.jsonl", texts("more", "c"))  # of tokens that are whole
    again = prepare(tmp_path)
    assert files_read[5:] == ["c.jsonl"]
    for tokens, middle in ((found, b"c"), (again, b"more")):
        expected = [b"a", b"a", b"b", b"mended", middle, b"c", b"d", b"d"]
        assert tokens.tokens.tolist() == [each for text in expected for each in (*text, 256)]
        assert np.diff(tokens.documents).tolist() == [len(text) + 1 for text in expected]
        tokens.verify()


def test_bad_rows_are_left_out_up_to_a_limit_and_counted(tmp_path, files_read):
    rows = [*texts("a"), BROKEN, {"text": 1}, *texts("b"), "[]"]
    write(tmp_path / "corpus" / "a.jsonl", rows)
    write(tmp_path / "corpus" / "b.jsonl", [*texts("c"), {"text": None}])
    said = r"^reading '.*' broke at line 2 of 'a\.jsonl': JSONDecodeError: Untermi.* \(data\.max_bad_rows=N leaves out "
    with pytest.raises(DataError, match=said):
        prepare(tmp_path)
    more = r"^4 bad rows of '.*', more than data\.max_bad_rows=3; the first: line 2 of 'a\.jsonl': JSON.*"
    more += r" \(the limit counts the rows of all files of a source, .* so there may be more\)$"
    with pytest.raises(DataError, match=more):
        prepare(tmp_path, max_bad_rows=3)
    tokens = prepare(tmp_path, max_bad_rows=4)
    assert tokens.tokens.tolist() == [*b"a", 256, *b"b", 256, *b"c", 256]
    assert tokens.num_bad_rows == 4
    assert files_read == ["a.jsonl", "a.jsonl", "b.jsonl", "b.jsonl"]  # each goes on behind its last good row
    line = describe_sources([SampledSource(tokens, 2, "it")])[-1]
    assert line.startswith("note: 4 bad rows of it left out; the first: line 2 of 'a.jsonl': JSONDecodeError: ")
    assert prepare(tmp_path, max_bad_rows=9).folder == tokens.folder
    with pytest.raises(DataError, match=more):
        prepare(tmp_path, max_bad_rows=3)
    with pytest.raises(DataError, match=r"^reading '.*' broke at line 2"):
        prepare(tmp_path)


def test_bad_rows_are_counted_once_where_a_start_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(dtlayout.data.tokenizing, "_PART_TOKENS", 1)
    monkeypatch.setattr(dtlayout.data.documents, "_BATCH_CHARACTERS", 1)
    rows = [row for number in range(6) for row in (*texts(f"{number}"), BROKEN)]
    write(tmp_path / "corpus" / "a.jsonl", rows)
    for most in (0, 1, 4):
        with pytest.raises(DataError, match=f"more than data.max_bad_rows={most}" if most else "broke at line 2"):
            prepare(tmp_path, max_bad_rows=most)
    tokens = prepare(tmp_path, max_bad_rows=6)
    assert (tokens.num_bad_rows, bytes(tokens.tokens[::2].tolist())) == (6, b"012345")


def test_tokens_travel_with_their_corpus(tmp_path, files_read):
    home = tmp_path / "home"
    home.mkdir()
    for name in ("a", "b"):
        write(home / "corpus" / f"{name}.jsonl", texts(name))
    found = prepare(home)
    shutil.copytree(home, tmp_path / "away")  # with their times
    assert prepare(tmp_path / "away").folder.name == found.folder.name and len(files_read) == 2
    os.utime(tmp_path / "away" / "corpus" / "a.jsonl", (1, 1))
    assert prepare(tmp_path / "away").folder.name != found.folder.name and files_read[2:] == ["a.jsonl"]


def test_the_place_of_a_bad_row_stays_true_where_tokens_and_corpus_are_copied_to(tmp_path, monkeypatch):
    """Named below the folder that all files share, by one process and by those that each see a part of them."""
    monkeypatch.setattr(dtlayout.data.tokenizing, "_CHUNK_BYTES", 1)
    home = tmp_path / "home"
    for name in ("a", "b/c", "b/d"):
        (home / "corpus" / name).mkdir(parents=True)
        write(home / "corpus" / name / "x.jsonl", [*texts(name), *([BROKEN, "[]"] if name == "b/c" else [])])
    data = DataConfig(source=str(home / "corpus"), folder=str(home / "tokens"), max_bad_rows=2)
    place = "line 2 of 'b/c/x.jsonl': JSONDecodeError"
    one = TokenFile.open(prepare_tokens(data))
    assert one.first_bad_row.startswith(place)
    many = TokenFile.open(prepare_tokens(replace(data, folder=str(home / "many")), processes=2))
    assert many.first_bad_row == one.first_bad_row
    shutil.copytree(home, tmp_path / "away")
    shutil.rmtree(home)
    away = replace(data, source=str(tmp_path / "away" / "corpus"), folder=str(tmp_path / "away" / "tokens"))
    line = describe_sources([SampledSource(TokenFile.open(prepare_tokens(away)), 2, away.source)])[-1]
    assert line.startswith(f"note: 2 bad rows of {away.source} left out; the first: {place}")
    with pytest.raises(DataError, match=rf"^reading '{away.source}' broke at {place}"):
        prepare_tokens(replace(away, max_bad_rows=0))


def test_parts_that_another_process_has_removed_are_missed(tmp_path, monkeypatch):
    write(tmp_path / "corpus" / "a.jsonl", texts("a"))
    join = dtlayout.data.prepare._join
    monkeypatch.setattr(dtlayout.data.prepare, "_join", lambda units, *more: join([[] for _ in units], *more))
    with pytest.raises(DataError, match=r"parts of '.*' were removed while it was prepared; prepare it again"):
        prepare(tmp_path)


numbers = count()
corpora = st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=4).filter(any)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(corpora, st.integers(0, 40), st.integers(1, 12), st.integers(0, 3))
def test_whatever_was_there_before_the_tokens_are_those_of_one_reading(tmp_path, lengths, most, part, changed):
    folder = tmp_path / str(next(numbers))
    folder.mkdir()
    expected = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dtlayout.data.tokenizing, "_PART_TOKENS", part)
        patch.setattr(dtlayout.data.documents, "_BATCH_CHARACTERS", 3)
        for which in range(2):  # the second time one file has changed
            expected = []
            for i, each in enumerate(lengths):
                words = [chr(97 + i + (which and i == changed)) * length for length in each]
                path = write(folder / "corpus" / f"{i}.jsonl", texts(*words))
                os.utime(path, (1, 1 + (which and i == changed)))
                expected += [byte for word in words for byte in (*word.encode(), 256)]
            if not any(byte != 256 for byte in expected[: most or None]):
                return
            tokens = prepare(folder, max_tokens=most)
            assert tokens.tokens.tolist() == expected[: most or None]
            assert np.diff(tokens.documents).sum() == tokens.num_tokens and (np.diff(tokens.documents) > 0).all()
        whole = prepare(folder)
    assert whole.tokens.tolist() == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(corpora, st.integers(1, 6), st.integers(1, 12), st.randoms(use_true_random=False))
def test_shards_in_any_order_and_some_that_are_missing_give_the_tokens_of_one_reading(tmp_path, lengths, n, part, rng):
    folder = tmp_path / str(next(numbers))
    folder.mkdir()
    for i, each in enumerate(lengths):
        write(folder / "corpus" / f"{i}.jsonl", texts(*(chr(97 + i) * length for length in each)))
    data = DataConfig(source=str(folder / "corpus" / "*.jsonl"), folder=str(folder / "shards"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dtlayout.data.tokenizing, "_PART_TOKENS", part)
        if not any(map(any, lengths)):
            return
        done = [prepare_shard(data, shard, n) for shard in rng.sample(range(n), rng.randint(0, n))]
        joined = prepare_tokens(data)
    assert sum(shard.num_files for shard in done) <= len(lengths)
    if len(done) == n:
        assert sum(shard.num_files for shard in done) == len(lengths)
    one = prepare_tokens(replace(data, folder=str(folder / "one")))
    for path in one.iterdir():
        assert (joined / path.name).read_bytes() == path.read_bytes()
    assert prepare_shard(data, 0, n).parts == joined


def test_processes_share_files_and_give_the_tokens_of_one(tmp_path, monkeypatch, capsys):
    """A chunk for each file, since the limit is small; and a process that is killed is told from a file that is bad."""
    for i in range(6):
        write(tmp_path / "corpus" / f"{i}.jsonl", texts(*(f"{i} and {j}" for j in range(200 * i))))
    data = DataConfig(source=str(tmp_path / "corpus" / "*.jsonl"), folder=str(tmp_path / "one"), max_bad_rows=1)
    one, noted = prepare_tokens(data), []
    monkeypatch.setattr(dtlayout.data.tokenizing, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(dtlayout.data.tokenizing, "_SECONDS_BETWEEN_LINES", 0.05)
    monkeypatch.chdir(tmp_path)  # paths below the working directory lead to it in each process
    many = prepare_tokens(replace(data, source="corpus/*.jsonl", folder="many"), processes=2, note=noted.append)
    for path in one.iterdir():
        if path.name != "tokens.json":  # which names the source
            assert (many / path.name).read_bytes() == path.read_bytes()
    assert (noted[0].num_documents, noted[0].num_tokens) == (3000, TokenFile.open(one).num_tokens)
    assert " tokens/s" in capsys.readouterr().err
    for i in (2, 4):
        write(tmp_path / "corpus" / f"{i}.jsonl", [*texts("x"), BROKEN])
    with pytest.raises(DataError, match=r"2 bad rows of .*, more than data.max_bad_rows=1; the first: .*2\.jsonl"):
        prepare_tokens(replace(data, folder=str(tmp_path / "bad")), processes=2)
    write(tmp_path / "corpus" / "4.jsonl", [BROKEN] * 2)
    with pytest.raises(DataError, match=r"2 bad rows of .*; the first: .*4\.jsonl"):
        prepare_tokens(replace(data, folder=str(tmp_path / "worse")), processes=2)
    monkeypatch.setattr(dtlayout.data.tokenizing, "_tokenize_chunk", end_this_process)
    with pytest.raises(DataError, match=r"was ended from outside, .* use fewer --processes than 2"):
        prepare_tokens(replace(data, folder=str(tmp_path / "killed")), processes=2)


def end_this_process(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_chunks_are_files_that_follow_each_other_up_to_a_size(tmp_path, monkeypatch):
    sizes, firsts = [3, 9, 1, 1, 1, 30, 2, 2], [0, 0, 0, None, 0, 0, 5, None]
    files = [tmp_path / str(i) for i in range(len(sizes))]
    for file, size in zip(files, sizes, strict=True):
        file.write_bytes(b"x" * size)
    monkeypatch.setattr(dtlayout.data.tokenizing, "_CHUNK_BYTES", 12)
    units = Units(files, [str(f) for f in files], firsts)
    assert list(cut_into_chunks(units, 2)) == [(0, 2), (2, 3), (4, 6), (6, 7)]
    assert list(cut_into_chunks(units, 8)) == [(0, 2), (2, 3), (4, 6), (6, 7)]  # 46 bytes, of which a process has 6
    assert list(cut_into_chunks(units.take(4, 7), 40)) == [(0, 1), (1, 2), (2, 3)]
