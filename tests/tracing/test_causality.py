"""Models that attend both ways are refused, whatever their class is called."""

from typing import Any

import pytest
import torch
from toys import make_config

from dtlayout.base.errors import InvalidConfig
from dtlayout.tracing import causality
from dtlayout.tracing.causality import find_acausal
from dtlayout.tracing.trace import trace_config

READS_AHEAD = "its first token reads the second one, so that it is no causal model"


def write(family: str, **more: Any) -> dict[str, Any]:
    return {**make_config(family, pad_token_id=1).to_dict(), "model_type": family, **more}


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_a_model_that_attends_both_ways_is_refused_with_the_key_that_makes_it_causal(family):
    with pytest.raises(InvalidConfig, match=f"{READS_AHEAD}; is_decoder=true in its config.json makes it one"):
        trace_config(write(family))
    assert find_acausal(write(family, is_decoder=True), [0] * 3) == ""


def test_a_key_that_lets_a_decoder_attend_both_ways_is_seen():
    assert find_acausal(write("gemma3_text"), [0, 0, 0]) == ""
    assert find_acausal(write("gemma3_text", use_bidirectional_attention=True), [0, 0, 0]) == READS_AHEAD


def test_nothing_is_said_of_a_model_that_does_not_run_narrow_or_is_too_large(monkeypatch):
    assert find_acausal(write("bert", hidden_size="wide"), [0] * 3) == ""
    monkeypatch.setattr(causality, "_MOST_PARAMETERS", 1000)
    assert find_acausal(write("bert"), [0] * 3) == ""


def test_the_order_of_random_numbers_is_left_alone():
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    assert find_acausal(write("llama"), [0] * 3) == ""
    assert torch.equal(before, torch.random.get_rng_state())
