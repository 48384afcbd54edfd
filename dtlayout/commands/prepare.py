"""dtlayout prepare: tokenize a config's data once, so that no training waits for it."""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dtlayout.base.formatting import plural
from dtlayout.commands.arguments import JsonDocument, add_config, show
from dtlayout.config.config import Config
from dtlayout.config.loading import load_config
from dtlayout.config.sections import DataConfig

if TYPE_CHECKING:
    from dtlayout.data.samples import SampledSource

EXAMPLE = "dtlayout prepare configs/debug.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config, and whether all tokens are read again."""
    add_config(parser)
    parser.add_argument("--verify", action="store_true", help="read the tokens again, and compare each file's checksum")


def run(options: argparse.Namespace) -> int:
    """Tokenize, and say where the tokens lie."""
    from dtlayout.data.check import check_data  # only now: they import numpy
    from dtlayout.data.extent import describe_sources

    config = load_config(options.config, options.overrides)
    check_data(config)  # before hours of work that would not fit the model
    sources, notes = [], []
    for source in [each for data in (config.data, *config.held_out_data.values()) for each in _prepare(config, data)]:
        tokens = source.tokens
        if options.verify:
            tokens.verify()
        sources.append(
            {
                "source": source.name, "folder": str(tokens.folder), "num_tokens": tokens.num_tokens,
                "num_documents": tokens.num_documents, "num_samples": source.num_samples,
                "num_cut": source.division.num_cut, "padding_share": source.division.padding_share,
                "num_targets": source.targets.number, "num_untaught": source.targets.num_samples_without,
            }
        )  # fmt: skip
        notes.append(describe_sources([source]))
    document = {"sources": sources, "_notes": notes, "_seq_len": config.batch.seq_len}
    return show(options, document, _describe, indent=None)


def _describe(document: JsonDocument) -> Iterator[str]:
    for source, notes in zip(document["sources"], document["_notes"], strict=True):
        tokens, samples = plural(source["num_tokens"], "token", ","), plural(source["num_samples"], "sample", ",")
        yield f"{tokens}, {samples} of {document['_seq_len']} in {source['folder']}"
        yield from notes


def _prepare(config: Config, data: DataConfig) -> "tuple[SampledSource, ...]":
    """Tokens and samples of each source of [data] or [validation]."""
    from dtlayout.data.prepare import prepare_tokens  # only now: it imports numpy
    from dtlayout.data.samples import open_samples

    folders = [prepare_tokens(each) for each in data.sources]
    return open_samples(data, folders, config.model.vocab_size, config.batch, seed=config.train.seed).sources
