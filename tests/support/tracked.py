"""What trackers wrote, read back: TensorBoard's event files, and the log of a W&B run that nobody has synced."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

_BLOCK_BYTES, _FILE_HEADER_BYTES, _RECORD_HEADER_BYTES = 32768, 7, 7


def read_tensorboard(run: Path) -> dict[str, dict[int, float]]:
    """Name → step → value of a run folder, as TensorBoard shows them; a step that is there twice is an error."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    found = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    assert all(len({each.step for each in values}) == len(values) for values in found.values()), found
    return {name: {each.step: each.value for each in values} for name, values in found.items()}


def read_wandb(run: Path) -> list[tuple[dict[str, Any], dict[int, dict[str, float]]]]:
    """Config, and step → name → value, of each session of a run folder, oldest first."""
    from wandb.proto.wandb_internal_pb2 import Record

    sessions = []
    for path in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        config, steps = {}, dict[int, dict[str, float]]()
        for data in _split(path.read_bytes()):
            record = Record.FromString(data)
            config |= {entry.key: json.loads(entry.value_json) for entry in record.run.config.update}
            if record.HasField("history"):
                numbers = {
                    entry.key or entry.nested_key[0]: json.loads(entry.value_json) for entry in record.history.item
                }
                step = int(numbers.pop("_step", record.history.step.num))
                assert step not in steps, f"step {step} twice"
                steps[step] = {name: value for name, value in numbers.items() if not name.startswith("_")}
        sessions.append((config, steps))
    return sessions


def _split(log: bytes) -> list[bytes]:
    """The records of a log in LevelDB's format: blocks of parts, each with checksum, length and kind before it."""
    at, parts, records = _FILE_HEADER_BYTES, b"", []
    while at + _RECORD_HEADER_BYTES <= len(log):
        if (left := _BLOCK_BYTES - at % _BLOCK_BYTES) < _RECORD_HEADER_BYTES:
            at += left
            continue
        length, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        parts += log[at + _RECORD_HEADER_BYTES : at + _RECORD_HEADER_BYTES + length]
        at += _RECORD_HEADER_BYTES + length
        if kind in (1, 4):  # whole, or the last part
            records.append(parts)
            parts = b""
    return records


def list_wandb_processes() -> list[int]:
    """W&B's own processes below this one, not what they start: until that runs its program it looks like them."""
    found, waiting = [], [os.getpid()]
    while waiting:
        for tasks in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                for child in map(int, tasks.read_text().split()):
                    is_own = b"wandb-core" in Path(f"/proc/{child}/cmdline").read_bytes()
                    (found if is_own else waiting).append(child)
    return found
