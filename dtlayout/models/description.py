"""Description of a model as data: the operations of a block in order, and both ends of the model. No torch.

A description of a model with experts is of a block with them; its first blocks may have none (`ModelShape.kinds`).

All that depends on a model's structure is derived from it, and from nothing else. From its weights come parameters and
FLOPs (`models.counting`), tensor-parallel styles, FSDP units (`plans`) and initial values (`plans.init`). Memory and
time come from the tape of a block, of which each operation writes a part (`models.operations`, `models.tape`). The
modules themselves are `models.llama`; tests hold one against the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Literal

from dtlayout.models.choice import TokenChoice
from dtlayout.models.mixer import Mixer
from dtlayout.models.operations import (
    ATTENDED,
    Activation,
    Branch,
    Elementwise,
    Linear,
    Norm,
    Residual,
    Rotary,
    SelfAttention,
)
from dtlayout.models.routed_experts import RoutedExperts
from dtlayout.models.weight import Weight
from dtlayout.spec.model_shape import BlockVariant, LatentAttention, ModelShape

EMBEDDING, BLOCKS, FINAL_NORM, HEAD = "model.embed_tokens", "model.layers.*", "model.norm", "lm_head"
"""Modules of a whole model; the star stands for a block's number."""
ROTARY, MASK, ATTEND = "model.rotary", "model.prepare_mask", "self_attn.attend"
"""Names of the places that depend on where tokens stand: tables, and functions of a model or of each block."""
POSITIONS, TRACED_ATTEND, TRACED_OTHERWISE = "model.positions", "attend", "attend_otherwise"
"""Names of such places in traced models: positions, and functions of some module of each block."""


_NORM_PARAMETERS: Mapping[str, tuple[Literal["weight", "bias"], ...]] = {
    "factor": ("weight",), "factor-and-bias": ("weight", "bias"), "none": (),
}  # fmt: skip
"""`BlockVariant.norm_weights` → names of a norm's parameters."""
Operation = (
    Norm
    | Branch
    | Linear
    | RoutedExperts
    | Rotary
    | TokenChoice
    | SelfAttention
    | Mixer
    | Activation
    | Elementwise
    | Residual
)
NO_ATTENTION = SelfAttention(0, 0, 0, 0)
"""Attention of a block that has none, as where a state takes its place: it computes nothing and holds nothing."""


