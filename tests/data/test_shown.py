"""A sample as text: what is learnt stands between marks, and documents stand apart."""

import json
import time

import pytest
from tiny import write_tiny

from dtlayout.cli import main
from dtlayout.data.tokenizer import BYTES

TALKS = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!é"}] for i in range(40)]


@pytest.fixture
def show(tmp_path, offline, capsys):
    """Runs `dtlayout data show` on conversations with these options; its answer, or its lines on stderr."""
    files = write_tiny(tmp_path)
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in TALKS))
    (tmp_path / "t.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    talks = (f"--data.source={tmp_path / 'talks.jsonl'}", f"--data.chat_template={tmp_path / 't.jinja'}")

    def run(*options, exit_code=0, config=files.config, keys=(*talks, "--data.messages_field=messages")):
        assert main(["data", "show", str(config), *keys, *options]) == exit_code
        said = capsys.readouterr()
        return said.err if exit_code else said.out

    return run


def test_targets_of_a_conversation_stand_between_marks_and_documents_apart(show):
    for kind in ("padded", "best-fit"):
        lines = show(f"--data.samples={kind}", "--sample", "3").splitlines()
        assert lines[0].startswith("sample 3 of a run is sample ") and lines[0].count("«»") == 1
        assert lines[1] == "--- document 0"
        question, answer = lines[2].split("«")
        assert answer == f"[{question[1:-2]}!é]<end>»"
        document = json.loads(show(f"--data.samples={kind}", "--sample", "3", "--json"))
        assert document["num_targets"] == len(f"{answer[:-6]}é") + 1
        assert document["num_tokens"] + document["num_padding"] == 17


def test_why_a_sample_has_no_target_is_said(show, tmp_path):
    """The answer of a conversation stands behind the 17 tokens of a sample."""
    asked = {"role": "user", "content": "a question that is long"}
    for said, messages in (
        ("the answers lie behind batch.seq_len=16, where a conversation is cut", [asked, TALKS[0][1]]),
        ("no conversation there has an answer that is learnt", [TALKS[0][0]]),
    ):
        rows = [{"messages": messages}, {"messages": TALKS[0]}]
        (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        shown = [show("--data.samples=padded", "--sample", str(i)).splitlines() for i in range(len(rows))]
        (line,) = (each[1] for each in shown if "0 targets" in each[0])
        assert line == f"nothing is learnt from this sample: {said}"
        assert sum("nothing is learnt" in each[1] for each in shown) == 1


def test_all_of_a_text_is_learnt_but_its_first_token(show):
    head, _, text = show(keys=()).splitlines()
    assert head.endswith("17 tokens, 16 targets in «»") and text[1] == "«" and text[-1] == "»" and text.count("«") == 1


def test_documents_of_a_packed_sample_stand_apart_with_the_last_cut(show):
    document = json.loads(show("--sample", "2", "--json"))
    assert len(document["documents"]) >= 2 and document["num_padding"] == 0
    assert all(parts[-1]["text"].endswith("<end>") for parts in document["documents"][:-1])


def test_a_run_folder_stands_for_its_config_and_another_folder_is_refused_with_what_to_type(show, tmp_path):
    run_folder = tmp_path / "runs" / "a"
    run_folder.mkdir(parents=True)
    said = show(exit_code=2, config=run_folder)
    assert f"{run_folder} is a folder without a config.toml, so it is no run folder; " in said
    assert "dtlayout data show CONFIG.toml" in said
    (run_folder / "config.toml").write_text((tmp_path / "tiny.toml").read_text())
    assert show("--sample", "1", config=run_folder) == show("--sample", "1")


def test_what_is_read_is_said_on_stderr_where_it_takes_some_time(show, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("dtlayout.commands.data._SECONDS_OF_SILENCE", 0.0)
    monkeypatch.setattr("dtlayout.data.check.load_tokenizer", lambda *_: time.sleep(0.3) or BYTES)
    assert main(["data", "show", str(tmp_path / "tiny.toml")]) == 0
    assert capsys.readouterr().err == f"reading the beginning of the data of {tmp_path / 'tiny.toml'} …\n"
    monkeypatch.setattr("dtlayout.commands.data._SECONDS_OF_SILENCE", 60.0)
    assert main(["data", "show", str(tmp_path / "tiny.toml")]) == 0
    assert capsys.readouterr().err == ""


def test_marks_of_the_template_that_the_tokenizer_does_not_know_are_named(show, tmp_path, write_tokenizer, capsys):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }} <|im_end|>{% endfor %}"
    )
    words = ("<unk>", "</s>", "<|im_end|>")
    named = f"--data.tokenizer={write_tokenizer(words=words, special=('</s>', '<|im_end|>'))}"
    (note,) = (line for line in show("--data.samples=padded", named).splitlines() if line.startswith("note: tokenizer"))
    assert note.endswith(
        "tokenizer.json has no token <|im_start|>, which the chat template writes: each is read as the tokens of "
        "its letters"
    )
    known = write_tokenizer(words=(*words, "<|im_start|>"), special=("</s>", "<|im_end|>", "<|im_start|>"))
    assert "note: tokenizer" not in show("--data.samples=padded", f"--data.tokenizer={known}")
    assert "note: tokenizer" not in show(keys=())
    (tmp_path / "t.jinja").write_text(  # no mark is spelt in it, and it takes no system prompt
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}"
        "{{ '<|' + m.role + '|>' }} {{ m.content }}</s>{% endfor %}"
    )
    said = "tokenizer.json has no token <|user|>, <|assistant|>, which the chat template writes"
    assert said in show("--data.samples=padded", named)
    chat = write_tokenizer(words=(*words, "<|eot|>"), special=("</s>", "<|eot|>"))
    (chat.parent / "tokenizer_config.json").write_text('{"eos_token": "<|eot|>"}')
    ends = "note: a conversation ends with </s>, behind the tokenizer's eos_token <|eot|> where the template writes"
    assert ends in show("--data.samples=padded", f"--data.tokenizer={chat}")
    assert ends not in show("--data.samples=padded", f"--data.tokenizer={chat}", "--data.end_of_document=<|eot|>")
    (chat.parent / "tokenizer_config.json").unlink()
    named = f"--data.tokenizer={write_tokenizer(words=words, special=('</s>', '<|im_end|>'))}"
    talks = (f"--data.source={tmp_path / 'talks.jsonl'}", f"--data.chat_template={tmp_path / 't.jinja'}")
    asked = ["check", str(tmp_path / "tiny.toml"), "--world=1", *talks, "--data.messages_field=messages", named]
    assert main([*asked, "--data"]) == 0 and said in capsys.readouterr().out
    assert main(asked) == 0 and said not in capsys.readouterr().out


