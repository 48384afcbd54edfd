"""A run with what was measured and what was predicted, as a test says it."""

from dataclasses import fields

from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.estimate import Estimate, TimeEstimate
from dtlayout.costmodel.memory import MemoryEstimate, RankMemory
from dtlayout.costmodel.scenario import Scenario
from dtlayout.records.run import Performance, Run
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.validation.scores import Prediction

GPU = find_gpu("a100-80g-sxm")
SCENARIO = Scenario(
    model=ModelShape(name="m", hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=2, ffn_size=8, vocab_size=8),
    batch=Batch(global_batch=8, seq_len=8),
    cluster=Cluster(gpu=GPU, num_gpus=1, gpus_per_node=8),
    engine=find_engine("megatron", GPU.name),
)


def predict(outcome="ok", measured=None, predicted=0.4, *, fits=True, peaks=(None, (10.0,)), table="t") -> Prediction:
    """`measured` and `predicted` MFU; `peaks`: measured on rank 0, predicted on each rank."""
    measured_peak, predicted_peaks = peaks
    run = Run(
        table=table, row="0", scenario=SCENARIO, layout=Layout(), kernels=Kernels(), outcome=outcome,
        measured=Performance(mfu=measured, peak_memory_bytes=(measured_peak,)),
    )  # fmt: skip
    nothing = dict.fromkeys([f.name for f in fields(MemoryEstimate)], 0.0)
    of_ranks = [MemoryEstimate(**nothing | {"parameters": peak}) for peak in predicted_peaks]
    estimate = Estimate(
        layout=Layout(), kernels=Kernels(), stage_layers=(2,),
        capacity_bytes=max(predicted_peaks) * (1 if fits else 0.9),
        memory=RankMemory(of_ranks.__getitem__, len(of_ranks)),
        time=TimeEstimate(**dict.fromkeys([f.name for f in fields(TimeEstimate)], 1.0)), mfu=predicted,
    )  # fmt: skip
    return Prediction(run, estimate)
