"""accelerate, read: its YAML file, the options of `accelerate launch`, and FSDP's options in other programs' files.

FSDP 1 has a strategy, FSDP 2 (fsdp_version: 2) reshard_after_forward, and copies as a degree of parallelism_config.
"""

from collections.abc import Mapping
from typing import Any

from dtlayout.programs.hugging_face import read_deepspeed
from dtlayout.programs.hugging_face.accelerate import ROTATE, STRATEGIES, STRATEGY_NUMBERS
from dtlayout.programs.hugging_face.read_deepspeed import ZeroReader
from dtlayout.programs.hugging_face.spread import Spread, settle_formats, settle_layout
from dtlayout.programs.hugging_face.words_reader import Names, WordsReader, read_beside
from dtlayout.programs.options import positive, whole, yes
from dtlayout.programs.understood import OtherFile, Row, Understood

IGNORED: Mapping[str, str] = {
    "how ranks meet": r"compute_environment|machine_rank|main_process_(ip|port)|rdzv_.*|same_network|gpu_ids"
    r"|main_training_function|enable_cpu_affinity|num_cpu_threads_per_process|max_restarts|monitor_interval"
    r"|(deepspeed_config\.)?deepspeed_(multinode_launcher|hostfile|inclusion_filter|exclusion_filter"
    r"|moe_layer_cls_names)|(ipex|mpirun)_config(\..*)?|module|m|no_python|multi_gpu|role",
    "logs": r"debug|tee|log_dir|quiet|q",
    "TPUs": r"tpu_.*|downcast_bf16|command_file|commands",
    "checkpoints, and how weights are loaded": r"(deepspeed_config\.)?zero3_(init_flag|save_16bit_model)"
    r"|(fsdp_config\.)?fsdp_(state_dict_type|cpu_ram_efficient_loading|sync_module_states)",
    "the compiler": r"(dynamo_config\.)?dynamo_(mode|use_fullgraph|use_dynamic)",
    "the casts of fp8": r"fp8_config\..*",
}  # fmt: skip
"""Subject of options that change no prediction here → a pattern of their names."""
OTHERWISE = (
    r"(fsdp_config\.)?fsdp_(transformer_layer_cls_to_wrap|backward_prefetch(_policy)?|forward_prefetch|use_orig_params"
    r"|limit_all_gathers|min_num_params|cpu_offload_pin_memory|ignored_modules)"
    r"|(parallelism_config\.)?parallelism_config_(cp_backend|sp_.*)"
    r"|(deepspeed_config\.)?offload_(optimizer|param)_nvme_path"
)
"""Pattern of options that are predicted as if they were not there."""
_TABLES = {
    "fsdp_": "fsdp_config.", "parallelism_config_": "parallelism_config.", "dynamo_": "dynamo_config.",
    "zero": "deepspeed_config.", "offload_": "deepspeed_config.", "deepspeed_": "deepspeed_config.",
    "gradient_": "deepspeed_config.",
}  # fmt: skip
"""Beginning of an option of `accelerate launch` → the table of the YAML that has it."""
_ZERO = {
    "zero_optimization.stage": "zero_stage", "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
    "zero_optimization.offload_param.device": "offload_param_device",
}  # fmt: skip
"""DeepSpeed's name of an option → accelerate's."""
_FSDP = ("version", "sharding_strategy", "reshard_after_forward", "offload_params", "activation_checkpointing",
         "auto_wrap_policy")  # fmt: skip
