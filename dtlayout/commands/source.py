"""Runs and checkpoints as sources of a model: the config, the files and the tokenizer that come with one."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.config.config import Config
from dtlayout.config.loading import parse_config
from dtlayout.config.sections import DataConfig
from dtlayout.models.beside import CONFIG, KEPT, TEMPLATE_NAME, TOKENIZER, find_context
from dtlayout.models.first_source import find_place
from dtlayout.models.peft import find_base_folder


def find_config(source: Path) -> Config | None:
    """The config of a run folder, or of the run that a checkpoint is of; None where there is none that can be read.

    Its [cluster] is left out: it may name a file of the machine, or of the working directory, that trained.
    """
    try:
        tables = toml.read(_find_run(source) / "config.toml", "config")
        tables.pop("cluster", None)
        return parse_config(tables)
    except InvalidConfig:  # a checkpoint that lies alone
        return None


def _find_run(source: Path) -> Path:
    """The folder of a run; of a checkpoint, that of its run."""
    folder = source.resolve()
    parent = folder.parent.parent
    is_run = any((folder / name).exists() for name in ("config.toml", KEPT, "checkpoints"))
    return folder if is_run else parent


def find_kept(source: Path, config: Config | None) -> Path | None:
    """The files that the run of a source has kept of the model it began from, or the folder of that model.

    None where neither is there.
    """
    kept, came_from = _find_run(source) / KEPT, config.train.init_from if config else ""
    if kept.is_dir():
        return kept
    with suppress(InvalidConfig):  # an adapter whose frozen model is not here
        folder = find_base_folder(find_place(came_from))
        return folder if came_from and (folder / CONFIG).is_file() else None
    return None


def find_text_length(config: Config | None, base: Path | None) -> int | None:
    """Tokens of the longest text that a model is made for or was trained on, the larger; None if neither is known.

    `config` is that of a run, if it is one, and `base` the folder with the model's config.json.
    """
    known = [find_context(base) if base else None, config.batch.seq_len if config else None]
    return max((each for each in known if each is not None), default=None)


def find_adapter_data(folder: Path, asked: str | None = None) -> DataConfig | None:
    """Tokenizer and chat template of a PEFT folder: its own, or those of its frozen model; None without a tokenizer.

    `asked` is a tokenizer that takes the place of both. InvalidConfig if the frozen model is not here.
    """
    places = [folder.resolve(), find_base_folder(folder).resolve()]
    tokenizer = asked or next((str(place) for place in places if (place / TOKENIZER).is_file()), "")
    template = next((str(place / TEMPLATE_NAME) for place in places if (place / TEMPLATE_NAME).is_file()), "")
    return DataConfig(tokenizer=tokenizer, chat_template=template) if tokenizer else None


def find_data(source: Path, config: Config | None, asked: str | None) -> DataConfig | None:
    """Data settings of a run or a checkpoint, with its tokenizer; None where that is not known.

    The tokenizer is the one that is asked for, or the one that the run has kept, wherever its config's path leads.
    """
    data, kept = config.data if config else None, _find_run(source) / KEPT
    if (kept / TOKENIZER).is_file():
        data = replace(data or DataConfig(), tokenizer=str(kept / TOKENIZER))
    if kept.is_dir() and data is not None:
        template = kept / TEMPLATE_NAME
        data = replace(data, chat_template=str(template) if template.is_file() else "")
    return data if asked is None else replace(data or DataConfig(), tokenizer=asked, end_of_document="")
