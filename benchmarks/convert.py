"""Memory and time of `dtlayout convert`, both ways, on weights that take no disk.

    make bench NAME=convert ARGS="--model llama3.1-70b"

A folder of zeros is made as Hugging Face would shard it, its files but for their headers holes. It becomes a
checkpoint, and that a folder again, each in a process of its own, whose peak memory (maximum resident set size) is what
counts. What they write becomes holes too, as it is written or file by file, so that a disk much smaller than the model
does. Prints one JSON object a way; `base_bytes` is what the process takes before it converts.
"""

import argparse
import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from torch.distributed.checkpoint import filesystem

from dtlayout.checkpoint import hf, sharded
from dtlayout.checkpoint.manifest import find_checkpoint
from dtlayout.models.files import find_model, to_hf
from dtlayout.models.presets import find_preset
from dtlayout.models.stored import INDEX
from dtlayout.models.weights import FILE_BYTES, list_stored, make_index, plan_files
from dtlayout.spec.model_shape import ModelShape

SHARD_BYTES = 5_000_000_000
"""Largest size of a file of weights that `transformers` writes by default."""


def main() -> int:
    """Measure both ways, or be the process that goes one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama3.1-70b", help="a preset")
    parser.add_argument("--layers", type=int, help="fewer layers than it has")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=("in", "out"), help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=int, nargs=2, default=(FILE_BYTES, sharded._PIECE_BYTES), metavar="BYTES")
    options = parser.parse_args()
    if options.way:
        print(json.dumps(convert(options.folder, options.way, *options.sizes)))
        return 0
    model = find_preset(options.model)
    with tempfile.TemporaryDirectory() as folder:
        for measured in measure(replace(model, num_layers=options.layers or model.num_layers), Path(folder)):
            print(json.dumps(measured), flush=True)
    return 0


def measure(
    model: ModelShape, folder: Path, file_bytes: int = FILE_BYTES, piece_bytes: int = sharded._PIECE_BYTES
) -> Iterator[dict[str, Any]]:
    """Measurements of each way to convert, with these bounds on what is written at once."""
    make_folder(model, folder / "hf")
    command = [sys.executable, "-m", "benchmarks.convert", "--folder", str(folder)]
    command += ["--sizes", str(file_bytes), str(piece_bytes), "--way"]
    for way in ("in", "out"):
        ended = subprocess.run([*command, way], stdout=subprocess.PIPE, text=True, check=True)
        yield {"way": way, "layers": model.num_layers, **json.loads(ended.stdout)}


def make_folder(model: ModelShape, folder: Path) -> None:
    """A Hugging Face folder of bf16 zeros that are holes."""
    folder.mkdir(parents=True)
    shapes = {name: weight.tensor_shape for weight in list_stored(model) for name in weight.tensors}
    sizes = {name: 2 * prod(shape) for name, shape in shapes.items()}
    files = plan_files(sizes, SHARD_BYTES)
    for file, names in files.items():
        header, end = {}, 0
        for name in names:
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [end, end + sizes[name]]}
            end += sizes[name]
        text = json.dumps(header).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(folder / file, 8 + len(text) + end)
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps(make_index(files, sizes)))
    (folder / "config.json").write_text(json.dumps(to_hf(model, "bfloat16")))


def convert(folder: Path, way: str, file_bytes: int, piece_bytes: int) -> dict[str, Any]:
    """Go one way in this process: what it took."""
    sharded._PIECE_BYTES = piece_bytes
    base_bytes, started = _peak_bytes(), time.perf_counter()
    with _holes():
        if way == "in":
            num_bytes = hf.import_weights(folder / "hf", folder / "run")
        else:
            checkpoint = find_checkpoint(folder / "run")
            num_bytes = hf.export_weights(checkpoint, folder / "out", file_bytes=file_bytes)
            assert replace(find_model(str(folder / "out")), name="") == replace(find_model(str(folder / "hf")), name="")
    took = {"seconds": round(time.perf_counter() - started, 1), "num_bytes": num_bytes}
    return {**took, "base_bytes": base_bytes, "peak_bytes": _peak_bytes()}


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _Sparse(io.FileIO):
    """A file in which zeros that are written are holes."""

    def write(self, data: Any) -> int:
        written = memoryview(data).cast("B")
        if np.frombuffer(written, dtype=np.uint8).any():
            super().write(written)
        else:
            self.seek(len(written), os.SEEK_CUR)
        return len(written)

    def close(self) -> None:
        if not self.closed:
            self.truncate()
        super().close()


@contextlib.contextmanager
def _holes() -> Iterator[None]:
    """Checkpoints and safetensors of zeros take no disk."""
    save_file, create_stream = hf.save_file, filesystem.FileSystem.create_stream

    @contextlib.contextmanager
    def open_sparse(self: Any, path: Path, mode: str) -> Iterator[Any]:
        if mode != "wb" or Path(path).suffix != ".distcp":
            with create_stream(self, path, mode) as stream:
                yield stream
        else:
            with _Sparse(path, "w") as stream:
                yield stream

    def save_sparse(tensors: Any, path: Path, **more: Any) -> None:
        save_file(tensors, path, **more)
        num_bytes = path.stat().st_size
        with path.open("rb+") as file:
            file.truncate(8 + int.from_bytes(file.read(8), "little"))
            file.truncate(num_bytes)

    with patch.object(hf, "save_file", save_sparse), patch.object(filesystem.FileSystem, "create_stream", open_sparse):
        yield


if __name__ == "__main__":
    sys.exit(main())
