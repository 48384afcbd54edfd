"""An adapter out of a checkpoint as a PEFT folder, which the library `peft` opens."""

from functools import partial
from pathlib import Path

import torch

from dtlayout.checkpoint.frozen_base import read_saved_base
from dtlayout.checkpoint.hf import find_places, load_tensors, write_tensors, writing
from dtlayout.checkpoint.kept import write_beside, write_json
from dtlayout.checkpoint.sharded import read_model
from dtlayout.config.sections import DataConfig
from dtlayout.models.beside import CONFIG
from dtlayout.models.peft import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    list_adapter,
    write_adapter_config,
)


def export_adapter(
    checkpoint: Path,
    folder: Path,
    *,
    number_format: str = "float32",
    data: DataConfig | None = None,
    base: Path | None = None,
) -> int:
    """Write a checkpoint's adapter as a PEFT folder, on one process; the bytes of all tensors.

    `base` and `data` are those of `export_weights`: the tokenizer and its template go along. The adapter names the
    folder of its frozen model. The folder is there when it is whole. CheckpointError if something cannot be read or
    written, InvalidConfig for values that are NaN or infinite in this format.
    """
    model, frozen = read_model(checkpoint), read_saved_base(checkpoint)
    places = find_places(list_adapter(model), getattr(torch, number_format))
    with writing(checkpoint, folder) as made:
        write_beside(made, base, data)
        (made / CONFIG).unlink(missing_ok=True)  # it is of the frozen model, whose folder this is not
        write_json(made / ADAPTER_CONFIG, write_adapter_config(model, frozen.folder or None))
        load, where = partial(load_tensors, checkpoint), f"{checkpoint} in {number_format}"
        write_tensors(made, {ADAPTER_WEIGHTS: [*places]}, places, load, where)
    return sum(place.num_bytes for place in places.values())
