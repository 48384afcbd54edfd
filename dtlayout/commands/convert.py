"""dtlayout convert: weights of a run or a checkpoint as a Hugging Face folder that `transformers` opens, and back."""

import argparse
from math import inf
from pathlib import Path

from dtlayout.base.errors import CheckpointError
from dtlayout.checkpoint.manifest import find_checkpoint
from dtlayout.commands.arguments import show
from dtlayout.commands.source import find_config, find_data, find_kept
from dtlayout.models.weights import FILE_BYTES

EXAMPLE = "dtlayout convert runs/debug exported"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the source, the folder to write, and the format."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="a run folder, whose newest checkpoint is taken, or a checkpoint; or a Hugging Face folder, which becomes "
        "a run folder that has done no step",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="which must not be there yet")
    out = parser.add_argument_group("to a Hugging Face folder")
    out.add_argument("--format", choices=("bfloat16", "float32"), help="bfloat16 by default")
    out.add_argument(
        "--file-gib", type=float, metavar="G", help=f"largest file, and memory; {FILE_BYTES >> 30} by default"
    )
    out.add_argument("--tokenizer", help="bytes, or a tokenizer.json or its folder; by default the run's")


def run(options: argparse.Namespace) -> int:
    """Convert, and say what was written."""
    if options.folder.exists():
        raise CheckpointError(f"{options.folder} is there already; name another folder")
    if (options.source / "config.json").is_file():
        return _import(options)
    return _export(options)


def _import(options: argparse.Namespace) -> int:
    if given := [name for name in ("format", "file_gib", "tokenizer") if getattr(options, name) is not None]:
        raise CheckpointError(
            f"--{given[0].replace('_', '-')} is for the way to a Hugging Face folder; weights keep their formats in a "
            f"checkpoint, and the config of a run names its tokenizer"
        )
    from dtlayout.checkpoint.hf import import_weights  # only now: it imports torch

    num_bytes = import_weights(options.source, options.folder)
    checkpoint = find_checkpoint(options.folder)
    document = {"source": str(options.source), "checkpoint": str(checkpoint), "num_bytes": num_bytes}
    text = f"{options.source}: {num_bytes / 1e6:,.1f} MB in {checkpoint}; start with train.run_folder={options.folder}"
    return show(options, document, lambda _: [text], indent=None)


def _export(options: argparse.Namespace) -> int:
    number_format = options.format or "bfloat16"
    file_gib = FILE_BYTES / 2**30 if options.file_gib is None else options.file_gib
    if not 0 < file_gib < inf:
        raise CheckpointError(f"--file-gib {file_gib:g} must be above 0 and finite")
    checkpoint = find_checkpoint(options.source.resolve())
    from dtlayout.checkpoint.hf import export_weights  # only now: it imports torch

    config = find_config(options.source)
    base, data = find_kept(options.source, config), find_data(options.source, config, options.tokenizer)
    num_bytes = export_weights(
        checkpoint, options.folder, number_format=number_format, file_bytes=int(file_gib * 2**30),
        max_seq_len=config.batch.seq_len if config else None, data=data, base=base,
    )  # fmt: skip
    files = sorted(path.name for path in options.folder.iterdir())
    document = {"checkpoint": str(checkpoint), "folder": str(options.folder), "num_bytes": num_bytes, "files": files}
    text = f"{checkpoint}: {num_bytes / 1e6:,.1f} MB of {number_format} in {options.folder}: {', '.join(files)}"
    return show(options, document, lambda _: [text], indent=None)
