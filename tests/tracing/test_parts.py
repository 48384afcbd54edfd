"""Parts of causal models are found without knowing a family, and what is no plain decoder is refused."""

import pytest
import torch
from torch import nn
from toys import TOYS, ask_family, make_config
from transformers import PretrainedConfig, T5Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Model
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel

from dtlayout.base.errors import InvalidConfig
from dtlayout.spec.kernels import Kernels
from dtlayout.tracing.building import build_model, without_dropout
from dtlayout.tracing.logits import Logits
from dtlayout.tracing.module import TracedModel
from dtlayout.tracing.parts import find_parts


def find(kind: str, **more):
    return find_parts(build_model(make_config(kind, **more), torch.float32))


@pytest.mark.parametrize("name", TOYS)
def test_names_are_those_of_the_familys_state_dict_and_back(name):
    answer = ask_family(name)
    with torch.device("meta"):
        model = TracedModel(answer.config, Kernels(), 8)
    shapes = {model.parts.to_family(n): p.shape for n, p in model.named_parameters()}
    tied = {f"{model.parts.head}.weight"} if model.parts.is_tied else set()
    assert shapes == {n: t.shape for n, t in answer.state.items() if n not in tied}
    for own in shapes:
        assert model.parts.to_family(model.parts.from_family(own)) == own


def test_ends_beside_embedding_and_norm_keep_the_name_of_their_attribute():
    assert find("gpt2").names == {
        "model.embed_tokens": "transformer.wte", "model.layers": "transformer.h", "model.wpe": "transformer.wpe",
        "model.norm": "transformer.ln_f", "lm_head": "lm_head",
    }  # fmt: skip
    projected = find("opt", ffn_dim=48, word_embed_proj_dim=16)
    assert projected.before == {"model.decoder.embed_positions": 32, "model.decoder.project_in": 32}
    assert projected.after == ("model.decoder.final_layer_norm", "model.decoder.project_out")
    assert projected.names["model.norm"] == "model.decoder.final_layer_norm"
    assert projected.names["model.project_out"] == "model.decoder.project_out"


@pytest.mark.parametrize(
    "kind, more, logits",
    [
        ("llama", {}, Logits()),
        ("gemma2", {"final_logit_softcapping": 20.0}, Logits(softcap=20.0)),
        ("cohere", {"logit_scale": 0.3}, Logits(scale=0.3)),
        ("granite", {"logits_scaling": 8.0}, Logits(scale=0.125)),
    ],
)
def test_scale_and_softcap_of_logits_are_found_by_running_the_family(kind, more, logits):
    assert find(kind, **more).logits == pytest.approx(logits, rel=1e-12)


def test_a_softcap_that_is_computed_in_fp32_is_found():
    assert find("beam", final_logit_softcapping=15.0).logits == Logits(softcap=15.0)


def test_a_sequence_can_be_sharded_unless_positions_are_read_that_nobody_can_give(monkeypatch):
    assert find("gpt2").can_shard_sequence and find("bloom").can_shard_sequence
    real = GPT2Model.forward

    def without_positions(self, inputs_embeds=None, use_cache=None, attention_mask=None):
        return real(self, inputs_embeds=inputs_embeds, use_cache=use_cache, attention_mask=attention_mask)

    monkeypatch.setattr(GPT2Model, "forward", without_positions)
    assert not find("gpt2").can_shard_sequence


def test_a_head_with_a_bias_and_an_embedding_with_a_factor_are_found():
    assert find("phi").head_bias and not find("llama").head_bias
    assert find("gemma").embedding_scale == pytest.approx(32**0.5, rel=1e-12)
    assert find("llama").embedding_scale == 1


def test_finding_parts_leaves_the_model_as_it_was():
    model = build_model(make_config("gpt2"), torch.float32)

    def look():
        return [(n, id(m)) for n, m in model.named_modules()], [(n, id(b)) for n, b in model.named_buffers()]

    before = look()
    find_parts(model)
    assert look() == before


@torch.no_grad()
def test_parts_are_found_where_no_gradients_are_wanted():
    assert find("gpt2").before == {"transformer.wpe": 32}


def test_nothing_is_left_to_chance():
    still = without_dropout(make_config("gpt2", resid_pdrop=0.2))
    assert (still.attn_pdrop, still.resid_pdrop, still.embd_pdrop) == (0, 0, 0)
    mpt = make_config("mpt")
    mpt.attn_config.attn_pdrop = 1
    assert without_dropout(mpt).attn_config.attn_pdrop == 0 and mpt.attn_config.attn_pdrop == 1


@pytest.mark.parametrize(
    "kind, more, reason",
    [
        ("mamba", {}, "blocks without attention"),
        ("qwen3_next", {}, "blocks without attention: layer_types of \\['linear_attention'\\]"),
        ("rwkv", {}, "does not run without its blocks"),
        ("ctrl", {}, "keeps a tensor that is no buffer|changes embedded tokens in place"),
        ("gemma3n_text", {"num_hidden_layers": 20, "intermediate_size": 48}, "Gemma3n"),
        ("apertus", {}, "keeps in its checkpoint what is not trained: model.layers.0.mlp.act_fn.beta"),
        ("mixtral", {"output_router_logits": True}, "adds a loss of its routers"),
    ],
)
def test_models_that_are_no_plain_decoders_are_refused(kind, more, reason):
    with pytest.raises(InvalidConfig, match=reason) as caught:
        find(kind, **more)
    assert "\n" not in str(caught.value)


