"""Blocks with a state along the sequence: state-space models, linear attention and short convolutions."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from toys import make_config
from transformers import AutoModelForCausalLM

from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.costmodel.compute import block_time
from dtlayout.costmodel.engine import OWN_ENGINE, find_engine
from dtlayout.costmodel.engine_rules import find_layout_lacks
from dtlayout.costmodel.memory import score_bytes
from dtlayout.costmodel.operators import pass_s, state_s
from dtlayout.costmodel.recomputation import recompute_time
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.adapters import adapt
from dtlayout.models.counting import count_mixing_flops_per_token, count_parameters
from dtlayout.models.families import describe
from dtlayout.models.mixer import Mixer, TokenElements
from dtlayout.models.tape import PLAIN
from dtlayout.models.traced import Trace, find_state, parse_trace, read_trace
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.tracing.recognize import find_mixer
from dtlayout.tracing.scores import count_said
from dtlayout.tracing.states import _to_elements
from dtlayout.tracing.trace import _check_parameters, describe_module, trace_config

SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 96, "intermediate_size": 80}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
KINDS = {"layer_types": ["linear_attention", "full_attention"] * 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": ("linear_attn", SMALL | HEADS | DELTA | KINDS),
    "qwen3_next": ("linear_attn", SMALL | HEADS | DELTA | KINDS | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 1,
    }),
    "mamba2": ("mixer", {
        "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 96, "num_heads": 8, "head_dim": 16, "state_size": 16,
        "n_groups": 2, "chunk_size": 64,
    }),
    "falcon_h1": ("mamba", SMALL | HEADS | {
        "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
        "mamba_chunk_size": 64,
    }),
    "lfm3": ("conv", SMALL | HEADS),
    "bamba": ("mamba", SMALL | HEADS | {
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 64,
        "attn_layer_indices": [1],
    }),
}  # fmt: skip
"""Family → module that carries a state, and sizes."""
SEQ_LEN = 512


def read_config(family: str) -> dict[str, Any]:
    """A config.json of small sizes."""
    return {**make_config(family, **FAMILIES[family][1]).to_dict(), "model_type": family}


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {family: trace_config(read_config(family)) for family in FAMILIES}


def build(family: str) -> Any:
    """The family's own model, in fp32."""
    torch.manual_seed(0)
    config = make_config(family, **FAMILIES[family][1])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def list_blocks(model: Any) -> Any:
    """The model's list of blocks."""
    return next(part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and len(part) > 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_is_found_and_every_parameter_counted(family, traces):
    trace, own = traces[family], build(family)
    assert {each.module for kind in trace.kinds for each in kind.mixers} == {FAMILIES[family][0]}
    traced = sum(w.numel for kind in trace.shape.block_kinds for w in trace.kinds[kind].block_weights)
    assert traced == sum(each.numel() for each in list_blocks(own).parameters())
    reason = f"{FAMILIES[family][0]} carries a state along the sequence"
    assert all(trace.whole[axis].startswith(reason) for axis in ("tp", "cp", "document_mask"))


def measure_block(family: str, number: int) -> tuple[float, float]:
    """Bytes of a token that a real block keeps for backward, and FLOPs of a token in forward, for tokens of a longer
    sequence."""
    model, found = build(family), list[tuple[float, float]]()
    blocks = list_blocks(model)
    weights = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    for length in (SEQ_LEN, 2 * SEQ_LEN):
        kept, inputs = dict[int, torch.UntypedStorage](), list[tuple[Any, Any]]()
        hook = blocks[number].register_forward_pre_hook(
            lambda _, args, named, inputs=inputs: inputs.append((args, named)), with_kwargs=True
        )
        with torch.no_grad():
            model(torch.zeros(1, length, dtype=torch.long), use_cache=False)
        hook.remove()
        (args, named), beside = inputs[0], set[int]()
        hidden = args[0].detach().requires_grad_()
        for value in (part for each in named.values() for part in (each if isinstance(each, tuple) else (each,))):
            beside |= {value.untyped_storage().data_ptr()} if isinstance(value, torch.Tensor) else set()

        def keep(tensor: torch.Tensor, kept: Any = kept, beside: Any = beside) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights | beside:
                kept[storage.data_ptr()] = storage
            return tensor

        with saved_tensors_hooks(keep, lambda each: each), FlopCounterMode(display=False) as counter:
            result = blocks[number](hidden, *args[1:], **named)
        del result
        found.append((sum(each.nbytes() for each in kept.values()), counter.get_total_flops()))
    (first, flops), (second, more_flops) = found
    return (second - first) / SEQ_LEN, (more_flops - flops) / SEQ_LEN


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2", "lfm3", "bamba"])
def test_a_real_block_keeps_and_computes_what_its_trace_says(family, traces):
    trace = traces[family]
    number = next(i for i, kind in enumerate(trace.shape.block_kinds) if trace.kinds[kind].mixers)
    described = trace.kinds[trace.shape.block_kinds[number]]
    kept, flops = measure_block(family, number)
    state = described.mixers[0]
    said = count_said(described, 4)
    assert said == pytest.approx(kept, rel=0.02)
    matmuls = 2 * sum(w.numel for w in described.block_weights if w.role == "matrix")
    assert matmuls + sum(each.flops + each.exact_flops for each in described.mixers) == pytest.approx(flops, rel=0.02)
    assert sum(state.kept) > 0 and state.moves[0] > 0 and sum(state.in_backward) > 0


def test_states_go_to_a_file_and_back(traces):
    trace = traces["falcon_h1"]
    again = parse_trace(json.loads(trace.dumps()), "model.json")
    assert again.kinds == trace.kinds and isinstance(again.kinds[0].mixers[0].kept, TokenElements)
    entries = [entry for each in again.kinds[0].mixers for entry in each.record(PLAIN)]
    assert sum(each.width for entry in entries for each in entry.saves) > 0


def test_a_model_with_states_is_planned_without_tp_and_cp(traces, tmp_path, capsys):
    file = tmp_path / "model.json"
    file.write_text(traces["qwen3_5_text"].dumps())
    shape = read_trace(str(file)).shape
    assert find_state(shape) == "linear_attn"
    for layout, key in ((Layout(tp=2), "tp"), (Layout(cp=2), "cp")):
        (line,) = find_layout_lacks(find_engine(OWN_ENGINE, "h100-80g-sxm"), layout, shape)
        assert line == f"layout.{key}=2: linear_attn carries a state along the sequence; use {key}=1"
    job = ["--model", str(file), "--gpu", "h100-80g-sxm", "--gpus", "8", "--global-batch", "16", "--seq-len", "512"]
    assert main(["recommend", *job, "--json"]) == 0
    layouts = [each["layout"] for each in json.loads(capsys.readouterr().out)["layouts"]]
    assert layouts and all(each["tp"] == each["cp"] == 1 for each in layouts)
    assert main(["recommend", *job, "--engine", "megatron", "--fix", "tp=2"]) == 2
    assert main(["recommend", *job, "--fix", "cp=2"]) == 2


def test_flops_of_states_are_those_of_the_blocks_that_have_some(traces, tmp_path):
    file = tmp_path / "model.json"
    file.write_text(traces["qwen3_5_text"].dumps())
    shape = read_trace(str(file)).shape
    kinds = dict(shape.kinds(range(4)))
    flops = sorted(count_mixing_flops_per_token(kind, 4096) for kind in kinds)
    assert len(kinds) == 2 and flops[1] == 4 * 4 * 16 * 4096 and 0 < flops[0] < flops[1]
    assert count_parameters(shape) == sum(each.numel() for each in build("qwen3_5_text").parameters())


def test_the_trace_says_what_states_keep_and_what_is_not_split(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(read_config("lfm3")))
    assert main(["trace", str(tmp_path), "--output", str(tmp_path / "model.json")]) == 0
    said = capsys.readouterr().out
    assert "state along the sequence, of 64 elements; torch's own operations keep " in said
    assert "not split by cp: conv carries a state along the sequence" in said


def test_the_module_of_a_state_is_the_outermost_that_does_not_attend():
    assert find_mixer("mamba.conv1d.weight", ["self_attn"]) == "mamba"
    assert find_mixer("self_attn.conv.weight", ["self_attn"]) == "self_attn.conv"
    assert find_mixer("table", ["self_attn"]) == "" == find_mixer("self_attn.table", ["self_attn"])


def test_a_trace_that_misses_a_parameter_is_refused(traces):
    number = sum(each.numel() for each in build("qwen3_5_text").parameters())
    _check_parameters(traces["qwen3_5_text"], number)
    with pytest.raises(InvalidConfig, match=f"are seen to read {number:,} of its {number + 8:,} parameters"):
        _check_parameters(traces["qwen3_5_text"], number + 8)


def test_bytes_in_two_formats_give_elements_of_each():
    assert _to_elements(2 * 10 + 4 * 3, 4 * 10 + 4 * 3) == TokenElements(10, 3)
    assert _to_elements(-4, 8) == TokenElements(0, 0)
    assert _to_elements(12, 12) == TokenElements(0, 3)


def test_what_a_state_keeps_does_not_depend_on_experts(traces):
    sizes = FAMILIES["qwen3_next"][1]
    kept = set()
    for per_token in (1, 3):
        config = {**make_config("qwen3_next", **sizes | {"num_experts_per_tok": per_token}).to_dict()}
        trace = trace_config(config | {"model_type": "qwen3_next"})
        kept |= {each.kept for kind in trace.kinds for each in kind.mixers}
    assert len(kept) == 1
    (dense,) = {each.kept for kind in traces["qwen3_5_text"].kinds for each in kind.mixers}
    assert kept.pop() == pytest.approx(dense, rel=0.1)


def test_matmuls_of_a_state_are_priced_by_their_format_and_by_their_bytes(tmp_path, traces):
    file = tmp_path / "model.json"
    file.write_text(traces["qwen3_5_text"].dumps())
    gpu = find_gpu("h100-80g-sxm")
    scenario = Scenario(
        model=read_trace(str(file)).shape, batch=Batch(global_batch=8, seq_len=512),
        cluster=Cluster(gpu=gpu, num_gpus=8, gpus_per_node=8), engine=find_engine(OWN_ENGINE, gpu.name),
    )  # fmt: skip
    (state,) = {each for kind in traces["qwen3_5_text"].kinds for each in kind.mixers}
    assert state.exact_flops > 10 * state.flops > 0 and state.product_moves[0] > 0
    exact, half = replace(state, flops=0.0, exact_flops=1e6), replace(state, flops=1e6, exact_flops=0.0)
    ratio = gpu.peak_flops_per_s / (gpu.peak_fp32_flops_per_s or gpu.peak_flops_per_s)
    none = replace(state, flops=0.0, exact_flops=0.0)
    bare = {"product_moves": (0.0, 0.0)}
    assert state_s(scenario, replace(exact, **bare)) == pytest.approx(ratio * state_s(scenario, replace(half, **bare)))
    assert state_s(scenario, none) == pytest.approx(pass_s(scenario, state.product_moves[0]))
    with_state, without = (
        block_time(replace(scenario, model=kind), Layout(dp_shard=8), Kernels())
        for kind in sorted(dict(scenario.model.kinds(range(4))), key=lambda kind: not describe(kind).mixers)
    )
    assert with_state.elementwise_s > without.elementwise_s and with_state.attention_s == 0 < without.attention_s
    work = recompute_time(replace(scenario, model=next(iter(dict(scenario.model.kinds(range(1)))))),
                          Layout(dp_shard=8, recompute="selective"), Kernels(), with_state)  # fmt: skip
    assert work[0] >= with_state.elementwise_s


def test_an_adapter_freezes_what_a_state_has(traces):
    frozen = adapt(traces["qwen3_5_text"].kinds[0], Adapter())
    (state,) = frozen.mixers
    assert state.weights and not any(each.trains for each in state.weights)


def test_other_programs_hold_no_scores_where_a_state_takes_the_place_of_attention(tmp_path, traces):
    file = tmp_path / "model.json"
    file.write_text(traces["qwen3_5_text"].dumps())
    shape = read_trace(str(file)).shape
    gpu = find_gpu("h100-80g-sxm")
    scenario = Scenario(
        model=shape, batch=Batch(global_batch=8, seq_len=512),
        cluster=Cluster(gpu=gpu, num_gpus=8, gpus_per_node=8), engine=find_engine("megatron", gpu.name),
    )  # fmt: skip
    kernels = Kernels(attention="megatron-softmax")
    held = {
        bool(describe(kind).mixers): score_bytes(replace(scenario, model=kind), Layout(dp_shard=8), kernels)
        for kind, _ in shape.kinds(range(4))
    }
    assert held[True] == 0 < held[False]


class Scaled(nn.Module):
    """A feed-forward with a factor that is no vector: no token reads another one."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.up, self.down = nn.Parameter(torch.ones(1, 32)), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x * self.factor)))


def test_a_module_in_which_no_token_reads_another_one_has_no_state(tmp_path):
    model = Model()
    for block in model.blocks:
        block.mix = Scaled()
    with pytest.raises(InvalidConfig, match=r"mix\.factor is read by mul, which no plan knows"):
        describe_module(model, {"tokens": torch.zeros(1, 16, dtype=torch.long)}, tmp_path / "own.json")


def test_code_that_goes_from_token_to_token_is_measured_on_few():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 96, "state_size": 4, "intermediate_size": 64}
    trace = trace_config({**make_config("mamba", **sizes).to_dict(), "model_type": "mamba"})
    state = max(trace.kinds[0].mixers, key=lambda each: sum(each.kept))
    assert trace.whole["tp"] == "mixer carries a state along the sequence" and sum(state.kept) > 3 * 64 * 4


def test_blocks_that_share_parameters_are_refused():
    sizes = SMALL | HEADS | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 6}
    config = {**make_config("zamba", **sizes).to_dict(), "model_type": "zamba"}
    with pytest.raises(InvalidConfig, match="its blocks 2 and 4 share shared_transf"):
        trace_config(config)


def test_a_state_writes_one_entry_with_the_tensors_that_it_holds():
    state = Mixer(
        "m", "m.mixed", (("m.in_proj", 8),), 4, (("m.A", (4,)),), moves=(40.0, 60.0), kept=TokenElements(6, 2),
        in_forward=TokenElements(0, 1), in_backward=TokenElements(3, 0),
    )  # fmt: skip
    (entry,) = state.record(PLAIN)
    assert [(each.format, each.width) for each in entry.saves] == [("compute", 6), ("exact", 2)]
    assert [each.width for each in entry.forward_scratch] == [1] and [each.width for each in entry.scratch] == [3]
    assert entry.moves == (10.0, 15.0) and entry.weights == ("m.A",)


class Pairs(nn.Module):
    """A convolution, and scores of all pairs of tokens without softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(32, 32, 4, groups=32, padding=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return torch.tanh(mixed @ x.transpose(1, 2)) @ x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(32), Pairs(), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.mix(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(50, 32), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_scores_of_pairs_of_tokens_are_no_state(tmp_path):
    with pytest.raises(InvalidConfig, match="a token of mix keeps more in a longer sequence, as one of attention does"):
        describe_module(Model(), {"tokens": torch.zeros(1, 16, dtype=torch.long)}, tmp_path / "own.json")
