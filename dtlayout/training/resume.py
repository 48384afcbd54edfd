"""Saving a run's state as a checkpoint, and going on from one: everything beside the tensors is named here."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from dtlayout.base.formatting import plural
from dtlayout.checkpoint.frozen_base import read_saved_base
from dtlayout.checkpoint.manifest import describe_other_start
from dtlayout.checkpoint.optimizer_state import set_updates
from dtlayout.checkpoint.sharded import find_changes, read_model
from dtlayout.training.checkpoints import Checkpoints
from dtlayout.training.optimizer import LearningRate
from dtlayout.training.position import find_seen, note_seen
from dtlayout.training.trainer import Trainer

_LAYOUT = "layout"
"""Key of a checkpoint's `origin` with the layout that saved it, in words."""


def save(trainer: Trainer, checkpoints: Checkpoints, done: int, folder: str, *, is_last: bool) -> None:
    """Save the state after `done` steps into RUN/`folder`; CheckpointError if the `is_last` is not saved."""
    seen = trainer.count_seen(done)
    ramp = trainer.batches.samples.ramp
    origin = {**_find_origin(trainer), **asdict(trainer.config.batch), **note_seen(seen, ramp)}
    origin |= {_LAYOUT: str(trainer.layout)}
    origin |= trainer.base.note() if trainer.base else {}
    origin |= {"learning_rate": asdict(trainer.learning_rate), "spikes": trainer.spikes.to_dict()}
    origin |= {"loss_scale": trainer.loss_scale.to_dict()} if trainer.loss_scale else {}
    checkpoints.save(done, folder, resolved=trainer.resolve(), samples=seen.samples, origin=origin, is_last=is_last)


def resume(trainer: Trainer, checkpoints: Checkpoints, say: Callable[[str], None]) -> int:
    """Go on from the newest checkpoint, if there is one; the number of steps that are done.

    `say` gets lines about what is not as it was when the checkpoint was saved.
    """
    if checkpoints.newest is None:
        return 0
    config = trainer.config
    done, origin = checkpoints.load()
    trainer.spikes.restore(origin.get("spikes", {}))
    if trainer.loss_scale:
        trainer.loss_scale.restore(origin.get("loss_scale", {}))
    set_updates(trainer.optimizer, done - trainer.spikes.num_left_out)
    layout = str(trainer.layout)
    if (old := origin.get(_LAYOUT, layout)) != layout:
        say(f"note: the layout was {old} when this was saved and is {layout}: each rank has another part of the state")
    if config.model.adapter is None:  # beside one the base is read, and compared
        for line in describe_other_start(checkpoints.newest, config.train.init_from):
            say(f"note: {line}")
    if (rows := read_model(checkpoints.newest).vocab_size) != config.model.vocab_size:
        unused = plural(config.model.unused_rows, "row")
        say(
            f"note: embedding and head had {rows} rows when this was saved and have {config.model.vocab_size}, so that "
            f"tp divides them: {unused} {'is no token' if config.model.unused_rows == 1 else 'are no tokens'}"
        )
    saved, num_steps = origin.get("learning_rate", {}), config.train.steps
    trainer.learning_rate = LearningRate.of(config.optimizer, num_steps, saved)
    for line in trainer.learning_rate.describe_resume(saved, done, num_steps):
        say(f"note: {line}")
    seen, lines = find_seen(origin, done, config.batch, checkpoints.newest, config.train.batch_ramp)
    trainer.batches = replace(trainer.batches, samples=replace(trainer.batches.samples, seen=seen))
    for line in lines:
        say(f"note: {line}")
    if trainer.base and (old := read_saved_base(checkpoints.newest).format) != trainer.base.format:
        new = trainer.base.format
        say(f"note: precision.base was {old} when this was saved and is {new}: the adapter goes on beside other bits")
    for name, (old, new) in find_changes(origin, _find_origin(trainer)).items():
        say(f"note: {name} was {old} when this was saved and is {new}: samples come in another order")
    return done


def _find_origin(trainer: Trainer) -> dict[str, Any]:
    """Names and values that decide the order of samples."""
    config = trainer.config
    return {"seq_len": config.batch.seq_len, "seed": config.train.seed, "tokens": trainer.batches.samples.fingerprint}
