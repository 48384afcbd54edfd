"""Weights from a Hugging Face folder into a checkpoint, and from a checkpoint into such a folder.

Tensors go out a file at a time, and into a checkpoint a piece at a time. Experts, which are a stack here and one tensor
each on disk, are read and written one by one. Values that are NaN or infinite go neither in nor out. Which tensors and
files there are is `models.weights`, and what goes along with them `checkpoint.kept`. `checkpoint.first_weights` brings
weights into a layout.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dtlayout.base.checkpoint_names import CHECKPOINTS
from dtlayout.base.errors import CheckpointError, InvalidConfig
from dtlayout.checkpoint.first_weights import OpenFiles, count_broken, find_mean, refuse_broken
from dtlayout.checkpoint.kept import made_whole, write_beside, write_json
from dtlayout.checkpoint.parts import Part, load_parts
from dtlayout.checkpoint.sharded import read_model, save_weights
from dtlayout.config.new_rows import count_ids
from dtlayout.config.sections import DataConfig
from dtlayout.models.beside import CONFIG, GENERATION, KEPT, read_table, update_config
from dtlayout.models.files import find_trained_model, to_hf
from dtlayout.models.stored import FORMATS, INDEX, StoredTensor, find_weights
from dtlayout.models.stored_names import StoredWeight
from dtlayout.models.traced import FAMILY
from dtlayout.models.weight import Piece
from dtlayout.models.weights import FILE_BYTES, find_weight_problems, list_stored, make_index, plan_files
from dtlayout.spec.model_shape import ModelShape


@dataclass(frozen=True)
class TensorPlace:
    """Weight and number of an expert that a tensor on disk is, and the format in which it goes out."""

    weight: StoredWeight
    """The weight, the first of several whose rows the tensor joins."""
    number: int
    """The number of the expert in its stack; 0 where there is no stack."""
    dtype: torch.dtype
    others: tuple[StoredWeight, ...] = ()
    """Weights beside the first whose rows are in the tensor."""

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return prod(self.weight.tensor_shape) * self.dtype.itemsize


Load = Callable[[Mapping[str, TensorPlace]], dict[str, Tensor]]
"""Places of tensors by their names → the tensors."""


@dataclass(frozen=True)
class WeightSource:
    """Weights of a whole model without an adapter, to be written."""

    place: Path
    """A checkpoint or a folder that they are of."""
    model: ModelShape
    load: Load
    """Function that reads some of their tensors."""


def export_weights(
    source: Path | WeightSource,
    folder: Path,
    *,
    number_format: str = "bfloat16",
    file_bytes: int = FILE_BYTES,
    max_seq_len: int | None = None,
    data: DataConfig | None = None,
    base: Path | None = None,
) -> int:
    """Write the weights of a checkpoint, or other ones, as a Hugging Face folder, on one process; the bytes of all
    tensors.

    `base` is the folder that the model came from, or what a run has kept of it: its files go along, as
    `checkpoint.kept.write_beside` says of it and of `data`, and its config.json with what has changed. None where the
    model came from nowhere. The folder is there when it is whole, in the place of what was there. CheckpointError if
    something cannot be read or written, DataError for the tokenizer, InvalidConfig for a model that no config.json
    describes, or for values that are NaN or infinite in this format.
    """
    if isinstance(source, Path):
        source = open_checkpoint(source)
    places = find_places(list_stored(source.model), getattr(torch, number_format))
    sizes = {name: place.num_bytes for name, place in places.items()}
    files = plan_files(sizes, file_bytes)
    with writing(source.place, folder) as made:
        write_beside(made, base, data)
        write_config(made, source.model, number_format, max_seq_len)
        write_tensors(made, files, places, source.load, f"{source.place} in {number_format}")
        if len(files) > 1:
            write_json(made / INDEX, make_index(files, sizes))
    return sum(sizes.values())


def open_checkpoint(checkpoint: Path) -> WeightSource:
    """The weights of a checkpoint whose model has no adapter, to be exported, without rows that are no tokens."""
    return WeightSource(checkpoint, read_model(checkpoint).without_unused, partial(load_tensors, checkpoint))


def round_first(source: WeightSource, number_format: str) -> WeightSource:
    """Weights as a training computed with them: their masters rounded to the compute format, before anything else."""

    def load(places: Mapping[str, TensorPlace]) -> dict[str, Tensor]:
        tensors = source.load(places)
        return {name: each.to(getattr(torch, number_format)).to(each.dtype) for name, each in tensors.items()}

    return replace(source, load=load)


@contextmanager
def writing(source: Path, folder: Path) -> Iterator[Path]:
    """`made_whole`, for what is made of `source`; CheckpointError if a file cannot be read or written in the block."""
    try:
        with made_whole(folder) as made:
            yield made
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{source} cannot be written to {folder}: {type(error).__name__} {error}") from error


def write_tensors(
    folder: Path, files: Mapping[str, Sequence[str]], places: Mapping[str, TensorPlace], load: Load, where: str
) -> None:
    """Write safetensors files, by their names and those of their tensors, a file at a time.

    InvalidConfig if values are NaN or infinite, which begins with `where`.
    """
    broken: dict[str, int] = {}
    for file, names in files.items():
        tensors = load({name: places[name] for name in names})
        broken |= {name: count for name, tensor in tensors.items() if (count := count_broken(tensor))}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    refuse_broken(broken, where)


def find_places(weights: Iterable[StoredWeight], dtype: torch.dtype) -> dict[str, TensorPlace]:
    """The place of each tensor of a folder; what a step counts stays in float32, in which `transformers` has it."""
    exact = torch.promote_types(dtype, torch.float32)
    places = dict[str, TensorPlace]()
    for weight in weights:
        for number, name in enumerate(weight.tensors):
            if name in places:
                places[name] = replace(places[name], others=(*places[name].others, weight))
            else:
                places[name] = TensorPlace(weight, number, exact if weight.is_counter else dtype)
    return places


def load_tensors(checkpoint: Path, places: Mapping[str, TensorPlace]) -> dict[str, Tensor]:
    """Tensors out of a checkpoint; experts that follow each other in a stack are read together, into one memory."""
    tensors: dict[str, Tensor] = {}
    parts, transposed = [], []
    for _, group in groupby(places.items(), key=lambda item: item[1].weight.name):
        (name, place), *others = group
        if place.weight.piece is not None:
            tensors[name], pieces = _join(place)
            parts += pieces
            transposed += [name] * place.weight.piece.is_transposed
            continue
        shape = place.weight.tensor_shape if place.weight.is_stack else place.weight.shape
        memory = torch.empty((1 + len(others), *shape) if place.weight.is_stack else shape, dtype=place.dtype)
        parts.append(Part(place.weight.name, place.number, memory))
        names = [name, *(each for each, _ in others)]
        each_shape = place.weight.tensor_shape
        tensors |= zip(names, memory, strict=True) if place.weight.is_stack else {name: memory.view(each_shape)}
    load_parts(checkpoint, parts)
    return tensors | {name: tensors[name].t().contiguous() for name in transposed}


def _join(place: TensorPlace) -> tuple[Tensor, list[Part]]:
    """Memory for a matrix or a vector that joins the rows of several weights, and the parts that fill it."""
    assert place.weight.piece is not None, "who joins has pieces"
    memory = torch.empty((place.weight.piece.rows, *place.weight.shape[1:]), dtype=place.dtype)
    pieces = [(each.name, each.piece.first, each.shape[0]) for each in (place.weight, *place.others) if each.piece]
    return memory, [Part(name, 0, memory[first : first + size]) for name, first, size in pieces]


def write_config(folder: Path, model: ModelShape, number_format: str, max_seq_len: int | None) -> None:
    """Write the model's config.json, on top of the one that is there; the file stays as it is where nothing differs."""
    path = folder / CONFIG
    if base := read_table(path):
        if (config := update_config(base, model, number_format, max_seq_len)) != base:
            write_json(path, config)
        return
    ids = {key: value for key, value in read_table(folder / GENERATION).items() if key.endswith("os_token_id")}
    write_json(path, to_hf(model, number_format, max_seq_len) | ids)


