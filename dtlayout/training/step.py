"""TrainStep: one optimizer step over all microbatches, with the numbers that describe it.

[Note: no update without numbers]
A loss or gradient norm that is not finite must change neither parameters nor moments, on any rank. After the step's
all-reduce every rank has both numbers, but on the device. torch's fused optimizers read a flag on the device, made for
GradScaler, that leaves everything as it is, their count of steps too. So the host waits for nothing. For an optimizer
without that flag the host waits for the numbers before it launches the update. Limits for a finite loss or norm work
the same way: host and device compare the same fp64 numbers with them.

[Note: clipping without a pass]
A pass that multiplies all gradients reads and writes 8 bytes for each parameter, also where nothing is clipped.
GradScaler has fused optimizers divide each gradient by a number on the device while they read it. It is a number in
fp32, so parameters in fp64 are clipped by a pass.

[Note: a loss that is scaled]
fp16 has no number below 6e-8, so gradients are computed of the loss times a factor. The last stage divides its loss by
so many targets fewer; routers divide theirs by the same. So all gradients of all stages have that factor, and no kernel
knows it. The norm is taken of them as they are and divided; clipping, which multiplies all gradients anyway, divides
them by it. A factor that is a power of two changes no bit of what does not overflow. Whether it grows or shrinks for
the next step (`loss_scale.py`) follows from numbers that the host of every rank knows by then.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtlayout.mesh.axes import PP, TP
from dtlayout.ops.documents import Documents
from dtlayout.pipelining.runtime import Runtime
from dtlayout.pipelining.tied import sum_tied_gradients
from dtlayout.spec.batch import IGNORED
from dtlayout.spec.model_shape import ModelShape
from dtlayout.training.balance import Balance
from dtlayout.training.gradients import clip_gradients, find_divisor, local_squared_norm
from dtlayout.training.result import NO_LIMITS, StepLimits, StepResult
from dtlayout.training.transfer import OnHost

_NUM_NUMBERS = 3
"""Numbers of a step beside those of its routers."""


class Launched:
    """A launched step, on which a GPU may still work."""

    def __init__(self, numbers: Tensor, balance: Balance, loss_scale: float | None):
        """Begin to copy `numbers` to the host: loss, squared gradient norm, how many ranks ask to stop, and those of
        `balance`, in fp64; `loss_scale` was the loss's factor."""
        self._numbers, self._balance, self._loss_scale = OnHost(numbers), balance, loss_scale

    def wait(self) -> StepResult:
        """The result, once backward is done; the update may still run."""
        loss, squared_norm, stops, *of_routers = self._numbers.wait().tolist()
        return StepResult(
            loss=loss,
            grad_norm=math.sqrt(squared_norm),
            stop_requested=stops > 0,
            loss_scale=self._loss_scale,
            routing=self._balance.describe(of_routers),
        )


