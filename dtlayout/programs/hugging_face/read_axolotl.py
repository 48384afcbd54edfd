"""axolotl, read: its YAML file, or the command that starts it.

Weights are loaded in the format of mixed precision. FSDP is asked for by a list `fsdp`, or by fsdp_config alone.
"""

import re
from typing import Any

from dtlayout.programs.command_line import find_command, read_options
from dtlayout.programs.hugging_face.axolotl import AXOLOTL, LIGER_OPTIONS, LIGER_PLUGIN, RINGS
from dtlayout.programs.hugging_face.read_trainer import TrainerReader, read_job
from dtlayout.programs.hugging_face.read_trainer_script import to_words
from dtlayout.programs.hugging_face.trainer import ATTENTION, PLAIN
from dtlayout.programs.hugging_face.words_reader import read_beside
from dtlayout.programs.launchers import read_launch
from dtlayout.programs.options import positive, yes
from dtlayout.programs.understood import OtherFile, Row, Understood

_MARKS = {"micro_batch_size", "sequence_len", "datasets", "adapter", "sample_packing", "pretraining_dataset"}
_FLAGS = {
    "flash_attention": "flash-attn", "sdp_attention": "sdpa-flash", "eager_attention": "torch",
    "xformers_attention": "sdpa-efficient",
}  # fmt: skip
"""Flag of a kernel of attention → ours."""
_WORDS = {"flash": "flash-attn", "sdpa": "sdpa-flash", "eager": "torch", "xformers": "sdpa-efficient"}
_LOSSES = {"flash_attn_cross_entropy": "chunked", "unsloth_cross_entropy_loss": "chunked",
           "chunked_cross_entropy": "chunked", "cut_cross_entropy": "linear"}  # fmt: skip
"""Option of the loss's kernel → ours."""
_CUT_PLUGIN = "CutCrossEntropyPlugin"
_REFUSED = {
    "rl": "preferences have other models beside the one that is trained, which is not predicted",
    "reward_model": "models with a head of their own are not predicted",
    "process_reward_model": "models with a head of their own are not predicted",
    "unfrozen_parameters": "a part of the weights is trained, which is not predicted",
    "relora": "ReLoRA is not predicted; LoRA is", "relora_steps": "ReLoRA is not predicted; LoRA is",
    "gptq": "weights of GPTQ are not predicted; load_in_4bit is",
    "s2_attention": "shifted attention is not predicted; flash_attention is",
    "flex_attention": "flex attention is not predicted; flash_attention is",
    "sage_attention": "SageAttention is not predicted; flash_attention is",
    "peft_layers_to_transform": "adapters of some blocks are not predicted; those of all are",
    "lora_target_parameters": "adapters of stacks are not predicted",
    "lisa_n_layers": "a part of the weights is trained, which is not predicted",
}  # fmt: skip
"""Option that has to be off → the reason."""
_OFF: tuple[Any, ...] = (False, None, "", [])
_DEGREES = {
    "tensor_parallel_size": "tp", "context_parallel_size": "cp", "sequence_parallel_degree": "cp",
    "dp_replicate_size": "dp_replicate", "dp_shard_size": "dp_shard",
}  # fmt: skip
"""Option → degree of ours; sequence_parallel_degree is the earlier name of context_parallel_size."""
_NESTED = {"peft.backend", "peft.weight_dtype", "peft.group_size"}
_COMMAND = r"\baxolotl\s+(?:train|preprocess)\b|axolotl\.cli\.train|\bscripts/finetune\.py"


def is_ours(file: OtherFile) -> bool:
    """True for a YAML file with base_model and axolotl's names, and for a command that starts it."""
    if file.tree is None:
        return re.search(_COMMAND, file.text) is not None
    names = {name.partition(".")[0] for name in file.tree.values}
    return "base_model" in names and len(names & _MARKS) > 1


def read(file: OtherFile) -> Understood:
    """The job of a YAML file or of a command; what is not understood is in its `problems`."""
    found = Understood("accelerate", AXOLOTL.title)
    if file.tree is not None:
        return read_job(file, file.tree.values, AXOLOTL, None, found, AxolotlReader)
    command = find_command(file, lambda word: re.search(r"axolotl|scripts/finetune\.py", word) is not None)
    launched = read_launch(command, file, found, ("train", "preprocess"))
    words = list(launched.own)
    path = words.pop(0) if words and not words[0].startswith("-") else ""
    _, values = read_beside(path, file, "the config")
    found.rows.append(Row(f"{path}", "its values", "read"))
    passed = words[words.index("--") + 1 :] if "--" in words else []
    said = to_words(read_options(words[: words.index("--")] if "--" in words else words, found))
    for name in [name for name in values if name in said]:
        found.ignore(f"{name} = {values[name]}", "the command says it too", "no effect")
    _read_passed(passed, found)
    return read_job(file, {**values, **said}, AXOLOTL, launched.accelerate, found, AxolotlReader)


