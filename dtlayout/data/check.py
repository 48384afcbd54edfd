"""Checks of a config's data with the errors of preparing: first by the names of sources, then by their first rows.

Training calls `check_data` before it imports torch, and then reads all data by `prepare_tokens` and `open_samples`.
`check_beginnings` calls these two (`dtlayout.data.beginnings`) with the first rows of each source, so it refuses what
they would refuse. It cannot see a bad row far behind the first ones.
"""

import tempfile
from pathlib import Path

from dtlayout.base.errors import DataError
from dtlayout.config.config import Config
from dtlayout.config.sections import DataConfig
from dtlayout.data.beginnings import open_beginnings
from dtlayout.data.chat import load_template
from dtlayout.data.samples import refuse_untaught
from dtlayout.data.sources import list_files
from dtlayout.data.tokenizer import load_tokenizer
from dtlayout.data.tokens import refuse_larger


def check_data(config: Config) -> None:
    """Raise DataError if a source has no files here, or its tokenizer or chat template does not fit the model.

    It also refuses a [validation] that reads training data.
    """
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.end_of_document)  # all sources have the same one
    refuse_larger(tokenizer.vocab_size, config.model.num_ids)
    listed = [(data, _list_checked(data)) for data in config.data.sources]
    for validation in config.held_out_data.values():
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
    with tempfile.TemporaryDirectory() as folder:
        for data in (config.data, *config.held_out_data.values()):
            found = open_beginnings(config, data, Path(folder))
            if found and all(found.are_whole):
                refuse_untaught(found.samples)


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
