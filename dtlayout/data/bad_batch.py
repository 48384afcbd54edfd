"""The samples of a step whose numbers were bad, as a file that `dtlayout data show` turns into text.

RUN/nonfinite-step-00000007.json or RUN/spike-step-00000007.json has the step, its loss and gradient norm, and the
fingerprint of the tokens. For each sample of the global batch it has the index of its source in the config, and the
sample's own number there.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from dtlayout.base import toml
from dtlayout.base.errors import DataError, InvalidConfig
from dtlayout.base.files import parse_json, write_whole
from dtlayout.data.samples import Samples


@dataclass(frozen=True, kw_only=True)
class BadBatch:
    """Content of the file."""

    step: int
    """Number of the step; steps count from 1."""
    loss: str
    grad_norm: str
    tokens: str
    """`Samples.fingerprint`, by which these tokens are told from others."""
    samples: list[list[int]]
    """(source, sample) for each index of the global batch; both count from 0."""

    @classmethod
    def of(cls, samples: Samples, step: int, loss: float, grad_norm: float) -> "BadBatch":
        """The samples of `step`, which counts from 1."""
        located = samples.locate(step - 1, range(samples.size_of(step - 1)))
        pairs = [[int(source), int(sample)] for source, sample in zip(*located, strict=True)]
        return cls(step=step, loss=str(loss), grad_norm=str(grad_norm), tokens=samples.fingerprint, samples=pairs)

    def write(self, folder: Path, kind: Literal["nonfinite", "spike"]) -> Path:
        """Write the file into a run folder."""
        path = folder / f"{kind}-step-{self.step:08d}.json"
        write_whole(path, json.dumps(asdict(self)) + "\n")
        return path

    @classmethod
    def read(cls, path: Path) -> "BadBatch":
        """Read such a file; DataError if it is none."""
        try:
            return toml.parse(parse_json(path.read_text(encoding="utf-8")), cls)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, InvalidConfig) as error:
            raise DataError(f"{path} is not what a run writes of a step whose numbers are bad: {error}") from None
