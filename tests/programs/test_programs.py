"""Arguments of other programs: names and values as published, the degrees of the layout, and what cannot be said."""

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from program_jobs import LAYOUTS, job_of

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.costmodel.engine import find_usual
from dtlayout.costmodel.engine_rules import find_layout_lacks
from dtlayout.models.presets import PRESETS
from dtlayout.programs.files.yaml import dump
from dtlayout.programs.megatron.write import split_stages
from dtlayout.programs.registry import PROGRAMS
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts, LatentAttention
from dtlayout.spec.optimizers import SGD, AdamW, Muon, Optimizer

PUBLISHED = toml.loads((Path(__file__).parent / "options.toml").read_text())
DOCS = (Path(__file__).parents[2] / "docs" / "guide" / "emit.md").read_text()
KINDS = {"int": int, "float": (int, float), "str": str, "bool": bool, "list": list, "none": type(None)}
QWEN = PRESETS["qwen3-30b-a3b"]
DEEPSEEK = replace(
    PRESETS["llama-7b"], name="deepseek", num_layers=8, head_dim=192,
    experts=Experts(number=64, per_token=6, ffn_size=1408, shared_ffn_size=2816, dense_layers=1),
    latent_attention=LatentAttention(query_rank=1536, kv_rank=512, rope_width=64, value_width=128),
)  # fmt: skip
SPREAD = Layout(dp_shard=4, tp=2, pp=2, ep=8, ep_overlap=True, ep_dispatcher="deepep", schedule="1f1b")


def flatten(tables, prefix=""):
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def parse_script(lines):
    start, end = lines.index("ARGUMENTS=("), lines.index(")")
    options = {}
    for line in lines[start + 1 : end]:
        name, *values = shlex.split(line)
        assert name.startswith("--")
        options[name[2:]] = values if len(values) > 1 else values[0] if values else None
    return options


def read(engine, arguments):
    """Option → value, as the program would."""
    if engine == "megatron":
        return parse_script(list(arguments.lines))
    text = "\n".join(arguments.lines)
    return dict(flatten(toml.loads(text) if engine == "torchtitan" else yaml.safe_load(text)))


def write(engine, *args, **changes):
    arguments = PROGRAMS[engine].write(job_of(engine, *args, **changes))
    return read(engine, arguments), arguments.gaps


def accepts(kind, value):
    if isinstance(kind, list):
        return value in kind
    if isinstance(kind, dict):
        return isinstance(value, list) and set(value) <= set(kind["some"])
    if kind == "flag":
        return value is None
    if isinstance(value, str) and kind in ("int", "float"):  # a word of a command line
        value = int(value) if kind == "int" else float(value)
    return isinstance(value, KINDS[kind]) and not (isinstance(value, bool) and kind in ("int", "float"))


def jobs(engine):
    """Every kind of thing that is written."""
    for name, layout in LAYOUTS.items():
        if (engine, name) != ("automodel", "copies"):
            yield (layout,), {}
    for model in ("qwen2.5-7b", "qwen3-8b", "qwen3-0.6b", "llama-13b"):
        yield (Layout(dp_shard=8),), {"model": model}
    for matmuls in ("fp8-tensorwise", "fp8-rowwise", "mxfp8", "nvfp4"):
        yield (Layout(dp_shard=8),), {"matmuls": matmuls}
    yield (Layout(dp_shard=8),), {"optimizer": SGD()}
    if engine == "automodel":
        yield (Layout(dp_shard=8),), {"optimizer": AdamW(max_norm=0.5)}
    if engine == "megatron":
        yield (Layout(dp_shard=8),), {"reduce": "bfloat16", "told": {"overlap_dp": "false", "cuda_graphs": "full"}}
        yield (LAYOUTS["interleaved"],), {"compute": "float16", "told": {"overlap_pp": "false"}}
        yield (Layout(dp_shard=8),), {"told": {"cuda_graphs": "attention"}}
        yield (LAYOUTS["zero2"],), {"told": {"recompute_modules": "core_attn+mlp", "fused_loss": "always"}}
    if engine == "torchtitan":
        yield (Layout(dp_shard=8),), {"told": {"fused_loss": "always"}}
    for model in (QWEN, DEEPSEEK):
        yield (Layout(dp_shard=8, ep=8),), {"model": model}
        yield (replace(SPREAD, pp=1) if engine == "torchtitan" else SPREAD,), {"model": model}


