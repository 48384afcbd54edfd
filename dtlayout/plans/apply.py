"""Apply a plan to modules: the one place where a plan becomes sharded modules, in one visible order.

TP/SP → recompute → FSDP2. Tensor parallelism comes first, since FSDP2 shards what it leaves on each rank;
recomputation goes inside the FSDP unit, so that a unit gathers once for its backward, not once more for the
recomputation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtlayout.errors import InvalidConfig
from dtlayout.mesh.axes import TP
from dtlayout.plans.fsdp import GradientSync, shard
from dtlayout.plans.plan import Plan, match_names
from dtlayout.plans.tensor import TensorStyle
from dtlayout.plans.vocab_parallel import VocabParallelLoss
from dtlayout.recompute import Recompute

SEQUENCE = Shard(1)  # hidden states are [B, S, D]

STYLES: dict[TensorStyle, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise-gather": lambda: ColwiseParallel(input_layouts=SEQUENCE),
    "rowwise": RowwiseParallel,
    "rowwise-scatter": lambda: RowwiseParallel(output_layouts=SEQUENCE),
    "embedding": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding-scatter": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
    "input": lambda: _prepare_first_input(Replicate()),
    "input-gather": lambda: _prepare_first_input(SEQUENCE),
    "sequence": SequenceParallel,
    "vocab-loss": VocabParallelLoss,
}


def apply_plan(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> GradientSync:
    """Shard `module` in place over a mesh with the axes of `build_mesh`; whoever runs backward follows the result.

    The module may hold part of what the plan names (a pipeline stage), on the meta device or with weights in it.
    """
    if mesh[TP].size() > 1:
        split_tensors(module, plan.tensor, mesh[TP])
    recompute_blocks(module, plan.blocks, plan.recompute)
    return shard(module, plan, mesh)


def split_tensors(module: nn.Module, styles: dict[str, TensorStyle], tp_mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism; parameters that were tied stay tied."""
    ties = _find_ties(module)
    names = [name for name, _ in module.named_modules()]
    found: dict[str, ParallelStyle] = {}
    for pattern, style in styles.items():
        for name in match_names(pattern, names):
            found.setdefault(name, STYLES[style]())  # the first pattern that matches decides
    parallelize_module(module, tp_mesh, found)
    for first, second in ties:  # parallelize_module splits each on its own, and so unties them
        owner, _, attribute = second.rpartition(".")
        setattr(module.get_submodule(owner), attribute, module.get_parameter(first))


def recompute_blocks(module: nn.Module, blocks: str, recompute: Recompute) -> None:
    """Checkpoint the forward of each covered block; a block's number is the last part of its name."""
    for name in match_names(blocks, [name for name, _ in module.named_modules()]):
        number = name.rpartition(".")[2]
        if not number.isdigit():
            raise InvalidConfig(
                f"plan.blocks={blocks!r} matches {name!r}, whose last part is no number; name the blocks"
            )
        if recompute.covers(int(number)):
            block = module.get_submodule(name)
            run = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)  # nothing is random
            block.forward = partial(run, context_fn=_keep_dear_results) if recompute.selective else run


def _prepare_first_input(placement: Replicate | Shard) -> PrepareModuleInput:
    """The first argument, hidden states, goes in replicated; the RoPE tables stay as they are.

    One DTensor for all the matmuls that read it: their gradients add up before one collective.
    """
    return PrepareModuleInput(input_layouts=(placement,), desired_input_layouts=(Replicate(),), use_local_output=False)


def _find_ties(module: nn.Module) -> list[tuple[str, str]]:
    """Pairs of names of one parameter: (the first, another)."""
    first_names: dict[int, str] = {}
    ties = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if first != name:
            ties.append((first, name))
    return ties


_DEAR = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
}
"""Operations whose results selective recomputation keeps; flash attention has one for each device type. Not the
all-gather: what sequence parallelism shards would lie there whole."""


def _keep_dear_results() -> tuple[Any, Any]:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in _DEAR else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
