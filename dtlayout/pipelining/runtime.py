"""Runtime: executes a schedule's actions on this rank's stages. A single stage without a pipeline is run the same way.

A stage is any module that takes a tensor and gives one. The last stage also takes the keyword arguments of `step`, and
gives the loss, a scalar. A second argument is the context of a microbatch, which every stage needs besides that tensor.
Gradients add up in the parameters; the GradientSync of each stage decides when they are summed over data-parallel
ranks.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from dtlayout.base.errors import DtlayoutError
from dtlayout.base.formatting import plural
from dtlayout.mesh.axes import PP
from dtlayout.pipelining.schedule import SENDS_IN_FLIGHT, Schedule, receive_of
from dtlayout.pipelining.split_backward import DelayedWeightGradient, StageWeights, accumulate
from dtlayout.pipelining.stage import Boundary
from dtlayout.schedules.actions import COMPUTE, RELEASE, Action, Kind

_FORWARD_ALONE = {Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD}


PassKey = tuple[bool, int, int]
"""(True for a forward or False for a backward, stage, microbatch)."""


class BackwardHook(Protocol):
    """Methods of plans.fsdp.GradientSync that the runtime calls."""

    def expect_microbatches(self, number: int) -> None: ...

    def expect_split_backwards(self) -> None: ...

    def before_backward(self, *, is_last: bool) -> None: ...

    def before_input_backward(self) -> None: ...

    def after_weight_backward(self, *, is_last: bool) -> None: ...

    def after_evaluation(self) -> None: ...

    def end_backward(self) -> None: ...


def build_runtime(
    modules: Sequence[nn.Module], schedule: Schedule, sync: Sequence[BackwardHook], mesh: DeviceMesh, boundary: Boundary
) -> "Runtime":
    """The runtime of this rank; DtlayoutError if the numbers of modules or hooks don't match the schedule.

    `modules` are those of `schedule.placement.stages_of(rank)`, in that order. Where the schedule splits backward
    passes, their linear layers are changed in place (split_backward.py). `sync` has the result of `apply_plan` for each
    module. It is empty where only autograd deals with gradients.
    """
    rank = mesh[PP].get_local_rank()
    stages = schedule.placement.stages_of(rank)
    if len(modules) != len(stages) or len(sync) not in (0, len(stages)):
        raise DtlayoutError(
            f"pipeline rank {rank} of schedule {schedule.name} holds stages {list(stages)}, but {len(modules)} modules "
            f"and {len(sync)} gradient syncs came; give one of each for each stage"
        )
    by_stage = dict(zip(stages, modules, strict=True))
    return Runtime(by_stage, dict(zip(stages, sync, strict=False)), schedule, mesh, boundary)


@dataclass
class Runtime:
    """Runs steps; holds nothing from one step to the next."""

    modules: dict[int, nn.Module]
    """Stage → module, for this rank's stages."""
    sync: dict[int, BackwardHook]
    """Stage → hook, for the stages that have one."""
    schedule: Schedule
    mesh: DeviceMesh
    boundary: Boundary
    micro_batch: int = 0
    """Rows of a microbatch that a training step must bring; 0 for as many as come."""
    before_action: Callable[[Action | None], None] = lambda action: None
    """Called with each action before it is executed, and with None after the last action; for measurements."""
    after_input: Callable[[], None] = lambda: None
    """Called in each forward and backward once its input is there: the time from then on is its own work."""
    before_work: Callable[[PassKey, PassKey | None], None] = lambda work, following: None
    """Called before each forward and backward of a step, with that pass and the rank's next one; for plans.offload."""

    def __post_init__(self) -> None:
        self.group = self.mesh[PP].get_group()
        self.follow(self.schedule)
        for sync in self.sync.values():
            sync.expect_microbatches(self.schedule.num_microbatches)
        splits = any(a.kind is Kind.BACKWARD_WEIGHT for a in self.actions)
        self.weights = {stage: StageWeights(module) for stage, module in self.modules.items()} if splits else {}
        """Linear layers of each stage, if the schedule splits backwards."""
        if splits:
            for sync in self.sync.values():
                sync.expect_split_backwards()

    def follow(self, schedule: Schedule) -> None:
        """Run each later step by this schedule, which may have another number of microbatches, and nothing else."""
        self.schedule = schedule
        self.actions = schedule.ranks[self.mesh[PP].get_local_rank()]
        self.last_backwards = set({a.stage: a for a in self.actions if a.kind in RELEASE}.values())
        works = [a for a in self.actions if a.kind in COMPUTE]
        self.following = dict(zip(works, [*map(_to_work, works[1:]), None], strict=True))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of this rank's stages that are trained, which an optimizer updates."""
        return [p for module in self.modules.values() for p in module.parameters() if p.requires_grad]

    def step(self, inputs: Tensor, contexts: Sequence[Any] = (), **targets: Any) -> Tensor | None:
        """Forward and backward of all microbatches; the sum of their losses where the last stage is, else None.

        `inputs` [microbatches · B, …] go to the first stage. `contexts` has one entry for each microbatch, or none at
        all. Every stage gets the context of its microbatch unchanged. Ranks do not send contexts, so each rank must
        bring the same. `targets` go to the last stage: tensors with as many rows as `inputs` are split with them, other
        values are handed on unchanged. DtlayoutError if the rows do not make equal microbatches, or if there are more
        or fewer contexts.
        """
        step = self._begin(inputs, contexts, targets, trains=True)
        for action in self.actions:
            self.before_action(action)
            if action in self.following:
                self.before_work(_to_work(action), self.following[action])
            step.execute(action)
        loss = step.finish()
        self.before_action(None)
        return loss

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, contexts: Sequence[Any] = (), **targets: Any) -> Tensor | None:
        """Forwards alone, with the arguments and the result of `step`.

        Their order is the schedule's, from which backwards are left out: it cannot deadlock either.
        """
        step = self._begin(inputs, contexts, targets, trains=False)
        for action in self.actions:
            if action.kind in _FORWARD_ALONE:
                step.execute(action)
        loss = step.finish()
        for sync in self.sync.values():
            sync.after_evaluation()
        return loss

    def _begin(self, inputs: Tensor, contexts: Sequence[Any], targets: dict[str, Any], *, trains: bool) -> "_Step":
        num_rows, m = inputs.shape[0], self.schedule.num_microbatches
        if trains and self.micro_batch and num_rows != m * self.micro_batch:
            raise DtlayoutError(
                f"{plural(num_rows, 'row')}, and this rank takes {m * self.micro_batch} ({plural(m, 'microbatch')} of "
                f"{self.micro_batch}); bring those of its data-parallel rank alone"
            )
        if num_rows % m:
            raise DtlayoutError(f"{num_rows} rows do not make {m} equal microbatches; bring a multiple of {m}")
        if len(contexts) not in (0, m):
            raise DtlayoutError(
                f"{plural(len(contexts), 'context')} came for {plural(m, 'microbatch')}; bring one for each, or none"
            )
        split_targets: list[dict[str, Any]] = [{} for _ in range(m)]
        for name, value in targets.items():
            is_split = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == num_rows
            for i, part in enumerate(value.chunk(m) if is_split else [value] * m):
                split_targets[i][name] = part
        return _Step(self, inputs.chunk(m), contexts, split_targets, trains)


