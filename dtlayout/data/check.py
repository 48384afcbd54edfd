"""Checks of a config's data with the errors of preparing: first by the names of sources, then by their first rows.

Training calls `check_data` before it imports torch, and then reads all data by `prepare_tokens` and `open_samples`.
`check_beginnings` calls these two with the first rows of each source, so it refuses what they would refuse. It cannot
see a bad row far behind the first ones.
"""

import tempfile
from pathlib import Path

from dtlayout.base.errors import DataError
from dtlayout.config.config import Config
from dtlayout.config.sections import DataConfig
from dtlayout.data.chat import load_template
from dtlayout.data.prepare import prepare_head
from dtlayout.data.samples import check_held_out, open_samples
from dtlayout.data.sources import list_files
from dtlayout.data.tokenizer import load_tokenizer
from dtlayout.data.tokens import refuse_larger

_HEAD_TOKENS = 1 << 16
"""Ids of each source that are prepared as a trial, unless one sample needs more."""


def check_data(config: Config) -> None:
    """Raise DataError if a source has no files here, or its tokenizer or chat template does not fit the model.

    It also refuses a [validation] that reads training data.
    """
    validation = config.validation_data
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.end_of_document)  # all sources have the same one
    refuse_larger(tokenizer.vocab_size, config.model.vocab_size)
    listed = [(data, _list_checked(data)) for data in config.data.sources]
    if validation:
        ours = _list_checked(validation)
        for data, theirs in listed:
            _refuse_trained_on(validation, ours, data, theirs)


def _list_checked(data: DataConfig) -> list[Path]:
    """Local files of a source; its chat template is checked too, if it needs one."""
    files = list_files(data.source, data.split)
    if data.messages_field:
        load_template(data.chat_template, data.tokenizer).check()
    return files


def check_beginnings(config: Config) -> None:
    """Raise DataError if preparing or cutting the first rows of a source fails, as it would in training."""
    batch, validation = config.batch, config.validation_data
    with tempfile.TemporaryDirectory() as folder:
        _check_beginnings(config, config.data, batch.seq_len + 1, Path(folder))
        if validation:
            _check_beginnings(config, validation, batch.num_tokens + 1, Path(folder), is_held_out=True)


def _check_beginnings(
    config: Config, data: DataConfig, least_tokens: int, folder: Path, *, is_held_out: bool = False
) -> None:
    """Check the first rows of each source of [data] or [validation], at least `least_tokens` ids each."""
    heads = [prepare_head(each, max(_HEAD_TOKENS, least_tokens), folder) for each in data.sources]
    if None in heads:
        return
    folders, are_whole = zip(*filter(None, heads), strict=True)
    samples = open_samples(data, folders, config.model.vocab_size, config.batch, seed=config.train.seed)
    if is_held_out and (all(are_whole) or data.samples == "packed"):  # a document far behind is a sample, too
        check_held_out(samples, str(data.source))


def _refuse_trained_on(validation: DataConfig, ours: list[Path], data: DataConfig, theirs: list[Path]) -> None:
    """Raise DataError if both sources read the same data: local files, or a split of the hub."""
    shared = {file.resolve() for file in ours} & {file.resolve() for file in theirs}
    if shared:
        what = f"{len(shared)} of its {len(ours)} files, such as {str(min(shared))!r}"
    elif not ours and (validation.source, validation.split) == (data.source, data.split):
        what = f"split {data.split!r}"
    else:
        return
    raise DataError(
        f"validation.source={validation.source!r} is trained on too: {what}, which data.source={data.source!r} reads; "
        f"give [validation] a source or a split of its own"
    )
