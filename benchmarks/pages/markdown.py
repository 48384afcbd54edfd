"""Markdown that pages have in common: how they were made, and tables. Imports no torch before it is asked."""

import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone


def made_by(name: str, arguments: str = "") -> str:
    """The date, the command that writes a page again, the version of torch, and the machine's processors."""
    import torch

    command = f"make bench NAME={name}" + (f' ARGS="{arguments}"' if arguments else "")
    today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    return f"{today}, `{command}`: torch {torch.__version__}, {os.cpu_count()} CPU cores, {platform.machine()}"


def table(heading: Sequence[str], rows: Iterable[Sequence[object]], num_words: int = 1) -> Iterator[str]:
    """Lines of a table, whose first columns are words and the others numbers, which stand on the right."""
    yield f"| {' | '.join(heading)} |"
    yield f"|{'---|' * num_words}{'--:|' * (len(heading) - num_words)}"
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)