def test_the_tokenizer_of_a_run_that_is_there_is_said(show, tmp_path, write_tokenizer):
    path = write_tokenizer(words=("<unk>", "</s>"), special=("</s>",))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text(f"[data]\ntokenizer = '{path}'\n")
    said = f"note: {tmp_path / 'run'} has a checkpoint, so the run there goes on, with its own tokenizer: {path};"
    assert said in show(keys=())
    checkpoint.rmdir()
    assert "goes on" not in show(keys=())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--sample", "-1"), "--sample=-1 must not be negative"),
        (("--first", "2"), "--first is for noted samples, which "),
    ],
)
def test_options_that_do_not_belong_to_a_config_are_refused(show, options, said):
    assert said in show(*options, exit_code=2)


def test_what_belongs_to_a_config_is_refused_of_noted_samples(show, tmp_path):
    noted = tmp_path / "nonfinite-step-00000001.json"
    said = show("--data.samples=padded", exit_code=2, config=noted, keys=())
    assert "--data.samples=padded is for a config, which " in said
    assert "--sample is for a config, which " in show("--sample", "1", exit_code=2, config=noted, keys=())


def test_of_a_corpus_that_is_not_prepared_the_beginning_is_shown_and_nothing_is_kept(show, tmp_path, monkeypatch):
    monkeypatch.setattr("dtlayout.data.beginnings._HEAD_TOKENS", 40)
    rows = [{"text": f"{i:02} is a number"} for i in range(50)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "never read {\n")
    keys = (f"--data.source={tmp_path / 'many.jsonl'}", "--data.samples=padded")
    head, note, _, text = show("--sample", "1", keys=keys).splitlines()
    assert head.startswith(f"sample 1 of the 3 samples in the first 40 tokens of {tmp_path / 'many.jsonl'}: ")
    assert note == "no more is tokenized: run dtlayout prepare first to see sample 1 of a run, which is another one"
    assert text == "0«1 is a number<end>»"
    assert not list(tmp_path.glob("tokens/*/tokens.json"))
    said = show("--sample", "3", keys=keys, exit_code=2)
    assert "sample=3 is outside of 3 samples in the beginning of " in said and "run dtlayout prepare first" in said
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["prepare", str(tmp_path / "tiny.toml"), *keys]) == 0
    assert "sample 3 of a run is sample " in show("--sample", "3", keys=keys)


def test_of_several_sources_the_one_that_a_run_reads_is_shown(show, tmp_path, monkeypatch):
    monkeypatch.setattr("dtlayout.data.beginnings._HEAD_TOKENS", 400)
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": f"{name}{i:09}"}) + "\n" for i in range(99))
        )
    keys = (f"--data.mixture=[{{source = '{tmp_path}/a.jsonl', weight = 9}}, {{source = '{tmp_path}/b.jsonl'}}]",)
    before = [json.loads(show("--sample", str(i), "--json", keys=keys)) for i in range(12)]
    assert all(each["beginning"] == [24, 400] for each in before)
    by_size = f"--data.mixture=[{{source = '{tmp_path}/a.jsonl', weight = 'size'}}]"
    unknown = "sizes of whole sources are not known yet, and are the weights: it may be of another source"
    assert (unknown in show(keys=(by_size,)), unknown in show(keys=keys)) == (True, False)
    assert main(["prepare", str(tmp_path / "tiny.toml"), *keys]) == 0
    show(keys=keys)  # what prepare has said goes with it
    after = [json.loads(show("--sample", str(i), "--json", keys=keys)) for i in range(12)]
    assert [each["source"] for each in after] == [each["source"] for each in before]
    a_samples = [each["sample"] for each in before if each["source"].endswith("a.jsonl")]
    assert a_samples == [*range(len(a_samples))] and len(a_samples) > 8
