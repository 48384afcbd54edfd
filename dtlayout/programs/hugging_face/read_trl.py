"""TRL, read: the YAML file of supervised fine-tuning, or the command that starts it.

Files of releases before 0.20 are told by max_seq_length, and those before 1.0 by torch_dtype: they have other defaults.
"""

import re
from collections.abc import Mapping
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.command_line import find_command, read_options
from dtlayout.programs.hugging_face.read_accelerate import AccelerateReader
from dtlayout.programs.hugging_face.read_trainer import TrainerReader, read_job
from dtlayout.programs.hugging_face.read_trainer_script import to_words
from dtlayout.programs.hugging_face.trl import OLDER, TRL
from dtlayout.programs.hugging_face.words_reader import read_beside
from dtlayout.programs.launchers import read_launch
from dtlayout.programs.options import string, yes
from dtlayout.programs.shell.script import Command
from dtlayout.programs.understood import OtherFile, Row, Understood

_ZERO = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16"}
_FSDP = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 8}
_FULL, _AGAIN = "fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward"
NAMED: Mapping[str, Mapping[str, Any]] = {
    "single_gpu": {"distributed_type": "NO", "num_processes": 1, "mixed_precision": "bf16"},
    "multi_gpu": {"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "bf16"},
    "fsdp1": {**_FSDP, "fsdp_config.fsdp_version": 1, _FULL: "FULL_SHARD"},
    "fsdp2": {**_FSDP, "fsdp_config.fsdp_version": 2, _AGAIN: True},
    **{f"zero{stage}": {**_ZERO, "num_processes": 8, "deepspeed_config.zero_stage": stage} for stage in (1, 2, 3)},
}  # fmt: skip
"""Value of accelerate_config that is a file of TRL's own → what it says that counts here."""
_LAUNCH = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids",
           "mixed_precision", "dynamo_backend", "multi_gpu", "use_fsdp", "use_deepspeed")  # fmt: skip
"""Options of `accelerate launch`, which TRL passes on."""
_MARKS = {"dataset_name", "datasets", "dataset_mixer", "per_device_train_batch_size", "output_dir", "learning_rate",
          "max_length", "max_seq_length", "packing", "use_peft", "gradient_checkpointing"}  # fmt: skip
_OTHERS = {"base_model", "stage", "finetuning_type", "template", "cutoff_len", "trainer", "recipe", "_target_"}
_TRAINERS = ("sft", "dpo", "grpo", "kto", "reward", "rloo", "orpo", "cpo", "ppo", "gkd", "online_dpo")
_PROGRAM = r"(?:run_)?sft(?:_\w+)?\.py"
_SCRIPT = rf"\btrl\s+({'|'.join(_TRAINERS)})\b|(?<![\w.]){_PROGRAM}\b|\btrl\.scripts\.\w+"
_FLASH = ("flash-attn", "fa3")


def is_ours(file: OtherFile) -> bool:
    """True for a YAML file with ModelConfig's and SFTConfig's names, and for a command that starts TRL."""
    if file.tree is None:
        return re.search(_SCRIPT, file.text) is not None
    names = {name.partition(".")[0] for name in file.tree.values}
    return "model_name_or_path" in names and bool(names & _MARKS) and not names & _OTHERS


def read(file: OtherFile) -> Understood:
    """The job of a YAML file or of a command; what is not understood is in its `problems`."""
    found = Understood("accelerate", TRL.title)
    if file.tree is not None:
        return _read_options(file, dict(file.tree.values), found, None)
    command = find_command(file, _starts_it)
    _check_trainer(command)
    launched = read_launch(command, file, found, _TRAINERS)
    words = list(launched.own)
    positional = words.pop(0) if words and words[0].endswith((".yaml", ".yml")) else None
    options = to_words(read_options(words, found))
    path = positional or options.pop("config", None)
    if path is not None:
        _, values = read_beside(path, file, "config")
        found.rows.append(Row(f"config = {path}", "its values", "read"))
        for name in [name for name in values if name in options]:
            found.ignore(f"{name} = {values[name]}", "the command says it too", "no effect")
        options = {**values, **options}
    return _read_options(file, options, found, launched.accelerate)


def _starts_it(word: str) -> bool:
    name = word.rpartition("/")[2]
    return name == "trl" or re.fullmatch(_PROGRAM, name) is not None or word.startswith("trl.scripts.")


