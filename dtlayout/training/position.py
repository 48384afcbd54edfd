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


def note_seen(seen: Seen, ramp: Sequence[RampStage] = ()) -> dict[str, Any]:
    """Entries for a checkpoint's `origin` that `find_seen` reads; `ramp` is that of the run."""
    counts = {"samples": seen.samples, "tokens": seen.tokens}
    last = {_STEP_BATCH: seen.last_size} if seen.last_size else {}
    return {_KEY: counts, **last, _AHEAD: _list_ahead(seen.samples, ramp)}


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
    lines, last_size = [], sizes[_STEP_BATCH] if done else 0
    if _KEY in origin:
        kept = origin[_KEY] if isinstance(origin[_KEY], Mapping) else {}
        seen = Seen(done, kept.get("samples", -1), kept.get("tokens", -1), last_size)
    else:
        samples = done * sizes["global_batch"]
        seen = Seen(done, samples, samples * sizes["seq_len"], last_size)
        if done:
            lines.append(
                f"this checkpoint does not count samples: {plural(done, 'step')} of "
                f"global_batch={sizes['global_batch']} are taken for all that were seen"
            )
    for name, count in (("samples", seen.samples), ("tokens", seen.tokens)):
        if type(count) is not int or count < 0:
            raise CheckpointError(f"{checkpoint} cannot be read: its count of {name} is {count!r}; use an older one")
    ahead = _list_ahead(seen.samples, ramp)
    if done and (sizes["global_batch"] != batch.global_batch or origin.get(_AHEAD, ahead) != ahead):
        size = size_after(seen.samples, batch.global_batch, ramp)
        lines.append(_describe_other_sizes(last_size, size, seen, by_ramp=bool(ahead)))
    return seen, lines


def _list_ahead(samples: int, ramp: Sequence[RampStage]) -> list[list[int]]:
    """`until` and `global_batch` of each stage that is not over after so many samples."""
    return [[stage.until, stage.global_batch] for stage in ramp if samples < stage.until]


def _describe_other_sizes(old: int, new: int, seen: Seen, *, by_ramp: bool) -> str:
    """A line on resumed steps of other sizes: the last one had `old` samples, the next one has `new`."""
    pace = "the learning rate counts steps"
    if old == new:
        return (
            f"the next step has {plural(new, 'sample')}, as the last one had; later steps differ from what was planned "
            f"when this was saved (batch.global_batch or train.batch_ramp has changed); {pace}"
        )
    return (
        f"the last step had {plural(old, 'sample')}, the next one has {new}{', by train.batch_ramp' * by_ramp}; it "
        f"begins after the {plural(seen.samples, 'sample')} that were seen; {pace}, whatever their size"
    )
