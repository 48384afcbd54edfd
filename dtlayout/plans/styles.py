"""The styles of a plan as torch's `parallelize_module` applies them. Parameters become DTensors, activations don't.

A module computes on plain tensors: this rank's part of its weights, and of the sequence, the heads or the vocabulary.
DTensor would dispatch each operator through Python, which takes the host several times as long as all the rest of a
layer. So only collectives between modules know of other ranks, and each style says where they stand. Where a rank does
not see all tokens or heads, its gradient of a whole weight is one term of a sum over tp.

Embedding and head are split over the vocabulary. Each rank looks up its own rows, and computes its columns of the
logits and their part of the loss, as in Megatron (arXiv:1909.08053, sec. 3). Legend: T tokens, V local vocabulary.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from dtlayout.base.errors import InvalidConfig
from dtlayout.ops.adapters import ScaleVector
from dtlayout.ops.linear import SplittableLinear
from dtlayout.ops.loss import Columns, Head
from dtlayout.ops.norm import RMSNorm
from dtlayout.plans.collectives import (
    Group,
    Move,
    all_gather,
    all_gather_cast,
    all_reduce,
    reduce_scatter,
    reduce_scatter_cast,
    replicate,
)
from dtlayout.plans.overlap import multiply_while_scattering, projecting

HIDDEN_STATES = "hidden_states"
"""Name by which modules of transformers take hidden states, where they are no first argument."""


class _CollectiveStyle(ParallelStyle):
    def __init__(self, collective: Move):
        super().__init__()
        self.collective = collective


class GatherInput(_CollectiveStyle):
    """Style of a module whose first argument, hidden states, is gathered once; all its matmuls read that one tensor.

    So the gradients of these matmuls add up before one collective.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        collective, group = self.collective, Group.of(device_mesh)

        def gather(
            _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if inputs:
                return (collective(inputs[0], group), *inputs[1:]), named
            return inputs, {**named, HIDDEN_STATES: collective(named[HIDDEN_STATES], group)}

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


class OverlappedGatherInput(GatherInput):
    """A `GatherInput` that gathers in pieces, while the module's `project` computes matmuls of earlier pieces."""

    def __init__(self) -> None:
        super().__init__(all_gather)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not hasattr(module, "project"):
            raise InvalidConfig(
                f"layout.tp_overlap: {type(module).__name__} has no `project`, through which ops.linear computes what "
                f"reads the same; use tp_overlap=false"
            )
        module.project = projecting(Group.of(device_mesh), local)  # type: ignore[assignment]
        return module


class Placed(ParallelStyle):
    """Style of a module that sends nothing: it gets a class that computes with this rank's part of its parameters."""

    def __init__(self, kind: type[nn.Module], **placements: Placement):
        """`kind` is the class, `placements` those of the parameters by their names."""
        super().__init__()
        self.kind, self.placements = kind, placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Not a forward for each instance, for which torch.compile would compile each block anew.
        module.__class__ = self.kind
        return _distribute(module, device_mesh, **self.placements)


class Colwise(Placed):
    """Splits an `nn.Linear` by its outputs, below a `GatherInput` that gathers its input."""

    def __init__(self) -> None:
        super().__init__(_LocalLinear, weight=Shard(0), bias=Shard(0))


class ColwiseWithInputReduce(GatherInput):
    """A `Colwise` whose input every rank has: it adds up the input's gradients itself."""

    def __init__(self) -> None:
        super().__init__(replicate)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return super()._apply(Colwise()._apply(module, device_mesh), device_mesh)


class _LocalLinear(SplittableLinear):
    """A linear layer that tp splits, by outputs or by inputs: what it makes is a part, or a term of a sum."""

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, local(self.weight), None if self.bias is None else local(self.bias))


class Rowwise(_CollectiveStyle):
    """Splits an `nn.Linear` by its inputs, which come split; a collective joins its outputs, terms of a sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.__class__ = _RowwiseLinear
        assert isinstance(module, _RowwiseLinear), "the style is for an nn.Linear"
        module.output_collective, module.group = self.collective, Group.of(device_mesh)
        return _distribute(module, device_mesh, weight=Shard(1), bias=Replicate())


class OverlappedRowwise(Rowwise):
    """A `Rowwise` that scatters its terms in pieces, while the matmul computes other pieces."""

    def __init__(self) -> None:
        super().__init__(reduce_scatter)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh).__class__ = _OverlappedRowwiseLinear
        return module


class _RowwiseLinear(SplittableLinear):
    output_collective: Move
    group: Group

    def forward(self, x: Tensor) -> Tensor:
        y = self.join(x)
        if self.bias is None:
            return y
        return y + local(self.bias, Replicate() if self.output_collective is all_reduce else Partial())

    def join(self, x: Tensor) -> Tensor:
        """Sum over the ranks of x·wᵀ, or this rank's part of that sum."""
        return self.output_collective(self.compute(x, local(self.weight)), self.group)


