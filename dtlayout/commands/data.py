"""dtlayout data: a training sample as text with its targets marked, or the samples that a run has noted."""

import argparse
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dtlayout.base.errors import DataError, InvalidConfig
from dtlayout.base.files import expand
from dtlayout.base.formatting import fold_notes, plural
from dtlayout.commands.arguments import CommandAnswer, JsonDocument, show_answer
from dtlayout.config.config import Config
from dtlayout.config.loading import describe_kept_tokenizer, load_config, load_plan

if TYPE_CHECKING:
    from dtlayout.data.beginnings import Beginnings

EXAMPLE = "dtlayout data show configs/debug.toml --sample 3"
_NOT_PREPARED = "run dtlayout prepare first"
_SECONDS_OF_SILENCE = 1.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action, the config or file of noted samples, and which samples are shown."""
    parser.add_argument("action", choices=("show",), help="print samples as text")
    parser.add_argument(
        "config",
        type=Path,
        help="a config, or a run folder for its config.toml, for one sample with its targets marked; or a "
        "nonfinite-step-N.json or spike-step-N.json of a run folder, for the samples of that step",
    )
    parser.add_argument(
        "--sample", type=int, metavar="N", help="with a config: the sample that a new run reads as its N-th, from 0; "
        "the first one by default",
    )  # fmt: skip
    parser.add_argument(
        "--first", type=int, default=0, metavar="N", help="with noted samples: only so many; all by default"
    )


def run(options: argparse.Namespace) -> int:
    """Print samples, by the tokenizer of the run."""
    if options.first < 0:
        raise InvalidConfig(f"--first={options.first} must not be negative")
    if options.config.is_dir():
        options.config = _find_config(options.config)
    is_config = options.config.suffix == ".toml"
    for name, is_taken, of in (("first", not is_config, "noted samples"), ("sample", is_config, "a config")):
        if getattr(options, name) and not is_taken:
            raise InvalidConfig(f"--{name} is for {of}, which {options.config} is not")
    if options.overrides and not is_config:
        raise InvalidConfig(f"{options.overrides[0]} is for a config, which {options.config} is not")
    with saying_after(_SECONDS_OF_SILENCE, f"reading the beginning of the data of {options.config} …"):
        answer = _find_sample(options) if is_config else _find_noted(options)
    return show_answer(options, answer)


def _find_config(folder: Path) -> Path:
    """The config of a run folder; InvalidConfig with what to type for another folder."""
    config = folder / "config.toml"
    if not config.is_file():
        raise InvalidConfig(
            f"{folder} is a folder without a config.toml, so it is no run folder; give that of a run, or a config: "
            f"dtlayout data show CONFIG.toml"
        )
    return config


@contextmanager
def saying_after(seconds: float, line: str) -> Iterator[None]:
    """Print a line on stderr if the block takes longer, since libraries that are loaded say nothing meanwhile."""
    timer = threading.Timer(seconds, partial(print, line, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _find_sample(options: argparse.Namespace) -> CommandAnswer:
    """The sample of a config."""
    from dtlayout.data.chat import describe_ends, describe_marks  # only now: they import numpy
    from dtlayout.data.check import check_data
    from dtlayout.data.shown import CLOSE, OPEN, ShownSample, show_sample
    from dtlayout.data.tokenizer import load_tokenizer

    number = options.sample or 0
    if number < 0:
        raise InvalidConfig(f"--sample={number} must not be negative")
    config = load_plan(options.config, options.overrides)
    check_data(config)
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.end_of_document)
    with _open(config) as beginnings:
        shown: ShownSample = show_sample(beginnings, number, tokenizer)
    is_runs_own = expand(config.train.run_folder).resolve() == options.config.parent.resolve()
    notes = [*([] if is_runs_own else describe_kept_tokenizer(config)), *describe_marks(config.data, tokenizer)]
    notes += describe_ends(config.data, tokenizer)

    def describe(_: JsonDocument) -> Iterator[str]:
        counts = f"{plural(shown.num_tokens, 'token')}, {plural(shown.num_targets, 'target')} in {OPEN}{CLOSE}"
        padding = f", {shown.num_padding} of padding" * bool(shown.num_padding)
        if shown.beginning is None:
            yield f"sample {number} of a run is sample {shown.sample} of {shown.source}: {counts}{padding}"
        else:
            num_samples, num_tokens = shown.beginning
            first = f"the {plural(num_samples, 'sample', ',')} in the first {plural(num_tokens, 'token', ',')}"
            yield f"sample {shown.sample} of {first} of {shown.source}: {counts}{padding}"
            yield f"no more is tokenized: {_NOT_PREPARED} to see sample {number} of a run, which is another one"
            if config.data.weights is None:
                yield "sizes of whole sources are not known yet, and are the weights: it may be of another source"
        if shown.why_untaught:
            yield f"nothing is learnt from this sample: {shown.why_untaught}"
        yield from fold_notes(notes)
        for i, text in enumerate(shown.mark()):
            yield f"--- document {i}"
            yield text

    return CommandAnswer({"number": number, **asdict(shown)}, describe)


@contextmanager
def _open(config: Config) -> Iterator["Beginnings"]:
    """Samples of [data], as far as they are prepared, or else of the beginnings of its sources."""
    from dtlayout.data.beginnings import open_beginnings  # only now: it imports numpy

    with tempfile.TemporaryDirectory() as folder:
        beginnings = open_beginnings(config, config.data, Path(folder))
        if beginnings is None:
            raise DataError(f"the beginning of a source has nothing to learn from; {_NOT_PREPARED}")
        yield beginnings


def _find_noted(options: argparse.Namespace) -> CommandAnswer:
    """The samples of a step that was noted."""
    from dtlayout.data.bad_batch import BadBatch  # only now: they import numpy
    from dtlayout.data.tokenizer import load_tokenizer

    bad_batch = BadBatch.read(options.config)
    config = load_config(options.config.parent / "config.toml")
    decode = load_tokenizer(config.data.tokenizer, config.data.end_of_document).decode
    documents = []
    with _open(config) as (samples, are_whole):
        if not all(are_whole):
            raise DataError(f"the samples of {options.config} lie anywhere in the data; {_NOT_PREPARED}")
        if samples.fingerprint != bad_batch.tokens:
            raise DataError(f"{options.config} is of other tokens than those that its run's config.toml names now")
        for index, (number, sample) in enumerate(bad_batch.samples[: options.first or None]):
            source = samples.sources[number]
            text = decode(source.read_ids(sample).tolist())
            documents.append({"index": index, "source": source.name, "sample": sample, "text": text})
    step = {"step": bad_batch.step, "loss": bad_batch.loss, "grad_norm": bad_batch.grad_norm}
    return CommandAnswer({**step, "samples": documents, "_num_samples": len(bad_batch.samples)}, _describe_noted)


def _describe_noted(document: JsonDocument) -> Iterator[str]:
    num_samples = plural(document["_num_samples"], "sample")
    yield f"step {document['step']}: loss {document['loss']}, grad_norm {document['grad_norm']}, {num_samples}"
    for each in document["samples"]:
        yield f"--- {each['index']}: sample {each['sample']} of {each['source']}"
        yield each["text"]
