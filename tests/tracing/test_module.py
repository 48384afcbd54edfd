"""A stage's module of a model of `transformers` computes what the family's own causal model computes."""

from copy import deepcopy

import pytest
import torch
from thorough import mostly_thorough
from torch import Tensor
from torch.nn import functional as F
from toys import NUM_TARGETS, TOYS, S, V, ask_family, build, exact_softmax, find_difference, load, make_config
from transformers import AutoModelForCausalLM

from dtlayout.base.errors import InvalidConfig
from dtlayout.ops.documents import Documents
from dtlayout.plans.init import allocate
from dtlayout.spec.kernels import Kernels
from dtlayout.tracing.building import without_dropout
from dtlayout.tracing.module import TracedModel
from dtlayout.tracing.shell import own_tables
from dtlayout.training.prove import run_documents


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "softmax", exact_softmax)


POSITIONS = [
    "gpt2",
    "gemma",
    "granite",
    "bloom",
    "opt",
    "opt with projections",
    "nanochat",
    "biogpt",
    "openai-gpt",
    "gpt_bigcode",
]
"""Toys whose ends before the blocks do more than look tokens up."""


@pytest.mark.parametrize("name", TOYS)
def test_loss_and_all_gradients_are_those_of_the_familys_own_model(name):
    answer = ask_family(name)
    model = build(answer.config)
    load(model, answer.state)
    torch.testing.assert_close(model(answer.tokens).detach(), answer.logits, rtol=0, atol=1e-10)
    loss = model(answer.tokens, targets=answer.targets, num_targets=NUM_TARGETS)
    loss.backward()
    assert abs(float(loss.detach()) - answer.loss) < 1e-10
    assert find_difference(answer, model) < 1e-10


@pytest.mark.parametrize("name", mostly_thorough(TOYS))
def test_three_stages_one_after_the_other_are_the_whole_model(name):
    answer = ask_family(name)
    stages = [
        build(answer.config, layers=[0], head=False),
        build(answer.config, layers=[1], embedding=False, head=False),
        build(answer.config, layers=[2], embedding=False, loss="chunked"),
    ]
    for stage in stages:
        load(stage, answer.state)
    hidden = stages[1](stages[0](answer.tokens))
    loss = stages[2](hidden, targets=answer.targets, num_targets=NUM_TARGETS)
    loss.backward()
    assert abs(float(loss.detach()) - answer.loss) < 1e-10
    assert find_difference(answer, *stages) < 1e-10


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_ends_may_be_stages_without_blocks(name):
    answer = ask_family(name)
    stages = [
        build(answer.config, layers=[], head=False),
        build(answer.config, layers=[0, 1, 2], embedding=False, head=False),
        build(answer.config, layers=[], embedding=False, loss="eager"),
    ]
    for stage in stages:
        load(stage, answer.state)
    loss = stages[2](stages[1](stages[0](answer.tokens)), targets=answer.targets, num_targets=NUM_TARGETS)
    loss.backward()
    assert abs(float(loss.detach()) - answer.loss) < 1e-10
    assert find_difference(answer, *stages) < 1e-10


@pytest.mark.parametrize("name", TOYS)
def test_a_stage_has_the_parameters_of_its_parts_under_our_names_alone(name):
    config = ask_family(name).config
    with torch.device("meta"):
        whole = TracedModel(config, Kernels(), S)
        middle = TracedModel(config, Kernels(), S, layers=[1], embedding=False, head=False)
    names = [name for name, _ in whole.named_parameters()]
    assert {".".join(each.split(".")[:3]) for each in names if ".layers." in each} == {
        f"model.layers.{i}" for i in range(3)
    }
    assert [each for each, _ in middle.named_parameters()] == [n for n in names if n.startswith("model.layers.1.")]


