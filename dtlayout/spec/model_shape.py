"""ModelShape: the sizes that make a Llama, and nothing about how it is trained."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from dtlayout.base.formatting import shorten
from dtlayout.base.refusals import Refusal
from dtlayout.base.validators import Ranged, path_key, ranged
from dtlayout.spec.adapter import Adapter

EVERY_OTHER = 0.5
"""Share of the blocks that have a window where a model does not say it."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Ranged, section="model.rope_scaling"):
    """Llama 3's stretching of the rotary wavelengths (section "rope_scaling" of its HF config, type "llama3")."""

    factor: float = ranged("must be above 0 and finite")
    """Factor by which the longest wavelengths become longer."""
    low_freq_factor: float = ranged("must be above 0 and finite")
    """Wavelengths above original_context / low_freq_factor are stretched in full."""
    high_freq_factor: float = ranged("must be above 0 and finite")
    """Wavelengths below original_context / high_freq_factor stay as they are."""
    original_context: int = ranged("must be from 1 to a billion")
    """Tokens of context that the unscaled model was trained with."""

    def find_broken(self) -> list[Refusal]:
        """A refusal where the two factors would not leave a range between them, by whose width wavelengths divide."""
        if self.low_freq_factor < self.high_freq_factor:
            return []
        low, high = f"low_freq_factor={self.low_freq_factor}", f"high_freq_factor={self.high_freq_factor}"
        return [Refusal("low_freq_factor", f"{self.section}.{low} must be below {high}")]


@dataclass(frozen=True, kw_only=True)
class Experts(Ranged, section="model.experts"):
    """A mixture of experts: feed-forwards among which a router chooses some for each token."""

    number: int = ranged("must be from 1 to a million")
    """Experts of a block."""
    per_token: int = ranged("must be from 1 to a million")
    """Experts that compute each token."""
    ffn_size: int = ranged("must be from 1 to a billion")
    """Inner width of each expert (HF: moe_intermediate_size)."""
    shared_ffn_size: int = ranged("must be from 0 to a billion", 0)
    """Inner width of a feed-forward beside the experts that computes every token; 0 where there is none."""
    dense_layers: int = ranged("must not be negative", 0)
    """Number of first blocks without experts. Their feed-forward is model.ffn_size wide."""
    bias: bool = False
    """Whether each matmul of an expert adds a bias (gpt-oss). Such a model can only be predicted."""
    router_bias: bool = False
    """Whether the router's matmul adds a bias (gpt-oss). Such a model can only be predicted."""
    shared_gate: bool = False
    """Whether a matmul with one output says how much of the shared feed-forward a token gets (Qwen2-MoE). Such a model
    can only be predicted."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function that makes a token's scores of the router's logits: softmax over all experts, or sigmoid of each (HF:
    scoring_func)."""
    normalized: bool = True
    """Whether a token's scores are divided by the sum of those of its experts (HF: norm_topk_prob)."""
    scale: float = ranged("must be above 0 and finite", 1.0)
    """Factor of a token's scores after that (HF: routed_scaling_factor)."""
    groups: int = ranged("must be from 1 to a million", 1)
    """Groups of neighbouring experts; a token's experts come from groups_per_token of them (HF: n_group)."""
    groups_per_token: int = ranged("must be from 1 to a million", 1)
    """Groups with the highest sums of their two best scores, from which a token's experts come (HF: topk_group)."""
    correction_bias: bool = False
    """Whether the choice of experts, and nothing else, reads scores plus a bias of each expert (DeepSeek-V3)."""
    bias_rate: float = ranged("must be at least 0 and finite", 0.0)
    """Step of that bias after each update, up for experts with fewer tokens than the mean, down for those with more
    (arXiv:2408.15664). 0 leaves it as it is."""
    balance_loss: float = ranged("must be at least 0 and finite", 0.0)
    """Coefficient of the loss that is lowest where each expert has as many tokens (HF: router_aux_loss_coef)."""
    z_loss: float = ranged("must be at least 0 and finite", 0.0)
    """Coefficient of the loss that keeps logits of the router small: the mean square of their log-sum-exp (ST-MoE,
    arXiv:2202.08906)."""
    imbalance: float = ranged("must be at least 1", 1.0)
    """Copies of tokens that the fullest of ep's ranks computes, over the mean. Predictions and dry runs take this."""

    def find_broken(self) -> list[Refusal]:
        """A refusal where a token would be computed by more experts than there are, or where groups do not come out."""
        where, group_size = self.section, self.number // self.groups
        rules = (
            ("per_token", self.per_token > self.number,
             f"per_token={self.per_token} is more than number={self.number}"),
            ("groups", self.number % self.groups > 0, f"groups={self.groups} does not divide number={self.number}"),
            ("groups_per_token", self.groups_per_token > self.groups,
             f"groups_per_token={self.groups_per_token} is more than groups={self.groups}"),
            ("groups_per_token", self.number >= self.per_token > self.groups_per_token * group_size,
             f"groups_per_token={self.groups_per_token} has fewer experts than per_token={self.per_token}"),
            ("groups", self.groups > 1 and group_size < 2,
             f"groups={self.groups} leaves one expert in a group, and a group is as good as its two best"),
            ("bias_rate", self.bias_rate > 0 and not self.correction_bias,
             f"bias_rate={self.bias_rate} moves no bias where correction_bias=false"),
            ("shared_gate", self.shared_gate and not self.shared_ffn_size,
             "shared_gate=true gates nothing where shared_ffn_size=0"),
        )  # fmt: skip
        return [Refusal(key, f"{where}.{what}") for key, is_broken, what in rules if is_broken]

    def fullest_share(self, ep: int) -> float:
        """Copies of tokens that the fullest of so many ranks computes, over the mean: it can get no more than all."""
        return min(self.imbalance, ep)


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Ranged, section="model.latent_attention"):
    """Multi-head latent attention: queries, keys and values come out of narrow vectors (DeepSeek-V2, arXiv:2405.04434).
    Such a model can only be predicted."""

    query_rank: int = ranged("must be from 0 to a billion")
    """Width of the vector from which a token's queries are computed (HF: q_lora_rank). 0 where they come out of the
    hidden state itself (DeepSeek-V2-Lite)."""
    kv_rank: int = ranged("must be from 1 to a billion")
    """Width of the vector from which a token's keys and values are computed (HF: kv_lora_rank)."""
    rope_width: int = ranged("must be from 1 to a billion")
    """Part of model.head_dim that is rotated. In keys this part is the same for all heads."""
    value_width: int = ranged("must be from 1 to a billion")
    """Width of a head's values. The width of its queries and keys is model.head_dim."""


