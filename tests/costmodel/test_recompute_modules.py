"""Modules that Megatron computes again: what each frees and costs, from the shapes of its tensors."""

from dataclasses import replace
from typing import Any

import pytest
from small import MODEL, ROUND, US
from small import scenario as round_scenario

from dtlayout.costmodel.compute import block_time
from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.engine_features import Features
from dtlayout.costmodel.engine_rules import check_recompute, find_layout_lacks
from dtlayout.costmodel.estimate import estimate
from dtlayout.costmodel.memory import KeptBytes, block_bytes_per_token
from dtlayout.costmodel.recomputation import recompute_time
from dtlayout.costmodel.recompute_modules import MODULES, find_again, find_missing, list_parts
from dtlayout.costmodel.scenario import Scenario
from dtlayout.costmodel.traffic import rank_tape
from dtlayout.models.presets import PRESETS
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts, LatentAttention, ModelShape
from dtlayout.spec.precision import Precision
from dtlayout.spec.recompute import Recompute

H, F, HEADS = 1000, 2000, 10
E, K, G, D = 8, 2, 500, 1000
"""Experts, those of a token, width of each and of the shared one."""
Q_RANK, KV_RANK, ROPE, WIDTH, VALUE = 300, 100, 32, 96, 64
MIXTURE = replace(
    MODEL, num_kv_heads=HEADS, head_dim=WIDTH,
    experts=Experts(number=E, per_token=K, ffn_size=G, shared_ffn_size=D),
    latent_attention=LatentAttention(query_rank=Q_RANK, kv_rank=KV_RANK, rope_width=ROPE, value_width=VALUE),
)  # fmt: skip
"""Latent attention and experts, one of them shared."""
ROUTED = replace(MIXTURE, experts=replace(MIXTURE.experts, shared_ffn_size=0), latent_attention=None, head_dim=100)
"""Ordinary attention and experts, none of them shared."""
SELECTIVE = Layout(recompute="selective")
QKV = HEADS * (2 * WIDTH + VALUE)
"""Elements of a token's queries, keys and values in latent attention."""
FREED: dict[str, tuple[ModelShape, float, float]] = {
    "core_attn": (MODEL, 4 * HEADS, 4 * HEADS),  # a statistic for each row of scores, in fp32
    "layernorm": (MIXTURE, 2 * 2 * H, 2 * H),  # results of both norms, of which one half of the block has one
    "mla_up_proj": (MIXTURE, 2 * (QKV + Q_RANK + KV_RANK - ROPE), 2 * (QKV + Q_RANK + KV_RANK)),
    "mlp": (MODEL, 2 * (H + 3 * F), 2 * (H + 3 * F)),  # the norm's result, gate, up and their product
    "moe": (MIXTURE, 2 * (K * (H + 3 * G) + 3 * D), 2 * (K * (H + 3 * G) + 3 * D)),
    "moe_act": (MIXTURE, 2 * K * G, 2 * K * G),
    "shared_experts": (MIXTURE, 2 * 3 * D, 2 * 3 * D),
}
"""Module → model, bytes of a token that go after forward, and those that are there again in backward."""
PASS, ACTIVATION = 60 / 4, 12
"""Bytes that a norm, and an activation, move for each element, forward and backward."""


def scenario(model: ModelShape, *modules: str, **features) -> Scenario:
    features = {"fuses_swiglu": True, **features}
    found = round_scenario(features=Features(recompute_modules=modules or ("core_attn",), **features))
    return replace(found, model=model)


def kept(model: ModelShape, *modules: str, layout: Layout = SELECTIVE, **features) -> KeptBytes:
    return block_bytes_per_token(scenario(model, *modules, **features), layout, Kernels())


def time_again(model: ModelShape, *modules: str, layout: Layout = SELECTIVE) -> tuple[float, float]:
    setting = scenario(model, *modules)
    return recompute_time(setting, layout, Kernels(), block_time(setting, layout, Kernels()))


def matmul_us(rows: float, outputs: float, inputs: float) -> float:
    """2·m·n·k FLOPs at half of 100 TFLOP/s, or the bytes of all three matrices at 1 TB/s."""
    moved = 2 * (rows * outputs + outputs * inputs + rows * inputs)
    return max(2 * rows * outputs * inputs / 50e12, moved / 1e12) / US


