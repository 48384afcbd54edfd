"""Apply a plan to modules: the one place where a plan becomes sharded modules, in one visible order.

TP/SP → EP → freeze → quantize → scale → round weights → CP → recompute → compile → offload → FSDP2. Tensor and expert
parallelism come first, since FSDP2 shards what they leave on each rank. They make parameters anew, so these are frozen
after it, and what multiplies in fp8 or rounds its weight sees how tp splits that. Blocks are recomputed and compiled
with what context parallelism changes in them. Recomputation goes inside the FSDP unit, so that a unit gathers once for
its backward, not once more for the recomputation. What a recomputed or compiled block hands autograd goes to the host.
FSDP2's hooks stay outside of what is compiled.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtlayout.base.errors import InvalidConfig
from dtlayout.mesh.axes import CP, PP, TP
from dtlayout.mesh.build import ExpertMesh, token_mesh
from dtlayout.models.feed_forward import Mixture
from dtlayout.ops.loss import Head
from dtlayout.plans.collectives import name_all_to_all, name_operator
from dtlayout.plans.context import ATTENTION_OPERATOR, CONTEXT_STYLES, apply_context
from dtlayout.plans.experts import share_counts, split_experts
from dtlayout.plans.fake_quantize import fake_quantize_linears
from dtlayout.plans.fsdp import GradientSync, shard
from dtlayout.plans.offload import ActivationOffloader, keep_results
from dtlayout.plans.patterns import check_parameters, list_idle_patterns, list_unknown_styles
from dtlayout.plans.plan import Plan, list_parameters, match_names
from dtlayout.plans.quantize import quantize_linears
from dtlayout.plans.scale import scale_experts, scale_linears
from dtlayout.plans.styles import STYLES, Colwise, ColwiseWithInputReduce, GatherInput
from dtlayout.spec.kernel_records import AttentionKernel
from dtlayout.spec.kernel_table import list_kernels
from dtlayout.spec.kernels import Compile
from dtlayout.spec.recompute import Kept, Recompute


def apply_plan(
    module: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    reduction_group: dist.ProcessGroup | None = None,
    kept: ActivationOffloader | None = None,
    experts: ExpertMesh | None = None,
) -> GradientSync:
    """Shard `module` in place over a mesh with the axes of `build_mesh`; whoever runs backward follows the result.

    The module may hold part of what the plan names (a pipeline stage), on the meta device or with weights in it.
    `reduction_group` is that of `open_reduction_group`, `kept` where a rank's stages keep together what the plan has
    on the host; whoever gives it calls `before_work`. `experts` is that of `build_expert_mesh`, where the plan has a
    unit of experts. What has `requires_grad=False` stays so. InvalidConfig with the nearest names, before anything is
    changed, if the plan has a style that nobody knows, or without a pipeline a pattern that matches nothing; with tp
    also if a trained parameter beside split matmuls has no style.
    """
    check_plan(plan, [module] if mesh[PP].size() == 1 else [])
    if mesh[TP].size() > 1:
        trained = [name for name, each in module.named_parameters(remove_duplicate=False) if each.requires_grad]
        linears = [name for name, each in module.named_modules() if isinstance(each, nn.Linear)]
        check_parameters(plan, [name for name, _ in module.named_modules()], trained, linears)
        split_tensors(module, plan.tensor, mesh[TP])
    if experts is not None and experts.ep.size() > 1:
        split_experts(module, plan.experts, experts.ep)
    if plan.balances_by_loss and mesh[CP].size() * mesh[TP].size() > 1:
        share_counts(module, token_mesh(mesh))
    freeze(module, plan.frozen, getattr(torch, plan.precision.compute))
    if plan.quantized:
        quantize_linears(module, plan.quantized, plan.precision.base)
    if plan.scaled:
        scale_linears(module, plan.scaled, plan.precision.matmuls, mesh[TP])
    if plan.fake_quantized:
        fake_quantize_linears(module, plan.fake_quantized, plan.precision.fake_quant, mesh[TP])
    if plan.scaled_experts:
        scale_experts(module, plan.scaled_experts, plan.precision.matmuls)
    if mesh[CP].size() > 1:
        apply_context(module, plan.context, plan.attention, mesh[CP])
    if plan.offloads_activations and kept is None:
        kept = ActivationOffloader(mesh.device_type)
    options = {"mode": plan.compile_mode, "fullgraph": plan.compile_fullgraph}
    prepare_blocks(
        module, plan.blocks, plan.recompute, attention=plan.attention, compiles=plan.compile == "blocks", kept=kept,
        ep_group="" if experts is None else experts.ep.get_group().group_name, compile_options=options,
    )  # fmt: skip
    compile_rest(module, plan.compile, options)
    return shard(module, plan, mesh, reduction_group, experts)


def check_plan(plan: Plan, stages: Sequence[nn.Module]) -> None:
    """InvalidConfig with a line for each unknown style, and for each pattern that matches nothing in all stages of a
    model; without stages patterns are not looked at."""
    problems = list_unknown_styles(plan, STYLES, CONTEXT_STYLES)
    if stages:
        modules = {name for stage in stages for name, _ in stage.named_modules()}
        parameters = {name for stage in stages for name, _ in stage.named_parameters(remove_duplicate=False)}
        problems += list_idle_patterns(plan, modules, parameters)
    if problems:
        raise InvalidConfig(problems)


def split_tensors(module: nn.Module, styles: Mapping[str, str], tp_mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism; parameters that were tied stay tied."""
    names_of = defaultdict[int, list[str]](list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of[id(parameter)].append(name)
    names = [name for name, _ in module.named_modules()]
    found: dict[str, ParallelStyle] = {}
    for pattern, style in styles.items():
        for name in match_names(pattern, names):
            found.setdefault(name, STYLES[style]())  # the first pattern that matches decides
    below_inputs = [f"{name}." for name, each in found.items() if isinstance(each, GatherInput)]
    for name, each in sorted(found.items(), key=lambda item: item[0]):  # a matmul before the modules of its adapter
        if isinstance(each, Colwise) and not name.startswith(tuple(below_inputs)):
            found[name] = ColwiseWithInputReduce()
            below_inputs.append(f"{name}.")  # an adapter reads what its matmul does
    if whole := found.pop("", None):
        whole._apply(module, tp_mesh)  # which torch's function takes for a module's child
    parallelize_module(module, tp_mesh, found)
    for first, *others in names_of.values():  # parallelize_module splits each on its own, and so unties them
        for owner, _, attribute in (other.rpartition(".") for other in others):
            setattr(module.get_submodule(owner), attribute, module.get_parameter(first))


def freeze(module: nn.Module, patterns: Sequence[str], dtype: torch.dtype) -> None:
    """Have autograd compute no gradient of the parameters that these patterns name, and hold them in `dtype`.

    Parameters that were tied stay tied.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name in list_parameters(module, patterns):
        owner, _, attribute = name.rpartition(".")
        before = module.get_parameter(name)
        if before not in made:
            made[before] = nn.Parameter(before.detach().to(dtype), requires_grad=False)
        setattr(module.get_submodule(owner), attribute, made[before])


def prepare_blocks(
    module: nn.Module,
    blocks: str,
    recompute: Recompute,
    *,
    compiles: bool,
    kept: ActivationOffloader | None = None,
    attention: str = "",
    ep_group: str = "",
    compile_options: Mapping[str, Any] | None = None,
) -> None:
    """Recompute, compile and offload the forward of each block; a block's number is the last part of its name.

    No module is a block where `blocks` is empty. `attention` is the blocks' kernel, `ep_group` the name of the group
    that splits their experts, `compile_options` arguments of torch.compile.

    Selective recomputation is part of what is compiled, which must know the operations that are kept. Recomputation in
    full runs what is compiled a second time: compiled together they fail on tensors that tp shards.
    """
    names = match_names(blocks, [name for name, _ in module.named_modules()]) if blocks else []
    for name in names:
        number = name.rpartition(".")[2]
        if not number.isdigit():
            raise InvalidConfig(
                f"plan.blocks={blocks!r} matches {name!r}, whose last part is no number; name the blocks"
            )
        block, is_covered = module.get_submodule(name), recompute.covers(int(number))
        has_experts = any(isinstance(part, Mixture) for part in block.modules())
        operators = _name_kept(recompute.kept, attention, ep_group) | (_CHOICES if has_experts else set())
        # What is compiled hands autograd all that it keeps.
        keeps = {"context_fn": partial(_keep_results, operators, None if compiles else kept)}
        if is_covered and recompute.is_selective:
            block.forward = _checkpointed(block.forward, **keeps)
        if compiles:
            block.forward = torch.compile(block.forward, **compile_options or {})
        if is_covered and not recompute.is_selective:
            # Nothing is known of operators inside of what is compiled; it chooses alike when it runs again.
            block.forward = _checkpointed(block.forward, **keeps if has_experts and not compiles else {})
        if kept is not None:
            block.forward = kept.wrap(block.forward, block, is_first=name == names[0], is_last=name == names[-1])


def _checkpointed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function of its own, since torch.compile does not look into a `partial` of `checkpoint`."""

    def run(*inputs: Any, **named: Any) -> Any:  # nothing is random
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options, **named)

    return run


