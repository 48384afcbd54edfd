"""Question: the question of a page as arguments of a command, so that page and terminal ask the same.

A question is a JSON object. Its texts are those that somebody typed. Whether they mean something is left to the
command, whose refusals are then those of the terminal, and `find_fields` names the control that each is about. Only
what could harm the machine is refused here: a page names no file of it. Files come as text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.base.formatting import shorten
from dtlayout.models.files import describe_unknown
from dtlayout.models.presets import PRESETS
from dtlayout.planner.choices import CHOICES, parse_choices

OPTIONS = {
    "gpu": "--gpu", "gpus": "--gpus", "gpus_per_node": "--gpus-per-node", "seq_len": "--seq-len",
    "global_batch": "--global-batch", "engine": "--engine", "engine_set": "--engine-set", "precision": "--precision",
    "optimizer": "--optimizer", "fix": "--fix", "avoid": "--avoid", "max_memory": "--max-memory", "top": "--top",
    "why_not": "--why-not", "tokens": "--tokens", "price": "--price", "scale": "--scale", "vocab": "--vocab",
}  # fmt: skip
"""Field of a question → option of `dtlayout recommend`."""
_REPEATED = ("engine_set", "precision", "fix", "avoid")
"""Fields with a list of texts, each of which is an option of its own."""
_OTHERS = ("ask", "model", "file", "layout", "other")
"""Fields that are no option: which command is asked, model, file, and layouts by their names."""
_LONGEST, _MOST, _LARGEST_FILE = 400, 20, 400_000
"""Letters of a text, texts of a list, and letters of a file."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}")

_FIELDS = (
    (r"model\.|model |model_type|it has no section|--model", "model"),
    (r"--vocab|argument --vocab:", "vocab"),
    (r"GPU type|the cluster is missing|--gpu[= ]|argument --gpu:", "gpu"),
    (r"the number of GPUs|num_gpus|--gpus[= ]|argument --gpus:", "gpus"),
    (r"gpus_per_node|--gpus-per-node", "gpus_per_node"),
    (r"(batch\.)?seq_len|--seq-len|argument --seq-len:", "seq_len"),
    (r"(batch\.)?global_batch|--global-batch|argument --global-batch:", "global_batch"),
    (r"engine |--engine-set|--engine", "engine"),
    (r"precision|--precision", "precision"),
    (r"optimizer|--optimizer", "optimizer"),
    (r"--max-memory|argument --max-memory:", "max_memory"),
    (r"--tokens|argument --tokens:", "tokens"),
    (r"--price|argument --price:", "price"),
    (r"--scale", "scale"),
    (r"--avoid|argument --avoid:", "avoid"),
    (r"--why-not", "why_not"),
    (rf"--fix|argument --fix:|(layout\.|kernels\.)?({'|'.join(CHOICES)})[= ]|.* has an effect only where", "fix"),
)
"""Form of the beginning of a refusal, behind the command's name → field of the question that it is about."""
_NOTHING_FITS = "no layout can train"
"""Beginning of a refusal that no single field is to blame for."""


@dataclass(frozen=True)
class GivenFile:
    """A file that somebody gave a page, as text."""

    name: str
    """Name without folders."""
    text: str


@dataclass(frozen=True)
class PageQuestion:
    """A question, each field of which was checked to be text of a bearable length."""

    ask: str
    """Command that answers, such as recommend."""
    model: str = ""
    """Name of a preset; empty where the file says the model."""
    file: GivenFile | None = None
    """A config.json, or the file of a training program."""
    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values of the options, by the names of `OPTIONS`."""
    layout: str = ""
    """Printed name of the layout that is asked about; empty for the best, or that of the file."""
    other: str = ""
    """Layout or choices to set beside `layout`."""

    def list_arguments(self, *left_out: str) -> list[str]:
        """Arguments of `dtlayout recommend` for all options but some."""
        return [
            argument
            for name, option in OPTIONS.items()
            if name not in left_out
            for text in self.texts.get(name, ())
            for argument in ([f"{option}={text}"] if text.startswith("-") else [option, text])
        ]


class FieldRefused(InvalidConfig):
    """A refusal that knows the field which it is about."""

    def __init__(self, name: str, problem: str):
        super().__init__(problem)
        self.name = name


def read_question(content: Any) -> PageQuestion:
    """The question of a JSON value; FieldRefused for what is no question, or names a file of this machine."""
    if not isinstance(content, dict):
        raise FieldRefused("", "a question is a JSON object")
    if unknown := sorted(str(name) for name in content.keys() - OPTIONS.keys() - {*_OTHERS}):
        raise FieldRefused("", f"{shorten(repr(unknown[0]))} is no field of a question")
    texts = {name: found for name in OPTIONS if (found := _read_texts(name, content.get(name)))}
    ask, model, layout, other = (_read_text(name, content.get(name)) for name in ("ask", "model", "layout", "other"))
    if model and model not in PRESETS:
        raise FieldRefused("model", describe_unknown(model))
    file = None if content.get("file") is None else _read_file(content["file"])
    return PageQuestion(ask or "recommend", model, file, texts, layout, other)


def find_fields(problems: Sequence[str], question: PageQuestion) -> list[str]:
    """The field of the question that each line of a refusal is about; empty where a line is about all of them."""
    if any(re.match(_NOTHING_FITS, line) for line in problems):
        return [""] * len(problems)
    return [_find_field(re.sub(r"^dtlayout \w+: ", "", line), question) for line in problems]


def _find_field(problem: str, question: PageQuestion) -> str:
    if question.file is not None and problem.startswith(question.file.name):
        return "file"
    if found := next((name for form, name in _FIELDS if re.match(form, problem)), ""):
        return found
    return next((name for name in ("fix", "avoid", "why_not") if not _are_choices(question.texts.get(name, ()))), "")


def _are_choices(texts: Sequence[str]) -> bool:
    try:
        return all(map(parse_choices, texts))
    except (InvalidConfig, InvalidLayout):
        return False


def _read_texts(name: str, value: Any) -> tuple[str, ...]:
    values = value if name in _REPEATED and isinstance(value, list) else [value]
    if len(values) > _MOST:
        raise FieldRefused(name, f"{name} has {len(values)} values; a question has at most {_MOST}")
    return tuple(filter(None, (_read_text(name, each) for each in values)))


def _read_text(name: str, value: Any) -> str:
    """The text of a value, which may be a number; empty where there is none."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise FieldRefused(name, f"{name} must be a text or a number")
    text = str(value).strip()
    if len(text) > _LONGEST:
        raise FieldRefused(name, f"{name} has {len(text):,} letters; it may have {_LONGEST}")
    if "\0" in text:
        raise FieldRefused(name, f"{name} must not hold a NUL")
    return text


def _read_file(value: Any) -> GivenFile:
    name, text = (value.get("name"), value.get("text")) if isinstance(value, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(text, str):
        raise FieldRefused("file", "a file has a name and a text")
    if not _FILE_NAME.fullmatch(name):
        raise FieldRefused("file", f"{shorten(repr(name))} is no name of a file: letters, digits, '.', '_' and '-'")
    if len(text) > _LARGEST_FILE:
        raise FieldRefused("file", f"{name} has {len(text):,} letters; a file may have {_LARGEST_FILE:,}")
    return GivenFile(name, text)
