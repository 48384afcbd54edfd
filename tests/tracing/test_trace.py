"""What a model computes is read off its own code: parameters, kinds of blocks, and what tp cannot split."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from toys import TOYS, make_config
from transformers import T5Config, conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming

from dtlayout import predict, recommend
from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.cli import main
from dtlayout.models.counting import count_model_flops_per_token, count_parameters
from dtlayout.models.description import Description
from dtlayout.models.files import find_model
from dtlayout.models.operations import ATTENDED, Linear, SelfAttention
from dtlayout.models.traced import VERSION, Trace, find_stored_name, parse_trace, read_trace
from dtlayout.models.weights import list_stored, list_weights
from dtlayout.spec.model_shape import ModelShape
from dtlayout.tracing import trace
from dtlayout.tracing.building import build_model
from dtlayout.tracing.trace import describe_module, trace_config

NOT_TRACED = {
    "diffllama": "a block attends 2 times",
    "jetmoe": "its code goes on by values of tensors in self_attention.experts.router, as local_scalar_dense reads",
}
WHOLE = {
    "mpt clipped": "attn needs by chunk what other ranks have",
    "doge": "belongs to no norm and no linear layer",
}
COUNTS = {
    "llama": (),
    "bitnet": (),
    "gpt2": ("attn.split_size",),
    "phi3": ("self_attn.num_key_value_heads", "self_attn.config.num_attention_heads"),
    "opt": ("self_attn.num_heads",),
    "stablelm": ("self_attn.num_heads", "self_attn.num_key_value_heads"),
    "gptj": ("attn.num_attention_heads",),
    "falcon 40b": ("self_attention.num_heads", "self_attention.num_kv_heads"),
    "bloom": ("self_attention.num_heads", "alibi"),
    "mpt": ("attn.n_heads", "position_bias"),
}
"""Toy → numbers and arguments of its code that tp divides."""
PIECES = {
    "phi3": {"self_attn.qkv_proj.weight": [32, 16, 16], "mlp.gate_up_proj.weight": [48, 48]},
    "gpt2": {"attn.c_attn.weight": [32, 32, 32]},
    "mpt": {"attn.Wqkv.weight": [32, 32, 32]},
    "gpt_neox": {},
    "gpt_bigcode": {},
}
"""Toy → matrix that its code cuts, and the outputs of each piece."""
SPLIT = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "olmo", "granite", "smollm3",
    "cohere", "gpt_neox", "starcoder2", "nemotron", "ernie4_5", "seed_oss", "helium", "exaone4", "arcee", "cwm",
    "hunyuan_v1_dense", "nanochat", "phi3", "glm", "olmo2", "olmo3", "stablelm", "opt", "bloom", "gpt2", "gptj", "mpt",
    "persimmon", "falcon with alibi", "falcon 40b",
)  # fmt: skip
"""Families of which tp splits attention and feed-forward."""


RENAMED = {("gpt_neox", "lm_head.weight"): "embed_out.weight"}
"""Family and parameter → its name in published folders, which transformers changes as it loads them."""


def make_trace(name: str, **more: Any) -> Trace:
    kind, keys = TOYS.get(name, (name, {}))
    config = make_config(kind, **keys | more)
    return trace_config({**config.to_dict(), "model_type": kind}, name)


@pytest.fixture
def shape(tmp_path, request) -> ModelShape:
    return keep(make_trace(request.param), tmp_path)


def keep(trace: Trace, folder) -> ModelShape:
    file = folder / "trace.json"
    file.write_text(trace.dumps())
    return read_trace(str(file)).shape


@pytest.mark.parametrize("name", [name for name in TOYS if name not in NOT_TRACED])
def test_every_parameter_of_a_model_is_in_its_trace_once_and_under_its_own_name(name, tmp_path):
    shape = keep(make_trace(name), tmp_path)
    kind, keys = TOYS[name]
    model = build_model(make_config(kind, **keys), torch.float32)
    own = {RENAMED.get((name, each), each): tuple(p.shape) for each, p in model.named_parameters()}
    assert count_parameters(shape) == sum(parameter.numel() for parameter in model.parameters())
    assert all(weight.trains for described in read_trace(shape.trace).kinds for weight in described.block_weights)
    if shape.experts is None:  # whose stacks have other names
        stored = list(list_stored(shape))
        assert {name: each.tensor_shape for each in stored for name in each.tensors} == own
        assert [each.name for each in stored] == [name for name, _ in list_weights(shape)]
        whole = {each.tensors[0]: each for each in stored if each.piece is None}
        assert all(find_stored_name(shape, each.name) == name for name, each in whole.items())


@pytest.mark.parametrize(
    ("rule", "module", "stored"),
    [
        (WeightRenaming(r"^(embed|norm)_in\.", r"model.\1_tokens."), "model.embed_tokens", "embed_in"),
        (PrefixChange(prefix_to_remove="text", model_prefix="model"), "model.layers.1.mlp", "model.text.layers.1.mlp"),
    ],
    ids=["choice", "prefix"],
)
def test_names_on_disk_follow_rules_with_groups(rule, module, stored, tmp_path, monkeypatch):
    def find(name: str) -> list[WeightRenaming]:
        return [rule] if name == "LlamaForCausalLM" else []

    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", find)
    shape = keep(make_trace("llama"), tmp_path)
    assert find_stored_name(shape, f"{module}.weight") == f"{stored}.weight"
    assert find_stored_name(shape, "lm_head.weight") == "lm_head.weight"


@pytest.mark.parametrize(("name", "reason"), NOT_TRACED.items(), ids=list(NOT_TRACED))
def test_blocks_that_no_description_holds_are_refused(name, reason):
    with pytest.raises(InvalidConfig, match=f"cannot be traced: {reason}"):
        make_trace(name)


@pytest.mark.parametrize(("name", "reason"), WHOLE.items(), ids=list(WHOLE))
def test_what_tp_cannot_split_is_said(name, reason):
    assert reason in make_trace(name).whole["tp"]


@pytest.mark.parametrize("name", COUNTS)
def test_numbers_of_heads_that_code_states_are_found(name):
    trace = make_trace(name)
    assert "tp" not in trace.whole
    assert {(*each.numbers, *each.arguments) for each in trace.divided} == {COUNTS[name]}


@pytest.mark.parametrize("name", PIECES)
def test_matrices_that_hold_several_are_cut_where_code_cuts_them(name, tmp_path):
    pieces: dict[str, list[int]] = {}
    for weight in list_stored(keep(make_trace(name), tmp_path)):
        if (
            weight.piece
            and weight.piece.rows > weight.shape[0]
            and len(weight.shape) == 2
            and ".0." in weight.name[:22]
        ):
            pieces.setdefault(weight.piece.name, []).append(weight.shape[0])
    assert pieces == PIECES[name]


@pytest.mark.parametrize("name", SPLIT)
def test_attention_and_feed_forward_come_out_as_pairs(name):
    trace = make_trace(name)
    assert "tp" not in trace.whole
    for described in trace.kinds:
        linears = [each for each in described.block if isinstance(each, Linear)]
        closing = [each for each in linears if each.style == "rowwise"]
        assert len(closing) == 2 and {each.style for each in linears} == {"colwise", "rowwise"}
        assert sorted(each.reads == ATTENDED for each in closing) == [False, True]


def find_attention(described: Description) -> SelfAttention:
    return described.attention


def test_blocks_that_differ_are_kinds_and_windows_belong_to_theirs():
    trace = make_trace("gemma3_text", num_hidden_layers=4, layer_types=["sliding_attention"] * 3 + ["full_attention"])
    assert trace.shape.block_kinds == (0, 0, 0, 1)
    assert [find_attention(each).window for each in trace.kinds] == [5, 0]
    assert [find_attention(each).windowed_share for each in trace.kinds] == [1.0, 0.0]


def test_groups_of_heads_and_biases_are_read_off_the_code():
    trace = make_trace("qwen2")
    attention = find_attention(trace.kinds[0])
    assert (attention.num_heads, attention.num_kv_heads, attention.head_width) == (4, 2, 8)
    biased = {each.module for each in trace.kinds[0].block if isinstance(each, Linear) and each.bias}
    assert biased == {f"self_attn.{name}_proj" for name in "qkv"}


def test_a_mixture_is_traced_for_predictions_alone():
    trace = make_trace("qwen3_moe")
    experts = trace.shape.experts
    assert experts and (experts.number, experts.per_token, experts.ffn_size) == (4, 2, 16)
    assert trace.whole["training"] == "a mixture of experts is traced for predictions alone"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config().to_dict(), "t5 has an encoder beside its decoder"),
        ({"model_type": "nothing"}, "knows no model_type='nothing'"),
        ({}, "knows no config.json without model_type"),
        ({"model_type": "llama", "hidden_size": "wide"}, "transformers cannot"),
        ({"model_type": "apertus", "num_hidden_layers": 1}, ""),
    ],
    ids=["encoder", "unknown", "no type", "no number", "constants"],
)
def test_what_cannot_be_had_is_said(config, reason):
    if not reason:
        assert "keeps in its checkpoint what is not trained" in trace_config(config).whole["training"]
        return
    with pytest.raises(InvalidConfig, match=reason):
        trace_config(config)


def test_code_of_a_form_that_nobody_has_thought_of_is_refused_in_one_line(monkeypatch):
    def fail(*_):
        raise KeyError("temperature")

    monkeypatch.setattr(trace, "recognize", fail)
    with pytest.raises(InvalidConfig, match="cannot be traced: its code is not understood: KeyError: 'temperature'"):
        make_trace("llama")


def test_a_file_that_is_no_trace_of_this_version_is_refused(tmp_path):
    text = make_trace("llama").dumps()
    content = json.loads(text)
    with pytest.raises(InvalidConfig, match=f"and not {VERSION}; trace the model again"):
        parse_trace({**content, "dtlayout_trace": 99}, "x.json")
    with pytest.raises(InvalidConfig, match="is damaged: 'kinds'; trace the model again"):
        parse_trace({key: value for key, value in content.items() if key != "kinds"}, "x.json")
    with pytest.raises(InvalidConfig, match="cannot be read: No such file"):
        read_trace(str(tmp_path / "none.json"))
    (tmp_path / "cut.json").write_text(text[:100])
    with pytest.raises(InvalidConfig, match="is not JSON"):
        read_trace(str(tmp_path / "cut.json"))


class Own(nn.Module):
    """A causal model as somebody writes it: one matmul makes queries, keys and values, a ReLU the feed-forward."""

    def __init__(self, num_blocks: int = 3):
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 32), nn.Embedding(16, 32)
        self.stack = nn.ModuleList(OwnBlock() for _ in range(num_blocks))
        self.out = nn.Linear(32, 50, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.tokens(words) + self.places(torch.arange(words.shape[1]))
        for block in self.stack:
            x = block(x=x)
        return self.out(nn.functional.layer_norm(x, (32,)))


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.qkv, self.join = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.wide, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)
        self.is_causal = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.qkv(self.before(x)).chunk(3, -1))
        seen = self.attend(q, k, v)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(torch.relu(self.wide(nn.functional.layer_norm(x, (32,)))))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)


class BiasedBlock(OwnBlock):
    """Attention with a bias for each head, which has scores in memory."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        far = torch.arange(q.shape[2])[None] - torch.arange(q.shape[2])[:, None]
        bias = torch.where(far > 0, -torch.inf, far * torch.arange(1, 5)[:, None, None])
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def test_a_module_is_described_by_one_sequence_of_its_example(tmp_path):
    own, file = Own(), tmp_path / "own.json"
    own.stack = nn.ModuleList(BiasedBlock() for _ in range(3))
    described = []
    for batch in (1, 4):
        describe_module(own, {"words": torch.zeros(batch, 12, dtype=torch.long)}, file)
        described.append(json.loads(file.read_text()))
    assert described[0] == described[1] and read_trace(str(file)).kinds[0].attention.scores
    with pytest.raises(InvalidConfig, match="example_inputs are arguments by name, of which the first are tokens"):
        describe_module(own, torch.zeros(1, 12, dtype=torch.long), file)


