"""What the tests of checkpoints run on the pool's ranks, or on one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtlayout.base.errors import CheckpointError
from dtlayout.checkpoint import first_weights, sharded
from dtlayout.checkpoint.agreement import RepeatedPlanner
from dtlayout.checkpoint.copies import HostCopies
from dtlayout.checkpoint.first_weights import load_weights
from dtlayout.checkpoint.sharded import collect_state, find_intact, load_checkpoint, save_checkpoint
from dtlayout.models.stored_names import StoredWeight
from dtlayout.plans.init import find_place
from dtlayout.spec.batch import Batch
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import SGD, AdamW, Optimizer
from dtlayout.spec.precision import Precision
from dtlayout.training.build import Assembly, assemble
from dtlayout.training.optimizer import build_optimizer, set_learning_rate

BATCH = Batch(global_batch=8, seq_len=16)
FP32 = Precision(compute="float32")
ADAMW = AdamW()
State = dict[str, np.ndarray]


def build(
    layout: Layout, model: ModelShape, seed: int, settings: Optimizer = ADAMW
) -> tuple[Assembly, torch.optim.Optimizer]:
    """Sharded stages with the weights of `seed`, and an optimizer that has not stepped."""
    assembly = assemble(model, BATCH, layout, Kernels(), FP32, seed=seed, device_type="cpu")
    optimizer = build_optimizer(assembly.modules, model, settings, assembly.disk)
    set_learning_rate(optimizer, 1e-2)
    return assembly, optimizer


def update(assembly: Assembly, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer step with gradients that differ from element to element, the same in every layout.

    Counters, which no gradient moves, move too, unless the model is frozen.
    """
    for module in assembly.modules:
        is_whole = all(parameter.requires_grad or parameter.dim() == 1 for parameter in module.parameters())
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = parameter.detach() * 0.5 + 1e-3
            elif is_whole:
                parameter.data += torch.arange(1.0, len(parameter) + 1)
    optimizer.step()
    optimizer.zero_grad()


def save(
    folder: Path,
    step: int,
    assembly: Assembly,
    optimizer: torch.optim.Optimizer,
    model: ModelShape,
    settings: Optimizer = ADAMW,
    *,
    keep: int,
    **more: Any,
) -> Path:
    """`save_checkpoint` of what is in these modules and this optimizer."""
    tensors = collect_state(assembly.modules, optimizer, model, settings)
    return save_checkpoint(folder, step, tensors, model, settings, keep=keep, **more)


def whole_state(assembly: Assembly, optimizer: torch.optim.Optimizer, model: ModelShape) -> State:
    """Parameters and optimizer state of this rank's stages, gathered; tied ones of two stages are equal."""
    found: State = {}
    for module in assembly.modules:
        for local_name, parameter in module.named_parameters():
            name = model.aliases.get(local_name, local_name)
            note_equal(found, f"parameter {name}", gather(parameter))
            for kept, tensor in optimizer.state[parameter].items():
                note_equal(found, f"{kept} {name}", tensor if kept == "step" else tensor.full_tensor())
    return found


def gather(tensor: Tensor) -> Tensor:
    """The whole tensor; one that is no DTensor, such as a counter, every rank has whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def note_equal(found: dict[str, np.ndarray], name: str, tensor: Tensor) -> None:
    """Add a whole tensor, of which two stages of a rank may have a copy each, to the bit the same."""
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor  # which numpy has not
    array = tensor.detach().clone().numpy()
    assert np.array_equal(found.setdefault(name, array), array), f"{name} differs between two stages of a rank"


def train_and_save(
    layout: Layout, model: ModelShape, folder: Path, num_steps: int, keep: int, settings: Optimizer = ADAMW
) -> tuple[State, State]:
    """Save copies after each of `num_steps` updates, as a run does; the state then, and after one update more."""
    assembly, optimizer = build(layout, model, 1, settings)
    copies, planner = HostCopies(optimizer, "cpu"), RepeatedPlanner()
    for step in range(1, num_steps + 1):
        update(assembly, optimizer)
        tensors = copies.take(collect_state(assembly.modules, optimizer, model, settings))()
        save_checkpoint(folder, step, tensors, model, settings, keep=keep, planner=planner)
    saved = whole_state(assembly, optimizer, model)
    update(assembly, optimizer)
    return saved, whole_state(assembly, optimizer, model)


def merge(states: list[State]) -> State:
    """The whole model's state from those of all ranks, which agree where they hold the same."""
    merged: State = {}
    for state in states:
        for name, array in state.items():
            assert np.array_equal(merged.setdefault(name, array), array), name
    return merged


