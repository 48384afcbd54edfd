"""DeepSpeed, read: its JSON file alone, and its options in the files of programs that start it.

Values that are "auto" are those of the Trainer's arguments, which the file does not have.
"""

from collections.abc import Mapping
from typing import Any

from dtlayout.programs.hugging_face.deepspeed import FORMATS, OPTIMIZERS
from dtlayout.programs.hugging_face.spread import Spread, settle_formats, settle_layout
from dtlayout.programs.hugging_face.words_reader import WordsReader
from dtlayout.programs.options import positive, real, whole, yes
from dtlayout.programs.understood import OtherFile, Understood

IGNORED: Mapping[str, str] = {
    "logs": r"steps_per_print|wall_clock_breakdown|dump_state|memory_breakdown|(flops_profiler|tensorboard|wandb"
    r"|csv_monitor|comet|comms_logger|comms_config|monitor_config)(\..*)?",
    "checkpoints": r"checkpoint(\..*)?|zero_optimization\.(stage3_)?gather_(16bit|fp16)_weights_on_model_save"
    r"|zero_optimization\.(load_from_fp32_weights|elastic_checkpoint)|load_universal_checkpoint",
    "the scale of the loss": r"fp16\.(auto_cast|loss_scale|loss_scale_window|initial_scale_power|hysteresis"
    r"|consecutive_hysteresis|min_loss_scale)",
    "the course of the learning rate": r"scheduler(\..*)?",
    "how ranks meet": r"zero_allow_untested_optimizer|zero_force_ds_cpu_optimizer|prescale_gradients"
    r"|gradient_predivide_factor|elasticity(\..*)?|aio(\..*)?|disable_allgather|seq_parallel_communication_data_type",
    "data": r"data_efficiency(\..*)?|data_sampling(\..*)?",
}  # fmt: skip
"""Subject of options that change no prediction here → a pattern of their names."""
OTHERWISE = (
    r"zero_optimization\.(allgather_partitions|allgather_bucket_size|reduce_scatter|reduce_bucket_size"
    r"|contiguous_gradients|round_robin_gradients|(stage3_)?(prefetch_bucket_size|max_live_parameters"
    r"|max_reuse_distance|param_persistence_threshold|model_persistence_threshold|module_granularity_threshold)"
    r"|sub_group_size|ignore_unused_parameters|legacy_stage1|memory_efficient_linear|use_all_reduce_for_fetch_params"
    r"|parameter_alignment|compute_grad_norm|log_trace_cache_warnings"
    r"|offload_(optimizer|param)\.(pin_memory|buffer_count|buffer_size|max_in_cpu|fast_init|pipeline.*|nvme_path))"
    r"|gradient_accumulation_dtype|bf16\.immediate_grad_update|sparse_gradients"
)
"""Pattern of options that are predicted as if they were not there: buffers above all."""
_OFF: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "zero_optimization.zero_hpz_partition_size": ((1,), "a second copy of the weights in each node is not predicted"),
    "zero_optimization.zero_quantized_weights": ((False,), "weights that are gathered in int8 are not predicted"),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), "frozen weights in int8 are not predicted"),
    "zero_optimization.zero_quantized_gradients": ((False,), "gradients that are sent in int4 are not predicted"),
    "zero_optimization.mics_shard_size": ((-1, 0), "MiCS is not predicted; stage 3 without it is"),
    "zero_optimization.offload_optimizer.ratio": ((1, 1.0), "an update by both host and GPU is not predicted; 1 is"),
    "tensor_parallel.autotp_size": ((0, 1), "tensor parallelism of DeepSpeed is not predicted"),
    "sequence_parallel_size": ((1,), "sequence parallelism of DeepSpeed is not predicted"),
    "compile.deepcompile": ((False,), "DeepCompile is not predicted"),
    "torch_autocast.enabled": ((False,), "ZeRO beneath torch.autocast is not predicted; bf16.enabled is"),
    "amp.enabled": ((False,), "apex is not predicted; bf16.enabled is"),
    "fp16.fp16_master_weights_and_grads": ((False,), "masters in fp16 are not predicted"),
}  # fmt: skip
"""Option that has to be off → values that are, and the reason."""
_NO_CHECKPOINTING = "blocks of transformers do not ask for it: gradient_checkpointing does"
AUTO = "auto"


