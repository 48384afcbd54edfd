"""dtlayout completion: the code by which bash or zsh completes the command line, without a package.

The code lists commands, their options, the values that an option may have, and the keys of a config. It is made of the
parsers, so it is that of the installed version: print it again after an update.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module

from dtlayout.commands.overview import COMMANDS
from dtlayout.config.reference import list_sections
from dtlayout.costmodel.engine import known_engines
from dtlayout.models.presets import PRESETS
from dtlayout.spec.cluster import known_gpus

EXAMPLE = 'eval "$(dtlayout completion bash)"'
_SHELLS = ("bash", "zsh")
_CODE = """\
_dtlayout() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    if [[ $COMP_CWORD == 1 ]]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}} $before" in
{values}
        esac
        if [[ -z $words && $word == -* ]]; then
            case "${{COMP_WORDS[1]}}" in
{options}
            esac
        fi
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    if [[ ${{COMPREPLY[*]}} == *= ]]; then compopt -o nospace 2> /dev/null; fi
}}
complete{options_of_complete} -o default -F _dtlayout dtlayout"""
"""Code of bash, and of zsh after `bashcompinit`. Words that are no option, such as paths, are left to the shell."""

_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "--gpu": known_gpus,
    "--engine": known_engines,
    "--model": lambda: PRESETS,
}
"""Options whose values have names, beside other values that are allowed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    text = "whose code is printed; put such a line into .bashrc, or with zsh into .zshrc behind compinit"
    parser.add_argument("shell", choices=_SHELLS, help=text)


def run(options: argparse.Namespace) -> int:
    """Print the code."""
    if options.shell == "zsh":
        print("autoload -Uz bashcompinit && bashcompinit")
    parsers = {name: _make_parser(name) for name in COMMANDS}
    print(
        _CODE.format(
            commands=" ".join(parsers),
            values="\n".join(_list_values(parsers)),
            options="\n".join(_list_options(parsers)),
            options_of_complete=" -o nospace" if options.shell == "zsh" else "",  # which has no compopt
        )
    )
    return 0


def _make_parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    import_module(f"dtlayout.commands.{name}").add_arguments(parser)
    return parser


def _list_values(parsers: Mapping[str, argparse.ArgumentParser]) -> Iterator[str]:
    """Cases of `COMMAND WORD`, for words behind which only some values may stand."""
    for command, parser in parsers.items():
        for argument in parser._actions:  # argparse has no public list of them
            words = argument.choices or _NAMES.get("".join(argument.option_strings[:1]), list)()
            if words:
                cases = "|".join(f'"{command} {name}"' for name in argument.option_strings or [command])
                yield f'            {cases}) words="{" ".join(map(str, words))}" ;;'


def _list_options(parsers: Mapping[str, argparse.ArgumentParser]) -> Iterator[str]:
    """A case for each command: its options, and the keys of a config where it takes one."""
    for command, parser in parsers.items():
        words = [name for argument in parser._actions for name in argument.option_strings if name.startswith("--")]
        if any(argument.dest == "config" for argument in parser._actions):
            words += _list_keys()
        yield f'                {command}) words="{" ".join(words)}" ;;'


def _list_keys() -> list[str]:
    """Overrides of every key of a config that one value can set."""
    single = [section for section in list_sections() if not section.title.startswith("[[")]
    return list(dict.fromkeys(f"--{section.name}.{key.name}=" for section in single for key in section.keys))
