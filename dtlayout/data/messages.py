"""Messages of a conversation, checked before a chat template writes them: roles that are known, content that is text.

A template complains about little. It writes a message without content as nothing, a list as Python shows it, and a
misspelt role as it stands; all of this would be learnt, or would silently teach nothing.

Legend: a part is one entry of a content that is a list, such as {"type": "text", "text": "hi"}.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

from dtlayout.base.errors import DataError
from dtlayout.base.formatting import shorten
from dtlayout.data.template import ChatMessage

ASSISTANT = "assistant"
"""Role whose messages are the answers."""
USUAL_ROLES = ("system", "developer", "user", ASSISTANT, "tool")
"""Roles that conversations may have whatever the template says."""
_SPOKEN = ("system", "user", ASSISTANT)
"""Roles whose content is always text."""
ContentForm = Literal["text", "parts", "any"]
"""Form of the content that a template writes: strings, lists of parts, or both alike."""
_QUOTED = re.compile(r"""(['"])([\w-]{1,64})\1""")


class MessageRules(NamedTuple):
    """Messages that a template can write."""

    roles: frozenset[str]
    """Roles that a message may have."""
    writes_json: bool
    """Whether the template writes a content that is a mapping, such as the result of a tool, as JSON."""


def find_rules(template: str) -> MessageRules:
    """Rules of a template, from its source: the usual roles and each word in quotes, and whether it asks for mappings.

    >>> sorted(find_rules("{% if m.role == 'ipython' %}").roles - {*USUAL_ROLES})
    ['ipython']
    """
    roles = frozenset(USUAL_ROLES) | {found[2] for found in _QUOTED.finditer(template)}
    return MessageRules(roles, "is mapping" in template)


def check_messages(messages: Sequence[ChatMessage], rules: MessageRules) -> None:
    """Raise DataError for the first message whose role is unknown, or whose content is no text.

    Content is a string, or a list of parts that are text. A message of the assistant may have `tool_calls`, a list, in
    its place. Where the template writes JSON, a message of another role than `system`, `user` and `assistant` may hold
    a mapping. The error says the number of the message, from 1, and not the row.
    """
    for number, message in enumerate(messages, start=1):
        if problem := _find_problem(message, rules):
            raise DataError(f"message {number} {problem}")


def _find_problem(message: ChatMessage, rules: MessageRules) -> str:
    """Reason why a message is refused, after its number; empty where nothing is wrong."""
    if "role" not in message:
        has = ", ".join(sorted(map(str, message))) or "nothing"
        return f"has no role; each message needs a role and its content, and this one has {has}"
    role = message["role"]
    if not isinstance(role, str) or role not in rules.roles:
        near = get_close_matches(str(role), USUAL_ROLES, n=1, cutoff=0.5)
        nearest = f", perhaps {near[0]!r}" if near else ""
        return (
            f"has role {shorten(repr(role))}; use one of {', '.join(USUAL_ROLES)}{nearest}, or one that the chat "
            f"template has in quotes"
        )
    calls = message.get("tool_calls") if role == ASSISTANT else None
    if calls and not isinstance(calls, list):
        return f"has tool_calls of type {type(calls).__name__}, not a list of calls"
    content = message.get("content")
    if content is None:
        also = " and no tool_calls" if role == ASSISTANT else ""
        return "" if calls else f"(role {role}) has no content{also}"
    is_result = rules.writes_json and role not in _SPOKEN and isinstance(content, Mapping)
    return "" if isinstance(content, str) or is_result else _find_problem_of_parts(content, role, bool(calls))


def _find_problem_of_parts(content: Any, role: str, is_call: bool) -> str:
    """Reason why a content that is no string is refused; an answer that calls tools may have an empty list."""
    what = f"(role {role}) has"
    if not isinstance(content, list):
        return f"{what} content of type {type(content).__name__}, not text; write it as text, JSON for instance"
    if not content and not is_call:
        return f"{what} an empty list as its content"
    for number, part in enumerate(content, start=1):
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            told = f"is {shorten(repr(kind))}" if kind != "text" else "has no text"
            return f'{what} content whose part {number} {told}; parts are {{"type": "text", "text": …}}'
    return ""


def fit_content(message: ChatMessage, form: ContentForm) -> ChatMessage:
    """The message with content of a form that the template writes: parts joined without a gap, or text as one part."""
    content = message.get("content")
    if form == "text" and isinstance(content, list):
        return {**message, "content": "".join(part["text"] for part in content)}
    if form == "parts" and isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    return message


def find_form(render: Callable[[Sequence[ChatMessage]], str]) -> ContentForm:
    """Content that a template writes as text, found by a trial: "any", or "parts" where it leaves strings out.

    "text" stands for all others: parts would come out as Python shows them, or not at all.
    """
    said = (("user", "ask"), (ASSISTANT, "tell"))
    try:
        of_text = render([{"role": role, "content": text} for role, text in said])
        of_parts = render([{"role": role, "content": [{"type": "text", "text": text}]} for role, text in said])
    except DataError:
        return "text"
    if of_parts == of_text:
        return "any"
    return "parts" if "ask" not in of_text and "ask" in of_parts else "text"
