"""Arguments that several commands share."""

import argparse
from pathlib import Path


def add_config(parser: argparse.ArgumentParser) -> None:
    """A TOML file; the rest of the command line may override it."""
    parser.add_argument("config", type=Path, help="a TOML file; --section.key=value overrides it")