class _OverlappedRowwiseLinear(_RowwiseLinear):
    def join(self, x: Tensor) -> Tensor:
        return multiply_while_scattering(x, local(self.weight), self.group)


class PartialNorm(ParallelStyle):
    """Style of a norm that sees this rank's heads or tokens alone: its parameters' gradients are summed over tp."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = tuple(name for name, _ in module.named_parameters(recurse=False))
        _distribute(module, device_mesh, **dict.fromkeys(names, Replicate()))
        module.__class__ = _ShardedRMSNorm if isinstance(module, RMSNorm) else _with_local_terms(type(module), names)  # type: ignore[arg-type]
        return module


@cache
def _with_local_terms(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A class like `kind` whose forward sees plain tensors in the place of these parameters; FSDP2 sees them whole.

    One class for all modules of a kind, so that torch.compile compiles their blocks once.
    """

    def view(name: str) -> property:
        def read(module: Any) -> Tensor:
            whole: Tensor = module._parameters[name]
            return local(whole, Partial()) if module.computes else whole

        return property(read)

    def forward(module: Any, *inputs: Any, **named: Any) -> Any:
        module.computes = True
        try:
            return kind.forward(module, *inputs, **named)
        finally:
            module.computes = False

    views = {name: view(name) for name in names}
    return type(f"Local{kind.__name__}", (kind,), {**views, "forward": forward, "computes": False})


class _ShardedRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, local(self.weight, Partial()), self.eps)


class SplitNorm(ParallelStyle):
    """Style of an RMSNorm over all that tp splits: ranks add up their squares, one number a token, both ways."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.__class__ = _SplitRMSNorm
        assert isinstance(module, _SplitRMSNorm), "the style is for an RMSNorm"
        module.group = Group.of(device_mesh)
        return _distribute(module, device_mesh, weight=Shard(0))


class _SplitRMSNorm(RMSNorm):
    group: Group

    def forward(self, x: Tensor) -> Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = replicate(all_reduce(exact.pow(2).sum(-1, keepdim=True), self.group), self.group)
        scale = torch.rsqrt(squares / (x.shape[-1] * self.group.size) + self.eps)
        return local(self.weight) * (exact * scale).to(x.dtype)


class _ReplicatedLinear(SplittableLinear):
    """A linear layer that each rank has whole and whose weight's gradient is a term of a sum over tp.

    It computes this rank's tokens (a router), opens a matmul that tp splits by outputs, or takes terms (an adapter).
    """

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else local(self.bias, Partial())
        return self.compute(x, local(self.weight, Partial()), bias)


class _ReplicatedScale(ScaleVector):
    """A vector that each rank has whole and whose gradient is a term of a sum over tp."""

    def forward(self, x: Tensor) -> Tensor:
        return x * local(self.weight, Partial())


class _LocalScale(ScaleVector):
    """A vector that tp splits like the elements that it multiplies."""

    def forward(self, x: Tensor) -> Tensor:
        return x * local(self.weight)


class Whole(ParallelStyle):
    """Style of a module that computes the same on each rank of tp: parameters and gradients stay as they are."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


class TracedRank(ParallelStyle):
    """Style of a whole model whose own code must know which heads it has, and which part of each sequence."""

    def __init__(self, *, sequence: bool):
        super().__init__()
        self.sequence = sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.split(device_mesh.size(), device_mesh.get_local_rank(), sequence=self.sequence)  # type: ignore[operator]
        return module


class VocabParallelEmbedding(_CollectiveStyle):
    """Splits an embedding by rows: each rank looks up its own tokens; their sum over tp comes whole or sharded.

    So a rank's gradient has only its own rows; DTensor's would have all rows, until it is summed over tp.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.__class__ = _SplitEmbedding
        assert isinstance(module, _SplitEmbedding), "the style is for an nn.Embedding"
        module.columns, module.output_collective = _LocalVocabulary(device_mesh), self.collective
        module.group = Group.of(device_mesh)
        return _distribute(module, device_mesh, weight=Shard(0))


class _SplitEmbedding(nn.Embedding):
    columns: "_LocalVocabulary"
    output_collective: Move
    group: Group

    def forward(self, tokens: Tensor) -> Tensor:
        weight_VD = self.columns.local(self.weight)
        index, is_here = self.columns.locate(tokens)
        return self.output_collective(F.embedding(index, weight_VD).masked_fill(~is_here[..., None], 0), self.group)


class VocabParallelHead(GatherInput):
    """Splits a `Head` by columns."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Head), "only the head has a loss"
        module.columns = _LocalVocabulary(device_mesh, module.columns.num_unused)
        _distribute(module, device_mesh, weight=Shard(0), bias=Shard(0))
        return super()._apply(module, device_mesh)


