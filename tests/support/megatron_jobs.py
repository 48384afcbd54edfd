"""Jobs that Megatron-LM can be told, drawn, and the options that its program is told."""

import shlex
from typing import Any

from hypothesis import strategies as st
from program_jobs import job_of

from dtlayout.base.errors import DtlayoutError
from dtlayout.costmodel.engine_features import CHOICES
from dtlayout.costmodel.recompute_modules import USUAL_MODULES
from dtlayout.models.presets import PRESETS
from dtlayout.programs.megatron.write import CHOSEN
from dtlayout.programs.program import Job
from dtlayout.programs.registry import PROGRAMS
from dtlayout.programs.understood import Understood
from dtlayout.spec.layout import Layout
from dtlayout.spec.optimizers import SGD, AdamW

MODELS = ["llama3.1-8b", "llama-13b", "qwen2.5-7b", "qwen3-8b", "qwen3-0.6b", "mixtral-8x7b", "qwen3-30b-a3b"]
FORMATS: list[dict[str, str]] = [
    {}, {"matmuls": "fp8-tensorwise"}, {"matmuls": "mxfp8"}, {"matmuls": "nvfp4"}, {"compute": "float16"},
    {"reduce": "bfloat16"},
]  # fmt: skip
TOLD: list[dict[str, str]] = [
    {}, {"overlap_dp": "false"}, {"overlap_pp": "false"}, {"cuda_graphs": "full"}, {"recompute_modules": "mlp"},
    {"recompute_modules": "core_attn+layernorm+moe"}, {"fused_loss": "always"},
]  # fmt: skip


@st.composite
def draw_jobs(draw: Any) -> Job:
    """A job that Megatron-LM can be told, on whole nodes: degrees, stages, sharding, formats, optimizers."""
    model = draw(st.sampled_from(MODELS))
    shape = PRESETS[model]
    tp, cp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    pp = draw(st.sampled_from([n for n in (1, 2, 4) if shape.num_layers % n == 0]))
    dp = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if tp * cp * pp * n % 8 == 0] or [8]))
    copies = draw(st.sampled_from([n for n in (1, 1, 2) if dp % n == 0]))
    virtual = draw(st.sampled_from([1, 2])) if pp > 1 and shape.num_layers % (2 * pp) == 0 else 1
    cut = draw(st.booleans()) if pp > 1 and virtual == 1 else False
    each, by_sequence = shape.num_layers // pp, draw(st.booleans()) if not shape.experts else True
    layout = Layout(
        tp=tp, cp=cp, pp=pp, dp_shard=dp // copies, dp_replicate=copies, virtual_stages=virtual,
        stage_layers=(each - 1, *[each] * (pp - 2), each + 1) if cut else (),
        zero=draw(st.sampled_from([1, 2, 3])) if pp == 1 and dp > copies else 1,
        schedule="interleaved-1f1b" if virtual > 1 else "1f1b", micro_batch=draw(st.sampled_from([1, 2])),
        sequence_parallel=by_sequence, tp_overlap=by_sequence and draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "full", "selective", "every-2"])),
        cp_method=draw(st.sampled_from(["ring", "gather", "all-to-all"])),
        ep=draw(st.sampled_from([1, 2])) if shape.experts and dp * cp * tp % 2 == 0 else 1,
        ep_dispatcher=draw(st.sampled_from(["alltoall", "deepep"])),
    )  # fmt: skip
    optimizer = draw(st.sampled_from([AdamW(lr=1e-4, beta2=0.98, weight_decay=0.05), SGD(momentum=0.8)]))
    formats, told = draw(st.sampled_from(FORMATS)), draw(st.sampled_from(TOLD))
    return job_of("megatron", layout, model=model, optimizer=optimizer, told=told, **formats)


def list_options(job: Job) -> dict[str, list[str] | None] | None:
    """Option → words of all that Megatron-LM is told of a job, None for what it is not; None for a job that it cannot
    be told."""
    try:
        lines = list(PROGRAMS["megatron"].write(job).lines)
    except DtlayoutError:
        return None
    words = [shlex.split(line) for line in lines[lines.index("ARGUMENTS=(") + 1 : lines.index(")")]]
    return dict.fromkeys(CHOSEN) | {name: values for name, *values in words}


def check_choices(job: Job, found: Understood) -> None:
    """Fail unless a job's loss and its modules of selective recomputation were read back, and no other modules."""
    assert found.told.get("fused_loss", "never") == job.scenario.engine.features.fused_loss
    is_selective = job.layout.effective.recompute == "selective"
    own = job.scenario.engine.features.recompute_modules if is_selective else USUAL_MODULES
    assert CHOICES["recompute_modules"].find(found.told.get("recompute_modules", *USUAL_MODULES)) == own


def list_differences(job: Job) -> set[str]:
    """Fields that are not read back as they were, as gaps of the program say."""
    gaps = PROGRAMS["megatron"].write(job).gaps
    differ = {"params"}
    if job.scenario.engine.features.reduce_bytes != 2 or job.scenario.precision.compute == "float16":
        differ |= {"reduce"}
    if job.layout.effective.recompute.startswith("every"):
        differ |= {"recompute"}
    return differ | {"matmuls"} if any("precision.matmuls" in gap for gap in gaps) else differ
