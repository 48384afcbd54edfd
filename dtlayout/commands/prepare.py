"""dtlayout prepare: tokenize a config's data once, so that no training waits for it; on one machine or by shards."""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from dtlayout.base.errors import DataError, InvalidConfig
from dtlayout.base.formatting import plural
from dtlayout.commands.arguments import JsonDocument, add_config, show
from dtlayout.config.loading import load_config
from dtlayout.config.sections import DataConfig

if TYPE_CHECKING:
    from dtlayout.config.config import Config
    from dtlayout.data.tokenizing import Tokenized

EXAMPLE = "dtlayout prepare configs/debug.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config, and whether all tokens are read again."""
    add_config(parser)
    parser.add_argument("--verify", action="store_true", help="read the tokens again, and compare each file's checksum")
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="processes of this machine that share the files"
    )
    parser.add_argument(
        "--shard", metavar="I/N", help="tokenize the I-th of N parts of the files alone, from 1, and join nothing; "
        "once all are done, on whatever machines, prepare without --shard joins them"
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Tokenize, and say where the tokens lie."""
    from dtlayout.data.check import check_data  # only now: they import numpy
    from dtlayout.data.extent import describe_sources
    from dtlayout.data.prepare import prepare_tokens
    from dtlayout.data.samples import open_samples

    if options.processes < 1:
        raise InvalidConfig(f"--processes={options.processes} must be at least 1")
    config = load_config(options.config, options.overrides)
    check_data(config)  # before hours of work that would not fit the model
    if options.shard is not None:
        return _run_shard(options, config)
    done: list[Tokenized] = []
    wholes = (config.data, *config.held_out_data.values())
    folders = _for_each_source(wholes, partial(prepare_tokens, processes=options.processes, note=done.append))
    found = [
        each
        for data, own in zip(wholes, folders, strict=True)
        for each in open_samples(data, own, config.model.vocab_size, config.batch, seed=config.train.seed).sources
    ]
    sources, notes, num_verified = [], [], 0
    for source in found:
        tokens = source.tokens
        if options.verify:
            num_verified += tokens.verify()
        sources.append(
            {
                "source": source.name, "folder": str(tokens.folder), "num_tokens": tokens.num_tokens,
                "num_documents": tokens.num_documents, "num_samples": source.num_samples,
                "num_cut": source.division.num_cut, "padding_share": source.division.padding_share,
                "num_targets": source.targets.number, "num_untaught": source.targets.num_samples_without,
            }
        )  # fmt: skip
        notes.append(describe_sources([source]))
    document = {
        "sources": sources, "tokenized": _sum_up(done), "num_files_verified": num_verified, "_notes": notes,
        "_seq_len": config.batch.seq_len,
    }  # fmt: skip
    return show(options, document, _describe, indent=None)


def _run_shard(options: argparse.Namespace, config: "Config") -> int:
    """Tokenize a part of the files of each source, and say how fast that was."""
    from dtlayout.data.prepare import prepare_shard  # only now: it imports numpy

    asked = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", options.shard)
    if not asked or int(asked[1]) > int(asked[2]):
        raise InvalidConfig(f"--shard={options.shard!r} must be I/N with I from 1 to N, such as 3/16")
    if options.verify:
        raise InvalidConfig("--verify is for tokens that are whole: prepare without --shard first")
    number, num_shards = int(asked[1]), int(asked[2])
    wholes = (config.data, *config.held_out_data.values())
    write = partial(prepare_shard, shard=number - 1, num_shards=num_shards, processes=options.processes)
    shards, done = [], []
    for whole, found in zip(wholes, _for_each_source(wholes, write), strict=True):
        for data, own in zip(whole.sources, found, strict=True):
            done.append(own.tokenized)
            shards.append(
                {"source": str(data.source), "files": own.num_files, "of": own.num_all, "folder": str(own.parts)}
            )
    document = {"shard": options.shard, "sources": shards, "tokenized": _sum_up(done)}
    return show(options, document, _describe_shard, indent=None)


def _describe_shard(document: JsonDocument) -> Iterator[str]:
    yield from _describe_speed(document)
    for each in document["sources"]:
        files = f"{each['files']:,} of {plural(each['of'], 'file', ',')} of {each['source']}"
        yield f"shard {document['shard']}: {files}, tokenized in {each['folder']}"
    yield "once all shards are done, dtlayout prepare without --shard joins them"


def _sum_up(done: "Sequence[Tokenized]") -> dict[str, float]:
    """Documents and tokens that were tokenized by this command, and how long that took."""
    return {
        "num_documents": sum(each.num_documents for each in done), "num_tokens": sum(each.num_tokens for each in done),
        "seconds": sum(each.seconds for each in done),
    }  # fmt: skip


def _describe_speed(document: JsonDocument) -> Iterator[str]:
    """A line on what was tokenized; none where all was there."""
    done = document["tokenized"]
    if done["num_documents"]:
        count = f"{plural(done['num_tokens'], 'token', ',')} of {plural(done['num_documents'], 'document', ',')}"
        yield f"tokenized {count} in {done['seconds']:,.1f} s, {done['num_tokens'] / done['seconds']:,.0f} tokens/s"


def _describe(document: JsonDocument) -> Iterator[str]:
    yield from _describe_speed(document)
    for source, notes in zip(document["sources"], document["_notes"], strict=True):
        tokens, samples = plural(source["num_tokens"], "token", ","), plural(source["num_samples"], "sample", ",")
        yield f"{tokens}, {samples} of {document['_seq_len']} in {source['folder']}"
        yield from notes
    if number := document["num_files_verified"]:
        yield f"the checksums of {plural(number, 'file')} are right"


_Answer = TypeVar("_Answer")


def _for_each_source(wholes: Sequence[DataConfig], write: Callable[[DataConfig], _Answer]) -> list[list[_Answer]]:
    """Answers of `write` for each source of each section; files that are broken end only their own source.

    DataError with all of them, after the last source.
    """
    from dtlayout.data.tokenizing import BrokenFiles  # only now: it imports numpy

    answers, broken = [], list[str]()
    for whole in wholes:
        own = list[_Answer]()
        for data in whole.sources:
            try:
                own.append(write(data))
            except BrokenFiles as error:
                broken.append(str(error))
        answers.append(own)
    if broken:
        raise DataError("\n".join(broken))
    return answers