class _LocalVocabulary(Columns):
    """This rank's columns of the vocabulary.

    Two all-reduces, of one and of two numbers a token, join the ranks' parts of a loss. Unused rows are fewer than a
    rank has, so the last rank has them all, and some others.
    """

    def __init__(self, mesh: DeviceMesh, num_unused: int = 0):
        super().__init__(num_unused)
        self.is_last = mesh.get_local_rank() == mesh.size() - 1
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.num_columns = 0
        """Set when `local` sees the weight."""

    def local(self, weight: Tensor) -> Tensor:
        weight_VD = local(weight)
        self.num_columns = weight_VD.shape[0]
        return weight_VD[: self.num_columns - self.num_unused] if self.num_missing else weight_VD

    @property
    def num_missing(self) -> int:
        return self.num_unused if self.is_last else 0

    def locate(self, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        index_T = targets_T - self.num_columns * self.rank  # below 0 for an IGNORED target
        is_here_T = (index_T >= 0) & (index_T < self.num_columns)
        return index_T.masked_fill(~is_here_T, 0), is_here_T

    def join(self, log_sums_T: Tensor, wanted_T: Tensor) -> tuple[Tensor, Tensor]:
        largest_T = log_sums_T.clone()
        dist.all_reduce(largest_T, dist.ReduceOp.MAX, group=self.group)
        sums = torch.stack(((log_sums_T - largest_T).exp(), wanted_T))
        dist.all_reduce(sums, group=self.group)
        return largest_T + sums[0].log(), sums[1]


def local(parameter: Tensor, gradient: Placement | None = None) -> Tensor:
    """This rank's part of a parameter; its gradient is placed like the parameter, or as `gradient` says."""
    assert isinstance(parameter, DTensor), "tensor or expert parallelism makes it one"
    if torch.compiler.is_compiling():
        return parameter.to_local(grad_placements=None if gradient is None else (gradient,))
    return _Local.apply(parameter, gradient)


class _Local(torch.autograd.Function):
    """`DTensor.to_local` with a faster backward: that of torch takes the host twice as long."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, gradient: Placement | None) -> Tensor:
        spec, tensor = parameter._spec, parameter._local_tensor
        ctx.set_materialize_grads(False)  # no gradient comes where it is put off
        ctx.spec = DTensorSpec(spec.mesh, (gradient,), tensor_meta=spec.tensor_meta) if gradient else spec
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor | None) -> tuple[Tensor | None, None]:
        if gradient[0] is None:
            return None, None
        return DTensor(gradient[0].contiguous(), ctx.spec, requires_grad=False), None


def _distribute(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> nn.Module:
    """Make a module's own parameters DTensors; modules inside of it, such as an adapter's, have styles of their own."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = distribute_tensor(parameter, mesh, [placements[name]])
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    return module


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": Colwise,
    "rowwise": lambda: Rowwise(all_reduce),
    "rowwise-scatter": lambda: Rowwise(reduce_scatter),
    "rowwise-scatter-cast": lambda: Rowwise(reduce_scatter_cast),
    "rowwise-overlap": OverlappedRowwise,
    "embedding": lambda: VocabParallelEmbedding(all_reduce),
    "embedding-scatter": lambda: VocabParallelEmbedding(reduce_scatter),
    "input": lambda: GatherInput(replicate),
    "input-gather": lambda: GatherInput(all_gather),
    "input-gather-cast": lambda: GatherInput(all_gather_cast),
    "input-overlap": OverlappedGatherInput,
    "sequence": PartialNorm,
    "head": lambda: VocabParallelHead(replicate),
    "head-gather": lambda: VocabParallelHead(all_gather),
    "head-norm": PartialNorm,
    "norm-split": SplitNorm,
    "whole": Whole,
    "replicated": lambda: Placed(_ReplicatedLinear, weight=Replicate(), bias=Replicate()),
    "rowwise-term": lambda: Placed(_LocalLinear, weight=Shard(1)),
    "scale": lambda: Placed(_ReplicatedScale, weight=Replicate()),
    "traced": lambda: TracedRank(sequence=False),
    "traced-sequence": lambda: TracedRank(sequence=True),
    "scale-split": lambda: Placed(_LocalScale, weight=Shard(0)),
}
