"""How many parameters and FLOPs a Llama has: the arithmetic behind MFU and behind the split into stages.

h hidden, f FFN, V vocabulary, L layers, s sequence, a query heads, k key-value heads.
"""

from dtlayout.model_shape import ModelShape


def count_block_parameters(model: ModelShape) -> int:
    """Parameters of one decoder block: q, k, v, o, gate (if there is one), up, down and two norms.

    h·h + 2·h·h·k/a + h·h + 3·h·f + 2·h
    """
    h, kv_width, num_matrices = model.hidden_size, model.num_kv_heads * model.head_dim, 3 if model.gated_ffn else 2
    return 2 * h * h + 2 * h * kv_width + num_matrices * h * model.ffn_size + 2 * h


def count_embedding_parameters(model: ModelShape) -> int:
    """Parameters of the embedding, V·h; the head has as many where it is not tied."""
    return model.vocab_size * model.hidden_size


def count_parameters(model: ModelShape) -> int:
    """All parameters, a tied head counted once, the final norm included."""
    embeddings = count_embedding_parameters(model) * (1 if model.tied_embeddings else 2)
    return embeddings + model.num_layers * count_block_parameters(model) + model.hidden_size


def count_model_flops_per_token(model: ModelShape, seq_len: int) -> float:
    """FLOPs that MFU credits to a token, forward and backward: 6·N + 12·L·h·s.

    The convention of the study (arXiv:2311.05610) and of PaLM (arXiv:2204.02311, appendix B): N is every parameter,
    embeddings included, a tied one once; attention is counted whole although the mask is causal; what is computed
    again in backward is not credited.
    """
    return 6 * count_parameters(model) + 12 * model.num_layers * model.hidden_size * seq_len


def count_block_flops_per_token(model: ModelShape, seq_len: int) -> float:
    """Forward FLOPs of one block for a token: two a weight, and 4·h·s for the two matmuls of attention."""
    return 2 * count_block_parameters(model) + 4 * model.hidden_size * seq_len


def count_head_flops_per_token(model: ModelShape) -> float:
    """Forward FLOPs of the head for a token, 2·V·h; looking up the embedding costs none."""
    return 2 * count_embedding_parameters(model)
