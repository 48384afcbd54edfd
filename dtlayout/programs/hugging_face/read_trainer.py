"""Hugging Face's Trainer, read: TrainingArguments and PEFT's words in a program's file, with the files beside it.

accelerate's YAML, the options of its command and DeepSpeed's JSON say parts of the same thing. What is about data, logs
and checkpoints changes no prediction.
"""

from collections.abc import Mapping
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.files.trees import read_tree
from dtlayout.programs.hugging_face import accelerate, read_accelerate, read_deepspeed
from dtlayout.programs.hugging_face.read_accelerate import AccelerateReader
from dtlayout.programs.hugging_face.read_deepspeed import ZeroReader
from dtlayout.programs.hugging_face.spread import Spread, settle_formats, settle_layout
from dtlayout.programs.hugging_face.trainer import (
    ATTENTION,
    LIGER,
    OPTIMS,
    OPTIONS,
    PLAIN,
    USUAL_TARGETS,
    Dialect,
)
from dtlayout.programs.hugging_face.words_reader import Names, WordsReader, flatten, join_patterns, read_beside
from dtlayout.programs.model_names import find_model
from dtlayout.programs.options import Option, positive, real, string, yes
from dtlayout.programs.understood import OtherFile, Row, Understood

IGNORED: Mapping[str, str] = {
    "where a run writes, and its logs": r"output_dir|overwrite_output_dir|run_name|logging_.*|log_.*|report_to"
    r"|push_to_hub.*|hub_.*|disable_tqdm|project|trackio_.*|include_.*|skip_memory_metrics|debug|wandb_.*"
    r"|swanlab_.*|use_swanlab|plot_loss|profile.*",
    "evaluation": r"do_(train|eval|predict)|eval_.*|evaluation_strategy|per_device_eval_batch_size"
    r"|prediction_loss_only|metric_for_best_model|greater_is_better|load_best_model_at_end|batch_eval_metrics"
    r"|(bf16|fp16)_full_eval|predict_with_generate|generation_.*|compute_accuracy|early_stopping_.*",
    "checkpoints": r"save_.*|resume_from_checkpoint|ignore_data_skip|restore_callback_.*|enable_jit_checkpoint",
    "the number of steps, and chance": r"num_train_epochs|max_steps|seed|data_seed|full_determinism|tf32",
    "the course of the learning rate": r"lr_scheduler_.*|warmup_.*",
    "data": r"(eval_|train_)?dataset.*|(train|validation|test|data)_(file|path|files|dir)|dataloader_.*"
    r"|preprocessing_.*|remove_unused_columns|group_by_length|length_column_name|train_sampling_strategy|label_names"
    r"|max_(train|eval|predict)_samples|max_samples|streaming|overwrite_cache|tokenizer(_name.*|_path)?"
    r"|use_fast_tokenizer|chat_template.*|template|validation_split_percentage|lazy_preprocess|ignore_pad.*"
    r"|system_prompt|instruction_template|response_template|response_length|truncation_.*|shuffle_.*|split",
    "where weights come from": r"trust_remote_code|model_revision|revision|(hf_|hf_hub_|ms_hub_|om_hub_)?token"
    r"|use_auth_token|cache_dir|config_name|low_cpu_mem_usage|ddp_backend|model_code_revision",
    "how ranks meet": r"ddp_.*|local_rank|local-rank|accelerator_config(\..*)?|past_index|no_cuda|use_cpu|launcher",
    "noise, and the loss's weights": r"neftune_noise_alpha|label_smoothing_factor|completion_only_loss"
    r"|assistant_only_loss|train_on_(prompt|inputs)|mask_history|average_tokens_across_devices",
    "what an adapter begins with": r"lora_bias|peft_init_lora_weights|init_lora_weights|lora_fan_in_fan_out"
    r"|lora_task_type|loraplus_.*|lora_plus_.*",
}  # fmt: skip
"""Subject of options that change no prediction here → a pattern of their names."""
OTHERWISE = (
    r"lora_dropout|torch_compile_(backend|mode)|auto_find_batch_size|optim_args|use_cache|use_bnb_nested_quant"
    r"|bnb_4bit_use_double_quant|double_quant|bnb_4bit_compute_dtype|bnb_4bit_quant_storage|torch_empty_cache_steps"
    r"|pad_to_multiple_of|padding_free|jit_mode_eval|fp16_opt_level|fp16_backend|half_precision_backend|padding"
    r"|gradient_checkpointing_kwargs(\..*)?|ddp_bucket_cap_mb|fsdp_(transformer_layer_cls_to_wrap|min_num_params)"
)
"""Pattern of options that are predicted as if they were not there."""
FSDP_WORDS = r"(fsdp_)?(transformer_layer_cls_to_wrap|backward_prefetch(_policy)?|forward_prefetch|use_orig_params" \
    r"|limit_all_gathers|min_num_params|cpu_offload_pin_memory|mixed_precision_policy|xla.*)"  # fmt: skip
