"""What a model computes, as data: the operations of a block in order, and the ends of the model. No torch.

Of a model with experts this is a block with them; its first blocks may have none (`ModelShape.kinds`).

Whatever depends on a model's structure is derived from this, and from nothing else: parameters and FLOPs
(`models.counting`), tensor-parallel styles and FSDP units (`plans`), initial weights (`plans.init`), what is held for
backward and for how long (`costmodel.memory`, `costmodel.fsdp2_blocks`), and the time of a block and of what is
computed again (`costmodel.compute`). The modules themselves are `models.llama`; tests hold one against the other.

The residual stream is as wide as the model and, under sequence parallelism, split along the sequence. What lies between
a `colwise` matmul and the `rowwise` one that closes its branch is split over tp; so a norm over heads is.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar, Literal

from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.recompute import Kept

EMBEDDING, BLOCKS, FINAL_NORM, HEAD = "model.embed_tokens", "model.layers.*", "model.norm", "lm_head"
"""Modules of a whole model; the star stands for a block's number."""
ROTARY, MASK, ATTEND = "model.rotary", "model.prepare_mask", "self_attn.attend"
"""What depends on where tokens stand: tables, and functions that a model or each of its blocks has."""


@dataclass(frozen=True)
class Weight:
    """A parameter."""

    name: str
    """The parameter's name in HF's state dict: inside a block from there on, else whole."""
    shape: tuple[int, ...]
    """A vector's size, or a matrix's rows (outputs) and columns (inputs)."""
    initial: Literal["normal", "residual", "ones", "zeros"]
    """Initial values; "residual" are normal ones of a matrix that writes into the residual stream."""
    split: Literal[0, 1] | None = None
    """The dimension that tp splits; None where each rank has all of it."""
    is_of_experts: bool = False
    """Whether it is a stack of matrices, one for each expert, which ep splits and tp does not."""
    decays: bool = True
    """Whether weight decay pulls at it."""

    @property
    def numel(self) -> int:
        """Parameters, over all tp ranks."""
        return prod(self.shape)

    def local_shape(self, tp: int, ep: int = 1) -> tuple[int, ...]:
        """The weight's shape on each of `tp` ranks, an expert's on each of `ep`."""
        if self.is_of_experts:
            return (self.shape[0] // ep, *self.shape[1:])
        return tuple(size // tp if dim == self.split else size for dim, size in enumerate(self.shape))


class _Operation:
    """What all operations say."""

    weights: ClassVar[tuple[Weight, ...]] = ()
    """Parameters that belong to it."""
    kept_as: ClassVar[Kept | None] = None
    """The word of a recomputation that keeps its result; without one it is always computed again."""
    active_share: ClassVar[float] = 1.0
    """Fraction of its weights that computes a token."""


@dataclass(frozen=True)
class Norm(_Operation):
    """An RMSNorm, in fp32 or finer inside, of the residual stream or of each head."""

    module: str
    """The module's name in the block, or in the model."""
    width: int
    """Elements of a token."""
    num_heads: int = 0
    """Heads that are normalised each for itself, which tp splits; 0 for the residual stream."""
    is_latent: bool = False
    """Whether it normalises the narrow vector of a token that latent attention makes of the residual stream."""

    @property
    def is_of_heads(self) -> bool:
        """Whether it normalises heads."""
        return self.num_heads > 0

    @cached_property
    def weights(self) -> tuple[Weight, ...]:  # type: ignore[override]
        """One factor for each element of what is normalised."""
        return (Weight(f"{self.module}.weight", (self.width // max(1, self.num_heads),), "ones", decays=False),)


@dataclass(frozen=True)
class Linear(_Operation):
    """A matmul with a weight."""

    kept_as = "matmuls"
    module: str
    """The module's name in the block."""
    inputs: int
    """Elements of a token that it reads."""
    outputs: int
    """Elements of a token that it makes."""
    style: Literal["colwise", "rowwise", "replicated"]
    """What tp splits: outputs, which opens a branch; inputs, which closes it, with a sum over the ranks; or nothing:
    each rank multiplies what it has of the residual stream."""
    keeps_input: bool
    """Whether it keeps its input for the weight's gradient; not where another operation keeps the same."""
    bias: bool = False
    """Whether it adds one to its outputs."""
    fuses: bool = False
    """Whether some engines compute it together with the matmul before it, which reads the same."""

    @cached_property
    def weights(self) -> tuple[Weight, ...]:  # type: ignore[override]
        """The matrix, and a bias that is split like its rows."""
        rows: Literal[0] | None = 0 if self.style == "colwise" else None
        matrix = Weight(
            f"{self.module}.weight", (self.outputs, self.inputs),
            "residual" if self.style == "rowwise" else "normal", 1 if self.style == "rowwise" else rows,
        )  # fmt: skip
        bias = Weight(f"{self.module}.bias", (self.outputs,), "zeros", rows, decays=False)
        return (matrix, bias) if self.bias else (matrix,)


@dataclass(frozen=True)
class RoutedExperts(_Operation):
    """Feed-forwards, each for those tokens that the matmul before them, a router, sends it; and the sum of a token's.

    ep splits the experts and tokens travel to them; tp splits no expert, but shares out the tokens.
    """

    kept_as = "matmuls"
    module: str
    """The module's name in the block."""
    number: int
    """Experts."""
    per_token: int
    """Experts that compute a token."""
    width: int
    """Elements of a token outside of an expert."""
    inner_width: int
    """Elements of a token inside one."""
    gated: bool
    """Whether the activation multiplies two tensors."""
    bias: bool = False
    """Whether each matmul adds one to its outputs."""

    @property
    def num_opening(self) -> int:
        """Matmuls of an expert before its activation: gate and up, or up alone."""
        return 2 if self.gated else 1

    @property
    def active_share(self) -> float:  # type: ignore[override]
        """Experts of a token among all."""
        return self.per_token / self.number

    @cached_property
    def weights(self) -> tuple[Weight, ...]:  # type: ignore[override]
        """A stack of each matrix."""
        opening, closing = (self.number, self.inner_width, self.width), (self.number, self.width, self.inner_width)
        names = ("gate_proj", "up_proj")[-self.num_opening :]
        stacks = [Weight(f"{self.module}.{name}.weight", opening, "normal", is_of_experts=True) for name in names]
        stacks.append(Weight(f"{self.module}.down_proj.weight", closing, "residual", is_of_experts=True))
        biases = [
            Weight(each.name.replace(".weight", ".bias"), each.shape[:2], "zeros", is_of_experts=True, decays=False)
            for each in stacks * self.bias
        ]
        return (*stacks, *biases)


@dataclass(frozen=True)
class Rotary(_Operation):
    """The rotary embedding of queries and keys, in fp32 or finer inside."""

    width: int
    """Elements of a token's queries that it turns."""
    shared_width: int = 0
    """Elements of its keys that all heads have in common, and that are copied for each; 0 where a key has its own."""
    num_copies: int = 0
    """Heads that they are copied for."""


@dataclass(frozen=True)
class SelfAttention(_Operation):
    """Causal attention; it keeps queries, keys, values and its output."""

    kept_as = "attention"
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_width: int
    """Width of each query and key."""
    value_width: int
    """Width of each value."""
    window: int = 0
    """Tokens that are attended to in every other block; 0 where all are that came before."""

    @property
    def query_width(self) -> int:
        """Elements of a token's queries."""
        return self.num_heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Elements of a token's keys and values."""
        return self.num_kv_heads * (self.head_width + self.value_width)

    @property
    def input_width(self) -> int:
        """Elements of a token's queries, keys and values."""
        return self.query_width + self.kv_width

    @property
    def output_width(self) -> int:
        """Elements of a token's output."""
        return self.num_heads * self.value_width

    def flops_per_token(self, seq_len: int) -> float:
        """Scores and weighted values, forward, the half that the mask hides counted too."""
        return 2.0 * (self.query_width + self.output_width) * seq_len

    def seen_share(self, seq_len: int) -> float:
        """Scores that windows leave of those below the causal mask, s²/2 of a sequence: a window has s·w - w²/2.

        >>> SelfAttention(num_heads=64, num_kv_heads=8, head_width=64, value_width=64, window=128).seen_share(1024)
        0.6171875
        """
        if not 0 < self.window < seq_len:
            return 1.0
        seen = self.window / seq_len
        return (1 + 2 * seen - seen * seen) / 2


@dataclass(frozen=True)
class Activation(_Operation):
    """silu(gate) · up, or without a gate the activation function alone."""

    width: int
    """Elements of a token."""
    gated: bool
    """Whether it multiplies two tensors."""


@dataclass(frozen=True)
class Residual(_Operation):
    """A branch is added to the residual stream."""

    width: int
    """Elements of a token."""


Operation = Norm | Linear | RoutedExperts | Rotary | SelfAttention | Activation | Residual


@dataclass(frozen=True)
class Description:
    """A whole model."""

    embedding: Weight
    """Turns tokens into vectors; split over the vocabulary."""
    block: tuple[Operation, ...]
    """What each block does, in order; one with experts, where only the first ones have none."""
    final_norm: Norm
    """Before the head."""
    head: Weight
    """Makes logits, split over the vocabulary; where embeddings are tied it is the embedding's."""

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
    def num_branches(self) -> int:
        """Branches of a block, each closed by a sum over tp."""
        return sum(isinstance(each, Linear) and each.style == "rowwise" for each in self.block)

    @cached_property
    def tp_closes_block(self) -> bool:
        """Whether the last matmul is one that closes a branch, and so is not that of routed experts."""
        return isinstance(next(each for each in reversed(self.block) if each.kept_as == "matmuls"), Linear)

    def find(self, name: str) -> Weight:
        """The weight that is called so in the whole model, "model.layers.3.mlp.up_proj.weight"; KeyError if none."""
        prefix, _, rest = name.partition(".layers.")
        known = self.block_weights if rest else (self.embedding, *self.final_norm.weights, self.head)
        wanted = rest.partition(".")[2] if rest else prefix
        return {weight.name: weight for weight in known}[wanted]


def describe_llama(model: ModelShape) -> Description:
    """A Llama; with biases of q, k and v a Qwen2, with norms of q and k a Qwen3, with experts a Qwen3-MoE.

    With latent attention and experts it is a DeepSeek-V3.
    """
    h = model.hidden_size
    table = (model.vocab_size, h)
    return Description(
        embedding=Weight(f"{EMBEDDING}.weight", table, "normal", 0),
        block=(
            Norm("input_layernorm", h),
            *(_describe_attention(model) if model.latent_attention is None else _describe_latent_attention(model)),
            Residual(h),
            Norm("post_attention_layernorm", h),
            *_describe_ffn(model),
            Residual(h),
        ),
        final_norm=Norm(FINAL_NORM, h),
        head=Weight(f"{HEAD}.weight", table, "normal", 0),
    )


def _describe_attention(model: ModelShape) -> tuple[Operation, ...]:
    h, q, kv, width = model.hidden_size, model.query_width, model.kv_width, model.head_width
    head_norms = (Norm("self_attn.q_norm", q, model.num_heads), Norm("self_attn.k_norm", kv, model.num_kv_heads))
    return (
        Linear("self_attn.q_proj", h, q, "colwise", keeps_input=True, bias=model.qkv_bias),
        Linear("self_attn.k_proj", h, kv, "colwise", keeps_input=False, bias=model.qkv_bias, fuses=True),
        Linear("self_attn.v_proj", h, kv, "colwise", keeps_input=False, bias=model.qkv_bias, fuses=True),
        *(head_norms if model.qk_norm else ()),
        Rotary(q),
        SelfAttention(model.num_heads, model.num_kv_heads, width, width, model.window),
        Linear("self_attn.o_proj", q, h, "rowwise", keeps_input=False),
    )


def _describe_latent_attention(model: ModelShape) -> tuple[Operation, ...]:
    latent, h, heads, width = model.latent_attention, model.hidden_size, model.num_heads, model.head_width
    assert latent, "only models with latent attention come here"
    query_rank, kv_rank, rope, value = latent.query_rank, latent.kv_rank, latent.rope_width, latent.value_width
    return (
        Linear("self_attn.q_a_proj", h, query_rank, "replicated", keeps_input=True),
        Norm("self_attn.q_a_layernorm", query_rank, is_latent=True),
        Linear("self_attn.q_b_proj", query_rank, heads * width, "colwise", keeps_input=True),
        Linear("self_attn.kv_a_proj_with_mqa", h, kv_rank + rope, "replicated", keeps_input=False),
        Norm("self_attn.kv_a_layernorm", kv_rank, is_latent=True),
        Linear("self_attn.kv_b_proj", kv_rank, heads * (width - rope + value), "colwise", keeps_input=True),
        Rotary(heads * rope, shared_width=rope, num_copies=heads),
        SelfAttention(heads, heads, width, value),
        Linear("self_attn.o_proj", heads * value, h, "rowwise", keeps_input=False),
    )


def _describe_ffn(model: ModelShape) -> tuple[Operation, ...]:
    h, experts = model.hidden_size, model.experts
    if experts is None:
        return _describe_dense_ffn("mlp", h, model.ffn_size, gated=model.gated_ffn)
    shared = experts.shared_ffn_size
    return (
        Linear("mlp.gate", h, experts.number, "replicated", keeps_input=not shared),
        RoutedExperts(
            "mlp.experts", experts.number, experts.per_token, h, experts.ffn_size, model.gated_ffn, experts.bias
        ),
        *(_describe_dense_ffn("mlp.shared_expert", h, shared, gated=model.gated_ffn) if shared else ()),
    )


def _describe_dense_ffn(module: str, h: int, f: int, *, gated: bool) -> tuple[Operation, ...]:
    gate = Linear(f"{module}.gate_proj", h, f, "colwise", keeps_input=True)
    return (
        *((gate,) if gated else ()),
        Linear(f"{module}.up_proj", h, f, "colwise", keeps_input=not gated),
        Activation(f, gated),
        Linear(f"{module}.down_proj", f, h, "rowwise", keeps_input=True),
    )
