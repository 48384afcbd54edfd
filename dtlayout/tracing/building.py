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
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    register()
    if getattr(config, "is_encoder_decoder", False):
        raise InvalidConfig(f"{config.model_type} has an encoder and a decoder; train a model with a decoder alone")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InvalidConfig(
            f"transformers itself has no causal model of {config.model_type!r}, and code of a repository is never run"
        )
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    attention = NAME if kind._supports_attention_backend else "sdpa" if kind._supports_sdpa else "eager"
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(without_dropout(config), attn_implementation=attention, dtype=dtype)
    except Exception as error:
        raise InvalidConfig(f"transformers does not build {config.model_type!r}: {first_line(error)}") from error


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
