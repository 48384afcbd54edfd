"""Sharded checkpoints: tensors through torch.distributed.checkpoint, everything else as JSON.

RUN/checkpoints/step-00000070/ holds `tensors/` (parameters and the optimizer's state under their names in the whole
model, so that any layout can load them), `state.json` (step, model, optimizer and origin) and the manifest of both. It
gets its name when it is whole (`folder`). One whose optimizer is null holds weights alone, which a run starts from like
from weights of its own.
"""

import json
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dtlayout.base import toml
from dtlayout.base.checkpoint_names import STATE_NAME, list_checkpoints
from dtlayout.base.errors import CheckpointError, InvalidConfig
from dtlayout.base.files import parse_json
from dtlayout.base.process import name_process
from dtlayout.checkpoint.agreement import RepeatedPlanner, agree, last_line, tell
from dtlayout.checkpoint.equality import check_equal_parts
from dtlayout.checkpoint.folder import drop, make_empty, name_checkpoint, name_partial, publish
from dtlayout.checkpoint.manifest import FORMAT, Files, describe_files, find_damage, write_manifest
from dtlayout.checkpoint.optimizer_state import fill_state, set_updates
from dtlayout.checkpoint.reader import Reader
from dtlayout.models.families import find_weight
from dtlayout.models.files import strip_training
from dtlayout.models.weights import ENDS, list_weights
from dtlayout.plans.init import find_place
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import STATE_FORMAT, Optimizer

UNREADABLE = (CheckpointException, OSError, ValueError, EOFError, pickle.UnpicklingError)
"""Errors of reading a checkpoint that are the checkpoint's."""
_ENDS = tuple(f".{name}" for name in ENDS)
_PIECE_BYTES = 256 << 20
"""Most that is in memory of weights that are saved alone, or one row of a matrix."""


def collect_state(
    modules: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    model: ModelShape,
    settings: Optimizer,
) -> dict[str, Tensor]:
    """This rank's shards of parameters and of the optimizer's state of them, under their names in a checkpoint.

    `settings` say which state each parameter has; frozen ones have none. Of a model with an adapter there are the
    adapter's parameters alone: a checkpoint names the frozen model (`checkpoint.frozen_base`). Tied weights are there
    under their first name, on every stage that has them; a rank that has both stages gives one of the equal tensors.
    """
    return _take_first(_name_state(modules, optimizer, model, settings))