@pytest.mark.parametrize("name", POSITIONS)
def test_parts_of_a_sequence_enter_the_first_block_as_in_the_whole_sequence(name):
    answer = ask_family(name)
    stage = build(answer.config, layers=[], head=False)
    load(stage, answer.state)
    whole = stage(answer.tokens).detach()
    stage.tp_shards = 3
    for shard in range(3):
        mine = slice(shard * S // 3, (shard + 1) * S // 3)
        hook = stage.model.embed_tokens.register_forward_hook(lambda _, __, looked_up, mine=mine: looked_up[:, mine])
        stage.tp_shard = shard
        torch.testing.assert_close(stage(answer.tokens).detach(), whole[:, mine], rtol=0, atol=1e-12)
        hook.remove()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2", "bloom", "falcon with alibi", "mistral"])
@pytest.mark.parametrize("embedding", [True, False])
def test_blocks_get_masks_and_positions_of_the_whole_sequence_where_they_have_a_part(name, embedding, monkeypatch):
    answer = ask_family(name)
    stage = build(answer.config, layers=[1], embedding=embedding, head=False)
    seen: list[tuple[torch.Size, dict]] = []

    def note(h: Tensor, **named):
        seen.append((h.shape, {key: value for key, value in named.items() if value is not None}))
        return (h,) if stage.parts.returns_tuple else h

    monkeypatch.setattr(stage.model.layers["1"], "forward", note)
    hidden = torch.ones(2, S, 32, dtype=torch.float64)
    stage(answer.tokens if embedding else hidden)
    stage.tp_shards = 2
    if embedding:
        stage.model.embed_tokens.register_forward_hook(lambda _, __, looked_up: looked_up[:, : S // 2])
    stage(answer.tokens if embedding else hidden[:, : S // 2])
    (whole, of_whole), (part, of_part) = seen
    assert (whole[1], part[1]) == (S, S // 2)
    assert any(isinstance(value, Tensor | tuple) for value in of_whole.values())
    torch.testing.assert_close(of_part, of_whole, rtol=0, atol=0)


def test_plain_causal_attention_makes_no_mask_and_runs_the_kernel(monkeypatch):
    answer = ask_family("llama")
    model, masks = build(answer.config), []
    for block in model.model.layers.values():
        real = block.self_attn.attend
        monkeypatch.setattr(
            block.self_attn, "attend", lambda q, k, v, mask, real=real: masks.append(mask) or real(q, k, v, mask)
        )
    model(answer.tokens)
    assert masks == [None] * 3


def test_tied_embeddings_are_one_parameter_where_a_stage_has_both_ends():
    config = ask_family("llama with dropout").config
    with torch.device("meta"):
        model = TracedModel(config, Kernels(), S)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert "lm_head.weight" in dict(build(config, layers=[2], embedding=False).named_parameters())


@pytest.mark.parametrize("name", ["llama", "gptj", "gemma"])
def test_tables_are_there_once_a_stage_has_memory_and_in_their_own_format(name):
    config = ask_family(name).config
    with torch.device("meta"):
        model = TracedModel(config, Kernels(), S, dtype=torch.bfloat16)
    model.reset_buffers()
    assert all(part._buffers[name].is_meta for part, name in own_tables(model.model.shell.base))
    allocate([model], "cpu")
    tables = [part._buffers[name] for root in (model, model.model.shell.base) for part, name in own_tables(root)]
    assert tables and not any(table.is_meta for table in tables)
    assert any(table.dtype == torch.float32 for table in tables)


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_a_copy_runs_its_own_weights(name):
    answer = ask_family(name)
    model = build(answer.config)
    load(model, answer.state)
    copy = deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(copy(answer.tokens).detach(), answer.logits, rtol=0, atol=1e-10)


STARTS = torch.tensor([[0] * 3 + [3] + [4] * 8, [0] + [1] * 6 + [7] * 5], dtype=torch.int32)
"""Position at which the document of each token starts; some are longer than a toy's window."""


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("llama", "sdpa-math"),  # gets a mask of scores
        ("llama", "sdpa-flash"),  # a mask of scores on a CPU too
        ("gpt2", "blockwise"),  # learned positions, and offsets of documents
        ("gemma2", "blockwise"),  # a mask of some blocks' window, and softcaps beside offsets
    ],
)
def test_documents_see_themselves_alone_and_stand_where_they_stood(name, kernel):
    answer = ask_family(name)
    with torch.device("meta"):
        model = TracedModel(answer.config, Kernels(attention=kernel, loss="linear"), S, dtype=torch.float64)
    allocate([model], "cpu")
    load(model, answer.state)
    family = AutoModelForCausalLM.from_config(without_dropout(answer.config), dtype=torch.float64)
    family.load_state_dict(answer.state)
    found = model(answer.tokens, Documents.from_starts(STARTS))
    torch.testing.assert_close(found, run_documents(family, answer.tokens, STARTS), rtol=0, atol=1e-10)
    assert float((found - answer.logits).abs().max().detach()) > 0.01
    torch.testing.assert_close(model(answer.tokens).detach(), answer.logits, rtol=0, atol=1e-10)


def test_documents_are_refused_where_attention_is_the_familys_own():
    model = build(make_config("bloom"))
    documents = Documents.from_starts(torch.zeros(1, S, dtype=torch.int32))
    with pytest.raises(InvalidConfig, match="needs attention that transformers looks up by name"):
        model(torch.zeros(1, S, dtype=torch.int64), documents)


def test_a_sequence_longer_than_a_table_of_positions_is_refused():
    with (
        pytest.raises(InvalidConfig, match="seq_len=65 is longer than the table of 64 positions"),
        torch.device("meta"),
    ):
        TracedModel(make_config("gpt2"), Kernels(), 65)
    with torch.device("meta"):
        assert TracedModel(make_config("llama"), Kernels(), 65).lm_head.weight.shape == (V, 32)
