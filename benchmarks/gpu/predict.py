"""Predictions of the cost model for training cells, on the GPU that was found. Imports no torch."""

from dataclasses import replace

from benchmarks.gpu.cells import Training
from benchmarks.gpu.rows import Prediction
from dtlayout.costmodel.cache_keys import StageClass, StageLayout, key_of
from dtlayout.costmodel.engine import OWN_ENGINE, Engine, find_engine_on
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.memory import count_stage_experts, count_stage_parameters, rank_estimator
from dtlayout.costmodel.scenario import Scenario
from dtlayout.costmodel.update import find_update, update_times
from dtlayout.spec.cluster import Cluster, Gpu
from dtlayout.spec.optimizers import AdamW
from dtlayout.spec.recompute import Recompute


def predict(cell: Training, gpu: Gpu, engine: Engine | None = None) -> Prediction:
    """Step and peak of a cell with its kernels and its layout, by the constants of this trainer or of `engine`."""
    engine = engine or find_engine_on(OWN_ENGINE, gpu)
    if not cell.adds_in_matmuls:
        engine = replace(engine, features=replace(engine.features, adds_in_matmuls=False))
    scenario = Scenario(
        model=cell.shape,
        batch=cell.batch,
        cluster=Cluster(gpu=gpu, num_gpus=1, gpus_per_node=1),
        engine=engine,
        optimizer=AdamW(state_format=cell.state_format),
    )
    estimator = Estimator(scenario)
    if cell.num_blocks is not None:
        return _predict_blocks(cell, estimator)
    found = estimator.estimate(cell.layout, cell.kernels)
    return Prediction(
        step_time_s=found.step_time_s, peak_bytes=found.peak_bytes, capacity_bytes=estimator.capacity_bytes
    )


def _predict_blocks(cell: Training, estimator: Estimator) -> Prediction:
    """A stage without embedding and head, of which there is no layout: its work, its update and the step's rest."""
    stage, layout = cell.stage, cell.layout
    memory = rank_estimator(estimator.scenario, layout, cell.kernels, [stage])(0)
    stage_class = StageClass.of(stage, Recompute.parse(layout.recompute))
    work = estimator.layout_work(key_of(layout, StageLayout), cell.kernels).on(stage_class)
    m, n = layout.num_microbatches(cell.batch), count_stage_parameters(cell.shape, stage, layout.tp)
    of_experts = count_stage_experts(cell.shape, stage, layout.ep)
    update = find_update(estimator.scenario, layout, n, has_head=False, of_experts=of_experts)
    done = len(stage.layers), m, work.forward_s, work.backward_s
    update_s = sum(update_times(estimator.scenario, layout, update, *done))
    step_time_s = m * (work.forward_s + work.backward_s) + update_s + estimator.fixed_s(m, memory.total)
    peak_bytes = memory.total + cell.given_bytes
    return Prediction(step_time_s=step_time_s, peak_bytes=peak_bytes, capacity_bytes=estimator.capacity_bytes)
