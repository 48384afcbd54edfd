"""Options of `dtlayout convert` for weights of few bits: the format, and the data on which its loss is measured."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtlayout.base.errors import DataError, InvalidConfig
from dtlayout.base.formatting import plural
from dtlayout.config.config import Config
from dtlayout.config.sections import DataConfig
from dtlayout.spec.export_format import EXPORT_FORMATS

if TYPE_CHECKING:
    from dtlayout.checkpoint.hf import WeightSource
    from dtlayout.training.export_loss import HeldOutSamples

QUANTIZE_OPTIONS = ("quantize", "validation", "validation_samples")
"""Names of the options; all but the first belong to it."""
NUM_SAMPLES = 16
"""Samples on which losses are measured where no option says another number."""
SEQ_LEN = 1024
"""Tokens of a sample where no config says how many a run had."""


def add_quantize_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the format, and where its validation loss is measured."""
    group = parser.add_argument_group("to a Hugging Face folder of few bits")
    formats = "; ".join(f"{each.name}: {each.opened_by}" for each in EXPORT_FORMATS.values())
    group.add_argument(
        "--quantize",
        choices=tuple(EXPORT_FORMATS),
        help=f"store linear layers of blocks in this format and the rest in bfloat16; {formats}",
    )
    group.add_argument(
        "--validation",
        metavar="SOURCE",
        help="text on which the loss before and after is measured, named as data.source is; by default the run's "
        "validation.source",
    )
    group.add_argument(
        "--validation-samples",
        type=int,
        metavar="N",
        help=f"samples that are measured, {NUM_SAMPLES} by default; 0 measures none",
    )


def quantize(
    options: argparse.Namespace,
    weights: "WeightSource",
    config: Config | None,
    file_bytes: int,
    beside: dict[str, Any],
) -> tuple[int, dict[str, Any]]:
    """Write a quantized folder, and measure what that costs; the bytes of all tensors, and notes and losses.

    What cannot be quantized, and data that cannot be read, is refused before anything is written.
    """
    from dtlayout.checkpoint.quantized_export import check_quantized, export_quantized  # only now: they import torch

    check_quantized(weights.model, options.quantize)
    held_out = _open_held_out(options, weights, config, beside["data"])
    num_bytes = export_quantized(weights, options.folder, options.quantize, file_bytes=file_bytes, **beside)
    notes = [EXPORT_FORMATS[options.quantize].opened_by]
    if isinstance(held_out, str):
        return num_bytes, {"notes": [*notes, held_out]}
    return num_bytes, {"notes": notes, "losses": _measure(weights, options.quantize, held_out)}


def _open_held_out(
    options: argparse.Namespace, weights: "WeightSource", config: Config | None, data: DataConfig | None
) -> "HeldOutSamples | str":
    """Samples on which losses are measured, or the reason why there are none."""
    num_samples = NUM_SAMPLES if options.validation_samples is None else options.validation_samples
    if num_samples < 0:
        raise InvalidConfig(f"--validation-samples={num_samples} must not be negative")
    if num_samples == 0:
        return "no validation loss was measured, as --validation-samples=0 asks"
    found = _find_validation(options.validation, options.source, config, data)
    if found is None:
        return "no validation loss was measured: no validation data are named here; name some with --validation SOURCE"
    from dtlayout.training.export_loss import open_held_out_samples

    seq_len = config.batch.seq_len if config else SEQ_LEN
    return open_held_out_samples(found, weights.model, seq_len, num_samples)


def _find_validation(
    asked: str | None, source: Path, config: Config | None, data: DataConfig | None
) -> DataConfig | None:
    """A [data] section of what is measured: the source that is asked for, or the run's; None where neither is there.

    Texts become ids as `data` says, whose tokenizer goes along with the weights; DataError where none does.
    """
    if config is not None:
        named = replace(config.validation, source=asked, split="") if asked else config.validation
        return replace(config, validation=named, data=data or config.data).validation_data
    if asked and data is None:
        raise DataError(f"--validation {asked} needs a tokenizer, and {source} names none; give --tokenizer")
    return replace(data, source=asked) if asked and data else None


def _measure(weights: "WeightSource", name: str, held_out: "HeldOutSamples") -> dict[str, Any]:
    from dtlayout.training.devices import open_device
    from dtlayout.training.export_loss import measure_losses

    losses = measure_losses(weights, name, held_out, open_device("auto", None))
    return {
        "source": held_out.source, "loss": losses.plain, "quantized_loss": losses.quantized, "format": name,
        "num_samples": losses.num_samples, "num_targets": losses.num_targets,
    }  # fmt: skip


def describe_losses(losses: dict[str, Any] | None) -> Iterator[str]:
    """A line with both losses; none where they were not measured."""
    if losses:
        loss, quantized = losses["loss"], losses["quantized_loss"]
        yield (
            f"validation loss {loss:.4f} in bfloat16, {quantized:.4f} in {losses['format']} ({quantized - loss:+.4f}), "
            f"of {losses['num_targets']:,} targets in {plural(losses['num_samples'], 'sample')} of {losses['source']}"
        )