def import_weights(source: Path, folder: Path) -> int:
    """Write the weights of a Hugging Face folder as a run folder that has a checkpoint after no step; their bytes.

    On one process. They keep their formats, so that a run starts from the same bits as with `train.init_from`, and what
    lies beside them is kept for an export. Tokens of the folder's tokenizer that have no row of embedding and head get
    the mean of the others. The folder is there when it is whole. InvalidConfig for a model or weights that are not
    known, or are NaN or infinite, CheckpointError if something cannot be read or written.
    """
    model, stored = find_trained_model(str(source / "config.json")), find_weights(source)
    if problems := find_weight_problems(stored, model):
        raise InvalidConfig([f"{source}: {problem}" for problem in problems])
    if model.family != FAMILY:
        model = replace(model, vocab_size=max(model.vocab_size, count_ids(str(source))))
    weights = {weight.name: weight for weight in list_stored(model)}
    formats = {name: _find_format(weight, stored) for name, weight in weights.items()}
    broken = Counter[str]()

    def read(name: str, rows: slice) -> Tensor:
        weight = weights[name]
        with (
            OpenFiles() as files
        ):  # for this piece alone: what was read of an open file stays mapped, and counts as memory
            if not weight.is_stack:
                return read_tensor(weight.tensors[0], rows, files, weight.piece)
            made = torch.empty((rows.stop - rows.start, *weight.tensor_shape), dtype=formats[name])
            for row, tensor in zip(made, weight.tensors[rows], strict=True):
                row.copy_(read_tensor(tensor, slice(None), files))
            return made

    def read_tensor(name: str, rows: slice, files: OpenFiles, piece: Piece | None = None) -> Tensor:
        whole = files.find(stored[name].file).get_slice(name)
        tensor: Tensor = whole[rows] if piece is None else piece.cut(whole, rows).contiguous()
        broken[name] += count_broken(tensor)
        num_there = stored[name].shape[0]
        if rows.stop is None or rows.stop <= num_there or piece is not None:
            return tensor
        mean = find_mean(whole, num_there).to(tensor.dtype)  # rows of tokens that the folder has no rows for
        return torch.cat([tensor, mean.expand(rows.stop - max(rows.start, num_there), -1)])

    try:
        with made_whole(folder) as made:
            save_weights(made / CHECKPOINTS, model, formats, read)
            refuse_broken(+broken, str(source))
            (made / KEPT).mkdir()
            write_beside(made / KEPT, source, None)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{source} cannot be written to {folder}: {type(error).__name__} {error}") from error
    return sum(prod(weight.shape) * formats[name].itemsize for name, weight in weights.items())


def _find_format(weight: StoredWeight, stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """The format of a weight's tensors; of experts that differ one that holds the values of all."""
    formats = {FORMATS[stored[name].format] for name in weight.tensors}
    return reduce(torch.promote_types, (getattr(torch, name) for name in formats))
