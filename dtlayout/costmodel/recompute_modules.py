"""Recompute modules: parts of a block that Megatron computes again under selective recomputation, one row a module.

Names and meaning are those of Megatron-Core 0.16, `TransformerConfig.recompute_modules`. A row says which entries of a
block's tape a module is, so that memory and time follow from the shapes there. Two ways of recomputing differ in what
goes: checkpointing drops tensors inside a module, and output-discarding checkpointing (`CheckpointWithoutOutput` in
tensor_parallel/random.py) its results too, until the gradient behind their reader comes. Inputs are kept by both.

Transformer Engine computes most norms inside the matmul behind them (`TELayerNormColumnParallelLinear` in
gpt_layer_specs.py), and such a norm is a part of that matmul. Norms before a router and before latent attention's
narrow vectors are modules of their own.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from dtlayout.models.description import NO_ATTENTION
from dtlayout.models.families import describe
from dtlayout.models.tape import HIDDEN, INPUT, BlockTensor, TapeEntry
from dtlayout.spec.model_shape import ModelShape

BlockPart = Literal["attention", "latent attention", "experts", "shared expert", "dense feed-forward"]
"""Word for a part that blocks of a model have or lack."""
Tape = Sequence[TapeEntry]


class RecomputeModule(NamedTuple):
    """A part of a block that can be computed again by itself."""

    find: Callable[[Tape], Iterable[int]]
    """Function from a block's tape to the places of the entries that the module is; none where a block lacks it."""
    parts: tuple[BlockPart, ...]
    """Parts of which a model needs one; without them the module is nowhere."""
    is_refused: bool = False
    """True if Megatron refuses the module for a model without these parts; else the module has no effect there."""
    discards_output: bool = False
    """True if its results are dropped too, and not only tensors inside."""
    results: tuple[str, ...] = ()
    """Names that entries behind it have for its results, where the tape does not call them by their maker."""
    kept: tuple[str, ...] = ()
    """Inputs that its checkpoint keeps and that nothing else on a tape saves."""


def _find_attention(tape: Tape) -> list[int]:
    """The product of queries, keys and values (`Attention._checkpointed_attention_forward`)."""
    return [place for place, entry in enumerate(tape) if entry.kind == "attention"]


def _find_norms(tape: Tape) -> list[int]:
    """Norms of the stream that are modules of their own: input_layernorm and pre_mlp_layernorm."""
    return [place for place, entry in enumerate(tape) if _is_of_stream(entry) and not _is_fused(tape, entry)]


def _find_up_projection(tape: Tape) -> list[int]:
    """Matmuls out of narrow vectors with the norms inside them, and the rotary embedding of latent attention
    (`qkv_up_proj_and_rope_apply` in multi_latent_attention.py). Without a rank of queries their matmul is one too."""
    before = list(tape[: next(iter(_find_attention(tape)), 0)])
    if not any(entry.kind == "matmul" and entry.makes[0].spread == "stream" for entry in before):
        return []
    return [
        place
        for place, entry in enumerate(before)
        if entry.kind == "rope"
        or (entry.kind == "matmul" and entry.makes[0].spread == "branch")
        or (entry.kind == "norm" and entry.reads[0].name != HIDDEN)
    ]


def _find_dense(tape: Tape) -> list[int]:
    """A feed-forward that computes every token, with the norm inside its first matmul (`TransformerLayer.mlp`)."""
    return [] if _has_experts(tape) else list(_find_feed_forward(tape))


def _find_mixture(tape: Tape) -> list[int]:
    """Router, exchange of tokens, routed and shared experts (`MoELayer.forward`)."""
    return list(_find_feed_forward(tape)) if _has_experts(tape) else []


def _find_shared_experts(tape: Tape) -> list[int]:
    """The experts that compute every token (`MoELayer.shared_experts_compute`), behind the routed ones on a tape."""
    routed = next((place for place, entry in enumerate(tape) if entry.kind == "combine"), len(tape))
    return [place for place in _find_mixture(tape) if place > routed]


def _find_expert_activation(tape: Tape) -> list[int]:
    """The activation between both grouped matmuls (`TEGroupedMLP.forward` in moe/experts.py)."""
    matmuls = [place for place, entry in enumerate(tape) if entry.kind == "experts"] or [0]
    return [place for place in range(matmuls[0], matmuls[-1]) if tape[place].kind == "activation"]


def _has_experts(tape: Tape) -> bool:
    return any(entry.kind == "experts" for entry in tape)


def _is_of_stream(entry: TapeEntry) -> bool:
    return entry.kind == "norm" and entry.reads[0].name == HIDDEN


def _is_fused(tape: Tape, norm: TapeEntry) -> bool:
    """True if only matmuls that tp splits by outputs read the norm's result: one of them computes the norm too."""
    readers = [entry for entry in tape if any(each.name == norm.makes[0].name for each in entry.reads)]
    return all(entry.kind == "matmul" and entry.makes[0].spread == "branch" for entry in readers)


