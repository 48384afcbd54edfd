"""dtlayout convert: weights of a run or a checkpoint as a Hugging Face folder that `transformers` opens, and back.

A run with an adapter becomes a PEFT folder, or with --merge a whole model. With --quantize a whole model is written in
few bits (`commands.quantize_options`).
"""

import argparse
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtlayout.base.errors import CheckpointError
from dtlayout.base.formatting import fold_notes
from dtlayout.checkpoint.manifest import find_checkpoint
from dtlayout.commands.arguments import show
from dtlayout.commands.quantize_options import QUANTIZE_OPTIONS, add_quantize_arguments, describe_losses, quantize
from dtlayout.commands.source import find_adapter_data, find_config, find_data, find_kept
from dtlayout.config.config import Config
from dtlayout.models.beside import CONFIG
from dtlayout.models.peft import find_base_folder, find_export_notes, is_peft
from dtlayout.models.weights import FILE_BYTES, describe_cut_rows, describe_new_rows

if TYPE_CHECKING:
    from dtlayout.checkpoint.hf import WeightSource

EXAMPLE = "dtlayout convert runs/debug exported"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the source, the folder to write, and the format."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="a run folder, whose newest checkpoint is taken, or a checkpoint; or a Hugging Face folder, which becomes "
        "a run folder that has done no step; or a PEFT folder, with --merge",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="which must not be there yet")
    out = parser.add_argument_group("to a Hugging Face folder")
    out.add_argument(
        "--format", choices=("bfloat16", "float32"), help="bfloat16 by default, float32 of an adapter alone"
    )
    out.add_argument(
        "--file-gib", type=float, metavar="G", help=f"largest file, and memory; {FILE_BYTES >> 30} by default"
    )
    out.add_argument("--tokenizer", help="bytes, or a tokenizer.json or its folder; by default the run's")
    adapter = parser.add_argument_group("of a run with an adapter")
    adapter.add_argument(
        "--merge", action="store_true",
        help="write the whole model with the adapter in it, summed in float32 with the unquantized weights; without "
        "this the adapter alone is written, as a PEFT folder; with --quantize the sum is quantized, never the base "
        "before it",
    )  # fmt: skip
    adapter.add_argument(
        "--base", type=Path, metavar="FOLDER", help="where the frozen model is now; by default where it was"
    )
    add_quantize_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Convert, and say what was written."""
    if options.folder.exists():
        raise CheckpointError(f"{options.folder} is there already; name another folder")
    if options.quantize:
        _refuse_given(
            options, ("format",), "is for weights that are not quantized; beside --quantize they are bfloat16"
        )
    else:
        _refuse_given(options, QUANTIZE_OPTIONS[1:], "is for --quantize")
    if is_peft(options.source):
        return _merge_peft(options)
    if (options.source / CONFIG).is_file():
        return _import(options)
    return _export(options)


def _import(options: argparse.Namespace) -> int:
    _refuse_given(
        options, ("format", "file_gib", "tokenizer", *QUANTIZE_OPTIONS), "is for the way to a Hugging Face folder; "
        "weights keep their formats in a checkpoint, and the config of a run names its tokenizer",
    )  # fmt: skip
    _refuse_given(options, ("merge", "base"), f"is for a run with an adapter, and {options.source} is a whole model")
    from dtlayout.checkpoint.hf import import_weights  # only now: they import torch
    from dtlayout.checkpoint.sharded import read_model

    num_bytes = import_weights(options.source, options.folder)
    checkpoint = find_checkpoint(options.folder)
    document = {"source": str(options.source), "checkpoint": str(checkpoint), "num_bytes": num_bytes}
    text = f"{options.source}: {num_bytes / 1e6:,.1f} MB in {checkpoint}; start with train.run_folder={options.folder}"
    notes = describe_new_rows(str(options.source), read_model(checkpoint), "mean")
    document |= {"notes": notes} if notes else {}
    return show(options, document, lambda _: [text, *fold_notes(notes)], indent=None)


def _refuse_given(options: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    """CheckpointError if one of these options is given."""
    given = [name for name in names if (value := getattr(options, name)) is not None and value is not False]
    if given:
        raise CheckpointError(f"--{given[0].replace('_', '-')} {why}")


def _export(options: argparse.Namespace) -> int:
    """Write a run's weights: all of them, its adapter, or the frozen model with the adapter in it."""
    checkpoint = find_checkpoint(options.source.resolve())
    from dtlayout.checkpoint.adapter import export_adapter  # only now: they import torch
    from dtlayout.checkpoint.hf import open_checkpoint
    from dtlayout.checkpoint.merge import merge_checkpoint
    from dtlayout.checkpoint.sharded import read_model

    config = find_config(options.source)
    model = read_model(checkpoint)
    has_adapter = model.adapter is not None
    if not has_adapter:
        _refuse_given(options, ("merge", "base"), f"is for a run with an adapter, and {checkpoint} has none")
    beside: dict[str, Any] = {
        "base": find_kept(options.source, config), "data": find_data(options.source, config, options.tokenizer),
    }  # fmt: skip
    if has_adapter and not options.merge:
        _refuse_given(
            options, ("base", "file_gib", *QUANTIZE_OPTIONS), "is for --merge, and the adapter alone is written here"
        )
        number_format = options.format or "float32"
        num_bytes = export_adapter(checkpoint, options.folder, number_format=number_format, **beside)
        return _show_export(options, str(checkpoint), num_bytes, number_format, find_export_notes(model))
    weights = merge_checkpoint(checkpoint, options.base) if has_adapter else open_checkpoint(checkpoint)
    beside |= {"max_seq_len": config.batch.seq_len if config else None}
    return _write_whole(options, weights, config, beside)


