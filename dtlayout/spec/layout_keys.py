"""The keys of `[layout]`: degrees, schedule, sharding and recomputation, and what follows from them.

Axes, outermost first: pp, dp_replicate, dp_shard, cp, tp. A degree of 1 means that the axis is off. A value that no
model could have is refused here; layout_rules.py compares a layout with a model and a batch.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, Literal

from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.base.files import expand, find_path_problem
from dtlayout.base.formatting import shorten
from dtlayout.base.refusals import Refusal, refuse, show_value
from dtlayout.base.validators import one_of, path_key, ranged
from dtlayout.schedules.placement import Placement
from dtlayout.schedules.schedules import DEFAULT_SCHEDULE, SCHEDULES, find_schedule
from dtlayout.spec.batch import Batch
from dtlayout.spec.context_parallel import CONTEXT_METHODS, DEFAULT_CONTEXT_METHOD, ContextMethod
from dtlayout.spec.recompute import Recompute

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
OFFLOADS = ("none", "activations", "optimizer", "both", "disk")
"""Values of `layout.offload`."""
DISPATCHERS = ("alltoall", "deepep")
"""Values of `layout.ep_dispatcher`."""
NEEDED_DEGREE = {
    "cp_method": "cp", "sequence_parallel": "tp", "tp_overlap": "tp", "ep_overlap": "ep", "ep_dispatcher": "ep",
    "schedule": "pp",
}  # fmt: skip
"""Key → the degree that has to be above 1 for the key to have an effect."""
_CHOICES: dict[str, Collection[Any]] = {
    "zero": (1, 2, 3), "cp_method": CONTEXT_METHODS, "ep_dispatcher": DISPATCHERS,
    "offload": OFFLOADS,
}  # fmt: skip


class Offload:
    """Readers of the key `offload`, which says what lies in the host's memory or on its disk."""

    offload: str
    """One of OFFLOADS."""

    @property
    def offloads_activations(self) -> bool:
        """Whether activations that blocks keep for their backward lie in the host's memory until then."""
        return self.offload in ("activations", "both")

    @property
    def offloads_state(self) -> bool:
        """Whether the host has and updates parameters, gradients and the optimizer's state, wherever they lie there."""
        return self.offload in ("optimizer", "both", "disk")

    @property
    def has_state_on_disk(self) -> bool:
        """Whether parameters and the optimizer's state lie on the host's disk; gradients lie in its memory."""
        return self.offload == "disk"

    @property
    def state_place(self) -> Literal["device", "host", "disk"]:
        """The place of parameters and of the optimizer's state between steps."""
        return "disk" if self.has_state_on_disk else "host" if self.offloads_state else "device"


