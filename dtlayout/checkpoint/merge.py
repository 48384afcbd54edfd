"""An adapter merged into the frozen model beside which it was trained.

A merge is computed in fp32 of the frozen weights as their folder has them, whatever the run computed with: what a
quantized weight has lost would stay lost, and a sum in bf16 rounds small updates away. It is rounded once, to the
format of what is written.

    LoRA: w + scale · B·A          (IA)³: rows of w and its bias, or columns of w, times the vector
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dtlayout.checkpoint.first_weights import OpenFiles
from dtlayout.checkpoint.frozen_base import FrozenBase, open_saved_base, read_frozen_base
from dtlayout.checkpoint.hf import Load, TensorPlace, WeightSource, find_places, load_tensors
from dtlayout.checkpoint.sharded import read_model
from dtlayout.models.adapters import LowRankLinear, RescaledLinear, list_adapted
from dtlayout.models.description import BLOCKS
from dtlayout.models.families import describe
from dtlayout.models.peft import find_adapter_tensors, find_base_folder, list_adapter
from dtlayout.models.stored import find_weights
from dtlayout.models.stored_names import StoredWeight
from dtlayout.models.weights import find_adapted_model
from dtlayout.plans.init import fill_initial
from dtlayout.spec.model_shape import ModelShape

Read = Callable[[Iterable[StoredWeight]], dict[str, Tensor]]
"""Weights of an adapter → their values in float32, in their shapes on disk, by their names on disk."""


def merge_checkpoint(checkpoint: Path, asked: Path | None = None) -> WeightSource:
    """The frozen model of a checkpoint with the checkpoint's adapter in it, to be exported.

    `asked` is the folder of the frozen model, by default where it was. CheckpointError if it is not there.
    """
    model = read_model(checkpoint)

    def read(weights: Iterable[StoredWeight]) -> dict[str, Tensor]:
        return load_tensors(checkpoint, find_places(weights, torch.float32))

    return WeightSource(checkpoint, model.base, _merge(model, open_saved_base(checkpoint, model, asked), read))


def merge_peft(folder: Path) -> WeightSource:
    """The frozen model that a PEFT folder names with the folder's adapter in it, to be exported.

    InvalidConfig if the frozen model is not here, or if one of the two folders is not what it should be.
    """
    model = find_adapted_model(folder)
    stored = find_adapter_tensors(folder)

    def read(weights: Iterable[StoredWeight]) -> dict[str, Tensor]:
        with OpenFiles() as files:
            names = [weight.tensors[0] for weight in weights]
            return {name: files.find(stored[name].file).get_tensor(name).float() for name in names}

    return WeightSource(folder, model.base, _merge(model, read_frozen_base(find_base_folder(folder), model), read))


class _Adapted(NamedTuple):
    """A linear layer with an adapter, and the weights of that."""

    linear: LowRankLinear | RescaledLinear
    weights: list[StoredWeight]


def _list_adapted(model: ModelShape) -> Iterator[tuple[str, _Adapted]]:
    """Name of each frozen weight that an adapter changes, and its layer; biases follow a vector on outputs alone."""
    stored = {weight.name: weight for weight in list_adapter(model)}
    for number in range(model.num_layers):
        block = BLOCKS.replace("*", str(number))
        for linear in list_adapted(describe(model.kind_of(number))):
            matrix, *bias = linear.own_weights
            own = [stored[f"{block}.{weight.name}"] for weight in linear.weights if weight.trains]
            rescales_bias = isinstance(linear, RescaledLinear) and linear.scales == "output"
            for weight in (matrix, *bias * rescales_bias):
                yield f"{block}.{weight.name}", _Adapted(linear, own)


def _merge(model: ModelShape, base: FrozenBase, read: Read) -> Load:
    adapted = dict(_list_adapted(model))
    assert model.adapter is not None, "who merges has an adapter"
    scale = model.adapter.scale
    read_base = _open_folder(Path(base.folder)) if base.folder else _draw(model, base.seed)

    def load(places: Mapping[str, TensorPlace]) -> dict[str, Tensor]:
        changed = {place.weight.name for place in places.values()} & adapted.keys()
        weights = {each.name: each for name in changed for each in adapted[name].weights}
        values = read(weights.values()) if weights else {}
        merged = {}
        for name, place in places.items():
            tensor = read_base(name, place)
            if place.weight.name in adapted:
                linear, own = adapted[place.weight.name]
                tensor = _add(tensor.float(), linear, [values[each.tensors[0]] for each in own], scale)
            merged[name] = tensor.to(place.dtype).contiguous()
        return merged

    return load


def _add(weight: Tensor, linear: LowRankLinear | RescaledLinear, values: list[Tensor], scale: float) -> Tensor:
    """A matrix or a bias in float32 with an adapter's values in it; a vector on disk has the shape to multiply with."""
    if isinstance(linear, LowRankLinear):
        narrow, wide = values
        return torch.addmm(weight, wide, narrow, alpha=scale)
    (vector,) = values
    return weight * (vector if weight.dim() == 2 else vector.flatten())


def _open_folder(folder: Path) -> Callable[[str, TensorPlace], Tensor]:
    """A function that reads a tensor of a Hugging Face folder as it is there."""
    stored = find_weights(folder)

    def read(name: str, _: TensorPlace) -> Tensor:
        with OpenFiles() as files:  # for this tensor alone: what was read of an open file stays mapped, and counts
            tensor: Tensor = files.find(stored[name].file).get_tensor(name)
            return tensor

    return read


def _draw(model: ModelShape, seed: int) -> Callable[[str, TensorPlace], Tensor]:
    """A function that gives a tensor of a model that is drawn from a seed; of a stack it draws all experts for each."""

    def read(_: str, place: TensorPlace) -> Tensor:
        whole = torch.empty(place.weight.shape)
        fill_initial([(place.weight.name, whole)], model.base, seed)
        return whole[place.number] if place.weight.is_stack else whole

    return read