@pytest.mark.parametrize("name", MODULES)
def test_a_module_frees_what_its_tensors_hold(name):
    model, freed, again = FREED[name]
    found = kept(model, name)
    assert found.whole - found.kept == pytest.approx(freed)
    assert found.again == pytest.approx(again)
    assert found.whole == kept(model, name, layout=Layout()).whole


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_a_model_lacks_frees_nothing_and_costs_nothing(name):
    for model in (MODEL, ROUTED, MIXTURE):
        if find_missing([name], list_parts(model)):
            found = kept(model, name)
            assert (found.kept, found.again) == (found.whole, 0)
            assert time_again(model, name) == (0, 0)


def test_modules_by_the_parts_of_models_that_have_them():
    lacking = {model.name: find_missing(MODULES, list_parts(model)) for model in (MODEL, replace(ROUTED, name="r"))}
    assert lacking == {
        "round": {
            "layernorm": "experts or latent attention", "mla_up_proj": "latent attention", "moe": "experts",
            "moe_act": "experts", "shared_experts": "shared expert",
        },
        "r": {
            "mla_up_proj": "latent attention", "mlp": "dense feed-forward", "shared_experts": "shared expert",
        },
    }  # fmt: skip
    first_dense = replace(MIXTURE, experts=replace(MIXTURE.experts, dense_layers=1))
    assert not find_missing(MODULES, list_parts(first_dense))


def test_a_norm_inside_the_matmul_behind_it_is_no_module_of_its_own():
    """Before a router, and before narrow vectors, Transformer Engine computes norms apart."""
    assert [kept(m, "layernorm").whole - kept(m, "layernorm").kept for m in (MODEL, ROUTED, MIXTURE)] == pytest.approx(
        [0, 2 * H, 2 * 2 * H]
    )
    dense = MIXTURE.without_experts
    assert kept(dense, "layernorm").whole - kept(dense, "layernorm").kept == pytest.approx(2 * H)
    assert kept(dense, "mlp").whole - kept(dense, "mlp").kept == pytest.approx(2 * (H + 3 * F))


def test_modules_in_one_another_free_a_tensor_once():
    def freed(*modules: str) -> float:
        found = kept(MIXTURE, *modules)
        return found.whole - found.kept

    assert freed("moe", "moe_act", "shared_experts") == freed("moe")
    assert freed("moe_act", "shared_experts", "layernorm") == pytest.approx(2 * (K * G + 3 * D + 2 * H))
    assert freed("moe", "layernorm") == pytest.approx(freed("moe") + 2 * 2 * H)


def test_both_halves_of_a_block_are_there_again_one_after_the_other():
    found = kept(MIXTURE, "core_attn", "layernorm", "mla_up_proj", "moe_act", "shared_experts")
    attention, feed_forward = 4 * HEADS + 2 * (H + QKV + Q_RANK + KV_RANK), 2 * (H + K * G + 3 * D)
    assert found.again == pytest.approx(max(attention, feed_forward))
    assert found.whole - found.kept == pytest.approx(attention + feed_forward - 2 * ROPE)


def test_tp_splits_what_modules_free():
    """Inside branches over t; norms' results over t under sequence parallelism, and the rotated keys of all heads on
    each rank."""
    tp = Layout(tp=2, recompute="selective", sequence_parallel=False)
    by_sequence = replace(tp, sequence_parallel=True)
    expected = {
        ("layernorm", tp): 2 * 2 * H, ("layernorm", by_sequence): 2 * H, ("moe_act", tp): K * G,
        ("mla_up_proj", tp): QKV + 2 * (Q_RANK + KV_RANK - ROPE),
        ("mla_up_proj", by_sequence): QKV + (Q_RANK + KV_RANK) - 2 * ROPE,
    }  # fmt: skip
    for (name, layout), freed in expected.items():
        found = kept(MIXTURE, name, layout=layout)
        assert found.whole - found.kept == pytest.approx(freed), (name, layout)


