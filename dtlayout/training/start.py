"""The start of a run on one rank, before ranks join: device, kernels and data, or a refusal."""

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from dtlayout.base.errors import InvalidLayout
from dtlayout.base.refusals import refuse
from dtlayout.base.signals import StopRequest
from dtlayout.config.config import Config
from dtlayout.config.sections import DataConfig
from dtlayout.data.nodes import prepare_on_node
from dtlayout.data.samples import Samples, open_samples, refuse_untaught
from dtlayout.planner.prediction import refuse_beyond_host, refuse_full_disk, refuse_hopeless
from dtlayout.spec.device import Device, check_formats, find_host_bytes
from dtlayout.spec.kernels import OpenKernels, ResolvedKernels
from dtlayout.spec.layout import Layout
from dtlayout.training.devices import open_device, repeat_bits
from dtlayout.training.rendezvous import open_store


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """Everything that is decided before ranks join."""

    config: Config
    layout: Layout
    device: Device
    chosen: ResolvedKernels
    """The config's kernels, each auto replaced by a name."""
    samples: Samples
    held_out: dict[str, Samples]
    """Samples of each set of [validation], by its name."""
    stop: StopRequest


def open_inputs(config: Config, layout: Layout, stop: StopRequest) -> tuple[RunInputs, dist.Store]:
    """Open device and data, and the store over which the ranks of this start find each other.

    InvalidConfig, KernelError or DataError for a run that could not be trained here.
    """
    device, chosen = _open_device(config, layout)
    store = open_store(config.train.timeout_s)
    samples = open_data(config, config.data, store, "tokens", seed=config.train.seed)
    samples = replace(samples, ramp=config.train.batch_ramp)
    held_out = open_held_out(config, store)
    inputs = RunInputs(
        config=config, layout=layout, device=device, chosen=chosen, samples=samples, held_out=held_out, stop=stop
    )
    return inputs, store


def _open_device(config: Config, layout: Layout) -> tuple[Device, ResolvedKernels]:
    """This rank's device and the kernels that it runs; a refusal for a kernel or a layout that it cannot run."""
    if config.train.deterministic:
        repeat_bits(config.train.device)
    device = open_device(config.train.device, config.cluster.known_gpu)
    chosen = config.choose_kernels(device, layout)
    kernels = chosen.kernels
    refuse(check_formats(device, config.precision), InvalidLayout)
    kernels.check(config.request_kernels(device, layout))
    known = replace(config, kernels=OpenKernels.of(kernels))
    refuse_hopeless(known, layout, device.gpu)
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    refuse_full_disk(known, layout, device.gpu, num_local)
    refuse_beyond_host(known, layout, device.gpu, num_local, find_host_bytes())
    return device, chosen


def open_data(config: Config, data: DataConfig, store: dist.Store, what: str, *, seed: int) -> Samples:
    """Samples of `data`; each source is prepared once a node, under a key of the store that begins with `what`."""
    vocab_size, batch = config.model.vocab_size, config.batch

    def finish(each: DataConfig, folder: Path) -> None:
        open_samples(each, [folder], vocab_size, batch, seed=seed)  # so that one process packs best-fit samples

    folders = [
        prepare_on_node(each, store, f"{what}/{i}", partial(finish, each)) for i, each in enumerate(data.sources)
    ]
    samples = open_samples(data, folders, vocab_size, batch, seed=seed)
    refuse_untaught(samples)
    return samples


def open_held_out(config: Config, store: dist.Store) -> dict[str, Samples]:
    """Samples of each set of [validation], each sample once, in an order that no seed decides."""
    return {
        name: replace(open_data(config, data, store, f"validation/{name}", seed=0), is_once=True)
        for name, data in config.held_out_data.items()
    }
