"""TrainStep: one optimizer step over all microbatches, with the numbers that describe it.

[Note: no update without numbers]
A loss or gradient norm that is not finite must change neither parameters nor moments, on any rank, and what every rank
knows of them is on the device. torch's fused optimizers read there, from the flag that was made for GradScaler, whether
to leave all as it is, their count of steps too; so nobody waits. For an optimizer that has no such flag the host waits
for the numbers before it launches the update. Limits that a finite loss or norm is not to exceed work the same way:
host and device compare the same fp64 numbers with them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtlayout.mesh.axes import PP, TP
from dtlayout.ops.documents import Documents
from dtlayout.pipelining.runtime import Runtime
from dtlayout.pipelining.tied import sum_tied_gradients
from dtlayout.spec.batch import IGNORED
from dtlayout.training.gradients import clip_gradients, local_squared_norm
from dtlayout.training.transfer import OnHost


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """Beyond which a step's numbers are too large; infinity for any."""

    loss: float
    grad_norm: float


NO_LIMITS = StepLimits(loss=math.inf, grad_norm=math.inf)


@dataclass(frozen=True)
class StepResult:
    """What every rank knows after a step."""

    loss: float
    """Sum over valid tokens of the global batch divided by their number, nats."""
    grad_norm: float
    """Norm of all gradients before clipping."""
    stop_requested: bool
    """Whether any rank asked to stop."""

    @property
    def is_finite(self) -> bool:
        """False if loss or norm is NaN or infinite; the step has updated nothing then."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def exceeds(self, limits: StepLimits) -> bool:
        """Whether loss or norm is above its limit; a step that was given the limits has updated nothing then."""
        return self.loss > limits.loss or self.grad_norm > limits.grad_norm


class Launched:
    """A step that a GPU may still be working on."""

    def __init__(self, numbers: Tensor):
        """`numbers` are loss, squared gradient norm and how many ranks ask to stop, in fp64."""
        self._numbers = OnHost(numbers)

    def wait(self) -> StepResult:
        """The numbers, which are there when backward is done; the update may not be."""
        loss, squared_norm, stops = self._numbers.wait().tolist()
        return StepResult(loss=loss, grad_norm=math.sqrt(squared_norm), stop_requested=stops > 0)


class TrainStep:
    """Forward, backward, clipping and update of this rank's stages."""

    def __init__(
        self,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float,
        mesh: DeviceMesh,
        aliases: Mapping[str, str],
    ):
        """`max_norm` is the global gradient norm to clip at; `aliases` the tied names of the model."""
        self.runtime = runtime
        self.modules: Sequence[nn.Module] = list(runtime.modules.values())
        self.optimizer = optimizer
        self.max_norm = max_norm
        self.mesh = mesh
        self.aliases = aliases
        named = [each for module in self.modules for each in module.named_parameters()]
        self.counted = [p for name, p in named if name not in aliases]  # where one stage holds both ends, they are one
        self.reads_numbers = True  # a dry run has none, and updates whatever they are
        self.num_copies = mesh[PP].size() * mesh[TP].size()  # ranks that have the same tokens

    def __call__(
        self, inputs: Tensor, targets: Tensor, starts: Tensor | None = None, *, stop: bool = False
    ) -> StepResult:
        """Train on this data-parallel rank's rows [microbatches · B, s], of each sample the tokens of its cp rank.

        Every rank of a pipeline brings the same. `starts`, where documents are not to see each other, say of each token
        of whole samples at which position its own document starts, [microbatches · B, S]; they stay on the CPU.
        """
        return self.launch(inputs, targets, starts, stop=stop).wait()

    def launch(
        self, inputs: Tensor, targets: Tensor, starts: Tensor | None = None, *, stop: bool = False,
        limits: StepLimits = NO_LIMITS,
    ) -> Launched:  # fmt: skip
        """The step without waiting for its numbers, which updates nothing if these exceed the limits."""
        documents, count = self._split_documents(starts), self._count_targets(targets)
        # Without any target the loss is 0, and no NaN.
        loss = self.runtime.step(inputs, documents, targets=targets, num_targets=count.clamp(min=1))
        sum_tied_gradients(self.modules, self.aliases, self.mesh, self.runtime.schedule.placement)
        numbers = self._sum_numbers(loss, local_squared_norm(self.counted, self.mesh), stop)
        launched = Launched(numbers)  # before the update, for which who waits for them need not wait
        norm = numbers[1].sqrt()
        clip_gradients([p for m in self.modules for p in m.parameters()], norm, self.max_norm)
        self._update(launched, numbers[0], norm, limits)
        self.optimizer.zero_grad()
        return launched

    def _update(self, launched: Launched, loss: Tensor, norm: Tensor, limits: StepLimits) -> None:
        """The optimizer's step, or none: [Note: no update without numbers]."""
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            is_fine = loss.isfinite() & norm.isfinite() & (loss <= limits.loss) & (norm <= limits.grad_norm)
            place = self.counted[0].device if self.counted else None  # the optimizer's, which may be the host
            self.optimizer.found_inf = is_fine.logical_not().to(place, torch.float32)  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not self.reads_numbers or ((found := launched.wait()).is_finite and not found.exceeds(limits)):
            self.optimizer.step()

    def evaluate(
        self, inputs: Tensor, targets: Tensor, starts: Tensor | None = None, *, stop: bool = False
    ) -> tuple[float, int, bool]:
        """The loss a target of such rows, which nothing is trained on, their targets, and whether any rank has `stop`.

        The same on every rank.
        """
        documents, count = self._split_documents(starts), self._count_targets(targets)
        loss = self.runtime.evaluate(inputs, documents, targets=targets, num_targets=count.clamp(min=1))
        loss_of_all, _, stops = self._sum_numbers(loss, 0.0, stop).tolist()
        return loss_of_all, round(float(count)), stops > 0

    def _split_documents(self, starts: Tensor | None) -> list[Documents]:
        """Those of each microbatch; none where documents see each other."""
        parts = () if starts is None else starts.chunk(self.runtime.schedule.num_microbatches)
        documents = [Documents.from_starts(part) for part in parts]
        return [each.pinned() for each in documents] if self.mesh.device_type == "cuda" else documents

    def _count_targets(self, targets: Tensor) -> Tensor:
        """Valid targets of the global batch; each token's is known to `num_copies` ranks."""
        count = (targets != IGNORED).sum().to(torch.float64)
        dist.all_reduce(count)
        return count / self.num_copies

    def _sum_numbers(self, loss: Tensor | None, squared_norm: Tensor | float, stop: bool) -> Tensor:
        """Loss, squared gradient norm and the number of ranks that ask to stop, in one all-reduce over all ranks."""
        numbers = torch.zeros(3, dtype=torch.float64, device=self.mesh.device_type)
        if loss is not None:  # known to each rank that shares the last stage's microbatches
            numbers[0] = loss * (self.mesh[PP].size() / self.num_copies)
        numbers[1] = squared_norm
        numbers[2] = float(stop)
        dist.all_reduce(numbers)
        return numbers
