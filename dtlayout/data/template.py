"""A chat template as a program: turns conversations into text by Jinja, in its sandbox, and finds the answers in it.

This runs in a process of its own that has limits (`dtlayout.data.template_process`), since nobody can tell beforehand
how much time and memory a template takes. Legend of spans: an answer is text[first:end], with its end token. Where the
template marks answers, that token is included only if the marks enclose it.

[Note: where answers are]
A template that marks its answers with {% generation %} … {% endgeneration %} says itself where they are. For any other
template, an answer is the text that it adds to the messages before it and the prompt for an answer. That holds if the
text of the messages so far is the beginning of the text of all messages. Some templates write an answer differently
once messages follow (without its thoughts): such an answer is no target, since nobody would be asked for it there. The
last answer always is one. Where messages behind it would change it too, they are left out.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dtlayout.base.errors import DataError

if TYPE_CHECKING:
    import jinja2

ChatMessage = Mapping[str, Any]
"""A message that a template reads: "role" and "content", and other keys that it knows."""
Spans = list[tuple[int, int]]


class Answers(NamedTuple):
    """Text of a conversation, and where its answers are."""

    text: str
    spans: Spans
    """Spans of the answers to learn."""
    is_answered: bool
    """Whether the last message is an answer."""
    num_rewritten: int = 0
    """Answers that the template has written in another way than it did at their turn, which are no targets."""


_USUAL_MESSAGES = 500
"""Number of messages up to which a conversation has the plain limit of time."""

# Marks of the begin and end of an answer; drawn at random, so that no text holds them.
_OPEN, _CLOSE = (f"<{secrets.token_hex(16)}>" for _ in range(2))


class Template:
    """A compiled template; DataError if the source is none, or if it cannot write a conversation."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        """`special_tokens` are the tokenizer's by name, such as "bos_token"."""
        self._special_tokens = special_tokens
        self._template = _compile(source)

    def render(self, messages: Sequence[ChatMessage], tools: Any = None, *, asks: bool = False) -> str:
        """Text of a conversation; with `asks` it ends where an answer begins."""
        return self._write(messages, tools, asks=asks).replace(_OPEN, "").replace(_CLOSE, "")

    def find_answers(self, messages: Sequence[ChatMessage], tools: Any = None, *, only_last: bool = False) -> Answers:
        """Text of a conversation, and its answers, or the last one alone: [Note: where answers are]."""
        text = self._write(messages, tools)
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        is_answered = places[-1:] == [len(messages) - 1]
        if _OPEN in text:
            text, spans = _read_marks(text)
            return Answers(text, spans[-1:] if only_last else spans, is_answered)
        if places and not is_answered and not text.startswith(self.render(messages[: places[-1] + 1], tools)):
            return self.find_answers(messages[: places[-1] + 1], tools, only_last=only_last)
        spans, num_rewritten = [], 0
        for i in places[-1:] if only_last else places:
            before, after = self.render(messages[:i], tools, asks=True), self.render(messages[: i + 1], tools)
            if after.startswith(before) and text.startswith(after):
                spans.append((len(before), len(after)))
            elif i != places[-1]:
                num_rewritten += 1
            else:
                raise DataError(
                    f"the chat template does not write message {i + 1} as what its prompt for an answer goes on with, "
                    "so where the answer is cannot be told; mark answers in it with {% generation %}, or use "
                    'data.loss_on="all"'
                )
        return Answers(text, spans, is_answered, num_rewritten)

    def _write(self, messages: Sequence[ChatMessage], tools: Any, *, asks: bool = False) -> str:
        try:
            return self._template.render(
                messages=list(messages), tools=tools, add_generation_prompt=asks, **self._special_tokens
            )
        except MemoryError:  # the limit of this process
            raise
        except Exception as error:  # the template is a program of somebody else's
            raise DataError(
                f"the chat template cannot write this conversation: {type(error).__name__} {error}"
            ) from error


def _read_marks(marked: str) -> tuple[str, Spans]:
    """The text without marks, and the spans that were between them."""
    text, spans = "", []
    first, *rest = marked.split(_OPEN)
    text += first
    for part in rest:
        answer, _, after = part.partition(_CLOSE)
        spans.append((len(text), len(text) + len(answer)))
        text += answer + after
    return text, spans


def _compile(source: str) -> "jinja2.Template":
    """The template, compiled by Jinja with the settings of `transformers`, for which templates are written.

    Two things differ. Templates don't get the date: the same conversation is the same text tomorrow. And a special
    token that the tokenizer does not name is an error instead of an empty text.
    """
    from jinja2 import TemplateError, Undefined, UndefinedError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag {% generation %}: its content is an answer."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    class Unnamed(Undefined):
        """A name without a value."""

        def __str__(self) -> str:
            if str(self._undefined_name).endswith("_token"):
                raise UndefinedError(f"the tokenizer names no {self._undefined_name} in tokenizer_config.json")
            return ""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def write_json(value: Any, ensure_ascii: bool = False, **style: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **style)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], undefined=Unnamed
    )
    environment.filters["tojson"] = write_json
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source)
    except (TemplateError, RecursionError, SyntaxError, ValueError) as error:  # Python's own too, from Jinja's code
        raise DataError(f"the chat template is not Jinja: {error}") from error


def scale_limit(question: object) -> int:
    """Factor on the limit of time for a question: conversations of more than 500 messages have more time.

    Finding its answers writes a conversation twice for each answer, so the time grows with the square of its length.
    """
    num_messages = len(question[1]) if isinstance(question, tuple) else 0
    return max(1, round((num_messages / _USUAL_MESSAGES) ** 2))
