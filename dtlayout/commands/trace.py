"""dtlayout trace: read off a model's own code what it computes, for any decoder that transformers builds."""

import argparse
import json
import os
from pathlib import Path

from dtlayout.base.files import check_own, check_writable, expand, parse_json
from dtlayout.models.files import read_config, trace_model
from dtlayout.models.trace_text import describe_trace
from dtlayout.models.traced import MARK, Trace, is_trace, parse_trace, read_trace

EXAMPLE = "dtlayout trace path/to/config.json --output model.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model and the file to write."""
    parser.add_argument("model", metavar="FOLDER_OR_CONFIG", help="a Hugging Face folder, its config.json, or a trace")
    parser.add_argument(
        "--output", metavar="FILE", help="JSON file for the trace, which other commands take as --model; by default it "
        "is kept in the user's cache",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Trace the model, write the file, and print what was found; of a trace's own file, print what it holds."""
    if options.output is None and (trace := _find_trace(options.model)):
        return _show(options, trace, Path(trace.shape.trace), "read from")
    output = None
    if options.output is not None:
        output = expand(options.output)
        check_writable(output)
        check_own(output, MARK, "a trace")
    path, config = read_config(options.model)
    shape = trace_model(config, path, output)
    return _show(options, read_trace(shape.trace), Path(shape.trace), "wrote")


def _find_trace(text: str) -> Trace | None:
    """The trace whose own file a text names; None for a model that is still to be traced."""
    if not text.endswith(".json") or not os.path.isfile(path := expand(text)):
        return None
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # which is said where the config is read
    return parse_trace(content, str(path.absolute())) if is_trace(content) else None


def _show(options: argparse.Namespace, trace: Trace, path: Path, how: str) -> int:
    """Print a trace, and `how` its file was used."""
    if options.json:
        print(json.dumps({"ok": True, "file": str(path), **json.loads(trace.dumps())}, indent=2))
    else:
        print("\n".join([*describe_trace(trace), f"{how} {path}"]))
    return 0
