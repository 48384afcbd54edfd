"""dtlayout prepare: tokenize a config's data once, so that no training waits for it."""

import argparse

from dtlayout.commands.arguments import add_config, show
from dtlayout.config import load_config

EXAMPLE = "dtlayout prepare configs/debug.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The config."""
    add_config(parser)


def run(options: argparse.Namespace) -> int:
    """Tokenize, and say where the tokens lie."""
    from dtlayout.data.prepare import prepare_tokens  # only now: it imports numpy
    from dtlayout.data.samples import open_samples

    config = load_config(options.config, options.overrides)
    prepared = prepare_tokens(config.data)
    samples = open_samples(prepared, config.model.vocab_size, config.batch, seed=config.train.seed)
    tokens, num_samples, folder = samples.tokens, samples.num_samples, samples.tokens.folder
    document = {"folder": str(folder), "num_tokens": tokens.num_tokens, "num_samples": num_samples}
    text = f"{tokens.num_tokens:,} tokens, {num_samples:,} samples of {config.batch.seq_len} in {folder}"
    return show(options, document, [text], indent=None)
