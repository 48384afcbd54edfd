"""dtlayout config: every key of a config, with its type, its default and what it means."""

import argparse
from dataclasses import asdict

from dtlayout.base.errors import InvalidConfig
from dtlayout.commands.arguments import show
from dtlayout.config.reference import list_sections

EXAMPLE = "dtlayout config data"
_HEAD = """\
# Keys of a config

A config is a TOML file; `--section.key=value` on the command line overrides a key of it. `[model]`, `[batch]` and
`[train]` are needed, and in `[model]` the `name` of a preset alone, which has all sizes. This page is what
`dtlayout config` prints: `make docs-config` writes it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the section to show."""
    parser.add_argument("section", nargs="?", help="only this one, such as data or data.mixture; all by default")


def run(options: argparse.Namespace) -> int:
    """Print the page, or one section of it."""
    sections = list_sections()
    head = [] if options.section else [_HEAD]
    if options.section:
        found = [section for section in sections if section.name == options.section]
        if not found:
            names = dict.fromkeys(section.name for section in sections)
            raise InvalidConfig(f"there is no section {options.section!r}; use one of {', '.join(names)}")
        sections = found
    tables = "\n\n".join("\n".join(section.describe()) for section in sections)
    return show(options, [asdict(section) for section in sections], lambda _: [*head, tables])
