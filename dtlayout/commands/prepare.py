"""dtlayout prepare: tokenize a config's data once, so that no training waits for it."""

import argparse
from typing import TYPE_CHECKING

from dtlayout.base.formatting import plural
from dtlayout.commands.arguments import add_config, show
from dtlayout.config.config import Config
from dtlayout.config.loading import load_config
from dtlayout.config.sections import DataConfig

if TYPE_CHECKING:
    from dtlayout.data.samples import SampledSource

EXAMPLE = "dtlayout prepare configs/debug.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The config, and whether all is read again."""
    add_config(parser)
    parser.add_argument("--verify", action="store_true", help="read the tokens again, and compare each file's checksum")


def run(options: argparse.Namespace) -> int:
    """Tokenize, and say where the tokens lie."""
    from dtlayout.data.check import check_data  # only now: they import numpy
    from dtlayout.data.extent import describe_cut_documents

    config = load_config(options.config, options.overrides)
    check_data(config)  # before hours of work that would not fit the model
    documents, lines = [], []
    for cut in [cut for data in (config.data, config.validation_data) if data for cut in _prepare(config, data)]:
        tokens = cut.tokens
        if options.verify:
            tokens.verify()
        num_untaught = cut.count_untaught()
        documents.append(
            {
                "source": cut.source, "folder": str(tokens.folder), "num_tokens": tokens.num_tokens,
                "num_documents": tokens.num_documents, "num_samples": cut.num_samples, "num_cut": cut.num_cut,
                "num_untaught": num_untaught,
            }
        )  # fmt: skip
        lines.append(
            f"{plural(tokens.num_tokens, 'token', ',')}, {plural(cut.num_samples, 'sample', ',')} of "
            f"{config.batch.seq_len} in {tokens.folder}"
        )
        lines += describe_cut_documents([cut])
        if num_untaught:
            untaught = plural(num_untaught, "sample", ",")
            lines.append(f"note: nothing is learnt from {untaught} of {cut.source}: no token in there is a target")
    return show(options, {"sources": documents}, lines, indent=None)


def _prepare(config: Config, data: DataConfig) -> "tuple[SampledSource, ...]":
    """What each source of [data] or [validation] gives."""
    from dtlayout.data.prepare import prepare_tokens  # only now: it imports numpy
    from dtlayout.data.samples import open_samples

    folders = [prepare_tokens(each) for each in data.sources]
    return open_samples(data, folders, config.model.vocab_size, config.batch, seed=config.train.seed).cuts
