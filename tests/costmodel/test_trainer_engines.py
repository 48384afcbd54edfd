"""Programs beneath Hugging Face's Trainer: what lies where it is, what is added up whole, and which buckets it has."""

from dataclasses import replace
from typing import Any

import pytest

from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.engine_rules import find_layout_lacks
from dtlayout.costmodel.estimate import Estimate, Estimator
from dtlayout.costmodel.scenario import Scenario, count_reductions
from dtlayout.models.families import describe
from dtlayout.models.presets import find_preset
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import AdamW
from dtlayout.spec.precision import Precision

MODEL = find_preset("llama2-7b")
ADAPTED = replace(MODEL, adapter=Adapter(rank=16))
KERNELS = Kernels(norm="eager", loss="eager")
TABLES = 2 * 1024 * 128 * 4
"""Bytes of RoPE's tables."""
BF16 = Precision(params="bfloat16", compute="bfloat16", reduce="bfloat16")


def count(model: ModelShape) -> tuple[int, int]:
    """Trained and frozen parameters of a model."""
    described = describe(model)
    weights = [*described.before_blocks, *described.after_blocks, described.head]
    weights += [*describe(model).block_weights] * model.num_layers
    trained = sum(each.numel for each in weights if each.trains)
    return trained, sum(each.numel for each in weights) - trained


def scenario_of(engine: str, layout: Layout, model: ModelShape = MODEL, steps: int = 1, **others: Any) -> Scenario:
    """The scenario of a layout, with so many microbatches."""
    cluster = Cluster(gpu=find_gpu("h200-141g-sxm"), num_gpus=layout.world_size, gpus_per_node=8)
    batch = Batch(global_batch=layout.dp * layout.micro_batch * steps, seq_len=1024)
    return Scenario(model=model, batch=batch, cluster=cluster, engine=find_engine(engine, cluster.gpu.name), **others)


def predict(engine: str, layout: Layout, model: ModelShape = MODEL, steps: int = 1, **others: Any) -> Estimate:
    """The estimate of a layout, with so many microbatches and all blocks recomputed."""
    scenario = scenario_of(engine, layout, model, steps, **others)
    return Estimator(scenario).estimate(replace(layout, recompute="full"), KERNELS)


@pytest.mark.parametrize("engine", ["accelerate", "deepspeed"])
def test_frozen_weights_of_one_gpu_are_there_once(engine):
    trained, frozen = count(ADAPTED)
    assert trained == 39_976_960 and frozen == 6_738_415_616
    for zero in (1, 2):
        held = predict(engine, Layout(zero=zero), ADAPTED).memory[0].parameters
        assert held == 2 * frozen + (4 + 2) * trained + TABLES  # masters, and copies in bf16
    copied = predict("dtlayout", Layout(zero=1), ADAPTED).memory[0].parameters
    assert copied == 4 * frozen + (4 + 2) * trained + TABLES


def test_weights_that_are_trained_in_bf16_are_not_copied_where_nobody_shares_them():
    trained, _ = count(MODEL)
    for layout in (Layout(), Layout(dp_replicate=2)):
        held = predict("accelerate", layout, precision=BF16).memory[0]
        assert held.parameters == 2 * trained + TABLES and held.optimizer == pytest.approx(4 * trained, rel=1e-3)
    shared = predict("accelerate", Layout(dp_shard=2, zero=2), precision=BF16).memory[0]
    assert shared.parameters == pytest.approx(2 * trained * 1.5, rel=1e-3)  # a shard, and the whole


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_below_3_has_frozen_weights_whole_on_each_gpu_and_gathers_none(zero):
    trained, frozen = count(ADAPTED)
    layout = Layout(dp_shard=4, zero=zero)
    own, theirs = predict("deepspeed", layout, ADAPTED), predict("accelerate", layout, ADAPTED)
    assert own.memory[0].parameters == pytest.approx(2 * frozen + (4 / 4 + 2) * trained, rel=1e-3)
    assert theirs.memory[0].parameters == pytest.approx(2 * frozen * 1.25 + (4 / 4 + 2) * trained, rel=1e-3)
    assert own.time.dp < theirs.time.dp
    third = [
        predict(engine, replace(layout, zero=3), ADAPTED).memory[0].parameters for engine in ("deepspeed", "accelerate")
    ]
    assert third[0] == third[1] < 0.4 * own.memory[0].parameters


