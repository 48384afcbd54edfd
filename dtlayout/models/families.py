"""Families of models: the blocks, the words of a Hugging Face config.json, and the modules of each. No torch.

A family of your own is a `Family` that you give to `register_family`. If it is a Llama with other sizes, or with the
switches of `ModelShape`, it needs only a name. docs/project/adding.md has an example. Families that are
planned and not trained are in `models.planned_families` and `models.coded_families`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.adapters import adapt, find_unmatched
from dtlayout.models.coded_families import CODED
from dtlayout.models.description import Description
from dtlayout.models.family import Family, WindowRule
from dtlayout.models.planned_families import PLANNED
from dtlayout.models.presets import PRESETS
from dtlayout.models.stored_names import MIXTRAL_NAMES
from dtlayout.models.tape import PLAIN, TapeEntry, TapeOptions, end_gradients, join
from dtlayout.models.traced import FAMILY, describe_traced
from dtlayout.models.weight import Weight
from dtlayout.spec.base_format import SCALE
from dtlayout.spec.model_shape import ModelShape

_LLAMA = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
_QWEN = _LLAMA | {
    "vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32, "max_position_embeddings": 32_768,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
_ROUTING = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
_MIXTRAL = _LLAMA | _ROUTING | {
    "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rope_theta": 1e6,
    "rms_norm_eps": 1e-5, "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
_QWEN3_MOE = _ROUTING | {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
    "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 32_768,
    "use_sliding_window": False, "sliding_window": 4096, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": False, "mlp_only_layers": [],
}  # fmt: skip
_DOTS1 = {
    "vocab_size": 152_064, "hidden_size": 4608, "intermediate_size": 10_944, "num_hidden_layers": 62,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048,
    "sliding_window": 4096, "max_window_layers": 62, "moe_intermediate_size": 1408, "n_shared_experts": None,
    "n_routed_experts": None, "num_experts_per_tok": None, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": False, "routed_scaling_factor": 1.0,
}  # fmt: skip
_MISTRAL = _LLAMA | {
    "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096,
}  # fmt: skip
"""Defaults of `transformers` 5 and 4, where the two versions agree."""

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(name="llama", defaults=_LLAMA, heads_divide_width=True),
        Family(
            name="qwen2", architecture="Qwen2ForCausalLM", traits={"qkv_bias": True}, defaults=_QWEN,
            ignored_keys=("attention_bias", "qkv_bias", "mlp_bias"),
        ),
        Family(
            name="qwen3", architecture="Qwen3ForCausalLM", traits={"qk_norm": True},
            defaults=_QWEN | {"head_dim": 128}, ignored_keys=("mlp_bias",),
        ),
        Family(
            name="mixtral", architecture="MixtralForCausalLM", defaults=_MIXTRAL, stored_names=MIXTRAL_NAMES,
            experts={
                "number": "num_local_experts", "per_token": "num_experts_per_tok", "ffn_size": "intermediate_size",
                "balance_loss": "router_aux_loss_coef",
            },
            synonyms={"num_experts": "num_local_experts"}, allowed={"router_jitter_noise": (0.0,)},
        ),
        Family(
            name="qwen3_moe", architecture="Qwen3MoeForCausalLM", traits={"qk_norm": True}, defaults=_QWEN3_MOE,
            experts={
                "number": "num_experts", "per_token": "num_experts_per_tok", "ffn_size": "moe_intermediate_size",
                "normalized": "norm_topk_prob", "dense_layers": "mlp_only_layers",
                "balance_loss": "router_aux_loss_coef",
            },
            synonyms={"num_local_experts": "num_experts"},
            allowed={"decoder_sparse_step": (1,), "use_qk_norm": (True,)}, ignored_keys=("mlp_bias",),
        ),
        Family(
            name="dots1", architecture="Dots1ForCausalLM", defaults=_DOTS1,
            traits={"qk_norm": True, "experts": {"score": "sigmoid", "correction_bias": True}},
            experts={
                "number": "n_routed_experts", "per_token": "num_experts_per_tok", "ffn_size": "moe_intermediate_size",
                "shared_ffn_size": "n_shared_experts", "dense_layers": "first_k_dense_replace", "groups": "n_group",
                "groups_per_token": "topk_group", "normalized": "norm_topk_prob", "scale": "routed_scaling_factor",
            },
            synonyms={"num_local_experts": "n_routed_experts"},
            allowed={
                "scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,),
            },
            ignored_keys=("mlp_bias", "output_router_logits"),
        ),
        Family(
            name="mistral", architecture="MistralForCausalLM", defaults=_MISTRAL,
            window=WindowRule(is_listed=False), ignored_keys=("attention_bias", "mlp_bias"),
        ),
        *PLANNED,
        *CODED,
    )
}  # fmt: skip


BUILT_IN = dict(FAMILIES)
"""Families that are here without being registered."""
TRACED = Family(name=FAMILY, describe=describe_traced, architecture="", module="dtlayout.tracing.stage:build_traced")
"""The family of the models that nobody described: their blocks are in the file of a trace."""


def register_family(family: Family, presets: Sequence[ModelShape] = ()) -> None:
    """Make a family and its published sizes known; InvalidConfig if one of the names is taken.

    A family that is planned and not trained gives way to one that is trained.
    """
    named = TRACED if family.name == TRACED.name else FAMILIES.get(family.name)
    taken = [] if named is None or (named.untrained and not family.untrained) else [family.name]
    if taken := taken + [shape.name for shape in presets if shape.name in PRESETS]:
        raise InvalidConfig(f"family {family.name!r}: {', '.join(taken)} is there already; choose another name")
    FAMILIES[family.name] = family
    PRESETS.update({shape.name: shape for shape in presets})


def find_family(name: str) -> Family:
    """The family called `name`; InvalidConfig names all families if there is none."""
    if name == TRACED.name:
        return TRACED
    if name not in FAMILIES:
        raise InvalidConfig(f"model.family={name!r} is not known; use one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


@lru_cache(maxsize=256)
def describe(model: ModelShape) -> Description:
    """The operations and weights of a model, with those of its adapter; InvalidConfig if its family is not known.

    Where embeddings are tied, the head's weight has the role of the embedding, and is trained if that is.
    """
    described = find_family(model.family).describe(model)
    if model.adapter is not None:
        described = adapt(described, model.adapter)
    if not model.tied_embeddings:
        return described
    role, trains = described.embedding.role, described.embedding.trains
    return replace(described, head=replace(described.head, role=role, trains=trains))


def find_target_problems(model: ModelShape) -> list[str]:
    """Reasons why a model cannot have its adapter, one line each; empty without one."""
    if model.adapter is None:
        return []
    kinds = [kind for kind, _ in model.base.kinds(range(model.num_layers))]
    return find_unmatched([describe(kind) for kind in kinds], model.adapter)


@lru_cache(maxsize=256)
def count_frozen_first(model: ModelShape) -> int:
    """Number of first blocks of a model in and before which no weight is trained; 0 if its embedding is trained."""
    number = 0
    if not describe(model).embedding.trains:
        for kind, count in reversed(model.kinds(range(model.num_layers))):  # the kind of the first blocks comes last
            if any(weight.trains for weight in describe(kind).block_weights):
                break
            number += count
    return number


def find_weight(model: ModelShape, name: str) -> Weight:
    """The described weight of a parameter in any stage of a model. KeyError if none.

    A tied one is its embedding's, and scales belong to the weight that is quantized.
    """
    _, is_in_block, rest = name.partition(".layers.")
    kind = model.kind_of(int(rest.partition(".")[0])) if is_in_block else model
    return describe(kind).find(model.aliases.get(name, name).removesuffix(SCALE))


@lru_cache(maxsize=256)
def block_tape(model: ModelShape, options: TapeOptions = PLAIN) -> tuple[TapeEntry, ...]:
    """Steps of a block's forward, with what each reads, makes and saves."""
    described = describe(model)
    operations = described.block_as_run if options.is_own_mixture else described.block
    tape = join(entry for operation in operations for entry in operation.record(options))
    return tuple(end_gradients(tuple(tape)) if options.ends_gradients else tape)
