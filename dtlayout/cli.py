"""The `dtlayout` command: one subcommand a question, each a module of `dtlayout.commands`.

A command module has EXAMPLE, `add_arguments(parser)` and `run(options)`, which returns the exit code. It is imported
only when its command is asked for, so that each command starts as fast as it can. With `--json` stdout holds one JSON
document and nothing else; errors are {"ok": false, "problems": […]}. Without it errors are lines on stderr. The exit
code is 2 for errors, and 130 for Ctrl-C.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from typing import NoReturn

from dtlayout.base.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_REFUSED, DtlayoutError
from dtlayout.base.formatting import find_version
from dtlayout.base.terminal import Unwritten, finish_answer, guarded
from dtlayout.base.toml import describe_unknown_key

STAGES = {
    "What do I have?": {
        "calibrate": "Measure these machines, and write the cluster file that predictions for them take.",
    },
    "Which layout?": {
        "recommend": "Find the fastest layouts of a model that fit on a cluster, with what stands against the others.",
        "web": "Open the planner as a page of this machine, which answers while one types.",
        "read": "Show how another program's script or config is understood, and write it as a config of ours.",
        "explain": "Show a layout's memory and time by component, what binds it and what would help.",
        "timeline": "Draw when each pipeline rank is predicted to do what, and where it waits.",
        "compare": "Show layouts side by side, and where their time and their memory differ.",
    },
    "Does it fit?": {
        "check": "Say whether a config can train on so many ranks, and what it would do and need.",
        "dryrun": "Build and step the trainer as ranks of a cluster that is not there: what they hold and send.",
        "trace": "Read what a model computes off its own code, for any decoder that transformers builds.",
    },
    "Train": {
        "config": "Show every key of a config, with its type, its default and what it means.",
        "prepare": "Tokenize the data of a config once, as training would.",
        "plot": "Draw loss, validation, speed and memory of runs as one page and as PNG files.",
        "data": "Show a training sample as text with its targets marked, or those of a step whose loss was not finite.",
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
"""Question → commands that answer it, with a sentence each; questions are in the order of the work."""
COMMANDS = {name: text for commands in STAGES.values() for name, text in commands.items()}


def list_stages() -> list[str]:
    """Lines for a user who has typed no command."""
    width = max(map(len, COMMANDS))
    lines = ["Parallel layouts for training Llama and Qwen, in the order of the work:"]
    for stage, commands in STAGES.items():
        lines += ["", stage, *(f"  {name:<{width}}  {text}" for name, text in commands.items())]
        lines += ["  torchrun train.py CONFIG.toml trains."] * (stage == "Train")
    start = import_module("dtlayout.commands.recommend").EXAMPLE
    return [*lines, "", f"Start with: {start}", "dtlayout COMMAND --help has an example of each."]


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are a JSON document if the user asked for one."""

    is_json = False

    def error(self, message: str) -> NoReturn:
        """Print the error in the arguments, and end with exit code 2."""
        if self.is_json:
            _refuse([f"{self.prog}: {message}"], is_json=True)
            self.exit(EXIT_REFUSED)
        super().error(message)


def _refuse(problems: Sequence[str], *, is_json: bool) -> None:
    """Print why a command is refused: one JSON document of rank 0, or lines of one rank a node."""
    with suppress(BrokenPipeError, Unwritten):  # the command is refused all the same
        if not is_json and os.environ.get("LOCAL_RANK", "0") == "0":
            print("\n".join(problems), file=sys.stderr)
        elif is_json and os.environ.get("RANK", "0") == "0":
            import json  # only now: most answers are read by people

            print(json.dumps({"ok": False, "problems": list(problems)}, indent=2))
            finish_answer()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with guarded(is_answer=True):
            try:
                return _answer(arguments)
            except BrokenPipeError:  # the reader has seen enough; nothing more is said
                return EXIT_DONE
            except Unwritten as error:
                print(error, file=sys.stderr)
                return error.exit_code
    except KeyboardInterrupt:
        with suppress(OSError):
            print("stopped", file=sys.stderr)
        return EXIT_INTERRUPTED


def _answer(arguments: list[str]) -> int:
    """Run the command, and write all of its answer, parts of which may be held back until its end."""
    try:
        exit_code = _run(arguments)
    except SystemExit:  # after a help, or a wrong argument
        finish_answer()
        raise
    with suppress(BrokenPipeError, Unwritten) if exit_code else nullcontext():  # it was printed before
        finish_answer()
    return exit_code


def _run(arguments: list[str]) -> int:
    if not arguments:
        print("\n".join(list_stages()))
        return EXIT_DONE
    name, is_json = arguments[0], "--json" in arguments
    if name not in COMMANDS:
        if not name.startswith("-"):
            _refuse([describe_unknown_key(name, COMMANDS)], is_json=is_json)
            return EXIT_REFUSED
        _show_overview(arguments, is_json=is_json)
    command = import_module(f"dtlayout.commands.{name}")
    from dtlayout.commands.arguments import check_options, parse_options  # only now: the overview needs none

    parser = _Parser(
        prog=f"dtlayout {name}", description=COMMANDS[name], epilog=f"example: {command.EXAMPLE}", allow_abbrev=False
    )
    parser.is_json = is_json
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    command.add_arguments(parser)
    options = parse_options(parser, arguments[1:])
    try:
        check_options(options)
        return int(command.run(options))
    except Unwritten:
        raise
    except DtlayoutError as error:
        _refuse(str(error).splitlines(), is_json=options.json)
        return error.exit_code


def _show_overview(arguments: list[str], *, is_json: bool) -> NoReturn:
    """Print the help, the version or an error for arguments that name no command, and end."""
    overview = _Parser(prog="dtlayout", description="Parallel layouts for Llama training.")
    overview.is_json = is_json
    torch = find_version("torch", otherwise="not installed")
    versions = f"dtlayout {find_version('dtlayout')}, torch {torch}"
    overview.add_argument("--version", action="version", version=versions, help="that of dtlayout and of torch")
    commands = overview.add_subparsers(required=True, metavar="COMMAND")
    for each, text in COMMANDS.items():
        commands.add_parser(each, help=text)
    overview.parse_args(arguments)
    overview.error("a COMMAND comes first")  # the arguments are right, but for their order


def run() -> NoReturn:
    """Run the command line as a process of its own, also as one of torchrun's ranks."""
    from dtlayout.base.process import leave  # only now: most commands that end earlier do not need it

    leave(main())


if __name__ == "__main__":
    run()
