"""`check --data` and training refuse the same data, in the same words, and let the same pass."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch.distributed as dist
from tiny import write_tiny

from dtlayout.base.errors import DtlayoutError
from dtlayout.config.loading import load_config
from dtlayout.data.check import check_beginnings, check_data, prepare_small
from dtlayout.training.start import open_data, open_held_out

pytestmark = pytest.mark.usefixtures("offline", "no_torchrun")

TALK = [{"role": "user", "content": "one and one?"}, {"role": "assistant", "content": "two " * 40}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    """Files of every kind of source that the cases name."""
    rows = {
        "texts.jsonl": [{"text": "some words " * 20, "n": 1}] * 60,
        "held.jsonl": [{"text": "other words " * 20, "n": 2}] * 60,
        "bodies.jsonl": [{"body": "some words " * 20}] * 60,
        "talks.jsonl": [{"messages": TALK}] * 60,
        "questions.jsonl": [{"messages": TALK[:1]}] * 60,
        "roleless.jsonl": [{"messages": [{"content": "x"}]}] * 60,
        "numbers.jsonl": [{"text": 1}] * 60,
        "nothing.jsonl": [{"text": None}, {"text": "x"}],
        "blank.jsonl": [{"text": ""}] * 60,
        "short.jsonl": [{"text": "hi"}],
    }
    for name, lines in rows.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "broken.jsonl").write_text('{"text": "x"}\n{"text": "never closed\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "no.parquet").write_bytes(b"no parquet")
    (tmp_path / "talk.jinja").write_text(TEMPLATE)
    (tmp_path / "raising.jinja").write_text("{{ raise_exception('never') }}")
    (tmp_path / "wrong.jinja").write_text("{% for %}")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "a.jsonl").write_text('{"text": "x"}\n')
    (mixed / "b.jsonl.bz2").write_bytes(b"BZh9")
    return tmp_path


def trains(config):
    """The refusal that training prints up to the first step; empty if there is none."""
    store = dist.HashStore()
    try:
        check_data(config)
        open_data(config, config.data, store, "tokens", seed=config.train.seed)
        open_held_out(config, store)
    except DtlayoutError as error:
        return str(error)
    return ""


def passes_check(config):
    """The refusal that `check --data` prints."""
    try:
        check_data(config)
        check_beginnings(config)
    except DtlayoutError as error:
        return str(error)
    return ""


def mix(*names, **keys):
    more = "".join(f", {key} = '{value}'" for key, value in keys.items())
    return "--data.mixture=[" + ", ".join(f"{{source = 'FOLDER/{name}'{more}}}" for name in names) + "]"


CHATS = ("--data.source=FOLDER/talks.jsonl", "--data.messages_field=messages", "--data.chat_template=FOLDER/talk.jinja")
CASES = {
    "a file without the field": (("--data.source=FOLDER/bodies.jsonl",), "there is no field 'text'"),
    "a wrong text_field": (("--data.source=FOLDER/texts.jsonl", "--data.text_field=body"), "there is no field 'body'"),
    "a mixture with a wrong text_field": ((mix("texts.jsonl", "held.jsonl", text_field="body"),), "no field 'body'"),
    "a mixture of which the second lacks it": ((mix("texts.jsonl", "bodies.jsonl"),), "there is no field 'text'"),
    "a mixture of texts and talks": ((mix("texts.jsonl", "talks.jsonl"),), "there is no field 'text'"),
    "numbers": (("--data.source=FOLDER/numbers.jsonl",), "holds int, not text"),
    "nothing in the field": (("--data.source=FOLDER/nothing.jsonl",), "there is nothing in field 'text'"),
    "nothing but blank text": (("--data.source=FOLDER/blank.jsonl",), "holds no text"),
    "an empty file": (("--data.source=FOLDER/empty.jsonl",), ""),
    "broken JSON": (("--data.source=FOLDER/broken.jsonl",), "broke at line 2"),
    "no UTF-8": (("--data.source=FOLDER/bad.txt",), "broke at '"),
    "no parquet": (("--data.source=FOLDER/no.parquet",), "cannot read '"),
    "too short a source": (("--data.source=FOLDER/short.jsonl",), "one sample of seq_len=16 needs 17"),
    "a split that is none": (("--data.split=nonsense",), "local files are one split"),
    "a validation split that is none": (
        ("--validation.source=FOLDER/held.jsonl", "--validation.split=test"), "local files are one split"
    ),
    "data that would be left out": (("--data.source=FOLDER/mixed",), "cannot be read, such as"),
    "validation on what is trained on": (
        ("--data.source=FOLDER/texts.jsonl", "--validation.source=FOLDER/texts.jsonl"), "is trained on too: 1 of its 1"
    ),
    "validation on a part of what is trained on": (
        (mix("talks.jsonl", "texts.jsonl"), "--validation.source=FOLDER/t*.jsonl"), "is trained on too: 1 of its 2"
    ),
    "a second set of validation that is trained on": (
        (
            "--data.source=FOLDER/texts.jsonl",
            "--validation.sets=[{name='a', source='FOLDER/held.jsonl'}, {name='b', source='FOLDER/texts.jsonl'}]",
        ),
        "is trained on too: 1 of its 1",
    ),
    "validation that is too short": (("--validation.source=FOLDER/short.jsonl",), "one sample of seq_len=16 needs 17"),
    "validation without the field": (("--validation.source=FOLDER/bodies.jsonl",), "there is no field 'text'"),
    "plain validation beside conversations": (
        (*CHATS, "--validation.source=FOLDER/held.jsonl"), "or for plain text in [validation] its text_field"
    ),
    "conversations without a template": (CHATS[:2], "has no chat template"),
    "a template that is none": ((*CHATS[:2], "--data.chat_template=FOLDER/wrong.jinja"), "is not Jinja"),
    "a template that refuses": ((*CHATS[:2], "--data.chat_template=FOLDER/raising.jinja"), "cannot write this conv"),
    "conversations without an answer": (("--data.source=FOLDER/questions.jsonl", *CHATS[1:]), "holds no answer"),
    "answers behind each sample": (
        ("--data.source=FOLDER/talks.jsonl", *CHATS[1:], "--data.samples=padded", "--batch.seq_len=2"),
        "talks.jsonl has a target: the answers lie behind batch.seq_len=2, where a conversation is cut",
    ),
    "messages without a role": (("--data.source=FOLDER/roleless.jsonl", *CHATS[1:]), "has no role"),
    "text as conversations": (("--data.source=FOLDER/texts.jsonl", *CHATS[1:]), "there is no field 'messages'"),
    "a source that is too small a share": (
        ("--data.mixture=[{source = 'FOLDER/texts.jsonl', weight = 1e-9}, {source = 'FOLDER/held.jsonl'}]",),
        "is less than 1 / 10000",
    ),
    "a hub out of reach": (("--data.source=nobody/no-such-corpus",), "opening split 'train' of it on the"),
}  # fmt: skip
FINE = {
    "one file": ("--data.source=FOLDER/texts.jsonl", "--validation.source=FOLDER/held.jsonl"),
    "two": (mix("texts.jsonl", "held.jsonl"),),
    "talks": CHATS,
    "padded": ("--data.source=FOLDER/texts.jsonl", "--data.samples=padded", "--validation.source=FOLDER/held.jsonl"),
    "plain validation beside conversations": (
        *CHATS, "--validation.source=FOLDER/held.jsonl", "--validation.text_field=text",
    ),
    "conversations beside plain text": (
        "--data.source=FOLDER/texts.jsonl", "--validation.source=FOLDER/talks.jsonl",
        "--validation.messages_field=messages", CHATS[2],
    ),
    "validation of less than a batch": (
        "--validation.source=FOLDER/held.jsonl", "--batch.global_batch=4096", "--layout.micro_batch=4096",
    ),
    "several sets of validation": (
        "--validation.sets=[{name='a', source='FOLDER/held.jsonl'}, {name='b', source='FOLDER/texts.jsonl'}]",
    ),
    "a few tokens": ("--data.source=FOLDER/texts.jsonl", "--data.max_tokens=40"),
}  # fmt: skip


def read_config(folder, overrides):
    files = write_tiny(folder)
    return load_config(files.config, [text.replace("FOLDER", str(folder)) for text in overrides])


@pytest.mark.parametrize("name", CASES)
def test_what_training_refuses_the_check_refuses_in_the_same_words(folder, name):
    overrides, said = CASES[name]
    config = read_config(folder, overrides)
    checked = passes_check(config)
    assert checked and said in checked
    assert not (folder / "tokens").exists() or not list((folder / "tokens").glob("*/tokens.json"))
    assert trains(config) == checked


def prepares(config):
    """The refusal that `dtlayout train` prints before it starts ranks."""
    try:
        check_data(config)
        assert prepare_small(config) == []
    except DtlayoutError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", [name for name in CASES if name != "a hub out of reach"])
def test_what_training_refuses_is_refused_before_ranks_start_in_the_same_words(folder, name):
    config = read_config(folder, CASES[name][0])
    assert prepares(config) == trains(config) != ""


def test_data_that_take_long_are_not_prepared_before_ranks_start_and_a_line_says_so(folder, monkeypatch):
    hub = read_config(folder, ("--data.source=nobody/no-such-corpus",))
    (line,) = prepare_small(hub)
    assert line.startswith("data of the hub are not prepared: a bad row is found while all ranks wait; dtlayout prep")
    size = (folder / "texts.jsonl").stat().st_size
    monkeypatch.setattr("dtlayout.data.check._SMALL_BYTES", size - 1)
    config = read_config(folder, ("--data.source=FOLDER/texts.jsonl",))
    (line,) = prepare_small(config)
    assert line.startswith("0.0 MiB of data are not prepared: ") and not (folder / "tokens").exists()
    limited = replace(config, data=replace(config.data, max_tokens=1000))
    assert prepare_small(limited) == [] and (folder / "tokens").exists()
    assert trains(config) == ""
    assert prepare_small(config) == []  # they are there now


@pytest.mark.parametrize("name", FINE)
def test_what_training_takes_passes_the_check_before_it_is_prepared_and_after(folder, name):
    config = read_config(folder, FINE[name])
    assert [passes_check(config), trains(config), passes_check(config)] == [""] * 3


@pytest.mark.parametrize(("samples", "head"), list(product(["packed", "padded"], [20, 40, 100])))
def test_a_beginning_that_is_not_the_whole_refuses_nothing_that_the_whole_has(folder, monkeypatch, samples, head):
    """Of validation a batch of documents, of either an answer or a text, may come after what is read."""
    monkeypatch.setattr("dtlayout.data.beginnings._HEAD_TOKENS", head)
    rows = [{"text": ""}] * 200 + [{"text": "some words"}] * 200
    (folder / "late.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = read_config(folder, ["--data.source=FOLDER/late.jsonl", "--validation.source=FOLDER/held.jsonl"])
    config = replace(config, data=replace(config.data, samples=samples))
    assert passes_check(config) == trains(config) == ""