def _check_trainer(command: Command) -> None:
    words = [word.rpartition("/")[2].rpartition(".")[2] for word in command.words]
    other = next((word for word in words if word in _TRAINERS and word != "sft"), None)
    if other and ("trl" in command.words or any(word.startswith("trl.scripts.") for word in command.words)):
        raise InvalidConfig(
            f"trl {other} has other models beside the one that is trained, and is not predicted; trl sft is"
        )


def _read_options(
    file: OtherFile, options: dict[str, Any], found: Understood, launch: AccelerateReader | None
) -> Understood:
    said = {name: options.pop(name) for name in _LAUNCH if name in options}
    named = options.get("accelerate_config")
    if launch is None and (said or named is not None):
        values = _find_named(named, file, found) if named is not None else {}
        launch = AccelerateReader(found, values, file, said)
    if launch is None and found.num_gpus == 0:
        _count_visible(options, found)
    return read_job(file, options, TRL, launch, found, TrlReader)


def _find_named(name: Any, file: OtherFile, found: Understood) -> Mapping[str, Any]:
    if isinstance(name, str) and name in NAMED:
        found.rows.append(Row(f"accelerate_config = {name}", "the values of that name", "read"))
        return NAMED[name]
    found.rows.append(Row(f"accelerate_config = {name}", "its values", "read"))
    return read_beside(name, file, "accelerate_config")[1]


def _count_visible(options: Mapping[str, Any], found: Understood) -> None:
    visible = str(options.get("env.CUDA_VISIBLE_DEVICES", ""))
    if visible and all(each.strip().isdigit() for each in visible.split(",")):
        found.num_gpus = found.gpus_per_node = len(visible.split(","))
        found.rows.append(Row(f"env.CUDA_VISIBLE_DEVICES = {visible}", f"{found.num_gpus} GPUs", "read"))


class TrlReader(TrainerReader):
    """Reads TRL's words."""

    def usual(self, name: str, default: Any = None) -> Any:
        """TRL's default of an option, in the release that the file is of."""
        is_older = self.options.get("max_seq_length") is not None
        if is_older and name in OLDER:
            return OLDER[name]
        if name == "loss_type" and (is_older or {"torch_dtype", "use_liger"} & self.options.keys()):
            return "nll"
        return super().usual(name, default)

    def read_offload(self) -> None:
        """Fill in what keeps activations on the host."""
        if self.ask("activation_offloading", yes):
            self.spread.keeps_on_host = self.shown("activation_offloading")

    def put_loss(self) -> None:
        """Put the loss, of all logits or chunk after chunk with the head's matmul."""
        words = {"nll": "eager", "chunked_nll": "linear", "dft": "eager"}
        said = self.select("loss_type", words)
        if said is None and self.says("loss_type"):
            return
        ours = said or words[self.usual("loss_type")]
        note = "" if said else f"its default, {self.usual('loss_type')}"
        self.found.put("kernels", {"loss": ours}, self.shown("loss_type"), "assumed" if note else "read", note)

    def read_data(self) -> None:
        """Put how samples are made; packed documents do not attend to each other beside flash attention, but with the
        strategy that cuts them."""
        packs = self.ask("packing", yes)
        strategy = self.ask("packing_strategy", string) or "bfd"
        if strategy not in ("bfd", "bfd_split", "bfd-requeue", "ffd", "wrapped"):
            self.found.problems.append(f"packing_strategy={strategy} is nothing that is known here; use bfd or wrapped")
        if not packs and self.says("packing_strategy"):
            self.found.ignore(self.shown("packing_strategy"), "without packing", "no effect")
        is_cut = strategy == "wrapped" or self.options.get("max_seq_length") is not None
        masks = not is_cut and self.found.get("kernels", "attention") in _FLASH
        shown = self.shown("packing") if not self.says("packing_strategy") or not packs else (
            f"{self.shown('packing')}, {self.shown('packing_strategy')}"
        )  # fmt: skip
        self.put_samples(bool(packs), shown, is_said=packs is not None, masks=masks)

    def read_more(self) -> None:
        """Say what does not go together."""
        if self.says("loss_type") and self.found.get("kernels", "norm") == "liger":
            self.found.ignore(self.shown("loss_type"), "use_liger_kernel has a loss of its own", "no effect")
