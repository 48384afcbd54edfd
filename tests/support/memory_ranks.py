"""Peak memory on ranks as training reports it, and what the cost model says of the same step."""

import torch
from parity import MAX_NORM, SEED, Case, local_rows, local_starts
from plugged import plugged_in
from routing import routed_as_stated

from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.memory import RankMemory
from dtlayout.costmodel.scenario import Scenario
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.training.build import assemble
from dtlayout.training.memory import MemoryMeter
from dtlayout.training.optimizer import build_optimizer
from dtlayout.training.step import TrainStep


def measure_peaks(case: Case) -> list[int]:
    """A step's peak on each pipeline rank, with the optimizer's state there as after a step before."""
    assembly = assemble(case.model, case.batch, case.layout, case.kernels, case.precision, seed=SEED, device_type="cpu")
    optimizer = build_optimizer(assembly.modules, case.model, case.optimizer, assembly.disk)
    step = TrainStep(assembly.runtime, optimizer, max_norm=MAX_NORM, mesh=assembly.mesh, model=case.model)
    tokens, targets = (rows.clone() for rows in local_rows(case))
    for parameter in (p for module in assembly.modules for p in module.parameters()):
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    meter = MemoryMeter("cpu", assembly.modules, optimizer, state_on=case.layout.state_place)
    with routed_as_stated(case), meter.watch():
        step(tokens, targets, local_starts(case))
    return meter.gather_peaks(case.layout)


def measure_frozen_peaks(case: Case) -> list[int]:
    """As `measure_peaks`, of a model of which some weights are frozen."""
    with plugged_in("partly_frozen"):
        return measure_peaks(case)


def make_scenario(case: Case) -> Scenario:
    """A case on as many CPU ranks as its layout needs."""
    size = case.layout.world_size
    return Scenario(
        model=case.model,
        batch=case.batch,
        cluster=Cluster(gpu=find_gpu("cpu"), num_gpus=size, gpus_per_node=size),
        engine=find_engine("dtlayout", "cpu"),
        precision=case.precision,
        optimizer=case.optimizer,
        document_mask=case.documents,
    )


def predict(case: Case) -> RankMemory:
    """The same by the cost model."""
    return Estimator(make_scenario(case)).memory(case.layout, case.kernels)