def _name_state(
    modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None, model: ModelShape, settings: Optimizer | None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that this rank holds, with its name in a checkpoint: tied weights once for each of its stages.

    Without `settings` parameters alone.
    """
    for module in modules:
        for local_name, parameter in module.named_parameters():
            name, weight = model.aliases.get(local_name, local_name), find_weight(model, local_name)
            if model.adapter is not None and not weight.trains:
                continue
            yield f"parameters.{name}", parameter.detach()
            if optimizer is None or settings is None or not weight.trains:
                continue
            for kind in settings.state_of(weight.role):
                yield f"{kind}.{name}", optimizer.state[parameter][kind]


def _take_first(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The first tensor of each name."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in named:
        tensors.setdefault(name, tensor)
    return tensors


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    model: ModelShape,
    settings: Optimizer,
    *,
    keep: int,
    origin: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    planner: RepeatedPlanner | None = None,
    look: Callable[[], None] = lambda: None,
) -> Path:
    """Save the state after `step` steps, as `collect_state` gives it, from all ranks at once and on any thread of each.

    The `keep` newest checkpoints stay. `settings` are the optimizer's, `origin` is what else decides how training goes
    on, for `read_origin`, `facts` what the manifest says beside its files. Ranks agree over `group`, by default the
    group of all; one of gloo keeps what may take long from under NCCL's watchdog. With one `planner` for all saves of a
    run, whose tensors keep names, shapes and places, they are planned once. `look` is called on the first rank before
    anything is published or removed, and does not return where the folder has become another run's. What failed leaves
    nothing, and the older ones as they were. CheckpointError on every rank if a file cannot be written.
    """
    path, partial = name_checkpoint(folder, step), name_partial(folder, step, tell(name_process(), group))
    is_first, planner = dist.get_rank(group) == 0, planner or RepeatedPlanner()
    # Copying ahead, it would wait for the first GPU, which is the one of a new thread, whatever this rank's is.
    writer = dcp.FileSystemWriter(partial / "tensors", per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_first)

    def write() -> tuple[list[WriteResult], Files]:
        """Write this rank's shards: their places and the rank's files, whose names begin with the rank's number."""
        (partial / "tensors").mkdir(exist_ok=True)
        written = writer.write_data(planner.plan, planner).value()
        names = [f"tensors/{file.name}" for file in (partial / "tensors").glob(f"__{dist.get_rank(group)}_*")]
        if is_first:
            _write_state(partial, step, model, _describe_optimizer(settings), origin or {})
            names.append(STATE_NAME)
        return written, describe_files(partial, names)

    def finish() -> None:
        writer.finish(planner.metadata, [written for written, _ in by_rank])
        files = describe_files(partial, ["tensors/.metadata"])
        for _, of_rank in by_rank:
            files |= of_rank
        write_manifest(partial, files, facts or {})
        publish(partial, path, keep, look)

    try:
        agree((lambda: make_empty(partial, look)) if is_first else None, path, group)
        planner.plan_writes(tensors, writer, path, group)
        by_rank = agree(write, path, group)
        agree(finish if is_first else None, path, group)
    except CheckpointError:
        if is_first:  # what a full disk holds of it is in the way of the next one
            drop(partial)
        raise
    return path


def save_weights(
    folder: Path, model: ModelShape, formats: Mapping[str, torch.dtype], read: Callable[[str, slice], Tensor]
) -> Path:
    """Save weights without an optimizer's state as what `folder` has after no step, on one process.

    `formats` has each weight's, and `read` gives some of its rows, when they are written; so no more than a piece is in
    memory. The checkpoint is not whole before this returns. CheckpointError if a file cannot be written.
    """
    path = name_checkpoint(folder, 0)
    planner = _PiecePlanner({f"parameters.{name}": (shape, formats[name]) for name, shape in list_weights(model)}, read)
    writer = dcp.FileSystemWriter(path / "tensors", single_file_per_rank=False)  # it keeps what it writes to one file
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is meant
            dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    except (CheckpointException, OSError) as error:
        raise CheckpointError(f"{path} cannot be written: {last_line(error)}") from error
    _write_state(path, 0, model, None, {})
    names = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]
    write_manifest(path, describe_files(path, names), {"step": 0})
    return path


class _PiecePlanner(DefaultSavePlanner):
    """Plans tensors that are nowhere yet, in pieces of some rows each."""

    def __init__(
        self, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], read: Callable[[str, slice], Tensor]
    ):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors, self._read = tensors, read

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for name in self._tensors for item in self._split(name)])
        return self.plan

    def _split(self, name: str) -> Iterator[WriteItem]:
        shape, dtype = self._tensors[name]
        num_rows = max(1, _PIECE_BYTES // (prod(shape[1:]) * dtype.itemsize))
        for first in range(0, shape[0], num_rows):
            offsets = torch.Size([first, *(0 for _ in shape[1:])])
            sizes = torch.Size([min(num_rows, shape[0] - first), *shape[1:]])
            piece = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype), torch.Size(shape))
            yield WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=piece)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.tensor_data is not None and write_item.index.offset is not None, "every item is a piece"
        first, num_rows = write_item.index.offset[0], write_item.tensor_data.chunk.sizes[0]
        return self._read(write_item.index.fqn.removeprefix("parameters."), slice(first, first + num_rows))