@dataclass
class _Step:
    """The tensors that are alive during one step."""

    runtime: Runtime
    inputs: Sequence[Tensor]
    contexts: Sequence[Any]
    targets: Sequence[dict[str, Any]]
    trains: bool
    """Whether the step has backwards; False in evaluation."""
    received: dict[Action, tuple[Tensor, dist.Work | None]] = field(default_factory=dict)
    to_send: dict[Action, Tensor] = field(default_factory=dict)
    sending: dict[int, deque[tuple[Tensor, dist.Work]]] = field(default_factory=lambda: defaultdict(deque))
    pending_backward: dict[tuple[int, int], tuple[Tensor, GradientEdge | None]] = field(default_factory=dict)
    pending_weights: dict[tuple[int, int], list[DelayedWeightGradient]] = field(default_factory=dict)
    loss: Tensor | None = None

    def execute(self, action: Action) -> None:
        match action.kind:
            case Kind.FORWARD:
                self._forward(action)
            case Kind.BACKWARD:
                self._backward(action)
            case Kind.BACKWARD_INPUT:
                self._backward_input(action)
            case Kind.BACKWARD_WEIGHT:
                self._backward_weight(action)
            case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                self._send(action)
            case Kind.RECEIVE_FORWARD | Kind.RECEIVE_BACKWARD:
                self._receive(action)

    def finish(self) -> Tensor | None:
        """Wait for the last messages; the loss, where the last stage is here."""
        for queue in self.sending.values():
            for _, work in queue:
                work.wait()
        left = self.pending_backward, self.pending_weights, self.received, self.to_send
        assert not any(left), "a schedule left work behind"
        return self.loss

    def _forward(self, action: Action) -> None:
        stage, i = action.stage, action.microbatch
        is_last = stage == self.runtime.schedule.placement.num_stages - 1
        x = self._take(Action(Kind.RECEIVE_FORWARD, stage, i)) if stage > 0 else self.inputs[i]
        self.runtime.after_input()
        if stage > 0 and self.trains:
            x.requires_grad_()
        context = self.contexts[i : i + 1]  # empty where there are no contexts
        output = self.runtime.modules[stage](x, *context, **(self.targets[i] if is_last else {}))
        if is_last:
            if output.numel() != 1:
                raise DtlayoutError(
                    f"the last stage gave {tuple(output.shape)}, and no scalar; give loss=, or have it compute the loss"
                )
            self.loss = output.detach() if self.loss is None else self.loss + output.detach()
        else:
            _check_boundary(output, self.runtime.boundary, stage)
            self._hand_on(Action(Kind.SEND_FORWARD, stage, i), output.detach())
        if self.trains:  # the edge is enough for backward; the output's memory is freed when its message has gone
            # A first stage without a trained weight has no edge.
            self.pending_backward[stage, i] = (x, get_gradient_edge(output) if output.requires_grad else None)

    def _backward(self, action: Action) -> None:
        if (sync := self.runtime.sync.get(action.stage)) is not None:
            sync.before_backward(is_last=action in self.runtime.last_backwards)
        self._run_backward(action)

    def _backward_input(self, action: Action) -> None:
        if (sync := self.runtime.sync.get(action.stage)) is not None:
            sync.before_input_backward()
        with self.runtime.weights[action.stage].put_off() as found:
            self._run_backward(action)
        self.pending_weights[action.stage, action.microbatch] = found

    def _backward_weight(self, action: Action) -> None:
        accumulate(self.pending_weights.pop((action.stage, action.microbatch)))
        if (sync := self.runtime.sync.get(action.stage)) is not None:
            sync.after_weight_backward(is_last=action in self.runtime.last_backwards)

    def _run_backward(self, action: Action) -> None:
        """Run autograd through a stage, and hand on the gradient of its input."""
        stage, i = action.stage, action.microbatch
        x, edge = self.pending_backward.pop((stage, i))
        is_last = stage == self.runtime.schedule.placement.num_stages - 1
        gradient = None if is_last else self._take(Action(Kind.RECEIVE_BACKWARD, stage, i))
        self.runtime.after_input()
        if edge is None:
            if (sync := self.runtime.sync.get(stage)) is not None:
                sync.end_backward()
            return
        torch.autograd.backward((edge,), None if gradient is None else (gradient,))
        if stage > 0:
            assert x.grad is not None, "a stage's output depends on its input"
            self._hand_on(Action(Kind.SEND_BACKWARD, stage, i), x.grad)

    def _hand_on(self, send: Action, tensor: Tensor) -> None:
        """Keep a result for its message, or give it to the next stage where this rank holds that too."""
        receive = receive_of(send)
        if receive.stage in self.runtime.modules:
            self.received[receive] = (tensor, None)
        else:
            self.to_send[send] = tensor

    def _send(self, action: Action) -> None:
        tensor = self.to_send.pop(action).contiguous()
        peer = self.runtime.schedule.placement.rank_of(receive_of(action).stage)
        queue = self.sending[peer]
        while len(queue) >= SENDS_IN_FLIGHT:
            queue.popleft()[1].wait()
        queue.append((tensor, _started(dist.isend(tensor, group=self.runtime.group, group_dst=peer))))

    def _receive(self, action: Action) -> None:
        boundary = self.runtime.boundary
        tensor = torch.empty(boundary.shape, dtype=boundary.dtype, device=self.runtime.mesh.device_type)
        sender = action.stage + (1 if action.kind is Kind.RECEIVE_BACKWARD else -1)
        peer = self.runtime.schedule.placement.rank_of(sender)
        self.received[action] = (tensor, _started(dist.irecv(tensor, group=self.runtime.group, group_src=peer)))

    def _take(self, action: Action) -> Tensor:
        tensor, work = self.received.pop(action)
        if work is not None:
            work.wait()
        return tensor


def _to_work(action: Action) -> PassKey:
    return action.kind is Kind.FORWARD, action.stage, action.microbatch


def _check_boundary(output: Tensor, boundary: Boundary, stage: int) -> None:
    """Refuse a message of another size than its receiver expects: it would kill the process in the transport."""
    if (tuple(output.shape), output.dtype) != (boundary.shape, boundary.dtype):
        raise DtlayoutError(
            f"stage {stage} gives {tuple(output.shape)} {output.dtype}, but the boundary says {boundary.shape} "
            f"{boundary.dtype}; build the runtime with the boundary that the stages have"
        )


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is a member of its own pipeline group"
    return work
