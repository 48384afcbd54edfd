"""Tensors in a Hugging Face folder's safetensors files: the file of each, and whether two are equal. No torch.

A folder has one file, or several and an index whose `weight_map` names the file of each tensor.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import find_inside, parse_json

if TYPE_CHECKING:
    import numpy.typing as npt

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FORMATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Name of a number format in safetensors → its name here; weights may have these formats."""
_BITS = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8"}
"""Number format in safetensors → type with which numpy reads it; numpy has no bf16 and reads its bits."""
_LISTED = 5
"""Number of problems that are named; further ones are only counted."""
_VALUES_AT_ONCE = 1 << 22
"""Number of values that are compared at once."""


@dataclass(frozen=True)
class StoredTensor:
    """Place, shape and format of a tensor."""

    file: Path
    shape: tuple[int, ...]
    format: str
    """Number format, by its name in safetensors."""


def find_weights(folder: Path) -> dict[str, StoredTensor]:
    """Name → where the tensor is stored, from the headers of a folder's safetensors files; no values are read.

    The files are those that the index names, or model.safetensors if there is no index. If two files hold a tensor, the
    one that the index names counts.

    InvalidConfig if a file is missing, cannot be read, or lies outside the folder; if it lacks a tensor that the index
    says it holds; if two files hold a tensor that the index does not list; or if model.safetensors lies beside an index
    of other files.
    """
    mapping = _read_index(folder)
    names = sorted(set(mapping.values())) or [SINGLE_FILE]
    files = {name: find_inside(folder, name) for name in names}
    if missing := [name for name, file in files.items() if not file.is_file()]:
        raise InvalidConfig(f"{folder} has no {', '.join(missing)}{_advise(folder)}")
    held = {name: read_header(file) for name, file in files.items()}
    problems = [
        f"{INDEX} says that {name} is in {file}, which does not hold it"
        for name, file in mapping.items() if name not in held[file]
    ]  # fmt: skip
    found = {name: held[file][name] for name, file in mapping.items() if name in held[file]}
    for file, tensors in held.items():
        for name in tensors.keys() - mapping.keys():
            if name in found:
                problems.append(f"{name} is in {found[name].file.name} and in {file}, and {INDEX} names neither")
            found[name] = tensors[name]
    if problems:
        raise InvalidConfig([f"{folder}: {problem}" for problem in name_first(problems)])
    return found


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor → name of its file, by the folder's index; empty if there is no index."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    try:
        mapping = parse_json(find_inside(folder, INDEX).read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(file, str) for file in mapping.values()):
            raise TypeError("a file of weight_map is no text")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidConfig(f"{index} cannot be read: {type(error).__name__} {error}") from None
    others = sorted(set(mapping.values()) - {SINGLE_FILE})
    if others and (folder / SINGLE_FILE).exists():
        raise InvalidConfig(
            f"{folder} has {SINGLE_FILE}, and {INDEX} names {len(others)} other files, such as {others[0]}; remove "
            f"those that are not meant"
        )
    return dict(mapping)


def _advise(folder: Path) -> str:
    pickled = any(folder.glob("pytorch_model*.bin"))
    return "; save its weights as safetensors: model.save_pretrained(folder)" if pickled else ""


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Name → place, shape and format of each tensor in a safetensors file; InvalidConfig if it cannot be read."""
    from safetensors import SafetensorError, safe_open  # only now: few commands look at weights

    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (it is no mapping)
            return {name: StoredTensor(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise InvalidConfig(f"{file} cannot be read: {error}") from None


def name_first(problems: list[str]) -> list[str]:
    """The first few problems, and the number of further ones."""
    return problems if len(problems) <= _LISTED else [*problems[:_LISTED], f"and {len(problems) - _LISTED} more"]


def are_equal(stored: Mapping[str, StoredTensor], first: str, second: str) -> bool:
    """Whether two tensors have the same shape and values; NaN equals NaN. `stored` comes from `find_weights`.

    Their formats may differ, but must be BF16, F16, F32 or F64: False for any other. Both are read from disk up to the
    first difference. InvalidConfig if a file cannot be read.
    """
    pair = stored[first], stored[second]
    if pair[0].shape != pair[1].shape or not all(tensor.format in _BITS for tensor in pair):
        return False
    values = (_read_values(stored[name], name) for name in (first, second))
    return all(_same(a, b) for a, b in zip(*values, strict=True))


def _same(a: "npt.NDArray[Any]", b: "npt.NDArray[Any]") -> bool:
    import numpy as np

    return bool(np.array_equal(a, b, equal_nan=True))


def _read_values(tensor: StoredTensor, name: str) -> Iterator["npt.NDArray[Any]"]:
    """A tensor's values in their order, some millions at a time."""
    import numpy as np  # only now: few folders have to be compared

    try:
        with tensor.file.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            start, _ = json.loads(file.read(header_bytes))[name]["data_offsets"]
            file.seek(8 + header_bytes + start)
            left = prod(tensor.shape)
            while left > 0:
                values = np.fromfile(file, _BITS[tensor.format], min(left, _VALUES_AT_ONCE))
                if not values.size:
                    raise ValueError("it ends too early")
                left -= values.size
                yield (values.astype("<u4") << 16).view("<f4") if tensor.format == "BF16" else values
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(f"{tensor.file} cannot be read: {type(error).__name__} {error}") from None