def test_in_fp8_a_module_frees_inputs_of_matmuls_as_they_are_held():
    """Narrow vectors and the product in fp8, a byte each; queries, keys and values in bf16."""

    def freed(model: ModelShape, name: str) -> float:
        setting = replace(scenario(model, name, keeps_cast_inputs=True), precision=Precision(matmuls="fp8-tensorwise"))
        found = block_bytes_per_token(setting, SELECTIVE, Kernels())
        return found.whole - found.kept

    assert freed(MIXTURE, "mla_up_proj") == pytest.approx(2 * QKV + Q_RANK + KV_RANK - 2 * ROPE)
    assert freed(MODEL, "mlp") == pytest.approx(H + 2 * 2 * F + F)


def test_an_unfused_activation_is_freed_with_its_steps():
    """silu(gate) too, which lies between gate and the product; gate and up stay for the activation's own backward."""
    found = kept(ROUTED, "moe_act", fuses_swiglu=False)
    assert found.whole - found.kept == pytest.approx(2 * K * 2 * G)


def test_a_module_runs_its_forward_once_more():
    """1000 tokens of 1000 elements: matmuls by their FLOPs, passes a third of their bytes, at 1 byte a picosecond."""
    up_us = matmul_us(1000, HEADS * WIDTH, Q_RANK) + matmul_us(1000, HEADS * (WIDTH - ROPE + VALUE), KV_RANK)
    rope = ROUND.rope_traffic_bytes * HEADS * ROPE
    shared_us = 3 * matmul_us(1000, D, H) + ACTIVATION * D / 1000 / 3
    routed_us = 3 * E * matmul_us(1000 * K / E, G, H) + ACTIVATION * K * G / 1000 / 3
    expected_us = {
        "core_attn": (MODEL, 40),
        "layernorm": (MIXTURE, 2 * PASS * H / 1000 / 3),
        "mla_up_proj": (MIXTURE, up_us + (PASS * (Q_RANK + KV_RANK) + rope) / 1000 / 3),
        "mlp": (MODEL, 3 * 80 + (PASS * H + ACTIVATION * F) / 1000 / 3),
        # Beside its experts a router, and k copies of each token on their way there and back.
        "moe": (MIXTURE, routed_us + shared_us + matmul_us(1000, E, H) + 2 * 2 * (1 + K) * H / 1000),
        "moe_act": (MIXTURE, ACTIVATION * K * G / 1000 / 3),
        "shared_experts": (MIXTURE, shared_us),
    }
    assert expected_us.keys() == MODULES.keys()
    for name, (model, us) in expected_us.items():
        assert time_again(model, name) == pytest.approx((us * US, 0)), name


def test_modules_cost_what_each_of_them_does_but_those_inside_others():
    alone = {name: time_again(MIXTURE, name)[0] for name in MODULES}
    together = time_again(MIXTURE, "core_attn", "layernorm", "mla_up_proj", "moe_act")[0]
    assert together == pytest.approx(sum(alone[name] for name in ("core_attn", "layernorm", "mla_up_proj", "moe_act")))
    assert time_again(MIXTURE, "moe", "moe_act", "shared_experts")[0] == pytest.approx(alone["moe"])


def test_modules_send_again_what_their_branches_and_their_experts_send():
    layout = Layout(tp=2, recompute="selective")
    dense, mixture = (block_time(scenario(model), layout, Kernels()) for model in (MODEL, MIXTURE))
    assert time_again(MODEL, "mlp", layout=layout)[1] == pytest.approx(dense.forward_tp_s / 2)  # one branch of two
    assert time_again(MIXTURE, "shared_experts", layout=layout)[1] == pytest.approx(mixture.forward_tp_s / 2)
    assert time_again(MIXTURE, "mla_up_proj", layout=layout)[1] == time_again(MIXTURE, "moe_act", layout=layout)[1] == 0
    spread = Layout(dp_shard=8, ep=4, recompute="selective")
    sent_s = block_time(scenario(MIXTURE), spread, Kernels()).forward_ep_s
    assert sent_s > 0
    assert time_again(MIXTURE, "moe", layout=spread)[1] == pytest.approx(sent_s)
    assert time_again(MIXTURE, "moe_act", layout=spread)[1] == 0


