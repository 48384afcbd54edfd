"""Reading: files of other programs as jobs of ours; a further program is a row of `READERS`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs import read_megatron
from dtlayout.programs.understood import Understood


class FileReader(NamedTuple):
    """Reader of one program's files."""

    is_ours: Callable[[str], bool]
    """True for the text of such a file."""
    read: Callable[[str, Mapping[str, str], int], Understood]
    """Job of such a text, given values of variables and a number of GPUs; InvalidConfig for what is not understood."""


READERS = (FileReader(read_megatron.is_ours, read_megatron.read),)


def read_program(path: Path, given: Mapping[str, str], num_gpus: int = 0) -> Understood | None:
    """The job of another program's file; None for a config of ours, or where nothing can be read.

    `num_gpus` take the place of those that the file starts; 0 leaves them. InvalidConfig with a line for each option
    that is not understood.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError):
        return None
    reader = next((each for each in READERS if each.is_ours(text)), None)
    if reader is None:
        return None
    try:
        return reader.read(text, given, num_gpus)
    except InvalidConfig as error:
        raise InvalidConfig([f"{path}: {each}" for each in error.problems]) from None


def parse_given(texts: list[str]) -> dict[str, str]:
    """Variable → value, of texts such as TP=4; InvalidConfig for others."""
    found = dict[str, str]()
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise InvalidConfig(f"--given {text} is no NAME=VALUE, such as TP=4")
        found[name] = value
    return found
