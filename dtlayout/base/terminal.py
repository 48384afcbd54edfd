"""Text on its way to a terminal, a pipe or a log: all text on stdout and stderr goes through here.

A name, a path or a line of a file may hold escape sequences, which a terminal would obey, or letters that an encoding
lacks. Inside `guarded` stdout and stderr show both as text, whoever prints: this package, argparse or a traceback.
`rich` draws with sequences of its own, for instance a progress bar. Such drawing goes through `open_console`, which
shows the escape sequences of other texts in the same way.
"""

import codecs
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

from dtlayout.base.errors import DtlayoutError

if TYPE_CHECKING:
    from rich.console import Console

# C0 except tab and line feed, DEL, C1, marks that turn the direction of a line, and separators of lines.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_INSTEAD = {"…": "...", "–": "-", "—": "-", "×": "x", "→": "->", "−": "-", "“": '"', "”": '"', "’": "'", "≤": "<="}
"""Letter → text in its place where an encoding lacks it; other letters are shown by their number."""
_LEAST_WIDTH = 60
"""Columns below which no text is folded further; tables would be torn."""


class Unwritten(DtlayoutError):
    """Raised when an answer cannot be written to stdout."""


def clean(text: str) -> str:
    r"""Text in which control characters are shown by their number, except tabs and ends of lines.

    >>> print(clean("a\x1b[31mname\x07"))
    a\x1b[31mname\x07
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def _replace(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "it is for encoding alone"
    text = error.object[error.start : error.end]
    return "".join(_INSTEAD.get(each) or ascii(each)[1:-1] for each in text), error.end


codecs.register_error("dtlayout", _replace)


class _Encoded:
    """A stream that takes every letter; its other methods are those of the stream inside."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def isatty(self) -> bool:
        """False, so that libraries don't colour or move what they print; `is_terminal` tells the truth."""
        return False

    def write(self, text: str) -> int:
        """Write text; returns its length."""
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        self.stream.write(text.encode(encoding, "dtlayout").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)


class _Answer(_Encoded):
    """stdout of a command, whose answer is its work: Unwritten where it cannot be written."""

    def write(self, text: str) -> int:
        """Write text."""
        with _named_errors():
            return super().write(clean(text))

    def flush(self) -> None:
        """Write text that is held back."""
        with _named_errors():
            self.stream.flush()


class _Talk(_Encoded):
    """A stream beside the work: text that it cannot take is lost, and work goes on."""

    def write(self, text: str) -> int:
        """Write text."""
        with suppress(OSError, ValueError):
            super().write(clean(text))
        return len(text)

    def flush(self) -> None:
        """Write text that is held back."""
        with suppress(OSError, ValueError):
            self.stream.flush()


class _Drawing(_Encoded):
    """The stream that `rich` draws on, with sequences of its own; beside the work too."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self.stream.isatty()

    def write(self, text: str) -> int:
        """Write text."""
        with suppress(OSError, ValueError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Write text that is held back."""
        with suppress(OSError, ValueError):
            self.stream.flush()


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # the reader has seen enough
        raise
    except OSError as error:
        raise Unwritten(f"the answer cannot be written to stdout: {error.strerror}") from None


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal, guarded or not."""
    return (stream.stream if isinstance(stream, _Encoded) else stream).isatty()


def read_lines(mark: str) -> Iterator[str]:
    """Lines of stdin without their ends; at a terminal each is asked for by a mark, and can be edited.

    Bytes that are no text become U+FFFD. KeyboardInterrupt at Ctrl-C.
    """
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not (sys.stdin and is_terminal(sys.stdin) and is_terminal(sys.stdout)):
        yield from (line.rstrip("\n") for line in sys.stdin or ())
        return
    with suppress(ImportError):
        import readline  # noqa: F401, with it input() has arrows and a history
    with suppress(EOFError):
        while True:
            with redirect_stdout(sys.stdout.stream if isinstance(sys.stdout, _Encoded) else sys.stdout):
                line = input(mark)  # which takes a guarded stdout for no terminal
            yield line
    print()


def find_width() -> int:
    """Columns of the terminal, or those that COLUMNS says; 80 where neither is known, as in a pipe."""
    return max(_LEAST_WIDTH, shutil.get_terminal_size((80, 24)).columns)


@contextmanager
def guarded(*, is_answer: bool) -> Iterator[None]:
    """A block in which stdout and stderr show control characters as text, and replace letters that an encoding lacks.

    With `is_answer` a write that fails on stdout raises `Unwritten`, or BrokenPipeError if nobody reads it any more.
    Then call `finish_answer`, which flushes, before the block ends. Without `is_answer` text that cannot be written is
    lost without an error; on stderr it always is. In the block `isatty()` is False for both; ask `is_terminal` instead.
    """
    before = sys.stdout, sys.stderr
    streams = [stream or open(os.devnull, "w", encoding="utf-8") for stream in before]  # noqa: SIM115, closed at the end
    sys.stdout = (_Answer if is_answer else _Talk)(streams[0])
    sys.stderr = _Talk(streams[1])
    try:
        yield
    finally:
        if not is_answer:
            sys.stdout.flush()
        sys.stderr.flush()
        for stream in streams:
            _hush_if_full(stream)
        sys.stdout, sys.stderr = before


def finish_answer() -> None:
    """Write all text that was printed; `Unwritten` or BrokenPipeError if that fails."""
    sys.stdout.flush()


def _hush_if_full(stream: TextIO) -> None:
    """Send a broken stream to /dev/null, so that Python does not fail when it flushes it at its own end."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say_at_once(line: str) -> None:
    """Write a line to stderr from the handler of a signal, in which print may meet a line that is half printed."""
    with suppress(OSError):
        os.write(2, f"{clean(line)}\n".encode())


def open_console(*, stderr: bool = False, **options: Any) -> "Console":
    """A console of `rich` on stdout or stderr that shows control characters in texts, and takes every letter."""
    from rich.console import Console  # only now: most answers are plain lines
    from rich.segment import Segment

    class CleanConsole(Console):
        def render(self, *arguments: Any, **more: Any) -> Iterator[Segment]:
            for segment in super().render(*arguments, **more):
                if segment.control or not _CONTROL.search(segment.text):
                    yield segment
                else:
                    yield Segment(clean(segment.text), segment.style)

    stream = sys.stderr if stderr else sys.stdout
    inner = stream.stream if isinstance(stream, _Encoded) else stream
    return CleanConsole(file=_Drawing(inner), **options)  # type: ignore[arg-type]
