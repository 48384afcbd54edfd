"""The `dtlayout` command: one subcommand a question, each a function that returns an exit code.

With `--json` stdout holds one JSON document and nothing else. Problems are lines on stderr, exit code 2.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtlayout.config import Config, check_layout, load_config
from dtlayout.errors import DtlayoutError
from dtlayout.layout import Layout
from dtlayout.mesh.ranks import crosses_node
from dtlayout.models.counting import count_parameters
from dtlayout.pipelining.partition import count_blocks, layer_costs, partition
from dtlayout.plans.plan import make_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    parser = _build_parser()
    options, rest = parser.parse_known_args(arguments)
    overrides = [text for text in rest if "." in text.partition("=")[0]]
    if unknown := [text for text in rest if text not in overrides]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; an override is written --section.key=value")
    try:
        config = load_config(options.config, overrides)
        return int(options.run(config, options))
    except DtlayoutError as error:
        if options.json:
            print(json.dumps({"ok": False, "problems": str(error).splitlines()}, indent=2))
        else:
            print(error, file=sys.stderr)
        return error.exit_code


def check(config: Config, options: argparse.Namespace) -> int:
    """Say whether a config can train on so many ranks, and what it would do."""
    world_size = config.layout.smallest_world_size if options.world is None else options.world
    layout = check_layout(config, world_size)
    notes = _find_notes(config, layout)
    if options.json:
        document = {"ok": True, "world_size": world_size, "layout": asdict(layout), "notes": notes}
        print(json.dumps(document, indent=2))
        return 0
    for name, value in _describe(config, layout):
        print(f"{name:<14}{value}")
    for note in notes:
        print(f"note: {note}")
    if options.plan:
        print(f"\n{make_plan(config.model, layout, config.kernels, config.precision)}")
    return 0


def prepare(config: Config, options: argparse.Namespace) -> int:
    """Tokenize the data of a config once, as training would."""
    from dtlayout.data.open import open_samples

    samples = open_samples(config.data, config.model.vocab_size, config.batch, seed=config.train.seed)
    tokens, num_samples = samples.tokens, samples.num_samples
    folder = tokens.folder
    if options.json:
        print(json.dumps({"folder": str(folder), "num_tokens": tokens.num_tokens, "num_samples": num_samples}))
    else:
        print(f"{tokens.num_tokens:,} tokens, {num_samples:,} samples of {config.batch.seq_len} in {folder}")
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dtlayout", description="Parallel layouts for Llama training.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(run: Any, example: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(
            run.__name__,
            help=run.__doc__,
            description=run.__doc__,
            epilog=f"example: {example}",
            allow_abbrev=False,
        )
        command.add_argument("config", type=Path, help="a TOML file; --section.key=value overrides it")
        command.add_argument("--json", action="store_true", help="one JSON document on stdout")
        command.set_defaults(run=run)
        return command

    checking = add(check, "dtlayout check configs/debug.toml --world 8 --layout.tp=2")
    checking.add_argument("--world", type=int, metavar="N", help="ranks; the fewest that the layout needs by default")
    checking.add_argument("--plan", action="store_true", help="print what happens to which module")
    add(prepare, "dtlayout prepare configs/debug.toml")
    return parser


def _describe(config: Config, layout: Layout) -> list[tuple[str, str]]:
    model, batch = config.model, config.batch
    slices = partition(layer_costs(model, batch), layout)
    return [
        ("layout", f"{layout} on {layout.world_size} ranks"),
        ("model", f"{model.name}, {count_parameters(model):,} parameters"),
        ("stages", f"blocks {', '.join(map(str, count_blocks(slices)))}"),
        ("microbatches", f"{layout.num_microbatches(batch)} of {layout.micro_batch} on each of {layout.dp} dp ranks"),
        ("tokens a step", f"{batch.num_tokens:,}"),
        ("data", "not checked here: dtlayout prepare reads them"),
    ]


def _find_notes(config: Config, layout: Layout) -> list[str]:
    """What is legal, but hardly meant."""
    notes = []
    gpus = config.cluster.gpus_per_node
    if layout.tp > 1 and crosses_node("tp", layout, gpus):
        notes.append(f"tp={layout.tp} crosses nodes of {gpus} GPUs, and tp talks most; keep tp <= {gpus}")
    if layout.zero > 1 and layout.dp_shard == 1:
        notes.append(f"zero={layout.zero} shards nothing at dp_shard=1")
    return notes