def test_a_layout_that_a_module_is_not_split_for_is_refused(tmp_path):
    own, file = Own(), tmp_path / "own.json"
    own.stack = nn.ModuleList(BiasedBlock() for _ in range(3))  # with slopes of all heads on each rank
    shape = describe_module(own, {"words": torch.zeros(1, 12, dtype=torch.long)}, file)
    job = {"gpu": "H100", "gpus": 4, "seq_len": 64, "global_batch": 8}
    with pytest.raises(InvalidLayout, match=r"layout\.tp=2: its code does not run with a part of its heads"):
        predict(shape, "tp2", **job)
    found = recommend(shape, **job)
    assert found.layouts and all(each.layout.tp == 1 for each in found.layouts)


def test_an_embedding_has_the_rows_of_the_head_and_blocks_may_be_a_sequence(tmp_path):
    own, inputs = Own(), {"words": torch.zeros(1, 12, dtype=torch.long)}
    listed = describe_module(own, inputs, tmp_path / "own.json")
    own.places = nn.Embedding(64, 32)  # more positions than tokens
    own.stack = nn.Sequential(*own.stack)
    found = describe_module(own, inputs, tmp_path / "own.json")
    assert (found.vocab_size, found.num_layers) == (50, 3) and found.ffn_size == listed.ffn_size
    assert count_parameters(found) == sum(each.numel() for each in own.parameters())


