"""Plan: what happens to which module, as data. No torch.

A pattern is a module's full name in which `*` stands for one part: "model.layers.*.mlp". A plan is made for the whole
model and applied to any part of it, since a pipeline stage keeps the names of the whole.

Tensor and sequence parallelism follow Megatron (arXiv:1909.08053; with sequence parallelism arXiv:2205.05198): matmuls
come in pairs, the first split by columns and the second by rows, so that one collective closes the pair. The embedding
and the head are split over the vocabulary, and the loss is computed on the split logits. What a style sends over tp for
each microbatch:

| style | forward | backward |
|---|---|---|
| input | | all-reduce |
| input-gather | all-gather | reduce-scatter |
| input-gather-cast | all-gather in fp8, and its scale | reduce-scatter |
| input-overlap | as input-gather, in pieces beside the matmuls below | |
| colwise below an input | | |
| rowwise, embedding | all-reduce | |
| rowwise-scatter, embedding-scatter | reduce-scatter | all-gather |
| rowwise-scatter-cast | reduce-scatter | all-gather in fp8, and its scale |
| rowwise-overlap | as rowwise-scatter, in pieces beside the matmul | |
| sequence | | (weight gradients: an all-reduce when gradients are synchronised) |
| head | two all-reduces, of one and of two numbers a token | all-reduce |
| head-gather | all-gather, and these two | reduce-scatter |
| head-norm | | (weight gradients: an all-reduce when gradients are synchronised) |
| replicated, scale | | (weight gradients: an all-reduce when gradients are synchronised) |
| rowwise-term, scale-split, whole | | |
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.adapters import LowRankLinear, RescaledLinear
from dtlayout.models.description import (
    ATTEND,
    BLOCKS,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    MASK,
    POSITIONS,
    ROTARY,
    TRACED_ATTEND,
    TRACED_OTHERWISE,
    Operation,
)
from dtlayout.models.families import describe
from dtlayout.models.operations import Linear, Norm
from dtlayout.models.routed_experts import RoutedExperts
from dtlayout.models.traced import FAMILY
from dtlayout.plans.style_table import TensorStyle
from dtlayout.spec.kernel_records import ExpertsKernel, LossKernel
from dtlayout.spec.kernel_table import find_kernel
from dtlayout.spec.kernels import Compile, CompileMode, Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.layout_keys import OFFLOADS, Offload
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import ALIGNMENT, BYTES, Precision
from dtlayout.spec.recompute import Recompute

OVERLAPPED_PIECES = 4
"""Pieces that `layout.tp_overlap` sends: matmuls can hide all but one, and each has a quarter of the tokens."""


_PATTERNS = ("frozen", "quantized", "scaled", "fake_quantized", "scaled_experts", "summed", "counters")
"""Fields of a plan that are patterns."""
_CHOICES: dict[str, tuple[Any, ...]] = {"zero": (1, 2, 3), "offload": OFFLOADS, "compile": get_args(Compile)}
"""Field of a plan → values that it may have."""


@dataclass(frozen=True)
class Plan(Offload):
    """Placements, recomputation and sharding of a model's modules; `print(plan)` shows it as a table.

    A pattern is the full name of a module in which `*` stands for exactly one part: "layers.*.mlp" is "layers.0.mlp",
    and neither "layers.0" nor "layers.0.mlp.up". Those of `frozen` are names of parameters: "layers.*.mlp.up.weight". A
    forward between a colwise and a rowwise layer sees a rank's own heads alone, so it must not count them: it says
    `view(b, s, -1, head_dim)`, and not `view(b, s, num_heads, -1)`.
    """

    tensor: Mapping[str, str]
    """Pattern → style: how tensor parallelism splits the module; the first pattern that matches decides. `STYLE_TABLE`
    of plans/style_table.py has them all."""
    blocks: str
    """Pattern of the modules that `recompute` counts and covers; empty where none are named."""
    recompute: Recompute = field(default=Recompute(0), kw_only=True)
    """The blocks among them that are computed again in backward; none of them by default."""
    units: tuple[tuple[str, ...], ...]
    """FSDP units, inner ones first: patterns of modules whose parameters are gathered together. What no unit names
    belongs to the root."""
    zero: Literal[1, 2, 3]
    """Data that the units shard: 1 the optimizer's state, 2 also gradients, 3 also parameters."""
    precision: Precision
    """Number formats of parameters, computation and gradient reduction."""
    context: Mapping[str, str] = field(default_factory=dict)
    """Pattern → how cp's ranks share a place, a module or a function that a module has: `CONTEXT_STYLES` of
    plans/context.py."""
    attention: str = Kernels.attention
    """The kernel that attends, where cp has it done part after part."""
    offload: str = "none"
    """Data that lies in the host's memory, or on its disk, as `Layout.offload` says."""
    compile: Compile = "none"
    """Modules that torch.compile gets: each of the blocks, the loss, the whole, or none."""
    compile_mode: CompileMode = "default"
    """`mode` of torch.compile."""
    compile_fullgraph: bool = False
    """`fullgraph` of torch.compile."""
    frozen: tuple[str, ...] = ()
    """Patterns of the parameters that are not trained: they have no gradient, no reduction and no optimizer state."""
    quantized: tuple[str, ...] = ()
    """Patterns of the linear layers whose frozen weights are stored as `precision.base` says."""
    scaled: tuple[str, ...] = ()
    """Patterns of the linear layers that multiply in `precision.matmuls`, below the compute format."""
    gathers_scaled: bool = False
    """Whether the weights of those layers are gathered in that format."""
    fake_quantized: tuple[str, ...] = ()
    """Patterns of the linear layers that multiply by weights rounded as `precision.fake_quant` says."""
    scaled_experts: tuple[str, ...] = ()
    """Patterns of the modules with stacks of experts that multiply in `precision.matmuls` too, and are gathered as
    they come."""
    experts: str = ""
    """Pattern of the modules with stacks of experts, which are a unit of their own; empty where no mesh of experts
    shards them (`needs_expert_mesh`)."""
    balances_by_loss: bool = False
    """Whether routers have a loss that counts the tokens of a microbatch, over all ranks of cp and tp."""
    summed: tuple[str, ...] = ()
    """Patterns of the linear layers whose matmuls add the gradients of their weights to the sum over microbatches."""
    counters: tuple[str, ...] = ()
    """Patterns of the parameters that no gradient moves, and of which each rank has all."""

    def __post_init__(self) -> None:
        if problems := [*self._list_wrong_kinds(), *self._list_needs_of_blocks()]:
            raise InvalidConfig(problems)

    def _list_wrong_kinds(self) -> Iterator[str]:
        """A line for each field whose value is of another kind than it takes."""
        text = self.recompute if isinstance(self.recompute, str) else "every-2"
        compute = self.precision if self.precision in [*BYTES] else "bfloat16"
        kinds: dict[str, tuple[type, str]] = {
            "tensor": (Mapping, "a mapping, pattern → style"), "context": (Mapping, "a mapping, pattern → style"),
            "blocks": (str, "one pattern"), "recompute": (Recompute, f"Recompute.parse({text!r})"),
            "precision": (Precision, f"a Precision, such as Precision(compute={compute!r})"),
        }  # fmt: skip
        for name, (kind, advice) in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                yield f"plan.{name}={value!r} is a {type(value).__name__}; give {advice}"
        units: Sequence[Any] = [self.units] if isinstance(self.units, str) else self.units
        for pattern in (unit for unit in units if isinstance(unit, str)):
            yield f"plan.units: {pattern!r} stands where a tuple of patterns does; give units=(({pattern!r},),)"
        for name in _PATTERNS:
            if isinstance(value := getattr(self, name), str):
                yield f"plan.{name}={value!r} is one pattern; give a tuple of them, ({value!r},)"
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                yield f"plan.{name}={value!r} is unknown; use {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"

    def _list_needs_of_blocks(self) -> Iterator[str]:
        """A line for each field that works on blocks where the plan names none."""
        if self.blocks or not isinstance(self.recompute, Recompute):
            return
        asked = {
            "recompute": self.recompute.every > 0, "compile": self.compile == "blocks",
            "offload": self.offloads_activations,
        }  # fmt: skip
        for name in (name for name, needs in asked.items() if needs):
            yield f"plan.{name} is for blocks, and plan.blocks is empty; give the pattern of the blocks"

    def __str__(self) -> str:
        rows = [(pattern or "(all)", f"tp {style}") for pattern, style in self.tensor.items()]
        rows += [(pattern, f"cp {style}") for pattern, style in self.context.items()]
        rows += [(pattern, "frozen") for pattern in self.frozen]
        rows += [(pattern, f"stored as {self.precision.base}") for pattern in self.quantized]
        rows += [(pattern, f"multiplies in {self.precision.matmuls}") for pattern in self.scaled]
        rows += [
            (pattern, f"multiplies by weights rounded to {self.precision.fake_quant}")
            for pattern in self.fake_quantized
        ]
        rows += [(pattern, f"each expert multiplies in {self.precision.matmuls}") for pattern in self.scaled_experts]
        rows += [(pattern, "matmuls add weight gradients to their sum") for pattern in self.summed]
        rows += [(self.experts, "split over ep, sharded over the ranks with the same experts")] * bool(self.experts)
        if self.compile != "none":
            options = f", {self.compile_mode}" * (self.compile_mode != "default") + ", whole" * self.compile_fullgraph
            rows.append((self.blocks if self.compile == "blocks" else "(all)", f"compiled: {self.compile}{options}"))
        rows += [(" + ".join(unit), f"fsdp unit, zero {self.zero}") for unit in self.units]
        if self.recompute.every:
            kept = " and ".join(sorted(self.recompute.kept))
            what = f"but for {kept}" if kept else "in full"
            rows.append((self.blocks, f"recomputed {what}, {self.recompute.number} of {self.recompute.every}"))
        if self.offloads_activations:
            rows.append((self.blocks, "kept on the host until a block before its backward"))
        if self.has_state_on_disk:
            rows.append(("(all)", "masters and optimizer on the host's disk, gradients in its memory"))
        elif self.offloads_state:
            rows.append(("(all)", "masters, gradients and optimizer on the host"))
        p = self.precision
        rows.append(("(all)", f"params {p.params}, compute {p.compute}, gradients summed in {p.reduce}"))
        width = max(len(pattern) for pattern, _ in rows)
        return "\n".join(f"{pattern:<{width}}  {text}" for pattern, text in rows)