_DEGREES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_comm_strategy", "sp_size")
_TYPES = {"no": "NO", "multi_gpu": "MULTI_GPU", "fsdp": "FSDP", "deepspeed": "DEEPSPEED"}
_MIXED = {"no": "float32", False: "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
_FP8 = {"ao": "fp8-tensorwise", "te": "fp8-tensorwise"}


def is_ours(file: OtherFile) -> bool:
    """True for a YAML file with accelerate's names at its top."""
    if file.tree is None or file.tree.language != "yaml":
        return False
    names = {name.partition(".")[0] for name in file.tree.values}
    return "distributed_type" in names and bool(
        names & {"num_processes", "compute_environment", "mixed_precision", "fsdp_config", "deepspeed_config"}
    )


def read(file: OtherFile) -> Understood:
    """The job of a YAML file, but for what the script says; what is not understood is in its `problems`."""
    assert file.tree is not None, "is_ours looks at trees alone"
    found = Understood("accelerate", "Hugging Face accelerate")
    reader = AccelerateReader(found, file.tree.values, file)
    zero, spread = reader.read(), reader.spread
    found.engine, found.num_gpus = spread.engine, file.num_gpus or found.num_gpus
    if zero is not None:
        compute = zero.read_compute(spread.mixed or None)
    if zero is None or spread.mixed:
        compute = spread.mixed or "float32"
        found.put("precision", {"compute": compute}, spread.mixed_shown, "read" if spread.mixed else "assumed",
                  "" if spread.mixed else "no mixed_precision")  # fmt: skip
    dp = settle_layout(found, spread)
    settle_formats(found, spread, compute, "", "")
    if zero is not None:
        zero.put_batch(dp)
        zero.read_optimizer()
    if spread.recomputes:
        found.put("layout", {"recompute": "full"}, spread.recomputes)
    reader.read_rest()
    return found


class AccelerateReader(WordsReader):
    """Reads what accelerate is told, by its YAML and by the options of its command, which come first."""

    def __init__(
        self, found: Understood, options: Mapping[str, Any], file: OtherFile, said: Mapping[str, Any] | None = None
    ):
        """`said` are options of the command, by their own names."""
        said = said or {}
        for name in said:
            if (inside := _to_yaml(name)) in options:
                found.ignore(f"{inside} = {options[inside]}", f"the command says {name}", "no effect")
        overridden = {_to_yaml(name) for name in said}
        options = {name: value for name, value in options.items() if name not in overridden}
        super().__init__(found, {**options, **said}, _name_options())
        self.file, self.spread = file, Spread()
        self.apart: WordsReader | None = None
        """Reader of DeepSpeed's JSON file, where one is named."""

    def read(self) -> ZeroReader | None:
        """Fill in the GPUs and the sharding; the reader of DeepSpeed's options, None without DeepSpeed."""
        self._read_ranks()
        kind = self.select("distributed_type", _TYPES) or "MULTI_GPU"
        shown = self.shown("distributed_type")
        for flag, named in (("use_fsdp", "FSDP"), ("use_deepspeed", "DEEPSPEED")):
            if self.ask(flag, yes):
                kind, shown = named, self.shown(flag)
        if kind == "NO" and not self.found.num_gpus and not self.says("num_processes"):
            self.found.num_gpus = self.found.gpus_per_node = 1
            self.found.rows.append(Row(shown, "1 GPUs", "read"))
        self._read_mixed()
        read_degrees(self, self.spread)
        self._read_compile()
        self._check_unused(kind)
        if kind == "FSDP":
            read_fsdp(self, self.spread, shown)
        if kind != "DEEPSPEED":
            return None
        zero = self._find_zero()
        zero.read(self.spread)
        self.spread.shown = self.spread.shown or shown
        return zero

    def _read_ranks(self) -> None:
        world, nodes = self.ask("num_processes", whole), self.ask("num_machines", positive) or 1
        if world and world > 0:
            self.found.num_gpus, self.found.gpus_per_node = world, max(1, world // nodes)
        if self.ask("use_cpu", yes):
            self.found.problems.append(f"{self.shown('use_cpu')}: training on CPUs is not predicted")
        self.need("compute_environment", ("LOCAL_MACHINE",), "only files for LOCAL_MACHINE are read")

    def _read_mixed(self) -> None:
        said = self.select("mixed_precision", _MIXED)
        if said is None:
            return
        self.spread.mixed, self.spread.mixed_shown = said, self.shown("mixed_precision")
        if str(self.options[self.own("mixed_precision")]).lower() != "fp8":
            return
        matmuls = self.select("fp8_config.backend", _FP8) if self.says("fp8_config.backend") else "fp8-tensorwise"
        if matmuls:
            self.found.put("precision", {"matmuls": matmuls}, self.shown("mixed_precision"))

    def _read_compile(self) -> None:
        name = "dynamo_config.dynamo_backend"
        backend = self.select(name, {"no": "none", False: "none", "inductor": "model"})
        if backend == "model":
            by_block = self.ask("dynamo_config.dynamo_use_regional_compilation", yes)
            self.found.put("kernels", {"compile": "blocks" if by_block else "model"}, self.shown(name))

    def _check_unused(self, kind: str) -> None:
        """Say what a file has for a kind that is not its own."""
        for table, owner in (("fsdp_config.", "FSDP"), ("deepspeed_config.", "DEEPSPEED")):
            for name in self.options if kind != owner else ():
                if _to_yaml(name).startswith(table) and name not in ("use_fsdp", "use_deepspeed"):
                    self.used.add(name)
                    if self.options[name] is not None:
                        self.found.ignore(self.show(name), f"with distributed_type {kind}", "no effect")

    def _find_zero(self) -> ZeroReader:
        """The reader of DeepSpeed's options: those of its JSON file, or accelerate's own."""
        name = "deepspeed_config.deepspeed_config_file"
        if not self.says(name):
            return ZeroReader(self, usual_stage=2)
        path, values = read_beside(self.one(self.own(name)), self.file, self.own(name))
        self.found.rows.append(Row(self.shown(name), "its values", "read"))
        for each in _ZERO:
            if self.says(each):
                self.found.ignore(self.shown(each), f"{path.name} says it", "no effect")
        self.apart = WordsReader(self.found, values, {})
        self.found.values = self.options  # not those of the other file, which is not changed
        return ZeroReader(self.apart)

    def read_rest(self, ignored: Mapping[str, str] = IGNORED, otherwise: str = OTHERWISE) -> None:
        """Note the options that nobody has asked for, those of DeepSpeed's JSON file too."""
        super().read_rest(ignored, otherwise)
        if self.apart is not None:
            self.apart.read_rest(read_deepspeed.IGNORED, read_deepspeed.OTHERWISE)


def _name_options() -> Names:
    names: dict[str, tuple[str, ...]] = {}
    names |= {theirs: (own, f"deepspeed_config.{own}") for theirs, own in _ZERO.items()}
    names |= {f"fsdp.{key}": (f"fsdp_{key}", f"fsdp_config.fsdp_{key}") for key in _FSDP}
    degrees = {f"parallelism.{key}": f"parallelism_config_{key}" for key in _DEGREES}
    names |= {key: (name, f"parallelism_config.{name}") for key, name in degrees.items()}
    names["parallelism.tp_size"] += ("tp_config.tp_size",)
    inside = ("deepspeed_config.deepspeed_config_file", "dynamo_config.dynamo_backend",
              "dynamo_config.dynamo_use_regional_compilation")  # fmt: skip
    return names | {name: (name.partition(".")[2], name) for name in inside}


def _to_yaml(name: str) -> str:
    """The name in the YAML of an option of the command."""
    table = next((table for start, table in _TABLES.items() if name.startswith(start)), "")
    return name if "." in name else f"{table}{name}"


def read_fsdp(reader: WordsReader, spread: Spread, shown: str) -> None:
    """Fill in FSDP's sharding, by names that begin with "fsdp."; `shown` is the option that asks for FSDP."""
    spread.kind, spread.zero, spread.shown = "fsdp", 3, shown
    version = reader.ask("fsdp.version", positive) or 1
    strategy = _read_strategy(reader, version)
    if version == 2:
        again = reader.ask("fsdp.reshard_after_forward", yes)
        if again is not None:
            spread.zero, spread.shown = 3 if again else 2, reader.shown("fsdp.reshard_after_forward")
        if strategy is not None:
            reader.found.ignore(
                reader.shown("fsdp.sharding_strategy"), "FSDP 2 asks reshard_after_forward", "no effect"
            )
    elif strategy is not None:
        spread.zero, spread.is_hybrid = STRATEGIES[strategy]
        said = reader.says("fsdp.sharding_strategy")
        spread.shown = reader.shown("fsdp.sharding_strategy" if said else "fsdp.reshard_after_forward")
        if strategy == "no_shard":
            spread.kind = "copies"
    if reader.ask("fsdp.offload_params", yes):
        spread.offloads, spread.offload_shown = True, reader.shown("fsdp.offload_params")
        if spread.kind == "copies":
            reader.found.problems.append(f"{spread.offload_shown} beside NO_SHARD is not predicted; FULL_SHARD is")
    if reader.ask("fsdp.activation_checkpointing", yes):
        spread.recomputes = reader.shown("fsdp.activation_checkpointing")
    policy = reader.select(
        "fsdp.auto_wrap_policy", dict.fromkeys(("transformer_based_wrap", "size_based_wrap"), "") | {"no_wrap": "no"}
    )
    if policy == "no":
        reader.found.problems.append(
            f"{reader.shown('fsdp.auto_wrap_policy')} gathers the whole model at once, which is not predicted; "
            f"TRANSFORMER_BASED_WRAP is"
        )


def _read_strategy(reader: WordsReader, version: int) -> str | None:
    """The strategy of FSDP 1, in small letters; reshard_after_forward may say it too."""
    numbers: dict[Any, str] = {}
    for number, name in enumerate(STRATEGY_NUMBERS, 1):
        numbers |= {number: name, str(number): name}
    words = {**{name: name for name in STRATEGIES}, **numbers}
    said: str | None = reader.select("fsdp.sharding_strategy", words)
    if version == 1 and reader.says("fsdp.reshard_after_forward"):
        value = str(reader.options[reader.own("fsdp.reshard_after_forward")]).lower()
        if said is None and value in words:
            return words[value]
        reader.found.ignore(reader.shown("fsdp.reshard_after_forward"), "FSDP 1 asks for a strategy", "no effect")
    return said


def read_degrees(reader: WordsReader, spread: Spread) -> None:
    """Fill in the degrees of parallelism_config, by names that begin with "parallelism."."""
    shown = []
    for key in ("dp_replicate", "dp_shard", "tp", "cp"):
        name = f"parallelism.{key}_size"
        if (size := reader.ask(name, positive)) is not None:
            spread.degrees[key] = size
            shown.append(reader.shown(name))
    if spread.degrees.keys() <= {"tp", "cp"} and all(size == 1 for size in spread.degrees.values()):
        spread.degrees = {}
    spread.degrees_shown = ", ".join(shown)
    reader.need("parallelism.sp_size", (1,), "sequence parallelism by DeepSpeed is not predicted; cp is")
    method = reader.select("parallelism.cp_comm_strategy", {theirs: ours for ours, theirs in ROTATE.items()})
    if method:
        if spread.degrees.get("cp", 1) > 1:
            spread.cp_method = method
        else:
            reader.found.ignore(reader.shown("parallelism.cp_comm_strategy"), "cp is 1", "no effect")
    copies, shards = (spread.degrees.get(key, 1) for key in ("dp_replicate", "dp_shard"))
    if copies > 1 and shards == 1 and spread.degrees.get("tp", 1) * spread.degrees.get("cp", 1) > 1:
        reader.found.problems.append(
            f"{spread.degrees_shown}: accelerate has no copies beside tp or cp without shards; use dp_shard_size "
            f"instead of dp_replicate_size"
        )
