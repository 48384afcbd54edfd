"""Conversations as the text that a model learned to read, by the Jinja template that comes with its tokenizer.

Templates are those of Hugging Face's chat models. They get `messages`, `tools`, `add_generation_prompt` and the special
tokens. A template is a program of somebody else's: `dtlayout.data.template` runs it in a sandbox, and this module
starts a process for it, with limits of time and memory for each conversation.
"""

import hashlib
import json
import os
import pickle
import re
import signal
import struct
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from dtlayout.base.errors import DataError
from dtlayout.base.files import expand, parse_json
from dtlayout.base.interpreter import run_module
from dtlayout.config.sections import DataConfig
from dtlayout.data.template import Answers, ChatMessage, scale_limit
from dtlayout.data.tokenizer import Tokenizer, find_file
from dtlayout.models.beside import TEMPLATE_NAME

_MARK = re.compile(r"<[|｜][^\s<>|｜{}'\"]{1,60}[|｜]>|<(?:start|end)_of_turn>")


@dataclass(frozen=True)
class TemplateLimits:
    """Limits of a template for one conversation."""

    cpu_s: int = 10
    """Seconds of a processor for up to 500 messages; longer conversations have more, by the square of their number."""
    memory_bytes: int = 1 << 30
    """Bytes of memory on top of those with which its process begins."""
    characters: int = 1 << 24
    """Largest length of the text, in characters."""


class ChatTemplate:
    """A template in a process of its own; DataError if it is none, fails on a conversation, or takes too much."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], limits: TemplateLimits | None = None):
        """`special_tokens` are the tokenizer's by name, such as "bos_token". The process begins with the first use."""
        self.fingerprint = hashlib.sha256(json.dumps([source, special_tokens]).encode()).hexdigest()
        self.source, self.limits = source, limits or TemplateLimits()
        self._start_with = {"source": source, "special_tokens": dict(special_tokens), **asdict(self.limits)}
        self._process: subprocess.Popen[bytes] | None = None

    def check(self) -> None:
        """Raise DataError if the source is no template."""
        if self._process is None:
            self._start()

    def render(self, messages: Sequence[ChatMessage], tools: Any = None, *, asks: bool = False) -> str:
        """Text of a conversation; with `asks` it ends where an answer begins."""
        self.check()
        return str(self._ask(("render", list(messages), tools, asks))["text"])

    def find_answers(self, messages: Sequence[ChatMessage], tools: Any = None, *, only_last: bool = False) -> Answers:
        """Text of a conversation, and its answers, or the last one alone: see `dtlayout.data.template`."""
        self.check()
        found = self._ask(("find_answers", list(messages), tools, only_last))
        spans = [(int(first), int(end)) for first, end in found["spans"]]
        return Answers(str(found["text"]), spans, bool(found["is_answered"]), int(found["num_rewritten"]))

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "DTLAYOUT_PLUGINS"}
        self._process = subprocess.Popen(
            run_module("dtlayout.data.template_process"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=environment, cwd=os.sep, start_new_session=True,  # Ctrl-C must not end it
        )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._process)
        try:
            self._ask(self._start_with)
        except DataError:
            self._stop()
            raise

    def _ask(self, question: object) -> dict[str, Any]:
        """The answer of the process, which may have any length and form: nothing in it is trusted."""
        assert self._process and self._process.stdin and self._process.stdout, "it was started with pipes"
        sent = pickle.dumps(question)
        try:
            self._process.stdin.write(struct.pack("<Q", len(sent)) + sent)
            self._process.stdin.flush()
            # JSON writes a character as six bytes, or as twelve
            line = self._process.stdout.readline(12 * self.limits.characters + (1 << 20))
            answer = json.loads(line)
        except (OSError, ValueError):
            answer = None
        if not isinstance(answer, dict):
            raise DataError(self._describe_end(question))
        if "problem" in answer:
            raise DataError(str(answer["problem"]))
        return cast(dict[str, Any], answer)

    def _describe_end(self, question: object) -> str:
        """Reason for a missing answer; the next question starts another process."""
        exit_code = self._stop()
        what = "the chat template cannot write this conversation: "
        if exit_code == -signal.SIGXCPU:
            return f"{what}it takes more than {self.limits.cpu_s * scale_limit(question)} s"
        return f"{what}its process ended with exit code {exit_code}"

    def _stop(self) -> int:
        """End the process; its exit code, which is its own if it had ended by itself."""
        process, self._process = self._process, None
        self._end()
        return process.wait() if process else 0


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process that has nothing to lose."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # bytes that were not sent yet
            if pipe is not None:
                pipe.close()


def find_marks(text: str) -> list[str]:
    """Marks like special tokens in a template or in a text that it has written, each once, in their order.

    >>> find_marks("{% for m in messages %}<|im_start|>{{ m.role }}\\n{{ m.content }}<|im_end|>{% endfor %}")
    ['<|im_start|>', '<|im_end|>']
    """
    return list(dict.fromkeys(_MARK.findall(text)))


def describe_marks(data: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """A line for marks that the chat template writes and the tokenizer does not know; none where it knows them all.

    They are looked for in the template, and in a short conversation that it writes.
    """
    if not data.has_conversations:
        return []
    template = load_template(data.chat_template, data.tokenizer)
    unknown = [mark for mark in find_marks(template.source + _write_example(template)) if mark not in tokenizer.spelt]
    if not unknown:
        return []
    return [
        f"tokenizer {data.tokenizer} has no token {', '.join(unknown)}, which the chat template writes: each is read "
        f"as the tokens of its letters"
    ]


def describe_ends(data: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """A line for conversations whose documents end with another token than the tokenizer's `eos_token`."""
    end, own = tokenizer.end_of_document, tokenizer.end_of_answer
    if data.end_of_document or own is None or own == end or not data.has_conversations:
        return []
    return [
        f"a conversation ends with {tokenizer.spell([end])}, behind the tokenizer's eos_token {tokenizer.spell([own])} "
        f"where the template writes that; data.end_of_document names another token"
    ]


def _write_example(template: ChatTemplate) -> str:
    """A question and an answer as a template writes them; empty where it cannot."""
    with suppress(DataError):
        return template.render([{"role": role, "content": "a"} for role in ("user", "assistant")])
    return ""


def load_template(file: str, tokenizer: str) -> ChatTemplate:
    """The template of a Jinja file, or without `file` the one beside the tokenizer; DataError if there is none."""
    path = find_file(tokenizer)
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json") if path else ():
        settings |= _read_settings(path.with_name(name))  # type: ignore[union-attr]
    named = {name: _content(value) for name, value in settings.items() if name.endswith("_token")}
    special_tokens = {name: token for name, token in named.items() if token is not None}
    if file:
        return ChatTemplate(_read(expand(file)), special_tokens)
    if path and (beside := path.with_name(TEMPLATE_NAME)).is_file():
        return ChatTemplate(_read(beside), special_tokens)
    found = settings.get("chat_template")
    if isinstance(found, list):  # several by name
        found = next((each.get("template") for each in found if each.get("name") == "default"), None)
    if not isinstance(found, str):
        raise DataError(f"tokenizer {tokenizer!r} has no chat template; name a Jinja file with data.chat_template")
    return ChatTemplate(found, special_tokens)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"the chat template {str(path)!r} cannot be read: {error}") from error


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = parse_json(_read(path))
    except ValueError as error:
        raise DataError(f"{str(path)!r} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _content(token: Any) -> str | None:
    """Text of a special token, which is the text itself or a table with it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
