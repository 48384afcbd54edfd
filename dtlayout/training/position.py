"""Position of a run in its samples: written to a checkpoint's `origin`, and read when a run goes on from there."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtlayout.base.errors import CheckpointError
from dtlayout.base.formatting import plural
from dtlayout.data.samples import Seen
from dtlayout.spec.batch import Batch

_KEY = "seen"


def note_seen(seen: Seen) -> dict[str, Any]:
    """Entries for a checkpoint's `origin` that `find_seen` reads."""
    return {_KEY: {"samples": seen.samples, "tokens": seen.tokens}}


def find_seen(origin: Mapping[str, Any], done: int, batch: Batch, checkpoint: Path) -> tuple[Seen, list[str]]:
    """The samples and tokens that the first `done` steps have read, and notes for the user of the resumed run.

    `origin` is the table that `read_origin` gives for the checkpoint, `batch` the batch of the resumed run. An older
    version wrote an `origin` without counts: then `done` batches of the size in it are counted, or of `batch` if it has
    no size. CheckpointError, with the path `checkpoint`, if a size or a count is not a possible whole number.
    """
    sizes = {name: origin.get(name, getattr(batch, name)) for name in ("global_batch", "seq_len")}
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
    if sizes["global_batch"] != batch.global_batch:
        lines.append(
            f"global_batch was {sizes['global_batch']} when this was saved and is {batch.global_batch}: the next batch "
            f"begins after the {plural(seen.samples, 'sample')} that were seen; the learning rate goes by steps, which "
            f"are of another size now"
        )
    return seen, lines
