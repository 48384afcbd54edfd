"""NeMo AutoModel, read: names of options in its releases, the model, and the adapter that is trained beside it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.family import SIZE_KEYS
from dtlayout.models.hf_config import parse_hf
from dtlayout.programs.automodel.write import AUTOMODEL
from dtlayout.programs.model_names import find_model
from dtlayout.programs.options import OptionReader, positive, real, string, yes
from dtlayout.programs.understood import How, Understood
from dtlayout.spec.model_shape import ModelShape

_OLDER: Mapping[str, tuple[str, ...]] = {
    "distributed.pipeline.": ("autopipeline.",),
    "distributed.activation_checkpointing": ("parallelizer.activation_checkpointing",),
    "distributed.": ("distributed_config.",),
    "model.torch_dtype": ("model.dtype",),
}
"""Beginning of an option's name → other beginnings of it, in another release."""
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a block, by the end of their names."""


class ModelReader(OptionReader):
    """Reads the sections model, peft and quantization."""

    def __init__(self, found: Understood, options: Mapping[str, Any], folder: Path):
        super().__init__(found, options)
        self.folder = folder

    def named(self, name: str) -> str:
        """The name that the file has for an option, or that of the newest release."""
        if name in self.options:
            return name
        others = (
            other + name.removeprefix(begin)
            for begin, kinds in _OLDER.items()
            if name.startswith(begin)
            for other in kinds
        )
        return next((other for other in others if other in self.options), name)

    def list_below(self, begin: str) -> Iterator[str]:
        """Options whose names begin so, in this release or in another one."""
        begins = (begin, *(older for newer, kinds in _OLDER.items() if newer == begin for older in kinds))
        return (name for name in self.options if name.startswith(begins))

    def note(self, name: str, note: str, how: How) -> None:
        """Note an option that is there, and that says no key of ours."""
        if self.has(name):
            self.found.ignore(self.show(name), note, how)

    def read_model(self) -> None:
        """Note the model that is named, or whose sizes are there."""
        target, name = self.value("model._target_", string) or "", "model.pretrained_model_name_or_path"
        if re.search(r"AutoModelFor(?!CausalLM)", target):
            self.found.problems.append(f"model._target_={target} is not predicted; causal language models are")
        kind = self.value("model.config._target_", string) or ""
        if name not in self.options:
            name = "model.config" if "model.config" in self.options else "model.config.pretrained_model_name_or_path"
        if (path := self.value(name, string)) is not None:
            self._name_model(path, self.show(name))
        elif kind and not kind.endswith("from_pretrained"):
            self._read_config(kind)
        else:
            self.found.ignore(self.show("model._target_") if target else "model",
                              "the sizes are in the program's code: --model M says them", "assumed")  # fmt: skip

    def _name_model(self, path: str, shown: str) -> None:
        table = find_model(path, self.folder)
        if table is None:
            self.found.ignore(shown, "its sizes are not known here: --model M says them", "assumed")
            return
        self.found.put("model", table, shown)
        for ours, theirs in SIZE_KEYS.items():
            kind = {"tied_embeddings": yes, "norm_eps": real, "rope_theta": real}.get(ours, positive)
            self.put("model", ours, f"model.config.{theirs}", kind)

    def _read_config(self, kind: str) -> None:
        """Sizes of a model, as transformers reads them from the keys of a config."""
        names = {name: name.removeprefix("model.config.") for name in self.list_below("model.config.")}
        config = _nest({short: self.known(name, self.options[name]) for name, short in names.items() if self.has(name)
                        or self.options[name] is None})  # fmt: skip
        del config["_target_"]
        base = kind.rpartition(".")[2].removesuffix("Config")
        try:
            shape = parse_hf({**config, "architectures": [f"{base}ForCausalLM"]}, AUTOMODEL.engine)
        except InvalidConfig as error:
            self.found.problems += [f"model.config: {problem}" for problem in error.problems]
            return
        values = _list_fields(shape)
        for ours, theirs in SIZE_KEYS.items():
            if (name := f"model.config.{theirs}") in self.options and ours in values:
                self.found.put("model", {ours: values.pop(ours)}, self.show(name))
        self.found.put("model", values, self.show("model.config._target_"), "assumed", "as transformers has it")

    def read_adapter(self) -> None:
        """Note LoRA beside a frozen model, which may be stored in few bits."""
        has_adapter = any(self.options[name] is not None for name in self.list_below("peft."))
        four, eight = (self.value(f"quantization.load_in_{bits}bit", yes) for bits in (4, 8))
        kind = self.value("quantization.bnb_4bit_quant_type", string) or "nf4"
        if (four or eight) and not has_adapter:
            self.found.problems.append(
                "quantization freezes the weights that it stores in few bits, and there is no peft"
            )
        elif four and kind != "nf4":
            self.found.problems.append(f"quantization.bnb_4bit_quant_type={kind} is not predicted; nf4 is")
        elif four or eight:
            shown = f"quantization.load_in_{4 if four else 8}bit = true"
            self.found.put("precision", {"base": "nf4" if four else "int8"}, shown)
        if not has_adapter:
            return
        if self.value("peft.use_dora", yes):
            self.found.problems.append("peft.use_dora=true is not predicted; LoRA alone is")
        rank, alpha = self.value("peft.dim", positive) or 8, self.value("peft.alpha", real) or 32.0
        for name, values in (("peft.dim", {"rank": rank}), ("peft.alpha", {"alpha": alpha})):
            self.put_or_default("adapter", values, name, "its default", self.show_if_there(name))
        self._read_targets()

    def _read_targets(self) -> None:
        everything, targets, others = "peft.match_all_linear", "peft.target_modules", "peft.exclude_modules"
        listed, without = (self._words(name) for name in (targets, others))
        if self.value(everything, yes):
            self.assume("adapter", {"targets": []}, self.show(everything), "linear layers of blocks, without the head")
            return
        patterns = listed or ([] if without else ["*_proj"])
        matched = [each for each in _PROJECTIONS if any(_matches(pattern, each) for pattern in patterns)]
        odd = [each for each in patterns if not any(_matches(each, name) for name in _PROJECTIONS)]
        if without:
            heads = [each for each in without if not each.removeprefix("*").strip(".").endswith("lm_head")]
            matched, odd = list(_PROJECTIONS), heads
        if odd:
            name = others if without else targets
            known = ", ".join(_PROJECTIONS)
            self.found.problems.append(f"{name} has {odd[0]}, which names no linear layer of every block: {known}")
            return
        values = {"targets": [] if len(matched) == len(_PROJECTIONS) else matched}
        name = others if without else targets
        self.put_or_default("adapter", values, name, "its default, *_proj", self.show_if_there(name))

    def _words(self, name: str) -> list[str]:
        """Words of an option that takes one or a list of them."""
        value = self.known(name, self.options[name]) if self.has(name) else None
        return [str(each) for each in value] if isinstance(value, list) else [str(value)] if value is not None else []


def _matches(pattern: str, name: str) -> bool:
    """True if a pattern of module names takes a layer of all blocks."""
    return fnmatchcase(name, pattern.removeprefix("*."))


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of values by dotted name, with those that are None."""
    tables: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        table = tables
        for key in path:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise InvalidConfig(f"model.config.{name} lies in no table")
        table[last] = value
    return tables


def _list_fields(shape: ModelShape) -> dict[str, Any]:
    """Fields of a model that are no defaults, as [model] has them."""
    values, defaults = asdict(shape), {each.name: each.default for each in fields(ModelShape)}
    return {
        name: value
        for name, value in values.items()
        if defaults[name] is MISSING or getattr(shape, name) != defaults[name]
    }