def compile_rest(module: nn.Module, compile: Compile, options: Mapping[str, Any] | None = None) -> None:
    """Compile the loss, beside blocks too, or the whole, in place; `options` are arguments of torch.compile."""
    if compile == "model":
        module.compile(**options or {})
    if compile in ("loss", "blocks"):
        for head in (part for part in module.modules() if isinstance(part, Head)):
            head.token_losses = torch.compile(head.token_losses, **options or {})


_MATMULS = {
    "aten.mm.default", "aten.addmm.default", "aten._scaled_mm.default", "aten._grouped_mm.default",
    "dtlayout.grouped_mm.default", "dtlayout.scaled_grouped_mm.default",
}  # fmt: skip
_PIECES = {"aten.bmm.default"}
_REDUCTIONS = {
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_reduce.default",
    "symm_mem.fused_matmul_reduce_scatter.default",
}
"""Operators whose results selective recomputation always keeps. The all-gather is none of them: what sequence
parallelism shards would lie there whole."""
_CHOICES = {"aten.topk.default"}
"""Operators whose results every recomputation of a block with experts keeps: another choice would be another model."""


def _name_kept(kept: Collection[Kept], attention: str, ep_group: str) -> set[str]:
    """Names of the operators whose results a recomputation keeps; none where it keeps nothing.

    By name, since not every operator is there before documents come: ops/varlen.py. What computes scores as matmuls has
    an operator that others have too: where another kernel is the blocks' `attention`, it is no attention but a piece of
    a matmul that tp overlaps. With matmuls goes what experts get of ep's ranks.
    """
    if not kept:
        return set()
    kernels = [each for each in list_kernels(AttentionKernel) if attention in ("", each.name) or not each.holds_scores]
    operators = {ATTENTION_OPERATOR, *(operator for each in kernels for operator in each.operators)}
    matmuls = _MATMULS | (_PIECES - operators) | {name_all_to_all(ep_group)}
    by_kind: dict[Kept, set[str]] = {"matmuls": matmuls, "attention": operators}
    return _REDUCTIONS.union(*(by_kind[kind] for kind in kept))


def _keep_results(operators: Collection[str], on_host: ActivationOffloader | None) -> tuple[Any, Any]:
    """Contexts of a forward and of its recomputation, in which results of these operators are kept."""
    if on_host is not None:
        return keep_results(operators, on_host)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = name_operator(operator, args) in operators
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
