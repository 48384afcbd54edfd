"""LLaMA-Factory, read: its YAML file, or the command that starts it.

Weights are loaded in the format of mixed precision, and those that are trained are kept in float32 but with pure_bf16.
Blocks are recomputed unless disable_gradient_checkpointing is set.
"""

import re
from typing import Any

from dtlayout.programs.command_line import find_command, read_options
from dtlayout.programs.hugging_face.llama_factory import ATTENTION, LLAMA_FACTORY
from dtlayout.programs.hugging_face.read_trainer import TrainerReader, read_job
from dtlayout.programs.hugging_face.read_trainer_script import to_words
from dtlayout.programs.hugging_face.words_reader import read_beside
from dtlayout.programs.launchers import read_launch
from dtlayout.programs.options import string, whole, yes
from dtlayout.programs.understood import OtherFile, Row, Understood

_MARKS = {"finetuning_type", "stage", "cutoff_len", "template", "lora_target", "dataset_dir"}
_COMMAND = r"\bllamafactory-cli\b|\bllamafactory\.launcher\b|--finetuning_type\b|\bsrc/train(_bash)?\.py\b"
_REFUSED = {
    "use_unsloth": "unsloth's kernels are not predicted", "use_galore": "GaLore is not predicted; adamw_torch is",
    "use_apollo": "APOLLO is not predicted; adamw_torch is", "use_badam": "BAdam is not predicted; adamw_torch is",
    "use_adam_mini": "Adam-mini is not predicted; adamw_torch is", "use_muon": "Muon is not predicted; adamw_torch is",
    "use_llama_pro": "expanded blocks are not predicted", "shift_attn": "shifted attention is not predicted",
    "mixture_of_depths": "mixtures of depths are not predicted", "use_mca": "Megatron Core beneath it is not predicted",
    "use_kt": "experts on the host are not predicted", "use_dft_loss": "the DFT loss is not predicted",
    "freeze_language_model": "a part of the weights is trained, which is not predicted",
}  # fmt: skip
"""Option that has to be off → the reason."""
_STAGES = {"sft": "sft", "pt": "pt"}


def is_ours(file: OtherFile) -> bool:
    """True for a YAML file with LLaMA-Factory's names, and for a command that starts it."""
    if file.tree is None:
        return re.search(_COMMAND, file.text) is not None
    names = {name.partition(".")[0] for name in file.tree.values}
    return "model_name_or_path" in names and len(names & _MARKS) > 1


def read(file: OtherFile) -> Understood:
    """The job of a YAML file or of a command; what is not understood is in its `problems`."""
    found = Understood("accelerate", LLAMA_FACTORY.title)
    if file.tree is not None:
        return read_job(file, file.tree.values, LLAMA_FACTORY, None, found, LlamaFactoryReader)
    command = find_command(file, lambda word: re.search(_COMMAND, word) is not None)
    launched = read_launch(command, file, found, ("train",))
    words = list(launched.own)
    values: dict[str, Any] = {}
    if words and words[0].endswith((".yaml", ".yml", ".json")):
        path = words.pop(0)
        values = dict(read_beside(path, file, "the config")[1])
        found.rows.append(Row(path, "its values", "read"))
    pairs = [word.partition("=") for word in words if "=" in word and not word.startswith("-")]
    said: dict[str, Any] = {name: value for name, _, value in pairs}
    said |= to_words(read_options([word for word in words if "=" not in word or word.startswith("-")], found))
    for name in [name for name in values if name in said]:
        found.ignore(f"{name} = {values[name]}", "the command says it too", "no effect")
    return read_job(file, {**values, **said}, LLAMA_FACTORY, launched.accelerate, found, LlamaFactoryReader)