def make_plan(model: ModelShape, layout: Layout, kernels: Kernels, precision: Precision) -> Plan:
    """The plan of a model for a legal layout."""
    # Tied weights are one parameter and a parameter has one unit: with them embedding and head stay with the root.
    ends = () if model.tied_embeddings else ((EMBEDDING,), (FINAL_NORM, HEAD))
    described = describe(model)
    experts = f"{BLOCKS}.{described.experts.module}" if described.experts and needs_expert_mesh(model, layout) else ""
    return Plan(
        tensor=tensor_styles(model, layout, casts=gathers_cast(model, precision)),
        context=context_styles(model, layout),
        attention=kernels.attention,
        blocks=BLOCKS,
        recompute=Recompute.parse(layout.recompute),
        units=(*((experts,),) * bool(experts), (BLOCKS,), *ends),
        zero=layout.zero,
        precision=precision,
        offload=layout.offload,
        compile=kernels.compile,
        compile_mode=kernels.compile_mode,
        compile_fullgraph=kernels.compile_fullgraph,
        frozen=find_frozen(model),
        quantized=find_quantized(model) if precision.base != "compute" else (),
        scaled=find_scaled(model) if precision.matmul_format else (),
        gathers_scaled=gathers_scaled(precision),
        fake_quantized=find_fake_quantized(model) if precision.fake_quant != "none" else (),
        scaled_experts=find_scaled_experts(model, kernels) if precision.matmul_format else (),
        experts=experts,
        summed=find_summed(model, layout, kernels, precision),
        balances_by_loss=model.experts is not None and model.experts.balance_loss > 0,
        counters=tuple(f"{BLOCKS}.{weight.name}" for weight in described.block_weights if weight.is_counter),
    )


