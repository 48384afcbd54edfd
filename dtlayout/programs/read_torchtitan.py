"""torchtitan, read: the TOML file of its releases up to 0.2.2, or a command that starts it, as our config.

A command of 0.3 names a config of its code (`--config llama3_8b`), whose values are `NAMED`; options behind it change
them. Defaults are those of JobConfig.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.command_line import count_ranks, find_command, read_options, split_program
from dtlayout.programs.options import OptionReader, positive, string, yes
from dtlayout.programs.program import TORCH_SCHEDULES
from dtlayout.programs.shell import Command, Unknown
from dtlayout.programs.torchtitan import CONVERTERS, FLAVORS, MIXTURES, OPTIONS, ROTATE, TORCHTITAN
from dtlayout.programs.trees import read_tree
from dtlayout.programs.understood import OtherFile, Row, Understood
from dtlayout.spec.layout_keys import DISPATCHERS

NAMED: Mapping[str, Mapping[str, Any]] = {
    "llama3_8b": {
        "model.flavor": "8B", "optimizer.lr": 3e-4, "training.local_batch_size": 1, "training.seq_len": 8192,
        "activation_checkpoint.mode": "selective",
    },
    "llama3_70b": {
        "model.flavor": "70B", "optimizer.lr": 1.5e-4, "training.local_batch_size": 8, "training.seq_len": 8192,
        "parallelism.tensor_parallel_degree": 8, "activation_checkpoint.mode": "full",
    },
    "llama3_405b": {
        "model.flavor": "405B", "optimizer.lr": 8e-5, "training.local_batch_size": 2, "training.seq_len": 8192,
        "parallelism.tensor_parallel_degree": 8, "parallelism.enable_async_tensor_parallel": True,
        "activation_checkpoint.mode": "full", "compile.enable": True,
        "model.converters": ["quantize.linear.float8"], "quantize.linear.float8.enable_fsdp_float8_all_gather": True,
    },
}  # fmt: skip
"""Config that a command of 0.3 names → what it says, by the names of 0.2.2."""
_OLDER: Mapping[str, str] = {
    "training.compile": "compile.enable", "training.batch_size": "training.local_batch_size",
    "float8": "quantize.linear.float8", "mx": "quantize.linear.mx",
    "activation_checkpoint.selective_ac_type": "activation_checkpoint.selective_ac_option",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
}  # fmt: skip
"""Name, or section, of an earlier release → that of 0.2.2."""
_SCHEDULES = {theirs: ours for ours, theirs in TORCH_SCHEDULES.items()} | {
    "LoopedBFS": "looped-bfs", "InterleavedZeroBubble": "interleaved-zb", "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipe-v",
}  # fmt: skip
_LOOPED = {"interleaved-1f1b", "looped-bfs", "interleaved-zb", "zb-v", "dualpipe-v"}
"""Schedules with two stages on each rank by default."""
_STAGES = ("schedule", "layers_per_stage", "schedule_csv", "first_stage_less_layers", "last_stage_less_layers",
           "microbatch_size", "split_points")  # fmt: skip
"""Options of a pipeline, behind parallelism.pipeline_parallel_."""
_IGNORED = {
    "where a run writes": r"job\..*|comm\..*|debug\..*|fault_tolerance\..*|ft\..*|dump_folder|experimental\.custom_.*",
    "data and tokens": r"training\.(dataset|dataset_path|steps|deterministic|seed|gc_.*)|dataloader\..*"
    r"|model\.(hf_assets_path|tokenizer_path|tokenizer|print_after_conversion)|hf_assets_path|tokenizer\..*",
    "logs and evaluation": r"(profiling|profiler|metrics|validation|validator|memory_estimation)\..*",
    "checkpoints": r"checkpoint\..*",
    "the course of the learning rate": r"lr_scheduler\..*|optimizer\.(warmup_steps|implementation)",
    "the casts of fp8": r"quantize\.linear\.(float8|mx)\.(precompute.*|force_recompute.*|filter_fqns|emulate|mxfp8_.*)",
    "the compiler": r"compile\.(backend|model_backend_override)",
    "how gradients meet": r"parallelism\.(enable_compiled_autograd|context_parallel_load_balancer"
    r"|pipeline_parallel_expert_parallel_overlap)",
}
_OTHERWISE = (
    r"activation_checkpoint\.(per_op_.*|early_stop|preserve_rng_state|determinism_check|visualize_.*|debug)"
    r"|quantize\.grouped_mm\..*|parallelism\.(disable_loss_parallel|module_fqns.*)|model\.(norm_type|attn_.*)"
)


def is_ours(file: OtherFile) -> bool:
    """True for a TOML file with torchtitan's sections, and for a command with its module or its script."""
    if file.tree is not None and file.tree.language == "toml":
        sections = {name.partition(".")[0] for name in file.tree.values}
        return "training" in sections and bool(sections & {"parallelism", "job", "activation_checkpoint"})
    return file.tree is None and any(mark in file.text for mark in ("torchtitan", "--parallelism.", "run_train.sh"))


