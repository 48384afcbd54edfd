"""A Hugging Face folder as the model of a question: its rows for tp, and how a config names its weights and tokenizer.

Our trainer gives a model rows of embedding and head as `config.new_rows` says. A search compares layouts of several tp,
each of which would need another number of rows. So it predicts all of them with rows that every tp divides.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import expand, find_path_problem
from dtlayout.config.new_rows import add_rows
from dtlayout.models.beside import CONFIG, TOKENIZER, has_other_tokenizer
from dtlayout.models.weights import check_init_from
from dtlayout.spec.model_shape import ModelShape


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a config.json, which `--model` names."""

    path: Path
    """Absolute path of the folder."""
    vocab_size: int | None = None
    """Rows of the vocabulary that `--vocab` asks for; None leaves them to the folder."""

    @property
    def has_weights(self) -> bool:
        """True if the folder has a file of weights."""
        return any(self.path.glob("*.safetensors"))

    @property
    def has_tokenizer(self) -> bool:
        """True if the folder has a tokenizer of the form that is read here."""
        return os.path.isfile(self.path / TOKENIZER)

    def fill_rows(self, model: ModelShape, num_gpus: int, fixed: Mapping[str, Any]) -> ModelShape:
        """The folder's model with the rows that a run from it has, and with more that each tp divides.

        `fixed` may name the only tp. The model stays as it is where `--vocab` says the rows, and where a run would get
        none: beside an adapter, and for a traced model.
        """
        if self.vocab_size is not None:
            return model
        sizes = (model.num_heads, model.num_kv_heads, model.ffn_size)
        tp = fixed.get("tp") or gcd(num_gpus, *sizes)  # each legal tp divides all of these
        tables = {"layout": {"tp": tp}, "data": {"tokenizer": str(self.path)} if self.has_tokenizer else {}}
        found = add_rows(asdict(model), tables, self.path, None)
        return replace(model, vocab_size=found["vocab_size"], unused_rows=found["unused_rows"])

    def find_refusal(self, model: ModelShape) -> str:
        """Reason why a run cannot start from the folder's weights, which it has; empty where it can."""
        if problem := find_path_problem(str(self.path)):
            return problem
        if has_other_tokenizer(self.path):
            return f"its tokenizer has another form than {TOKENIZER}; AutoTokenizer of transformers saves it in that"
        return next(iter(check_init_from(str(self.path), model)), "")

    def name_sections(self, model: ModelShape) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Section of a config → the keys that name the folder, and sentences on weights that are not taken.

        `model` has the rows that it is trained with. A config with [model] of these keys has the folder's sizes.
        """
        sections: dict[str, dict[str, Any]] = {"data": {"tokenizer": str(self.path)} if self.has_tokenizer else {}}
        if not self.has_weights:
            return sections, []
        if refusal := self.find_refusal(model):
            return sections, [f"It starts from random weights, not from those of {self.path}: {refusal}"]
        rows = {} if self.vocab_size is None else {"vocab_size": self.vocab_size}
        return {**sections, "model": {"name": str(self.path), **rows}, "train": {"init_from": str(self.path)}}, []


def find_model_folder(text: str, vocab_size: int | None = None) -> ModelFolder | None:
    """The folder that a text names, or whose config.json it names; None for anything else."""
    try:
        path = expand(text).absolute()
    except InvalidConfig:
        return None  # which is refused where the model is read
    folder = path.parent if path.name == CONFIG else path
    return ModelFolder(folder, vocab_size) if os.path.isfile(folder / CONFIG) else None


def fit_rows(model: ModelShape, tp: int) -> ModelShape:
    """The model with as few unused rows as `tp` allows, which has the others already."""
    unused = -model.num_ids % tp
    return replace(model, vocab_size=model.num_ids + unused, unused_rows=unused)


def describe_filled(model: ModelShape, tp: int) -> list[str]:
    """A sentence on rows that a prediction has for any tp, and on those that a run with `tp` has; none without any."""
    if not model.unused_rows:
        return []
    own = fit_rows(model, tp)
    added = f"{own.vocab_size:,}, of which {own.unused_rows:,} are no tokens" if own.unused_rows else "no more"
    return [
        f"Not every tp divides {model.num_ids:,} rows of the vocabulary, so predictions are with {model.vocab_size:,}. "
        f"A run fills them up for its own tp: with tp={tp} it has {added}."
    ]
