"""Constants of GPU types: every number with its unit and source, every name once; and clusters that users describe."""

import copy
import re
from dataclasses import fields, replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.spec.cluster import (
    Cluster,
    Gpu,
    find_gpu,
    find_gpu_by_device,
    known_gpus,
    list_gpus_called,
    load_cluster,
    parse_gpu,
    why_unknown,
)

FILES = {entry.name: entry for entry in (files("dtlayout") / "constants" / "clusters").iterdir()}
H100 = "h100-80g-sxm"
RANGES = {  # of any GPU that trains today, and of one CPU core at the lower end
    "peak_flops_per_s": (1e10, 1e16),
    "memory_bytes": (2**32, 2**40),
    "memory_bytes_per_s": (5e9, 2e13),
    "link_bytes_per_s": (1e9, 2e12),
    "link_latency_s": (1e-6, 1e-4),
    "network_bytes_per_s": (1e9, 2e11),
    "network_latency_s": (2e-6, 1e-3),
    "gpus_per_node": (1, 72),
    "gpus_linked": (1, 1024),
}
HOSTS = {
    "host_link_bytes_per_s": (1e10, 1e12),
    "host_memory_bytes": (2**35, 2**40),
    "host_memory_bytes_per_s": (1e10, 1e12),
    "disk_bytes_per_s": (1e8, 1e12),
}
"""Of the host that a GPU has, where it is known."""
OPTIONAL = {
    "peak_fp8", "peak_fp4", "board_power", "gpus_linked", "host_link", "host_memory", "host_memory_bandwidth",
    "disk_bandwidth",
}  # fmt: skip
POWERS = (70, 2000)  # W of boards that train


def read(name: str) -> dict[str, Any]:
    return toml.loads(FILES[name].read_text(encoding="utf-8"))


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


def problems_of(tables: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        parse_gpu(tables, "some.toml")
    return caught.value.problems


@pytest.fixture
def write(tmp_path):
    """A user's cluster file with this text."""

    def write_text(text: str) -> Path:
        path = tmp_path / "lab.toml"
        path.write_text(text)
        return path

    return write_text


def problems_of_cluster(path: Path) -> list[str]:
    """The problems without the file's name, which is in front of each."""
    with pytest.raises(InvalidConfig) as caught:
        load_cluster(path)
    assert all(line.startswith(f"cluster {path}: ") for line in caught.value.problems)
    return [line.removeprefix(f"cluster {path}: ") for line in caught.value.problems]


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_named_after_its_gpu_and_gives_each_number_a_unit_and_a_source(name):
    table = read(name)
    assert name == f"{table['gpu']}.toml"
    assert numbers_without_source(table) == []
    gpu = find_gpu(table["gpu"])
    assert gpu.peak_flops_per_s == table["peak_bf16"]["value"]
    assert gpu.link_latency_s == table["link_latency"]["value"]
    assert gpu.network_bytes_per_s == table["network_bandwidth"]["value"]


def test_every_file_is_a_gpu_with_names_of_its_own_or_the_cpu():
    assert {f"{name}.toml" for name in (*known_gpus(), "cpu")} == set(FILES)
    device_names = [device for gpu in known_gpus().values() for device in gpu.device_names]
    assert len(device_names) == len(set(device_names)) >= len(known_gpus()) > 0


@pytest.mark.parametrize("name", sorted(known_gpus()))
def test_a_gpu_is_found_by_its_name_and_by_what_torch_calls_it(name):
    gpu = find_gpu(name)
    assert gpu.name == name
    assert [find_gpu_by_device(device) for device in gpu.device_names] == [gpu] * len(gpu.device_names)


def test_an_unknown_gpu_is_refused_by_name_and_nothing_by_device():
    with pytest.raises(InvalidConfig) as caught:
        find_gpu("voodoo2")
    everything = ", ".join(sorted([*known_gpus(), "cpu"]))
    assert str(caught.value) == f"GPU type 'voodoo2' is unknown; use one of {everything}"
    assert find_gpu_by_device("NVIDIA A100") is None


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("H100", ["h100-80g-sxm", "h100-96g-500w", "h100-94g-nvl", "h100-80g-pcie"]),
        ("H100 NVL", ["h100-94g-nvl"]),
        ("NVIDIA A100 80GB", ["a100-80g-sxm", "a100-80g-pcie"]),
        ("mi300x", ["mi300x-192g"]),
        ("RTX 4090", ["rtx4090-24g"]),
        ("3090", ["rtx3090-24g"]),
        ("h20", ["h20-96g-sxm"]),
        ("L4", ["l4-24g"]),
        ("h100-80g-pcie", ["h100-80g-pcie"]),
        ("voodoo2", []),
        ("", []),
    ],
)
def test_a_gpu_is_found_by_the_names_that_people_give_it(asked, names):
    """Of several the SXM module comes first, and of these the one with the most memory."""
    assert [gpu.name for gpu in list_gpus_called(asked)] == names
    if names:
        assert find_gpu(asked).name == names[0]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80g-sxm"),
        ("NVIDIA H100 PCIe", "h100-80g-pcie"),
        ("NVIDIA H100 NVL", "h100-94g-nvl"),
        ("NVIDIA H200", "h200-141g-sxm"),
        ("NVIDIA H200 NVL", "h200-141g-nvl"),
        ("NVIDIA GH200 480GB", "gh200-96g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g-sxm"),
        ("A100-SXM4-40GB", "a100-40g-sxm"),  # as drivers before 470 say it
        ("NVIDIA A100-PCIE-40GB", "a100-40g-pcie"),
        ("NVIDIA A100-SXM-80GB", "a100-80g-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H100", "h100-96g-500w"),
        ("NVIDIA A800-SXM4-80GB", "a800-80g-sxm"),
        ("NVIDIA A800 80GB PCIe", None),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200-180g-sxm"),
        ("AMD Instinct MI355X", "mi355x-288g"),
        ("NVIDIA GH200 144G HBM3e", None),
    ],
)
def test_a_variant_of_a_gpu_is_a_type_of_its_own_or_unknown(device, name):
    found = find_gpu_by_device(device)
    assert (found.name if found else None) == name
    if found is None:
        why = (
            "is a part of a GPU, whose peak is not known" if "MIG" in device else "is no GPU whose data sheet is known"
        )
        assert why_unknown(device) == f"{device} {why}"


