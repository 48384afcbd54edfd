"""The place that `train.init_from` means: a folder, a repository in the hub's cache, a run or a step of it. No torch.

Folders go first, as `transformers` has it. Of a repository the snapshot is taken that a download without a revision
left; nothing is asked of the network. Of a run the newest checkpoint counts.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtlayout.base.checkpoint_names import CHECKPOINTS, PREFIX, STATE_NAME, list_saved
from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import expand, parse_json
from dtlayout.models.beside import CONFIG, KEPT

ADAPTER_CONFIG = "adapter_config.json"
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def find_place(text: str) -> Path:
    """The folder that a value of `train.init_from` means; the path itself where there is nothing."""
    path = expand(text)
    if os.path.exists(path) or (cached := find_cached(text)) is None:
        return path
    return cached


def find_cached(name: str, revision: str | None = None) -> Path | None:
    """The snapshot of a repository in the cache of the Hugging Face hub; None if it is not there."""
    if not _REPOSITORY.fullmatch(name):
        return None
    from huggingface_hub import try_to_load_from_cache  # only now: most sources are folders

    for file in (CONFIG, ADAPTER_CONFIG):
        try:
            found = try_to_load_from_cache(name, file, revision=revision)
        except ValueError:  # no name of a repository
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def describe_missing(text: str) -> str:
    """Reason why `train.init_from` means nothing here, with all that was looked for."""
    place, where = expand(text), f"train.init_from={text!r}"
    takes = f"a Hugging Face or PEFT folder, a run folder, a step of one (RUN/{CHECKPOINTS}/{PREFIX}00000070)"
    if os.path.isdir(place):
        return f"{where} has no {CONFIG}, no {ADAPTER_CONFIG} and no {CHECKPOINTS}/{PREFIX}*; give {takes}"
    if _REPOSITORY.fullmatch(text):
        from huggingface_hub.constants import HF_HUB_CACHE

        return (
            f"{where} is no folder here, and the hub's cache, {HF_HUB_CACHE}, has neither its {CONFIG} nor its "
            f"{ADAPTER_CONFIG}: hf download {text} fetches it, and nothing is fetched without being asked for"
        )
    return f"{where} is no folder; give {takes}, or owner/name of a repository in the hub's cache"


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint of a run, as the source of another run's first weights."""

    checkpoint: Path
    model: Mapping[str, Any]
    """Table of its sizes, without the adapter."""
    adapter: Mapping[str, Any] | None
    """Table of its adapter; then its weights alone are in the checkpoint."""
    base: str
    """Folder of the frozen model beside the adapter; empty without one, and where that was drawn from a seed."""

    @property
    def run(self) -> Path:
        """Folder of the run."""
        return self.checkpoint.resolve().parent.parent

    @property
    def beside(self) -> Path:
        """Folder with the files that go along with exported weights, which may not be there."""
        return Path(self.base) if self.base else self.run / KEPT


def read_saved(place: Path) -> SavedModel | None:
    """The newest checkpoint of a run's folder, or the one that `place` is; None for what is neither.

    InvalidConfig if it does not say of which model it is.
    """
    if any(os.path.isfile(place / name) for name in (CONFIG, ADAPTER_CONFIG)):
        return None
    try:
        found = list_saved(place)
    except OSError as error:
        raise InvalidConfig(f"{place / CHECKPOINTS} cannot be read: {error.strerror}") from None
    if not found:
        return None
    path = found[-1]
    try:
        state = parse_json((path / STATE_NAME).read_text(encoding="utf-8"))
        sizes = {name: _without_none(value) for name, value in state["model"].items() if value is not None}
        adapter = sizes.pop("adapter", None)
        base = (state.get("origin") or {}).get("base") or {}
        return SavedModel(path, sizes, adapter, str(base.get("folder", "")) if adapter else "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__} {error}"
        raise InvalidConfig(f"{path / STATE_NAME} does not say which model it is of: {reason}") from None


def _without_none(value: Any) -> Any:
    return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value
