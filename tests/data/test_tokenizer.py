"""Byte and file tokenizers: round trips, the end of document, refusals."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlayout.base.errors import DataError
from dtlayout.config.sections import DataConfig
from dtlayout.data.prepare import prepare_tokens
from dtlayout.data.samples import TokenFile
from dtlayout.data.tokenizer import BYTES, END_OF_DOCUMENT_TOKENS, load_tokenizer


def encode(tokenizer, *texts):
    return [ids.tolist() for ids in tokenizer.encode_batch(texts)]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_round_trip_any_text(text):
    (ids,) = BYTES.encode_batch([text])
    assert bytes(ids.tolist()).decode() == text
    assert BYTES.end_of_document not in ids
    assert ids.size == len(text.encode())


def test_bytes_know_their_size_and_end():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)
    assert encode(tokenizer, "a", "", "\ud800") == [[97], [], [ord("?")]]


def test_bytes_refuse_another_end_of_document():
    with pytest.raises(DataError, match="leave end_of_document empty"):
        load_tokenizer("bytes", end_of_document="</s>")


def test_a_tokenizer_file_encodes(write_tokenizer):
    tokenizer = load_tokenizer(str(write_tokenizer()))
    assert encode(tokenizer, "to be or not", "to be", "") == [[2, 3, 4, 5], [2, 3], []]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (6, 1)


def test_a_folder_stands_for_its_tokenizer_file(write_tokenizer):
    assert load_tokenizer(str(write_tokenizer().parent)).vocab_size == 6


def test_text_cannot_forge_the_end_of_a_document(write_tokenizer):
    tokenizer = load_tokenizer(str(write_tokenizer(words=("<unk>", "to"), special=("</s>",))))
    assert tokenizer.end_of_document == 2
    assert encode(tokenizer, "to </s> to") == [[1, 0, 1]]


def test_truncation_and_padding_in_the_file_are_ignored(write_tokenizer):
    path = write_tokenizer()
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))
    assert encode(load_tokenizer(str(path)), "to be or not") == [[2, 3, 4, 5]]


def test_the_vocabulary_covers_the_largest_id_when_ids_have_holes(write_tokenizer):
    path = write_tokenizer()
    content = json.loads(path.read_text())
    content["model"]["vocab"]["far"] = 99
    path.write_text(json.dumps(content))
    assert load_tokenizer(str(path)).vocab_size == 100


def test_what_texts_begin_with_comes_before_each_document(write_tokenizer, tmp_path):
    path = write_tokenizer(words=("<unk>", "<s>", "to", "be"))
    plain = load_tokenizer(str(path))
    content = json.loads(path.read_text())
    names = {"<s>": 1, "</s>": 4}
    pieces = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
    pieces.insert(1, {"Sequence": {"id": "A", "type_id": 0}})
    special = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in names.items()}
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": special
    }  # fmt: skip
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(path))
    assert (plain.begin, tokenizer.begin) == ((), (1,))
    assert encode(tokenizer, "to be") == [[2, 3]]
    (tmp_path / "corpus.jsonl").write_text('{"text": "to be"}\n{"text": "be"}\n')
    data = DataConfig(source=str(tmp_path / "corpus.jsonl"), tokenizer=str(path), folder=str(tmp_path / "tokens"))
    assert TokenFile.open(prepare_tokens(data)).tokens.tolist() == [1, 2, 3, 4, 1, 3, 4]


@pytest.mark.parametrize("token", END_OF_DOCUMENT_TOKENS)
def test_well_known_ends_of_document_are_found(write_tokenizer, token):
    path = write_tokenizer(words=("<unk>", "a", token), special=(token,))
    assert load_tokenizer(str(path)).end_of_document == 2


def test_a_named_end_of_document_wins(write_tokenizer):
    path = write_tokenizer()
    named = load_tokenizer(str(path), end_of_document="not")
    assert named.end_of_document == 5
    assert named.fingerprint != load_tokenizer(str(path)).fingerprint


@pytest.mark.parametrize(("named", "said"), [("", "</s>, <|end_of_text|>, <|endoftext|>"), ("[END]", r"\[END\]")])
def test_a_missing_end_of_document_is_named(write_tokenizer, named, said):
    path = write_tokenizer(words=("<unk>", "a"), special=())
    with pytest.raises(DataError, match=f"none of the tokens {said}.*name one of its tokens with end_of_document"):
        load_tokenizer(str(path), end_of_document=named)


def test_a_missing_file_is_named():
    with pytest.raises(DataError, match=r"'byts'.*give 'bytes' or the path of a tokenizer\.json"):
        load_tokenizer("byts")


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_file_is_read_once_and_again_when_it_has_changed(write_tokenizer):
    path = str(write_tokenizer())
    first = load_tokenizer(path)
    assert load_tokenizer(path) is first
    assert load_tokenizer(path, end_of_document="not").end_of_document == 5
    write_tokenizer(words=("<unk>", "</s>", "to"))
    assert load_tokenizer(path).vocab_size == 3


def test_a_piece_of_text_that_looks_like_an_end_of_document_is_none(write_tokenizer):
    """As in the vocabularies of GPT-2's kind, which have </s> from the pages that they were made of."""
    words = ("<unk>", "</s>", "to", "<|endoftext|>")
    path = write_tokenizer(words=words, special=("<|endoftext|>",))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.end_of_document == 3
    assert encode(tokenizer, "to </s> to") == [[2, 1, 2]]
    path = write_tokenizer(words=words, special=())
    with pytest.raises(DataError, match=r"none of the tokens </s>.* as a special token, and no eos_token, to end"):
        load_tokenizer(str(path))
    assert load_tokenizer(str(path), end_of_document="</s>").end_of_document == 1


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_tokenizer_says_itself_what_ends_its_texts(write_tokenizer, file):
    path = write_tokenizer(words=("<unk>", "<end>", "</s>", "<|endoftext|>"), special=("<end>",))
    for token in ("<end>", {"content": "<end>"}):
        path.with_name(file).write_text(json.dumps({"eos_token": token}))
        tokenizer = load_tokenizer(str(path))
        assert (tokenizer.end_of_document, tokenizer.end_of_answer) == (1, 1)
    path = write_tokenizer(words=("<unk>", "<end>", "<|endoftext|>"), special=("<end>", "<|endoftext|>"))
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.end_of_document, tokenizer.end_of_answer) == (2, 1)
    path.with_name(file).write_text('{"eos_token": null}')
    assert load_tokenizer(str(path)).end_of_answer is None