def needs_expert_mesh(model: ModelShape, layout: Layout) -> bool:
    """Whether experts are spread over other ranks than the rest is: ep splits them, and tp only shares their tokens."""
    return model.experts is not None and (layout.ep > 1 or layout.tp > 1)


def find_frozen(model: ModelShape) -> tuple[str, ...]:
    """Patterns of the frozen parameters of a model, in its order; none of what a step counts."""
    described, blocks = describe(model), _list_blocks(model)
    weights = ((pattern, weight) for pattern, operations in blocks for each in operations for weight in each.weights)
    in_blocks = (
        f"{pattern}.{weight.name}" for pattern, weight in weights if not weight.trains and not weight.is_counter
    )
    ends = (*described.before_blocks, *described.after_blocks, described.head)
    return (*in_blocks, *(weight.name for weight in ends if not weight.trains))


def find_quantized(model: ModelShape) -> tuple[str, ...]:
    """Patterns of the linear layers whose frozen weights `precision.base` may store in few bits."""
    found = ((where, each) for where, block in _list_blocks(model) for operation in block for each in operation.weights)
    return tuple(f"{where}.{each.name.removesuffix('.weight')}" for where, each in found if each.can_be_quantized)


def find_scaled(model: ModelShape) -> tuple[str, ...]:
    """Patterns of the linear layers that can multiply in `precision.matmuls`."""
    found = ((where, each) for where, block in _list_blocks(model) for each in block if isinstance(each, Linear))
    return tuple(f"{where}.{each.module}" for where, each in found if each.is_scaled(ALIGNMENT))