def _merge_peft(options: argparse.Namespace) -> int:
    if not options.merge:
        raise CheckpointError(
            f"{options.source} is an adapter: train it further with train.init_from, or write the whole model with "
            "--merge"
        )
    _refuse_given(options, ("base",), "is for a run; a PEFT folder names its frozen model in adapter_config.json")
    from dtlayout.checkpoint.merge import merge_peft  # only now: it imports torch

    data = find_adapter_data(options.source, options.tokenizer)
    beside = {"base": find_base_folder(options.source), "data": data}
    return _write_whole(options, merge_peft(options.source), None, beside)


def _write_whole(
    options: argparse.Namespace, weights: "WeightSource", config: Config | None, beside: dict[str, Any]
) -> int:
    """Write a whole model, quantized if that is asked for."""
    from dtlayout.checkpoint.hf import export_weights, round_first

    number_format, file_bytes = options.quantize or options.format or "bfloat16", _find_file_bytes(options)
    notes = describe_cut_rows(config.model) if config else []
    trained_in = config.precision.fake_quant if config else "none"
    if trained_in not in ("none", options.quantize):
        notes.append(f"the run multiplied by weights in {trained_in}, and --quantize {trained_in} writes these")
    if options.quantize:
        if config and options.quantize == trained_in:
            weights = round_first(weights, config.precision.compute)
        num_bytes, losses = quantize(options, weights, config, file_bytes, beside)
        losses["notes"] = [*losses["notes"], *notes]
        return _show_export(options, str(weights.place), num_bytes, number_format, **losses)
    num_bytes = export_weights(weights, options.folder, number_format=number_format, file_bytes=file_bytes, **beside)
    return _show_export(options, str(weights.place), num_bytes, number_format, notes)


def _find_file_bytes(options: argparse.Namespace) -> int:
    file_gib = FILE_BYTES / 2**30 if options.file_gib is None else options.file_gib
    if not 0 < file_gib < inf:
        raise CheckpointError(f"--file-gib {file_gib:g} must be above 0 and finite")
    return int(file_gib * 2**30)


def _show_export(
    options: argparse.Namespace,
    source: str,
    num_bytes: int,
    number_format: str,
    notes: Sequence[str] = (),
    losses: dict[str, Any] | None = None,
) -> int:
    files = sorted(path.name for path in options.folder.iterdir())
    document = {"checkpoint": source, "folder": str(options.folder), "num_bytes": num_bytes, "files": files}
    document |= {"notes": list(notes)} if notes else {}
    document |= {"validation": losses} if losses else {}
    text = f"{source}: {num_bytes / 1e6:,.1f} MB of {number_format} in {options.folder}: {', '.join(files)}"
    lines = [text, *describe_losses(losses), *fold_notes(notes)]
    return show(options, document, lambda _: lines, indent=None)
