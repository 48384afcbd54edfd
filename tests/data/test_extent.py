"""How much of its data a run reads: epochs, documents that are cut, and what is held out and never measured."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dtlayout.config.sections import DataConfig
from dtlayout.data.divisions import PackedDivision
from dtlayout.data.extent import describe_held_out, describe_sources, describe_training
from dtlayout.data.prepare import prepare_tokens
from dtlayout.data.samples import SampledSource, Seen, open_samples
from dtlayout.data.tokens import TokenFile
from dtlayout.spec.batch import Batch

pytestmark = pytest.mark.usefixtures("offline")


def read(tmp_path, texts_by_source, *, samples="packed", global_batch=4, weights=None):
    entries = []
    for i, texts in enumerate(texts_by_source):
        path = tmp_path / f"{i}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        entries.append({"source": str(path), "weight": (weights or [1.0] * 9)[i]})
    from dtlayout.config.sections import Source

    data = DataConfig(
        mixture=tuple(Source(**entry) for entry in entries), samples=samples, folder=str(tmp_path / "tokens")
    )
    folders = [prepare_tokens(each) for each in data.sources]
    return open_samples(data, folders, 257, Batch(global_batch=global_batch, seq_len=16), seed=0)


def test_steps_are_so_many_epochs(tmp_path):
    (line,) = describe_training(read(tmp_path, [["x" * 159]]), 100)  # 160 tokens with the end
    assert line == "100 steps read 400 samples: 44.4 epochs of 9 samples with 144 targets"


def test_a_source_of_which_only_the_first_tokens_are_taken_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 500)
    for most, said in ((0, 0), (400, 1), (502, 0)):
        data = DataConfig(source=str(tmp_path / "a.txt"), folder=str(tmp_path / "tokens"), max_tokens=most)
        samples = open_samples(data, [prepare_tokens(data)], 257, Batch(global_batch=4, seq_len=16), seed=0)
        found = [line for line in describe_training(samples, 1) if "max_tokens" in line]
        assert found == [f"note: data.max_tokens takes the first 400 tokens of {data.source} alone; 0 takes all"] * said


def test_after_a_resume_with_another_batch_samples_count_that_were_read(tmp_path):
    samples = replace(read(tmp_path, [["x" * 159]]), seen=Seen(step=10, samples=90, tokens=1440))
    (line,) = describe_training(samples, 12)
    assert line.startswith("12 steps read 98 samples: ")
    assert describe_training(samples, 5)[0].startswith("5 steps read 90 samples: ")  # it has gone further than that


def test_of_several_sources_each_has_its_epochs(tmp_path):
    samples = read(tmp_path, [["x" * 160], ["y" * 320]], weights=[3.0, 1.0])
    (line,) = describe_training(samples, 10)
    assert line == (
        f"10 steps read 40 samples: 3 epochs of 10 samples with 160 targets of {tmp_path / '0.jsonl'}, "
        f"0.5 epochs of 20 samples with 320 targets of {tmp_path / '1.jsonl'}"
    )


@pytest.mark.parametrize(
    ("kind", "texts", "said"),
    [
        ("padded", ["x" * 30, "y" * 16, "w"], "padded: 29.4% of the samples is padding; 1 of 3 documents cut, 33.3%: "),
        ("padded", ["x" * 16] * 4, "padded: 0.0% of the samples is padding; no document is cut"),
        ("best-fit", ["x" * 30, "y" * 16, ""], "best-fit: 2.0% of the samples is padding; 1 of 3 documents cut, "),
        (
            "packed",
            ["x" * 15, "y" * 16, "z" * 31, "w"],
            "packed: no padding; 1 of 4 documents cut, 25.0%: a sample ends",
        ),
        ("packed", ["x" * 16, "y" * 15, "w"], "packed: no padding; no document is cut"),
        ("padded", ["x" * 30, *["y"] * 1000], "1 of 1,001 documents cut, less than 0.1%: longer than a sample"),
    ],
)
def test_padding_and_documents_that_are_cut_are_said(tmp_path, kind, texts, said):
    samples = read(tmp_path, [texts], samples=kind)
    (line,) = describe_training(samples, 1)[1:]
    assert line == describe_held_out("", samples, 1)[1]
    assert line.startswith(f"{tmp_path / '0.jsonl'}, {kind}: ") and said in line


@pytest.mark.parametrize(
    ("kind", "loss_on", "said"),
    [
        (
            "padded",
            "answers",
            "in 1, the answers lie behind batch.seq_len=4, where a conversation is cut; in 2, no conv",
        ),
        (
            "packed",
            "answers",
            "the answers lie in other samples of batch.seq_len=4",
        ),
        ("padded", "last", "in 1, the last answer of each conversation lies behind batch.seq_len=4, where"),
    ],
)
def test_why_nothing_is_learnt_from_a_sample_is_said(write_tokens, kind, loss_on, said):
    """Documents of 9, 3, 3 and 6 tokens: an answer behind the sample, none, none, and one at the begin."""
    marks = [0] * 7 + [1, 1] + [0] * 6 + [0, 1, 1, 0, 0, 0]
    tokens = replace(TokenFile.open(write_tokens(range(21), documents=[9, 3, 3, 6], loss_mask=marks)), loss_on=loss_on)
    source = SampledSource(tokens, 4, "it", samples=kind, is_chat=True)
    (line,) = (each for each in describe_sources([source]) if "nothing is learnt" in each)
    num_without = source.targets.num_samples_without
    assert line.startswith(f"note: nothing is learnt from {num_without} samples of it, which hold no target: {said}")


def test_where_there_is_one_reason_no_number_is_said(write_tokens):
    for marks, said in (
        ([0, 0, 0, 1], "the answers lie behind batch.seq_len=2, where a conversation is cut"),
        ([0] * 4, "no conversation there has an answer that is learnt"),
    ):
        tokens = TokenFile.open(write_tokens(range(4), documents=[4], loss_mask=marks))
        source = SampledSource(tokens, 2, "it", samples="best-fit", is_chat=True)
        assert describe_sources([source])[-1].endswith(f"1 sample of it, which hold no target: {said}")


@pytest.mark.parametrize(
    ("name", "num_batches", "said"),
    [
        ("", 8, "validation measures 10 samples of 10"),
        ("", 0, "validation measures 10 samples of 10"),
        ("", 1, "validation measures 4 samples of 10, 1 batch of 3: batches=1"),
        ("code", 2, "validation code measures 8 samples of 10, 2 batches of 3: batches=2"),
    ],
)
def test_how_much_of_validation_is_measured_is_said(tmp_path, name, num_batches, said):
    assert describe_held_out(name, read(tmp_path, [["x" * 160]]), num_batches) == [said]


@pytest.mark.parametrize(
    ("num_tokens", "num_batches", "said"),
    [
        (49, 0, "validation measures 3 samples of 3"),
        (50, 0, "validation measures 3 samples of 3; 1 token behind the last whole sample left out"),
        (61, 8, "validation measures 3 samples of 3; 12 tokens behind the last whole sample left out"),
        (95, 1, "validation measures 4 samples of 5, 1 batch of 2: batches=1"),
    ],
)
def test_tokens_that_fill_no_sample_of_what_is_held_out_are_said(tmp_path, num_tokens, num_batches, said):
    assert describe_held_out("", read(tmp_path, [["x" * (num_tokens - 1)]]), num_batches) == [said]


@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=20), seq_len=st.integers(2, 12))
def test_a_packed_document_is_cut_exactly_where_samples_have_some_of_it_and_none_has_all(lengths, seq_len):
    ends = np.cumsum([0, *lengths])
    assume(ends[-1] > seq_len)
    tokens = SimpleNamespace(documents=ends, num_tokens=int(ends[-1]))
    division = PackedDivision(cast(TokenFile, tokens), seq_len)
    samples = [range(i * seq_len, i * seq_len + seq_len + 1) for i in range(division.num_samples)]
    documents = [range(*pair) for pair in itertools.pairwise(ends)]
    cut = [
        document
        for document in documents
        if any(document[0] in each for each in samples)
        and not any(document[0] in each and document[-1] in each for each in samples)
    ]
    assert division.num_cut == len(cut)
    assert division.num_left_out == ends[-1] - samples[-1][-1] - 1
