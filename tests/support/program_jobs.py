"""Jobs that other programs are told, with a layout of each kind."""

from dataclasses import replace

from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.estimate import estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.presets import PRESETS
from dtlayout.programs.program import Job
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.optimizers import AdamW
from dtlayout.spec.precision import Precision

PIPELINE = Layout(pp=4, dp_shard=4, tp=2, virtual_stages=2, schedule="interleaved-1f1b", micro_batch=2)
LAYOUTS = {
    "dp": Layout(dp_shard=32, zero=3),
    "zero2": Layout(dp_shard=32, zero=2, recompute="selective"),
    "hsdp": Layout(dp_replicate=2, dp_shard=8, tp=2, recompute="full"),
    "copies": Layout(dp_replicate=32, micro_batch=2),
    "tp": Layout(dp_shard=4, tp=8, tp_overlap=True, micro_batch=4, recompute="every-2"),
    "tp alone": Layout(dp_shard=8, tp=4, sequence_parallel=False),
    "cp": Layout(dp_shard=4, tp=2, cp=4),
    "pp": Layout(pp=4, dp_shard=8, micro_batch=2, schedule="gpipe"),
    "cut": Layout(pp=3, dp_shard=2, tp=2, stage_layers=(11, 11, 10)),
    "interleaved": PIPELINE,
    "interleaved evenly": replace(PIPELINE, stage_layers=(4,) * 8),
}


def job_of(engine, layout, *, model="llama3.1-8b", kernels=None, optimizer=None, told=None, **formats):
    cluster = Cluster(gpu=find_gpu("b200-180g-sxm"), num_gpus=layout.world_size, gpus_per_node=8)
    named = {name: formats[name] for name in ("reduce",) if name in formats}
    scenario = Scenario(
        model=PRESETS[model] if isinstance(model, str) else model, batch=Batch(global_batch=256, seq_len=4096),
        cluster=cluster, engine=find_engine(engine, cluster.gpu.name).told(told or {}).told_formats(named)[0],
        precision=Precision(**formats), optimizer=optimizer or AdamW(),
    )  # fmt: skip
    return Job(scenario, estimate(scenario, layout, kernels or Kernels(attention="sdpa-cudnn")), steps=100)