def test_a_module_of_ones_own_is_described_and_planned(tmp_path, capsys):
    own, file = Own(), tmp_path / "own.json"
    shape = describe_module(own, {"words": torch.zeros(2, 12, dtype=torch.long)}, file)
    assert count_parameters(shape) == sum(each.numel() for each in own.parameters())
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.ffn_size) == (
        3,
        32,
        4,
        4,
        128,
    )
    job = {"gpu": "H100", "gpus": 4, "seq_len": 64, "global_batch": 8}
    for model in (shape, str(file)):
        assert str(predict(model, "dp4 zero3", **job).layout) == "dp4 mb1 zero3"
    assert capsys.readouterr().err.count("note: own is predicted, not trained: it is a module of one's own, which") == 2
    own.out.weight = own.tokens.weight
    tied = describe_module(own, {"words": torch.zeros(2, 12, dtype=torch.long)}, tmp_path / "tied.json")
    assert count_parameters(tied) == sum(each.numel() for each in own.parameters())
    described = read_trace(str(file)).kinds[0]
    assert [type(each).__name__ for each in described.block] == [
        "Norm", "Linear", "Linear", "Linear", "SelfAttention",
        "Linear", "Residual", "Norm", "Linear", "Activation", "Linear", "Residual",
    ]  # fmt: skip
    assert next(own.parameters()).device.type == "cpu"  # a copy ran
    scenario = ["--gpu", "h100-80g-sxm", "--gpus", "8", "--seq-len", "16", "--global-batch", "64", "--top", "1"]
    assert main(["recommend", "--model", str(file), *scenario]) == 0
    assert "own, " in capsys.readouterr().out


