"""Initial weights of traced models: those that the family's own code draws."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from toys import TOYS, make_config
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from dtlayout.models.files import trace_model
from dtlayout.models.weights import list_pieces
from dtlayout.plans.init import fill_by_rule, fill_initial
from dtlayout.spec.model_shape import ModelShape
from dtlayout.tracing.building import build_model
from dtlayout.tracing.initial import describe_rules, find_rules, read_rules
from dtlayout.tracing.parts import find_parts

OTHERS = ("llama", "gpt_neox", "gemma2", "phi", "olmo2", "bloom", "falcon", "opt", "starcoder2", "stablelm", "mpt")
PADDING = 3
"""Token of padding, whose row many families set to zero."""


def make_weights(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Initial weights by family's names: those that the family's own model has, and ours."""
    kind, keys = TOYS[name]
    config = make_config(kind, **keys | {"pad_token_id": PADDING})
    torch.manual_seed(0)  # of a million drawn weights one may be 0
    theirs = {key: each.detach() for key, each in AutoModelForCausalLM.from_config(config).named_parameters()}
    rules, parts = read_rules(config), find_parts(build_model(config, torch.float32))
    ours = {key: torch.empty_like(each) for key, each in theirs.items()}
    for key, each in ours.items():
        fill_by_rule(each, rules[parts.from_family(key)], 0, key)
    return theirs, ours


@pytest.mark.parametrize("name", OTHERS)
def test_initial_weights_are_distributed_as_the_family_does(name):
    theirs, ours = make_weights(name)
    for key, weight in theirs.items():
        assert torch.equal(weight == 0, ours[key] == 0), key  # rows of padding, biases, norms that are around zero
        if weight.std() == 0:
            assert torch.equal(weight, ours[key]), key
        else:
            error = 7 / math.sqrt(2 * weight.numel())
            assert float(ours[key].std()) == pytest.approx(float(weight.std()), rel=error), key
            assert abs(ours[key].mean() - weight.mean()) < 7 * weight.std() / math.sqrt(weight.numel()), key


def test_a_rule_that_goes_over_a_whole_block_is_read():
    """GPT-2 divides what writes into the residual stream by sqrt(2 · blocks), three here."""
    _, ours = make_weights("gpt2")
    stds = {key: float(each.std()) for key, each in ours.items()}
    assert stds["transformer.h.0.attn.c_attn.weight"] == pytest.approx(0.02, rel=0.05)
    for key in ("attn.c_proj", "mlp.c_proj"):
        assert stds[f"transformer.h.1.{key}.weight"] == pytest.approx(0.02 / math.sqrt(6), rel=0.08)


@pytest.mark.parametrize("family", ["gpt2", "phi3"])
def test_a_weight_that_is_rows_of_the_familys_gets_what_lies_there(family, tmp_path):
    """Each part of a matrix that holds several, or lies the other way as in GPT-2, has the values of its own rows."""
    shape = keep_trace(family, tmp_path)
    pieces = list_pieces(shape)
    assert len(pieces) > 6
    weights = {name: torch.empty(each.shape) for name, (_, each) in pieces.items()}
    fill_initial(weights.items(), shape, 0)
    for name, (own, each) in pieces.items():
        whole = torch.empty(each.piece.find_shape(each.shape))
        fill_by_rule(whole, find_rules(shape.trace)[0][own], 0, own)
        assert torch.equal(each.piece.cut(whole, slice(0, each.shape[0])), weights[name])
        assert whole.dim() == 1 or whole.std() > 0


def patch_rule(patch: pytest.MonkeyPatch, change: Callable[[Tensor], None]) -> None:
    """Let Llama's own rule end with `change` of each parameter."""
    own = LlamaPreTrainedModel._init_weights

    def draw(self, module):
        own(self, module)
        for parameter in module.parameters(recurse=False):
            change(parameter)

    patch.setattr(LlamaPreTrainedModel, "_init_weights", draw)


def test_uniform_values_lie_between_their_bounds(monkeypatch):
    patch_rule(monkeypatch, lambda parameter: parameter.uniform_(-0.5, 1.5))
    _, ours = make_weights("llama")
    weight = ours["model.layers.0.mlp.up_proj.weight"]
    assert -0.5 < weight.min() < -0.45 and 1.45 < weight.max() < 1.5 and abs(weight.mean() - 0.5) < 0.06


def keep_trace(family: str, folder: Path) -> ModelShape:
    config = {**make_config(family).to_dict(), "model_type": family}
    return trace_model(config, folder / "config.json", folder / "trace.json")


@pytest.fixture
def shape(tmp_path):
    yield keep_trace("llama", tmp_path)
    find_rules.cache_clear()


def test_a_rule_that_is_not_understood_is_named_and_the_rule_of_described_models_is_used(shape, monkeypatch):
    assert describe_rules(shape.trace) == "initial weights by the rule of llama"
    find_rules.cache_clear()
    with monkeypatch.context() as patch:
        patch_rule(patch, lambda parameter: parameter.copy_(torch.ones_like(parameter)))
        assert describe_rules(shape.trace) == (
            "note: initial weights by the rule of described models, since the family's own is not known: "
            "model.embed_tokens.weight: copy_ is no draw"
        )
        weight, norm = torch.empty(101, 32), torch.empty(32)
        fill_initial([("model.embed_tokens.weight", weight), ("model.norm.weight", norm)], shape, 0)
    assert weight.std() == pytest.approx(0.02, rel=0.1) and torch.equal(norm, torch.ones(32))


def test_code_that_reads_values_has_no_rule(shape, monkeypatch):
    def read(self, module):
        raise ValueError("Cannot read a tensor without memory")

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", read)
    assert find_rules(shape.trace) == (
        {}, "LlamaForCausalLM is not initialised without memory: ValueError: Cannot read a tensor without memory",
    )  # fmt: skip
