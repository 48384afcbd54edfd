"""What several commands share: a config or a scenario as arguments, and an answer as JSON or text."""

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtlayout.errors import InvalidConfig


def show(options: argparse.Namespace, document: object, lines: Iterable[str], **style: Any) -> int:
    """Print the answer of a command, one JSON document with `--json` and lines without; exit code 0."""
    print(json.dumps(document, indent=2, **style) if options.json else "\n".join(lines))
    return 0


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the TOML file that a command takes; the rest of the command line may override what it says."""
    parser.add_argument("config", type=Path, help="a TOML file; --section.key=value overrides it")


def choose_gpu(config: Any, asked: str | None) -> Any:
    """The GPU type that is asked for, or that the config's [cluster] names; InvalidConfig if neither names one."""
    from dtlayout.cluster import find_gpu, known_gpus

    if asked is None and (known := config.cluster.known_gpu) is not None:
        return known
    name = asked or config.cluster.gpu
    if name == "auto":
        raise InvalidConfig(
            f"cluster.gpu='auto' asks the device of a run, and nothing runs here; give --gpu with one of cpu, "
            f"{', '.join(known_gpus())}"
        )
    return find_gpu(name)


def add_scenario(parser: argparse.ArgumentParser) -> None:
    """Add a model, a batch, a cluster and an engine; `read_scenario` makes a value of them."""
    parser.add_argument(
        "--model", required=True, metavar="M", help="a preset, an HF config.json, or a TOML file with [model]"
    )
    parser.add_argument("--vocab", type=int, metavar="V", help="another vocabulary size than the model's")
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="a cluster's TOML file, instead of --gpu")
    parser.add_argument("--gpu", metavar="NAME", help="a GPU type, such as a100-80g-sxm, h100-80g-sxm or cpu")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs in all")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of a node; the vendor's by default")
    parser.add_argument("--seq-len", type=int, required=True, metavar="S", help="tokens of a sequence")
    parser.add_argument("--global-batch", type=int, required=True, metavar="B", help="sequences of a step")
    parser.add_argument("--engine", default="dtlayout", metavar="E", help="the training program; dtlayout by default")
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help="adamw by default, or such as sgd")
    repeated: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument(
        "--precision", metavar="KEY=FORMAT", help="such as reduce=bfloat16; may be repeated", **repeated
    )


def read_scenario(options: argparse.Namespace, num_gpus: int | None = None) -> Any:
    """The Scenario of `add_scenario`'s options, on `num_gpus` GPUs if given; InvalidConfig with what is wrong."""
    # Only now: a command that takes a config does without the cost model.
    from dtlayout.batch import Batch
    from dtlayout.costmodel.engine import find_engine_on
    from dtlayout.costmodel.scenario import Scenario
    from dtlayout.models.files import find_model
    from dtlayout.optimizers import find_optimizer

    model = find_model(options.model)
    if options.vocab is not None:
        model = replace(model, vocab_size=options.vocab)
    cluster = _read_cluster(options, num_gpus)
    return Scenario(
        model=model,
        batch=Batch(global_batch=options.global_batch, seq_len=options.seq_len),
        cluster=cluster,
        engine=find_engine_on(options.engine, cluster.gpu),
        precision=_read_precision(options.precision),
        optimizer=find_optimizer(options.optimizer)(),
    )


def _read_cluster(options: argparse.Namespace, num_gpus: int | None) -> Any:
    from dtlayout.cluster import Cluster, find_gpu, load_cluster

    if options.cluster and options.gpu:
        raise InvalidConfig("--cluster names the GPU type itself; give --cluster or --gpu, not both")
    if options.cluster:
        cluster = load_cluster(options.cluster)
        changes = {"num_gpus": num_gpus or options.gpus, "gpus_per_node": options.gpus_per_node}
        return replace(cluster, **{name: value for name, value in changes.items() if value is not None})
    if not options.gpu:
        raise InvalidConfig("the cluster is missing; give --gpu NAME --gpus N, or --cluster FILE")
    num_gpus = options.gpus if num_gpus is None else num_gpus
    if num_gpus is None:
        raise InvalidConfig("the number of GPUs is missing; give --gpus N")
    gpu = find_gpu(options.gpu)
    per_node = gpu.gpus_per_node if options.gpus_per_node is None else options.gpus_per_node
    return Cluster(gpu=gpu, num_gpus=num_gpus, gpus_per_node=per_node)


def _read_precision(texts: list[str]) -> Any:
    from dtlayout.precision import Precision

    values = dict(text.partition("=")[::2] for text in texts)
    names = ("params", "compute", "reduce")
    if unknown := [name for name in values if name not in names]:
        raise InvalidConfig([f"precision {name!r} is unknown; use one of {', '.join(names)}" for name in unknown])
    return Precision(**values)  # type: ignore[arg-type]