def find_fake_quantized(model: ModelShape) -> tuple[str, ...]:
    """Patterns of the linear layers that `precision.fake_quant` is for: those that an export stores in few bits."""
    found = ((where, each) for where, block in _list_blocks(model) for each in block if isinstance(each, Linear))
    return tuple(f"{where}.{each.module}" for where, each in found if each.is_split)


def find_scaled_experts(model: ModelShape, kernels: Kernels) -> tuple[str, ...]:
    """Patterns of the modules with stacks of experts that multiply in `precision.matmuls`, if their kernel can."""
    if not find_kernel(ExpertsKernel, kernels.experts).scales:
        return ()
    found = ((where, each) for where, block in _list_blocks(model) for each in block if isinstance(each, RoutedExperts))
    return tuple(f"{where}.{each.module}" for where, each in found if each.is_scaled(ALIGNMENT))


def find_summed(model: ModelShape, layout: Layout, kernels: Kernels, precision: Precision) -> tuple[str, ...]:
    """Patterns of the linear layers whose matmuls add their weights' gradients to the sum over microbatches.

    None where CUDA graphs would replay the addresses of an earlier step's sums.
    """
    if not has_sums(layout) or kernels.records_graphs:
        return ()
    found = ((where, each) for where, block in _list_blocks(model) for each in block if isinstance(each, Linear))
    names = [
        f"{where}.{each.module}" for where, each in found
        if sums_in_blocks(layout, precision) and any(weight.is_summed for weight in each.own_weights)
    ]  # fmt: skip
    return (*names, HEAD) if sums_in_head(model, kernels) else tuple(names)


def has_sums(layout: Layout) -> bool:
    """True if a rank keeps each weight's whole gradient, summed over microbatches, until the last backward."""
    return layout.zero == 1


def sums_in_blocks(layout: Layout, precision: Precision) -> bool:
    """True if plain matmuls make the weight gradients of linear layers, which tp does not overlap with collectives."""
    return has_plain_matmuls(precision) and not layout.overlaps_tp


def has_plain_matmuls(precision: Precision) -> bool:
    """True if linear layers multiply in the compute format, by weights as they are."""
    return precision.matmul_format is None and precision.fake_quant == "none"


def sums_in_head(model: ModelShape, kernels: Kernels) -> bool:
    """True if a plain matmul makes the head's weight gradient, of all its rows."""
    return (
        describe(model).head.trains and not model.unused_rows and not find_kernel(LossKernel, kernels.loss).joins_matmul
    )


def gathers_cast(model: ModelShape, precision: Precision) -> bool:
    """Whether sequence parallelism gathers in fp8: with one scale for a tensor, and where only such matmuls read it."""
    fmt = precision.matmul_format
    if fmt is None or not fmt.scales_tensors or model.adapter is not None:
        return False
    linears = [each for _, block in _list_blocks(model) for each in block if isinstance(each, Linear)]
    return all(each.is_scaled(ALIGNMENT) for each in linears)


def gathers_scaled(precision: Precision) -> bool:
    """Whether FSDP2 gathers weights as they multiply: with one scale for a whole weight, whoever has which part."""
    return precision.matmul_format is not None and precision.matmul_format.scales_tensors