@dataclass(frozen=True, kw_only=True)
class LayoutKeys(Offload):
    """Degrees, micro-batch, schedule, ZeRO stage and recomputation of one training step."""

    pp: int = ranged("must be at least 1", 1)
    """Pipeline-parallel degree: ranks that each hold some of the blocks."""
    dp_replicate: int = ranged("must be at least 1", 1)
    """Copies of the sharded model state; with a dp_shard above 1 this is HSDP."""
    dp_shard: int = ranged("must be at least 1", 1)
    """Ranks over which FSDP2 shards the model state."""
    cp: int = ranged("must be at least 1", 1)
    """Context-parallel degree: ranks that share one sequence."""
    cp_method: str = one_of(CONTEXT_METHODS, DEFAULT_CONTEXT_METHOD)
    """How the ranks of cp attend to each other's tokens. ring: keys and values go from rank to rank. gather: all keys
    and values come at once. all-to-all: each rank attends for some of the heads to all tokens. Without effect at
    cp = 1."""
    tp: int = ranged("must be at least 1", 1)
    """Tensor-parallel degree: ranks that share every matmul; keep it inside one node."""
    ep: int = ranged("must be at least 1", 1)
    """Expert-parallel degree: ranks of a stage that share its experts. They are neighbours among the ranks of
    dp_shard, cp and tp; keep them inside one node."""
    sequence_parallel: bool = True
    """Shard the residual stream and the norms over tp along the sequence; without effect at tp = 1."""
    tp_overlap: bool = False
    """Send what sequence parallelism gathers and scatters in pieces, while matmuls work on other pieces; without effect
    at tp = 1."""
    ep_overlap: bool = False
    """Exchange the tokens of one microbatch while another one is computed; without effect at ep = 1."""
    ep_dispatcher: Literal["alltoall", "deepep"] = "alltoall"
    """How tokens are exchanged. alltoall sends a copy of a token for each of its experts. deepep sends one copy to each
    node that has some of these experts, as DeepEP and HybridEP do. Without effect inside a node."""
    micro_batch: int = ranged("must be at least 1", 1)
    """Sequences in one forward of one data-parallel rank."""
    schedule: str = one_of(SCHEDULES, DEFAULT_SCHEDULE)
    """Order of forwards and backwards in the pipeline."""
    virtual_stages: int = ranged("must be at least 1", 1)
    """Stages on each pipeline rank; above 1 only with a schedule that takes them."""
    stage_layers: tuple[int, ...] = ()
    """Blocks of each stage, first to last. Embedding and head may have stages of their own, with 0 blocks. Empty deals
    blocks out by cost."""
    zero: Literal[1, 2, 3] = 1
    """ZeRO stage, which says what is sharded over dp_shard. 1: optimizer state. 2: also gradients. 3: also
    parameters."""
    recompute: str = "none"
    """Blocks that are computed again in backward. none: no block. full: every block. every-N: every N-th block.
    N-of-M: the last N of each M blocks. selective: every block, which keeps the results of its matmuls and its
    attention. keep-attention and keep-matmuls: every block, which keeps the results of that operation alone."""
    offload: Literal["none", "activations", "optimizer", "both", "disk"] = "none"
    """Tensors that lie in the host's memory. activations: those that blocks keep for their backward. optimizer:
    parameters, gradients and the optimizer's state, which the host updates. both: all of these. disk: gradients, with
    parameters and the optimizer's state in files, which are read and written around the update of each block."""
    offload_folder: str = path_key("")
    """Folder on a fast local disk for what `offload = "disk"` keeps there, in files without a name; each rank has its
    own. Without effect for other values of `offload`."""

    def __post_init__(self) -> None:
        refuse(self._find_wrong_values(), InvalidLayout)
        if self.offload_folder:
            self.expand_folder()

    def expand_folder(self) -> None:
        """Replace the `~` of the folder for offload by a home; InvalidLayout for a path that no disk takes."""
        if problem := find_path_problem(self.offload_folder):
            asked = f"layout.offload_folder={show_value(shorten(self.offload_folder, 60))}"
            refuse([Refusal("offload_folder", f"{asked} {problem}")], InvalidLayout)
        object.__setattr__(self, "offload_folder", str(expand(self.offload_folder)))

    def _find_wrong_values(self) -> list[Refusal]:
        """A refusal for each key whose value could belong to no model."""
        values = vars(self)
        found = [Refusal(n, f"layout.{n}={values[n]} must be at least 1") for n in _POSITIVE if values[n] < 1]
        if min(self.stage_layers[1:-1], default=1) < 1 or min(self.stage_layers, default=0) < 0:
            what = f"layout.stage_layers={list(self.stage_layers)} has a stage of nothing"
            advice = "only the first and the last one, with embedding and head, need no blocks"
            found.append(Refusal("stage_layers", what, advice))
        try:
            find_schedule(self.schedule)
        except InvalidConfig as error:
            found += [Refusal("schedule", f"layout.{problem}") for problem in error.problems]
        for name, allowed in _CHOICES.items():
            if values[name] not in allowed:
                what = f"layout.{name}={values[name]!r} is unknown"
                found.append(Refusal(name, what, f"use one of {list(allowed)}"))
        try:
            Recompute.parse(self.recompute)
        except InvalidConfig as error:
            found += [Refusal("recompute", problem) for problem in error.problems]
        return found

    @property
    def dp(self) -> int:
        """Data-parallel degree: ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def expert_dp(self) -> int:
        """Ranks of a stage that hold the same experts."""
        return self.dp * self.cp * self.tp // self.ep

    @property
    def num_stages(self) -> int:
        """Stages into which the model is cut."""
        return self.pp * self.virtual_stages

    @property
    def is_pipelined(self) -> bool:
        """Whether stages lie on several ranks."""
        return self.pp > 1

    @property
    def placement(self) -> Placement:
        """Map of stages to the pipeline ranks that hold them."""
        return find_schedule(self.schedule).place(self.pp, self.virtual_stages)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        return self.is_pipelined and find_schedule(self.schedule).splits_backward

    @property
    def shards_sequence(self) -> bool:
        """Whether sequence parallelism has an effect."""
        return self.sequence_parallel and self.tp > 1

    @property
    def overlaps_tp(self) -> bool:
        """Whether matmuls hide a part of the messages of tp."""
        return self.tp_overlap and self.shards_sequence

    @property
    def overlaps_ep(self) -> bool:
        """Whether computation hides a part of the messages of ep."""
        return self.ep_overlap and self.ep > 1

    @property
    def sends_tokens_once(self) -> bool:
        """Whether a token goes once to each node that has any of its experts."""
        return self.ep_dispatcher == "deepep" and self.ep > 1

    @property
    def context_method(self) -> ContextMethod:
        """Method by which the ranks of cp attend to each other's tokens."""
        return CONTEXT_METHODS[self.cp_method]

    @property
    def attends_in_parts(self) -> bool:
        """Whether attention is joined from parts, each by a kernel that returns its log-sum-exp."""
        return self.cp > 1 and not self.context_method.splits_heads

    def num_microbatches(self, batch: Batch) -> int:
        """Forwards of one data-parallel rank in a step."""
        return batch.global_batch // (self.dp * self.micro_batch)


_POSITIVE = tuple(f.name for f in fields(LayoutKeys) if "rule" in f.metadata)