@dataclass(frozen=True)
class Description:
    """A whole model."""

    embedding: Weight
    """Turns tokens into vectors; split over the vocabulary."""
    block: tuple[Operation, ...]
    """Operations of each block, in order; of one with experts where only the first blocks have none."""
    final_norm: Norm
    """Before the head."""
    head: Weight
    """Makes logits, split over the vocabulary; where embeddings are tied it is the embedding's."""
    beside_embedding: tuple[Weight, ...] = ()
    """Further weights before the blocks, such as learned positions."""
    beside_head: tuple[Weight, ...] = ()
    """Further weights after the blocks, such as the head's bias."""
    caps_logits: bool = False
    """True if a softcap bounds logits; its backward keeps a tensor as large."""

    @property
    def before_blocks(self) -> tuple[Weight, ...]:
        """The weights of a first stage that belong to no block."""
        return (self.embedding, *self.beside_embedding)

    @property
    def after_blocks(self) -> tuple[Weight, ...]:
        """The weights of a last stage that belong to no block, but for the head."""
        return (*self.final_norm.weights, *self.beside_head)

    @cached_property
    def block_weights(self) -> tuple[Weight, ...]:
        """The parameters of a block, in the order of its operations."""
        return tuple(weight for operation in self.block for weight in operation.weights)

    @cached_property
    def attention(self) -> SelfAttention:
        """The attention of a block; `NO_ATTENTION` where it has none."""
        return next((each for each in self.block if isinstance(each, SelfAttention)), NO_ATTENTION)

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The states along the sequence that a block carries."""
        return tuple(each for each in self.block if isinstance(each, Mixer))

    @cached_property
    def choices(self) -> tuple[TokenChoice, ...]:
        """The products by which a block chooses what attention reads."""
        return tuple(each for each in self.block if isinstance(each, TokenChoice))

    @cached_property
    def experts(self) -> RoutedExperts | None:
        """The experts of a block, where it has them."""
        return next((each for each in self.block if isinstance(each, RoutedExperts)), None)

    @cached_property
    def block_as_run(self) -> tuple[Operation, ...]:
        """Operations of a block in the order of our own modules: what computes every token beside experts comes before
        their router, so that backward comes to the experts first."""
        if self.experts is None:
            return self.block
        place = self.block.index(self.experts)
        shared = tuple(takewhile(lambda each: isinstance(each, Linear | Activation), self.block[place + 1 :]))
        last = place + 1 + len(shared)
        return (*self.block[: place - 1], *shared, *self.block[place - 1 : place + 1], *self.block[last:])

    @cached_property
    def num_branches(self) -> int:
        """Branches of a block, each closed by a sum over tp."""
        return sum(isinstance(each, Linear) and each.style == "rowwise" for each in self.block)

    @cached_property
    def tp_closes_block(self) -> bool:
        """Whether the last matmul is one that closes a branch, and so is not that of routed experts."""
        return isinstance(next((each for each in reversed(self.block) if each.kept_as == "matmuls"), None), Linear)

    def find(self, name: str) -> Weight:
        """The weight that is called so in the whole model, "model.layers.3.mlp.up_proj.weight"; KeyError if none.

        Its block is one with experts, in a model with experts (`families.find_weight` knows the first ones).
        """
        prefix, _, rest = name.partition(".layers.")
        known = self.block_weights if rest else (*self.before_blocks, *self.after_blocks, self.head)
        wanted = rest.partition(".")[2] if rest else prefix
        return {weight.name: weight for weight in known}[wanted]


def describe_llama(model: ModelShape) -> Description:
    """A Llama; with biases of q, k and v a Qwen2, with norms of q and k a Qwen3, with experts a Qwen3-MoE.

    With latent attention and experts it is a DeepSeek-V3. `ModelShape.block` says in what other families differ.
    """
    h, variant = model.hidden_size, model.block or BlockVariant()
    table = (model.vocab_size, h)
    return Description(
        embedding=Weight(f"{EMBEDDING}.weight", table, "normal", "embedding", 0),
        block=(_describe_parallel if variant.norms == "shared" else _describe_sequential)(model, variant),
        final_norm=Norm(FINAL_NORM, h, parameters=_NORM_PARAMETERS[variant.norm_weights]),
        head=Weight(f"{HEAD}.weight", table, "normal", "head", 0),
    )


def _describe_sequential(model: ModelShape, variant: BlockVariant) -> tuple[Operation, ...]:
    """Attention, whose result joins the stream before the feed-forward reads it."""
    h, ffn_norm = (
        model.hidden_size,
        "pre_feedforward_layernorm" if variant.norms == "both" else "post_attention_layernorm",
    )
    first, second = _open_branch("self_attn", "input_layernorm", h, variant), _open_branch("mlp", ffn_norm, h, variant)
    return (
        first,
        *_describe_attention(model, first.name, variant),
        *_close_branch("post_attention_layernorm", ("self_attn.o_proj",), h, variant),
        second,
        *_describe_ffn(model, second.name, variant),
        *_close_branch("post_feedforward_layernorm", _list_ffn_results(model), h, variant),
    )


def _describe_parallel(model: ModelShape, variant: BlockVariant) -> tuple[Operation, ...]:
    """Attention and the feed-forward, which read the same and join the stream together."""
    norm = Norm("input_layernorm", model.hidden_size, parameters=_NORM_PARAMETERS[variant.norm_weights])
    return (
        norm,
        *_describe_attention(model, norm.name, variant),
        *_describe_ffn(model, norm.name, variant),
        Residual(model.hidden_size, ("self_attn.o_proj", *_list_ffn_results(model))),
    )


def _open_branch(branch: str, norm: str, h: int, variant: BlockVariant) -> Norm | Branch:
    """The operation whose result the first matmuls of a branch read."""
    return (
        Branch(branch, h)
        if variant.norms == "after"
        else Norm(norm, h, parameters=_NORM_PARAMETERS[variant.norm_weights])
    )


def _close_branch(norm: str, results: tuple[str, ...], h: int, variant: BlockVariant) -> tuple[Operation, ...]:
    """The sum with the stream, behind a norm of the result where there is one."""
    if variant.norms == "before":
        return (Residual(h, results),)
    (result,) = results
    return (
        Norm(norm, h, reads=result, parameters=_NORM_PARAMETERS[variant.norm_weights], closes_branch=True),
        Residual(h, (norm,)),
    )


def _describe_attention(model: ModelShape, reads: str, variant: BlockVariant) -> tuple[Operation, ...]:
    if model.latent_attention is not None:
        return _describe_latent_attention(model, model.latent_attention, reads, variant)
    h, q, kv, width, bias = model.hidden_size, model.query_width, model.kv_width, model.head_width, model.qkv_bias
    q_heads, kv_heads = (1, 1) if variant.wide_qk_norm else (model.num_heads, model.num_kv_heads)
    norms = (
        Norm("self_attn.q_norm", q, q_heads, reads="self_attn.q_proj"),
        Norm("self_attn.k_norm", kv, kv_heads, reads="self_attn.k_proj"),
    )
    return (
        Linear("self_attn.q_proj", reads, h, q, "colwise", bias=bias, is_local=True),
        Linear("self_attn.k_proj", reads, h, kv, "colwise", bias=bias, fuses=True, is_local=True),
        Linear("self_attn.v_proj", reads, h, kv, "colwise", bias=bias, fuses=True),
        *(norms if model.qk_norm else ()),
        Rotary(q),
        SelfAttention(
            model.num_heads, model.num_kv_heads, width, width, model.window, values="self_attn.v_proj",
            windowed_share=model.windowed_share, sinks=variant.sinks,
        ),
        Linear("self_attn.o_proj", ATTENDED, q, h, "rowwise", bias=variant.output_bias),
    )  # fmt: skip


def _describe_latent_attention(
    model: ModelShape, latent: LatentAttention, reads: str, variant: BlockVariant
) -> tuple[Operation, ...]:
    h, heads, width = model.hidden_size, model.num_heads, model.head_width
    query_rank, kv_rank, rope, value = latent.query_rank, latent.kv_rank, latent.rope_width, latent.value_width
    query, keys_values = "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"
    query_norm, kv_norm = "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"
    queries: tuple[Operation, ...] = (
        Linear(query, reads, h, query_rank, "replicated"),
        Norm(query_norm, query_rank, reads=query),
        Linear("self_attn.q_b_proj", query_norm, query_rank, heads * width, "colwise"),
    )
    if not query_rank:
        queries = (Linear("self_attn.q_proj", reads, h, heads * width, "colwise"),)
    return (
        *queries,
        Linear(keys_values, reads, h, kv_rank + rope, "replicated"),
        Norm(kv_norm, kv_rank, reads=keys_values),
        Linear("self_attn.kv_b_proj", kv_norm, kv_rank, heads * (width - rope + value), "colwise"),
        Rotary(heads * rope, shared_width=rope, num_copies=heads),
        SelfAttention(
            heads, heads, width, value, model.window, windowed_share=model.windowed_share, sinks=variant.sinks
        ),
        Linear("self_attn.o_proj", ATTENDED, heads * value, h, "rowwise", bias=variant.output_bias),
    )


def _list_ffn_results(model: ModelShape) -> tuple[str, ...]:
    """Tensors whose sum is the result of a block's feed-forward."""
    if model.experts is None:
        return ("mlp.down_proj",)
    return ("mlp.experts", *["mlp.shared_expert.down_proj"] * bool(model.experts.shared_ffn_size))


