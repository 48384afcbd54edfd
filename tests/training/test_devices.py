"""The device of a rank, and the peak that MFU is measured against."""

import os

import pytest
import torch
import torch.distributed as dist

from dtlayout.cluster import find_gpu, known_gpus
from dtlayout.errors import InvalidConfig
from dtlayout.training.devices import Device, join_ranks, open_device


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def taken(monkeypatch) -> list[int]:
    """A machine whose GPUs are all H100s; the GPUs that were taken."""
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
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
    assert open_device(wanted, None) == open_device(wanted, find_gpu("cpu")) == Device("cpu", "cpu", None)
    for name in known_gpus():
        assert open_device(wanted, find_gpu(name)) == Device("cpu", "cpu", find_gpu(name).peak_flops_per_s)


def test_the_cpu_is_taken_where_it_is_asked_for_although_there_is_cuda(taken):
    assert open_device("cpu", None).type == "cpu"
    assert taken == []


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("gpu", "peak"), [(None, 989e12), ("cpu", None), ("a100-80g-sxm", 312e12), ("h200-141g-sxm", 989e12)]
)
def test_a_rank_takes_the_gpu_of_its_local_rank_and_the_peak_of_its_name(taken, monkeypatch, wanted, gpu, peak):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert open_device(wanted, gpu and find_gpu(gpu)) == Device("cuda", "NVIDIA H100 80GB HBM3", peak, (9, 0))
    assert taken == [3]


@pytest.mark.usefixtures("taken")
def test_a_gpu_that_no_constants_file_knows_has_no_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce GTX 970")
    assert open_device("auto", None) == Device("cuda", "NVIDIA GeForce GTX 970", None, (9, 0))


def test_without_torchrun_a_process_is_a_world_of_its_own(monkeypatch):
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")})
    join_ranks(Device("cpu", "cpu", None), timeout_s=20)
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    finally:
        dist.destroy_process_group()