def _read_passed(words: list[str], found: Understood) -> None:
    """Note the GPUs of options that are passed on to the launcher, behind two dashes."""
    options = to_words(read_options(words, found))
    per_node, nodes = (str(options.get(name, "")) for name in ("nproc_per_node", "nnodes"))
    world, machines = (str(options.get(name, "")) for name in ("num_processes", "num_machines"))
    if per_node.isdigit():
        found.gpus_per_node, found.num_gpus = int(per_node), int(per_node) * int(nodes or 1)
    elif world.isdigit():
        found.num_gpus, found.gpus_per_node = int(world), int(world) // int(machines or 1)
    for name, value in options.items():
        is_count = name in ("nproc_per_node", "nnodes", "num_processes", "num_machines")
        if is_count:
            found.rows.append(Row(f"{name} = {value}", f"{found.num_gpus} GPUs", "read"))
        else:
            found.ignore(f"{name} = {value}", "about how ranks meet")


class AxolotlReader(TrainerReader):
    """Reads axolotl's words."""

    def read_more(self) -> None:
        """Refuse what trains other weights, or in another way."""
        for name, why in _REFUSED.items():
            self.need(name, _OFF, why)
        self.need("expert_parallel_size", (1,), "expert parallelism is not predicted")

    # Sharding

    def has_fsdp(self) -> bool:
        """FSDP is asked for by the list, or by its config alone."""
        inside = [name for name in self.options if name.startswith("fsdp_config.") and self.options[name] is not None]
        return super().has_fsdp() or bool(inside)

    def read_fsdp(self) -> None:
        """Fill in FSDP; its version may stand beside its config."""
        super().read_fsdp()
        self.spread.shown = self.spread.shown if "=" in self.spread.shown else "fsdp_config"

    def read_degrees(self) -> None:
        """Fill in the degrees, and the way to attend over cp."""
        shown = []
        for name, key in _DEGREES.items():
            if (size := self.ask(name, positive)) is not None and (size > 1 or key.startswith("dp")):
                self.spread.degrees[key] = size
                shown.append(self.shown(name))
        self.spread.degrees_shown = ", ".join(shown)
        function = self.select("ring_attn_func", RINGS)
        if self.spread.degrees.get("cp", 1) > 1:
            packs = self.ask("sample_packing", yes)
            self.spread.cp_method = function or ("gather" if packs else "ring")
        elif function:
            self.found.ignore(self.shown("ring_attn_func"), "context_parallel_size is 1", "no effect")

    def read_offload(self) -> None:
        """Fill in what keeps activations on the host."""
        value = self.options.get("gradient_checkpointing")
        if str(value).lower() in ("offload", "unsloth"):
            self.spread.keeps_on_host = self.shown("gradient_checkpointing")
        words = {True: True, False: False, "true": True, "false": False, "legacy": True, "hidden_states": True}
        if self.select("activation_offloading", words):
            self.spread.keeps_on_host = self.shown("activation_offloading")

    def read_recompute(self) -> None:
        """Put the recomputation; it may keep its inputs on the host."""
        words = {True: True, False: False, "true": True, "false": False, "offload": True, "unsloth": True}
        said = self.select("gradient_checkpointing", words)
        if said is not None or not self.says("gradient_checkpointing"):
            self.put_recompute(bool(said), said is not None)

    # Weights and formats

    def read_adapter(self) -> None:
        """Put the adapter that `adapter` names."""
        kind = self.select("use_peft", {"lora": "lora", "qlora": "qlora"})
        if kind is None:
            self.ignore_adapter("without adapter", "lora_target_linear")
            return
        self.put_adapter(self.shown("use_peft"))
        four = self.ask("load_in_4bit", yes) or self.options.get("peft.weight_dtype") in ("nf4", "int4")
        if kind == "qlora" and not four:
            self.found.problems.append("adapter=qlora without load_in_4bit: axolotl refuses that; use lora")

    def read_targets(self) -> None:
        """Put the targets: named ones, with all linear layers where that is asked for."""
        if self.ask("lora_target_linear", yes):
            self.says("lora_target_modules")
            self.found.rows.append(Row(self.shown("lora_target_linear"), "all linear layers of blocks", "read"))
        else:
            super().read_targets()

    def put_usual_targets(self, shown: str) -> None:
        """Refuse an adapter whose targets are not said."""
        self.found.problems.append("adapter has no targets: lora_target_linear or lora_target_modules says them")

    def read_base(self) -> None:
        """Put the base: bitsandbytes' flags, or the table peft."""
        super().read_base()
        for name in _NESTED:
            self.says(name)
        kind = self.options.get("peft.weight_dtype")
        if kind is not None and self.found.get("precision", "base") is None:
            base = {"nf4": "nf4", "int4": "nf4", "int8": "int8"}.get(str(kind))
            if base is None:
                self.found.problems.append(f"peft.weight_dtype={kind} is nothing that is known here; use nf4 or int8")
            else:
                self.put_base(base, self.show("peft.weight_dtype"))

    def read_mixed(self) -> tuple[str, str]:
        """The format of mixed precision; auto is bf16, which GPUs since Ampere have."""
        words = {True: True, False: False, "true": True, "false": False, "auto": True, "full": True}
        bf16, fp16 = self.select("bf16", words), self.ask("fp16", yes)
        if bf16 and fp16 and str(self.options["bf16"]).lower() != "auto":
            self.found.problems.append("bf16 and fp16 are both true, and one format is computed in")
        if fp16:
            return "float16", self.shown("fp16")
        if bf16:
            return "bfloat16", self.shown("bf16")
        for name, ours in (("bfloat16", "bfloat16"), ("float16", "float16")):
            if self.ask(name, yes):
                self.spread.casts = False
                return ours, self.shown(name)
        return "", ""

    @property
    def loaded(self) -> tuple[str, str]:
        """Format in which weights are loaded: that of mixed precision."""
        flag, shown = self.read_mixed()
        return (flag or "float32"), shown or "bf16"

    # Kernels and data

    def read_attention(self) -> None:
        """Put the kernel of attention, which one of several flags says."""
        flags = [name for name in _FLAGS if self.ask(name, yes)]
        said = self.select("attn_implementation", {**ATTENTION, **_WORDS})
        named = self.select("attention", {**ATTENTION, **_WORDS})
        ours = [*(_FLAGS[name] for name in flags), *([said] if said else []), *([named] if named else [])]
        shown = [*map(self.shown, flags), *([self.shown("attn_implementation")] if said else []),
                 *([self.shown("attention")] if named else [])]  # fmt: skip
        if len(set(ours)) > 1:
            self.found.problems.append(f"{' and '.join(shown)} name several kernels of attention: use one")
        for again in shown[1:] if len(set(ours)) == 1 else []:
            self.found.ignore(again, f"{shown[0]} says it", "no effect")
        self.found.put("kernels", {"attention": ours[0] if ours else "sdpa-flash"}, shown[0] if shown else "",
                       "read" if shown else "assumed", "" if shown else "transformers' default, sdpa")  # fmt: skip

    def put_loss(self) -> None:
        """Put Liger's kernels, each for itself, and the loss."""
        plugins = self.options.get("plugins") or []
        self.says("plugins")
        names = [str(each) for each in (plugins if isinstance(plugins, list) else [plugins])]
        has_liger = any("liger" in each.lower() for each in names)
        kernels: dict[str, str] = {}
        shown = []
        for option, (ours, value) in LIGER_OPTIONS.items():
            if not self.says(option) or not self.ask(option, yes):
                continue
            if not has_liger:
                self.found.ignore(self.shown(option), f"without {LIGER_PLUGIN} in plugins", "no effect")
                continue
            kernels.setdefault(ours, value)
            shown.append(self.shown(option))
        for option, value in _LOSSES.items():
            asked = self.ask(option, yes)
            if option == "cut_cross_entropy" and asked is None:
                asked = any(_CUT_PLUGIN in each for each in names)
            if asked:
                kernels.setdefault("loss", value)
                shown.append(self.shown(option) if self.says(option) else _CUT_PLUGIN)
        if kernels:
            self.found.put("kernels", kernels, ", ".join(shown))
        if "loss" not in kernels:
            self.assume("kernels", {"loss": PLAIN["loss"]}, "", "transformers' loss, of all logits in fp32")

    def read_kernels(self) -> None:
        """Put the kernels, and matmuls in fp8."""
        compiles = self.options.get("torch_compile")
        if str(compiles).lower() == "auto":
            self.options = {**self.options, "torch_compile": False}
            self.found.ignore("torch_compile = auto", "predicted as if it were not there", "assumed")
        super().read_kernels()
        if self.ask("fp8", yes):
            self.found.put("precision", {"matmuls": "fp8-tensorwise"}, self.shown("fp8"))

    def read_steps(self) -> int | None:
        """Steps of accumulation, which the batch of a GPU may say."""
        total, micro = self.ask("batch_size", positive), self.found.get("layout", "micro_batch", 1)
        said = super().read_steps()
        if total and said:
            self.found.problems.append("batch_size and gradient_accumulation_steps are both said: use one")
        if total and total % micro:
            self.found.problems.append(f"batch_size={total} is no multiple of micro_batch_size={micro}")
        return max(1, total // micro) if total else said

    def read_data(self) -> None:
        """Put how samples are made; documents that share one do not attend to each other."""
        packs = self.ask("sample_packing", yes)
        masks = self.found.get("kernels", "attention") in ("flash-attn", "fa3", "sdpa-flash")
        self.put_samples(bool(packs), self.shown("sample_packing"), is_said=packs is not None, masks=masks)
        if self.ask("batch_flattening", yes):
            self.found.ignore(self.shown("batch_flattening"), "predicted with all samples of full length", "assumed")
