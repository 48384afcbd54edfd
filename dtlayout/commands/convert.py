"""dtlayout convert: a run's weights, or a checkpoint's, as a Hugging Face folder that `transformers` opens."""

import argparse
from math import inf
from pathlib import Path

from dtlayout.commands.arguments import show
from dtlayout.config import load_config
from dtlayout.errors import CheckpointError, InvalidConfig
from dtlayout.models.weights import FILE_BYTES

EXAMPLE = "dtlayout convert runs/debug exported"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """From where, to where, and how."""
    parser.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="a run folder, whose newest is taken")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="which must not be there yet")
    parser.add_argument("--format", choices=("bfloat16", "float32"), default="bfloat16", help="bfloat16 by default")
    parser.add_argument(
        "--file-gib",
        type=float,
        default=FILE_BYTES / 2**30,
        metavar="G",
        help=f"largest file, and memory; {FILE_BYTES >> 30} by default",
    )
    parser.add_argument("--tokenizer", help="bytes, or a tokenizer.json or its folder; by default the run's")


def run(options: argparse.Namespace) -> int:
    """Convert, and say what was written."""
    if options.folder.exists():
        raise CheckpointError(f"{options.folder} is there already; name another folder")
    if not 0 < options.file_gib < inf:
        raise CheckpointError(f"--file-gib {options.file_gib:g} must be above 0 and finite")
    from dtlayout.checkpoint.hf import export_weights  # only now: it imports torch
    from dtlayout.checkpoint.sharded import find_checkpoint

    checkpoint = find_checkpoint(options.source.resolve())
    tokenizer, end_of_document, chat_template, max_seq_len = options.tokenizer, "", "", None
    try:
        config = load_config(checkpoint.parent.parent / "config.toml")
        max_seq_len, chat_template = config.batch.seq_len, config.data.chat_template
        if tokenizer is None:
            tokenizer, end_of_document = config.data.tokenizer, config.data.end_of_document
    except InvalidConfig:  # a checkpoint that lies alone
        pass
    num_bytes = export_weights(
        checkpoint, options.folder, number_format=options.format, file_bytes=int(options.file_gib * 2**30),
        max_seq_len=max_seq_len, tokenizer=tokenizer, end_of_document=end_of_document,
        chat_template=chat_template,
    )  # fmt: skip
    files = sorted(path.name for path in options.folder.iterdir())
    document = {"checkpoint": str(checkpoint), "folder": str(options.folder), "num_bytes": num_bytes, "files": files}
    text = f"{checkpoint}: {num_bytes / 1e6:,.1f} MB of {options.format} in {options.folder}: {', '.join(files)}"
    return show(options, document, [text], indent=None)
