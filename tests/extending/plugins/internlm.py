"""InternLM, the first one, as somebody adds it who has no checkout: a Llama with biases of q, k, v and of o."""

from dataclasses import replace

from dtlayout import Family, ModelShape, register_family
from dtlayout.models.description import Description, describe_llama
from dtlayout.models.operations import Linear


def describe(model: ModelShape) -> Description:
    """A Llama whose attention adds a bias to what it gives."""
    llama = describe_llama(model)
    block = [replace(each, bias=True) if _is_output(each) else each for each in llama.block]
    return replace(llama, block=tuple(block))


def _is_output(operation: object) -> bool:
    return isinstance(operation, Linear) and operation.module == "self_attn.o_proj"


INTERNLM = Family(
    name="internlm", describe=describe, module="extending.plugins.internlm_torch:InternLM", traits={"qkv_bias": True}
)
INTERNLM_7B = ModelShape(
    name="internlm-7b", family="internlm", qkv_bias=True, hidden_size=4096, num_layers=32, num_heads=32,
    num_kv_heads=32, ffn_size=11_008, vocab_size=103_168, norm_eps=1e-6,
)  # fmt: skip
register_family(INTERNLM, [INTERNLM_7B])