def test_a_card_has_what_its_data_sheet_says_and_not_what_the_module_has():
    for card, module in (("a100-80g-pcie", "a100-80g-sxm"), ("a100-40g-pcie", "a100-40g-sxm")):
        assert find_gpu(card).peak_flops_per_s == find_gpu(module).peak_flops_per_s
    for card in ("h100-80g-pcie", "h100-94g-nvl"):
        assert find_gpu(card).peak_flops_per_s < find_gpu("h100-80g-sxm").peak_flops_per_s
    assert find_gpu("h200-141g-nvl").peak_flops_per_s < find_gpu("h200-141g-sxm").peak_flops_per_s
    cards = [gpu for name, gpu in known_gpus().items() if name.endswith(("-pcie", "-nvl"))]
    assert len(cards) == 5
    assert all(gpu.link_bytes_per_s < find_gpu("v100-32g-sxm").link_bytes_per_s for gpu in cards)


def test_the_cpu_can_be_predicted_with_but_is_no_gpu_that_mfu_knows():
    cpu = find_gpu("cpu")
    assert "cpu" not in known_gpus()
    assert find_gpu_by_device("cpu") is None
    assert all(cpu.peak_flops_per_s * 100 < gpu.peak_flops_per_s for gpu in known_gpus().values())
    assert (cpu.link_bytes_per_s, cpu.link_latency_s) == (cpu.network_bytes_per_s, cpu.network_latency_s)