def read(file: OtherFile) -> Understood:
    """The job of a TOML file or of a command; what is not understood is in its `problems`."""
    found = Understood(TORCHTITAN.engine, TORCHTITAN.title)
    options: dict[str, Any] = {}
    if file.tree is not None:
        options = dict(file.tree.values)
    else:
        options = _read_command(find_command(file, _starts_it), file, found)
    found.num_gpus = file.num_gpus or found.num_gpus
    found.names = {_to_newest(name): name for name in options if _to_newest(name) != name}
    _TorchtitanReader(found, {_to_newest(name): value for name, value in options.items()}).read()
    return found


def _starts_it(word: str) -> bool:
    return word.endswith(("torchtitan.train", "torchtitan/train.py", "run_train.sh")) or "--parallelism." in word


def _read_command(command: Command, file: OtherFile, found: Understood) -> dict[str, Any]:
    """Options of a command: those of the file or the config that it names, and those behind it."""
    before, own = split_program(command.words, _starts_it)
    options = read_options(own if before or own else command.words, found)
    options = {re.sub(r"\.no_", ".", name): value is not True if ".no_" in name else value
               for name, value in ((name.replace("-", "_"), value) for name, value in options.items())}  # fmt: skip
    count_ranks(read_options(before, found), found)
    said = {**command.variables, **file.given}
    if "NGPU" in said and str(said["NGPU"]).isdigit():
        found.num_gpus = int(said["NGPU"])
    path = options.pop("job.config_file", None) or options.pop("job.config", None) or said.get("CONFIG_FILE")
    module, name = options.pop("module", said.get("MODULE")), options.pop("config", said.get("CONFIG"))
    if path:
        return {**_read_named_file(path, file), **options}
    if name is None:
        return options
    if (known := NAMED.get(name)) is None:
        raise InvalidConfig(f"--config {name} is in the program's code; {', '.join(NAMED)} are known here")
    found.rows.append(Row(f"--module {module or 'llama3'} --config {name}", "the values of that name", "read"))
    return {"model.name": "llama3", **known, **options}


def _read_named_file(path: Any, file: OtherFile) -> Mapping[str, Any]:
    """Values of the TOML file that a command names, beside the script."""
    if isinstance(path, Unknown):
        raise InvalidConfig(f"the config file is {path}, {path.reason}: --given {path.variable}=FILE says it")
    place = Path(path) if Path(path).is_absolute() else file.path.parent / path
    try:
        tree = read_tree(place.read_text(encoding="utf-8"), file.given)
    except (OSError, ValueError):
        tree = None
    if tree is None:
        raise InvalidConfig(f"the config file {path} is not there, beside the script; give it in its place")
    return tree.values


def _to_newest(name: str) -> str:
    """The name in 0.2.2 of an option that an earlier release has elsewhere."""
    section, dot, key = name.partition(".")
    return _OLDER.get(name) or (f"{_OLDER[section]}.{key}" if dot and section in _OLDER else name)


