"""The process in which a chat template runs: it answers questions until no more come, within limits.

The parent makes the questions and pickles them, each with its length before it. Answers are lines of JSON, since the
parent trusts nothing that comes from here. A question that takes too long ends the process: Linux sends SIGXCPU,
whatever the template is doing, even inside C.
"""

import json
import os
import pickle
import resource
import signal
import struct
import sys
import time
from contextlib import suppress
from typing import Any, BinaryIO

from dtlayout.base.errors import DataError
from dtlayout.data.template import Answers, Template, scale_limit

_MOST_OF_A_PROBLEM = 2000
"""Largest length of a template's own error message, in characters."""


def main() -> None:
    """Answer the questions that come on stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    start = _read(questions)
    if start is None:
        return
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, _own_bytes() + start["memory_bytes"])
    template: Template | None = None
    question: Any = start
    while question is not None:
        # One second more, since the limit counts whole seconds.
        _limit(resource.RLIMIT_CPU, int(time.process_time() + start["cpu_s"] * scale_limit(question)) + 1)
        try:
            if template is None:
                template = Template(start["source"], start["special_tokens"])
                answer: dict[str, Any] = {}
            else:
                answer = _answer(template, question, start["characters"])
            line = json.dumps(answer)
        except MemoryError:
            line = json.dumps({"problem": _describe(f"it takes more than {start['memory_bytes'] >> 20} MiB")})
        except DataError as error:
            line = json.dumps({"problem": str(error)[:_MOST_OF_A_PROBLEM]})
        answers.write(line.encode() + b"\n")
        answers.flush()
        del line
        question = _read(questions)


def _answer(template: Template, question: tuple[Any, ...], most_characters: int) -> dict[str, Any]:
    name, messages, tools, *rest = question
    if name == "render":
        found = Answers(template.render(messages, tools, asks=rest[0]), [], is_answered=False)
    else:
        found = template.find_answers(messages, tools, only_last=rest[0])
    if len(found.text) > most_characters:
        raise DataError(_describe(f"its text has {len(found.text):,} characters, more than {most_characters:,}"))
    return found._asdict()


def _describe(why: str) -> str:
    return f"the chat template cannot write this conversation: {why}"


def _read(file: BinaryIO) -> Any:
    """The next question; None after the last one."""
    head = file.read(8)
    return pickle.loads(file.read(struct.unpack("<Q", head)[0])) if len(head) == 8 else None


def _limit(what: int, most: int) -> None:
    """Lower a limit of this process, where the system has that limit."""
    _, hard = resource.getrlimit(what)
    with suppress(ValueError, OSError):
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _own_bytes() -> int:
    """Bytes of memory that this process has mapped; a guess where there is no /proc."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 28


if __name__ == "__main__":
    main()