def test_a_router_that_is_computed_again_makes_the_host_read_again():
    def routes_again(*modules: str, recompute: str = "selective", **features: Any) -> bool:
        return scenario(MIXTURE, *modules, **features).engine.features.routes_again(Recompute.parse(recompute))

    assert routes_again("moe") and routes_again(recompute="full")
    assert not routes_again("moe_act") and not routes_again("moe", recompute="none")
    assert not routes_again("moe", checkpointing="torch")
    settings = [scenario(MIXTURE, name) for name in ("moe", "shared_experts")]
    waiting = [
        replace(each, engine=each.engine.with_constants(routing_wait_s=0.03, expert_wait_s=0.0)) for each in settings
    ]
    moe_s, shared_s = (
        estimate(one, replace(SELECTIVE, dp_shard=8, ep=2), Kernels()).time.host
        - estimate(other, replace(SELECTIVE, dp_shard=8, ep=2), Kernels()).time.host
        for one, other in zip(waiting, settings, strict=True)
    )
    assert moe_s / shared_s == pytest.approx(4 / 3, rel=1e-3)  # a third of the wait in forward, so three and a fourth


def test_a_step_holds_less_and_takes_longer_by_its_modules_and_others_are_as_they_were():
    layout = Layout(dp_shard=8, recompute="selective")
    usual, more = (estimate(scenario(MIXTURE, *each), layout, Kernels()) for each in ((), ("core_attn", "moe_act")))
    tokens, layers = 1000, MIXTURE.num_layers
    freed = 2 * K * G * tokens * layers
    # One block is computed again at a time, half by half: the activation beside it, in the place of 40 bytes.
    assert usual.memory.peak_bytes - more.memory.peak_bytes == pytest.approx(freed - tokens * (2 * K * G - 4 * HEADS))
    assert more.time.recompute > usual.time.recompute > 0
    for recompute in ("none", "full", "every-2"):
        same = replace(layout, recompute=recompute)
        of_both = [estimate(scenario(MIXTURE, *each), same, Kernels()) for each in ((), ("moe", "mla_up_proj"))]
        assert of_both[0].time == of_both[1].time and of_both[0].memory == of_both[1].memory


@pytest.mark.parametrize(
    ("modules", "model", "problem"),
    [
        (
            ("mla_up_proj", "mlp"),
            "llama3.1-8b",
            "recompute_modules=mla_up_proj needs latent attention, and llama3.1-8b",
        ),
        (("moe_act",), "qwen3-8b", "recompute_modules=moe_act needs experts, and qwen3-8b has none; leave moe_act out"),
    ],
)
def test_modules_that_megatron_refuses_for_a_model_are_refused_where_it_would_compute_them_again(
    modules, model, problem
):
    engine = find_engine("megatron", "h100-80g-sxm").told({"recompute_modules": "+".join(modules)})
    (found,) = find_layout_lacks(engine, SELECTIVE, PRESETS[model])
    assert found.startswith(problem)
    assert not find_layout_lacks(engine, Layout(recompute="full"), PRESETS[model])
    assert not check_recompute(engine, "selective", MIXTURE)


def test_other_recomputation_than_selective_names_the_modules_that_there_are():
    engine = find_engine("megatron", "h100-80g-sxm")
    for told, words in (({}, "attention alone"), ({"recompute_modules": "mlp+core_attn"}, "core_attn and mlp")):
        (found,) = find_layout_lacks(engine.told(told), Layout(recompute="keep-attention"), MODEL)
        assert found.endswith(f"use selective, which computes {words} again, or full")


def test_places_of_modules_are_entries_of_the_tape():
    tape = rank_tape(scenario(MIXTURE), Kernels())
    kinds = {name: [tape[place].kind for place in sorted(find_again(tape, [name]).places)] for name in MODULES}
    assert kinds == {
        "core_attn": ["attention"], "layernorm": ["norm", "norm"],
        "mla_up_proj": ["norm", "matmul", "norm", "matmul", "rope"], "mlp": [],
        "moe": ["matmul", "dispatch", "experts", "activation", "experts", "combine", *["matmul"] * 2, "activation",
                "matmul"],
        "moe_act": ["activation"], "shared_experts": ["matmul", "matmul", "activation", "matmul"],
    }  # fmt: skip
