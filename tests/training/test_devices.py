"""The device of a rank, and the peak that MFU is measured against."""

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dtlayout.base.errors import InvalidConfig
from dtlayout.spec.cluster import find_gpu, gpu_named, known_gpus
from dtlayout.spec.device import Device, describe_cpu, describe_gpu, device_of, expect_device
from dtlayout.spec.kernel_table import find_packages
from dtlayout.training.devices import open_device, repeat_bits, wait_for_device
from dtlayout.training.rendezvous import join_ranks

SLICE = replace(find_gpu("a100-40g-sxm"), peak_flops_per_s=120e12)
"""A part of a GPU, as a cluster file describes it."""


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def taken(monkeypatch) -> list[int]:
    """A machine with four GPUs, all H100s; the GPUs that were taken."""
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return found


@pytest.mark.usefixtures("without_cuda")
def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(InvalidConfig, match=r"train\.device='cuda', but torch finds no CUDA device here; use"):
        open_device("cuda", None)


@pytest.mark.usefixtures("without_cuda")
@pytest.mark.parametrize("wanted", ["auto", "cpu"])
def test_a_cpu_has_no_peak_unless_a_gpu_is_named(wanted):
    cpu = Device("cpu", "cpu", None, gpu=find_gpu("cpu"), packages=find_packages())
    assert open_device(wanted, None) == open_device(wanted, find_gpu("cpu")) == cpu
    for name in known_gpus():
        peak = find_gpu(name).peak_flops_per_s
        assert open_device(wanted, find_gpu(name)) == replace(cpu, peak_flops_per_s=peak)


def test_the_cpu_is_taken_where_it_is_asked_for_although_there_is_cuda(taken):
    assert open_device("cpu", None).type == "cpu"
    assert taken == []


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("gpu", "peak"), [(None, 989e12), ("cpu", None), ("a100-80g-sxm", 312e12), ("h200-141g-sxm", 989e12)]
)
def test_a_rank_takes_the_gpu_of_its_local_rank_and_the_peak_of_its_name(taken, monkeypatch, wanted, gpu, peak):
    monkeypatch.setenv("LOCAL_RANK", "3")
    found = open_device(wanted, gpu and find_gpu(gpu))
    assert replace(found, gpu=None, packages=None) == Device("cuda", "NVIDIA H100 80GB HBM3", peak, (9, 0))
    assert found.packages == find_packages() and taken == [3]


