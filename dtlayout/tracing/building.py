"""The causal model of a config of `transformers`, on the meta device and without chance."""

import copy
from typing import Any

import torch

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import first_line
from dtlayout.tracing.attention import NAME, register


def build_model(config: Any, dtype: torch.dtype) -> Any:
    """The causal model of a config on the meta device, without dropout, with our attention where the family takes it.

    InvalidConfig for encoder-decoders, for models that need code from elsewhere, and for others that `transformers`
    does not build as causal models.
    """
    register()
    if getattr(config, "is_encoder_decoder", False):
        raise InvalidConfig(f"{config.model_type} has an encoder and a decoder; train a model with a decoder alone")
    kind = find_causal_class(config)
    takes = getattr(kind, "_supports_attention_backend", False), getattr(kind, "_supports_sdpa", False)
    attention = NAME if takes[0] else "sdpa" if takes[1] else "eager"
    try:
        with torch.device("meta"):
            return build_causal(without_dropout(config), attn_implementation=attention, dtype=dtype)
    except InvalidConfig:
        raise
    except Exception as error:
        raise InvalidConfig(f"transformers does not build {config.model_type!r}: {first_line(error)}") from error


def find_causal_class(config: Any) -> Any:
    """The class of `transformers` that is the causal model of a config; None if there is none.

    A family that sees images may be listed by its whole config alone, though its class takes the part that reads text.
    """
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type_to_module_name(config.model_type))
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    return found if getattr(found, "config_class", None) is type(config) else None


def build_causal(config: Any, **options: Any) -> Any:
    """The causal model of a config, on torch's default device; `options` are those of `from_config`.

    InvalidConfig if `transformers` has none. Code of a family raises what it does.
    """
    kind = find_causal_class(config)
    if kind is None:
        raise InvalidConfig(
            f"transformers itself has no causal model of {config.model_type!r}, and code of a repository is never run"
        )
    return kind._from_config(config, **options)


def without_dropout(config: Any) -> Any:
    """A copy of a config in which nothing is left to chance: probabilities of dropout, layerdrop and noise are 0."""
    still = copy.deepcopy(config)
    for name, value in config.to_dict().items():
        if _is_chance(name) and isinstance(value, int | float):
            setattr(still, name, type(value)(0))
        part = vars(still).get(name)
        if isinstance(value, dict) and hasattr(part, "to_dict"):
            setattr(still, name, without_dropout(part))
    return still


def _is_chance(name: Any) -> bool:
    """True if a key of a config is a probability, or a strength of noise."""
    return any(word in str(name) for word in ("dropout", "pdrop", "layerdrop", "jitter"))
