"""Attention with scores in memory, and passes of a model's own code, in predictions of traced models."""

from dataclasses import replace

import pytest
from toys import TOYS, make_config

from dtlayout.costmodel.attention import attention_s, flash_s, name_kept, score_traffic_s, scores_of, weigh_scores
from dtlayout.costmodel.compute import block_time
from dtlayout.costmodel.engine import OWN_ENGINE, find_engine
from dtlayout.costmodel.fsdp2.memory import fullest_finder
from dtlayout.costmodel.fsdp2.sizes import Sizes
from dtlayout.costmodel.operators import pass_s
from dtlayout.costmodel.recomputation import recompute_time
from dtlayout.costmodel.scenario import Scenario
from dtlayout.costmodel.traffic import count_eager_norms, elementwise_bytes, rank_tape
from dtlayout.models.counting import count_attention_flops_per_token
from dtlayout.models.hf_config import parse_hf
from dtlayout.models.scores import NONE
from dtlayout.models.traced import read_trace
from dtlayout.pipelining.partition import StageSlice
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import Precision
from dtlayout.spec.recompute import Recompute
from dtlayout.tracing.trace import trace_config

SEQ_LEN, HEADS = 256, 4
FLASH, MATH = Kernels(attention="sdpa-flash", norm="fused"), Kernels(attention="sdpa-math", norm="fused")
TOKENS = SEQ_LEN


def make_dict(name: str) -> dict:
    kind, keys = TOYS[name]
    return {**make_config(kind, **keys).to_dict(), "model_type": kind}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, ModelShape]:
    folder, found = tmp_path_factory.mktemp("traces"), {}
    for name in ("llama", "gemma2", "bloom", "mistral", "phi"):
        file = folder / f"{name}.json"
        file.write_text(trace_config(make_dict(name), name).dumps())
        found[name] = read_trace(str(file)).shape
    return found


def make_scenario(model: ModelShape, engine: str = OWN_ENGINE, **precision: str) -> Scenario:
    cluster = Cluster(gpu=find_gpu("h100-80g-sxm"), num_gpus=4, gpus_per_node=4)
    return Scenario(
        model=model, batch=Batch(global_batch=4, seq_len=SEQ_LEN), cluster=cluster,
        engine=find_engine(engine, cluster.gpu.name), precision=Precision(**precision),
    )  # fmt: skip


def test_a_block_keeps_its_scores_in_bf16_and_in_fp32(models):
    for compute, kept in (("bfloat16", 10), ("float32", 8)):
        scenario = make_scenario(models["gemma2"], compute=compute)
        own = Sizes(scenario, Layout(), FLASH)
        scores = scores_of(scenario, FLASH)
        assert scores.kept == kept
        plain = Sizes(without_scores(scenario), Layout(), FLASH)
        attention = scenario_attention(scenario)
        element = TOKENS * (2 if compute == "bfloat16" else 4)
        copied = element * (2 * attention.query_width + attention.output_width - attention.input_width)
        rows = TOKENS * 4 * HEADS
        pairs = TOKENS * SEQ_LEN
        assert own.block - plain.block == pairs * (HEADS * kept + scores.pair_kept) + copied - rows
        half = Sizes(scenario, Layout(tp=2), FLASH)
        assert half.attention == pytest.approx((own.attention + pairs * scores.pair_kept) / 2)


def scenario_attention(scenario: Scenario):
    return read_trace(scenario.model.trace).kinds[0].attention


def without_scores(scenario: Scenario) -> Scenario:
    """The scenario whose trace says nothing of scores."""
    from pathlib import Path

    trace = read_trace(scenario.model.trace)
    kinds = tuple(
        replace(
            kind, caps_logits=False,
            block=tuple(replace(each, scores=()) if hasattr(each, "scores") else each for each in kind.block),
        )
        for kind in trace.kinds
    )  # fmt: skip
    file = Path(scenario.model.trace).with_suffix(".plain.json")
    file.write_text(replace(trace, kinds=kinds).dumps())
    return replace(scenario, model=read_trace(str(file)).shape)


def test_a_prediction_of_several_kinds_of_blocks_holds_scores_and_masks(models):
    """Full recomputation holds the scores of one block, none those of all."""
    scenario = make_scenario(models["gemma2"])
    assert len({*scenario.model.block_kinds}) == 2
    num_layers = scenario.model.num_layers
    stage = [StageSlice(range(num_layers), embedding=True, head=True)]

    def peak(of: Scenario, recompute: str) -> float:
        layout = Layout(dp_shard=4, zero=3, recompute=recompute)
        return sum(fullest_finder(of, layout, FLASH, stage)(0))

    scores, pairs = scores_of(scenario, FLASH), TOKENS * SEQ_LEN
    plain = without_scores(scenario)
    all_kept = num_layers * pairs * (HEADS * scores.kept + scores.pair_kept)
    assert peak(scenario, "none") - peak(plain, "none") >= all_kept
    added = peak(scenario, "full") - peak(plain, "full")
    one = pairs * HEADS * (scores.kept + scores.in_backward)
    assert 0.9 * one < added < all_kept


