"""The frozen model beside an adapter, which a checkpoint names and does not hold.

A checkpoint of an adapter has the adapter's weights alone. The frozen ones come anew from where they came from at
first, a folder or a seed, and a fingerprint tells whether they are those.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dtlayout.base.errors import CheckpointError, InvalidConfig
from dtlayout.checkpoint.agreement import tell
from dtlayout.checkpoint.sharded import read_model, read_origin
from dtlayout.config.config import Config
from dtlayout.models.fingerprint import fingerprint_weights
from dtlayout.models.first_source import find_place
from dtlayout.models.peft import find_base_folder
from dtlayout.spec.model_shape import ModelShape

_KEY = "base"
"""Key in the `origin` of a checkpoint."""


@dataclass(frozen=True)
class FrozenBase:
    """Place and fingerprint of the weights beside an adapter."""

    folder: str
    """Absolute path of their Hugging Face folder; empty if they are drawn."""
    seed: int
    """Seed of which they are drawn; 0 if they are read."""
    fingerprint: str
    """The folder's `fingerprint_weights`, empty if they are drawn."""
    format: str = "compute"
    """`precision.base` of the run; another one is the same model in other bits."""

    def __str__(self) -> str:
        if not self.folder:
            return f"weights drawn from train.seed={self.seed}"
        return f"{self.folder} (fingerprint {self.fingerprint[:12]})"

    def is_same(self, other: "FrozenBase") -> bool:
        """True if two places have equal weights, by seed and fingerprint."""
        return (self.seed, self.fingerprint) == (other.seed, other.fingerprint)

    def note(self) -> dict[str, Any]:
        """The entry for the `origin` of a checkpoint."""
        return {_KEY: asdict(self)}


def find_frozen_base(config: Config, group: dist.ProcessGroup | None) -> FrozenBase | None:
    """The frozen model of a run with an adapter, None of another run; the first rank of the group reads for all.

    InvalidConfig on every rank if the folder cannot be read.
    """
    if config.model.adapter is None:
        return None
    if not config.train.init_from:
        return FrozenBase("", config.train.seed, "", config.precision.base)
    found: tuple[FrozenBase | None, list[str]] = None, []
    if dist.get_rank(group) == 0:
        try:
            found = read_frozen_base(find_base_folder(find_place(config.train.init_from)), config.model), []
        except InvalidConfig as error:
            found = None, list(error.problems)
    base, problems = tell(found, group)
    if problems:
        raise InvalidConfig([f"train.init_from={config.train.init_from!r}: {problem}" for problem in problems])
    return None if base is None else replace(base, format=config.precision.base)


def read_frozen_base(folder: Path, model: ModelShape) -> FrozenBase:
    """The frozen model in a Hugging Face folder; InvalidConfig if it cannot be read."""
    return FrozenBase(str(folder.absolute()), 0, fingerprint_weights(folder, model))


def read_saved_base(checkpoint: Path) -> FrozenBase:
    """The frozen model that a checkpoint of an adapter names; CheckpointError if it names none."""
    saved: Any = read_origin(checkpoint).get(_KEY)
    try:
        kept = str(saved["folder"]), int(saved["seed"]), str(saved["fingerprint"])
        return FrozenBase(*kept, str(saved.get("format", "compute")))
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{checkpoint} holds an adapter and does not say of which frozen model") from None


def check_base(checkpoint: Path, base: FrozenBase) -> None:
    """CheckpointError if a checkpoint's adapter lies beside another frozen model than `base`, with both in its text, or
    if it has none."""
    if read_model(checkpoint).adapter is None:
        raise CheckpointError(
            f"{checkpoint} holds a whole model and no adapter; make it a folder for train.init_from with dtlayout "
            f"convert, and use another train.run_folder"
        )
    saved = read_saved_base(checkpoint)
    if not saved.is_same(base):
        raise CheckpointError(
            f"{checkpoint} holds an adapter of {saved}, and this run's frozen model is another one, {base}; give the "
            f"first as train.init_from or train.seed, or use another train.run_folder"
        )


def open_saved_base(checkpoint: Path, model: ModelShape, asked: Path | None = None) -> FrozenBase:
    """The frozen model of a checkpoint's adapter, where it lies now: `asked`, or where it lay when this was saved.

    CheckpointError if it is not there, or if another one is.
    """
    saved = read_saved_base(checkpoint)
    place = str(asked or saved.folder)
    if not place:
        return saved
    try:
        found = read_frozen_base(Path(place), model)
    except InvalidConfig as error:
        raise CheckpointError(
            f"{checkpoint} holds an adapter of {saved}, which is not at {place}: {error}; say with --base where it is"
        ) from None
    if not saved.is_same(found):
        raise CheckpointError(f"{checkpoint} holds an adapter of {saved}, and {found} is another one; give the first")
    return found
