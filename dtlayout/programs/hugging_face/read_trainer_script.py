"""Scripts of Hugging Face's Trainer, read: a command that starts a program with the Trainer's arguments.

`accelerate launch --config_file X train.py …`, `deepspeed train.py --deepspeed ds.json …`, `torchrun … --fsdp …`. Words
that the program itself has for an adapter or for the length are those that are usual.
"""

import re
from typing import Any

from dtlayout.programs.command_line import find_command, read_options
from dtlayout.programs.hugging_face import trainer
from dtlayout.programs.hugging_face.read_trainer import TrainerReader, read_job
from dtlayout.programs.hugging_face.trainer import Dialect
from dtlayout.programs.launchers import read_launch
from dtlayout.programs.options import yes
from dtlayout.programs.program import Job
from dtlayout.programs.understood import OtherFile, Understood

SCRIPT = Dialect(
    title="Hugging Face's Trainer",
    names={
        "max_length": ("max_length", "max_seq_length", "model_max_length", "block_size", "max_seq_len", "cutoff_len",
                       "max_source_length", "seq_length"),
        "model_name_or_path": ("model_name_or_path", "model_name", "base_model", "model_id", "model"),
        "use_peft": ("use_peft", "use_lora", "lora_enable", "lora", "peft"),
        "lora_r": ("lora_r", "lora_rank"),
        "lora_target_modules": ("lora_target_modules", "target_modules", "lora_target"),
        "load_in_4bit": ("load_in_4bit", "use_4bit", "q_lora", "use_4bit_quantization"),
        "load_in_8bit": ("load_in_8bit", "use_8bit", "use_8bit_quantization"),
        "bnb_4bit_quant_type": ("bnb_4bit_quant_type", "quant_type"),
        "attn_implementation": ("attn_implementation", "attention_implementation"),
        "use_flash_attention_2": ("use_flash_attention_2", "use_flash_attn", "use_flash_attn_2", "flash_attn"),
        "use_liger_kernel": ("use_liger_kernel", "use_liger"), "dtype": ("dtype", "torch_dtype"),
        "lora_modules_to_save": ("lora_modules_to_save", "modules_to_save"),
        "gradient_checkpointing": ("gradient_checkpointing", "use_gradient_checkpointing"),
    },
)  # fmt: skip
"""Words of a program of one's own."""
_OURS = (
    r"--(per_device_train_batch_size|gradient_accumulation_steps|fsdp|deepspeed)[ =]|\baccelerate\s+launch\b"
    r"|\bdeepspeed\s[^\n]*\.py\b"
)
"""Pattern of a text with such a command."""
_MARKS = ("--per_device_train_batch_size", "--deepspeed", "--fsdp", "--gradient_checkpointing")


def choose_options(job: Job) -> tuple[dict[str, Any], list[str]]:
    """Options of the command that all but the model decides, and gaps; None for one that is left out."""
    return trainer.choose_options(job, SCRIPT)


def is_ours(file: OtherFile) -> bool:
    """True for a text with a command that starts a program by a launcher, or with the Trainer's arguments."""
    if file.tree is not None:
        return False
    return re.search(_OURS, file.text) is not None


def read(file: OtherFile) -> Understood:
    """The job of a command; what is not understood is in its `problems`."""
    found = Understood("accelerate", SCRIPT.title)
    command = find_command(file, _starts_it)
    launched = read_launch(command, file, found)
    options = to_words(read_options(launched.own, found))
    return read_job(file, options, SCRIPT, launched.accelerate, found, ScriptReader)


def _starts_it(word: str) -> bool:
    return word.startswith(_MARKS) or word.rpartition("/")[2] in ("accelerate", "deepspeed")


def to_words(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a command by their names in a file: with underscores, and --no_X as X = false."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        plain = name.replace("-", "_")
        found |= {plain.removeprefix("no_"): False} if plain.startswith("no_") and value is True else {plain: value}
    return found


class ScriptReader(TrainerReader):
    """Reads a command whose program has words of its own."""

    def read_adapter(self) -> None:
        """An adapter is also asked for by its rank alone, or by a base in few bits."""
        asked = self.says("use_peft") or self.says("lora_r") or self.ask_base()
        if self.says("use_peft") or not asked:
            super().read_adapter()
        else:
            name = "lora_r" if self.says("lora_r") else "load_in_4bit" if self.says("load_in_4bit") else "load_in_8bit"
            self.put_adapter(self.shown(name))

    def ask_base(self) -> bool:
        """True if frozen weights lie in few bits."""
        return bool(self.ask("load_in_4bit", yes) or self.ask("load_in_8bit", yes))