def _write_state(
    path: Path, step: int, model: ModelShape, optimizer: dict[str, Any] | None, origin: Mapping[str, Any]
) -> None:
    state = {"format": FORMAT, "step": step, "model": asdict(model), "optimizer": optimizer, "origin": dict(origin)}
    (path / STATE_NAME).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def find_intact(
    folder: Path, say: Callable[[str], None], *, falls_back: bool, group: dist.ProcessGroup | None = None
) -> Path | None:
    """The newest checkpoint of which no file has changed since it was saved; None if there is none. All ranks call it
    together and share the reading.

    With `falls_back` each damaged checkpoint is reported and the next older one is tried; the caller sets the damaged
    ones aside. CheckpointError if the newest is damaged without `falls_back`, or if all are: a run never starts anew
    without being told to.
    """
    listed: list[Any] = [[], ""]
    try:
        listed[0] = list_checkpoints(folder)
    except OSError as error:
        listed[1] = f"{folder} cannot be read: {error.strerror}"
    dist.broadcast_object_list(listed, group=group)  # a shared filesystem may not show every node the same at once
    if listed[1]:
        raise CheckpointError(listed[1])
    first_problem = ""
    for path in reversed(listed[0]):
        damage = find_damage_together(path, group)
        if not damage:
            return Path(path)
        first_problem = first_problem or f"{path} is damaged: {'; '.join(damage[:3])}"
        if not falls_back:
            break
        say(f"note: {path} is damaged, an older one is tried: {'; '.join(damage[:3])}")
    if first_problem:
        if falls_back:
            raise CheckpointError(f"{first_problem}; no older one is whole: remove it, and them, to start again")
        raise CheckpointError(
            f"{first_problem}; remove it to resume from an older one or from the start, or use "
            'checkpoint.fallback="previous"'
        )
    return None


def find_damage_together(path: Path, group: dist.ProcessGroup | None = None) -> list[str]:
    """`find_damage` by all ranks of a group at once, by default of all: they share the reading, and each gets all."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, find_damage(path, dist.get_rank(group), dist.get_world_size(group)), group=group)
    return list(dict.fromkeys(problem for problems in found for problem in problems))


def read_origin(path: Path) -> dict[str, Any]:
    """The `origin` that a checkpoint was saved with; empty if it has none."""
    origin = _read_state(path).get("origin")
    return origin if isinstance(origin, dict) else {}


def _read_state(path: Path) -> dict[str, Any]:
    """The `state.json` of a checkpoint; CheckpointError if it cannot be read."""
    try:
        state: dict[str, Any] = parse_json((path / STATE_NAME).read_text(encoding="utf-8"))
        if not isinstance(state, dict) or type(step := state.get("step")) is not int or step < 0:
            raise ValueError(f"{STATE_NAME} does not say after how many steps it was saved")
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    return state


def read_model(path: Path) -> ModelShape:
    """The model that a checkpoint is of; CheckpointError if it does not say."""
    try:
        saved = _read_state(path)["model"]
        return toml.parse({name: value for name, value in saved.items() if value is not None}, ModelShape, "model")
    except (ValueError, TypeError, KeyError, AttributeError, InvalidConfig) as error:
        raise _unreadable(path, error) from None


def find_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Name → (saved, now) of what differs; what was not saved is not known to differ."""
    return {name: (saved[name], value) for name, value in now.items() if name in saved and saved[name] != value}


def load_checkpoint(
    path: Path,
    modules: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    model: ModelShape,
    settings: Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
    use: Callable[[Tensor], None] = lambda tensor: None,
) -> int:
    """Load parameters and optimizer state in place, whatever layout saved them; the number of steps that they saw.

    Where the checkpoint holds weights alone, the optimizer stays as it is. `use` is called with each tensor before it
    is filled, and before it is compared with its copies.

    Ranks agree over `group`, as in `save_checkpoint`. CheckpointError if the checkpoint is of another model or
    optimizer, or cannot be read; what else goes wrong, such as a rank that is gone, is no fault of the checkpoint.
    """
    try:
        state = _read_state(path)
        step, saved_optimizer = state["step"], state.get("optimizer", {})
        usual = {STATE_FORMAT: [""] * len(settings.parts)}
        kept_settings = {} if saved_optimizer is None else usual | dict(saved_optimizer)
    except (ValueError, TypeError, KeyError) as error:
        raise _unreadable(path, error) from None
    models = read_model(path).without_unused, replace(model.without_unused, name="")
    saved, wanted = (asdict(strip_training(each)) for each in models)
    changes = {"model": find_changes({**saved, "name": ""}, wanted)}
    changes["optimizer"] = find_changes(kept_settings, usual | _describe_optimizer(settings))
    for what, changed in changes.items():
        if changed:
            listed = ", ".join(f"{name}={old} (config: {new})" for name, (old, new) in changed.items())
            raise CheckpointError(f"{path} holds another {what}: {listed}; use another train.run_folder")
    has_state = saved_optimizer is not None
    if has_state:
        fill_state(optimizer, modules, model, settings)
        set_updates(optimizer, step)  # what there was before stays where it lies, perhaps in files
    kept = settings if has_state else None
    _load_state(path, list(_name_state(modules, optimizer, model, kept)), group, use)
    kinds = ("parameters", *(_list_kinds(settings) if has_state else ()))
    tied = [f"{kind}.{name}" for kind in kinds for name in model.aliases.values()]
    check_equal_parts(_announce(_name_state(modules, optimizer, model, kept), use), tied, path, group)
    return step


