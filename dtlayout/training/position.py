"""Position of a run in its samples: written to a checkpoint's `origin`, and read when a run goes on from there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtlayout.base.errors import CheckpointError
from dtlayout.base.formatting import plural
from dtlayout.data.samples import Seen
from dtlayout.spec.batch import Batch, RampStage, size_after

_KEY = "seen"
_STEP_BATCH = "step_batch"
"""Key with the batch of the last step, which a ramp may make smaller than `global_batch`."""
_AHEAD = "batch_ramp"
"""Key with the stages of a ramp that were still to come, or going on."""


def note_seen(seen: Seen, step_batch: int, ramp: Sequence[RampStage] = ()) -> dict[str, Any]:
    """Entries for a checkpoint's `origin` that `find_seen` reads.

    `step_batch` is the size of the last step's batch, `ramp` that of the run.
    """
    counts = {"samples": seen.samples, "tokens": seen.tokens}
    return {_KEY: counts, _STEP_BATCH: step_batch, _AHEAD: _list_ahead(seen.samples, ramp)}


def find_seen(
    origin: Mapping[str, Any], done: int, batch: Batch, checkpoint: Path, ramp: Sequence[RampStage] = ()
) -> tuple[Seen, list[str]]:
    """The samples and tokens that the first `done` steps have read, and notes for the user of the resumed run.

    `origin` is the table that `read_origin` gives for the checkpoint, `batch` and `ramp` are those of the resumed run.
    An older version wrote an `origin` without counts: then `done` batches of the size in it are counted, or of `batch`
    if it has no size. CheckpointError, with the path `checkpoint`, if a size or a count is not a possible whole number.
    """
    sizes = {name: origin.get(name, getattr(batch, name)) for name in ("global_batch", "seq_len")}
    sizes[_STEP_BATCH] = origin.get(_STEP_BATCH, sizes["global_batch"])
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise CheckpointError(f"{checkpoint} cannot be read: its {name} is {size!r}; use an older one")
    lines = []
    if _KEY in origin:
        kept = origin[_KEY] if isinstance(origin[_KEY], Mapping) else {}
        seen = Seen(done, kept.get("samples", -1), kept.get("tokens", -1))
    else:
        samples = done * sizes["global_batch"]
        seen = Seen(done, samples, samples * sizes["seq_len"])
        if done:
            lines.append(
                f"this checkpoint does not count samples: {plural(done, 'step')} of "
                f"global_batch={sizes['global_batch']} are taken for all that were seen"
            )
    for name, count in (("samples", seen.samples), ("tokens", seen.tokens)):
        if type(count) is not int or count < 0:
            raise CheckpointError(f"{checkpoint} cannot be read: its count of {name} is {count!r}; use an older one")
    ahead = _list_ahead(seen.samples, ramp)
    if sizes["global_batch"] != batch.global_batch or origin.get(_AHEAD, ahead) != ahead:
        size = size_after(seen.samples, batch.global_batch, ramp)
        lines.append(_describe_other_batch(sizes[_STEP_BATCH], size, seen, by_ramp=bool(ahead)))
    return seen, lines


def _list_ahead(samples: int, ramp: Sequence[RampStage]) -> list[list[int]]:
    """`until` and `global_batch` of each stage that is not over after so many samples."""
    return [[stage.until, stage.global_batch] for stage in ramp if samples < stage.until]


def _describe_other_batch(old: int, new: int, seen: Seen, *, by_ramp: bool) -> str:
    """A line on a last batch of `old` and a next one of `new` samples, of a run with other sizes ahead than before."""
    if old == new:
        return (
            f"global_batch is {new}, as when this was saved, and later batches are of another size than "
            f"train.batch_ramp and global_batch said then; the learning rate goes by steps, whatever their size"
        )
    return (
        f"global_batch was {old} when this was saved and is {new}{', by train.batch_ramp' * by_ramp}: the next batch "
        f"begins after the {plural(seen.samples, 'sample')} that were seen; the learning rate goes by steps, which "
        f"are of another size now"
    )