@pytest.mark.parametrize("engine", PROGRAMS)
def test_every_option_that_is_written_is_one_of_the_published_parser_with_a_value_that_it_takes(engine):
    table, seen = PUBLISHED[engine]["options"], set()
    for args, changes in jobs(engine):
        try:
            options, _ = write(engine, *args, **changes)
        except InvalidConfig:  # a model that the program does not have
            continue
        for name, value in options.items():
            assert name in table, f"{engine} has no option {name}"
            assert accepts(table[name], value), (name, value)
        seen |= options.keys()
    assert seen == table.keys(), "the table has what nothing writes"


def test_megatron_is_told_what_its_prediction_assumes():
    usual, _ = write("megatron", LAYOUTS["interleaved"])
    assert {"overlap-grad-reduce", "overlap-param-gather"} <= usual.keys()
    assert not {"grad-reduce-in-bf16", "no-overlap-p2p-communication", "cuda-graph-impl"} & usual.keys()
    told = {"overlap_dp": "false", "overlap_pp": "false", "cuda_graphs": "full"}
    other, _ = write("megatron", LAYOUTS["interleaved"], reduce="bfloat16", told=told)
    assert not {"overlap-grad-reduce", "overlap-param-gather"} & other.keys()
    assert {"grad-reduce-in-bf16", "no-overlap-p2p-communication"} <= other.keys()
    assert (other["cuda-graph-impl"], other["cuda-graph-scope"]) == ("local", "full_iteration")
    assert "bf16" not in write("megatron", LAYOUTS["dp"], compute="float16")[0]
    again, _ = write("megatron", LAYOUTS["zero2"], told={"recompute_modules": "mlp+core_attn"})
    assert (again["recompute-granularity"], again["recompute-modules"]) == ("selective", ["core_attn", "mlp"])
    assert "recompute-modules" not in write("megatron", LAYOUTS["zero2"])[0], "core_attn is its default"
    assert "recompute-modules" not in write("megatron", LAYOUTS["dp"], told={"recompute_modules": "mlp"})[0]
    assert "cross-entropy-fusion-impl" not in usual
    fused, _ = write("megatron", LAYOUTS["dp"], told={"fused_loss": "always"})
    assert fused["cross-entropy-fusion-impl"] == "te" and "cross-entropy-loss-fusion" in fused


def test_torchtitan_is_told_what_is_compiled():
    def compiled(kind: str, **told: str) -> tuple[bool, list[str] | None]:
        options, _ = write("torchtitan", LAYOUTS["dp"], kernels=Kernels(compile=kind), told=told)
        return options["compile.enable"], options.get("compile.components")

    assert compiled("none") == (False, None)
    assert compiled("blocks") == (True, None), "its default compiles the loss too"
    assert compiled("blocks", fused_loss="never") == (True, ["model"])
    assert compiled("none", fused_loss="always") == (True, ["loss"])
    assert compiled("none", fused_loss="never") == (False, None)


@pytest.mark.parametrize("engine", PROGRAMS)
def test_versions_are_those_of_the_table_and_the_documentation(engine):
    program, published = PROGRAMS[engine], PUBLISHED[engine]
    assert (program.version, program.parser) == (published["version"], published["parser"])
    assert f"{program.title} {program.version}" in DOCS
    for part in program.parser.split(" and "):
        assert part in DOCS


