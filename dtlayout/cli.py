"""The `dtlayout` command: one subcommand a question, each a module of `dtlayout.commands`.

A command module has EXAMPLE, `add_arguments(parser)` and `run(options)`, which returns the exit code; it is imported
only when it is asked for, so that each starts as fast as it can. With `--json` stdout holds one JSON document and
nothing else. Problems are lines on stderr, exit code 2.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from dtlayout.commands.arguments import check_options
from dtlayout.errors import DtlayoutError
from dtlayout.text import find_version
from dtlayout.toml import describe_unknown_key

STAGES = {
    "What do I have?": {
        "calibrate": "Measure these machines, and write the cluster file that predictions for them take.",
    },
    "Which layout?": {
        "recommend": "Find the fastest layouts of a model that fit on a cluster, with what stands against the others.",
        "explain": "Show a layout's memory and time by component, what binds it and what would help.",
        "timeline": "Draw when each pipeline rank is predicted to do what, and where it waits.",
        "compare": "Show layouts side by side, and where their time and their memory differ.",
    },
    "Does it fit?": {
        "check": "Say whether a config can train on so many ranks, and what it would do and need.",
        "dryrun": "Build and step the trainer as ranks of a cluster that is not there: what they hold and send.",
    },
    "Train": {
        "config": "Show every key of a config, with its type, its default and what it means.",
        "prepare": "Tokenize the data of a config once, as training would.",
        "plot": "Draw loss, validation, speed and memory of runs as one page and as PNG files.",
        "data": "Show as text the samples of a step whose loss was not finite.",
        "checkpoint": "List what a run has saved, show what wrote it, and verify that it is what was written.",
        "convert": "Write the weights of a run or a checkpoint as a Hugging Face folder, or of one as a checkpoint.",
        "generate": "Write text with the weights of a run, a checkpoint or a Hugging Face folder.",
    },
    "Measure": {
        "sweep": "Run many configs for real, and keep how each of them ended.",
    },
    "Learn": {
        "report": "Say what measured layouts teach about each choice, with plots.",
        "validate": "Score predictions against tables of measured runs, and fit the constants to them.",
        "refit": "Fit a calibrated cluster file to sweeps that ran with it, and keep how right their predictions were.",
    },
}
"""Question, in the order of the work → commands that answer it, with a sentence each."""
COMMANDS = {name: text for commands in STAGES.values() for name, text in commands.items()}


def list_stages() -> list[str]:
    """Where somebody starts who has typed no command."""
    width = max(map(len, COMMANDS))
    lines = ["Parallel layouts for training Llama and Qwen, in the order of the work:"]
    for stage, commands in STAGES.items():
        lines += ["", stage, *(f"  {name:<{width}}  {text}" for name, text in commands.items())]
        lines += ["  torchrun train.py CONFIG.toml trains."] * (stage == "Train")
    start = import_module("dtlayout.commands.recommend").EXAMPLE
    return [*lines, "", f"Start with: {start}", "dtlayout COMMAND --help has an example of each."]


def _is_override(text: str) -> bool:
    """Whether it sets a key of a config, the layout as it is printed, or the model."""
    key = text.partition("=")[0]
    return "." in key or key in ("--layout", "--model")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments:
        print("\n".join(list_stages()))
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        if not name.startswith("-"):
            print(describe_unknown_key(name, COMMANDS), file=sys.stderr)
            return 2
        overview = argparse.ArgumentParser(prog="dtlayout", description="Parallel layouts for Llama training.")
        torch = find_version("torch", otherwise="not installed")
        versions = f"dtlayout {find_version('dtlayout')}, torch {torch}"
        overview.add_argument("--version", action="version", version=versions, help="that of dtlayout and of torch")
        commands = overview.add_subparsers(required=True, metavar="COMMAND")
        for each, text in COMMANDS.items():
            commands.add_parser(each, help=text)
        overview.parse_args(arguments)  # prints help, or what is wrong, and exits
    command = import_module(f"dtlayout.commands.{name}")
    parser = argparse.ArgumentParser(
        prog=f"dtlayout {name}", description=COMMANDS[name], epilog=f"example: {command.EXAMPLE}", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    command.add_arguments(parser)
    options, rest = parser.parse_known_args(arguments[1:])
    options.overrides = list(filter(_is_override, rest)) if "config" in options else []
    if unknown := [text for text in rest if text not in options.overrides]:
        hint = "; an override is written --section.key=value" if "config" in options else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if "config" in options and getattr(options, "model", None):
        options.overrides.insert(0, f"--model={options.model}")
    try:
        check_options(options)
        return int(command.run(options))
    except DtlayoutError as error:
        if options.json:
            import json  # only now: most answers are read by people

            print(json.dumps({"ok": False, "problems": str(error).splitlines()}, indent=2))
        elif os.environ.get("LOCAL_RANK", "0") == "0":
            print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # who reads has seen enough; nothing more is said, not even at the end of the process
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":  # under torchrun, where gloo's threads may end a process that Python takes down with SIGABRT
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
