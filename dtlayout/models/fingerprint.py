"""A fingerprint of a Hugging Face folder's weights: which model it is, without reading all of it. No torch.

It hashes name, format and shape of each tensor, and a few of its bytes at places with equal distances, so that 140 GB
take seconds. Training changes nearly every byte of a weight. What changes a few rows of a tensor alone may lie between
these places, and is not seen. Files may be split otherwise, and tensors that no module has may come and go.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.stored import find_weights
from dtlayout.models.weights import list_stored
from dtlayout.spec.model_shape import ModelShape

_SAMPLE_BYTES, _NUM_SAMPLES = 64, 64
"""Bytes that are read at each of so many places of a tensor."""


def fingerprint_weights(folder: Path, model: ModelShape) -> str:
    """The SHA-256 that tells a folder's weights of a model from others, in hexadecimal; adapters count for nothing.

    InvalidConfig if a file cannot be read.
    """
    stored = find_weights(folder)
    names = sorted({name for weight in list_stored(model.base) for name in weight.tensors if name in stored})
    by_file = defaultdict[Path, list[str]](list)
    for name in names:
        by_file[stored[name].file].append(name)
    samples = {name: sample for file, held in by_file.items() for name, sample in _read_samples(file, held)}
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name} {stored[name].format} {list(stored[name].shape)}\n".encode() + samples[name])
    return digest.hexdigest()


def _read_samples(file: Path, names: Iterable[str]) -> list[tuple[str, bytes]]:
    """Name and some bytes of tensors in one file."""
    try:
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(header_bytes))
            samples = []
            for name in names:
                start, end = header[name]["data_offsets"]
                last = max(start, end - _SAMPLE_BYTES)
                sample = b""
                for place in sorted({start + (last - start) * i // (_NUM_SAMPLES - 1) for i in range(_NUM_SAMPLES)}):
                    opened.seek(8 + header_bytes + place)
                    sample += opened.read(min(_SAMPLE_BYTES, end - place))
                samples.append((name, sample))
            return samples
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(f"{file} cannot be read: {type(error).__name__} {error}") from None
