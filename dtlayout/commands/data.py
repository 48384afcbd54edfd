"""dtlayout data: the text of samples that a run has noted."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from dtlayout.base.errors import DataError, InvalidConfig
from dtlayout.base.formatting import plural
from dtlayout.commands.arguments import JsonDocument, show
from dtlayout.config.loading import load_config

EXAMPLE = "dtlayout data show runs/debug/nonfinite-step-00000007.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action, and the file of noted samples."""
    parser.add_argument("action", choices=("show",), help="print the samples as text")
    parser.add_argument(
        "file",
        type=Path,
        help="a nonfinite-step-N.json or spike-step-N.json of a run folder, whose config.toml is beside it",
    )
    parser.add_argument("--first", type=int, default=0, metavar="N", help="only so many samples; all by default")


def run(options: argparse.Namespace) -> int:
    """Print each sample of the step, by the tokenizer of the run."""
    from dtlayout.data.bad_batch import BadBatch
    from dtlayout.data.prepare import prepare_tokens  # only now: it imports numpy
    from dtlayout.data.samples import open_samples
    from dtlayout.data.tokenizer import load_tokenizer

    if options.first < 0:
        raise InvalidConfig(f"--first={options.first} must not be negative")
    bad_batch = BadBatch.read(options.file)
    config = load_config(options.file.parent / "config.toml")
    folders = [prepare_tokens(each) for each in config.data.sources]
    samples = open_samples(config.data, folders, config.model.vocab_size, config.batch, seed=config.train.seed)
    if samples.fingerprint != bad_batch.tokens:
        raise DataError(f"{options.file} is of other tokens than those that its run's config.toml names now")
    decode = load_tokenizer(config.data.tokenizer, config.data.end_of_document).decode
    documents = []
    for index, (number, sample) in enumerate(bad_batch.samples[: options.first or None]):
        source = samples.sources[number]
        text = decode(source.read_ids(sample).tolist())
        documents.append({"index": index, "source": source.name, "sample": sample, "text": text})
    step = {"step": bad_batch.step, "loss": bad_batch.loss, "grad_norm": bad_batch.grad_norm}
    return show(options, {**step, "samples": documents, "_num_samples": len(bad_batch.samples)}, _describe)


def _describe(document: JsonDocument) -> Iterator[str]:
    num_samples = plural(document["_num_samples"], "sample")
    yield f"step {document['step']}: loss {document['loss']}, grad_norm {document['grad_norm']}, {num_samples}"
    for each in document["samples"]:
        yield f"--- {each['index']}: sample {each['sample']} of {each['source']}"
        yield each["text"]
