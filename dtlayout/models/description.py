"""Description of a model as data: the operations of a block in order, and both ends of the model. No torch.

A description of a model with experts is of a block with them; its first blocks may have none (`ModelShape.kinds`).

All that depends on a model's structure is derived from it, and from nothing else. From its weights come parameters and
FLOPs (`models.counting`), tensor-parallel styles, FSDP units (`plans`) and initial values (`plans.init`). Memory and
time come from the tape of a block, of which each operation writes a part (`models.operations`, `models.tape`). The
modules themselves are `models.llama`; tests hold one against the other.
"""

from dataclasses import dataclass
from functools import cached_property

from dtlayout.models.operations import (
    ATTENDED,
    Activation,
    Linear,
    Norm,
    Pass,
    Residual,
    Rotary,
    SelfAttention,
    Weight,
)
from dtlayout.models.routed_experts import RoutedExperts
from dtlayout.spec.model_shape import ModelShape

EMBEDDING, BLOCKS, FINAL_NORM, HEAD = "model.embed_tokens", "model.layers.*", "model.norm", "lm_head"
"""Modules of a whole model; the star stands for a block's number."""
ROTARY, MASK, ATTEND = "model.rotary", "model.prepare_mask", "self_attn.attend"
"""Names of the places that depend on where tokens stand: tables, and functions of a model or of each block."""


Operation = Norm | Linear | RoutedExperts | Rotary | SelfAttention | Activation | Pass | Residual


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
        """The attention of a block."""
        return next(each for each in self.block if isinstance(each, SelfAttention))

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
        place, last = self.block.index(self.experts), len(self.block) - 1
        shared = self.block[place + 1 : last]
        return (*self.block[: place - 1], *shared, *self.block[place - 1 : place + 1], *self.block[last:])

    @cached_property
    def num_branches(self) -> int:
        """Branches of a block, each closed by a sum over tp."""
        return sum(isinstance(each, Linear) and each.style == "rowwise" for each in self.block)

    @cached_property
    def tp_closes_block(self) -> bool:
        """Whether the last matmul is one that closes a branch, and so is not that of routed experts."""
        return isinstance(next(each for each in reversed(self.block) if each.kept_as == "matmuls"), Linear)

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

    With latent attention and experts it is a DeepSeek-V3.
    """
    h = model.hidden_size
    table = (model.vocab_size, h)
    return Description(
        embedding=Weight(f"{EMBEDDING}.weight", table, "normal", "embedding", 0),
        block=(
            Norm("input_layernorm", h),
            *(_describe_attention(model) if model.latent_attention is None else _describe_latent_attention(model)),
            Residual(h, ("self_attn.o_proj",)),
            Norm("post_attention_layernorm", h),
            *_describe_ffn(model),
        ),
        final_norm=Norm(FINAL_NORM, h),
        head=Weight(f"{HEAD}.weight", table, "normal", "head", 0),
    )


def _describe_attention(model: ModelShape) -> tuple[Operation, ...]:
    h, q, kv, width, bias = model.hidden_size, model.query_width, model.kv_width, model.head_width, model.qkv_bias
    head_norms = (
        Norm("self_attn.q_norm", q, model.num_heads, reads="self_attn.q_proj"),
        Norm("self_attn.k_norm", kv, model.num_kv_heads, reads="self_attn.k_proj"),
    )
    return (
        Linear("self_attn.q_proj", "input_layernorm", h, q, "colwise", bias=bias, is_local=True),
        Linear("self_attn.k_proj", "input_layernorm", h, kv, "colwise", bias=bias, fuses=True, is_local=True),
        Linear("self_attn.v_proj", "input_layernorm", h, kv, "colwise", bias=bias, fuses=True),
        *(head_norms if model.qk_norm else ()),
        Rotary(q),
        SelfAttention(model.num_heads, model.num_kv_heads, width, width, model.window, values="self_attn.v_proj"),
        Linear("self_attn.o_proj", ATTENDED, q, h, "rowwise"),
    )


def _describe_latent_attention(model: ModelShape) -> tuple[Operation, ...]:
    latent, h, heads, width = model.latent_attention, model.hidden_size, model.num_heads, model.head_width
    assert latent, "only models with latent attention come here"
    query_rank, kv_rank, rope, value = latent.query_rank, latent.kv_rank, latent.rope_width, latent.value_width
    query, keys_values = "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"
    query_norm, kv_norm = "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"
    queries: tuple[Operation, ...] = (
        Linear(query, "input_layernorm", h, query_rank, "replicated"),
        Norm(query_norm, query_rank, reads=query),
        Linear("self_attn.q_b_proj", query_norm, query_rank, heads * width, "colwise"),
    )
    if not query_rank:
        queries = (Linear("self_attn.q_proj", "input_layernorm", h, heads * width, "colwise"),)
    return (
        *queries,
        Linear(keys_values, "input_layernorm", h, kv_rank + rope, "replicated"),
        Norm(kv_norm, kv_rank, reads=keys_values),
        Linear("self_attn.kv_b_proj", kv_norm, kv_rank, heads * (width - rope + value), "colwise"),
        Rotary(heads * rope, shared_width=rope, num_copies=heads),
        SelfAttention(heads, heads, width, value),
        Linear("self_attn.o_proj", ATTENDED, heads * value, h, "rowwise"),
    )


def _describe_ffn(model: ModelShape) -> tuple[Operation, ...]:
    h, experts, reads = model.hidden_size, model.experts, "post_attention_layernorm"
    if experts is None:
        dense = _describe_dense_ffn("mlp", reads, h, model.ffn_size, gated=model.gated_ffn)
        return (*dense, Residual(h, ("mlp.down_proj",)))
    shared, gated = experts.shared_ffn_size, model.gated_ffn
    return (
        Linear("mlp.gate", reads, h, experts.number, "replicated", saves_input=not shared),
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
        Residual(h, ("mlp.experts", *["mlp.shared_expert.down_proj"] * bool(shared))),
    )


def _describe_dense_ffn(module: str, reads: str, h: int, f: int, *, gated: bool) -> tuple[Operation, ...]:
    return (
        *((Linear(f"{module}.gate_proj", reads, h, f, "colwise"),) if gated else ()),
        Linear(f"{module}.up_proj", reads, h, f, "colwise"),
        Activation(module, f, gated),
        Linear(f"{module}.down_proj", f"{module}.active", f, h, "rowwise"),
    )
