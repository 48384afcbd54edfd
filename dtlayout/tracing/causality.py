"""Causality of a model, by experiment: no token may read a later one.

Models such as BERT have a causal class too, and attend both ways unless their config says `is_decoder`. A narrow model
with the family's code and random weights runs on two sequences with the same first token. What it says of that token
must be the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dtlayout.tracing.building import build_causal
from dtlayout.tracing.shrink import shrink

_MOST_PARAMETERS = 20_000_000
"""A narrow model with more, which has many experts, is not run: a trace should take no second longer."""
_LEAST_DIFFERENCE = 1e-4
"""Share of the largest logit from which two logits differ; models that attend both ways are at 4e-3 and above."""


def find_acausal(config: Mapping[str, Any], block_kinds: Sequence[int]) -> str:
    """The reason why the model of a config.json is not causal; empty if it is, or if no narrow one runs here."""
    if not _reads_ahead(config, block_kinds):
        return ""
    reason = "its first token reads the second one, so that it is no causal model"
    if config.get("is_decoder") is not True and not _reads_ahead({**config, "is_decoder": True}, block_kinds):
        return f"{reason}; is_decoder=true in its config.json makes it one"
    return reason


def _reads_ahead(config: Mapping[str, Any], block_kinds: Sequence[int]) -> bool:
    """True if logits of the first token change with the second one."""
    from transformers import CONFIG_MAPPING

    try:
        small = shrink(config, block_kinds)
        parsed = CONFIG_MAPPING[small["model_type"]].from_dict(small)
        with torch.device("meta"):
            size = sum(each.numel() for each in build_causal(parsed).parameters())
        if size > _MOST_PARAMETERS:
            return False
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            torch.manual_seed(0)
            model = build_causal(parsed, dtype=torch.float32).eval()
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.1)
                else:
                    parameter.uniform_(0.5, 1.5)
            tokens = torch.tensor([[5, 7, 9], [5, 8, 9]])
            first, other = model(input_ids=tokens, use_cache=False).logits[:, 0]
    except Exception:  # whatever code of a family raises at sizes that it was not made for
        return False
    return bool((first - other).abs().max() > _LEAST_DIFFERENCE * first.abs().max())
