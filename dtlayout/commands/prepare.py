"""dtlayout prepare: tokenize a config's data once, so that no training waits for it."""

import argparse

from dtlayout.commands.arguments import add_config, show
from dtlayout.config import load_config

EXAMPLE = "dtlayout prepare configs/debug.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The config, and whether all is read again."""
    add_config(parser)
    parser.add_argument("--verify", action="store_true", help="read the tokens again, and compare their checksum")


def run(options: argparse.Namespace) -> int:
    """Tokenize, and say where the tokens lie."""
    from dtlayout.data.prepare import prepare_tokens  # only now: it imports numpy
    from dtlayout.data.samples import open_samples

    config = load_config(options.config, options.overrides)
    folders = [prepare_tokens(each) for each in config.data.sources]
    samples = open_samples(config.data, folders, config.model.vocab_size, config.batch, seed=config.train.seed)
    documents, lines = [], []
    for cut in samples.cuts:
        tokens = cut.tokens
        if options.verify:
            tokens.verify()
        documents.append(
            {
                "source": cut.source, "folder": str(tokens.folder), "num_tokens": tokens.num_tokens,
                "num_documents": tokens.num_documents, "num_samples": cut.num_samples, "num_cut": cut.num_cut,
            }
        )  # fmt: skip
        lines.append(
            f"{tokens.num_tokens:,} tokens, {cut.num_samples:,} samples of {config.batch.seq_len} in {tokens.folder}"
        )
        if cut.num_cut:
            lines.append(f"note: {cut.num_cut:,} documents of {cut.source} are longer than a sample, which cuts them")
    return show(options, {"sources": documents}, lines, indent=None)
