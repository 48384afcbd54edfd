"""Constants of GPU types: every number with its unit and source, every name once."""

from importlib.resources import files
from typing import Any

import pytest

from dtlayout import toml
from dtlayout.cluster import find_gpu, find_gpu_by_device, known_gpus
from dtlayout.errors import InvalidConfig

FILES = {entry.name: entry for entry in (files("dtlayout") / "constants" / "clusters").iterdir()}


def numbers_without_source(table: dict[str, Any], path: str = "") -> list[str]:
    """The keys of numbers whose table lacks a unit or a source."""
    has_source = all(isinstance(table.get(key), str) and table[key] for key in ("unit", "source"))
    found = []
    for key, value in table.items():
        if isinstance(value, dict):
            found += numbers_without_source(value, f"{path}{key}.")
        elif not isinstance(value, str | list) and not has_source:
            found.append(f"{path}{key}")
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_named_after_its_gpu_and_gives_each_number_a_unit_and_a_source(name):
    table = toml.loads(FILES[name].read_text(encoding="utf-8"))
    assert name == f"{table['gpu']}.toml"
    assert numbers_without_source(table) == []
    assert table["peak_bf16"]["unit"].startswith("FLOP/s")
    assert known_gpus()[table["gpu"]].peak_flops_per_s == table["peak_bf16"]["value"] > 1e12


def test_every_file_is_a_gpu_with_names_of_its_own():
    assert len(known_gpus()) == len(FILES) > 0
    device_names = [device for gpu in known_gpus().values() for device in gpu.device_names]
    assert len(device_names) == len(set(device_names)) >= len(FILES)


@pytest.mark.parametrize("name", sorted(known_gpus()))
def test_a_gpu_is_found_by_its_name_and_by_what_torch_calls_it(name):
    gpu = find_gpu(name)
    assert gpu.name == name
    assert [find_gpu_by_device(device) for device in gpu.device_names] == [gpu] * len(gpu.device_names)


def test_an_unknown_gpu_is_refused_by_name_and_nothing_by_device():
    with pytest.raises(InvalidConfig) as caught:
        find_gpu("a100")
    assert str(caught.value) == (f"GPU type 'a100' is unknown; use one of {', '.join(sorted(known_gpus()))}")
    assert find_gpu_by_device("NVIDIA A100") is None