def _find_feed_forward(tape: Tape) -> Iterator[int]:
    """Places behind attention's last matmul, without sums into the stream and without norms of their own."""
    start = _find_end_of_attention(tape)
    for place, entry in enumerate(tape[start:], start):
        is_own_norm = entry.kind in ("norm", "scale") and not (_is_of_stream(entry) and _is_fused(tape, entry))
        if entry.kind not in ("residual", "alias") and not is_own_norm:
            yield place


def _find_end_of_attention(tape: Tape) -> int:
    first = next(iter(_find_attention(tape)), None)
    if first is None:
        return next((place for place, entry in enumerate(tape) if entry.kind == "residual"), len(tape))
    return next((place + 1 for place in range(first, len(tape)) if tape[place].kind == "matmul"), len(tape))


MODULES: Mapping[str, RecomputeModule] = {
    "core_attn": RecomputeModule(_find_attention, ("attention",)),
    "layernorm": RecomputeModule(_find_norms, ("experts", "latent attention"), discards_output=True),
    "mla_up_proj": RecomputeModule(
        _find_up_projection, ("latent attention",), is_refused=True, discards_output=True,
        results=("queries", "keys", "values"), kept=("shared keys",),
    ),
    "mlp": RecomputeModule(_find_dense, ("dense feed-forward",)),
    "moe": RecomputeModule(_find_mixture, ("experts",)),
    "moe_act": RecomputeModule(_find_expert_activation, ("experts",), is_refused=True, discards_output=True),
    "shared_experts": RecomputeModule(_find_shared_experts, ("shared expert",)),
}  # fmt: skip
"""Megatron's name → module."""
USUAL_MODULES = ("core_attn",)
"""Modules that are computed again where a run names none."""


class RecomputedParts(NamedTuple):
    """Everything of a block that some modules compute again."""

    places: frozenset[int]
    """Places of their entries on the tape."""
    freed: Mapping[str, Literal["attention", "feed-forward"]]
    """Name of each saved tensor that goes after forward → the half of the block in whose backward it is there again."""
    kept: tuple[BlockTensor, ...]
    """Tensors that are kept only because modules are computed again from them."""
    end: int
    """Place behind attention's last matmul, where the second half of the block begins."""


def find_again(tape: Tape, modules: Collection[str]) -> RecomputedParts:
    """Everything of a block with a tape that `modules`, names of `MODULES`, compute again."""
    places, freed, kept = set[int](), dict[str, Literal["attention", "feed-forward"]](), dict[str, BlockTensor]()
    end = _find_end_of_attention(tape)
    for name in modules:
        module = MODULES[name]
        inside = {*module.find(tape)}
        for place in inside:
            half: Literal["attention", "feed-forward"] = "attention" if place < end else "feed-forward"
            freed.update(dict.fromkeys(_list_freed(tape, module, place, inside), half))
            kept |= {each.name: each._replace(spread="whole") for each in tape[place].reads if each.name in module.kept}
        places |= inside
    return RecomputedParts(frozenset(places), freed, tuple(kept.values()), end)


def _list_freed(tape: Tape, module: RecomputeModule, place: int, inside: Collection[int]) -> Iterator[str]:
    """Names of tensors that one entry of a module makes or saves, and that go after forward."""
    entry = tape[place]
    if entry.kind == "attention":  # which saves its inputs, and its result for the matmul behind it
        return
    read_outside = {each.name for other, entry in enumerate(tape) if other not in inside for each in entry.reads}
    made_inside = {each.name for other in inside for each in tape[other].makes}
    read = {each.name for each in entry.reads}
    for made in entry.makes:
        if module.discards_output or made.name not in read_outside:
            yield made.name
    for saved in entry.saves:
        if saved.name in made_inside or not (saved.name in read or saved.name.endswith(INPUT)):
            yield saved.name
    if entry.kind == "rope":
        yield from module.results


def list_parts(model: ModelShape) -> set[BlockPart]:
    """Parts that blocks of a model have."""
    parts = set[BlockPart]()
    for kind, _ in model.kinds(range(model.num_layers)):
        parts |= name_parts(
            attends=describe(kind).attention is not NO_ATTENTION, is_latent=kind.latent_attention is not None,
            has_experts=kind.experts is not None, has_dense=kind.experts is None,
            is_shared=kind.experts is not None and kind.experts.shared_ffn_size > 0,
        )  # fmt: skip
    return parts


def name_parts(
    *, attends: bool, is_latent: bool, has_experts: bool, has_dense: bool, is_shared: bool
) -> set[BlockPart]:
    """Words for the parts that are there; `is_shared` is true of a shared expert."""
    has: dict[BlockPart, bool] = {
        "attention": attends, "latent attention": is_latent, "experts": has_experts, "dense feed-forward": has_dense,
        "shared expert": is_shared,
    }  # fmt: skip
    return {part for part, there in has.items() if there}


def find_missing(modules: Iterable[str], parts: Collection[BlockPart]) -> dict[str, str]:
    """Module that a model with these parts lacks → the parts of which it needs one, in words."""
    return {name: " or ".join(MODULES[name].parts) for name in modules if not {*MODULES[name].parts} & {*parts}}
