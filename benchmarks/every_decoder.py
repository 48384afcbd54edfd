"""Decoders that are planned, as Markdown: those of `transformers` by their own defaults, and files of a folder.

    python -m benchmarks.every_decoder [--configs FOLDER]

Each config.json is read as `recommend --model` reads it, and its parameters are held against those of the class that
`transformers` builds of it. A folder has a file for each model, NAME.json. The page is `traced.md`.
"""

import argparse
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.pages.markdown import table
from dtlayout.base.errors import InvalidConfig
from dtlayout.models.counting import count_parameters
from dtlayout.models.files import find_model
from dtlayout.tracing.building import build_causal, find_causal_class

_OTHER = "something of its own"
_REASONS = {
    "encoder beside": "it has an encoder and a decoder", "reads the second one": "it attends both ways",
    "knows no model_type": "transformers does not know it",
}  # fmt: skip
"""Words of a reason → what it is called in the table."""
_BEFORE_REASON = (" cannot be traced: ", " is neither described nor traced: ", ".json: ")
"""Words that end what stands before a reason: a file's name, and what was tried."""


class Read(NamedTuple):
    """How one config.json is read."""

    name: str
    """The family, or the file."""
    how: str
    """described, traced or refused."""
    note: str
    """Parameters more than its class has, "" for as many, or the reason of a refusal."""
    parameters: int = 0
    """Parameters as we count them; 0 of a refused one."""

    @property
    def is_same(self) -> bool:
        """True if it is planned with the parameters of its class."""
        return self.how != "refused" and not self.note


class Numbers(NamedTuple):
    """How many numbers a class has."""

    parameters: int
    """Elements of all parameters."""
    stored: int
    """Elements in files of its weights: of buffers too, such as the biases that correct a router."""


def read_config(name: str, path: Path, theirs: Numbers | None) -> Read:
    """How a file is read; `theirs` are the numbers of its class, None where `transformers` has none."""
    try:
        model = find_model(str(path))
    except InvalidConfig as error:
        return Read(name, "refused", strip_reason(error.problems[0]))
    ours = count_parameters(model)
    note = "no class" if theirs is None else "" if ours in theirs else f"{ours - theirs.parameters:+,}"
    return Read(name, "traced" if model.trace else "described", note, ours)


def strip_reason(problem: str) -> str:
    """A reason without the file and without what was tried.

    >>> strip_reason("model a.json: model_type='b' cannot be traced: its code: fails")
    'its code: fails'
    """
    for words in _BEFORE_REASON:
        if words in problem:
            return problem.partition(words)[2]
    return problem


def read_defaults(folder: Path) -> Iterator[Read]:
    """Each causal model of `transformers` whose class takes its own defaults, in alphabetical order."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        path = folder / family / "config.json"
        try:
            config = AutoConfig.for_model(family)
            config.get_text_config(decoder=True)
            theirs = _count_theirs(config)
        except Exception:  # whatever a config class raises of its own defaults
            continue
        path.parent.mkdir()
        path.write_text(json.dumps(config.to_dict(), default=str))
        yield read_config(family, path, theirs)


def read_folder(folder: Path) -> Iterator[Read]:
    """Each file NAME.json of a folder, in alphabetical order."""
    from transformers import CONFIG_MAPPING

    for path in sorted(folder.glob("*.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        kind = config.get("model_type") if isinstance(config, dict) else None
        theirs = None
        if isinstance(kind, str) and kind in CONFIG_MAPPING:
            try:
                theirs = _count_theirs(CONFIG_MAPPING[kind].from_dict(config))
            except Exception:  # whatever code of a family raises of sizes that it does not take
                theirs = None
        yield read_config(path.stem, path, theirs)


def _count_theirs(config: Any) -> Numbers:
    """Numbers of the family's own class; of one that sees or hears, of the part that reads text."""
    from transformers import AutoModelForCausalLM

    text = config.get_text_config(decoder=True)
    with torch.device("meta"):
        # Some families have no causal class of the part alone.
        whole = find_causal_class(text) is None
        model = AutoModelForCausalLM.from_config(config) if whole else build_causal(text)
    stored = sum({id(each): each.numel() for each in model.state_dict(keep_vars=True).values()}.values())
    return Numbers(sum(each.numel() for each in model.parameters()), stored)


def _sort_reason(reason: str) -> str:
    return next((name for words, name in _REASONS.items() if words in reason), _OTHER)


def _print_table(heading: Sequence[str], rows: Sequence[Sequence[str]], num_words: int = 1) -> None:
    print(*table([*heading], [[*row] for row in rows], num_words=num_words), "", sep="\n")


def print_defaults(folder: Path) -> None:
    """Tables of what `transformers` has; files are written to `folder`."""
    found = list(read_defaults(folder))
    counts: Mapping[str, int] = Counter(each.how for each in found)
    same = sum(each.is_same for each in found)
    reasons = Counter(_sort_reason(each.note) for each in found if each.how == "refused")
    num_decoders = len(found) - sum(number for why, number in reasons.items() if why != _OTHER)
    planned = len(found) - counts["refused"]
    print("## Every causal model by its defaults\n")
    print(
        f"transformers has {len(found)} causal models whose classes can be built by their own defaults. Of the\n"
        f"config.json that these write, {counts['described']} are described and {counts['traced']} traced, {same} of "
        f"them with the parameters of\nthe class, or with all that its files hold: some keep biases of routers as "
        f"buffers. {counts['refused']} are refused.\nOf the {num_decoders} that are decoders {planned} are planned, "
        f"{planned / num_decoders:.0%}.\n"
    )
    _print_table(["refused since", "families"], [[why, str(n)] for why, n in reasons.most_common()])
    if others := [[each.name, each.note] for each in found if each.how != "refused" and each.note]:
        print("Parameters that are counted beyond those of the class:\n")
        _print_table(["family", "parameters more"], others)
    rest = [[each.name, each.note] for each in found if each.how == "refused" and _sort_reason(each.note) == _OTHER]
    _print_table(["refused", "reason"], rest, num_words=2)


def print_folder(folder: Path) -> None:
    """Tables of the files of a folder."""
    found = list(read_folder(folder))
    planned = [each for each in found if each.how != "refused"]
    with_class = [each for each in planned if each.note != "no class"]
    same = sum(each.is_same for each in planned)
    print("## Files as people have them\n")
    print(
        f"Of {len(found)} files of published models {len(planned)} are planned: "
        f"{sum(each.how == 'described' for each in planned)} described, {sum(each.how == 'traced' for each in planned)}"
        f" traced. transformers has\na class of {len(with_class)} of these, and {same} have its parameters to the last "
        f"one, or all that its files hold. {len(found) - len(planned)} are refused.\n"
    )
    rows = [[each.name, each.how, f"{each.parameters:,}", each.note or "same"] for each in planned]
    _print_table(["file", "how", "parameters", "beside its class"], rows, num_words=2)
    _print_table(["refused", "reason"], [[each.name, each.note] for each in found if each.how == "refused"], 2)


def add_configs(parser: argparse.ArgumentParser) -> None:
    """Add the option that names a folder of files."""
    parser.add_argument("--configs", type=Path, default=None, help="folder with a config.json NAME.json for each model")


def main() -> None:
    """Print the tables."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    parser = argparse.ArgumentParser(prog="benchmarks.every_decoder")
    add_configs(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print_defaults(Path(name))
    if options.configs is not None:
        print_folder(options.configs)


if __name__ == "__main__":
    main()
