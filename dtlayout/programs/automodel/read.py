"""NeMo AutoModel, read: the YAML file of its recipe for next-token prediction, or a command that starts it.

Defaults are those of 0.7. Files of 0.2 to 0.4 name a manager or a config of FSDP2 by its class, have a pipeline in a
section of its own, and reduce gradients in bf16.
"""

import re
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.files import complete
from dtlayout.programs.automodel.sections import ModelReader
from dtlayout.programs.automodel.write import ATTENTION, AUTOMODEL, FORMATS, OPTIONS
from dtlayout.programs.command_line import count_ranks, find_command, read_options, split_program
from dtlayout.programs.files.trees import read_tree
from dtlayout.programs.options import Option, positive, real, string, whole, yes
from dtlayout.programs.program import TORCH_SCHEDULES
from dtlayout.programs.shell.script import Unknown
from dtlayout.programs.understood import How, OtherFile, Understood

_STRATEGIES = {"fsdp2": "fsdp2", "fsdp2manager": "fsdp2", "fsdp2config": "fsdp2"}
_SCHEDULES = {theirs.lower(): ours for ours, theirs in TORCH_SCHEDULES.items()} | {
    "loopedbfs": "looped-bfs", "interleavedzerobubble": "interleaved-zb", "zerobubble": "interleaved-zb",
    "zbvzerobubble": "zb-v", "dualpipev": "dualpipe-v",
}  # fmt: skip
"""Schedule in small letters, without underscores → ours."""
_LOOPED = {"interleaved-1f1b", "looped-bfs", "interleaved-zb", "zb-v", "dualpipe-v"}
"""Schedules with two stages on each rank by default."""
_RECOMPUTE = (
    dict.fromkeys(("false", "off", "none", "disabled", "no"), "none")
    | {"selective": "selective"}
    | (dict.fromkeys(("true", "on", "full", "enabled", "yes"), "full"))
)
_KERNELS = {theirs: ours for ours, theirs in ATTENTION.items()} | {"efficient_attention": "sdpa-efficient"}
_IMPLEMENTATIONS = {
    "sdpa": "sdpa-cudnn", "flash_attention_2": "flash-attn", "flash_attention_3": "fa3", "eager": "torch",
}  # fmt: skip
"""attn_implementation → our attention; sdpa tries cuDNN's first."""
_BACKENDS = {"te": "sdpa-cudnn", "cudnn": "sdpa-cudnn", "sdpa": "sdpa-cudnn", "eager": "torch"}
"""backend.attn → our attention."""
_LOSSES = {"MaskedCrossEntropy": "", "ChunkedCrossEntropy": "chunked", "FusedLinearCrossEntropy": "linear"}
"""Class of the loss → our kernel; the first is the usual one."""
_OPTIMIZERS = {
    "AdamW": "adamw", "Adam": "adamw", "FusedAdam": "adamw", "adamw": "adamw", "adam": "adamw", "fused_adam": "adamw",
    "SGD": "sgd",
}  # fmt: skip
_OF_OPTIMIZER = {"eps": "adamw", "momentum": "sgd"}
_DISPATCHERS = {"deepep": "deepep", "hybridep": "deepep", "uccl_ep": "deepep"}
_IDLE = ("distributed.sequence_parallel", "distributed.enable_async_tensor_parallel")
_IGNORED = {
    "where a run writes": r"checkpoint\..*",
    "data and tokens": r"(validation_)?(dataset|dataloader)s?(_\w+)?(\..*)?|tokenizer\..*|domain_mixture.*"
    r"|packed_sequence\..*|step_scheduler\.(?!global_batch_size|local_batch_size|grad_acc_steps)\w+",
    "logs and evaluation": r"(wandb|mlflow|comet|profiling|benchmark|ci|mfu|moe_metrics|logging)(\..*)?|nvtx",
    "how ranks meet": r"(dist_env|slurm|launcher)(\..*)?|distributed(_config)?\.(backend|world_size)",
    "the course of the learning rate": r"lr_scheduler(\..*)?|optimizer\.(min_lr|lr_.*)",
    "initial values and chance": r"(rng|seed)(\..*)?|peft\.(dropout.*|lora_A_init)|model\.(load_base_model|seed)",
    "how weights are loaded": r"model\.(trust_remote_code|is_meta_device|low_cpu_mem_usage|force_hf|cache_dir|revision"
    r"|local_files_only|output_hidden_states|use_cache|quantization_config\.dequantize|config\.(trust_remote_code|torch_dtype"
    r"|dtype|cache_dir|output_hidden_states|use_cache|attn_implementation|_attn_implementation|name_or_path))",
    "the loss of tokens": r"loss_fn(\..*)?",
    "the casts of fp8": r"fp8\.(precompute.*|force_recompute.*|filter_fqns|emulate|enable_fsdp_float8_all_gather)",
    "the compiler": r"compile\.(mode|fullgraph|dynamic|backend|options|dynamo_.*)",
    "how an update is computed": r"optimizer\.(fused|foreach|capturable|amsgrad|adam_w_mode|bias_correction"
    r"|store_param_remainders|master_weight_dtype|nesterov|dampening|maximize|differentiable)"
    r"|clip_grad_norm\.(?!max_norm)\w+",
    "classes of its parts": r".*\._target_|recipe",
    "formats between blocks": r"distributed(_config)?\.mp_policy\.(output_dtype|cast_forward_inputs)"
    r"|distributed(_config)?\.offload_policy\.pin_memory|(distributed\.pipeline|autopipeline)\.dtype",
}  # fmt: skip
_OTHERWISE = (
    r"distributed(_config)?\.(tp_plan|use_hf_tp_plan|custom_tp_plan|patch_is_packed_sequence|autocast_dtype"
    r"|activation_checkpointing_scope|enable_fsdp2_prefetch|fsdp2_.*|moe\..*|multimodal\..*)|parallelizer\..*"
    r"|(distributed\.pipeline|autopipeline)\.(patch_.*|scale_grads.*|pp_seq_len|pp_batch_size|pp_recv_.*)"
    r"|model\.(use_liger_kernel|use_sdpa_patching|backend\.(?!te_fp8|dispatcher$|attn$).*)"
    r"|peft\.(use_triton|lora_dtype|use_memory_efficient_lora|moe_rank_scaling)"
    r"|quantization\.bnb_4bit_(use_double_quant|quant_storage|compute_dtype)"
)
"""Options that change a little of time or memory, which is predicted as if they were not there."""
_STARTERS = ("automodel", "nemo_automodel.cli.app", "cli/app.py", "recipes/llm/train_ft.py", "llm_finetune/finetune.py",
             "llm_pretrain/pretrain.py", "nemo_automodel.recipes.llm.train_ft")  # fmt: skip
