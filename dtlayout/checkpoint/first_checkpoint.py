"""A checkpoint of another run as the source of first weights: found whole, and loaded into any layout."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dtlayout.base.checkpoint_names import CHECKPOINTS, is_checkpoint
from dtlayout.base.errors import CheckpointError
from dtlayout.checkpoint.first_weights import load_weights
from dtlayout.checkpoint.frozen_base import FrozenBase, check_base
from dtlayout.checkpoint.sharded import find_damage_together, find_intact, load_weights_alone
from dtlayout.models.first_source import find_place, read_saved
from dtlayout.plans.init import allocate
from dtlayout.spec.model_shape import ModelShape


def find_first_checkpoint(
    init_from: str, base: FrozenBase | None, say: Callable[[str], None], group: dist.ProcessGroup | None = None
) -> Path | None:
    """The checkpoint that `train.init_from` means: the newest of a run that is whole, or the one that it names.

    None where it means a folder of weights. All ranks call it and share the reading. `base` is the frozen model beside
    an adapter. CheckpointError if the checkpoint is damaged, or of an adapter beside another model.
    """
    place = find_place(init_from)
    if read_saved(place) is None:
        return None
    if is_checkpoint(place):
        if damage := find_damage_together(place, group):
            raise CheckpointError(f"train.init_from={init_from!r} is damaged: {'; '.join(damage[:3])}")
        found = place
    else:
        newest = find_intact(place / CHECKPOINTS, say, falls_back=True, group=group)
        assert newest is not None, "there was one, and what is not whole is an error"
        found = newest
    if base is not None:
        check_base(found, base)
    return found


def load_saved_weights(
    checkpoint: Path,
    modules: Sequence[nn.Module],
    model: ModelShape,
    seed: int,
    device: torch.device | str,
    *,
    base: Path | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """`allocate`, and fill parameters with a checkpoint's, whatever layout saved them.

    The frozen weights beside an adapter come from the folder `base`. `seed` decides nothing.
    """
    if base is None:
        allocate(modules, device)
    else:
        load_weights(base, modules, model, seed, device, group=group)
    load_weights_alone(checkpoint, modules, model, group)