def _describe_ffn(model: ModelShape, reads: str, variant: BlockVariant) -> tuple[Operation, ...]:
    h, experts, gated = model.hidden_size, model.experts, model.gated_ffn
    if experts is None:
        return _describe_dense_ffn("mlp", reads, h, model.ffn_size, gated=gated, bias=variant.ffn_bias)
    shared = experts.shared_ffn_size
    return (
        Linear("mlp.gate", reads, h, experts.number, "replicated", saves_input=not shared, bias=experts.router_bias),
        RoutedExperts(
            "mlp.experts",
            reads,
            "mlp.gate",
            experts.number,
            experts.per_token,
            h,
            experts.ffn_size,
            gated,
            experts.bias,
            correction_bias=experts.correction_bias,
            normalized=experts.normalized,
            keeps_logits=experts.z_loss > 0,
        ),
        *(_describe_dense_ffn("mlp.shared_expert", reads, h, shared, gated=gated) if shared else ()),
        *((_gate_shared(reads, h),) if experts.shared_gate else ()),
    )


def _gate_shared(reads: str, h: int) -> Linear:
    return Linear("mlp.shared_expert_gate", reads, h, 1, "replicated", saves_input=False)


def _describe_dense_ffn(
    module: str, reads: str, h: int, f: int, *, gated: bool, bias: bool = False
) -> tuple[Operation, ...]:
    return (
        *((Linear(f"{module}.gate_proj", reads, h, f, "colwise", bias=bias),) if gated else ()),
        Linear(f"{module}.up_proj", reads, h, f, "colwise", bias=bias),
        Activation(module, f, gated),
        Linear(f"{module}.down_proj", f"{module}.active", f, h, "rowwise", bias=bias),
    )