class TrainStep:
    """Forward, backward, clipping and update of this rank's stages."""

    def __init__(
        self,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float,
        mesh: DeviceMesh,
        model: ModelShape,
    ):
        """`max_norm` is the global gradient norm to clip at; `model` the whole model, of which stages are parts."""
        self.runtime = runtime
        self.modules: Sequence[nn.Module] = list(runtime.modules.values())
        self.optimizer = optimizer
        self.max_norm = max_norm
        self.mesh = mesh
        self.aliases = model.aliases
        self.balance = Balance(self.modules, model)
        named = [each for module in self.modules for each in module.named_parameters()]
        self.counted = [
            p for name, p in named if name not in model.aliases
        ]  # where one stage holds both ends, they are one
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        self.divides_in_update = fused and all(p.dtype != torch.float64 for p in self.counted)
        self.reads_numbers = True  # a dry run has none, and updates whatever they are
        self.num_copies = mesh[PP].size() * mesh[TP].size()  # ranks that have the same tokens

    def __call__(
        self,
        inputs: Tensor,
        targets: Tensor,
        starts: Tensor | None = None,
        *,
        stop: bool = False,
        loss_scale: float | None = None,
    ) -> StepResult:
        """Train on this rank's part of a global batch, and wait for the result.

        `inputs` and `targets` are the rows of its data-parallel rank, [microbatches · B, s]: in each row the tokens of
        its cp rank. Every rank of a pipeline brings the same. `starts`, where documents must not see each other, gives
        the position at which the document of each token starts, for whole samples, [microbatches · B, S], on the CPU.
        """
        return self.launch(inputs, targets, starts, stop=stop, loss_scale=loss_scale).wait()

    def launch(
        self,
        inputs: Tensor,
        targets: Tensor,
        starts: Tensor | None = None,
        *,
        stop: bool = False,
        limits: StepLimits = NO_LIMITS,
        loss_scale: float | None = None,
    ) -> Launched:
        """Launch a step and do not wait; it updates nothing if its numbers are not finite or exceed `limits`.

        Backward begins with the loss times `loss_scale`, None for 1: [Note: a loss that is scaled].
        """
        scale = loss_scale or 1.0
        documents, count = self._split_documents(starts), self._count_targets(targets)
        num_targets = count.clamp(min=1) / scale  # without any target the loss is 0, and no NaN
        self.balance.begin(count / scale)
        loss = self.runtime.step(inputs, documents, targets=targets, num_targets=num_targets)
        sum_tied_gradients(self.modules, self.aliases, self.mesh, self.runtime.schedule.placement)
        squared_norm = local_squared_norm(self.counted, self.mesh)
        numbers = self._sum_numbers(loss, squared_norm, stop, self.balance.count(), scale)
        launched = Launched(
            numbers, self.balance, loss_scale
        )  # before the update, for which who waits for them need not wait
        norm = numbers[1].sqrt()
        divisor = None
        if self.divides_in_update:
            divisor = find_divisor(norm, self.max_norm, scale)
        else:
            clip_gradients([p for m in self.modules for p in m.parameters()], norm, self.max_norm, scale)
        is_fine = self._update(launched, numbers[0], norm, limits, divisor)
        self.balance.move_biases(numbers[_NUM_NUMBERS:], is_fine)
        self.optimizer.zero_grad()
        return launched

    def _update(
        self, launched: Launched, loss: Tensor, norm: Tensor, limits: StepLimits, divisor: Tensor | None
    ) -> Tensor:
        """Launch the optimizer's step, which may change nothing; whether it does: [Note: no update without numbers].

        With a `divisor` the update divides the gradients by it, [Note: clipping without a pass].
        """
        is_fine = loss.isfinite() & norm.isfinite() & (loss <= limits.loss) & (norm <= limits.grad_norm)
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            place = self.counted[0].device if self.counted else None  # the optimizer's, which may be the host
            self.optimizer.found_inf = is_fine.logical_not().to(place, torch.float32)  # type: ignore[attr-defined]
            self.optimizer.grad_scale = None if divisor is None else divisor.to(place, torch.float32)  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not self.reads_numbers or ((found := launched.wait()).is_finite and not found.exceeds(limits)):
            self.optimizer.step()
        return is_fine

    def evaluate(
        self, inputs: Tensor, targets: Tensor, starts: Tensor | None = None, *, stop: bool = False
    ) -> tuple[float, int, bool]:
        """Validation on such rows: mean loss per target, number of targets, and whether any rank asked to `stop`.

        Nothing is trained. Every rank returns the same.
        """
        documents, count = self._split_documents(starts), self._count_targets(targets)
        loss = self.runtime.evaluate(inputs, documents, targets=targets, num_targets=count.clamp(min=1))
        loss_of_all, _, stops, *_ = self._sum_numbers(loss, 0.0, stop).tolist()
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

    def _sum_numbers(
        self,
        loss: Tensor | None,
        squared_norm: Tensor | float,
        stop: bool,
        of_routers: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """Loss, squared gradient norm, the number of ranks that ask to stop, and the routers' numbers.

        The first two come times `scale` and its square, and leave without.

        All go in one all-reduce over all ranks, as large on each of them.
        """
        size = _NUM_NUMBERS + self.balance.size
        numbers = torch.zeros(size, dtype=torch.float64, device=self.mesh.device_type)
        if loss is not None:  # known to each rank that shares the last stage's microbatches
            numbers[0] = loss * (self.mesh[PP].size() / self.num_copies)
        numbers[1] = squared_norm
        numbers[2] = float(stop)
        if of_routers is not None:
            numbers[_NUM_NUMBERS:] = of_routers
        numbers[0] /= scale
        numbers[1] /= scale**2
        dist.all_reduce(numbers)
        return numbers