class LlamaFactoryReader(TrainerReader):
    """Reads LLaMA-Factory's words."""

    def read_more(self) -> None:
        """Refuse what trains other weights, or in another way."""
        for name, why in _REFUSED.items():
            self.need(name, (False, None, ""), why)
        if self.select("stage", _STAGES) is None and not self.says("stage"):
            self.found.ignore("stage", "its default, sft", "assumed")

    def read_offload(self) -> None:
        """Fill in what keeps activations on the host."""
        if self.ask("use_unsloth_gc", yes):
            self.spread.keeps_on_host = self.shown("use_unsloth_gc")

    # Weights and formats

    def read_adapter(self) -> None:
        """Put the adapter; LoRA is trained where nothing says otherwise."""
        kind = self.select("use_peft", {"lora": "lora", "full": "full"})
        if kind == "full":
            self.ignore_adapter("with finetuning_type full")
        elif kind == "lora" or not self.says("use_peft"):
            self.put_adapter(self.shown("use_peft"))

    def put_usual_targets(self, shown: str) -> None:
        """Put all linear layers of blocks, which are ours without targets."""
        self.found.ignore(shown, "its default: all linear layers of blocks", "assumed")

    def read_base(self) -> None:
        """Put the base by its bits."""
        bits = self.ask("quantization_bit", whole)
        if bits is None:
            for name in ("quantization_method", "quantization_type", "double_quantization"):
                if self.says(name):
                    self.found.ignore(self.show(name), "without quantization_bit", "no effect")
            return
        method = self.ask("quantization_method", string) or "bnb"
        if method.lower() not in ("bnb", "bitsandbytes"):
            self.found.problems.append(f"quantization_method={method} is not predicted; bnb is")
        elif bits not in (4, 8):
            self.found.problems.append(f"quantization_bit={bits} is not predicted; 4 or 8 is")
        else:
            self.put_base("nf4" if bits == 4 else "int8", self.show("quantization_bit"))
        if self.select("bnb_4bit_quant_type", {"nf4": "nf4", "fp4": "fp4"}) == "fp4":
            self.found.ignore(self.shown("bnb_4bit_quant_type"), "predicted as nf4, of as many bits", "assumed")

    def read_mixed(self) -> tuple[str, str]:
        """The format of mixed precision, or of all with pure_bf16."""
        flag, shown = super().read_mixed()
        if not self.ask("pure_bf16", yes):
            return flag, shown
        if flag:
            self.found.problems.append(
                f"pure_bf16 and {shown} are both said: LLaMA-Factory refuses that; leave out one"
            )
        self.spread.casts = False
        return "bfloat16", self.shown("pure_bf16")

    @property
    def loaded(self) -> tuple[str, str]:
        """Format of weights: frozen ones as they are computed with, trained ones in float32."""
        flag, shown = self.read_mixed()
        if "adapter" in self.found.tables:
            return flag or "bfloat16", shown or "the checkpoint"
        if self.ask("pure_bf16", yes):
            return "bfloat16", shown
        return "", ""

    # Recomputation, kernels and data

    def read_recompute(self) -> None:
        """Put the recomputation, which is on unless it is disabled."""
        off = self.ask("disable_gradient_checkpointing", yes)
        on = self.ask("gradient_checkpointing", yes)
        if off and on:
            self.found.problems.append("disable_gradient_checkpointing and gradient_checkpointing are both true")
        if off is None and on is None:
            self.put_recompute(True, False)
            return
        name = "disable_gradient_checkpointing" if off is not None else "gradient_checkpointing"
        recomputes = not off if off is not None else True
        if self.spread.recomputes and recomputes:
            self.put_recompute(recomputes, is_said=on is not None)
        else:
            self.found.put("layout", {"recompute": "full" if recomputes else "none"}, self.show(name))
        if on is False and not off:
            self.found.ignore(
                self.show("gradient_checkpointing"), "disable_gradient_checkpointing turns it off", "no effect"
            )

    def read_attention(self) -> None:
        """Put the kernel of attention."""
        said = self.select("flash_attn", ATTENTION)
        if said is None and self.says("flash_attn"):
            return
        self.found.put("kernels", {"attention": said or "sdpa-flash"}, self.shown("flash_attn"),
                       "read" if said else "assumed", "" if said else "its default, auto: sdpa")  # fmt: skip

    def read_kernels(self) -> None:
        """Put the kernels, and matmuls in fp8."""
        super().read_kernels()
        if self.ask("fp8", yes):
            self.need("fp8_backend", ("auto", "torchao", "te"), "only torchao's and Transformer Engine's are predicted")
            self.found.put("precision", {"matmuls": "fp8-tensorwise"}, self.shown("fp8"))

    def read_data(self) -> None:
        """Put how samples are made; packed documents attend to each other unless neat_packing keeps them apart."""
        neat, packs = self.ask("neat_packing", yes), self.ask("packing", yes)
        is_pretraining = self.options.get("stage") == "pt"
        is_packed = bool(neat) or (is_pretraining if packs is None else packs)
        name = "neat_packing" if neat else "packing"
        is_said = neat is not None or packs is not None
        shown = self.show(name) if self.options.get(name) is not None else name
        self.put_samples(is_packed, shown, is_said=is_said, masks=bool(neat))