def tensor_styles(model: ModelShape, layout: Layout, *, casts: bool = False) -> dict[str, TensorStyle]:
    """Pattern → style of each module that tp changes; empty at tp = 1. With `casts` branches are gathered in fp8."""
    if layout.tp == 1:
        return {}
    scatter = layout.shards_sequence
    opening: TensorStyle = "input-overlap" if layout.overlaps_tp else "input-gather" if scatter else "input"
    closing: TensorStyle = "rowwise-overlap" if layout.overlaps_tp else "rowwise-scatter" if scatter else "rowwise"
    if casts and scatter and not layout.overlaps_tp:
        opening, closing = "input-gather-cast", "rowwise-scatter-cast"
    styles: dict[str, TensorStyle] = {EMBEDDING: "embedding-scatter" if scatter else "embedding"}
    for blocks, operations in _list_blocks(model):
        inner = {each.module for each in operations if isinstance(each, Linear) and each.style != "rowwise"}
        opened = {_find_branch(each) for each in operations if isinstance(each, Linear) and each.is_split}
        for operation in operations:
            match operation:
                case Norm(parameters=()):  # nothing of it is split, and it has no gradient
                    continue
                case Norm(over_ranks=True):
                    styles[f"{blocks}.{operation.module}"] = "norm-split"
                case Norm() if operation.is_of_heads or operation.reads in inner:
                    styles[f"{blocks}.{operation.module}"] = "head-norm"
                case Norm() if scatter:
                    styles[f"{blocks}.{operation.module}"] = "sequence"
                case Norm() if operation.module.rpartition(".")[0] in opened:  # it stands beside split matmuls (OPT)
                    styles[f"{blocks}.{operation.module}"] = "whole"
                case Linear(style="colwise"):
                    if branch := _find_branch(operation):  # a matmul of the block itself (OPT's fc1) opens on its own
                        styles.setdefault(f"{blocks}.{branch}", opening)
                    styles[f"{blocks}.{operation.module}"] = "colwise"
                case Linear(style="rowwise"):
                    styles[f"{blocks}.{operation.module}"] = closing
                case Linear(style="replicated"):
                    styles[f"{blocks}.{operation.module}"] = "replicated"
            for module, style in _adapter_styles(operation).items():
                styles[f"{blocks}.{module}"] = style
    if scatter:
        described = describe(model)
        beside = (each for each in (*described.beside_embedding, *described.after_blocks) if each.split is None)
        styles |= dict.fromkeys((each.name.rpartition(".")[0] for each in beside), "sequence")
    if model.family == FAMILY:
        styles[""] = "traced-sequence" if scatter else "traced"
    return styles | {HEAD: "head-gather" if scatter else "head"}


def _find_branch(matmul: Linear) -> str:
    """The module that a matmul is a child of; empty for a child of the block."""
    return (matmul.part_of or matmul.module).rpartition(".")[0]


def _adapter_styles(operation: Operation) -> dict[str, TensorStyle]:
    """Module → style of each module of an adapter beside a matmul; empty without one.

    Where the matmul is split by outputs, so is B, and each rank multiplies A whole. Where it is split by inputs, so is
    A, and B turns each rank's term into one of the matmul's own, before the collective that adds them up. What every
    rank has whole gets a term of its gradient on each.
    """
    match operation:
        case LowRankLinear(names=(narrow, wide), style="colwise"):
            return {narrow: "replicated", wide: "colwise"}
        case LowRankLinear(names=(narrow, wide), style="rowwise"):
            return {narrow: "rowwise-term", wide: "replicated"}
        case LowRankLinear(names=(narrow, wide)):
            return {narrow: "replicated", wide: "replicated"}
        case RescaledLinear(name=vector, is_split=is_split):
            return {vector: "scale-split" if is_split else "scale"}
    return {}


def _list_blocks(model: ModelShape) -> Iterator[tuple[str, tuple[Operation, ...]]]:
    """Pattern of blocks, and operations of each; blocks of another kind than most are named one by one."""
    most = describe(model).block
    for number in range(model.num_layers if model.block_kinds else model.num_first):
        if (block := describe(model.kind_of(number)).block) != most:
            yield BLOCKS.replace("*", str(number)), block
    yield BLOCKS, most


def context_styles(model: ModelShape, layout: Layout) -> dict[str, str]:
    """Pattern → style of each place where cp's ranks meet, or know where their tokens stand; empty at cp = 1."""
    if layout.cp == 1:
        return {}
    method, is_traced = layout.context_method, model.family == FAMILY
    styles: dict[str, str] = {POSITIONS if is_traced else ROTARY: method.order}
    if not method.splits_heads:
        styles[MASK] = "documents"
    if not is_traced:
        return styles | {f"{BLOCKS}.{ATTEND}": method.name}
    otherwise = method.name if method.splits_heads else "refused"
    return styles | {f"{BLOCKS}.{TRACED_ATTEND}": method.name, f"{BLOCKS}.{TRACED_OTHERWISE}": otherwise}


def match_names(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern means, in their order.

    >>> match_names("layers.*", ["layers", "layers.0", "layers.0.mlp", "layers.1"])
    ['layers.0', 'layers.1']
    """
    expression = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
    return [name for name in names if expression.fullmatch(name)]


def list_parameters(module: Any, patterns: Iterable[str]) -> list[str]:
    """Names of a torch module's parameters that some pattern means."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return [name for pattern in patterns for name in match_names(pattern, names)]