def test_frozen_weights_stay_on_the_device_where_the_host_has_the_state_of_zero_2():
    trained, frozen = count(ADAPTED)
    offloaded = predict("deepspeed", Layout(dp_shard=4, zero=2, offload="optimizer"), ADAPTED)
    assert offloaded.memory[0].parameters == pytest.approx(2 * frozen + 2 * trained, rel=1e-3)
    assert offloaded.host_bytes[0] == pytest.approx((4 + 4 + 8) * trained / 4, rel=1e-3)


@pytest.mark.parametrize("zero", [2, 3])
def test_fsdp_adds_gradients_of_several_microbatches_up_whole(zero):
    trained, _ = count(MODEL)
    layout = Layout(dp_shard=8, zero=zero)
    precision = Precision(reduce="bfloat16")
    one, four = (predict("accelerate", layout, steps=steps, precision=precision) for steps in (1, 4))
    assert one.memory[0].gradients < 0.3 * 2 * trained
    assert four.memory[0].gradients > 0.9 * 2 * trained
    several = predict("deepspeed", layout, steps=4, precision=precision)
    assert several.memory[0].gradients < 0.3 * 2 * trained + 4 * trained / 8
    if zero == 3:  # what was gathered is dropped after each backward
        assert four.memory[0].parameters == one.memory[0].parameters
    assert four.time.dp <= several.time.dp
    reductions = [count_reductions(scenario_of(engine, layout), layout, 4) for engine in ("accelerate", "deepspeed")]
    assert reductions == [1, 4]


def test_kempnerforge_holds_the_sum_of_microbatches_whole_and_parameters_once_where_nobody_shares_them():
    trained, _ = count(MODEL)
    precision = Precision(params="bfloat16")
    layout = Layout(dp_shard=8, zero=3)
    one, four = (predict("kempnerforge", layout, steps=steps, precision=precision) for steps in (1, 4))
    assert four.memory[0].gradients > 0.9 * 4 * trained > 10 * one.memory[0].gradients
    assert four.memory[0].parameters == one.memory[0].parameters
    assert count_reductions(scenario_of("kempnerforge", layout), layout, 4) == 1
    alone = predict("kempnerforge", Layout(), precision=precision)
    assert alone.memory[0].parameters == 2 * trained + TABLES


def test_ddp_has_buckets_of_all_gradients():
    trained, _ = count(MODEL)
    one, two = (predict("accelerate", Layout(dp_replicate=n)).memory[0] for n in (1, 2))
    assert two.buffers - one.buffers == pytest.approx(4 * trained, rel=0.05)
    adapted = [predict("accelerate", Layout(dp_replicate=n), ADAPTED).memory[0].buffers for n in (1, 2)]
    assert adapted[1] - adapted[0] < 0.2e9


def test_what_transformers_and_deepspeed_lack_is_refused():
    def lacks(engine: str, layout: Layout) -> list[str]:
        return find_layout_lacks(find_engine(engine, "h100-80g-sxm"), layout, MODEL)

    assert lacks("accelerate", Layout(tp=2, dp_shard=2)) == [
        "layout.sequence_parallel=true is nothing that accelerate has; use layout.sequence_parallel=false"
    ]
    assert not lacks("accelerate", Layout(tp=2, cp=2, cp_method="gather", dp_shard=2, zero=3, sequence_parallel=False))
    assert not lacks("deepspeed", Layout(dp_replicate=4)) and not lacks("deepspeed", Layout(dp_shard=4, offload="disk"))
    refused = {
        "layout.dp_replicate=2 beside dp_shard=2": Layout(dp_replicate=2, dp_shard=2),
        "layout.cp=2": Layout(cp=2), "layout.recompute=every-2": Layout(recompute="every-2"),
    }  # fmt: skip
    for asked, layout in refused.items():
        assert any(each.startswith(f"{asked} is nothing that deepspeed has") for each in lacks("deepspeed", layout))


def test_moments_in_int8_take_a_quarter_but_for_those_of_the_embedding():
    trained, _ = count(MODEL)
    embedding = MODEL.vocab_size * MODEL.hidden_size
    exact, coarse = (
        predict("accelerate", Layout(), optimizer=AdamW(state_format=kept)).memory[0].optimizer for kept in ("", "int8")
    )
    assert exact == pytest.approx(8 * trained, rel=1e-6)
    assert coarse == pytest.approx((2 + 8 / 256) * (trained - embedding) + 8 * embedding, rel=1e-6)
