"""Sharded checkpoints: tensors through torch.distributed.checkpoint, everything else as JSON.

RUN/checkpoints/step-00000070/ holds `tensors/` (parameters and both Adam moments under their names in the whole model,
so that any layout can load them) and `state.json` (step and model). It is written under another name and renamed when
it is whole: a folder with that name is a whole checkpoint.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from dtlayout.errors import CheckpointError
from dtlayout.model_shape import ModelShape

_PREFIX = "step-"


def save_checkpoint(
    folder: Path,
    step: int,
    modules: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    model: ModelShape,
    *,
    keep: int,
) -> Path:
    """Save the state after `step` steps, from all ranks at once; the `keep` newest checkpoints stay."""
    path = folder / f"{_PREFIX}{step:08d}"
    partial = folder / f"partial-{step:08d}"
    is_writer = dist.get_rank() == 0
    if is_writer:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dcp.save(_collect_tensors(modules, optimizer, model.aliases), checkpoint_id=str(partial / "tensors"))
    if is_writer:
        state = {"step": step, "model": asdict(model)}
        (partial / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        if path.exists():  # the same step again, after a resume from an older checkpoint
            _remove(path)
        os.replace(partial, path)
        for old in list_checkpoints(folder)[:-keep]:
            _remove(old)
    dist.barrier()
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if (path / "state.json").is_file())


def load_checkpoint(
    path: Path, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, model: ModelShape
) -> int:
    """Load parameters and Adam moments in place, whatever layout saved them; the number of steps that they have seen.

    CheckpointError if the checkpoint is of another model or cannot be read.
    """
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        step, saved_model = int(state["step"]), dict(state["model"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _unreadable(path, error) from None
    differing = {
        name: (saved, wanted)
        for name, wanted in json.loads(json.dumps(asdict(model))).items()
        if name != "name" and (saved := saved_model.get(name)) != wanted
    }
    if differing:
        listed = ", ".join(f"{name}={saved} (config: {wanted})" for name, (saved, wanted) in differing.items())
        raise CheckpointError(f"{path} holds another model: {listed}; use another train.run_folder")
    for parameter in _parameters(optimizer):
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    try:
        dcp.load(_collect_tensors(modules, optimizer, model.aliases), checkpoint_id=str(path / "tensors"))
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise _unreadable(path, error) from error
    return step


def _unreadable(path: Path, error: BaseException) -> CheckpointError:
    reason = (str(error).strip().splitlines() or [""])[-1]
    return CheckpointError(
        f"{path} cannot be read: {type(error).__name__} {reason}; remove it to start from the one before"
    )


def _remove(path: Path) -> None:
    """Remove a checkpoint so that a kill leaves nothing that looks like a whole one."""
    doomed = path.with_name(f"removed-{path.name}")
    os.replace(path, doomed)
    shutil.rmtree(doomed)


def _collect_tensors(
    modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, aliases: Mapping[str, str]
) -> dict[str, Tensor]:
    """This rank's shards by kind and name; tied weights under their first name on every stage."""
    tensors: dict[str, Tensor] = {}
    for module in modules:
        for local_name, parameter in module.named_parameters():
            name = aliases.get(local_name, local_name)
            moments = optimizer.state[parameter]
            tensors[f"parameters.{name}"] = parameter.detach()
            tensors[f"exp_avg.{name}"] = moments["exp_avg"]
            tensors[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
    return tensors


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