@pytest.mark.parametrize("name", [*sorted(known_gpus()), "cpu"])
def test_every_number_is_plausible(name):
    gpu = find_gpu(name)
    measured = {"peak_fp32_flops_per_s", "ranks_at_once", "prediction_error", "achieved"}  # of users' machines alone
    optional = {"peak_fp16_flops_per_s", "peak_fp8_flops_per_s", "peak_fp4_flops_per_s", "board_power_w"}
    described = {f.name for f in fields(Gpu)} - {"name", "device_names", "capability"} - measured - optional
    assert {*RANGES, *HOSTS} == described
    outside = {key: getattr(gpu, key) for key, (low, high) in RANGES.items() if not low <= getattr(gpu, key) <= high}
    known = {key: number for key in HOSTS if (number := getattr(gpu, key)) is not None}
    outside |= {key: number for key, number in known.items() if not HOSTS[key][0] <= number <= HOSTS[key][1]}
    assert outside == {}
    assert ("host_link_bytes_per_s" in known) == (name != "cpu")
    assert [type(part) for part in gpu.capability] == ([] if name.startswith(("cpu", "mi")) else [int, int])
    assert {type(count) for count in (gpu.memory_bytes, gpu.gpus_per_node, gpu.gpus_linked)} == {int}
    assert gpu.link_latency_s <= gpu.network_latency_s
    assert gpu.network_bytes_per_s <= gpu.link_bytes_per_s <= gpu.memory_bytes_per_s


@pytest.mark.parametrize("name", sorted(known_gpus()))
def test_narrower_formats_are_faster_and_every_board_has_a_power(name):
    gpu = find_gpu(name)
    peaks = (gpu.peak_flops_per_s, gpu.peak_fp8_flops_per_s, gpu.peak_fp4_flops_per_s)
    known = [peak for peak in peaks if peak is not None]
    assert known == list(peaks[: len(known)])  # no fp4 without fp8
    assert all(1.9 <= narrow / wide <= 4.1 for wide, narrow in pairwise(known))
    assert gpu.board_power_w and POWERS[0] <= gpu.board_power_w <= POWERS[1]


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("a100-80g-sxm", 1),
        ("v100-32g-sxm", 1),
        ("h100-80g-sxm", 2),
        ("mi325x-256g", 2),
        ("gb300", 3),
        ("mi355x-288g", 3),
    ],
)
def test_a_generation_multiplies_the_formats_that_it_has_units_for(name, formats):
    gpu = find_gpu(name)
    peaks = (gpu.peak_flops_per_s, gpu.peak_fp8_flops_per_s, gpu.peak_fp4_flops_per_s)
    assert sum(peak is not None for peak in peaks) == formats


@pytest.mark.parametrize("name", [name for name in sorted(known_gpus()) if re.search(r"-\d+g", name)])
def test_torch_reports_about_the_memory_that_the_name_says(name):
    gigabytes = int(next(part for part in name.split("-") if part[:-1].isdigit() and part[-1] == "g")[:-1])
    assert 0.98 * gigabytes * 1e9 <= find_gpu(name).memory_bytes < gigabytes * 2**30


def test_a_newer_gpu_has_more_of_everything_that_its_data_sheet_raised():
    v100, a100_40, a100, h100, h200, b200 = (
        find_gpu(f"{name}-sxm") for name in ("v100-32g", "a100-40g", "a100-80g", "h100-80g", "h200-141g", "b200-180g")
    )
    assert v100.memory_bytes < a100_40.memory_bytes < h100.memory_bytes < h200.memory_bytes < b200.memory_bytes
    newest_last = (v100, a100_40, a100, h100, h200, b200)
    bandwidths = [gpu.memory_bytes_per_s for gpu in newest_last]
    assert bandwidths == sorted(bandwidths)
    for key in ("peak_flops_per_s", "link_bytes_per_s", "network_bytes_per_s"):
        values = [getattr(gpu, key) for gpu in newest_last]
        assert values == sorted(values)
    assert replace(
        h200, name=h100.name, device_names=h100.device_names, memory_bytes=0, memory_bytes_per_s=0
    ) == replace(h100, memory_bytes=0, memory_bytes_per_s=0)


@pytest.mark.parametrize("key", [key for key in read(f"{H100}.toml") if key not in OPTIONAL])
def test_a_file_that_lacks_a_key_is_refused_by_file_and_key(key):
    tables = read(f"{H100}.toml")
    del tables[key]
    assert problems_of(tables) == [f"some.toml: {key} is missing"]


