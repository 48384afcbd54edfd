"""Arguments that several commands share, such as a config and a GPU type; `show` prints an answer as JSON or text."""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import expand
from dtlayout.base.formatting import fold_notes, plural, shorten
from dtlayout.spec.cluster import Gpu, find_gpu, known_gpus, list_gpus_called

if TYPE_CHECKING:
    from dtlayout.config.config import Config

D = TypeVar("D")
JsonDocument = Mapping[str, Any]
"""A command's answer as `--json` prints it, which text and pages are made of."""
MODELS = "a preset, an HF config.json or its folder, or a TOML file with [model]"
"""Values that name a model, in `--model` and as model.name."""
_LARGEST = 10**15
"""Largest number that an option takes, of GPUs, tokens or steps; a float still counts up to it by ones."""


def show(options: argparse.Namespace, document: D, describe: Callable[[D], Iterable[str]], **style: Any) -> int:
    """Print a command's answer and return 0: its document with `--json`, else the lines that `describe` makes of it.

    Keys of a document that begin with "_" are for text and pages alone: `--json` leaves them out.
    """
    if options.json:
        import json  # only now: most answers are read by people

        print(json.dumps(strip_private(document), **{"indent": 2, **style}))
    else:
        print("\n".join(describe(document)))
    return 0


def print_note(text: str) -> None:
    """Print a note on stderr, beside the answer, folded at the width of the terminal."""
    print("\n".join(fold_notes([text])), file=sys.stderr, flush=True)


class CommandAnswer(NamedTuple):
    """An answer of a command before it is printed."""

    document: Any
    """CommandAnswer as `--json` prints it, with further keys that begin with "_"."""
    describe: Callable[[Any], Iterable[str]]
    """Function from the document to lines for people."""


def show_answer(options: argparse.Namespace, answer: CommandAnswer) -> int:
    """Print an answer as `show` does, and return 0."""
    return show(options, answer.document, answer.describe)


def strip_private(document: Any) -> Any:
    """A document without the keys that begin with "_", which are for text and pages of the command itself."""
    if not isinstance(document, dict):
        return document
    return {key: value for key, value in document.items() if not key.startswith("_")}


def parse_options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Options of a command line; `overrides` are the arguments of a config in it that set its keys.

    A wrong argument is the parser's error.
    """
    options, rest = parser.parse_known_args(arguments)
    takes_overrides = "config" in options or getattr(options, "like", None)
    options.overrides = list(filter(_is_override, rest)) if takes_overrides else []
    if unknown := [text for text in rest if text not in options.overrides]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_find_hint(parser, unknown, options)}")
    if takes_overrides and getattr(options, "model", None):
        options.overrides.insert(0, f"--model={options.model}")
    return options


def _is_override(text: str) -> bool:
    """Whether an argument sets a key of a config, the layout as it is printed, or the model."""
    key = text.partition("=")[0]
    return "." in key or key in ("--layout", "--model")


def _find_hint(parser: argparse.ArgumentParser, unknown: Sequence[str], options: argparse.Namespace) -> str:
    """A hint: the option that the first unknown one may mean, or how to override a config; empty if neither fits."""
    import difflib  # only now: most command lines are right

    names = parser._option_string_actions  # argparse has no public list of its options
    if near := difflib.get_close_matches(unknown[0].partition("=")[0], names, n=1):
        return f"; did you mean {near[0]}?"
    return "; an override is written --section.key=value" if "config" in options else ""


def check_options(options: argparse.Namespace) -> None:
    """Replace the `~` of each path by the home; InvalidConfig for a bad path, and for numbers too large or not finite.

    Called for all options of every command, before the command reads any of them.
    """
    problems = []
    for name, value in vars(options).items():
        entries = value if isinstance(value, list) else [value]
        for entry in entries:
            if isinstance(entry, float) and not math.isfinite(entry):
                problems.append(f"--{name.replace('_', '-')}={entry} must be a finite number")
            if isinstance(entry, int) and abs(entry) > _LARGEST:
                problems.append(f"--{name.replace('_', '-')}={shorten(str(entry), 20)} must be at most {_LARGEST:,}")
        if any(isinstance(entry, Path) for entry in entries):
            try:
                expanded = [expand(entry) if isinstance(entry, Path) else entry for entry in entries]
            except InvalidConfig as error:
                problems += [f"{name.replace('_', '-')}: {problem}" for problem in error.problems]
            else:
                setattr(options, name, expanded if isinstance(value, list) else expanded[0])
    if problems:
        raise InvalidConfig(problems)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the TOML file that a command takes, and the model that may take the place of its own.

    The rest of the command line may override what the file says.
    """
    parser.add_argument("config", type=Path, help="a TOML file; --section.key=value overrides it")
    parser.add_argument("--model", metavar="M", help=f"another model than the config's: {MODELS}")


def add_given(parser: argparse.ArgumentParser) -> None:
    """Add values of variables of a file."""
    text = "a variable of another program's file that the file alone does not say; may be repeated"
    parser.add_argument("--given", action="append", default=[], metavar="NAME=VALUE", help=text)


def add_world(parser: argparse.ArgumentParser) -> None:
    """Add the ranks that a config is for."""
    text = "ranks, one a GPU; the fewest that the layout needs by default"
    parser.add_argument("--world", "--gpus", type=int, dest="world", metavar="N", help=text, action=_StoreOnce)


class _StoreOnce(argparse.Action):
    """Stores a number whose option has several names, and refuses a second, different number."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        if before is not None and before != values:
            names = " and ".join(self.option_strings)
            parser.error(f"{names} mean one number, and here are {before} and {values}: say one of them, once")
        setattr(namespace, self.dest, values)


def add_gpu(parser: argparse.ArgumentParser) -> None:
    """Add the GPU type that a config is for."""
    parser.add_argument("--gpu", metavar="NAME", help="GPU type; that of [cluster] by default")


def name_gpu(asked: str, *, tells: bool = True) -> str:
    """The name of the GPU type that people mean; `tells` on stderr which one was taken, of several."""
    found = [gpu.name for gpu in list_gpus_called(asked)]
    if not found or found[0] == asked:
        return asked
    if not tells:
        return found[0]
    others = f"; {', '.join(found[1:])} {'are' if found[2:] else 'is'} known too" * (len(found) > 1)
    print_note(f"{asked} is taken as {found[0]}{others}")
    return found[0]


def choose_gpu(config: "Config", asked: str | None) -> Gpu:
    """The GPU type that is asked for, or that the config's [cluster] names; InvalidConfig if neither names one."""
    if asked is None and (known := config.cluster.known_gpu) is not None:
        return known
    name = asked or config.cluster.gpu
    if name == "auto":
        raise InvalidConfig(
            f"cluster.gpu='auto' is the GPU of a run, and nothing runs here; give --gpu with one of cpu, "
            f"{', '.join(known_gpus())}"
        )
    return find_gpu(name_gpu(name))


def choose_world(config: "Config", asked: int | None) -> int:
    """The ranks that are asked for, or the fewest that the config's layout needs."""
    return config.layout.smallest_world_size if asked is None else asked


def find_assumed_world(config: "Config", asked: int | None) -> list[str]:
    """A note that the fewest ranks are assumed, where neither `--world` nor the layout says how many; else none."""
    if asked is not None or config.layout.dp_shard != -1:
        return []
    fewest = plural(config.layout.smallest_world_size, "rank")
    return [f"this is for {fewest}, the fewest that the layout needs: --world says how many there are"]