def degrees(engine, options, world_size):
    """What the program would make of its options: degrees, micro-batch and microbatches of a step."""
    if engine == "megatron":
        names = ("pipeline-model-parallel-size", "tensor-model-parallel-size", "context-parallel-size")
        pp, tp, cp = (int(options[name]) for name in names)
        dp, micro_batch = world_size // (pp * tp * cp), int(options["micro-batch-size"])
        return pp, tp, cp, dp, micro_batch, int(options["global-batch-size"]) // (dp * micro_batch)
    if engine == "nanotron":
        pp, tp, dp = (options[f"parallelism.{name}"] for name in ("pp", "tp", "dp"))
        tokens = options["tokens.micro_batch_size"], options["tokens.batch_accumulation_per_replica"]
        return pp, tp, options["parallelism.context_parallel_size"], dp, *tokens
    if engine == "torchtitan":
        p = {key.removeprefix("parallelism."): value for key, value in options.items()}
        pp, tp, cp = (p[f"{name}_parallel_degree"] for name in ("pipeline", "tensor", "context"))
        dp = p["data_parallel_replicate_degree"] * p["data_parallel_shard_degree"]
        at_once, total = p["training.local_batch_size"], p["training.global_batch_size"]
        micro_batch = p.get("pipeline_parallel_microbatch_size", at_once)
    else:
        d = {key.removeprefix("distributed."): value for key, value in options.items()}
        pp, tp, cp, dp = (d[f"{name}_size"] for name in ("pp", "tp", "cp", "dp"))
        at_once, total = d["step_scheduler.local_batch_size"], d["step_scheduler.global_batch_size"]
        micro_batch = d.get("pipeline.pp_microbatch_size", at_once)
    if pp > 1:
        assert at_once == total // dp, "all microbatches of a step go through one pipeline"
    return pp, tp, cp, dp, micro_batch, total // (dp * micro_batch)