def load_weights_alone(
    path: Path, modules: Sequence[nn.Module], model: ModelShape, group: dist.ProcessGroup | None = None
) -> None:
    """Load a checkpoint's parameters in place, whatever layout saved them, and nothing of an optimizer.

    Of a model with an adapter these are the adapter's alone. All ranks call it. CheckpointError if they cannot be read,
    or if ranks hold other values of one weight.
    """
    _load_state(path, list(_name_state(modules, None, model, None)), group, lambda tensor: None)
    tied = [f"parameters.{name}" for name in model.aliases.values()]
    check_equal_parts(_name_state(modules, None, model, None), tied, path, group)


def _announce(named: Iterable[tuple[str, Tensor]], use: Callable[[Tensor], None]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in named:
        use(tensor)
        yield name, tensor


class _FollowedPlanner(DefaultLoadPlanner):
    """Plans a load that calls `use` with each tensor before it is filled, and makes the rows zero that were not saved.

    Such rows are those that fill up embedding and head for tp (`ModelShape.unused_rows`).
    """

    def __init__(self, use: Callable[[Tensor], None]):
        super().__init__()
        self._use = use

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "it is set up before"
        known = self.metadata.state_dict_metadata
        for name, tensor in self.state_dict.items():
            saved = known.get(name)
            if not name.endswith(_ENDS) or not isinstance(saved, TensorStorageMetadata) or saved.size == tensor.shape:
                continue
            if saved.size[1:] != tensor.shape[1:]:
                continue  # which is refused
            self._use(tensor)
            local, first = find_place(tensor)
            local[max(0, saved.size[0] - first[0]) :].zero_()
            known[name] = replace(saved, size=tensor.shape)
        return super().create_local_plan()

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        self._use(tensor := super().resolve_tensor(read_item))
        return tensor


def _load_state(
    path: Path,
    named: Sequence[tuple[str, Tensor]],
    group: dist.ProcessGroup | None,
    use: Callable[[Tensor], None],
) -> None:
    """Fill tensors by their names, from all ranks at once: those of one name with the same."""
    tensors = _take_first(named)
    try:
        reader, planner = Reader(path / "tensors"), _FollowedPlanner(use)
        dcp.load(tensors, storage_reader=reader, planner=planner, process_group=group)
    except UNREADABLE as error:  # and not a rank that is gone, which is no reason against another start
        raise _unreadable(path, error) from error
    for name, tensor in named:
        if tensor is not tensors[name]:  # tied weights at the other end of the pipeline, which this rank has too
            find_place(tensor)[0].copy_(find_place(tensors[name])[0])


def load_parameters(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors, by their names in the whole model and of any float format, with a checkpoint's parameters.

    From all ranks at once. CheckpointError if they cannot be read.
    """
    wanted = {f"parameters.{name}": tensor for name, tensor in tensors.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is meant
            dcp.load(wanted, storage_reader=Reader(path / "tensors"), no_dist=not dist.is_initialized())
    except UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be read: {last_line(error)}") from error


def _unreadable(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {last_line(error)}; remove it to resume from an older one or from the start"
    )


def _describe_optimizer(settings: Optimizer) -> dict[str, Any]:
    """The settings on which a checkpoint depends, as JSON gives them back: the optimizers and their kinds of state.

    Formats of state are there where `optimizer.state_format` is given.
    """
    formats = [getattr(part, STATE_FORMAT, "") for part in settings.parts]
    described = {"name": ", ".join(part.name for part in settings.parts), "state": _list_kinds(settings)}
    return {**described, STATE_FORMAT: formats} if any(formats) else described


def _list_kinds(settings: Optimizer) -> list[str]:
    """The kinds of state that any of the optimizers of a model keeps."""
    return list(dict.fromkeys(kind for part in settings.parts for kind in part.state))
