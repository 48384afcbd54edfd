"""Understood: what a file of another program says, in our own words, and where each word comes from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dtlayout.programs.files.trees import Tree
from dtlayout.programs.program import Job

ChooseOptions = Callable[[Job], tuple[dict[str, Any], list[str]]]
"""Function from a job to the options that all but its model decides, and to sentences on what they cannot say."""

How = Literal["read", "assumed", "ignored", "no effect"]
"""Part that an option plays. Read: the file says it. Assumed: a default or a usual value stands there. Ignored: it
changes no prediction. No effect: another option of the file keeps the program from using it."""


class Row(NamedTuple):
    """One option of a file."""

    option: str
    """The program's own name of it, with its value; empty where the file has no such option."""
    ours: str
    """Our key and value; empty where there is none."""
    how: How
    """Part that it plays."""
    note: str = ""
    """Reason of what is assumed, ignored or without effect."""


Rewrite = Callable[[str, Mapping[str, Any]], tuple[str, Mapping[str, Any]]]
"""Function from a script's text and changes of its options to the text with some of them, and the others."""


class OtherFile(NamedTuple):
    """A file of another program, as its reader gets it."""

    path: Path
    """Path of the file, beside which other files may lie."""
    text: str
    """Text of the file."""
    tree: Tree | None = None
    """Tables of a file in YAML, JSON or TOML; None for a shell script."""
    given: Mapping[str, str] = {}
    """Values of variables that the file alone does not say."""
    num_gpus: int = 0
    """GPUs in the place of those that the file starts; 0 leaves them."""


@dataclass
class Understood:
    """A job of another program, as our config has it."""

    engine: str
    """Name of the engine that predicts the program."""
    title: str
    """Name of the program for people."""
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Our config by section: model, batch, layout, precision, kernels, optimizer."""
    told: dict[str, str] = field(default_factory=dict)
    """Settings of the engine, as --engine-set takes them."""
    num_gpus: int = 0
    """GPUs that the file starts; 0 if it does not say."""
    gpus_per_node: int = 0
    """GPUs of a node; 0 if it does not say."""
    rows: list[Row] = field(default_factory=list)
    """Options of the file, in its order, and then what is assumed."""
    problems: list[str] = field(default_factory=list)
    """Options that are not understood, or whose value the file alone does not say."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Option → its value, or its words, as `options` has their names."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Name in the file → value, where a reader translates them into options of another program."""
    assigns: bool = False
    """True for a command whose options are NAME=VALUE, as with Hydra."""
    file: OtherFile | None = None
    """The file, by which it can be changed."""
    options: ChooseOptions | None = None
    """Function by which its program says a layout, as `Program.options`; None where nobody changes such files."""
    together: Sequence[frozenset[str]] = ()
    """Options that say one thing together, as `Program.together`."""
    rewrite: Rewrite | None = None
    """Function that makes changes which no option of a script says, where the program has a way of its own for some."""
    names: dict[str, str] = field(default_factory=dict)
    """Option as `options` has it → the file's own name of it, where that is another one."""

    @property
    def takes_flags(self) -> bool:
        """True for a command whose options begin with dashes."""
        return self.file is not None and self.file.tree is None and not self.assigns

    def put(self, section: str, values: Mapping[str, Any], option: str, how: How = "read", note: str = "") -> None:
        """Note values of one of our sections, and the option that they come from."""
        self.tables.setdefault(section, {}).update(values)
        ours = ", ".join(f"{section}.{key}={_show(value)}" for key, value in values.items())
        self.rows.append(Row(option, ours, how, note))

    def ignore(self, option: str, note: str, how: How = "ignored") -> None:
        """Note an option that changes nothing here."""
        self.rows.append(Row(option, "", how, note))

    def get(self, section: str, key: str, default: Any = None) -> Any:
        """A value that was put, or the default."""
        return self.tables.get(section, {}).get(key, default)


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
