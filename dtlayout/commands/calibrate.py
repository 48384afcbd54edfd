"""dtlayout calibrate: measure these machines, and write the cluster file that predictions for them take."""

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from dtlayout.base.errors import DtlayoutError, InvalidConfig
from dtlayout.base.files import check_writable, expand, write_whole
from dtlayout.base.formatting import align, plural
from dtlayout.base.interpreter import SAFE_PATH, torchrun
from dtlayout.base.mapped_file import find_free_bytes
from dtlayout.base.signals import note_signals
from dtlayout.calibrate.file import to_toml
from dtlayout.calibrate.fit import calibrate
from dtlayout.calibrate.measured import Measured
from dtlayout.commands.arguments import JsonDocument, show
from dtlayout.measure.devices import ask_device_names
from dtlayout.spec.cluster import load_cluster
from dtlayout.sweep import processes

EXAMPLE = "dtlayout calibrate --ranks 4 --out lab.toml"
_LIMIT_S = 1800
_MUCH_STEAL = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where to measure, the file to write, and measurements that are there already."""
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks on this host; as many as it has GPUs, or 1")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the cluster file to write; its record is kept"
    )
    parser.add_argument(
        "--offload-folder", metavar="FOLDER",
        help="a folder on each node, whose disk is measured for layout.offload=disk; it needs half a GiB",
    )  # fmt: skip
    parser.add_argument(
        "--measured", type=Path, metavar="JSON",
        help="measurements of torchrun … -m dtlayout.calibrate.ranks JSON, which several hosts take together",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure the machines, fit constants to that, and write the cluster file."""
    if options.measured and options.ranks:
        raise InvalidConfig("--measured has its number of ranks; leave --ranks out")
    if options.measured and options.offload_folder:
        raise InvalidConfig("--measured has its disk, if its ranks were given a folder; leave --offload-folder out")
    if options.ranks is not None and options.ranks < 1:
        raise InvalidConfig(f"--ranks={options.ranks} must be at least 1")
    check_writable(options.out)
    folder = str(expand(options.offload_folder).absolute()) if options.offload_folder else ""
    if folder:
        find_free_bytes(folder, "--offload-folder")  # refuses what is no folder
    records = load_cluster(options.out).records if options.out.exists() else ()  # refuses to replace something else
    measured = Measured.read(options.measured) if options.measured else _measure(options.ranks, folder)
    found = calibrate(measured)
    try:
        write_whole(options.out, to_toml(measured, found.cluster, records))
    except OSError as error:
        raise InvalidConfig(f"{options.out} cannot be written: {error.strerror}") from None
    load_cluster(options.out)  # what was written can be read
    document = {
        "ok": True, "file": str(options.out), "achieved": dict(found.cluster.gpu.achieved),
        "probe_errors": list(found.errors), "median_error": found.error, "contention": measured.contention,
        "measured": asdict(measured), "_measured": measured, "_gpu": found.cluster.gpu,
    }  # fmt: skip
    return show(options, document, _describe)


def _measure(num_ranks: int | None, disk_folder: str) -> Measured:
    """Measure in a torchrun, of as many ranks as there are GPUs if none are named; the disk of a folder if one is."""
    num_ranks = num_ranks or len(ask_device_names()) or 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        options = ["--standalone", f"--nproc-per-node={num_ranks}"]
        python, *rest = torchrun(options, "dtlayout.calibrate.ranks", str(path), *filter(None, [disk_folder]))
        with note_signals() as stop:
            exit_code = processes.run(
                [python, "-W", "ignore", *rest], sys.stderr, folder, timeout_s=_LIMIT_S,
                is_stopped=lambda: stop.is_made, environment=SAFE_PATH,
            )  # fmt: skip
        if stop.is_made:
            raise DtlayoutError("stopped; nothing was written")
        if exit_code is None:
            raise DtlayoutError(f"measuring took longer than {_LIMIT_S} s; is the machine busy?")
        if exit_code or not path.exists():
            raise DtlayoutError(f"measuring failed with exit code {exit_code}; its words are above")
        return Measured.read(path)


def _describe(document: JsonDocument) -> list[str]:
    gpu, measured, path, error = (document[key] for key in ("_gpu", "_measured", "file", "median_error"))
    peak = (None if gpu.has_mfu else gpu.peak_fp32_flops_per_s) or gpu.peak_flops_per_s
    at_once = measured.ranks_per_node / measured.contention
    facts = [
        ("matmuls reach", f"{dict(gpu.achieved).get('matmul_efficiency', 1.0) * peak / 1e12:.3g} TFLOP/s in a step"),
        ("memory", f"{measured.stream_bytes_per_s * measured.contention / 1e9:.3g} GB/s"),
    ]
    if measured.disk_bytes_per_s is not None:
        facts.append(("disk", f"{measured.disk_bytes_per_s / 1e9:.3g} GB/s in {measured.disk_folder}"))
    if measured.num_ranks > 1:
        facts.append(("at once", f"{at_once:.2g} ranks of a node at full speed"))
    facts.append(("probes", f"{plural(len(measured.probes), 'step')}, predicted to {error:.1%} (median)"))
    if measured.steal > _MUCH_STEAL:
        facts.append(("note", f"other guests of the host had the processors for {measured.steal:.0%} of the time"))
    title = f"{plural(measured.num_ranks, 'rank')} on {measured.device}, {measured.ranks_per_node} a node"
    advice = f"written: {path}; dtlayout recommend --cluster {path}, or cluster.file in a config, take it"
    return [title, *align(facts, ("<", "<")), advice]
