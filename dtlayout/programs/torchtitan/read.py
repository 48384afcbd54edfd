"""torchtitan, read: the TOML file of its releases up to 0.2.2, or a command that starts it, as our config.

All is read by the names of 0.2.2 and with its defaults; those of other releases are in torchtitan_names.py.
"""

import re
from collections.abc import Mapping
from math import ceil
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.toml import problems_of
from dtlayout.models.presets import PRESETS
from dtlayout.programs.options import positive, several, string, whole
from dtlayout.programs.torchtitan.blocks import BlocksReader
from dtlayout.programs.torchtitan.command import MARK, read_script, rewrite
from dtlayout.programs.torchtitan.names import IGNORED, OTHERWISE, PREDICTED, to_newest
from dtlayout.programs.torchtitan.stages import count_between, count_named, cut_stages
from dtlayout.programs.torchtitan.write import FLAVORS, MIXTURES, MODULES, OPTIONS, ROTATE, SCHEDULES, TORCHTITAN
from dtlayout.programs.understood import OtherFile, Understood
from dtlayout.schedules.schedules import find_schedule
from dtlayout.spec.layout_keys import DISPATCHERS

_PRESETS = {(MODULES[PRESETS[name].family], flavor): name for name, flavor in FLAVORS.items()} | {
    ("qwen3", flavor): f"qwen3-{flavor.lower()}" for flavor in MIXTURES
}
"""torchtitan's name of a model and its flavor → preset with the same sizes."""
_P, _PP, _PARTS = "parallelism.", "parallelism.pipeline_parallel_", "parallelism.module_fqns_per_model_part"
_STAGES = ("schedule", "schedule_csv", "layers_per_stage", "first_stage_less_layers", "last_stage_less_layers",
           "microbatch_size", "microbatches", "split_points")  # fmt: skip
"""Options of a pipeline, behind _PP."""
_DEGREES = ("tp", "cp", "pp", "dp_replicate", "ep")
_SCHEDULES = {theirs.lower(): ours for ours, theirs in SCHEDULES.items()}


def is_ours(file: OtherFile) -> bool:
    """True for a TOML file with torchtitan's sections, and for a script that starts it."""
    if file.tree is None:
        return MARK.search(file.text) is not None
    sections = {name.partition(".")[0] for name in file.tree.values}
    others = {"parallelism", "job", "activation_checkpoint"}
    return file.tree.language == "toml" and "training" in sections and bool(sections & others)


def read(file: OtherFile) -> Understood:
    """The job of a TOML file or of a command; what is not understood is in its `problems`."""
    found = Understood(TORCHTITAN.engine, TORCHTITAN.title)
    options, is_named = (dict(file.tree.values), False) if file.tree is not None else read_script(file, found)
    found.num_gpus = file.num_gpus or found.num_gpus
    releases, newest, own = set[str](), dict[str, Any](), dict[str, str]()
    for theirs, value in options.items():
        name, release = to_newest(theirs)
        if value != {}:  # a section without options
            newest[name], own[name] = value, theirs
            releases.add(release)
    found.rewrite = rewrite
    found.names = {name: theirs for name, theirs in own.items() if name != theirs}
    release = "0.3" if is_named else next((each for each in ("0.3", "0.0", "0.1") if each in releases), "0.2.2")
    _TorchtitanReader(found, newest, release).read(file.given)
    for name, theirs in own.items():
        if name != theirs:  # rows and problems name an option as the file does
            pattern = re.compile(rf"(?<![\w.]){re.escape(name)}(?!\.?\w)")
            found.rows = [row._replace(option=pattern.sub(theirs, row.option)) for row in found.rows]
            found.problems = [pattern.sub(theirs, problem) for problem in found.problems]
    return found


