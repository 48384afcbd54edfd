"""dtlayout check: refuse a config before a cluster is booked, or print the run that it would make."""

import argparse
from dataclasses import asdict, replace

from dtlayout.base.errors import InvalidLayout
from dtlayout.base.files import expand
from dtlayout.base.formatting import fold, fold_notes, join_alike, plural
from dtlayout.checkpoint.manifest import describe_other_start, find_checkpoint
from dtlayout.commands.arguments import (
    add_config,
    add_gpu,
    add_world,
    choose_gpu,
    choose_world,
    find_assumed_world,
    show,
)
from dtlayout.config.checking import check_layout, describe_start
from dtlayout.config.config import Config
from dtlayout.config.loading import PLANNED_STEPS, describe_kept_tokenizer, has_begun, load_plan
from dtlayout.mesh.axes import crosses_node
from dtlayout.models.counting import describe_parameters
from dtlayout.models.first_source import find_place
from dtlayout.models.peft import find_adapter_notes
from dtlayout.models.proofs import refuse_unproven, write_proof
from dtlayout.models.traced import FAMILY
from dtlayout.models.weights import describe_new_rows
from dtlayout.pipelining.partition import count_blocks, layer_costs, partition
from dtlayout.plans.plan import make_plan
from dtlayout.spec.cluster import Gpu
from dtlayout.spec.kernel_table import find_packages
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.trackers import package_problems

EXAMPLE = "dtlayout check configs/debug.toml --world 8 --layout.tp=2"
_OPEN_KERNELS = "those that are auto depend on the run's GPU: name it with --gpu, or as cluster.gpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config and the machines, and the flags `--data` and `--plan`."""
    add_config(parser)
    add_world(parser)
    add_gpu(parser)
    parser.add_argument(
        "--data", action="store_true", help="read the data's beginnings and the tokenizer too, as a run would"
    )
    parser.add_argument("--plan", action="store_true", help="print what happens to which module")
    parser.add_argument(
        "--prove", action="store_true", help="train a narrow model with a traced model's code on four processes, and "
        "compare loss and gradients with those of one; a run of such a model needs it once",
    )  # fmt: skip


def _prove(model: ModelShape) -> list[tuple[str, str]]:
    """Prove a traced model on every axis, keep that, and give a line for each."""
    if model.family != FAMILY:
        return [("proof", "needs none: the model is described")]
    from dtlayout.training.prove import prove  # only now: it imports torch

    found = prove(model)
    write_proof(model, {axis: value for axis, value in found.items() if isinstance(value, float)})
    return [
        ("proof", f"{axis}: {value if isinstance(value, str) else f'differs from one process by {value:.1e} at most'}")
        for axis, value in found.items()
    ]


def run(options: argparse.Namespace) -> int:
    """Print the run that the config would make, as text or JSON. A config that cannot run is a DtlayoutError."""
    config = load_plan(options.config, options.overrides)
    if options.gpu:
        config = _put_on(config, choose_gpu(config, options.gpu))
    world_size = choose_world(config, options.world)
    layout = check_layout(config, world_size, config.device)
    if options.world is not None and config.device.gpu is not None:
        from dtlayout.planner.prediction import refuse_hopeless  # only now: it imports the cost model

        refuse_hopeless(config, layout, config.device.gpu)
    proof = _prove(config.model) if options.prove else []
    if not config.train.force:
        try:
            refuse_unproven(config.model, layout, document_mask=config.data.document_mask)
        except InvalidLayout as error:
            raise InvalidLayout([*(f"{name} {line}" for name, line in proof), *error.problems]) from None
    marks: list[str] = []
    if options.data:
        from dtlayout.data.chat import describe_marks  # only now: they import numpy
        from dtlayout.data.check import check_beginnings, check_data
        from dtlayout.data.tokenizer import load_tokenizer

        check_data(config)
        check_beginnings(config)
        marks = describe_marks(config.data, load_tokenizer(config.data.tokenizer, config.data.end_of_document))
    chosen = config.choose_kernels(config.device, layout)
    notes = find_assumed_world(config, options.world) + _find_notes(config, layout, chosen.kernels) + marks
    is_known = config.device.type != "auto"
    said = chosen.describe() if is_known else [_OPEN_KERNELS]
    looked = (
        "found, their beginnings read, and the tokenizer fits the model"
        if options.data
        else "not checked here: --data looks for them"
    )
    peak_bytes, memory = _predict_memory(config, layout)
    facts = [
        *_describe(config, layout),
        ("memory", memory),
        ("data", looked),
        *(("kernels", line) for line in said),
        *proof,
    ]
    lines = [line for name, value in facts for line in fold(f"{name:<14}{value}", column=14)]
    lines += fold_notes(notes)
    if options.plan:
        lines.append(f"\n{make_plan(config.model, layout, chosen.kernels, config.precision)}")
    kernels = asdict(chosen.kernels if is_known else config.kernels)
    document = {
        "ok": True, "world_size": world_size, "layout": asdict(layout), "kernels": kernels,
        "predicted_peak_memory_bytes": peak_bytes,
    }  # fmt: skip
    return show(options, {**document, "chosen": chosen.describe() if is_known else [], "notes": notes}, lambda _: lines)


