"""A step of one rank of a simulated cluster, by the code that trains: the memory that it held, its messages and work.

[Note: what is real]
Modules, plan, FSDP2, schedule, runtime and optimizer are those of a run: `assemble` builds and `TrainStep` steps them.
Not real are the process group, which sends nothing, and the tensors, which have no memory, so that nobody can look at a
number. torch keeps groups and caches for a whole process, so each rank takes a process of its own.

Long steps are run with fewer microbatches, [Note: folding] in dryrun/sampled_schedule.py. Where only the peak is asked
for, they are run with fewer actions and blocks too.
"""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtlayout.config.config import Config
from dtlayout.dryrun.blocks import ActionMemory
from dtlayout.dryrun.collectives import Collective, observe_collective
from dtlayout.dryrun.experts import hand_out_counts
from dtlayout.dryrun.operators import GlooCopies, list_stand_ins
from dtlayout.dryrun.report import Done, Message, Place, RankReport
from dtlayout.dryrun.sampled_schedule import fold
from dtlayout.dryrun.world import fake_tensors, fake_world
from dtlayout.measure.ledger import UPDATE, Highest
from dtlayout.measure.memory import StorageTracker
from dtlayout.measure.places import PlaceRecorder
from dtlayout.measure.work import WorkCounter
from dtlayout.mesh.axes import AXES, EP, axis_sizes, axis_strides, coordinate, expert_sizes
from dtlayout.models.families import describe
from dtlayout.pipelining.schedule import Schedule
from dtlayout.plans.init import allocate
from dtlayout.schedules.actions import Action, Kind
from dtlayout.spec.kernel_table import kernels_replaced
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.training.build import Assembly, assemble
from dtlayout.training.optimizer import build_optimizer
from dtlayout.training.step import TrainStep

_DEVICE = "cpu"
"""Device that fake tensors say they lie on."""