"""Ends of words that start the recipe."""
_OF_COMMAND = ("c", "config", "nproc-per-node", "nproc_per_node")
"""Options of its command line; all others are those of the file."""
_COMMAND = re.compile(
    r"(?:\bautomodel|nemo_automodel[\w./]*|llm_(?:finetune|pretrain)/\w+\.py)\s(?:\\\n|[^\n])*?\.ya?ml\b"
)


def is_ours(file: OtherFile) -> bool:
    """True for a YAML file that names classes of AutoModel beside a step_scheduler, and for a command with such a
    file."""
    if file.tree is None:
        return _COMMAND.search(file.text) is not None
    values = file.tree.values
    has_steps = any(name.startswith("step_scheduler.") for name in values)
    named = any("nemo_automodel." in value for value in values.values() if isinstance(value, str))
    return file.tree.language == "yaml" and has_steps and named


def read(file: OtherFile) -> Understood:
    """The job of a YAML file or of a command; what is not understood is in its `problems`."""
    found = Understood(AUTOMODEL.engine, AUTOMODEL.title)
    folder, options = file.path.parent, dict(file.tree.values) if file.tree is not None else {}
    if file.tree is None:
        folder, options = _read_command(file, found)
    words = ("none", "None", "null")
    options = {name: None if isinstance(value, str) and value in words else value for name, value in options.items()}
    _AutomodelReader(found, options, folder, file.num_gpus).read()
    return found