def find_newest(folder: Path, falls_back: bool) -> tuple[Path | None, list[str]] | str:
    """What this rank would go on from, and what was said; or why not."""
    said: list[str] = []
    try:
        return find_intact(folder, said.append, falls_back=falls_back), said
    except CheckpointError as error:
        return str(error)


def load_each(
    layouts: list[Layout], model: ModelShape, path: Path, settings: Optimizer = ADAMW
) -> list[tuple[int, State, State]]:
    """For each layout, other initial weights: the step that was loaded, the state, and after one update more.

    The frozen weights beside an adapter are those that it was saved with, since no checkpoint has them.
    """
    results = []
    for layout in layouts:
        assembly, optimizer = build(layout, model, 2 if model.adapter is None else 1, settings)
        for parameter in (each for module in assembly.modules for each in module.parameters() if each.requires_grad):
            parameter.data.fill_(0.5)
        step = load_checkpoint(path, assembly.modules, optimizer, model, settings)
        loaded = whole_state(assembly, optimizer, model)
        update(assembly, optimizer)
        results.append((step, loaded, whole_state(assembly, optimizer, model)))
    return results


class CountingFile:
    """A file of safetensors that notes how many elements are read of it."""

    def __init__(self, read: list[int], file: Path, framework: str):
        self.read, self.opened = read, safe_open(file, framework=framework)

    def __enter__(self) -> "CountingFile":
        self.opened.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.opened.__exit__(*exception)

    def get_slice(self, name: str) -> "CountingSlice":
        return CountingSlice(self.read, self.opened.get_slice(name))


class CountingSlice:
    """A tensor of such a file."""

    def __init__(self, read: list[int], stored: Any):
        self.read, self.stored = read, stored

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        tensor: Tensor = self.stored[part]
        self.read.append(tensor.numel())
        return tensor


def join_starts(by_rank: list[Any], number: int) -> tuple[State, int]:
    """Weights that all ranks got in one layout of `start_from_hf`, and elements that they read.

    AssertionError if a rank reads more than it holds.
    """
    found: State = {}
    num_read = 0
    for rank in by_rank:
        weights, read, held = rank[number]
        found |= weights
        num_read += read
        assert read <= held
    return found, num_read


def start_from_hf(layouts: list[Layout], model: ModelShape, folder: Path) -> list[tuple[State, int, int]]:
    """For each layout the parameters of a Hugging Face folder, the elements that this rank read, and those it holds."""
    results = []
    for layout in layouts:
        read: list[int] = []

        with mock.patch.object(first_weights, "safe_open", partial(CountingFile, read)):
            assembly = assemble(
                model,
                BATCH,
                layout,
                Kernels(),
                FP32,
                seed=0,
                device_type="cpu",
                give_weights=partial(load_weights, folder),
            )
        held, whole = 0, State()
        for local_name, parameter in (named for module in assembly.modules for named in module.named_parameters()):
            held += parameter.to_local().numel()
            note_equal(whole, model.aliases.get(local_name, local_name), parameter.full_tensor())
        results.append((whole, sum(read), held))
    return results


