"""The arguments of every command as one page: `python tests/support/cli_page.py` prints docs/reference/cli.md.

The page is written from the arguments of the parsers, not from the help that argparse prints, because versions of
Python print that differently.
"""

import argparse
import textwrap
from collections.abc import Iterator
from importlib import import_module

from dtlayout.commands.overview import COMMANDS, STAGES

HEAD = """\
# Commands

`dtlayout COMMAND --help` prints the same for one command. `--json`, which every command takes, prints one JSON document
on stdout and nothing else. Where a command takes a config, `--section.key=value` overrides a key of it. `make docs-cli`
writes this page.

Exit codes: 0 done, 2 refused or the answer could not be written, 130 after Ctrl-C. A refusal or a wrong argument under
`--json` is a document too: `{"ok": false, "problems": […]}`. Control characters of names, paths and files are shown as
text (`\\x1b`), and letters that the terminal's encoding lacks by their number."""


def write_page() -> Iterator[str]:
    """The lines of the page, in the order of the work."""
    yield HEAD
    for question, commands in STAGES.items():
        yield f"\n## {question}"
        for name in commands:
            command = import_module(f"dtlayout.commands.{name}")
            parser = argparse.ArgumentParser(prog=f"dtlayout {name}", add_help=False)
            command.add_arguments(parser)
            yield f"\n### {name}\n\n{COMMANDS[name]}\n\n    {command.EXAMPLE}\n"
            yield from (describe(each) for each in parser._actions if each.help != argparse.SUPPRESS)


def describe(argument: argparse.Action) -> str:
    """An argument as an item of a list: its names, what is written behind them, and its sentence."""
    value = _describe_value(argument)
    heads = [f"`{name} {value}`" if value else f"`{name}`" for name in argument.option_strings] or [f"`{value}`"]
    if argument.option_strings and argument.required:
        heads.append("needed")
    text = (argument.help or "") % {"default": argument.default}
    line = ": ".join(filter(None, [", ".join(heads), text]))
    return textwrap.fill(line, 118, subsequent_indent="  ", initial_indent="- ", break_on_hyphens=False)


def _describe_value(argument: argparse.Action) -> str:
    """What is written behind an argument's names, or in the place of one that has none; empty for a flag."""
    if argument.nargs == 0:
        return ""
    if argument.choices:
        return "|".join(map(str, argument.choices))
    value = str(argument.metavar or argument.dest.upper())
    many = {"+": "{0} …", "*": "[{0} …]", "?": "[{0}]"}
    return many.get(str(argument.nargs), "{0}").format(value)


if __name__ == "__main__":
    print("\n".join(write_page()))