def is_ours(file: OtherFile) -> bool:
    """True for a file with DeepSpeed's own names at its top."""
    if file.tree is None:
        return False
    names = {name.partition(".")[0] for name in file.tree.values}
    if names & {"zero_optimization", "zero_allow_untested_optimizer", "train_micro_batch_size_per_gpu"}:
        return not names & {"base_model", "model_name_or_path", "distributed_type", "model"}
    return {"train_batch_size", "fp16"} <= names or {"train_batch_size", "bf16"} <= names


def read(file: OtherFile) -> Understood:
    """The job of a JSON file; what is not understood is in its `problems`."""
    assert file.tree is not None, "is_ours looks at trees alone"
    found = Understood("deepspeed", "DeepSpeed", num_gpus=file.num_gpus)
    reader = WordsReader(found, file.tree.values, {})
    spread = Spread()
    zero = ZeroReader(reader)
    zero.read(spread)
    compute = zero.read_compute(None)
    dp = settle_layout(found, spread)
    settle_formats(found, spread, compute, "", "")
    zero.put_batch(dp)
    zero.read_optimizer()
    reader.read_rest(IGNORED, OTHERWISE)
    return found


class ZeroReader:
    """Reads DeepSpeed's options by a reader whose file has them, under names of its own or in a table."""

    def __init__(self, reader: WordsReader, before: str = "", usual_stage: int = 0):
        """`before` precedes DeepSpeed's names in the file; `usual_stage` is that of a file which says none."""
        self.reader, self.found, self.before, self.usual_stage = reader, reader.found, before, usual_stage

    def ask(self, name: str, kind: Any) -> Any:
        """The option's value; None where it is not there or auto."""
        if not self.says(name) or self.reader.options[self.own(name)] == AUTO:
            return None
        return self.reader.ask(self.before + name, kind)

    def says(self, name: str) -> bool:
        """True if the file has the option."""
        return self.reader.says(self.before + name)

    def own(self, name: str) -> str:
        """The option's name in the file."""
        return self.reader.own(self.before + name)

    def shown(self, name: str) -> str:
        """The option as the file has it."""
        return self.reader.shown(self.before + name)

    def select(self, name: str, words: Mapping[Any, Any]) -> Any:
        """Our word for the option's value."""
        return self.reader.select(self.before + name, words)

    def is_auto(self, name: str) -> bool:
        """True if the Trainer's arguments fill the option."""
        return self.says(name) and self.reader.options[self.own(name)] == AUTO

    def read(self, spread: Spread) -> None:
        """Fill in the sharding."""
        spread.kind = "zero"
        stage = self.ask("zero_optimization.stage", whole)
        spread.shown = self.shown("zero_optimization.stage")
        if stage not in (None, 0, 1, 2, 3):
            self.found.problems.append(f"{self.own('zero_optimization.stage')}={stage} is no stage of ZeRO: 0 to 3")
        spread.zero = self.usual_stage if stage is None else stage
        if stage is None:
            spread.shown = ""
        elif stage == 0:
            self.found.ignore(spread.shown, "each GPU has all of the state", "no effect")
        self._read_offload(spread)
        self._read_overlap(spread.zero)
        self._read_formats(spread)
        for name, (off, why) in _OFF.items():
            self.reader.need(self.before + name, (*off, AUTO), why)
        for name in self.reader.options:
            if name.removeprefix(self.before).startswith("activation_checkpointing"):
                self.reader.used.add(name)
                self.found.ignore(self.reader.show(name), _NO_CHECKPOINTING, "no effect")

    def _read_offload(self, spread: Spread) -> None:
        names = [f"zero_optimization.offload_{part}" for part in ("optimizer", "param")]
        update, weights = map(self._read_device, names)
        shown = [self.shown(f"{name}.device") for name in names if self._read_device(name) != "none"]
        if self.ask("zero_optimization.cpu_offload", yes):  # an earlier name
            update, shown = "cpu", [self.shown("zero_optimization.cpu_offload"), *shown[update != "none" :]]
        if weights != "none" and spread.zero != 3:
            why = f"stage {spread.zero} keeps parameters whole: stage 3 offloads them"
            self.found.ignore(shown.pop(), why, "no effect")
            weights = "none"
        if update != "none" and spread.zero == 0:
            self.found.ignore(shown[0], "stage 0 shares no state that the host could have", "no effect")
            update = "none"
        own = self.own("zero_optimization.offload_optimizer.device")
        if update == weights == "none":
            return
        if update == "none" or (spread.zero == 3 and weights == "none"):
            missing = "offload_param" if weights == "none" else "offload_optimizer"
            self.found.problems.append(
                f"{own}={update}: at stage 3 offload without {missing} is not predicted; with both it is, and "
                f"offload_optimizer alone at stage 2"
            )
            return
        if "nvme" in (update, weights) and update != weights and spread.zero == 3:
            self.found.problems.append(
                f"{own}={update} beside offload_param on {weights} is not predicted; both on nvme are"
            )
            return
        if update == "nvme" and spread.zero != 3:
            self.found.problems.append(f"{own}=nvme is for stage 3 alone; use cpu")
            return
        spread.offloads, spread.on_disk, spread.offload_shown = True, update == "nvme", ", ".join(shown)

    def _read_device(self, name: str) -> str:
        words = {"none": "none", "cpu": "cpu", "nvme": "nvme"}
        if (said := self.select(f"{name}.device", words)) is not None:
            return str(said)
        inside = f"{self.before}{name}."
        return "cpu" if any(each.startswith(inside) for each in self.reader.options) else "none"  # its default

    def _read_overlap(self, stage: int) -> None:
        said, name = self.ask("zero_optimization.overlap_comm", yes), "zero_optimization.overlap_comm"
        overlaps = said if said is not None else stage == 3
        note = "" if said is not None else "its default: at stage 3 alone"
        self.reader.tell("overlap_dp", str(overlaps).lower(), self.shown(name) if said is not None else "", note)

    def _read_formats(self, spread: Spread) -> None:
        sent = self.select("communication_data_type", FORMATS)
        added = self.select("data_types.grad_accum_dtype", FORMATS)
        if sent or added:
            name = "communication_data_type" if sent else "data_types.grad_accum_dtype"
            spread.reduces, spread.reduces_shown = sent or added, self.shown(name)
        name, states = "bf16.bf16_master_weights_and_grads", self.ask("bf16.bf16_optimizer_states", yes)
        if self.ask(name, yes):
            spread.masters, spread.masters_shown = "bfloat16", self.shown(name)
            if not states:
                self.found.put("optimizer", {"state_format": "float32"}, spread.masters_shown)
        elif states:
            self.found.ignore(self.shown("bf16.bf16_optimizer_states"), "without bf16_master_weights_and_grads",
                              "no effect")  # fmt: skip

    def read_compute(self, trainers: str | None) -> str:
        """Put the compute format, and return it; `trainers` is that of the Trainer's arguments, None without any."""
        enabled = {
            kind: self.ask(f"{name}.enabled", yes) if self.says(f"{name}.enabled") else None
            for kind, name in (("bfloat16", "bf16"), ("bfloat16 ", "bfloat16"), ("float16", "fp16"))
        }
        names = {"bfloat16": "bf16.enabled", "bfloat16 ": "bfloat16.enabled", "float16": "fp16.enabled"}
        on = [kind for kind, is_on in enabled.items() if is_on]
        autos = [name for name in names.values() if self.is_auto(name)]
        if len({each.strip() for each in on}) > 1:
            self.found.problems.append("bf16.enabled and fp16.enabled are both true, and one format is computed in")
        if trainers is not None and on and on[0].strip() != trainers:
            self.found.problems.append(
                f"{self.own(names[on[0]])}=true computes in {on[0].strip()}, and the arguments in {trainers}: "
                f"transformers refuses that"
            )
        if on:
            compute, shown, note = on[0].strip(), self.shown(names[on[0]]), ""
        elif trainers is not None:
            return trainers
        elif autos:
            compute, shown, note = "bfloat16", ", ".join(map(self.shown, autos)), "auto: the arguments say it"
        else:
            compute, shown, note = "float32", "", "neither bf16 nor fp16 is enabled"
        self.found.put("precision", {"compute": compute}, shown, "assumed" if note else "read", note)
        return compute

    def put_batch(self, dp: int, trainers: Mapping[str, int] | None = None) -> None:
        """Put the micro-batch and the batch; `trainers` are those of the Trainer's arguments, and what mismatches them
        is a problem."""
        names = {"micro": "train_micro_batch_size_per_gpu", "steps": "gradient_accumulation_steps",
                 "total": "train_batch_size"}  # fmt: skip
        said = {key: self.ask(name, positive) for key, name in names.items()}
        if trainers is not None:
            for key, name in names.items():
                if said[key] is not None and trainers.get(key) not in (None, said[key]):
                    self.found.problems.append(
                        f"{self.own(name)}={said[key]}, and the arguments make {trainers[key]}: transformers "
                        f"refuses that; use auto"
                    )
            return
        micro, steps, total = said["micro"], said["steps"], said["total"]
        if total and dp:
            micro, steps = self._fill(total, dp, micro, steps)
        if micro:
            self._put("layout", "micro_batch", micro, names["micro"], "train_batch_size over GPUs and steps")
        elif self.is_auto(names["micro"]):
            self.found.ignore(self.shown(names["micro"]), "auto: --layout.micro_batch=N says it here", "assumed")
        if total:
            self._put("batch", "global_batch", total, names["total"], "")
        elif micro and dp:
            self._put(
                "batch", "global_batch", micro * (steps or 1) * dp, names["total"], "sequences of all GPUs and steps"
            )
        if total and dp and micro and steps and micro * steps * dp != total:
            self.found.problems.append(
                f"{self.own(names['total'])}={total} is not {micro} sequences of {steps} steps on {dp} GPUs, "
                f"which are {micro * steps * dp}: DeepSpeed refuses that"
            )

    @staticmethod
    def _fill(total: int, dp: int, micro: int | None, steps: int | None) -> tuple[int | None, int | None]:
        """Micro-batch and steps of accumulation, of which one follows from the other; both from none."""
        if micro is None and total % (dp * (steps or 1)) == 0:
            micro = total // (dp * (steps or 1))
        if steps is None and micro and total % (dp * micro) == 0:
            steps = total // (dp * micro)
        return micro, steps

    def _put(self, section: str, key: str, value: int, name: str, note: str) -> None:
        said = self.reader.options.get(self.own(name)) not in (None, AUTO)
        self.found.put(section, {key: value}, self.shown(name) if said else "",
                       "read" if said else "assumed", "" if said else note)  # fmt: skip

    def read_optimizer(self) -> bool:
        """Put DeepSpeed's own optimizer and its clipping; True if the file has one, in the Trainer's place."""
        clip = self.ask("gradient_clipping", real)
        if clip is not None:
            self.found.put("optimizer", {"max_norm": clip or float("inf")}, self.shown("gradient_clipping"))
        if (name := self.select("optimizer.type", {each.lower(): each for each in OPTIMIZERS})) is None:
            return False
        ours = OPTIMIZERS[name]
        self.found.put("optimizer", {"name": ours}, self.shown("optimizer.type"))
        for key, option in (("lr", "lr"), ("weight_decay", "weight_decay"), ("eps", "eps"), ("momentum", "momentum")):
            if (value := self.ask(f"optimizer.params.{option}", real)) is None:
                continue
            if key == {"adamw": "momentum", "sgd": "eps"}[ours]:
                self.found.ignore(self.shown(f"optimizer.params.{option}"), f"{name} has none", "no effect")
            else:
                self.found.put("optimizer", {key: value}, self.shown(f"optimizer.params.{option}"))
        if self.says("optimizer.params.betas") and not self.is_auto("optimizer.params.betas"):
            self._read_betas()
        for option in ("torch_adam", "adam_w_mode"):
            self.ask(f"optimizer.params.{option}", yes)
        return True

    def _read_betas(self) -> None:
        own = self.own("optimizer.params.betas")
        value = self.reader.options[own]
        try:
            first, second = map(real, value)
        except (TypeError, ValueError):
            self.found.problems.append(f"{own}={value} is no pair of numbers")
            return
        self.found.put("optimizer", {"beta1": first, "beta2": second}, self.shown("optimizer.params.betas"))


def prefix(patterns: Mapping[str, str], before: str) -> dict[str, str]:
    """Patterns of names behind a pattern of other words."""
    return {what: f"{before}({pattern})" for what, pattern in patterns.items()}
