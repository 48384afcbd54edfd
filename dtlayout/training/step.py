"""TrainStep: one optimizer step over all microbatches, with the numbers that describe it.

[Note: no update without numbers]
A loss or gradient norm that is not finite must change neither parameters nor moments, on any rank. After the step's
all-reduce every rank has both numbers, but on the device. torch's fused optimizers read a flag on the device, made for
GradScaler, that leaves everything as it is, their count of steps too. So the host waits for nothing. For an optimizer
without that flag the host waits for the numbers before it launches the update. Limits for a finite loss or norm work
the same way: host and device compare the same fp64 numbers with them.
"""

import math
from collections.abc import Mapping, Sequence

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
from dtlayout.training.result import NO_LIMITS, StepLimits, StepResult
from dtlayout.training.transfer import OnHost


class Launched:
    """A launched step, on which a GPU may still work."""

    def __init__(self, numbers: Tensor):
        """Begin to copy `numbers` to the host: loss, squared gradient norm, and how many ranks ask to stop, in fp64."""
        self._numbers = OnHost(numbers)

    def wait(self) -> StepResult:
        """The result, once backward is done; the update may still run."""
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
        """Train on this rank's part of a global batch, and wait for the result.

        `inputs` and `targets` are the rows of its data-parallel rank, [microbatches · B, s]: in each row the tokens of
        its cp rank. Every rank of a pipeline brings the same. `starts`, where documents must not see each other, gives
        the position at which the document of each token starts, for whole samples, [microbatches · B, S], on the CPU.
        """
        return self.launch(inputs, targets, starts, stop=stop).wait()

    def launch(
        self, inputs: Tensor, targets: Tensor, starts: Tensor | None = None, *, stop: bool = False,
        limits: StepLimits = NO_LIMITS,
    ) -> Launched:  # fmt: skip
        """Launch a step and do not wait; it updates nothing if its numbers are not finite or exceed `limits`."""
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
        """Launch the optimizer's step, which may change nothing: [Note: no update without numbers]."""
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
        """Validation on such rows: mean loss per target, number of targets, and whether any rank asked to `stop`.

        Nothing is trained. Every rank returns the same.
        """
        documents, count = self._split_documents(starts), self._count_targets(targets)
        loss = self.runtime.evaluate(inputs, documents, targets=targets, num_targets=count.clamp(min=1))
        loss_of_all, _, stops = self._sum_numbers(loss, 0.0, stop).tolist()
        return loss_of_all, round(float(count)), stops > 0

    def _split_documents(self, starts: Tensor | None) -> list[Documents]:
        """The documents of each microbatch; none where documents see each other."""
        parts = () if starts is None else starts.chunk(self.runtime.schedule.num_microbatches)
        documents = [Documents.from_starts(part) for part in parts]
        return [each.pinned() for each in documents] if self.mesh.device_type == "cuda" else documents

    def _count_targets(self, targets: Tensor) -> Tensor:
        """Number of valid targets in the global batch; each target is on `num_copies` ranks."""
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