@dataclass(frozen=True, kw_only=True)
class BlockVariant(Ranged, section="model.block"):
    """Parts of a block that differ from a Llama's. A model with some can only be predicted."""

    norms: Literal["before", "after", "both", "shared"] = "before"
    """Place of the norms of attention and of the feed-forward: before each; after each, ahead of the residual sum
    (OLMo 2); on both sides (Gemma 2); or one before both, which then run in parallel (Cohere)."""
    norm_weights: Literal["factor", "factor-and-bias", "none"] = "factor"
    """Weights of each norm: a factor for each element; a bias beside it (LayerNorm of StarCoder 2); or none (OLMo)."""
    wide_qk_norm: bool = False
    """Whether the norms of model.qk_norm have a factor for each element of all heads (OLMo 2), not of one."""
    output_bias: bool = False
    """Whether attention's last matmul adds a bias (gpt-oss)."""
    ffn_bias: bool = False
    """Whether each matmul of a feed-forward without experts adds a bias (StarCoder 2)."""
    sinks: bool = False
    """Whether each head has a number that takes part in attention's softmax beside the scores (gpt-oss)."""


@dataclass(frozen=True, kw_only=True)
class ModelShape(Ranged, section="model"):
    """A decoder-only transformer of the Llama family."""

    name: str
    """Name of the model: a preset's, or one of your own."""
    hidden_size: int = ranged("must be from 1 to a billion")
    """Width of the residual stream."""
    num_layers: int = ranged("must be from 1 to 10,000")
    """Decoder blocks."""
    num_heads: int = ranged("must be from 1 to a million")
    """Query heads."""
    num_kv_heads: int = ranged("must be from 1 to a million")
    """Key and value heads; fewer than num_heads is grouped-query attention."""
    ffn_size: int = ranged("must be from 1 to a billion")
    """Inner width of the feed-forward (HF: intermediate_size), where a block has no experts."""
    vocab_size: int = ranged("must be from 1 to a billion")
    """Rows of the embedding and of the head."""
    unused_rows: int = ranged("must not be negative", 0)
    """Last of these rows that are no tokens: they are there so that tp divides the rows, take no part in the loss, are
    never generated, and are cut from exports."""
    family: str = "llama"
    """Model family whose block the model has: a name of `dtlayout.models.families`."""
    head_dim: int | None = None
    """Width of a head, where it is not hidden_size / num_heads."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values add a bias (Qwen2)."""
    qk_norm: bool = False
    """Whether an RMSNorm goes over each head of queries and keys before the rotary embedding (Qwen3)."""
    window: int = ranged("must be from 0 to a billion", 0)
    """Tokens that a token attends to in every other block, itself included (HF: sliding_window). 0: in every block a
    token attends to all tokens before it. A model with a window can only be predicted."""
    window_share: float | None = None
    """Share of the blocks that have the window, where it is not every other block: 1.0 for all."""
    gated_ffn: bool = True
    """Whether the feed-forward has a gate beside up and down (SwiGLU). A model without a gate can only be predicted."""
    experts: Experts | None = None
    """Experts in the place of the feed-forward, where the model has them."""
    latent_attention: LatentAttention | None = None
    """Ranks and widths of multi-head latent attention, where the model has it."""
    block: BlockVariant | None = None
    """Parts of a block that differ from a Llama's, where the model has some."""
    tied_embeddings: bool = False
    """Whether the head reuses the embedding's weight."""
    rope_theta: float = ranged("must be above 0 and finite", 10000.0)
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Llama 3's stretching of the rotary wavelengths, where the model has it."""
    norm_eps: float = ranged("must be at least 0 and finite", 1e-5)
    """Number that RMSNorm adds to the mean square."""
    trace: str = path_key("")
    """Path of the file that `dtlayout trace` wrote, of a model of the family transformers; it says the operations of
    the blocks."""
    block_kinds: tuple[int, ...] = ()
    """Kind of each block of a traced model, by its number in the trace."""
    adapter: Adapter | None = None
    """Small weights that alone are trained, where a frozen model has some: the section [adapter] of a config."""

    def __hash__(self) -> int:
        """A hash of a few sizes. A search hashes a model many thousand times; every field would take a tenth of it."""
        return hash((self.hidden_size, self.num_layers, self.ffn_size, self.vocab_size, self.experts is None))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is not None and self.head_dim * self.num_heads == self.hidden_size:
            object.__setattr__(self, "head_dim", None)  # one model has one spelling
        if self.window_share == EVERY_OTHER or not self.window:
            object.__setattr__(self, "window_share", None)
        if self.block == BlockVariant():
            object.__setattr__(self, "block", None)

    def find_broken(self) -> list[Refusal]:
        """A refusal for each pair of sizes that makes no model; later rules count on heads that come out even."""
        if self.block_kinds and len(self.block_kinds) != self.num_layers:
            what = f"model.num_layers={self.num_layers} is not the number of its block_kinds, {len(self.block_kinds)}"
            return [Refusal("num_layers", what, "trace a config.json that has it")]
        if self.unused_rows >= self.vocab_size:
            what = f"model.unused_rows={self.unused_rows} leaves none of vocab_size={self.vocab_size} rows"
            return [Refusal("unused_rows", what, "use fewer")]
        heads = [*self._check_head_width()] or [*self._check_head_groups()]
        broken = [*heads, *self._check_dense_layers(), *self._check_frozen_router(), *self._check_block()]
        return broken or [*self._check_latent_attention()]

    def _check_head_width(self) -> Iterator[Refusal]:
        if self.head_dim is None and self.hidden_size % (2 * self.num_heads):
            sizes = f"model.hidden_size={self.hidden_size} does not split into num_heads={self.num_heads}"
            advice = f"use a multiple of {2 * self.num_heads}, or give head_dim"
            yield Refusal("hidden_size", f"{sizes} heads of even width", advice)
        if self.head_dim is not None and self.head_dim > 10**9:
            yield Refusal("head_dim", f"model.head_dim={shorten(str(self.head_dim))} must be at most a billion")
        if self.head_dim is not None and (self.head_dim < 2 or self.head_dim % 2):
            what = f"model.head_dim={self.head_dim} must be even and at least 2: the rotary embedding turns pairs"
            yield Refusal("head_dim", what)

    def _check_head_groups(self) -> Iterator[Refusal]:
        if self.num_heads % self.num_kv_heads:
            what = f"model.num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}"
            yield Refusal("num_kv_heads", what, f"use one of {divisors(self.num_heads)}")

    def _check_dense_layers(self) -> Iterator[Refusal]:
        if self.experts is not None and self.experts.dense_layers >= self.num_layers:
            dense = f"model.experts.dense_layers={self.experts.dense_layers}"
            what = f"{dense} leaves none of num_layers={self.num_layers} blocks with experts"
            yield Refusal("experts.dense_layers", what, "use fewer")

    def _check_frozen_router(self) -> Iterator[Refusal]:
        if self.adapter is not None and self.experts is not None and self.experts.bias_rate:
            what = f"model.experts.bias_rate={self.experts.bias_rate} moves the router, which is frozen with [adapter]"
            yield Refusal("experts.bias_rate", what, "use bias_rate=0")

    def _check_block(self) -> Iterator[Refusal]:
        if self.window_share is not None and not 0 < self.window_share <= 1:
            what = f"model.window_share={self.window_share} must be above 0 and at most 1"
            yield Refusal("window_share", what, "use window=0 where no block has one")
        norms = self.block.norms if self.block else "before"
        if norms in ("after", "both") and self.experts is not None and self.experts.shared_ffn_size:
            what = f"model.block.norms={norms!r} is not known beside model.experts.shared_ffn_size"
            yield Refusal("block.norms", what, "use norms=before")

    def _check_latent_attention(self) -> Iterator[Refusal]:
        if self.latent_attention is None:
            return
        rope_width = self.latent_attention.rope_width
        if rope_width >= self.head_width:
            what = f"must be below the width of a head, {self.head_width}"
            yield Refusal("rope_width", f"model.latent_attention.rope_width={rope_width} {what}")
        if self.num_kv_heads != self.num_heads:
            what = f"must be num_heads={self.num_heads} with latent_attention"
            yield Refusal("num_kv_heads", f"model.num_kv_heads={self.num_kv_heads} {what}")

    @property
    def num_ids(self) -> int:
        """Rows of the embedding that may be tokens."""
        return self.vocab_size - self.unused_rows

    @property
    def without_unused(self) -> "ModelShape":
        """The model without rows that are no tokens."""
        return replace(self, vocab_size=self.num_ids, unused_rows=0)

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def windowed_share(self) -> float:
        """Share of the blocks whose attention has the window; 0 where none has."""
        return (EVERY_OTHER if self.window_share is None else self.window_share) if self.window else 0.0

    @property
    def query_width(self) -> int:
        """Width of all query heads together, and of the output of attention."""
        return self.num_heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of all key heads together; values are as wide."""
        return self.num_kv_heads * self.head_width

    @property
    def num_first(self) -> int:
        """Number of first blocks that have no experts, in a model whose other blocks have some; else 0."""
        return self.experts.dense_layers if self.experts else 0

    def kind_of(self, number: int) -> "ModelShape":
        """The kind of a block, as a model whose blocks are all of that kind."""
        if self.block_kinds:
            return self._all_of_kind(self.block_kinds[number], has_experts=number >= self.num_first)
        return self.without_experts if number < self.num_first else self

    def _all_of_kind(self, kind: int, *, has_experts: bool) -> "ModelShape":
        kinds = (kind,) * self.num_layers
        if self.block_kinds == kinds:
            return self
        experts = replace(self.experts, dense_layers=0) if self.experts and has_experts else None
        return replace(self, block_kinds=kinds, experts=experts)

    def kinds(self, layers: range) -> list[tuple["ModelShape", int]]:
        """Kinds of blocks among `layers`, each as a model whose blocks are all of that kind, with the number of blocks.

        The kind of most blocks comes first. The kind of the first blocks, without experts, follows if there are some.
        """
        if self.block_kinds:
            counts = Counter(map(self.kind_of, layers)).most_common()
            return counts or [(self.kind_of(self.num_layers - 1), 0)]
        num_dense = len(range(layers.start, min(layers.stop, self.num_first)))
        kinds = [(self, len(layers) - num_dense)]
        return [*kinds, (self.without_experts, num_dense)] if num_dense else kinds

    @cached_property
    def usual(self) -> "ModelShape":
        """This model with every block of the kind that most of its blocks have."""
        return self.kinds(range(self.num_layers))[0][0]

    @cached_property
    def without_experts(self) -> "ModelShape":
        """This model with every block like its first ones, without experts."""
        return replace(self, experts=None)

    @cached_property
    def base(self) -> "ModelShape":
        """This model without an adapter."""
        return replace(self, adapter=None)

    @property
    def aliases(self) -> dict[str, str]:
        """Second name → first name, for each parameter that has two; a pipeline's last stage has it by the second."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.tied_embeddings else {}


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