def test_encoders_and_code_from_elsewhere_are_refused():
    with pytest.raises(InvalidConfig, match="t5 has an encoder and a decoder"):
        build_model(T5Config(), torch.float32)

    class Foreign(PretrainedConfig):
        model_type = "foreign"

    with pytest.raises(InvalidConfig, match="code of a repository is never run"):
        build_model(Foreign(auto_map={"AutoModelForCausalLM": "modeling_foreign.Foreign"}), torch.float32)


def test_a_config_that_transformers_cannot_build_is_refused_in_one_line():
    with pytest.raises(InvalidConfig, match="transformers does not build 'gpt2'") as caught:
        build_model(make_config("gpt2", num_attention_heads=5), torch.float32)
    assert "\n" not in str(caught.value)


class _Doubling(LlamaModel):
    def forward(self, inputs_embeds=None, **_):
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds) * 2
        return (self.norm(inputs_embeds),)


class _Backwards(LlamaModel):
    def forward(self, inputs_embeds=None, **_):
        for layer in reversed(self.layers):
            inputs_embeds = layer(inputs_embeds)
        return (self.norm(inputs_embeds),)


class _Remembering(LlamaModel):
    def forward(self, inputs_embeds=None, **_):
        memory = {}
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds, memory=memory)
        return (self.norm(inputs_embeds),)


class _Reinjecting(LlamaModel):
    def forward(self, inputs_embeds=None, **_):
        h = inputs_embeds
        for layer in self.layers:
            h = layer(h, first=inputs_embeds)
        return (self.norm(h),)


class _Shifting(LlamaModel):
    def forward(self, inputs_embeds=None, **_):
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds)
        return (self.norm(inputs_embeds) + 1,)


class _Between(LlamaModel):
    def forward(self, inputs_embeds=None, **_):
        for layer in self.layers:
            inputs_embeds = self.norm(layer(inputs_embeds))
        return (inputs_embeds,)


class _Normless(LlamaModel):
    def forward(self, inputs_embeds=None, **_):
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds)
        return (inputs_embeds,)


@pytest.mark.parametrize(
    "base, reason",
    [
        (_Doubling, "changes hidden states between its blocks"),
        (_Backwards, "does not run each of its blocks once, in their order"),
        (_Remembering, "carries state from block to block: memory"),
        (_Reinjecting, "gives its blocks more than hidden states that weights make: first"),
        (_Shifting, "changes hidden states behind its final norm"),
        (_Between, "runs model.norm neither before nor behind all of its blocks"),
        (_Normless, "has parameters that its base model does not read: model.norm"),
    ],
)
def test_a_base_model_that_does_more_than_run_its_blocks_is_refused(base, reason):
    model = build_model(make_config("llama"), torch.float32)
    model.model.__class__ = base
    with pytest.raises(InvalidConfig, match=reason):
        find_parts(model)


def _add_list(model):
    model.model.more = nn.ModuleList([nn.Linear(2, 2)])


def _drop_list(model):
    del model.model.layers
    model.model.layers = nn.Linear(2, 2)


def _add_parameter(model):
    model.model.temperature = nn.Parameter(torch.ones(1))


def _share(model):
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def _hide(model):
    model.model.offsets = torch.ones(3)


def _add_table(model):
    model.model.register_buffer("offsets", torch.ones(3, device="meta"), persistent=False)


@pytest.mark.parametrize(
    "change, reason",
    [
        (_add_list, "more than one list of blocks: model.layers, model.more"),
        (_drop_list, "has no list of blocks"),
        (_add_parameter, "has a parameter outside of blocks and ends: temperature"),
        (_share, "uses a parameter in several places: model.layers.0.mlp.up_proj.weight"),
        (_hide, "keeps a tensor that is no buffer: model.offsets"),
        (_add_table, "has no code that fills LlamaModel.offsets"),
    ],
)
def test_a_tree_with_other_things_than_one_list_of_blocks_and_ends_is_refused(change, reason):
    model = build_model(make_config("llama"), torch.float32)
    change(model)
    with pytest.raises(InvalidConfig, match=reason):
        find_parts(model)


class _Squaring(LlamaForCausalLM):
    def forward(self, **named):
        result = super().forward(**named)
        result.logits = result.logits.square()
        return result


class _Adding(LlamaForCausalLM):
    def forward(self, **named):
        result = super().forward(**named)
        result.logits = self.lm_head(self.model(**named).last_hidden_state + 1)
        return result


@pytest.mark.parametrize("kind, reason", [(_Squaring, "by a rule that is neither"), (_Adding, "in another way than")])
def test_a_head_that_does_more_than_multiply_is_refused(kind, reason):
    model = build_model(make_config("llama"), torch.float32)
    model.__class__ = kind
    with pytest.raises(InvalidConfig, match=reason):
        find_parts(model)