@pytest.mark.parametrize(
    ("number", "change", "problem"),
    [
        ("memory", {"value": -1}, "memory.value=-1 must be a number above 0"),
        ("memory", {"value": 1.5}, "memory.value=1.5 must be a whole number"),
        ("gpus_per_node", {"value": True}, "gpus_per_node.value=True must be a number"),
        ("link_latency", {"value": "3 us"}, "link_latency.value='3 us' must be a number"),
        ("link_latency", {"value": float("nan")}, "link_latency.value=nan must be a number above 0"),
        ("memory", {"value": float("inf")}, "memory.value=inf must be a number above 0"),
        ("link_bandwidth", {"unit": "GB/s"}, "link_bandwidth.unit='GB/s' must be 'byte/s'; convert the value"),
        ("peak_bf16", {"source": " "}, "peak_bf16.source=' ' must say where the number comes from"),
        ("peak_bf16", {"sourc": "?"}, "peak_bf16.sourc is unknown; did you mean peak_bf16.source?"),
    ],
)
def test_a_number_that_cannot_be_used_is_refused(number, change, problem):
    tables = read(f"{H100}.toml")
    tables[number] |= change
    assert problems_of(tables) == [f"some.toml: {problem}"]


@pytest.mark.parametrize("key", ["value", "unit", "source"])
def test_a_number_without_its_value_unit_or_source_is_refused(key):
    tables = read(f"{H100}.toml")
    del tables["memory"][key]
    assert problems_of(tables) == [f"some.toml: memory.{key} is missing"]


def test_all_problems_of_a_file_come_at_once():
    tables = copy.deepcopy(read(f"{H100}.toml")) | {"bandwith": 1, "memory": 80e9}
    del tables["gpus_per_node"], tables["network_latency"]["unit"]
    assert problems_of(tables) == [
        "some.toml: bandwith is unknown; did you mean link_bandwidth?",
        "some.toml: gpus_per_node is missing",
        "some.toml: memory is a table: write [memory] with value, unit, source below",
        "some.toml: network_latency.unit is missing",
    ]


def test_an_optional_number_is_checked_like_any_other():
    tables = read("gb200.toml")
    tables["peak_fp4"]["unit"], tables["gpus_linked"]["value"] = "PFLOP/s", 7.5
    assert problems_of(tables) == [
        "some.toml: peak_fp4.unit='PFLOP/s' must be 'FLOP/s, dense'; convert the value",
        "some.toml: gpus_linked.value=7.5 must be a whole number",
    ]
    del tables["peak_fp4"], tables["gpus_linked"], tables["board_power"]
    gpu = parse_gpu(tables, "some.toml")
    assert (gpu.peak_fp4_flops_per_s, gpu.gpus_linked, gpu.board_power_w) == (None, 1, None)


@pytest.mark.parametrize(
    ("gpu", "num_gpus", "gpus_per_node", "linked"),
    [
        ("gb200", 144, 4, 72),
        ("gb200", 64, 4, 64),  # those of the domain that the cluster has
        ("gb200", 2, 4, 4),
        ("gb300", 128, 8, 72),
        ("h100-80g-sxm", 64, 8, 8),
        ("h100-80g-sxm", 64, 4, 4),
    ],
)
def test_fast_links_join_a_node_or_as_much_of_their_domain_as_the_cluster_fills(gpu, num_gpus, gpus_per_node, linked):
    assert Cluster(gpu=find_gpu(gpu), num_gpus=num_gpus, gpus_per_node=gpus_per_node).gpus_linked == linked


def test_a_cluster_takes_the_nodes_of_the_vendor_unless_it_has_its_own(write):
    path = write('gpu = "h100-80g-sxm"\ngpus = 64\n')
    assert load_cluster(path) == Cluster(gpu=find_gpu(H100), num_gpus=64, gpus_per_node=8)
    assert load_cluster(str(path)) == load_cluster(path)
    path = write('gpu = "cpu"\ngpus = 8\ngpus_per_node = 4\n')
    assert load_cluster(path) == Cluster(gpu=find_gpu("cpu"), num_gpus=8, gpus_per_node=4)


def test_a_cluster_puts_its_own_numbers_in_the_place_of_the_vendors(write):
    path = write(
        'gpu = "h100-80g-sxm"\ngpus = 16\n'
        '[network_bandwidth]\nvalue = 12.5e9\nunit = "byte/s"\nsource = "2 adapters of 400 Gbit/s"\n'
        '[memory]\nvalue = 80e9\nunit = "byte"\nsource = "another job takes the rest"\n'
    )
    gpu = replace(find_gpu(H100), network_bytes_per_s=12.5e9, memory_bytes=80_000_000_000)
    assert load_cluster(path) == Cluster(gpu=gpu, num_gpus=16, gpus_per_node=8)
    assert find_gpu(H100).network_bytes_per_s == 50e9


