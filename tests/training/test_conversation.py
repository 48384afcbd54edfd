"""Conversations: each line of stdin is a question, and the template writes all earlier turns before it."""

import io
import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from hf_models import save_made
from tiny import ROOT, SHAPE, write_tiny

from dtlayout.base.errors import DataError, InvalidConfig
from dtlayout.cli import main
from dtlayout.commands.source import find_config, find_text_length
from dtlayout.data.chat import ChatTemplate
from dtlayout.data.tokenizer import BYTES
from dtlayout.launch import main as train
from dtlayout.training.conversation import Conversation, share_prompts
from dtlayout.training.generate import Sampling, generate, open_model

LINES = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
WITHOUT_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + LINES
)
GREEDY = Sampling(temperature=0)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model of bytes for 64 tokens, with a chat template."""
    made = save_made("llama", tmp_path / "made")
    (made / "chat_template.jinja").write_text(LINES)
    return made


@pytest.fixture
def prompts(monkeypatch) -> list[str]:
    """Texts that the model goes on from; its answer is always "yes"."""
    seen: list[str] = []

    def answer(model, prompt, max_tokens, take, *, ends):
        seen.append(BYTES.decode(prompt))
        return list(b"yes"[:max_tokens])

    monkeypatch.setattr("dtlayout.training.generate.generate", answer)
    return seen


def say(monkeypatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def chat(folder: Path, *options: str) -> int:
    return main(["generate", str(folder), "--tokenizer=bytes", "--chat", *options])


def test_each_line_is_a_question_behind_all_earlier_turns(folder, prompts, monkeypatch, capsys):
    say(monkeypatch, "hi\n\n  \nand you?\nbye")
    assert chat(folder) == 0
    first, second = "u:hi\na:", "u:hi\na:yes\nu:and you?\na:"
    assert prompts == [first, second, second + "yes\nu:bye\na:"]
    assert capsys.readouterr().out == "yes\nyes\nyes\n"


def test_a_prompt_is_one_question(folder, prompts, monkeypatch, capsys):
    say(monkeypatch, "not read\n")
    assert chat(folder, "--prompt=hi", "--system=Be kind.") == 0
    assert prompts == ["s:Be kind.\nu:hi\na:"]
    assert capsys.readouterr().out == "yes\n"


def test_a_system_message_comes_first_and_a_template_without_one_says_so_before_a_question(
    folder, prompts, monkeypatch, capsys
):
    say(monkeypatch, "hi\n")
    assert chat(folder, "--system=Be kind.", "--json") == 0
    assert prompts == ["s:Be kind.\nu:hi\na:"]
    messages = json.loads(capsys.readouterr().out)["messages"]
    assert [each["role"] for each in messages] == ["system", "user", "assistant"]
    assert [each["content"] for each in messages] == ["Be kind.", "hi", "yes"]

    (folder / "chat_template.jinja").write_text(WITHOUT_SYSTEM)
    say(monkeypatch, "hi\n")
    assert chat(folder, "--system=Be kind.") == 2
    assert len(prompts) == 1 and "System role not supported" in capsys.readouterr().err
    assert main(["generate", str(folder), "--tokenizer=bytes", "--system=Be kind."]) == 2
    assert "--system is the first message of a conversation: it needs --chat" in capsys.readouterr().err


def test_a_conversation_ends_where_it_outgrows_the_model(folder, prompts, monkeypatch, capsys):
    say(monkeypatch, f"{'a' * 57}\n{'b' * 57}\n")
    assert chat(folder) == 2
    said = capsys.readouterr()
    assert len(prompts) == 1 and said.out == "ye\n"  # 62 of 64 tokens are the prompt's
    assert said.err == (
        "the conversation with this question has 127 tokens, and the model's context is 64: begin another one\n"
    )
    say(monkeypatch, f"{'a' * 57}\n{'b' * 57}\n")
    assert chat(folder, "--json") == 2
    document = json.loads(capsys.readouterr().out)
    assert not document["ok"] and document["problems"] == said.err.splitlines()
    assert [each["content"] for each in document["messages"]] == ["a" * 57, "ye"]


def test_ctrl_c_ends_a_conversation_quietly(folder, prompts, monkeypatch, capsys):
    class Interrupted(io.StringIO):
        def __next__(self):
            if line := self.readline():
                return line
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Interrupted())
    assert chat(folder) == 130
    assert capsys.readouterr().err == "" and prompts == []
    monkeypatch.setattr("sys.stdin", Interrupted("hi\n"))
    assert chat(folder, "--json") == 130
    said = capsys.readouterr()
    assert [each["content"] for each in json.loads(said.out)["messages"]] == ["hi", "yes"] and said.err == ""


def test_a_terminal_is_asked_by_a_mark_until_ctrl_d(folder, tmp_path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "dtlayout", "generate", folder, "--tokenizer=bytes", "--chat", "--max-tokens=1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb"}
    errors = (tmp_path / "errors").open("wb")
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=errors, env=environment, close_fds=True)
    try:
        os.close(theirs)
        read_until(ours, b"> ")
        os.write(ours, b"hi\n")
        assert read_until(ours, b"> ").count(b"\n") == 2  # the question, and an answer of one token
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        errors.close()
    assert (tmp_path / "errors").read_text() == ""


def read_until(terminal: int, end: bytes) -> bytes:
    """Bytes of a terminal up to `end`."""
    seen = b""
    while not seen.endswith(end):
        seen += os.read(terminal, 1)
    return seen


def test_ids_beyond_the_model_are_refused_in_a_conversation_too(folder, prompts, monkeypatch, capsys):
    monkeypatch.setattr("dtlayout.training.generate.find_shape", lambda _: replace(SHAPE, vocab_size=100))
    monkeypatch.setattr("dtlayout.training.generate.open_model", lambda *_: None)
    say(monkeypatch, "hi\n")
    assert chat(folder) == 2
    assert "gives the prompt id 117, the model has vocab_size=100" in capsys.readouterr().err


def test_sampling_is_that_of_generation_config_and_options_override_it(folder, prompts, monkeypatch, capsys):
    chosen: list[Sampling] = []
    monkeypatch.setattr(Sampling, "make", lambda self: chosen.append(self))

    def choose(said: dict | None, *options: str) -> Sampling:
        file = folder / "generation_config.json"
        file.unlink(missing_ok=True)
        if said is not None:
            file.write_text(json.dumps(said))
        assert chat(folder, "--prompt=hi", *options) == 0
        return chosen[-1]

    theirs = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert choose(None) == Sampling(0.8, 0.95)
    assert choose(theirs) == Sampling(0.6, 0.9, top_k=20)
    assert choose({"temperature": 1, "top_k": None}) == Sampling(1, 0.95)
    assert choose(theirs | {"do_sample": False}) == Sampling(0, 0.9, top_k=20)
    assert choose(theirs | {"do_sample": False}, "--temperature=0.5") == Sampling(0.5, 0.9, top_k=20)
    assert choose(theirs, "--temperature=0", "--top-p=1", "--top-k=0", "--seed=3") == Sampling(0, 1, seed=3)
    assert choose({"temperature": 1000}, "--temperature=1") == Sampling(1, 0.95)
    (folder / "generation_config.json").write_text('{"temperature": 1000}')
    assert chat(folder, "--prompt=hi") == 2
    assert "generation_config.json: temperature=1000 must be 0, or from 0.01 to 100" in capsys.readouterr().err


def test_a_run_samples_as_the_model_that_it_began_from_and_its_context_is_the_longer_one(
    folder, tmp_path, prompts, monkeypatch
):
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 7}')
    files = write_tiny(tmp_path, steps=1)
    begins = [f"--model.name={folder}", f"--train.init_from={folder}", "--train.run_folder"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert train([str(files.config), *begins[:2]]) == 0
    chosen: list[Sampling] = []
    monkeypatch.setattr(Sampling, "make", lambda self: chosen.append(self))
    assert main(["generate", str(files.run), "--tokenizer=bytes", "--prompt=hi"]) == 0
    assert chosen == [Sampling(0.6, 0.95, top_k=7)]
    config = find_config(files.run)
    assert config.batch.seq_len == 16
    assert [find_text_length(config, each) for each in (folder, None)] == [64, 16]
    assert find_text_length(None, None) is None


def test_an_adapter_s_answers_end_and_are_drawn_as_its_frozen_model_says(folder, tmp_path, monkeypatch):
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [7, 9]}')
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(folder), "r": 2, "lora_alpha": 2}
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(adapter | {"target_modules": ["q_proj"]}))
    seen: list[object] = []
    monkeypatch.setattr(Sampling, "make", lambda self: seen.append(self))
    monkeypatch.setattr("dtlayout.training.generate.find_shape", lambda _: SHAPE)
    monkeypatch.setattr("dtlayout.training.generate.open_model", lambda *_: None)
    monkeypatch.setattr("dtlayout.training.generate.generate", lambda *_, ends: seen.append(ends) or [])
    assert chat(tmp_path / "peft", "--prompt=hi") == 0
    assert seen == [Sampling(0.6, 0.95), {7, 9, BYTES.end_of_document}]


def test_what_a_template_or_a_context_refuses_is_no_part_of_the_conversation():
    conversation = Conversation(ChatTemplate(LINES, {}), BYTES, context=10)
    with pytest.raises(InvalidConfig, match=r"has 10 tokens, and the model's context is 10"):
        conversation.ask("12345")
    assert conversation.messages == []
    assert conversation.ask("1234") == list(b"u:1234\na:")
    assert conversation.limit(list(b"u:1234\na:"), 100) == 1
    with pytest.raises(DataError, match="System role not supported"):
        Conversation(ChatTemplate(WITHOUT_SYSTEM, {}), BYTES, system="Be kind.").check()


def converse(folder: Path) -> list[str]:
    """Answers to two questions, which the first rank alone knows."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    conversation = Conversation(ChatTemplate(LINES, {}), BYTES)
    questions = map(conversation.ask, ["hi", "and you?"]) if is_first else iter(lambda: 1 / 0, None)
    model, answers = open_model(folder, 8, "float32", "cpu"), []
    for prompt in share_prompts(questions):
        answers.append(BYTES.spell(list(generate(model, prompt, 12, GREEDY.make()))))
        conversation.add_answer(answers[-1])
    return answers


def share_an_error() -> str:
    """Error of the first rank, or how many prompts another one has heard."""

    def fail():
        yield [1]
        raise InvalidConfig("no more")

    try:
        return str(len(list(share_prompts(fail()))))
    except InvalidConfig as error:
        return str(error)


def test_ranks_hear_the_first_one_s_prompts_and_give_the_answers_of_one_process(ranks4, folder):
    answers = converse(folder)
    assert len(set(answers)) == 2
    assert ranks4.run(converse, folder) == [answers] * 4
    assert ranks4.run(share_an_error) == ["no more", "1", "1", "1"]
