"""Expert parallelism: ep's ranks split the experts of a block; all-to-alls dispatch tokens and combine results.

Each rank sorts copies of its tokens by expert, so that those for a rank's experts lie together. The dispatch sends them
to these ranks, the combine sends their results back. Before that ranks tell each other how many copies come. The host
reads these numbers, since it has to say how large the results will be. All-to-alls of a block and a microbatch:

| of | elements of a rank | forward | backward | again in recomputation |
|---|---|---|---|---|
| dispatched copies, and their results | D for each copy | 2 | 2 | 1, unless results of matmuls are kept |
| scores of copies | 1 for each, in fp32 or finer | 1 | 1 | 1, the same |
| numbers of copies | E, int32 | 1 | | 1, the same |

`costmodel.comm` prices the first row.

Legend: D model width, E experts, e = E / ep of them on a rank, R copies of tokens, N copies that a rank gets.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dtlayout.models.feed_forward import Combine, Mixture, StackedFeedForward
from dtlayout.ops.grouped import StackedLinear
from dtlayout.ops.routing import invert, permute
from dtlayout.plans.collectives import Group, all_reduce, exchange
from dtlayout.plans.plan import match_names
from dtlayout.plans.styles import local

ReadCounts = Callable[[Tensor, Tensor, int], tuple[list[int], list[int]]]
"""(copies [ep, e] for each rank's experts, copies [ep, e] from each rank, copies R of this rank's tokens) → how many go
to each rank, and come."""


def split_experts(module: nn.Module, pattern: str, ep_mesh: DeviceMesh) -> None:
    """Split the stacks of the experts that `pattern` names over ep, and dispatch tokens to them."""
    names = match_names(pattern, [name for name, _ in module.named_modules()])
    for experts in (module.get_submodule(name) for name in names):
        assert isinstance(experts, StackedFeedForward), "the pattern names stacks of experts"
        experts.dispatch = Dispatcher(Group.of(ep_mesh))
        for stack in (part for part in experts.modules() if isinstance(part, StackedLinear)):
            stack.__class__ = _SplitStack
            part = distribute_tensor(stack.weight, ep_mesh, [Shard(0)])
            stack.weight = nn.Parameter(part, requires_grad=stack.weight.requires_grad)


class _SplitStack(StackedLinear):
    def forward(self, x: Tensor, ends: Tensor, scores: Tensor | None = None) -> Tensor:
        return self.multiply(x, local(self.weight), ends, self.kernel, scores)


def read_counts(sent: Tensor, received: Tensor, num_copies: int) -> tuple[list[int], list[int]]:
    """Copies for each rank and from each rank; the host waits for the device."""
    to_ranks, from_ranks = torch.stack([sent, received]).sum(-1).tolist()
    return to_ranks, from_ranks


class Dispatcher:
    """The `dispatch` of a block's experts that ep's ranks split, by all-to-alls."""

    def __init__(self, group: Group):
        self.group = group
        self.read_counts: ReadCounts = read_counts
        """Dry runs, in which tensors have no numbers, replace it."""

    def __call__(self, x_RD: Tensor, scores_R: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor, Tensor, Combine]:
        sent = ends_E.diff(prepend=ends_E.new_zeros(1)).unflatten(0, (self.group.size, -1))
        equal = [1] * self.group.size
        received = exchange(sent, self.group, equal, equal)
        to_ranks, from_ranks = self.read_counts(sent, received, x_RD.shape[0])
        x_ND, scores_N = (exchange(each, self.group, to_ranks, from_ranks) for each in (x_RD, scores_R))
        order, ends = _order_by_expert(received, sum(from_ranks))
        inverse = invert(order)

        def combine(results_ND: Tensor) -> Tensor:
            return exchange(permute(results_ND, inverse, order), self.group, from_ranks, to_ranks)

        return permute(x_ND, order, inverse), permute(scores_N, order, inverse), ends, combine


def _order_by_expert(received: Tensor, num_copies: int) -> tuple[Tensor, Tensor]:
    """Order [N] that brings copies, which come rank by rank, together by expert, and the ends [e] of each expert's."""
    num_ranks, num_experts = received.shape
    numbers = torch.arange(num_experts, device=received.device).repeat(num_ranks)
    expert_of_N = numbers.repeat_interleave(received.flatten(), output_size=num_copies)
    return expert_of_N.argsort(stable=True), received.sum(0).cumsum(0).to(torch.int32)


def share_counts(module: nn.Module, tokens_mesh: DeviceMesh) -> None:
    """Have balance losses count the tokens of a whole microbatch, which the ranks of this mesh share."""
    sum_counts = partial(all_reduce, group=Group.of(tokens_mesh))
    for mixture in (part for part in module.modules() if isinstance(part, Mixture)):
        mixture.counts.sum_counts = sum_counts


def place_shards(parameter: nn.Parameter, mesh: DeviceMesh) -> Shard | None:
    """FSDP2's placement of a stack: whole experts, or rows of their matrices where there are more ranks than experts.

    The mesh's last axis shards the stack. None, FSDP2's own choice, for what is no stack, and where ranks do not divide
    the rows.
    """
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    num_ranks = mesh.shape[-1]
    is_by_rows = own.dim() == 3 and own.shape[0] < num_ranks and own.shape[1] % num_ranks == 0
    return Shard(1) if is_by_rows else None
