"""Checks of a config's data with the errors of preparing: first by the names of sources, then by their first rows.

Training calls `check_data` before it imports torch, and then reads all data by `prepare_tokens` and `open_samples`.
`check_beginnings` calls these two (`dtlayout.data.beginnings`) with the first rows of each source, so it refuses what
they would refuse. It cannot see a bad row far behind the first ones. `prepare_small` reads every row, of data that
take seconds: with it a command that starts ranks refuses before there are any.
"""

import math
import tempfile
from pathlib import Path

from dtlayout.base.errors import DataError
from dtlayout.base.formatting import format_bytes
from dtlayout.config.config import Config
from dtlayout.config.sections import DataConfig
from dtlayout.data.beginnings import open_beginnings
from dtlayout.data.chat import load_template
from dtlayout.data.prepare import estimate_unprepared_bytes, prepare_tokens
from dtlayout.data.samples import open_samples, refuse_untaught
from dtlayout.data.sources import list_files
from dtlayout.data.tokenizer import load_tokenizer
from dtlayout.data.tokens import refuse_larger

_SMALL_BYTES = 1 << 25
"""Most text that is tokenized in the time that ranks take to start, some ten seconds."""


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


def prepare_small(config: Config) -> list[str]:
    """Prepare the data where that takes seconds, so that a bad row is refused before ranks wait for it.

    A line says how much there is where it would take longer: then nothing is prepared. DataError as in training.
    """
    wholes = (config.data, *config.held_out_data.values())
    size = sum(estimate_unprepared_bytes(data) for whole in wholes for data in whole.sources)
    if size > _SMALL_BYTES:
        what = "data of the hub are" if size == math.inf else f"{format_bytes(size, 1)} of data are"
        return [f"{what} not prepared: a bad row is found while all ranks wait; dtlayout prepare finds it before"]
    for whole in wholes:
        folders = [prepare_tokens(data) for data in whole.sources]
        refuse_untaught(open_samples(whole, folders, config.model.vocab_size, config.batch, seed=config.train.seed))
    return []


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
