"""Emit: a recommended layout as a config that `torchrun train.py` runs unchanged."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dtlayout import toml
from dtlayout.config import check_layout, parse_config
from dtlayout.costmodel.engine import OWN_ENGINE
from dtlayout.costmodel.estimate import Estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.files import write
from dtlayout.layout import Layout
from dtlayout.models.presets import PRESETS
from dtlayout.optimizers import AdamW
from dtlayout.pipelining.partition import count_blocks, layer_costs, partition
from dtlayout.precision import Precision

_BYTES_VOCAB = 257
"""Ids of the tokenizer that needs no file."""
_STEPS = 100
_SAID_OF_LAYOUTS = ("pp", "dp_replicate", "dp_shard", "tp", "micro_batch", "zero", "recompute")


def write_config(path: Path, scenario: Scenario, estimate: Estimate, reasons: Sequence[str]) -> None:
    """Write the config, with reasons as comments; it is checked first. DtlayoutError if the file cannot be written."""
    text = make_config(path, scenario, estimate, reasons)
    check_layout(parse_config(toml.loads(text)), scenario.cluster.num_gpus)
    write(path, text, "config")


def make_config(path: Path, scenario: Scenario, estimate: Estimate, reasons: Sequence[str]) -> str:
    """A recommended layout as the text of a config file called `path`."""
    cluster, model = scenario.cluster, scenario.model
    is_plain_cpu = cluster.gpu.device_type == "cpu" and not cluster.gpu.achieved
    per_node = cluster.num_gpus if is_plain_cpu else cluster.gpus_per_node  # its ranks are cores of one machine
    num_nodes = math.ceil(cluster.num_gpus / per_node)
    processes = f"--nproc-per-node {min(cluster.num_gpus, per_node)}"
    launch = processes if num_nodes == 1 else f"--nnodes {num_nodes} {processes} --rdzv-endpoint HOST:PORT"
    comments = [f"{model.name} on {cluster.num_gpus} x {cluster.gpu.name}, by dtlayout recommend.", *reasons]
    if (engine := scenario.engine.name) != OWN_ENGINE:
        comments.insert(
            1, f"Predicted for {engine}; what this trainer takes and needs, dtlayout check {path.name} says."
        )
    needs_tokenizer = model.vocab_size < _BYTES_VOCAB
    sections = {
        "model": _changes(model, PRESETS.get(model.name), ["name"]),
        "batch": asdict(scenario.batch),
        "layout": _changes(_cut_alike(scenario, estimate), Layout(), _SAID_OF_LAYOUTS),
        "kernels": asdict(estimate.kernels),
        "precision": _changes(scenario.precision, Precision()),
        "optimizer": _changes(scenario.optimizer, AdamW()),
        "data": {
            "source": "python-stdlib",
            "tokenizer": "data/tokenizer.json" if needs_tokenizer else "bytes",
            "max_tokens": max(4_000_000, scenario.batch.num_tokens + 1),
        },
        "train": {"steps": _STEPS, "device": cluster.gpu.device_type},
        "cluster": {"gpu": cluster.gpu.name, "gpus_per_node": cluster.gpus_per_node}
        | ({"file": cluster.file} if cluster.gpu.achieved else {}),  # what only predictions know
    }
    small = "Small data that every machine has, to start with: put your own corpus and tokenizer here."
    bare = f"Bytes need {_BYTES_VOCAB} ids, the model has {model.vocab_size}: give a tokenizer of your own."
    notes = {"data": bare if needs_tokenizer else small, "train": "A first run; raise steps for a real one."}
    comments.append(f"Run it: torchrun {launch} train.py {path.name}")
    lines = ["# " + "".join(c if c.isprintable() else " " for c in line) for line in comments]
    for name, table in sections.items():
        if table:
            title, *values = toml.dumps({name: table}).splitlines()
            lines += ["", title, *([f"# {notes[name]}"] if name in notes else []), *values]
    return "\n".join(lines) + "\n"


def _changes(value: Any, default: Any, always: Sequence[str] = ()) -> dict[str, Any]:
    """The fields that have not their default, and those that are always said; all of them without a default."""
    known = asdict(default) if default else {}
    return {k: v for k, v in asdict(value).items() if k in always or k not in known or v != known[k]}


def _cut_alike(scenario: Scenario, estimate: Estimate) -> Layout:
    """The layout, with its stages where the trainer would cut others."""
    own = count_blocks(partition(layer_costs(scenario.model, scenario.batch), estimate.layout))
    is_same = own == estimate.stage_layers
    return estimate.layout if is_same else replace(estimate.layout, stage_layers=estimate.stage_layers)