@pytest.mark.parametrize("engine", PROGRAMS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_degrees_and_the_batch_come_back(engine, name):
    layout = LAYOUTS[name]
    options, _ = write(engine, layout)
    expected = (layout.pp, layout.tp, layout.cp, layout.dp, layout.micro_batch)
    assert degrees(engine, options, layout.world_size) == (*expected, 256 // (layout.dp * layout.micro_batch))


@pytest.mark.parametrize("engine", ["torchtitan", "automodel"])
@pytest.mark.parametrize("name", ["pp", "cut", "interleaved"])
def test_the_modules_of_stages_are_those_that_were_predicted(engine, name):
    options, _ = write(engine, LAYOUTS[name])
    stages = next(value for key, value in options.items() if key.endswith("module_fqns_per_model_part"))
    blocks = [[module for module in stage if "layers." in module] for stage in stages]
    assert tuple(map(len, blocks)) == job_of(engine, LAYOUTS[name]).estimate.stage_layers
    assert [int(module.rpartition(".")[2]) for stage in blocks for module in stage] == list(range(32))
    is_torchtitan = engine == "torchtitan"
    assert ("tok_embeddings" if is_torchtitan else "model.embed_tokens") == stages[0][0]
    assert {"output" if is_torchtitan else "lm_head"} < set(stages[-1])
    assert all("model.rotary_emb" in stage for stage in stages) is not is_torchtitan


def test_experts_and_how_they_are_spread_are_written():
    megatron, gaps = write("megatron", SPREAD, model=DEEPSEEK)
    assert gaps == []
    sizes = {
        "num-experts": "64", "moe-router-topk": "6", "moe-ffn-hidden-size": "1408",
        "moe-shared-expert-intermediate-size": "2816", "moe-layer-freq": "([0]*1+[1]*7)",
        "expert-model-parallel-size": "8", "expert-tensor-parallel-size": "1", "moe-token-dispatcher-type": "flex",
        "moe-enable-deepep": None, "overlap-moe-expert-parallel-comm": None,
        "qk-head-dim": "128", "qk-pos-emb-head-dim": "64", "v-head-dim": "128",
    }  # fmt: skip
    assert sizes.items() <= megatron.items()
    titan, gaps = write("torchtitan", replace(SPREAD, pp=1), model=QWEN)
    assert titan["model.flavor"] == "30B-A3B" and not any("sizes" in gap for gap in gaps)
    assert titan["parallelism.expert_parallel_degree"] == 8
    assert titan["parallelism.expert_parallel_comm_backend"] == "deepep"
    alone, _ = write("megatron", Layout(dp_shard=8, ep=4), model=QWEN)
    assert (alone["moe-token-dispatcher-type"], alone["expert-model-parallel-size"]) == ("alltoall", "4")
    assert not {"moe-layer-freq", "moe-shared-expert-intermediate-size", "multi-latent-attention"} & alone.keys()
    router = {"moe-router-load-balancing-type": "aux_loss", "moe-aux-loss-coeff": "0.01"}
    assert router.items() <= alone.items() and "moe-router-score-function" not in alone
    dots, gaps = write("megatron", SPREAD, model=PRESETS["dots.llm1"])
    router = {
        "moe-router-score-function": "sigmoid", "moe-router-topk-scaling-factor": "2.5",
        "moe-router-enable-expert-bias": None, "moe-router-bias-update-rate": "0.0",
        "moe-router-load-balancing-type": "none",
    }  # fmt: skip
    assert gaps == [] and router.items() <= dots.items() and "moe-router-num-groups" not in dots
    grouped = {"score": "softmax", "normalized": False, "groups": 4, "groups_per_token": 2, "balance_loss": 0.001}
    own, _ = write("megatron", SPREAD, model=replace(QWEN, experts=replace(QWEN.experts, **grouped, z_loss=0.1)))
    router = {
        "moe-router-pre-softmax": None, "moe-router-num-groups": "4", "moe-router-group-topk": "2",
        "moe-aux-loss-coeff": "0.001", "moe-z-loss-coeff": "0.1",
    }  # fmt: skip
    assert router.items() <= own.items()
    dense, _ = write("megatron", LAYOUTS["cp"])
    assert dense["cp-comm-type"] == "p2p" and "num-experts" not in dense


def expand(layout):
    """A stage's letters, of a layout as Megatron writes it: x*n is n times x, and so is (...)*n."""
    layout = re.sub(r"\(([^)]+)\)\*(\d+)", lambda group: group[1] * int(group[2]), layout)
    return re.sub(r"(.)\*(\d+)", lambda letter: letter[1] * int(letter[2]), layout).split("|")


@pytest.mark.parametrize("layers", [(3, 4, 4, 3), (1, 12), (2, 2, 3, 3, 3, 1), (5, 4, 4, 4, 5, 5, 2)])
def test_stages_of_megatron_hold_so_many_blocks(layers):
    stages = expand(split_stages(layers))
    assert [stage.count("t") for stage in stages] == list(layers)
    assert stages[0][0] == "E" and stages[-1][-1] == "L" and "".join(stages).count("E") == 1


def test_megatron_is_told_stages_only_where_it_would_cut_others():
    cut, _ = write("megatron", LAYOUTS["cut"])
    even, _ = write("megatron", LAYOUTS["interleaved evenly"])
    assert [stage.count("t") for stage in expand(cut["pipeline-model-parallel-layout"])] == [11, 11, 10]
    assert even["num-virtual-stages-per-pipeline-rank"] == "2" and "pipeline-model-parallel-layout" not in even


def test_what_shards_the_state_is_said_in_each_programs_words():
    assert write("megatron", LAYOUTS["dp"])[0]["data-parallel-sharding-strategy"] == "optim_grads_params"
    assert write("megatron", LAYOUTS["zero2"])[0]["data-parallel-sharding-strategy"] == "optim_grads"
    assert write("megatron", LAYOUTS["hsdp"])[0]["num-distributed-optimizer-instances"] == "2"
    assert "use-distributed-optimizer" not in write("megatron", LAYOUTS["copies"])[0]
    assert write("torchtitan", LAYOUTS["dp"])[0]["parallelism.fsdp_reshard_after_forward"] == "always"
    assert write("torchtitan", LAYOUTS["pp"])[0]["parallelism.fsdp_reshard_after_forward"] == "never"
    for name, reshards, defers in (("dp", True, False), ("zero2", False, False), ("hsdp", False, True)):
        options, _ = write("automodel", LAYOUTS[name])
        assert options["distributed.reshard_after_forward"] is reshards
        assert options["distributed.defer_fsdp_grad_sync"] is defers
    assert write("nanotron", LAYOUTS["hsdp"])[0]["optimizer.zero_stage"] == 1
    assert write("nanotron", LAYOUTS["copies"])[0]["optimizer.zero_stage"] == 0


def test_megatron_fsdp_gets_no_single_queue_and_all_else_one():
    def first_lines(name):
        return list(PROGRAMS["megatron"].write(job_of("megatron", LAYOUTS[name])).lines)[:2]

    assert first_lines("hsdp")[1] == "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    assert first_lines("dp")[1] == "ARGUMENTS=("


def test_fsdp2s_offload_is_said_where_the_program_has_it():
    layout = replace(LAYOUTS["dp"], offload="optimizer")
    assert write("torchtitan", layout)[0]["training.enable_cpu_offload"] is True
    found, _ = write("automodel", layout)
    assert found["distributed.offload_policy._target_"] == "torch.distributed.fsdp.CPUOffloadPolicy"
    for engine in PROGRAMS:
        both = replace(layout, offload="both")
        scenario = job_of(engine, both).scenario
        refused = find_layout_lacks(scenario.engine, both, scenario.model)
        assert any("layout.offload=both is nothing that" in line for line in refused)


GAPS = [
    ("megatron", {"layout": replace(LAYOUTS["tp"], recompute="every-3")}, "layout.recompute=every-3"),
    ("megatron", {"matmuls": "fp8-rowwise"}, "precision.matmuls=fp8-rowwise is nothing that it has"),
    ("megatron", {"kernels": Kernels(attention="sdpa-efficient")}, "kernels.attention=sdpa-efficient is nothing"),
    ("megatron", {"kernels": Kernels(attention="sdpa-cudnn", swiglu="liger")}, "kernels.swiglu=liger is no option"),
    ("torchtitan", {"kernels": Kernels(attention="sdpa-flash")}, "kernels.attention=sdpa-flash is no option"),
    ("torchtitan", {"layout": LAYOUTS["hsdp"]}, "layout.zero=1 is nothing that it has"),
    ("torchtitan", {"layout": LAYOUTS["tp"]}, "layout.tp_overlap takes effect only with [compile] enable = true"),
    ("torchtitan", {"model": "llama-13b"}, "the model's sizes are no options: add to llama3_args"),
    ("torchtitan", {"model": replace(PRESETS["qwen3-8b"], vocab_size=9)}, "add to qwen3_args of torchtitan a flavor"),
    ("torchtitan", {"model": "llama3.2-1b"}, "model.tied_embeddings is lost"),
    ("torchtitan", {"matmuls": "nvfp4"}, "precision.matmuls=nvfp4 is nothing that it has"),
    ("torchtitan", {"optimizer": SGD()}, "optimizer.name=sgd is nothing that it has"),
    ("torchtitan", {"model": replace(QWEN, num_layers=9)}, "moe_args=MoEArgs(num_experts=128, num_shared_experts=0,"),
    ("megatron", {"model": replace(QWEN, gated_ffn=False)}, "the feed-forward without a gate takes GELU"),
    ("megatron", {"model": replace(QWEN, experts=replace(QWEN.experts, bias=True))}, "model.experts.bias is no option"),
    (
        "megatron",
        {"model": replace(QWEN, experts=replace(QWEN.experts, score="sigmoid", normalized=False))},
        "model.experts.normalized=false is no option beside sigmoid scores",
    ),
    ("automodel", {"layout": LAYOUTS["tp"]}, "every block is recomputed instead"),
    ("automodel", {"kernels": Kernels(attention="fa3")}, "kernels.attention=fa3 is no sdpa_method"),
    ("automodel", {"kernels": Kernels(compile="model")}, "kernels.compile=model: blocks are compiled one by one"),
    ("automodel", {"layout": LAYOUTS["cp"]}, "layout.cp_method=ring is no option: it gathers keys and values"),
    ("automodel", {"layout": LAYOUTS["tp"]}, "kernels.compile=none: blocks are compiled with enable_async_tensor"),
    ("automodel", {"matmuls": "mxfp8"}, "precision.matmuls=mxfp8 is nothing that it has"),
    ("nanotron", {"layout": LAYOUTS["dp"]}, "zero_stage 1 is written instead, which needs more memory; --fix zero=1"),
    ("nanotron", {"layout": LAYOUTS["zero2"]}, "layout.recompute=selective is nothing that it has"),
    ("nanotron", {"layout": LAYOUTS["interleaved"]}, "layout.schedule=interleaved-1f1b is nothing that it has"),
    ("nanotron", {"layout": LAYOUTS["cut"]}, "predicted are 11, 11, 10 blocks"),
    ("nanotron", {"layout": LAYOUTS["hsdp"]}, "layout.dp_replicate=2 beside dp_shard=8 is nothing that it has"),
    ("nanotron", {"layout": LAYOUTS["tp"]}, "layout.tp_overlap=true is no option beside tp_linear_async"),
    ("nanotron", {"optimizer": SGD()}, "optimizer.momentum=0.9 is no option: its SGD has none"),
    ("nanotron", {"compute": "float16"}, "precision.compute=float16 is written as bfloat16"),
    ("nanotron", {"matmuls": "mxfp8"}, "precision.matmuls=mxfp8 is nothing that it has"),
    *(
        (engine, {"optimizer": AdamW(state_format="bfloat16")}, "optimizer.state_format=bfloat16 is not written")
        for engine in PROGRAMS
    ),
    ("torchtitan", {"compute": "float16"}, "precision.compute=float16 is no choice of mixed_precision_param"),
    ("torchtitan", {"params": "float64"}, "precision.params=float64 is no choice of dtype"),
    ("torchtitan", {"layout": Layout(tp=8)}, "precision.compute=bfloat16 has no effect where nothing is sharded"),
    ("torchtitan", {"layout": Layout(dp_replicate=8, offload="optimizer")}, "layout.offload=optimizer takes shards"),
    ("torchtitan", {"layout": LAYOUTS["tp alone"]}, "layout.sequence_parallel=false is nothing that it has"),
    ("torchtitan", {"layout": Layout(dp_shard=4, tp=2), "model": QWEN}, "it cuts each expert over tp where ep is 1"),
    ("torchtitan", {"layout": replace(SPREAD, pp=1), "model": QWEN}, "layout.ep_dispatcher=deepep has no effect on"),
    ("torchtitan", {"layout": Layout(pp=2, dp_shard=4, schedule="zb-h1")}, "layout.schedule=zb-h1 is nothing that it"),
    ("automodel", {"compute": "float16"}, "precision.compute=float16 is written as bfloat16"),
    ("nanotron", {}, "model.rope_scaling is left out"),
]


@pytest.mark.parametrize(("engine", "changes", "gap"), GAPS, ids=[f"{gap[0]}: {gap[2][:40]}" for gap in GAPS])
def test_what_a_program_cannot_say_is_a_gap(engine, changes, gap):
    _, gaps = write(engine, **{"layout": Layout(dp_shard=8), **changes})
    assert any(gap in each for each in gaps), gaps
    assert not any(each.endswith(".") for each in gaps), "whoever shows it ends the sentence"


@pytest.mark.parametrize("engine", ["megatron", "torchtitan", "automodel"])
def test_a_layout_that_a_program_can_say_has_no_gap(engine):
    own = {"torchtitan": {"attention": "sdpa-cudnn"}}.get(engine, {})
    kernels = replace(find_usual(engine).kernels, **own)
    _, gaps = write(engine, Layout(dp_shard=8, zero=3, recompute="full"), kernels=kernels)
    assert gaps == []


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """An optimizer that no program has."""

    name: str = "lion"


REFUSALS = [
    ("torchtitan", {"model": "qwen2.5-7b"}, InvalidConfig, "torchtitan 0.2.2 has Llama and Qwen3, without biases"),
    ("torchtitan", {"layout": Layout(dp_replicate=4, tp=2)}, InvalidLayout, "use --fix dp_replicate=1"),
    (
        "automodel",
        {"layout": Layout(pp=8, dp_shard=64)},
        InvalidLayout,
        "fewer microbatches than ranks, here 4 on pp=8",
    ),
    ("automodel", {"model": QWEN}, InvalidConfig, "AutoModel builds a mixture of experts from its config.json"),
    (
        "torchtitan",
        {"model": replace(DEEPSEEK, latent_attention=None, head_dim=None)},
        InvalidConfig,
        "those of Qwen3 are written",
    ),
    ("torchtitan", {"model": DEEPSEEK}, InvalidConfig, "only Llama's and Qwen3's own attention"),
    ("torchtitan", {"model": QWEN, "layout": SPREAD}, InvalidLayout, "0.2.2 has no pipeline for Qwen3; use --fix pp=1"),
    (
        "torchtitan",
        {"layout": Layout(dp_shard=4, tp=2), "kernels": Kernels(compile="blocks"), "matmuls": "mxfp8"},
        InvalidLayout,
        "compiles no mxfp8 beside tensor parallelism; use --fix tp=1",
    ),
    (
        "torchtitan",
        {"model": QWEN, "layout": Layout(dp_replicate=2, dp_shard=4, ep=8)},
        InvalidLayout,
        "dp_shard * cp * tp = 4, which ep=8 does not divide; use --fix dp_replicate=1",
    ),
    ("megatron", {"model": replace(QWEN, window=128)}, InvalidConfig, "attention to a window of 128 tokens"),
    (
        "megatron",
        {"model": QWEN, "layout": Layout(dp_shard=4, tp=2, ep=4, sequence_parallel=False)},
        InvalidLayout,
        "only with sequence parallelism; use --fix sequence_parallel=true",
    ),
    ("nanotron", {"model": "qwen3-8b"}, InvalidConfig, "nanotron has Llama and Qwen2"),
    ("nanotron", {"optimizer": Lion()}, InvalidConfig, "--optimizer=lion is nothing that nanotron has"),
    ("megatron", {"optimizer": Muon()}, InvalidConfig, "--optimizer=muon is not written for Megatron-LM"),
    ("megatron", {"optimizer": Lion()}, InvalidConfig, "--optimizer=lion is nothing that Megatron-LM has"),
]


@pytest.mark.parametrize(("engine", "changes", "error", "problem"), REFUSALS, ids=[f"{r[0]} {r[3]}" for r in REFUSALS])
def test_what_a_program_would_not_start_with_is_refused(engine, changes, error, problem):
    with pytest.raises(error, match=re.escape(problem)):
        write(engine, **{"layout": Layout(dp_shard=8), **changes})


def test_an_optimizer_that_automodel_has_no_name_for_is_a_gap():
    options, gaps = write("automodel", Layout(dp_shard=8), optimizer=Lion())
    assert options["optimizer._target_"] == "torch.optim.AdamW"
    assert "optimizer.name=lion is written as AdamW: put your class in optimizer._target_" in gaps


@pytest.mark.parametrize("model", ["llama-13b", "llama2-70b", "llama3.2-3b", "llama-30b"])
def test_a_flavor_for_torchtitan_has_the_width_of_the_model(model):
    _, gaps = write("torchtitan", Layout(dp_shard=8), model=model)
    sizes = dict(re.findall(r"(\w+)=([\d.]+)", gaps[0]))
    hidden = int(2 * (4 * int(sizes["dim"])) / 3)
    width, multiple = int(float(sizes["ffn_dim_multiplier"]) * hidden), int(sizes["multiple_of"])
    assert -(-width // multiple) * multiple == PRESETS[model].ffn_size


def test_yaml_is_read_as_it_was_meant():
    tables = {
        "a": {"lr": 1e-5, "answer": "no", "version": "1e5", "none": None},
        "b": [["x"], [{"c": True}]],
        "d": 2.5e-7,
    }
    assert yaml.safe_load("\n".join(dump(tables))) == tables