def _put_on(config: Config, gpu: Gpu) -> Config:
    """The config on another GPU type, with as many GPUs in a node."""
    cluster = replace(config.cluster, gpu=gpu.name, file="", gpus_per_node=config.cluster.ranks_per_node)
    return replace(config, cluster=cluster, train=replace(config.train, device="auto"))


def _describe(config: Config, layout: Layout) -> list[tuple[str, str]]:
    model, batch = config.model, config.batch
    num_microbatches, slices = layout.num_microbatches(batch), partition(layer_costs(model, batch), layout)
    return [
        ("layout", f"{layout} on {plural(layout.world_size, 'rank')}"),
        ("model", f"{model.name}, {describe_parameters(model)}"),
        ("stages", f"blocks {join_alike(count_blocks(slices))}"),
        ("microbatches", f"{num_microbatches} of {layout.micro_batch} on each of {plural(layout.dp, 'dp rank')}"),
        ("tokens a step", f"{batch.num_tokens:,}"),
    ]


def _predict_memory(config: Config, layout: Layout) -> tuple[float | None, str]:
    """Predicted bytes of the fullest rank, and a line on them; None and a reason if the GPU type is not named."""
    from dtlayout.planner.prediction import describe_peak, own_scenario, predict  # only now: they import the cost model

    gpu = config.device.gpu
    predicted = predict(config, layout, gpu)
    if predicted is None or gpu is None:
        return None, "not predicted: nobody names a GPU type, with --gpu or as cluster.gpu"
    return predicted.peak_bytes, f"predicted {describe_peak(predicted, own_scenario(config, layout.world_size, gpu))}"


def _find_notes(config: Config, layout: Layout, kernels: Kernels) -> list[str]:
    """Notes on values that are legal, but hardly meant."""
    notes = []
    if config.train.steps == PLANNED_STEPS:
        notes.append("train.steps is missing: this can be predicted, and trained once it is there")
    gpus = config.cluster.ranks_linked
    places = "nodes" if gpus == config.cluster.ranks_per_node else "racks"
    if layout.tp > 1 and crosses_node("tp", layout, gpus):
        notes.append(f"tp={layout.tp} crosses {places} of {plural(gpus, 'GPU')}, and tp talks most; keep tp <= {gpus}")
    if layout.zero > 1 and _count_state_shards(layout) == 1:
        frees = ", and frees only the copies that are computed with" * (layout.zero == 3)
        notes.append(f"zero={layout.zero} shards nothing at dp_shard=1{frees}")
    here = replace(config.device, packages=find_packages())  # the run may be elsewhere
    notes += package_problems(config.metrics.to)
    notes += describe_kept_tokenizer(config)
    notes += describe_start(config)
    notes += _find_missing_tokenizer(config.data.tokenizer)
    if config.train.init_from:
        from dtlayout.data.tokenizer import find_other_tokenizer  # only now: it imports numpy

        notes += find_other_tokenizer(config.data.tokenizer, config.train.init_from)
        if not has_begun(config.train.run_folder):
            notes += describe_new_rows(config.train.init_from, config.model, config.train.new_rows)
        elif config.model.adapter is None:
            newest = find_checkpoint(expand(config.train.run_folder))
            notes += describe_other_start(newest, config.train.init_from)
        notes += find_adapter_notes(find_place(config.train.init_from))
    return notes + kernels.problems(config.request_kernels(here, layout))


def _count_state_shards(layout: Layout) -> int:
    from dtlayout.costmodel.scenario import count_state_shards  # only now: it imports the cost model

    return count_state_shards(layout)


def _find_missing_tokenizer(spec: str) -> list[str]:
    if spec == "bytes":
        return []
    from dtlayout.data.tokenizer import find_file  # only now: it imports numpy

    path = find_file(spec)
    there = path is None or path.is_file()
    return [] if there else [f"data.tokenizer={spec!r}: no file {str(path)!r} here; without it there is no run"]