def test_a_mask_is_held_once_for_all_blocks(models):
    own = Sizes(make_scenario(models["mistral"]), Layout(), FLASH)
    assert own.mask == TOKENS * SEQ_LEN and not own.keeps_mask
    assert Sizes(make_scenario(models["llama"]), Layout(), FLASH).mask == 0


def test_a_softcap_of_logits_keeps_one_more_tensor_unless_gradients_come_in_forward(models):
    scenario = make_scenario(models["gemma2"])
    for loss, more in (("chunked", 1), ("linear", 0)):
        kernels = replace(FLASH, loss=loss)
        own, plain = (Sizes(each, Layout(), kernels) for each in (scenario, without_scores(scenario)))
        assert own.capped == more * own.logits and plain.capped == 0
        assert own.loss - plain.loss == own.capped


def test_time_of_scores_in_memory_is_that_of_matmuls_and_passes(models):
    scenario = make_scenario(models["bloom"])
    moved_s, moved_again_s = score_traffic_s(scenario, Layout(), FLASH)
    scores = TOKENS * SEQ_LEN * HEADS
    assert moved_s == pytest.approx(pass_s(scenario, 24 * scores)) and moved_again_s == moved_s
    forward_s, backward_s = attention_s(scenario, Layout(), FLASH)
    assert backward_s - moved_again_s == pytest.approx(2 * (forward_s - moved_s))
    assert attention_s(scenario, Layout(), MATH) == (forward_s, backward_s)  # whatever kernels.attention says
    other = make_scenario(models["bloom"], "torchtitan")
    assert scores_of(other, FLASH) == NONE and score_traffic_s(other, Layout(), FLASH) == (0, 0)


def test_a_kernel_with_a_mask_computes_what_the_mask_hides(models):
    scenario = make_scenario(models["mistral"])
    flops = TOKENS * count_attention_flops_per_token(scenario.model, SEQ_LEN)
    forward_s, backward_s = attention_s(scenario, Layout(), FLASH)
    assert forward_s == pytest.approx(flash_s(scenario, "sdpa-efficient", 2 * flops))
    assert backward_s == pytest.approx(2.5 * forward_s)


def test_batched_matmuls_are_kept_as_attention_or_as_matmuls(models):
    scenario = make_scenario(models["gemma2"])
    assert [name_kept(scenario, each) for each in (FLASH, MATH)] == ["matmuls", "attention"]
    assert name_kept(make_scenario(models["llama"]), FLASH) == "attention"
    block = block_time(scenario, Layout(), FLASH)
    again = {
        word: recompute_time(scenario, Layout(recompute=f"keep-{word}"), FLASH, block)[0]
        for word in ("attention", "matmuls")
    }
    assert again["attention"] - block.attention_s > 0
    assert again["matmuls"] < again["attention"]
    sizes, products = Sizes(scenario, Layout(), FLASH), 2 * TOKENS * SEQ_LEN * HEADS
    kept = [sizes.list_kept(Recompute.parse(f"keep-{word}")).get("attention", 0) for word in ("attention", "matmuls")]
    assert kept == [0, products]


def test_what_explain_says_is_what_a_block_holds(models):
    scenario = make_scenario(models["gemma2"])
    scores = TOKENS * SEQ_LEN * HEADS
    assert weigh_scores(scenario, Layout(), FLASH) == (10 * scores, 16 * scores)
    assert weigh_scores(scenario, Layout(tp=2), FLASH) == (5 * scores, 8 * scores)
    assert weigh_scores(make_scenario(models["llama"]), Layout(), FLASH) == (0, 0)


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_passes_of_a_llama_that_was_traced_are_those_of_eager_kernels(models, compute):
    """The trace counts the passes of the family's own code, whatever kernels.norm and swiglu say."""
    described = make_scenario(parse_hf(make_dict("llama")), compute=compute)
    traced = make_scenario(models["llama"], compute=compute)
    eager = replace(FLASH, norm="eager")
    expected, found = (elementwise_bytes(each, Layout(), eager) for each in (described, traced))
    if compute == "bfloat16":
        assert found == expected
    assert found == elementwise_bytes(traced, Layout(), FLASH) and found > elementwise_bytes(described, Layout(), FLASH)
    assert count_eager_norms(traced, FLASH, rank_tape(traced, FLASH)) == 2
    compiled = replace(FLASH, compile="blocks")
    assert elementwise_bytes(traced, Layout(), compiled) == elementwise_bytes(described, Layout(), compiled)
    assert count_eager_norms(traced, compiled, rank_tape(traced, compiled)) == 0


def test_an_activation_of_many_passes_costs_more_than_one_of_one(models):
    scenario = make_scenario(models["phi"])  # its gelu is written out
    (entry,) = (each for each in rank_tape(scenario) if each.kind == "activation")
    assert entry.moves[0] > 30
    fewer = elementwise_bytes(scenario, Layout(), replace(FLASH, compile="blocks"))
    more = elementwise_bytes(scenario, Layout(), FLASH) - fewer
    assert more >= 3 * (entry.moves[0] - 4) * entry.makes[0].width