def test_a_module_of_ones_own_shows_its_blocks_and_what_is_not_split_and_so_does_its_file(tmp_path, capsys):
    import dtlayout as dl

    own, file, inputs = Own(), tmp_path / "own.json", {"words": torch.zeros(2, 12, dtype=torch.long)}
    found = dl.describe_module(own, inputs, file)
    shape = find_model(str(file))
    assert found == shape == found and hash(found) == hash(shape) and found != replace(shape, name="other")
    assert dl.predict(found, "dp4 zero3", gpu="H100", gpus=4, seq_len=64, global_batch=8).fits
    assert main(["trace", str(file)]) == 0
    first, *lines, last = capsys.readouterr().out.splitlines()
    total = sum(each.numel() for each in own.parameters())
    assert first == f"own: {total:,} parameters, 3 blocks of 1 kind" and last == f"read from {file}"
    attention = next(line for line in lines if line.startswith("  attention "))
    assert "4 heads, 4 of keys and values, 8 wide" in attention
    assert "not trained: it is a module of one's own, which dtlayout train does not build" in lines
    flops = count_model_flops_per_token(shape, 4096) / 1e9
    assert repr(found).splitlines()[:2] == [
        first,
        f"{flops:.3g} GFLOPs a token, forward and backward, in a sequence of 4,096",
    ]
    assert set(lines) <= set(repr(found).splitlines())
    page = found._repr_html_()
    assert (
        page.startswith('<div class="dtlayout">')
        and "4 heads, 4 of keys and values" in page
        and "not trained: " in page
    )
    assert main(["trace", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == str(file)
    assert main(["trace", str(file), "--output", str(tmp_path / "again.json")]) == 2
    assert "it is a trace already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda own: setattr(own, "stack", nn.ModuleDict(zip("abc", own.stack, strict=True))), "no list of blocks"),
        (lambda own: [setattr(each, "is_causal", False) for each in own.stack], "attention of a block has neither"),
        (lambda own: setattr(own, "out", nn.Identity()), "no head behind them"),
        (lambda own: setattr(own, "spare", nn.Linear(3, 3)), "spare has parameters, and is not called"),
    ],
    ids=["list", "both ways", "head", "uncalled"],
)
def test_a_module_that_is_no_causal_model_is_refused(tmp_path, spoil, reason):
    own = Own()
    spoil(own)
    with pytest.raises(InvalidConfig, match=reason):
        describe_module(own, {"words": torch.zeros(1, 12, dtype=torch.long)}, tmp_path / "own.json")
    assert not (tmp_path / "own.json").exists()