def test_a_cluster_may_have_other_links_and_another_power_limit(write):
    path = write(
        'gpu = "gb200"\ngpus = 128\n[gpus_linked]\nvalue = 64\nunit = "GPU"\nsource = "16 trays of a rack for a job"\n'
        '[board_power]\nvalue = 1000\nunit = "W"\nsource = "capped"\n'
    )
    cluster = load_cluster(path)
    assert (cluster.gpus_linked, cluster.gpu.board_power_w) == (64, 1000)


def test_a_cluster_may_hold_what_was_measured_on_it(write):
    path = write(
        'gpu = "cpu"\ngpus = 4\n'
        '[ranks_at_once]\nvalue = 1.9\nunit = "rank"\nsource = "two cores"\n'
        '[peak_fp32]\nvalue = 1e11\nunit = "FLOP/s, dense"\nsource = "measured"\n'
        '[achieved.layer_host_s]\nvalue = 0\nunit = "s"\nsource = "measured"\n'
    )
    gpu = replace(
        find_gpu("cpu"), ranks_at_once=1.9, peak_fp32_flops_per_s=1e11, achieved=(("layer_host_s", 0.0),)
    )  # fmt: skip
    assert load_cluster(path) == Cluster(gpu=gpu, num_gpus=4, gpus_per_node=1)
    assert load_cluster(path).ranks_at_once == 4 * 1.9  # of four nodes


def test_constants_of_a_cluster_are_tables_of_tables(write):
    assert problems_of_cluster(write('gpu = "cpu"\ngpus = 4\nachieved = 3\n')) == [
        "achieved is a table: write [achieved] and its keys below"
    ]
    assert problems_of_cluster(write('gpu = "cpu"\ngpus = 4\n[achieved]\nlayer_host_s = 1e-3\n')) == [
        "achieved.layer_host_s is a table: write [achieved.layer_host_s] with value, unit, source below"
    ]


def test_an_unknown_key_of_a_cluster_is_refused_with_the_nearest(write):
    path = write('gpu = "h100-80g-sxm"\ngpus = 64\nnetwork_bandwith = 1\nshape = "round"\n')
    nearest, known = problems_of_cluster(path)
    assert nearest == "network_bandwith is unknown; did you mean network_bandwidth?"
    assert known.startswith("shape is unknown; known: gpu, gpus, peak_bf16, memory, ")


def test_all_problems_of_a_cluster_come_at_once(write):
    path = write(
        'gpu = "h1000"\ngpus = 0\ngpus_per_node = true\n[memory]\nvalue = 80\nunit = "GB"\nsource = "a label"\n'
        '[link_latency]\nvalue = 1e-6\nunit = "s"\n'
    )
    *others, unknown = problems_of_cluster(path)
    assert others == [
        "link_latency.source is missing",
        "gpus_per_node=True must be a whole number",
        "gpus=0 must be a whole number of at least 1",
        "memory.unit='GB' must be 'byte'; convert the value",
    ]
    assert unknown.startswith("GPU type 'h1000' is unknown; use one of a10-24g, ")
    assert problems_of_cluster(write("")) == ["gpu is missing", "gpus is missing"]


def test_a_cluster_that_cannot_be_read_is_refused_by_its_path(write, tmp_path):
    with pytest.raises(InvalidConfig, match=r"^cluster .*absent\.toml cannot be read: No such file or directory$"):
        load_cluster(tmp_path / "absent.toml")
    with pytest.raises(InvalidConfig, match=r"^cluster .*lab\.toml is not TOML: "):
        load_cluster(write("gpu = "))


def test_a_cluster_has_at_least_one_gpu_in_a_node():
    with pytest.raises(InvalidConfig) as caught:
        Cluster(gpu=find_gpu(H100), num_gpus=0, gpus_per_node=-1)
    assert caught.value.problems == [
        "num_gpus=0 must be a whole number of at least 1",
        "gpus_per_node=-1 must be a whole number of at least 1",
    ]