@pytest.mark.parametrize("own", [{}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_CUDA_ALLOC_CONF": ""}])
def test_the_allocators_segments_grow_unless_the_environment_says_something_else(taken, monkeypatch, own):
    kept = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    monkeypatch.setattr(os, "environ", kept | own)
    open_device("cpu", None)
    assert {name: value for name, value in os.environ.items() if "ALLOC_CONF" in name} == own
    open_device("cuda", None)
    said = {name: value for name, value in os.environ.items() if "ALLOC_CONF" in name}
    assert said == (own or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_deterministic_kernels_are_asked_for_on_cuda_alone(monkeypatch):
    asked: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(os, "environ", {})
    for has_cuda, wanted in ((False, "auto"), (True, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_cuda=has_cuda: has_cuda)
        repeat_bits(wanted)
    assert (asked, os.environ, torch.backends.cudnn.deterministic) == ([], {}, False)
    for set_before in ("", ":16:8"):
        monkeypatch.setattr(os, "environ", {"CUBLAS_WORKSPACE_CONFIG": set_before} if set_before else {})
        repeat_bits("auto")
        assert os.environ == {"CUBLAS_WORKSPACE_CONFIG": set_before or ":4096:8"}
    assert asked == [True, True]
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
    assert torch.utils.deterministic.fill_uninitialized_memory is False


@pytest.mark.parametrize(
    ("environment", "num_ranks"),
    [
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}, 8),  # so that the rank which prints refuses too
        ({"LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_RANK": "4"}, 5),
    ],
)
def test_more_ranks_than_gpus_are_refused(taken, monkeypatch, environment, num_ranks):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    said = f"{num_ranks} ranks on a node on which torch finds 4 CUDA devices.*use at most --nproc-per-node 4"
    with pytest.raises(InvalidConfig, match=said):
        open_device("auto", None)
    assert taken == []
    assert open_device("cpu", None).type == "cpu"


@pytest.mark.usefixtures("taken")
def test_a_gpu_that_no_constants_file_knows_has_no_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce GTX 970")
    found = Device("cuda", "NVIDIA GeForce GTX 970", None, (9, 0), packages=find_packages())
    assert open_device("auto", None) == found


@pytest.mark.parametrize(
    ("device", "known", "name"),
    [
        (describe_cpu(None), None, "cpu"),
        (describe_cpu(find_gpu("a100-80g-sxm")), "a100-80g-sxm", "cpu"),
        (describe_gpu("NVIDIA H100 80GB HBM3", None, (9, 0)), None, "h100-80g-sxm"),
        (describe_gpu("NVIDIA H100 80GB HBM3", find_gpu("a100-80g-sxm"), (9, 0)), "a100-80g-sxm", "a100-80g-sxm"),
        (describe_gpu("NVIDIA H100 80GB HBM3", find_gpu("cpu"), (9, 0)), "cpu", None),
        (describe_gpu("NVIDIA GeForce GTX 970", None, ()), None, None),
        (describe_gpu("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None, (8, 0)), None, None),
        (describe_gpu("NVIDIA A100-SXM4-40GB MIG 3g.20gb", find_gpu("a100-40g-sxm"), (8, 0)), None, None),
        (device_of(gpu_named("NVIDIA A100-SXM4-40GB MIG 3g.20gb")), None, None),
        (describe_gpu("NVIDIA A100-SXM4-40GB MIG 3g.20gb", SLICE, (8, 0)), None, "a100-40g-sxm"),
    ],
)
def test_predictions_are_for_the_device_that_runs(device, known, name):
    assert (device.gpu.name if device.gpu else None) == name
    if known in known_gpus():
        assert device.peak_flops_per_s == find_gpu(known).peak_flops_per_s


@pytest.mark.parametrize(
    ("wanted", "known", "device_type", "gpu"),
    [
        ("auto", None, "auto", None),
        ("auto", "a100-80g-sxm", "cuda", "a100-80g-sxm"),
        ("auto", "cpu", "cpu", "cpu"),
        ("cuda", None, "cuda", None),
        ("cuda", "h100-80g-sxm", "cuda", "h100-80g-sxm"),
        ("cuda", "cpu", "cuda", None),
        ("cpu", None, "cpu", "cpu"),
        ("cpu", "h100-80g-sxm", "cpu", "cpu"),
    ],
)
def test_what_is_expected_is_what_the_config_says_and_an_auto_the_gpu_that_it_names(wanted, known, device_type, gpu):
    expected = expect_device(wanted, known and find_gpu(known))
    assert (expected.type, expected.gpu.name if expected.gpu else None) == (device_type, gpu)
    assert expected.packages is None
    is_named = expected.type == "cuda" and known in known_gpus()
    assert expected.capability == (find_gpu(known).capability if is_named else ())


def test_without_torchrun_a_process_is_a_world_of_its_own(monkeypatch):
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")})
    join_ranks(Device("cpu", "cpu", None), timeout_s=20)
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    finally:
        dist.destroy_process_group()


def test_a_gpu_is_waited_for_and_a_cpu_is_not(cuda):
    wait_for_device("cpu")
    assert cuda.done == []
    wait_for_device("cuda")
    assert cuda.done == ["the host waits for all"]


def test_ranks_of_gpus_join_over_nccl_and_bind_no_device(monkeypatch, no_torchrun):
    asked = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: asked.update(how, backend=backend))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    join_ranks(Device("cuda", "NVIDIA H100 80GB HBM3", None), timeout_s=20, store=dist.HashStore())
    assert (asked["backend"], asked["rank"], asked["world_size"]) == ("nccl", 1, 2)
    assert "device_id" not in asked, "all messages of a pipeline rank would share a stream"


def test_a_rank_alone_takes_the_one_gpu_that_was_chosen_for_it(taken, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "5"}.items():
        monkeypatch.setenv(name, value)
    assert open_device("auto", None).type == "cuda" and taken == [0]
