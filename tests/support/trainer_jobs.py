"""Jobs for programs that train by Hugging Face's Trainer, drawn at random, and their files, which are read back."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from program_files import compare_job
from program_jobs import job_of

from dtlayout.models.presets import PRESETS
from dtlayout.programs.program import Job, nest
from dtlayout.programs.reading import read_program
from dtlayout.programs.understood import Understood
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.batch import Batch
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.optimizers import SGD, AdamW
from dtlayout.spec.precision import Precision

MODELS = ("llama3.1-8b", "llama2-7b", "qwen2.5-7b", "qwen3-0.6b", "llama3.2-1b")
PLAIN = {"rope": "eager", "norm": "eager", "swiglu": "eager", "loss": "eager"}
LIGER = {"rope": "liger", "norm": "liger", "swiglu": "liger", "loss": "linear"}


@st.composite
def draw_jobs(draw: Any, *, engines: Collection[str] = ("accelerate", "deepspeed"), degrees: bool = False,
              adapters: bool = True, hybrids: bool = False, losses: Collection[str] = ()) -> Job:  # fmt: skip
    """A job that such a program can be told; `degrees` are tp and cp, `hybrids` replicas of shards, and `losses` those
    that it has without Liger's other kernels."""
    engine, world = draw(st.sampled_from(sorted(engines))), draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
    model = PRESETS[draw(st.sampled_from(MODELS))]
    adapter = Adapter(rank=8, alpha=16.0, targets=("q_proj", "v_proj")) if adapters and draw(st.booleans()) else None
    compute = draw(st.sampled_from(["bfloat16", "bfloat16", "float16", "float32"]))
    layout = _draw_zero(draw, world) if engine == "deepspeed" else _draw_fsdp(draw, world, degrees, hybrids)
    layout = replace(
        layout, micro_batch=draw(st.sampled_from([1, 2, 4])), recompute=draw(st.sampled_from(["none", "full"]))
    )
    is_sharded = engine == "accelerate" and (layout.dp_shard > 1 or layout.offloads_state or layout.cp > 1)
    formats = {"params": "float32", "compute": compute, "reduce": "float32"}
    if engine == "deepspeed" or is_sharded:
        formats["reduce"] = compute
    if engine == "deepspeed" and draw(st.booleans()):
        formats["reduce"] = "float32"
    if compute == "bfloat16" and adapter is None and engine == "accelerate" and not is_sharded and draw(st.booleans()):
        formats |= {"params": "bfloat16", "reduce": "bfloat16"}
    if adapter is not None:
        formats["base"] = draw(st.sampled_from(["compute", "nf4", "int8"]))
    own = draw(st.sampled_from([PLAIN, LIGER, *({**PLAIN, "loss": loss} for loss in losses)]))
    compile_ = draw(st.sampled_from(["none", "model"]))
    attention = draw(st.sampled_from(["sdpa-flash", "flash-attn", "fa3", "torch"]))
    optimizer = draw(st.sampled_from([
        AdamW(lr=1e-4, beta2=0.98, weight_decay=0.05), AdamW(lr=2e-5, max_norm=float("inf"), eps=1e-6),
        AdamW(lr=3e-5, state_format="int8"), SGD(momentum=0.0, lr=0.01, max_norm=0.5),
    ]))  # fmt: skip
    told = {"overlap_dp": draw(st.sampled_from(["true", "false"]))} if engine == "deepspeed" else {}
    kernels = Kernels(attention=attention, compile=compile_, **own)
    shape = replace(model, adapter=adapter)
    job = job_of(engine, layout, model=shape, kernels=kernels, optimizer=optimizer, told=told)
    batch = Batch(global_batch=layout.micro_batch * layout.dp * draw(st.sampled_from([1, 2, 8])), seq_len=4096)
    return replace(job, scenario=replace(job.scenario, batch=batch, precision=Precision(**formats)))


def _draw_zero(draw: Any, world: int) -> Layout:
    stage = draw(st.sampled_from([0, 1, 2, 3]))
    if stage == 0 and world > 1:
        return Layout(dp_replicate=world, zero=1)
    stage = stage or 1
    offloads = ["none", "optimizer", "disk"] if stage == 3 else ["none", "optimizer"]
    return Layout(dp_shard=world, zero=stage, offload=draw(st.sampled_from(offloads)))


def _draw_fsdp(draw: Any, world: int, degrees: bool, hybrids: bool) -> Layout:
    kinds = ["copies", "shards", *(["hybrid"] if hybrids and world > 2 else []), *(["axes"] if degrees else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "copies" or world == 1:
        return Layout(dp_replicate=world)
    zero, offload = draw(st.sampled_from([2, 3])), draw(st.sampled_from(["none", "optimizer"]))
    if kind == "shards":
        return Layout(dp_shard=world, zero=zero, offload=offload)
    if kind == "hybrid":
        copies = draw(st.sampled_from([n for n in (2, 4, 8) if world % n == 0 and world // n > 1]))
        return Layout(dp_replicate=copies, dp_shard=world // copies, zero=zero)
    tp = draw(st.sampled_from([n for n in (1, 2, 4) if world % n == 0]))
    cp = draw(st.sampled_from([n for n in (1, 2) if world % (tp * n) == 0]))
    rest = world // tp // cp
    zero = zero if rest * cp > 1 else 1
    method = draw(st.sampled_from(["gather", "ring"])) if cp > 1 else "ring"
    return Layout(tp=tp, cp=cp, dp_shard=rest, zero=zero, cp_method=method, sequence_parallel=tp == 1)


def to_yaml(options: Mapping[str, Any]) -> str:
    """A YAML file of flat options; those that are None are left out."""
    return yaml.safe_dump(nest(options), sort_keys=False)


def to_json(options: Mapping[str, Any]) -> str:
    """A JSON file of flat options."""
    return json.dumps(nest(options), indent=2)


def read_text(folder: Path, name: str, text: str, num_gpus: int = 0) -> Understood:
    """A file with this text, as it is read."""
    path = folder / name
    path.write_text(text)
    found = read_program(path, {}, num_gpus)
    assert found is not None, f"nobody takes {text}"
    return found


def compare(job: Job, found: Understood, differ: Collection[str] = ()) -> None:
    """Fail unless a job was read back as it was, its kernels, adapter and base too; `differ` are not compared."""
    assert found.engine == job.scenario.engine.name
    compare_job(job, found, {"sequence_parallel", "cp_method", *differ}, model=False)
    layout = found.tables["layout"]
    if job.layout.cp > 1:
        assert layout["cp_method"] == job.layout.cp_method
    assert (job.model.adapter is not None) == ("adapter" in found.tables)
    if "base" not in differ:
        assert found.get("precision", "base", "compute") == job.scenario.precision.base
    if "kernels" not in differ:
        said = found.tables.get("kernels", {})
        usual = {"norm": "eager", "rope": "eager", "swiglu": "eager", "compile": "none"}
        wanted = {key: getattr(job.estimate.kernels, key) for key in ("attention", "loss", *usual)}
        assert {key: said.get(key, usual.get(key)) for key in wanted} == wanted
    if job.scenario.engine.name == "deepspeed":
        assert found.told == {"overlap_dp": str(job.scenario.engine.features.overlap_dp).lower()}


def write_adapter(job: Job, names: Callable[[Adapter], dict[str, Any]]) -> dict[str, Any]:
    """Options of a job's adapter, which is the model's and not the layout's; none without one."""
    return names(job.model.adapter) if job.model.adapter is not None else {}