def _starts_it(word: str) -> bool:
    return word.endswith(_STARTERS)


def _read_command(file: OtherFile, found: Understood) -> tuple[Path, dict[str, Any]]:
    """Folder and options of the YAML file that a command names, with those behind it."""
    words = find_command(file, _starts_it).words
    before, own_words = split_program(words, _starts_it)
    own = read_options(own_words, found)
    count_ranks({**read_options(before, found), **own}, found)
    paths = [word for word in words if word.endswith((".yaml", ".yml"))]
    if not paths or isinstance(paths[0], Unknown):
        raise InvalidConfig("the command names no YAML file that is known; give that file in its place")
    path = Path(paths[0]) if Path(paths[0]).is_absolute() else file.path.parent / paths[0]
    try:
        tree = read_tree(path.read_text(encoding="utf-8"), file.given)
    except (OSError, ValueError):
        tree = None
    if tree is None:
        raise InvalidConfig(f"the file {paths[0]} is not there, beside the script; give it in its place")
    changed = {name: _parse(value) for name, value in own.items() if name not in _OF_COMMAND}
    return path.parent, {**tree.values, **changed}


def _parse(value: Any) -> Any:
    """A word of a command as YAML has it; lists and unknown words stay."""
    if not isinstance(value, str) or isinstance(value, Unknown):
        return value
    tree = read_tree(f"value: {value}", {})
    return tree.values.get("value", value) if tree is not None else value