class _TorchtitanReader(OptionReader):
    def read(self) -> None:
        """Fill the value that was given, section by section."""
        self._read_model()
        self.read_table(OPTIONS)
        layout = self.found.tables["layout"]
        self._read_experts(layout)
        self._read_degrees(layout)
        self._read_batch(layout)
        self._read_stages(layout)
        self._read_sharding(layout)
        self._read_recompute()
        self._read_kernels()
        self.read_rest(_IGNORED, _OTHERWISE)

    def _read_model(self) -> None:
        name, flavor = self.value("model.name", string) or "llama3", self.value("model.flavor", string) or "debugmodel"
        presets = {(_module_of(preset), known): preset for preset, known in FLAVORS.items()}
        presets |= {("qwen3", known): f"qwen3-{known.lower()}" for known in MIXTURES}
        shown = f"model.name = {name}, model.flavor = {flavor}"
        if (preset := presets.get((name, flavor))) is not None:
            self.found.put("model", {"name": preset}, shown)
        else:
            self.found.ignore(shown, "the sizes are in the program's code: --model M says them", "assumed")

    def _read_experts(self, layout: Mapping[str, Any]) -> None:
        backend = self.choice(
            "parallelism.expert_parallel_comm_backend", {"standard": DISPATCHERS[0], "deepep": "deepep"}
        )
        if backend and layout["ep"] > 1:
            self.found.put("layout", {"ep_dispatcher": backend}, self.show("parallelism.expert_parallel_comm_backend"))
        cut = self.value("parallelism.expert_tensor_parallel_degree", positive) or 1
        if cut > 1 and layout["ep"] > 1:
            self.found.problems.append(
                f"parallelism.expert_tensor_parallel_degree={cut} cuts experts by tp, which is not predicted; 1 is"
            )

    def _read_degrees(self, layout: dict[str, Any]) -> None:
        """The degrees of data parallelism, and with them the number of GPUs."""
        ranks = layout["tp"] * layout["cp"] * layout["pp"] * layout["dp_replicate"]
        shards, num_gpus = layout["dp_shard"], self.found.num_gpus
        if shards == -1 and num_gpus:
            if num_gpus % ranks:
                self.found.problems.append(f"{num_gpus} GPUs are no multiple of the other degrees, {ranks}")
            layout["dp_shard"] = max(1, num_gpus // ranks)
        elif shards != -1:
            needed = ranks * shards
            if num_gpus and num_gpus != needed:
                self.found.problems.append(f"the degrees multiply to {needed}, and the job has {num_gpus} GPUs")
            self.found.num_gpus = needed
        method = self.choice("parallelism.context_parallel_rotate_method", {v: k for k, v in ROTATE.items()})
        if layout["cp"] > 1:
            name = "parallelism.context_parallel_rotate_method"
            self.put_or_default("layout", {"cp_method": method or "gather"}, name, "its default, allgather")
        elif method:
            self.found.ignore(self.show("parallelism.context_parallel_rotate_method"), "cp is 1", "no effect")

    def _read_batch(self, layout: Mapping[str, Any]) -> None:
        """Sequences of a forward and of a step; a rank is given those of all its microbatches in a pipeline."""
        local = self.value("training.local_batch_size", positive) or 8
        shown = f"training.local_batch_size = {local}"
        ours = local
        if layout["pp"] > 1:
            ours = self.value("parallelism.pipeline_parallel_microbatch_size", positive) or 1
            shown = f"parallelism.pipeline_parallel_microbatch_size = {ours}"
            if local % ours:
                self.found.problems.append(
                    f"training.local_batch_size={local} is no multiple of the pipeline's microbatch, {ours}"
                )
        self.found.put("layout", {"micro_batch": ours}, shown)
        whole_batch = self.options.get("training.global_batch_size", -1)
        if whole_batch != -1:
            self.put("batch", "global_batch", "training.global_batch_size", positive)
        elif layout["dp_shard"] > 0:
            self.has("training.global_batch_size")
            total = local * layout["dp_replicate"] * layout["dp_shard"]
            self.assume("batch", {"global_batch": total}, "training.global_batch_size", "local_batch_size on each rank")
        else:
            self.has("training.global_batch_size")

    def _read_stages(self, layout: dict[str, Any]) -> None:
        names = [f"parallelism.pipeline_parallel_{name}" for name in _STAGES]
        if layout["pp"] == 1:
            for name in (*names, "parallelism.module_fqns_per_model_part"):
                if self.has(name):
                    self.found.ignore(self.show(name), "pp is 1", "no effect")
            return
        schedule = self.choice(names[0], _SCHEDULES) or "1f1b"
        virtual = 2 if schedule in _LOOPED else 1
        if (parts := self.options.get("parallelism.module_fqns_per_model_part")) and isinstance(parts, list):
            self.has("parallelism.module_fqns_per_model_part")
            layers = [sum(str(each).startswith("layers.") for each in part) for part in parts]
            virtual = max(1, len(layers) // layout["pp"])
            self.found.put("layout", {"stage_layers": layers}, "parallelism.module_fqns_per_model_part")
        elif size := self.value(names[1], positive):
            self.found.problems.append(
                f"{names[1]}={size} depends on blocks that the file does not say; "
                f"write parallelism.module_fqns_per_model_part"
            )
        self.put_or_default("layout", {"schedule": schedule, "virtual_stages": virtual}, names[0], "its default")

    def _read_sharding(self, layout: Mapping[str, Any]) -> None:
        name = "parallelism.fsdp_reshard_after_forward"
        how, pp = self.choice(name, {each: each for each in ("default", "always", "never")}) or "default", layout["pp"]
        gathered_again = how == "always" or (how == "default" and pp == 1)
        zero = 3 if gathered_again else 1 if pp > 1 else 2
        default = "its default: gathered again, but in a pipeline"
        self.put_or_default("layout", {"zero": zero}, name, default, f"{name} = {how}")

    def _read_recompute(self) -> None:
        mode = self.value("activation_checkpoint.mode", string) or "selective"
        option = str(self.options.get("activation_checkpoint.selective_ac_option", "op"))
        self.has("activation_checkpoint.selective_ac_option")
        known = {"none": "none", "full": "full", "selective": "selective" if option == "op" else f"every-{option}"}
        ours = known.get(mode)
        if ours is None or (mode == "selective" and option != "op" and not option.isdigit()):
            self.found.problems.append(f"activation_checkpoint.mode={mode} {option} is nothing that is known here")
            return
        if ours == "every-1":
            ours = "full"
        shown = f"activation_checkpoint.mode = {mode}" + f", selective_ac_option = {option}" * (mode == "selective")
        self.put_or_default("layout", {"recompute": ours}, "activation_checkpoint.mode", "its default", shown)

    def _read_kernels(self) -> None:
        compiles = self.value("compile.enable", yes) or False
        parts = self.options.get("compile.components", ["model", "loss"])
        self.has("compile.components")
        kind = "blocks" if compiles and "model" in parts else "none"
        self.put_or_default("kernels", {"compile": kind}, "compile.enable", "its default")
        if self.found.get("layout", "tp_overlap") and kind == "none":
            self.found.ignore("parallelism.enable_async_tensor_parallel", "without compile.enable", "no effect")
            self.found.tables["layout"]["tp_overlap"] = False
        self._read_formats()

    def _read_formats(self) -> None:
        converters = self.options.get("model.converters") or []
        self.has("model.converters")
        names = [str(each).rpartition(".")[2] for each in converters if "grouped_mm" not in str(each)]
        for unknown in [name for name in names if name not in ("float8", "mx")]:
            self.found.problems.append(f"model.converters has {unknown}, which is not understood here")
        float8, mx = "quantize.linear.float8.recipe_name", "quantize.linear.mx.recipe_name"
        recipes = {"tensorwise": "fp8-tensorwise", "rowwise": "fp8-rowwise", "rowwise_with_gw_hp": "fp8-rowwise"}
        recipe = self.choice(float8, recipes) or "fp8-tensorwise"
        self.value(mx, string)
        gathers = "quantize.linear.float8.enable_fsdp_float8_all_gather"
        self.value(gathers, yes)
        for name in (float8, mx, gathers):
            if name in self.options and name.split(".")[2] not in names:
                self.found.ignore(self.show(name), "its converter is not among model.converters", "no effect")
        if names:
            matmuls = recipe if "float8" in names else next(each for each in CONVERTERS if each == "mxfp8")
            self.found.put("precision", {"matmuls": matmuls}, f"model.converters = {converters}")


def _module_of(preset: str) -> str:
    return "llama3" if preset.startswith("llama") else "qwen3"