"""Pattern of FSDP's options that are predicted as if they were not there."""
FSDP_LOADING = r"(fsdp_)?((final_)?state_dict_type|cpu_ram_efficient_loading|sync_module_states)"
"""Pattern of FSDP's options for checkpoints, and for loading."""
_FSDP_KEYS = ("version", "sharding_strategy", "reshard_after_forward", "offload_params", "activation_checkpointing",
              "auto_wrap_policy")  # fmt: skip
_DTYPES = {each: each for each in ("bfloat16", "float16", "float32")} | {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16", "float": "float32", "auto": "auto",
}  # fmt: skip
_ADAPTER = ("lora_r", "lora_alpha", "lora_target_modules", "lora_dropout", "use_rslora", "use_dora",
            "lora_modules_to_save", "pissa_init")  # fmt: skip
"""Words of an adapter."""
_BNB = {"nf4": "nf4", "fp4": "fp4"}


class TrainerReader(WordsReader):
    """Reads a file whose program trains by Hugging Face's Trainer."""

    dialect: Dialect

    def __init__(
        self, found: Understood, options: Mapping[str, Any], dialect: Dialect, file: OtherFile,
        launch: AccelerateReader | None = None,
    ):  # fmt: skip
        """`launch` reads what accelerate is told beside the file, where it starts the program."""
        names = {**_name_fsdp(dialect.fsdp), **dialect.names}
        super().__init__(found, {name: value for name, value in options.items() if value != {}}, names)
        self.dialect, self.file, self.launch = dialect, file, launch
        self.spread = Spread()
        self.zero: ZeroReader | None = None
        """Reader of DeepSpeed's options."""
        self.apart: WordsReader | None = None
        """Reader of DeepSpeed's JSON file, where one is named."""

    def usual(self, name: str, default: Any = None) -> Any:
        """The program's default of an option."""
        return self.dialect.defaults.get(name, default)

    def read(self) -> None:
        """Fill the value that was given, section by section."""
        found = self.found
        self._read_model()
        self.read_spread()
        found.engine = self.spread.engine
        self.read_offload()
        self.read_adapter()
        self.read_base()
        compute = self._read_compute()
        dp = settle_layout(found, self.spread)
        settle_formats(found, self.spread, compute, *self.loaded)
        self._read_batch(dp)
        self.read_recompute()
        self.read_kernels()
        self._read_optimizer()
        self.read_data()
        self.read_more()
        self.read_rest()

    def read_more(self) -> None:
        """Read what only this program has."""

    def read_offload(self) -> None:
        """Fill in what keeps activations in the host's memory, where the program has such an option."""

    def read_rest(self, ignored: Mapping[str, str] | None = None, otherwise: str = "") -> None:
        """Note the options that nobody has asked for, those of the files beside too."""
        before, fsdp = self.dialect.deepspeed.replace(".", r"\."), self.dialect.fsdp.replace(".", r"\.")
        of_zero = read_deepspeed.prefix(read_deepspeed.IGNORED, before)
        subjects = join_patterns(IGNORED, self.dialect.ignored, of_zero, {"checkpoints": f"{fsdp}{FSDP_LOADING}"})
        patterns = [OTHERWISE, f"{fsdp}{FSDP_WORDS}", f"{before}({read_deepspeed.OTHERWISE})", self.dialect.otherwise]
        super().read_rest(subjects, "|".join(filter(None, patterns)))
        if self.apart is not None:
            self.apart.read_rest(read_deepspeed.IGNORED, read_deepspeed.OTHERWISE)
        if self.launch is not None:
            self.launch.read_rest()

    def _read_model(self) -> None:
        name = self.ask("model_name_or_path", string)
        model = find_model(name, self.file.path.parent) if name else None
        shown = self.shown("model_name_or_path")
        if model:
            self.found.put("model", model, shown)
        else:
            self.found.ignore(shown, "its sizes are not here: --model M says them", "assumed")

    # Sharding

    def read_spread(self) -> None:
        """Fill in how ranks share the state, by the file, or by accelerate beside it."""
        if self.launch is not None:
            self.zero = self.launch.read()
            self.spread = self.launch.spread
        self.found.num_gpus = self.file.num_gpus or self.found.num_gpus
        has_zero, has_fsdp = self.has_zero(), self.has_fsdp()
        if has_zero and has_fsdp:
            self.found.problems.append(f"{self.shown('deepspeed')} and {self.shown('fsdp')} are both said: use one")
        elif has_zero:
            self._check_alone("DeepSpeed")
            self.zero = self._find_zero()
            self.zero.read(self.spread)
        elif has_fsdp:
            self._check_alone("FSDP")
            self.read_fsdp()
        if not has_fsdp:
            self._ignore_fsdp()
        self.read_degrees()

    def read_degrees(self) -> None:
        """Fill in degrees that the program's own options say."""

    def _check_alone(self, kind: str) -> None:
        """A problem if accelerate shards in another way."""
        other = {"fsdp": "FSDP", "zero": "DeepSpeed"}.get(self.spread.kind, "")
        if other and other != kind:
            self.found.problems.append(f"accelerate is told {other}, and the arguments {kind}: use one")

    def has_zero(self) -> bool:
        """True if the arguments ask for DeepSpeed."""
        inside = [name for name in self.options if name.startswith(self.dialect.deepspeed)]
        return bool(inside) or (self.says("deepspeed") and self.options[self.own("deepspeed")] not in ("", False))

    def has_fsdp(self) -> bool:
        """True if the arguments ask for FSDP."""
        if not self.says("fsdp"):
            return False
        value = self.options[self.own("fsdp")]
        return bool(value) and str(value).lower() not in ("false", "[]", '""')

    def _find_zero(self) -> ZeroReader:
        own = self.own("deepspeed")
        path = self.options.get(own)
        if path is None:
            return ZeroReader(self, self.dialect.deepspeed)
        if path is True or str(path).lower() == "true":
            self.says("deepspeed_config")
            own = self.own("deepspeed_config")
            path = self.options.get(own, "")
        path, values = read_beside(path, self.file, own)
        self.found.rows.append(Row(self.show(own), "its values", "read"))
        self.apart = WordsReader(self.found, values, {})
        self.found.values = self.options  # not those of the other file, which is not changed
        return ZeroReader(self.apart)

    def read_fsdp(self) -> None:
        """Fill in FSDP, by the words of `fsdp` and its config."""
        value = self.one(self.own("fsdp")) if self.says("fsdp") else ""
        words = value if isinstance(value, list) else str(value).replace(",", " ").split()
        words = [str(each).strip().lower() for each in words]
        known = {*accelerate.STRATEGIES, "auto_wrap", "offload", "true"}
        for unknown in [each for each in words if each not in known]:
            self.found.problems.append(f"{self.own('fsdp')}={unknown} is nothing that is known here")
        self._take_config()
        read_accelerate.read_fsdp(self, self.spread, self.shown("fsdp"))
        is_second = self.ask("fsdp.version", positive) == 2
        strategy = next((each for each in words if each in accelerate.STRATEGIES), None)
        if strategy and not is_second and not self.says("fsdp.sharding_strategy"):
            self.spread.zero, self.spread.is_hybrid = accelerate.STRATEGIES[strategy]
            self.spread.kind = "copies" if strategy == "no_shard" else "fsdp"
        if "offload" in words:
            self.spread.offloads, self.spread.offload_shown = True, self.shown("fsdp")
        wraps = "auto_wrap" in words or self.says("fsdp.auto_wrap_policy") or "true" in words
        if not wraps and self.spread.kind == "fsdp":
            self.found.problems.append(
                f"{self.own('fsdp')} without auto_wrap gathers the whole model at once, which is not predicted; with "
                f"it blocks are"
            )

    def _take_config(self) -> None:
        """Take the values of a file that fsdp_config names, or of a table in one word, for the options of its table."""
        name = "fsdp_config"
        if (path := self.options.get(name)) is None:
            return
        self.used.add(name)
        tree = read_tree(path, self.file.given) if str(path).lstrip().startswith("{") else None
        values = tree.values if tree is not None else read_beside(path, self.file, name)[1]
        self.found.rows.append(Row(self.show(name), "its values", "read"))
        self.options = {**self.options, **flatten(values, self.dialect.fsdp)}

    def _ignore_fsdp(self) -> None:
        for name in self.options:
            if name.startswith(self.dialect.fsdp) or name in ("fsdp_config", "fsdp_version"):
                self.used.add(name)
                if self.options[name] is not None:
                    self.found.ignore(self.show(name), "without fsdp", "no effect")

    # Weights and formats

    def read_adapter(self) -> None:
        """Put the adapter that `use_peft` asks for, in PEFT's words."""
        if self.ask("use_peft", yes):
            self.put_adapter(self.shown("use_peft"))
        else:
            self.ignore_adapter(f"without {self.own('use_peft')}")

    def ignore_adapter(self, why: str, *more: str) -> None:
        """Say that the words of an adapter have no effect."""
        for name in (*_ADAPTER, *more):
            if self.says(name):
                self.found.ignore(self.shown(name), why, "no effect")

    def put_adapter(self, shown: str) -> None:
        """Put an adapter of LoRA; `shown` is the option that asks for it."""
        rank, alpha = self.ask("lora_r", positive), self.ask("lora_alpha", real)
        usual = self.usual("lora_r", 8), self.usual("lora_alpha", 8)
        self.found.put("adapter", {"method": "lora"}, shown)
        for key, value, name, default in (("rank", rank, "lora_r", usual[0]), ("alpha", alpha, "lora_alpha", usual[1])):
            default = default(rank or usual[0]) if callable(default) else default
            self.found.put("adapter", {key: value or default}, self.shown(name), "read" if value else "assumed",
                           "" if value else "its default")  # fmt: skip
        self.read_targets()
        if self.ask("use_rslora", yes):
            self.found.put("adapter", {"rslora": True}, self.shown("use_rslora"))
        self.need("use_dora", (False,), "DoRA is not predicted; LoRA without it is")
        self.need("lora_modules_to_save", ("", None), "weights that are trained beside an adapter are not predicted")
        self.need("pissa_init", (False,), "PiSSA is not predicted; LoRA is, and takes as much")

    def read_targets(self) -> None:
        """Put the adapter's targets; all linear layers of blocks are those of ours without any."""
        value = self.options.get(self.own("lora_target_modules")) if self.says("lora_target_modules") else None
        shown = self.shown("lora_target_modules")
        names = value if isinstance(value, list) else str(value).replace(",", " ").split() if value else []
        names = [str(each).rpartition(".")[2] for each in names]
        if value is None:
            self.put_usual_targets(shown)
        elif {"all-linear", "all_linear", "all"} & set(names):
            self.found.rows.append(Row(shown, "all linear layers of blocks", "read"))
        elif bad := [each for each in names if not each.replace("_", "").isalnum()]:
            self.found.problems.append(f"{shown}: {bad[0]} is no name of a module, such as q_proj")
        elif outside := [each for each in names if each in ("lm_head", "embed_tokens")]:
            self.found.problems.append(f"{shown}: an adapter of {outside[0]} is not predicted; those of blocks are")
        else:
            self.found.put("adapter", {"targets": names}, shown)

    def put_usual_targets(self, shown: str) -> None:
        """Put the targets where none are named."""
        self.found.put(
            "adapter", {"targets": list(USUAL_TARGETS)}, shown, "assumed", "PEFT's default of a Llama or Qwen"
        )

    def read_base(self) -> None:
        """Put the format of few bits in which frozen weights lie."""
        four, eight = self.ask("load_in_4bit", yes), self.ask("load_in_8bit", yes)
        if four and eight:
            self.found.problems.append(
                f"{self.own('load_in_4bit')} and {self.own('load_in_8bit')} are both true: use one"
            )
        elif four or eight:
            self.put_base("nf4" if four else "int8", self.shown("load_in_4bit" if four else "load_in_8bit"))
        kind = self.select("bnb_4bit_quant_type", _BNB)
        if kind and not four:
            self.found.ignore(self.shown("bnb_4bit_quant_type"), f"without {self.own('load_in_4bit')}", "no effect")
        elif kind == "fp4":
            self.found.ignore(self.shown("bnb_4bit_quant_type"), "predicted as nf4, of as many bits", "assumed")

    def put_base(self, base: str, shown: str) -> None:
        """Put a base in few bits, which only an adapter trains beside."""
        if "adapter" not in self.found.tables:
            self.found.problems.append(f"{shown}: weights of few bits cannot be trained; use an adapter beside them")
            return
        self.found.put("precision", {"base": base}, shown)

    @property
    def loaded(self) -> tuple[str, str]:
        """Format in which weights are loaded, and the option that says it."""
        said = self.select("dtype", _DTYPES)
        shown = self.shown("dtype")
        if said == "auto":
            return "bfloat16", f"{shown}, as nearly all checkpoints are"
        return said or self.usual("dtype", ""), shown if said else f"{shown}, its default"

    def _read_compute(self) -> str:
        """Put the compute format."""
        flag, shown = self.read_mixed()
        loaded = self.loaded[0]
        if self.zero is not None:
            trainers = flag or self.spread.mixed or "float32"
            compute = self.zero.read_compute(trainers)
            if self.found.get("precision", "compute") is None:
                self._put_compute(compute, flag, shown, loaded)
            return compute
        compute = flag or self.spread.mixed or ("bfloat16" if loaded == "bfloat16" else "float32")
        self._put_compute(compute, flag, shown, loaded)
        return compute

    def _put_compute(self, compute: str, flag: str, shown: str, loaded: str) -> None:
        if flag:
            note = "" if "=" in shown else "its default"
            if self.spread.mixed not in ("", flag):
                self.found.ignore(self.spread.mixed_shown, f"{shown} says it", "no effect")
                self.spread.mixed = flag
        elif self.spread.mixed:
            shown, note = self.spread.mixed_shown, ""
        else:
            shown, note = "", f"weights are in {loaded}" if loaded == compute else "neither bf16 nor fp16"
        self.found.put("precision", {"compute": compute}, shown, "assumed" if note else "read", note)

    def read_mixed(self) -> tuple[str, str]:
        """The format of mixed precision that the arguments say, empty without any, and the option."""
        values = {name: self.ask(name, yes) for name in ("bf16", "fp16")}
        if all(values.values()):
            self.found.problems.append("bf16 and fp16 are both true, and one format is computed in")
        if values["fp16"]:
            return "float16", self.shown("fp16")
        if values["bf16"]:
            return "bfloat16", self.shown("bf16")
        if values["bf16"] is None and self.usual("bf16", False):
            return "bfloat16", "bf16"
        return "", ""

    # Batch, recomputation, kernels

    def _read_batch(self, dp: int) -> None:
        self.read_table(self._translate(OPTIONS[:1]))
        name = "gradient_accumulation_steps"
        said, micro = self.read_steps(), self.found.get("layout", "micro_batch", 1)
        steps = said or self.usual(name, 1)
        if self.zero is not None:
            self.zero.put_batch(dp, {"micro": micro, "steps": steps, **({"total": micro * steps * dp} if dp else {})})
        if dp:
            note = "" if said else "its default, 1 step of accumulation"
            self.found.put("batch", {"global_batch": micro * steps * dp}, self.shown(name),
                           "read" if said else "assumed", note)  # fmt: skip
        elif said:
            self.found.ignore(self.shown(name), "sequences of a step need the number of GPUs too: --world N", "assumed")
        self.read_length()

    def read_steps(self) -> int | None:
        """Steps of accumulation that the file says."""
        steps: int | None = self.ask("gradient_accumulation_steps", positive)
        return steps

    def _translate(self, table: tuple[Option, ...]) -> list[Option]:
        """A table by the program's own names and defaults."""
        found = []
        for each in table:
            self.says(each.name)
            found.append(each._replace(name=self.own(each.name), default=self.usual(each.name, each.default)))
        return found

    def read_length(self) -> None:
        """Put the tokens of a sequence."""
        length = self.ask("max_length", positive)
        if length:
            self.found.put("batch", {"seq_len": length}, self.shown("max_length"))
        elif default := self.usual("max_length"):
            self.found.put("batch", {"seq_len": default}, self.shown("max_length"), "assumed", "its default")

    def read_recompute(self) -> None:
        """Put the recomputation of blocks, by gradient_checkpointing or by FSDP."""
        said = self.ask("gradient_checkpointing", yes)
        recomputes = self.usual("gradient_checkpointing", False) if said is None else said
        self.put_recompute(recomputes, said is not None)

    def put_recompute(self, recomputes: bool, is_said: bool) -> None:
        """Put recomputation; FSDP's own does not go beside that of the Trainer."""
        shown = self.shown("gradient_checkpointing")
        if self.spread.recomputes and recomputes and is_said:
            self.found.problems.append(
                f"{self.spread.recomputes} and {shown} are both on: the Trainer refuses that; leave out one"
            )
        elif self.spread.recomputes:
            self.found.put("layout", {"recompute": "full"}, self.spread.recomputes)
        else:
            self.found.put("layout", {"recompute": "full" if recomputes else "none"}, shown,
                           "read" if is_said else "assumed", "" if is_said else "its default")  # fmt: skip
        if not recomputes:
            for name in list(self.options):
                if name.startswith("gradient_checkpointing_kwargs"):
                    self.used.add(name)
                    self.found.ignore(self.show(name), "without gradient_checkpointing", "no effect")

    def read_kernels(self) -> None:
        """Put the kernels of attention, those of Liger, and what is compiled."""
        self.read_attention()
        if self.ask("use_liger_kernel", yes):
            self.found.put("kernels", dict(LIGER), self.shown("use_liger_kernel"))
        else:
            self.put_loss()
        if self.ask("torch_compile", yes):
            self.found.put("kernels", {"compile": "model"}, self.shown("torch_compile"))
        self.need("liger_kernel_config", (None,), "only all of Liger's kernels are predicted")

    def put_loss(self) -> None:
        """Put the kernel of the loss without Liger's; transformers computes it of all logits, in fp32."""
        self.assume("kernels", {"loss": PLAIN["loss"]}, "", "transformers' loss, of all logits in fp32")

    def read_attention(self) -> None:
        """Put the kernel of attention."""
        said = self.select("attn_implementation", ATTENTION)
        older = self.ask("use_flash_attention_2", yes)
        if said and older and said != "flash-attn":
            self.found.problems.append(
                f"{self.shown('use_flash_attention_2')} and {self.shown('attn_implementation')} are both said: use one"
            )
        elif said and older:
            self.found.ignore(
                self.shown("use_flash_attention_2"), f"{self.shown('attn_implementation')} says it", "no effect"
            )
        name = "use_flash_attention_2" if older and not said else "attn_implementation"
        ours = said or ("flash-attn" if older else "sdpa-flash")
        is_said = bool(said or older)
        self.found.put("kernels", {"attention": ours}, self.shown(name), "read" if is_said else "assumed",
                       "" if is_said else "its default, sdpa")  # fmt: skip

    def _read_optimizer(self) -> None:
        beside = self.zero is not None and self.zero.read_optimizer()
        if beside:
            for name in ("optim", *(each.name for each in OPTIONS[1:])):
                if self.says(name):
                    self.found.ignore(self.shown(name), "DeepSpeed has an optimizer of its own", "no effect")
        else:
            self.read_optim()
        if self.says("max_grad_norm") or self.found.get("optimizer", "max_norm") is None:
            clip = self.ask("max_grad_norm", real)
            norm = self.usual("max_grad_norm", 1.0) if clip is None else clip or float("inf")
            self.found.put("optimizer", {"max_norm": norm}, self.shown("max_grad_norm"),
                           "assumed" if clip is None else "read", "its default" if clip is None else "")  # fmt: skip

    def read_optim(self) -> None:
        """Put the optimizer that `optim` names."""
        optim = self.select("optim", {**{each: each for each in OPTIMS}, **self.usual("optims", {})})
        if self.says("optim") and optim is None:
            return
        known = OPTIMS[optim or "adamw_torch_fused"]
        values = {"name": known.name} | ({"state_format": known.state_format} if known.state_format else {})
        note = known.note if optim else "its default"
        self.found.put("optimizer", values, self.shown("optim"), "assumed" if note else "read", note)
        table = [each for each in OPTIONS[1:] if known.name == "adamw" or each.key in ("lr", "weight_decay")]
        if known.name == "sgd":
            self.found.put("optimizer", {"momentum": 0.0}, "", "assumed", "the Trainer's SGD has none")
        self.read_table(self._translate(tuple(table)))
        for each in OPTIONS[1:]:
            if each not in table and self.says(each.name):
                self.found.ignore(self.shown(each.name), f"with {self.shown('optim')}", "no effect")

    def read_data(self) -> None:
        """Put how samples are made."""
        packs = self.ask("packing", yes)
        if packs is not None or "packing" in self.dialect.defaults:
            is_packed = self.usual("packing", False) if packs is None else packs
            self.put_samples(is_packed, self.shown("packing"), is_said=packs is not None)

    def put_samples(self, is_packed: bool, shown: str, *, is_said: bool, masks: bool = False) -> None:
        """Put packed or padded samples; `masks` if documents that share one do not attend to each other."""
        values: dict[str, Any] = {"samples": "packed" if is_packed else "padded"}
        if is_packed and masks:
            values["document_mask"] = True
        note = "" if is_said else "its default"
        note = note or ("" if is_packed else "predicted with all samples as long as the longest may be")
        self.found.put("data", values, shown, "assumed" if note else "read", note)


def _name_fsdp(before: str) -> Names:
    """Names of FSDP's options in a table, with and without "fsdp_"."""
    inside = {key: (f"{before}fsdp_{key}", f"{before}{key}") for key in _FSDP_KEYS}
    return {f"fsdp.{key}": names for key, names in inside.items()}


def read_job(
    file: OtherFile, options: Mapping[str, Any], dialect: Dialect, launch: AccelerateReader | None = None,
    found: Understood | None = None, reader: type[TrainerReader] = TrainerReader,
) -> Understood:  # fmt: skip
    """The job of a program's options; what is not understood is in its `problems`."""
    found = found or Understood("accelerate", dialect.title)
    try:
        reader(found, options, dialect, file, launch).read()
    except InvalidConfig as error:
        found.problems += error.problems
    return found