def start_beside(
    layouts: list[Layout], model: ModelShape, folder: Path, adapter: Path, precision: Precision
) -> list[State]:
    """For each layout the weights of a PEFT folder's adapter and of its frozen model; quantized ones as two."""
    states = []
    for layout in layouts:
        give = partial(load_weights, folder, adapter=adapter)
        assembly = assemble(model, BATCH, layout, Kernels(), precision, seed=0, device_type="cpu", give_weights=give)
        found = State()
        for module in assembly.modules:
            for name, parameter in module.named_parameters():
                note_equal(found, model.aliases.get(name, name), gather(parameter))
        states.append(found)
    return states


def start_and_save(layout: Layout, model: ModelShape, folder: Path, into: Path) -> None:
    """A checkpoint after no step, of weights from a Hugging Face folder."""
    assembly = assemble(
        model, BATCH, layout, Kernels(), FP32, seed=0, device_type="cpu", give_weights=partial(load_weights, folder)
    )
    optimizer = build_optimizer(assembly.modules, model, SGD(momentum=0.0))
    save(into, 0, assembly, optimizer, model, SGD(momentum=0.0), keep=1)


def step_from_hf(layouts: list[Layout], model: ModelShape, folder: Path, settings: Optimizer) -> list[State]:
    """For each layout the state after an update of weights from a Hugging Face folder."""
    states = []
    for layout in layouts:
        assembly = assemble(
            model, BATCH, layout, Kernels(), FP32, seed=0, device_type="cpu", give_weights=partial(load_weights, folder)
        )
        optimizer = build_optimizer(assembly.modules, model, settings, assembly.disk)
        set_learning_rate(optimizer, 1e-2)
        update(assembly, optimizer)
        states.append(whole_state(assembly, optimizer, model))
    return states


def refusal(layout: Layout, model: ModelShape, path: Path) -> str | None:
    """What loading complains of on this rank."""
    assembly, optimizer = build(layout, model, seed=2)
    return message_of(lambda: load_checkpoint(path, assembly.modules, optimizer, model, ADAMW))


def refusals_of_unequal(
    cases: list[tuple[Layout, str]], rank: int, model: ModelShape, path: Path, folder: Path
) -> list[tuple[str | None, str | None]]:
    """For each layout what loading a checkpoint and a Hugging Face folder complain of, if on one rank the last tensor
    of that name is another one by a bit."""
    load_state, fill = sharded._load_state, first_weights._fill
    to_spoil: list[str] = []

    def spoil(name: str, tensor: Tensor) -> None:
        if name in to_spoil:
            to_spoil.remove(name)  # of two copies on this rank one stays as it is
            if dist.get_rank() == rank:
                find_place(tensor.detach())[0].view(torch.int32).view(-1)[-1] ^= 1

    def load_and_spoil(path: Path, named: list[tuple[str, Tensor]], *others: Any) -> None:
        load_state(path, named, *others)
        for name, tensor in reversed(named):
            spoil(name, tensor)

    def fill_and_spoil(parameter: Tensor, weight: StoredWeight, *stored: Any) -> Any:
        broken = fill(parameter, weight, *stored)
        spoil(weight.name, parameter)
        return broken

    results = []
    for layout, name in cases:
        assembly, optimizer = build(layout, model, seed=2)
        to_spoil[:] = [name]
        with mock.patch.object(sharded, "_load_state", load_and_spoil):
            of_checkpoint = message_of(lambda: load_checkpoint(path, assembly.modules, optimizer, model, ADAMW))  # noqa: B023
        to_spoil[:] = ["model.embed_tokens.weight"]
        with mock.patch.object(first_weights, "_fill", fill_and_spoil):
            of_folder = message_of(lambda: load_weights(folder, assembly.modules, model, 0, "cpu"))  # noqa: B023
        results.append((of_checkpoint, of_folder))
    return results


def message_of(load: Callable[[], object]) -> str | None:
    try:
        load()
    except CheckpointError as error:
        return str(error)
    return None
