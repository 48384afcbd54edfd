"""How many parameters and FLOPs a model has: the arithmetic behind MFU and behind the split into stages.

h hidden, q width of all query heads, V vocabulary, L layers, s sequence.
"""

from collections.abc import Callable

from dtlayout.models.families import describe
from dtlayout.models.operations import SelfAttention
from dtlayout.spec.model_shape import ModelShape

FROZEN_FLOPS = "4 FLOPs a token for a frozen parameter, not 6"
"""Words for what `count_model_flops_per_token` credits where not all is trained."""


def count_block_parameters(model: ModelShape) -> int:
    """Parameters of one block: of a Llama 2·h·(q + kv) + 3·h·f + 2·h, with a gate; all experts where it has them."""
    return sum(weight.numel for weight in describe(model).block_weights)


def count_active_block_parameters(model: ModelShape) -> int:
    """Parameters of one block that compute a token: of experts those of a token's."""
    operations = describe(model).block
    return sum(round(each.active_share * sum(weight.numel for weight in each.weights)) for each in operations)


def count_embedding_parameters(model: ModelShape) -> int:
    """Parameters of the embedding, V·h; the head has as many where it is not tied."""
    return describe(model).embedding.numel


def count_parameters(model: ModelShape) -> int:
    """All parameters, a tied head counted once, the final norm included."""
    return _count_whole(model, count_block_parameters)


def count_active_parameters(model: ModelShape) -> int:
    """Parameters that compute a token: all but those of experts that are not chosen for it."""
    return _count_whole(model, count_active_block_parameters)


def count_active_frozen_parameters(model: ModelShape) -> int:
    """Parameters that compute a token and are not trained; a tied head counts once."""
    described = describe(model)
    ends = [*described.before_blocks, *described.after_blocks, *[described.head] * (not model.tied_embeddings)]
    blocks = sum(n * _count_active_frozen(kind) for kind, n in model.kinds(range(model.num_layers)))
    return blocks + sum(weight.numel for weight in ends if not weight.trains)


def _count_active_frozen(model: ModelShape) -> int:
    frozen = ((each.active_share, [w for w in each.weights if not w.trains]) for each in describe(model).block)
    return sum(round(share * sum(weight.numel for weight in weights)) for share, weights in frozen)


def _count_whole(model: ModelShape, count_block: Callable[[ModelShape], int]) -> int:
    described = describe(model)
    ends = [*described.before_blocks, *described.after_blocks, *[described.head] * (not model.tied_embeddings)]
    blocks = sum(n * count_block(kind) for kind, n in model.kinds(range(model.num_layers)))
    return blocks + sum(weight.numel for weight in ends)


def count_model_flops_per_token(model: ModelShape, seq_len: int) -> float:
    """FLOPs that MFU credits to a token, forward and backward: 6·N + 12·L·q·s.

    The convention of the study (arXiv:2311.05610) and of PaLM (arXiv:2204.02311, appendix B): N is every parameter,
    embeddings included, a tied one once, of experts those of a token; attention is counted whole although the mask is
    causal; what is computed again in backward is not credited. Of a frozen parameter it is 4: it has no gradient. What
    states along the sequence compute is counted as attention is, and what chooses tokens without a backward.
    """
    credited = 6 * count_active_parameters(model) - 2 * count_active_frozen_parameters(model)
    kinds = model.kinds(range(model.num_layers))
    return credited + sum(
        number * (3 * count_mixing_flops_per_token(kind, seq_len) - 2 * count_choosing_flops_per_token(kind, seq_len))
        for kind, number in kinds
    )


def count_block_flops_per_token(model: ModelShape, seq_len: int) -> float:
    """Forward FLOPs of one block for a token: two an active weight, and 4·q·s for the two matmuls of attention."""
    return 2 * count_active_block_parameters(model) + count_mixing_flops_per_token(model, seq_len)


def count_head_flops_per_token(model: ModelShape) -> float:
    """Forward FLOPs of the head for a token, 2·V·h; looking up the embedding costs none."""
    return 2 * count_embedding_parameters(model)


def count_mixing_flops_per_token(model: ModelShape, seq_len: int) -> float:
    """Forward FLOPs of one block for a token that mix tokens of a sequence: attention's, those by which it chooses
    tokens, and those of its states."""
    of_states = sum(each.flops + each.exact_flops for each in describe(model).mixers)
    of_attention = count_attention_flops_per_token(model, seq_len)
    return of_attention + count_choosing_flops_per_token(model, seq_len) + of_states


def count_choosing_flops_per_token(model: ModelShape, seq_len: int) -> float:
    """FLOPs of one block for a token that choose what attention reads; forward alone computes them."""
    return sum(each.flops_per_token(seq_len) for each in describe(model).choices)


def count_attention_flops_per_token(model: ModelShape, seq_len: int) -> float:
    """Forward FLOPs of one block's scores and weighted values for a token, 4·q·s: the mask hides none of them."""
    attentions = (each for each in describe(model).block if isinstance(each, SelfAttention))
    return sum(each.flops_per_token(seq_len) for each in attentions)
