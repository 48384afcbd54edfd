"""A rank of a calibration: torchrun … -m dtlayout.calibrate.ranks MEASURED.json [FOLDER]

All ranks measure together, and rank 0 writes what they found. On several hosts it is started as train.py is.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from dtlayout.base.errors import DtlayoutError, InvalidConfig
from dtlayout.base.files import check_writable
from dtlayout.base.process import leave
from dtlayout.base.terminal import guarded
from dtlayout.calibrate import measures
from dtlayout.calibrate.clock import ProcessorWatch
from dtlayout.calibrate.disk import measure_disk
from dtlayout.calibrate.measured import Measured
from dtlayout.calibrate.probes import measure_probes
from dtlayout.spec.cluster import Gpu, known_gpus, why_unknown
from dtlayout.spec.device import Device, find_host_bytes
from dtlayout.training.devices import open_device
from dtlayout.training.rendezvous import join_ranks

TIMEOUT_S = 300.0
FOLDER_OPTION = "--offload-folder"
T = TypeVar("T")


def main(arguments: Sequence[str]) -> int:
    """Measure on this rank; returns the exit code. Refusals are a line on stderr, from one rank a node."""
    with guarded(is_answer=False):
        try:
            if len(arguments) not in (1, 2):
                raise InvalidConfig("usage: torchrun … -m dtlayout.calibrate.ranks MEASURED.json [FOLDER]")
            _measure(Path(arguments[0]), *arguments[1:])
            return 0
        except DtlayoutError as error:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print(error, file=sys.stderr, flush=True)
            return error.exit_code


def _measure(path: Path, folder: str = "") -> None:
    """Measure, and write the file; errors that would come after minutes of measuring are raised at once."""
    check_writable(path)
    device = open_device("auto", None)
    if device.gpu is None:
        raise InvalidConfig(f"{why_unknown(device.name)}; use one of {', '.join(known_gpus())}")
    join_ranks(device, TIMEOUT_S)
    measured = measure(device, device.gpu, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), folder)
    if dist.get_rank() == 0:
        measured.write(path)
    dist.destroy_process_group()


def measure(device: Device, gpu: Gpu, ranks_per_node: int, folder: str = "") -> Measured:
    """All measurements that the ranks of this world can make; each rank takes part.

    `folder` is where the disk is measured; an empty one leaves it out. InvalidConfig if it cannot be used.
    """
    disk_bytes_per_s = None
    if folder:
        _say("the disk")
        disk_bytes_per_s = measure_disk(folder, FOLDER_OPTION, device.type, ranks_per_node)
    busy = ProcessorWatch()
    host_s, host_alone_s = measures.measure_host(device.type)
    return Measured(
        device=device.name, gpu=gpu.name, torch=torch.__version__,
        date=f"{datetime.now(timezone.utc):%Y-%m-%d}", num_ranks=dist.get_world_size(), ranks_per_node=ranks_per_node,
        memory_bytes=_find_memory_bytes(device.type, ranks_per_node), host_s=host_s, host_alone_s=host_alone_s,
        stream_bytes_per_s=measures.measure_stream(device.type),
        matmuls=_collect("matmuls", measures.measure_matmuls(device)),
        attention=_collect("attention", measures.measure_attention(device)),
        collectives=_collect("collectives", measures.measure_collectives(device.type, ranks_per_node)),
        probes=_collect("steps of the trainer", measure_probes(device)),
        steal=busy.steal(),  # once all is measured
        disk_bytes_per_s=disk_bytes_per_s, disk_folder=folder,
    )  # fmt: skip


def _find_memory_bytes(device_type: str, ranks_per_node: int) -> int:
    """Memory of this rank's GPU as torch reports it, or its part of the host's, bytes."""
    if device_type == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return find_host_bytes() // ranks_per_node


def _collect(name: str, found: Iterable[T]) -> tuple[T, ...]:
    """All values of `found`, with a line about each step for the person who waits."""
    _say(name)
    return tuple(found)


def _say(name: str) -> None:
    """Say on one rank what is measured from now on."""
    if dist.get_rank() == 0:
        print(f"measuring {name} …", file=sys.stderr, flush=True)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