class _AutomodelReader(ModelReader):
    def __init__(self, found: Understood, options: Mapping[str, Any], folder: Path, num_gpus: int):
        super().__init__(found, options, folder)
        self.num_gpus = num_gpus
        self.is_old = "Manager" in str(options.get("distributed._target_"))

    def read(self) -> None:
        """Fill the value that was given, section by section."""
        self._read_recipe()
        self.read_model()
        self._read_table()
        layout = self.found.tables.setdefault("layout", {})
        self._read_degrees(layout)
        self._read_batch(layout)
        self._read_stages(layout)
        self._read_sharding(layout)
        self._read_recompute()
        self._read_kernels(layout)
        self._read_formats()
        self._read_optimizer()
        self.read_adapter()
        self._read_experts(layout)
        self._read_switches()
        self.read_rest(_IGNORED, _OTHERWISE)

    def _read_recipe(self) -> None:
        for name in ("recipe", "recipe._target_"):
            recipe = self.value(name, string)
            if recipe and not recipe.endswith("RecipeForNextTokenPrediction"):
                self.found.problems.append(f"{name}={recipe} is not predicted; recipes for next-token prediction are")
        name = next((each for each in ("distributed.strategy", "distributed._target_", "distributed_config._target_")
                     if each in self.options), "distributed.strategy")  # fmt: skip
        strategy = self.value(name, string) or "fsdp2"
        if _STRATEGIES.get(strategy.rpartition(".")[2].lower()) is None:
            self.found.problems.append(f"{name}={strategy} is not predicted; fsdp2 is")
        elif name in self.options:
            self.note(name, "the form of release 0.2" if self.is_old else "as predicted", "read")

    def _read_table(self) -> None:
        """Options that are keys of ours; those of another optimizer, and of tp where there is none, have no effect."""
        tp = self.options.get("distributed.tp_size") or 1
        kind = _name_class(self.options.get("optimizer._target_", self.options.get("optimizer")))
        optimizer = _OPTIMIZERS.get(kind, "adamw")
        is_torchs = optimizer == "sgd" or self.is_old  # later releases have defaults of their own
        defaults: dict[str, Any] = {"optimizer.lr": 1e-3} if is_torchs else {}
        defaults |= {"optimizer.weight_decay": 0.0} if is_torchs and kind != "AdamW" else {}
        if self.is_old or any(name.startswith("distributed_config.") for name in self.options):
            defaults["distributed.mp_policy.reduce_dtype"] = "bfloat16"
        if str(self.options.get(self.named("model.torch_dtype"))) == "auto":
            self.has(self.named("model.torch_dtype"))
        for option in OPTIONS:
            name, own = self.named(option.name), _OF_OPTIMIZER.get(option.key, optimizer)
            if option.name == "dataset.seq_len" or (option.name == "model.torch_dtype" and name in self.used):
                continue
            if tp == 1 and option.name in _IDLE:
                self.note(name, "tp is 1", "no effect")
            elif own != optimizer:
                self.note(name, f"with {kind}", "no effect")
            else:
                default = defaults.get(option.name, option.default)
                self.read_table([Option(name, *option[1:4], default, option.words)])

    def _read_degrees(self, layout: dict[str, Any]) -> None:
        """Data parallelism, and the number of GPUs, of which one may follow from the other."""
        ranks = layout.get("tp", 1) * layout.get("cp", 1) * layout.get("pp", 1)
        dp, copies = self._degree("distributed.dp_size"), self._degree("distributed.dp_replicate_size") or 1
        self._count_gpus(dp is not None)
        num_gpus = self.found.num_gpus
        if dp is not None:
            self.found.num_gpus = dp * ranks
            if num_gpus not in (0, dp * ranks):
                self.found.problems.append(f"the degrees multiply to {dp * ranks}, and the job has {num_gpus} GPUs")
        elif num_gpus:
            if num_gpus % ranks:
                self.found.problems.append(f"{num_gpus} GPUs are no multiple of tp · cp · pp = {ranks}")
            dp = max(1, num_gpus // ranks)
            self.found.ignore("distributed.dp_size", f"{dp}, which the GPUs leave", "assumed")
        if dp is not None and dp % copies:
            self.found.problems.append(f"distributed.dp_replicate_size={copies} does not divide dp = {dp}")
        values = {"dp_replicate": copies, "dp_shard": -1 if dp is None else max(1, dp // copies)}
        shown = [self.show(name) for each in ("dp_size", "dp_replicate_size")
                 if (name := self.named(f"distributed.{each}")) in self.options]  # fmt: skip
        self.found.put("layout", values, ", ".join(shown), "read" if dp is not None else "assumed",
                       "" if dp is not None else "what the other degrees leave of the GPUs")  # fmt: skip
        if layout.get("cp", 1) > 1:
            self.assume("layout", {"cp_method": "gather"}, "distributed.cp_size", "it gathers keys and values")

    def _degree(self, name: str) -> int | None:
        """A degree; None where the file leaves it open, as 0 and below do."""
        number = self.value(self.named(name), whole)
        return number if number is not None and number > 0 else None

    def _count_gpus(self, is_said: bool) -> None:
        """GPUs that are asked for, that the command starts, or that another section of the file starts.

        Those of tests, in `ci`, only count where the degrees do not say them.
        """
        found, sections = self.found, [("slurm.nodes", "slurm.ntasks_per_node", 8)]
        sections += [] if is_said else [("ci.nodes", "ci.nproc_per_node", 0)]
        for nodes, each, usual in sections:
            if found.num_gpus or not any(name.startswith(f"{nodes.partition('.')[0]}.") for name in self.options):
                continue
            number, per_node = self.value(nodes, positive) or 1, self.value(each, positive) or usual
            if per_node:
                found.num_gpus, found.gpus_per_node = number * per_node, per_node
                found.ignore(f"{nodes} = {number}, {each} = {per_node}", f"{found.num_gpus} GPUs", "read")
        world = self.value(self.named("distributed.world_size"), positive)
        found.num_gpus = self.num_gpus or world or found.num_gpus

    def _read_batch(self, layout: dict[str, Any]) -> None:
        """Sequences of a forward and of a step, and their tokens."""
        name, micro = "step_scheduler.local_batch_size", self.named("distributed.pipeline.pp_microbatch_size")
        local = self.value(name, positive) or 1
        if layout.get("pp", 1) > 1:
            size = self.value(micro, positive) or 1
            if local % size:
                self.found.problems.append(f"{name}={local} is no multiple of the pipeline's microbatch, {size}")
            self.note(name, "the pipeline cuts it into its microbatches", "read")
            self.put_or_default("layout", {"micro_batch": size}, micro, "its default", self.show_if_there(micro))
        else:
            self.put_or_default("layout", {"micro_batch": local}, name, "its default", self.show_if_there(name))
        if "global_batch" not in self.found.tables.get("batch", {}):
            self.assume("batch", {"global_batch": 32}, "step_scheduler.global_batch_size", "its default")
        packed, lengths = "packed_sequence.packed_sequence_size", ("dataset.seq_len", "dataset.seq_length")
        if size := self.value(packed, whole):
            self.found.put("batch", {"seq_len": size}, self.show(packed))
            for length in lengths:
                self.note(length, "sequences are packed", "no effect")
            return
        for length in lengths:
            if size := self.value(length, positive):
                is_longest = str(self.options.get("dataset.padding", "")) in ("do_not_pad", "longest")
                note = "that of its longest sequences" if is_longest else ""
                self.found.put("batch", {"seq_len": size}, self.show(length), "assumed" if is_longest else "read", note)
                return
        self.found.ignore("dataset", "its sequences are as long as they come: --batch.seq_len=N says it", "assumed")

    def _read_stages(self, layout: dict[str, Any]) -> None:
        begin = "distributed.pipeline."
        if layout.get("pp", 1) == 1:
            for name in self.list_below(begin):
                self.note(name, "pp is 1", "no effect")
            return
        how, parts = self.named(f"{begin}pp_schedule"), self.named(f"{begin}module_fqns_per_model_part")
        text = self.value(how, string) or "1f1b"
        schedule = _SCHEDULES.get(text.lower().replace("_", ""))
        if schedule is None:
            self.found.problems.append(f"{how}={text} is nothing that is known here; use {' or '.join(_SCHEDULES)}")
            return
        virtual = self._count_stages(layout["pp"], 2 if schedule in _LOOPED else 1)
        if self.has(parts) and isinstance(modules := self.options[parts], list):
            blocks = [sum("layers." in str(each) for each in part) for part in modules]
            virtual = max(1, len(blocks) // layout["pp"])
            self.found.put("layout", {"stage_layers": blocks}, self.show(parts))
        values = {"schedule": schedule, "virtual_stages": virtual}
        self.put_or_default("layout", values, how, "its default", self.show_if_there(how))

    def _count_stages(self, pp: int, usual: int) -> int:
        """Stages on each rank: `usual`, or those that hold so many blocks each."""
        name = self.named("distributed.pipeline.layers_per_stage")
        rounds = self.named("distributed.pipeline.round_virtual_stages_to_pp_multiple")
        size, direction = self.value(name, positive), self.value(rounds, string)
        if size is None:
            return usual
        table = self.found.tables.get("model", {})
        layers = complete(dict(table)).get("num_layers") if table else None
        if layers is None:
            self.found.problems.append(
                f"{name}={size} depends on blocks that are not known here; write pp_schedule alone"
            )
            return usual
        stages = ceil(layers / size)
        if stages % pp and direction is None:
            self.found.problems.append(f"{name}={size} makes {stages} stages, which pp = {pp} does not divide")
        each = stages // pp if direction == "down" else ceil(stages / pp)
        self.found.ignore(self.show(name), f"{each} stages on each rank", "read")
        return max(1, each)

    def _read_sharding(self, layout: dict[str, Any]) -> None:
        gathers, defers = (
            self.named(f"distributed.{name}") for name in ("reshard_after_forward", "defer_fsdp_grad_sync")
        )
        again, late = self.value(gathers, yes), self.value(defers, yes)
        pp, late = layout.get("pp", 1), late is not False
        zero = 3 if again or (again is None and pp == 1) else 1 if late else 2
        said = [self.show(name) for name in (gathers, defers) if self.options.get(name) is not None]
        whole_batch = self.found.get("batch", "global_batch", 1)
        dp = layout["dp_replicate"] * max(1, layout["dp_shard"])
        is_whole = zero == 3 and late and (layout["dp_shard"] < 1 or whole_batch > dp * layout["micro_batch"])
        note = "gradients stay whole until the last microbatch, and are predicted as sharded" if is_whole else ""
        shown = ", ".join(said) or (defers if is_whole else gathers)
        how: How = "read" if said and not is_whole else "assumed"
        self.found.put("layout", {"zero": zero}, shown, how, note or ("" if said else "its default"))
        policy = list(self.list_below("distributed.offload_policy"))
        policy += list(self.list_below("distributed_config.offload_policy"))
        there = [name for name in policy if self.has(name)]
        if there:
            kind = next((str(self.options[name]) for name in there if name.endswith("_target_")), "CPUOffloadPolicy")
            values = {"offload": "none" if kind.endswith(".OffloadPolicy") else "optimizer"}
            self.found.put("layout", values, ", ".join(self.show(name) for name in there))

    def _read_recompute(self) -> None:
        name = self.named("distributed.activation_checkpointing")
        value = self.known(name, self.options[name]) if self.has(name) else False
        ours = _RECOMPUTE.get(str(value).lower().replace("-", "_"))
        if ours is None:
            if value is not None:
                self.found.problems.append(
                    f"{name}={value} is nothing that is known here; use true, false or selective"
                )
            return
        self.put_or_default("layout", {"recompute": ours}, name, "its default", self.show_if_there(name))

    def _read_kernels(self, layout: dict[str, Any]) -> None:
        self._read_compile(layout)
        target = _name_class(self.options.get("loss_fn._target_"))
        if kernel := _LOSSES.get(target):
            self.has("loss_fn._target_")
            self.found.put("kernels", {"loss": kernel}, self.show("loss_fn._target_"))
        elif target and target not in _LOSSES:
            self.note("loss_fn._target_", "predicted as MaskedCrossEntropy", "assumed")
        methods, words = "model.sdpa_method", _KERNELS
        if self.has(methods):
            listed = self.options[methods] if isinstance(self.options[methods], list) else [self.options[methods]]
            known = [words.get(str(each).lower().rpartition(".")[2]) for each in listed]
            if not known or known[0] is None:
                self.found.problems.append(
                    f"{methods}={listed} is nothing that is known here; use {' or '.join(words)}"
                )
            else:
                self.found.put("kernels", {"attention": known[0]}, self.show(methods))
        for name, known_words in (("model.attn_implementation", _IMPLEMENTATIONS), ("model.backend.attn", _BACKENDS)):
            if name not in self.options:
                continue
            ours = self.choice(name, known_words)
            if ours and "attention" in self.found.tables.get("kernels", {}):
                self.found.ignore(self.show(name), "another option says the kernel", "no effect")
            elif ours:
                self.found.put("kernels", {"attention": ours}, self.show(name))

    def _read_compile(self, layout: dict[str, Any]) -> None:
        blocks, model = self.named("distributed.enable_compile"), "compile.enabled"
        asynchronous = self.named("distributed.enable_async_tensor_parallel")
        kind = "blocks" if self.value(blocks, yes) else "none"
        if self.value(model, yes):
            self.found.put("kernels", {"compile": "model"}, self.show(model))
        elif layout.get("tp_overlap") and kind == "none":
            self.assume("kernels", {"compile": "blocks"}, self.show(asynchronous), "which compiles blocks")
        else:
            self.put_or_default("kernels", {"compile": kind}, blocks, "its default", self.show_if_there(blocks))
        if layout.get("tp_overlap") and not layout.get("sequence_parallel"):
            self.assume("layout", {"sequence_parallel": True}, self.show(asynchronous), "which turns it on")
        if model in self.options and self.found.get("kernels", "compile") != "model":
            for name in self.list_below("compile."):
                self.note(name, "compile.enabled is false", "no effect")

    def _read_formats(self) -> None:
        if "params" not in self.found.tables.get("precision", {}):
            name = self.named("model.torch_dtype")
            self.assume("precision", {"params": "bfloat16"}, name, "that of the weights, as they are usually stored")
        recipe, is_on = "fp8.recipe_name", self.value("fp8.enabled", yes)
        words = {"tensorwise": "fp8-tensorwise", "rowwise": "fp8-rowwise", "rowwise_with_gw_hp": "fp8-rowwise"}
        if is_on:
            ours = self.choice(recipe, words) if self.has(recipe) else "fp8-tensorwise"
            shown = ", ".join(self.show(name) for name in ("fp8.enabled", recipe) if name in self.options)
            self.found.put("precision", {"matmuls": ours or "fp8-tensorwise"}, shown)
            return
        for name in self.list_below("fp8."):
            self.note(name, "fp8.enabled is not true", "no effect")

    def _read_optimizer(self) -> None:
        name = "optimizer._target_" if "optimizer._target_" in self.options else "optimizer"
        kind = _name_class(self.value(name, string)) or "AdamW"
        ours = _OPTIMIZERS.get(kind)
        if ours is None:
            self.found.problems.append(f"{name}={kind} is nothing that is known here; use {' or '.join(_OPTIMIZERS)}")
            return
        decays = kind.lower() == "adam"
        note = "predicted with decoupled weight decay" if decays else ""
        self.found.put("optimizer", {"name": ours}, self.show_if_there(name),
                       "assumed" if decays or name not in self.options else "read", note)  # fmt: skip
        self._read_betas(ours)
        if "fused" not in kind.lower():
            return
        masters = self.value("optimizer.master_weights", yes)
        if masters is not False and self.found.get("precision", "params") != "float32":
            self.assume(
                "precision", {"params": "float32"}, "optimizer.master_weights", "its optimizer has fp32 masters"
            )
        moments = [f"optimizer.exp_avg{sq}_dtype" for sq in ("", "_sq")]
        formats = [self.choice(each, FORMATS) for each in moments]
        if formats == ["bfloat16", "bfloat16"]:
            self.found.put("optimizer", {"state_format": "bfloat16"}, ", ".join(map(self.show, moments)))
        elif any(each not in (None, "float32") for each in formats):
            self.found.problems.append(
                f"{' and '.join(moments)} are predicted where both are float32, or both bfloat16"
            )

    def _read_betas(self, optimizer: str) -> None:
        name = "optimizer.betas"
        if optimizer != "adamw":
            self.note(name, "its SGD has no moments", "no effect")
            return
        value = self.known(name, self.options[name]) if self.has(name) else [0.9, 0.999]
        try:
            beta1, beta2 = map(real, value)
        except (TypeError, ValueError):
            if value is not None:
                self.found.problems.append(f"{name}={value} are no two numbers")
            return
        shown = self.show_if_there(name)
        self.put_or_default("optimizer", {"beta1": beta1, "beta2": beta2}, name, "its default", shown)

    def _read_experts(self, layout: dict[str, Any]) -> None:
        name, older = "model.backend.dispatcher", "model.backend.enable_deepep"
        if layout.get("ep", 1) == 1:
            for each in (name, older, *self.list_below("distributed.moe.")):
                self.note(each, "ep is 1", "no effect")
            return
        dispatcher = self.value(name, string) or ("torch" if self.value(older, yes) is False else "deepep")
        if dispatcher not in _DISPATCHERS:
            self.found.problems.append(f"{name}={dispatcher} is not predicted; {' and '.join(_DISPATCHERS)} are")
            return
        said = next((each for each in (name, older) if each in self.options), "")
        self.found.put("layout", {"ep_dispatcher": "deepep"}, self.show(said) if said else name,
                       "read" if said else "assumed", "" if said else "its default, where DeepEP is there")  # fmt: skip
        if "adapter" in self.found.tables:
            self.found.ignore("peft", "routed experts are predicted without adapters", "assumed")

    def _read_switches(self) -> None:
        """Sections that are switched off, but for those that change no prediction anyway."""
        off = [name for name, value in self.options.items() if name.endswith(".enabled") and value is False]
        for switch in off:
            for name in self.list_below(switch.removesuffix("enabled")):
                if name not in self.used and not any(re.fullmatch(each, name) for each in _IGNORED.values()):
                    self.note(name, f"{switch} is false", "no effect")


def _name_class(target: Any) -> str:
    """Name of the class that a _target_ names."""
    return target.rpartition(".")[2] if isinstance(target, str) else ""
