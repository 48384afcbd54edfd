"""ModelShape: the sizes that make a Llama, and nothing about how it is trained."""

from dataclasses import dataclass, replace
from functools import cached_property

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import shorten
from dtlayout.base.validators import Ranged, ranged


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Ranged, section="model.rope_scaling"):
    """Llama 3's stretching of the rotary wavelengths (section "rope_scaling" of its HF config, type "llama3")."""

    factor: float = ranged("must be above 0 and finite")
    """How many times longer the longest wavelengths become."""
    low_freq_factor: float = ranged("must be above 0 and finite")
    """Wavelengths above original_context / low_freq_factor are stretched in full."""
    high_freq_factor: float = ranged("must be above 0 and finite")
    """Wavelengths below original_context / high_freq_factor stay as they are."""
    original_context: int = ranged("must be from 1 to a billion")
    """Tokens of context that the unscaled model was trained with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_freq_factor >= self.high_freq_factor:  # between the two it divides by their difference
            raise InvalidConfig(
                f"{self.section}.low_freq_factor={self.low_freq_factor} must be below "
                f"high_freq_factor={self.high_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class Experts(Ranged, section="model.experts"):
    """Feed-forwards of which a router chooses some for each token; such a model can only be predicted."""

    number: int = ranged("must be from 1 to a million")
    """Experts of a block."""
    per_token: int = ranged("must be from 1 to a million")
    """Experts that compute each token."""
    ffn_size: int = ranged("must be from 1 to a billion")
    """Inner width of each expert (HF: moe_intermediate_size)."""
    shared_ffn_size: int = ranged("must be from 0 to a billion", 0)
    """Inner width of the feed-forward beside them that computes every token; 0 where there is none."""
    dense_layers: int = ranged("must not be negative", 0)
    """First blocks without experts, whose feed-forward is model.ffn_size wide."""
    bias: bool = False
    """Whether each matmul of an expert adds a bias (gpt-oss)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_token > self.number:
            raise InvalidConfig(f"{self.section}.per_token={self.per_token} is more than number={self.number}")


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Ranged, section="model.latent_attention"):
    """Queries, keys and values out of narrow vectors (DeepSeek-V2, arXiv:2405.04434); it can only be predicted."""

    query_rank: int = ranged("must be from 1 to a billion")
    """Width of the vector that a token's queries come out of (HF: q_lora_rank)."""
    kv_rank: int = ranged("must be from 1 to a billion")
    """Width of the vector that its keys and values come out of (HF: kv_lora_rank)."""
    rope_width: int = ranged("must be from 1 to a billion")
    """Part of model.head_dim that is rotated, in keys the same for all heads."""
    value_width: int = ranged("must be from 1 to a billion")
    """Width of a head's values; head_dim is that of its queries and keys."""


@dataclass(frozen=True, kw_only=True)
class ModelShape(Ranged, section="model"):
    """A decoder-only transformer of the Llama family."""

    name: str
    """What people call it; a preset's name, or their own."""
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
    family: str = "llama"
    """Whose block it has: a name of `dtlayout.models.families`."""
    head_dim: int | None = None
    """Width of a head, where it is not hidden_size / num_heads."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values add a bias (Qwen2)."""
    qk_norm: bool = False
    """Whether an RMSNorm goes over each head of queries and keys before the rotary embedding (Qwen3)."""
    window: int = ranged("must be from 0 to a billion", 0)
    """Tokens that a token attends to, itself included, in every other block (HF: sliding_window); 0 where attention
    sees all that came before in each; with a window it can only be predicted."""
    gated_ffn: bool = True
    """Whether the feed-forward has a gate beside up and down (SwiGLU); without one it can only be predicted."""
    experts: Experts | None = None
    """Experts in the place of the feed-forward, where the model has them."""
    latent_attention: LatentAttention | None = None
    """Ranks and widths of multi-head latent attention, where the model has it."""
    tied_embeddings: bool = False
    """Whether the head reuses the embedding's weight."""
    rope_theta: float = ranged("must be above 0 and finite", 10000.0)
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Llama 3's stretching of them, where the model has it."""
    norm_eps: float = ranged("must be at least 0 and finite", 1e-5)
    """Added to the mean square inside RMSNorm."""

    def __hash__(self) -> int:
        """Of a few sizes: it is looked up many thousand times in a search, where hashing every field takes a tenth."""
        return hash((self.hidden_size, self.num_layers, self.ffn_size, self.vocab_size, self.experts is None))

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if self.head_dim is not None and self.head_dim > 10**9:
            problems.append(f"head_dim={shorten(str(self.head_dim))} must be at most a billion")
        if self.head_dim is None and self.hidden_size % (2 * self.num_heads):
            problems.append(
                f"hidden_size={self.hidden_size} does not split into num_heads={self.num_heads} heads of even width; "
                f"use a multiple of {2 * self.num_heads}, or give head_dim"
            )
        if self.head_dim is not None and (self.head_dim < 2 or self.head_dim % 2):
            problems.append(f"head_dim={self.head_dim} must be even and at least 2: the rotary embedding turns pairs")
        if not problems and self.num_heads % self.num_kv_heads:
            problems.append(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; "
                f"use one of {divisors(self.num_heads)}"
            )
        if self.experts is not None and self.experts.dense_layers >= self.num_layers:
            problems.append(
                f"experts.dense_layers={self.experts.dense_layers} leaves none of num_layers={self.num_layers} blocks "
                f"with experts; use fewer"
            )
        if not problems and self.latent_attention is not None:
            rope_width = self.latent_attention.rope_width
            if rope_width >= self.head_width:
                problems.append(
                    f"latent_attention.rope_width={rope_width} must be below the width of a head, {self.head_width}"
                )
            if self.num_kv_heads != self.num_heads:
                problems.append(
                    f"num_kv_heads={self.num_kv_heads} must be num_heads={self.num_heads} with latent_attention"
                )
        if problems:
            raise InvalidConfig([f"model.{problem}" for problem in problems])
        if self.head_dim is not None and self.head_dim * self.num_heads == self.hidden_size:
            object.__setattr__(self, "head_dim", None)  # one model has one spelling

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def query_width(self) -> int:
        """Width of all query heads, and of what attention gives."""
        return self.num_heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of all key heads; values are as wide."""
        return self.num_kv_heads * self.head_width

    @property
    def num_first(self) -> int:
        """First blocks that differ from the others: they have no experts."""
        return self.experts.dense_layers if self.experts else 0

    def kinds(self, layers: range) -> list[tuple["ModelShape", int]]:
        """Blocks of each kind among `layers`: a model whose blocks are all like them, and how many.

        A model with experts comes first, and the one without, whose blocks are the first ones, only where it has some.
        """
        num_dense = len(range(layers.start, min(layers.stop, self.num_first)))
        kinds = [(self, len(layers) - num_dense)]
        return [*kinds, (self.without_experts, num_dense)] if num_dense else kinds

    @cached_property
    def without_experts(self) -> "ModelShape":
        """The model whose blocks are all like its first ones, without experts."""
        return replace(self, experts=None)

    @property
    def aliases(self) -> dict[str, str]:
        """Second name → first name of each parameter that has two; a pipeline's last stage knows only the second."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.tied_embeddings else {}


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