class _TorchtitanReader(BlocksReader):
    def read(self, given: Mapping[str, str]) -> None:
        """Fill the value that was given, section by section."""
        self._read_model(given.get("n_layers", ""))
        self._read_optimizer()
        self.read_table(OPTIONS)
        self.tp, self.cp, self.pp, self.copies, self.ep = (self.found.get("layout", key, 1) for key in _DEGREES)
        self._read_degrees()
        self._read_experts()
        self._read_batch(self._read_stages())
        self._read_sharding()
        self.read_recompute()
        self.read_kernels()
        self.read_formats()
        for name, predicted in PREDICTED.items():
            if str(self.options.get(name)).lower() == str(predicted).lower():
                self.has(name)
        self.read_rest(IGNORED, OTHERWISE)

    def _read_model(self, num_layers: str) -> None:
        name, flavor = self.value("model.name", string) or "llama3", self.value("model.flavor", string) or "debugmodel"
        bare = re.sub(r"_(flex|varlen)(_attn)?$", "", flavor)
        preset = _PRESETS.get((name.removesuffix("_ft"), bare))
        self.model = PRESETS[preset] if preset else None
        self.num_layers = self.model.num_layers if self.model else int(num_layers) if num_layers.isdigit() else 0
        shown = f"model.name = {name}, model.flavor = {flavor}"
        if preset is None:
            self.found.ignore(shown, "the sizes are in the program's code: --model M says them", "assumed")
        else:
            self.found.put("model", {"name": preset}, shown)
        if bare != flavor or self.release == "0.3":
            self.found.ignore(f"model.flavor = {flavor}", "its attention is predicted as SDPA", "assumed")
        elif self.release == "0.2.2":  # those before try FlashAttention-2 first
            self.assume("kernels", {"attention": "sdpa-cudnn"}, "", "the first that SDPA tries")

    def _read_optimizer(self) -> None:
        """Options by which 0.3 says the optimizer in a way of its own."""
        betas = self.options.get("optimizer.betas")
        if self.has("optimizer.betas") and isinstance(betas, list) and len(betas) == 2:
            self.options = {**self.options, "optimizer.beta1": betas[0], "optimizer.beta2": betas[1]}
        elif betas is not None:
            self.refuse("optimizer.betas", "is no pair of numbers")
        if self.options.get("optimizer.implementation") == "fused_opt_states_bf16":
            self.has("optimizer.implementation")
            self.found.put("optimizer", {"state_format": "bfloat16"}, self.show("optimizer.implementation"))

    def _read_degrees(self) -> None:
        """Check the degrees of data parallelism, and find the number of GPUs by them."""
        others, num_gpus = self.tp * self.cp * self.pp * self.copies, self.found.num_gpus
        name, self.shards = f"{_P}data_parallel_shard_degree", self.found.get("layout", "dp_shard", -1)
        if self.shards == -1:
            self.shards = 0 if num_gpus % others else num_gpus // others  # 0 where the GPUs are not known
            if num_gpus % others:
                said = [self.show(each) for each in self.options if re.fullmatch(rf"{_P}\w+_degree", each)]
                self.found.problems.append(f"{num_gpus} GPUs are no multiple of {others}, by {', '.join(said)}")
        elif self.shards < 1:
            self.refuse(name, "is neither -1 nor above 0")
        else:
            self.found.num_gpus = needed = others * self.shards
            if num_gpus and num_gpus != needed:
                self.refuse(name, f"and the other degrees make {needed} GPUs, and the job has {num_gpus}")
        self.is_whole = self.shards == 1 == self.cp
        if self.is_whole and self.tp * self.pp > 1 and self.release != "0.3":
            if self.copies > 1:
                self.refuse(f"{_P}data_parallel_replicate_degree", "beside tp or pp takes a shard degree above 1")
            params = self.found.get("precision", "params", "float32")
            if params != self.found.get("precision", "compute"):
                note = "nothing is sharded, beside tp or pp"
                self.take_back("precision", {"compute": params}, "training.mixed_precision_param", note)
        name = f"{_P}context_parallel_rotate_method"
        method = self.choice(name, {theirs: ours for ours, theirs in ROTATE.items()})
        if self.cp > 1:
            self.put_or_default("layout", {"cp_method": method or "gather"}, name, "its default, allgather")
        elif method:
            self.found.ignore(self.show(name), "cp is 1", "no effect")

    def _read_experts(self) -> None:
        name, ranks = f"{_P}expert_parallel_degree", self.shards * self.cp * self.tp
        mixes = self.model is None or self.model.experts is not None
        backend = self.choice(f"{_P}expert_parallel_comm_backend", {"standard": DISPATCHERS[0], "deepep": "deepep"})
        cut = self.value(f"{_P}expert_tensor_parallel_degree", positive) or 1
        if not mixes and self.ep > 1:
            self.ep = 1
            self.take_back("layout", {"ep": 1}, name, "the model has no experts")
        for each in ("expert_parallel_comm_backend", "expert_tensor_parallel_degree"):
            if self.ep == 1 and self.has(f"{_P}{each}"):
                self.found.ignore(self.show(f"{_P}{each}"), "ep is 1", "no effect")
        if self.ep > 1:
            if backend:
                self.found.put("layout", {"ep_dispatcher": backend}, self.show(f"{_P}expert_parallel_comm_backend"))
            if backend == "deepep" and self.model and self.release == "0.2.2":
                note = "0.2.2 itself has it for DeepSeek and Llama 4 alone"
                self.found.ignore(self.show(f"{_P}expert_parallel_comm_backend"), note, "assumed")
            if ranks % self.ep:
                self.refuse(name, f"does not divide the {ranks} ranks of dp_shard, cp and tp")
        if self.ep > 1 and cut > 1:
            self.refuse(f"{_P}expert_tensor_parallel_degree", "cuts experts by tp, which is not predicted; 1 is")
        elif self.ep == 1 and self.tp > 1 and self.model and self.model.experts:
            self.refuse(name, "leaves experts cut by tp, which is not predicted; a degree above 1 is")

    def _read_stages(self) -> int:
        """Note the schedule and the stages, of which the number is returned."""
        names = {key: f"{_PP}{key}" for key in _STAGES}
        if self.pp == 1:
            for name in (*names.values(), _PARTS):
                if self.has(name):
                    self.found.ignore(self.show(name), "pp is 1", "no effect")
            return 1
        said = self.value(names["schedule"], string) or "1F1B"
        ours = _SCHEDULES.get(said.lower().replace("_", ""))
        if ours is None or self.value(names["schedule_csv"], string):
            self.refuse(names["schedule" if ours is None else "schedule_csv"], "is nothing that is known here")
            return self.pp
        schedule = find_schedule(ours)
        try:
            layers, name, note = self._cut(schedule.least_virtual_stages, names)
        except InvalidConfig as error:
            self.found.problems += error.problems
            return self.pp
        virtual = len(layers) // self.pp if layers else schedule.least_virtual_stages
        if len(layers) % self.pp or not schedule.takes(self.pp, virtual):
            self.refuse(names["schedule"], f"on {self.pp} ranks takes no {len(layers)} stages, as {name} makes")
        note_schedule = "its default" if ours == "1f1b" else f"its default has {virtual} stages on a rank"
        self.put_or_default("layout", {"schedule": ours, "virtual_stages": virtual}, names["schedule"], note_schedule)
        if layers:
            self.put_or_default("layout", {"stage_layers": layers}, name, note)
        else:
            self.found.ignore("", "stages are cut by cost: --given n_layers=N says the blocks, for its rule", "assumed")
        return self.pp * virtual

    def _cut(self, virtual: int, names: Mapping[str, str]) -> tuple[list[int], str, str]:
        """Blocks of each stage, the option that says them, and a note where none does; none if their number is unknown.

        InvalidConfig for stages that are none.
        """
        size, points = self.value(names["layers_per_stage"], positive), self.value(names["split_points"], several)
        ends = [self.value(names[f"{end}_stage_less_layers"], whole) for end in ("first", "last")]
        first, last = (1 if each is None else each for each in ends)
        name = _PARTS if self.has(_PARTS) else names["split_points" if points else "layers_per_stage"]
        if name != _PARTS and (size or points) and not self.num_layers:
            raise InvalidConfig(
                f"{name} takes the number of blocks, which is in the program's code: --given n_layers=N"
            )
        with problems_of(name):
            if name == _PARTS:
                return count_named(self.options[_PARTS], self.num_layers), name, ""
            if points:
                return count_between(points, self.num_layers), name, ""
            number = ceil((self.num_layers + first + last) / size) if size else self.pp * virtual
            note = "its rule, where embedding and head count as blocks"
            return cut_stages(self.num_layers, number, first, last) if self.num_layers else [], name, note

    def _read_batch(self, num_stages: int) -> None:
        """Sequences of a forward and of a step; a rank is given those of all its microbatches in a pipeline."""
        name, step = "training.local_batch_size", "training.global_batch_size"
        local = self.value(name, positive) or 8
        ours = local
        if self.pp > 1:
            name = f"{_PP}microbatch_size"
            count = self.value(f"{_PP}microbatches", positive) or (num_stages if self.release == "0.0" else None)
            ours = self.value(name, positive) or (max(1, local // count) if count else 1)
            if local % ours or (count and local % count):
                self.refuse("training.local_batch_size", f"is no multiple of the pipeline's microbatch, {ours}")
        default = "its default" + ", by which a stage has a microbatch" * (self.pp > 1 and self.release == "0.0")
        self.put_or_default("layout", {"micro_batch": ours}, name, default, f"{name} = {ours}")
        total, ranks = self.value(step, whole) or -1, self.copies * self.shards
        if total > 0:
            self.found.put("batch", {"global_batch": total}, self.show(step))
        if total > 0 and ranks and total % (local * ranks):
            self.refuse(step, f"is no multiple of local_batch_size * ranks of dp = {local} * {ranks}")
        elif total > 0 and ranks and self.pp > 1 and (times := total // (local * ranks)) > 1:
            self.found.ignore(self.show(step), f"fills the pipeline {times} times, and is predicted as once", "assumed")
        elif total <= 0 and ranks:
            note = "local_batch_size on each rank of dp"
            self.put_or_default("batch", {"global_batch": local * ranks}, step, note)
        elif total <= 0:
            self.found.ignore(step, "local_batch_size on each rank of dp: --world N says how many", "assumed")

    def _read_sharding(self) -> None:
        name = f"{_P}fsdp_reshard_after_forward"
        how = self.choice(name, {each: each for each in ("default", "always", "never")}) or "default"
        if self.is_whole:
            if self.has(name):
                self.found.ignore(self.show(name), "nothing is sharded", "no effect")
            if self.found.get("layout", "offload") == "optimizer" and self.release != "0.3":
                self.take_back("layout", {"offload": "none"}, "training.enable_cpu_offload", "nothing is sharded")
            return
        if how == "always" and self.pp > 1:
            self.refuse(name, "in a pipeline is not predicted; never is")
        zero = 1 if self.pp > 1 else 2 if how == "never" else 3
        default = "its default: parameters are gathered again, but in a pipeline"
        self.put_or_default("layout", {"zero": zero}, name, default, f"{name} = {how}")
        if self.copies > 1 and self.shards == 1:
            self.found.ignore(f"{_P}context_parallel_degree", "state that cp shards is predicted as copies", "assumed")