def dry_run(
    config: Config,
    layout: Layout,
    kernels: Kernels,
    rank: int,
    *,
    device_type: str,
    gpus_per_node: int,
    num_steps: int = 0,
    folds: bool = True,
    schedule: Schedule | None = None,
    left_out: Container[int] = (),
    action_memory: ActionMemory | None = None,
    on_progress: Callable[[float], None] = lambda share: None,
) -> RankReport:
    """Report of one later step of `rank`, or of the first `num_steps` of a run where that is above 0.

    A later step is one after the optimizer's first. The layout must be legal, and `kernels` have no "auto". Operators
    keep what they keep on `device_type`. With `folds`, microbatches that repeat others are left out. `schedule`, by
    default the layout's own, may lack actions, and `left_out` names blocks that are not built. With `action_memory`, it
    gets the memory of each action, and no work or messages are counted. `on_progress` gets the share of the actions
    that have begun. Run it in a process of its own: [Note: what is real].
    """
    batch = fold(layout, config.batch) if folds else config.batch
    stand_ins = kernels_replaced(*list_stand_ins(device_type))
    with fake_world(rank, layout.world_size), fake_tensors() as fake, stand_ins:

        def allocate_fake(modules: Sequence[nn.Module], model: ModelShape, seed: int, device_type: str) -> None:
            with fake:
                allocate(modules, device_type)

        assembly = assemble(
            config.model, batch, replace(layout, offload_folder=""), kernels, config.precision,
            seed=config.train.seed, device_type=_DEVICE, give_weights=allocate_fake, left_out=left_out,
            schedule=schedule,
        )  # fmt: skip
        hand_out_counts(assembly.modules, config.model.experts)
        num_actions = max(1, num_steps) * len(assembly.runtime.actions)
        with fake:
            observer = _Observer(config, layout, assembly, action_memory, lambda done: on_progress(done / num_actions))
            if num_steps == 0:
                observer.prime()
            rows = config.batch.global_batch // layout.dp
            tokens = torch.zeros(rows, config.batch.seq_len // layout.cp, dtype=torch.int64)
            targets = torch.zeros_like(tokens)
            rows = batch.global_batch // layout.dp
            for _ in range(max(1, num_steps)):
                observer.take_step(tokens[:rows], targets[:rows], _see_copies(device_type))
    return observer.report(rank, gpus_per_node)


def _see_copies(device_type: str) -> AbstractContextManager[Any]:
    """A block in which the copies count that gloo makes of messages; NCCL makes none."""
    return GlooCopies() if device_type == "cpu" else nullcontext()


class _Observer:
    """Measures the steps of a rank: memory, work and messages."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        assembly: Assembly,
        action_memory: ActionMemory | None,
        on_action: Callable[[int], None],
    ):
        """`on_action` gets the number of actions that have begun so far."""
        self.config, self.layout, self.assembly, self.on_action = config, layout, assembly, on_action
        self.action_memory = action_memory
        self.optimizer = build_optimizer(assembly.modules, config.model, config.optimizer, assembly.disk)
        max_norm, model = config.optimizer.max_norm, config.model
        self.step = TrainStep(assembly.runtime, self.optimizer, max_norm=max_norm, mesh=assembly.mesh, model=model)
        self.step.reads_numbers = False
        assembly.runtime.before_action = self._begin
        self.places = PlaceRecorder(assembly.modules)
        self.tracker = StorageTracker(
            assembly.modules, [self.optimizer], on_peak=self._note_peak, observers=[self._observe],
            state_on=layout.state_place,
        )  # fmt: skip
        self.curve: list[Highest] = []
        self.num_begun = 0
        self.action: Action | None = None
        self.module_at_peak = self.action_at_peak = ""

    def prime(self) -> None:
        """Make what a first step makes once: FSDP2's padded shards, and the optimizer's state."""
        for module, sync in zip(self.assembly.modules, self.assembly.sync, strict=True):
            sync.before_gathers()
            for unit in (part for part in module.modules() if isinstance(part, FSDPModule)):
                unit.unshard()
                unit.reshard()
            sync.after_evaluation()
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def take_step(self, tokens: Tensor, targets: Tensor, operators: AbstractContextManager[Any]) -> None:
        """Take one step inside `operators`, a context that replaces some operators."""
        self.work, self.sent = WorkCounter(self._locate), Counter[tuple[Place, Collective]]()
        with self.places, self.tracker, operators:
            self.step.launch(tokens, targets)
            if self.action_memory is not None:
                self.action_memory.finish(self.tracker.ledger)
        self.curve += self.tracker.ledger.highest_by_mark

    def report(self, rank: int, gpus_per_node: int) -> RankReport:
        """Report of the memory of all steps, and of the work and messages of the last step."""
        axes, experts = name_groups(rank, self.layout), describe(self.config.model).experts
        done = [Done(place, operation, count) for (place, operation), count in self.work.counts.items()]
        for (place, event), count in self.sent.items():
            crosses_node = len({r // gpus_per_node for r in event.ranks}) > 1
            # Whatever other axis has the same ranks.
            goes_to_experts = experts and event.name == "all_to_all" and place.module.endswith(f".{experts.module}")
            axis = EP if goes_to_experts else axes[event.ranks]
            done.append(Done(place, Message(event.name, axis, event.nbytes, crosses_node), count))
        return RankReport(
            rank=rank,
            coordinate=coordinate(rank, self.layout),
            peak_bytes=self.tracker.ledger.peak_bytes,
            parts=self.tracker.ledger.peak,
            host_parts=self.tracker.host.peak,
            disk_parts=self.tracker.disk.peak,
            module=self.module_at_peak,
            action=self.action_at_peak,
            curve=self.curve,
            done=done,
            num_microbatches=self.layout.num_microbatches(self.config.batch),
            num_microbatches_run=self.assembly.schedule.num_microbatches,
        )

    def _locate(self) -> Place:
        """Place (action, module, recomputed or not) of the operator that runs now."""
        is_backward = self.action is not None and self.action.kind is Kind.BACKWARD
        return Place(self.action, self.places.module, is_backward and self.places.is_forward)

    def _observe(self, *operator: Any) -> None:
        if self.action_memory is not None:
            self.action_memory.note(self._locate(), str(operator[0]), self.tracker.ledger)
            return
        self.work.observe(*operator)
        event = observe_collective(*operator)
        if event is not None and len(event.ranks) > 1:
            self.sent[self._locate(), event] += 1

    def _begin(self, action: Action | None) -> None:
        self.action = action
        self.num_begun += action is not None
        self.on_action(self.num_begun)
        ledger = self.tracker.ledger
        if self.action_memory is not None:
            self.action_memory.begin(ledger)
        ledger.mark(str(action or UPDATE))

    def _note_peak(self) -> None:
        self.module_at_peak, self.action_at_peak = self.places.module, str(self.action or UPDATE)


def name_groups(rank: int, layout: Layout) -> dict[tuple[int, ...], str]:
    """Ranks of each group that a rank can talk in → names of the group's axes, or "all".

    Groups that experts alone have come last.

    >>> name_groups(1, Layout(pp=2, tp=2))
    {(0, 1): 'tp', (1, 3): 'pp', (0, 1, 2, 3): 'all'}
    >>> list(name_groups(0, Layout(dp_shard=4, ep=2)).values())
    ['dp_shard', 'ep', 'expert_shards']
    """
    place, sizes, strides = coordinate(rank, layout), axis_sizes(layout), axis_strides(layout)
    axes = [axis for axis in AXES if sizes[axis] > 1]
    joined: dict[tuple[int, ...], list[str]] = {(rank,): []}
    for axis in reversed(axes):
        offsets = [(i - place[axis]) * strides[axis] for i in range(sizes[axis])]
        for ranks, names in list(joined.items()):
            joined[tuple(sorted(r + offset for r in ranks for offset in offsets))] = [axis, *names]
    del joined[rank,]
    found = {ranks: "all" if len(names) == len(axes) > 1 else "·".join(names) for ranks, names in joined.items()}
    stride = 1
    for axis, size in reversed(expert_sizes(layout).items()):
        first = rank - rank // stride % size * stride
        if size > 1:
            found.setdefault(tuple(range(first, first + size * stride, stride)), axis)
        stride *= size
    return found
