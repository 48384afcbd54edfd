"""Megatron-LM: a shell script that gives pretrain_gpt.py its arguments."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import ceil, gcd
from typing import Any

from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.base.formatting import plural
from dtlayout.costmodel.recompute_modules import USUAL_MODULES
from dtlayout.models.families import find_family
from dtlayout.programs.program import Arguments, Job, Program, choose
from dtlayout.spec.model_shape import Experts
from dtlayout.spec.optimizers import SGD, AdamW, Muon
from dtlayout.spec.recompute import Recompute

ATTENTION = {
    "sdpa-cudnn": "fused", "flash-attn": "flash", "fa3": "flash", "sdpa-flash": "flash", "sdpa-math": "unfused",
    "megatron-softmax": "unfused",
}  # fmt: skip
"""Our kernel → --attention-backend: Transformer Engine calls cuDNN's attention fused."""
MATMULS = {
    "fp8-tensorwise": ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
    "mxfp8": ("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"),
    "nvfp4": ("--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"),
}
CONTEXT = {"ring": "p2p", "gather": "allgather", "all-to-all": "a2a"}
"""Our method of attention over cp → --cp-comm-type."""
SHARDED = {2: "optim_grads", 3: "optim_grads_params"}
"""ZeRO stage → --data-parallel-sharding-strategy."""
TOGETHER = tuple(
    map(
        frozenset,
        (
            {"--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage",
             "--pipeline-model-parallel-layout", "--decoder-first-pipeline-num-layers",
             "--decoder-last-pipeline-num-layers", "--no-overlap-p2p-communication",
             "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"},
            {"--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-modules",
             "--recompute-activations", "--moe-layer-recompute"},
            {"--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather",
             "--num-distributed-optimizer-instances", "--use-megatron-fsdp", "--use-custom-fsdp",
             "--data-parallel-sharding-strategy", "--ckpt-format"},
            {"--attention-backend", "--use-flash-attn"}, {"--fp16", "--bf16"},
            {"--fp8-format", "--fp8-recipe", "--fp4-format", "--fp4-recipe"},
            {"--moe-token-dispatcher-type", "--moe-enable-deepep", "--overlap-moe-expert-parallel-comm"},
            {"--cuda-graph-impl", "--cuda-graph-scope"},
        ),
    )
)  # fmt: skip
"""Options that say one thing together."""
CHOSEN = sorted(
    {name for names in TOGETHER for name in names}
    | {"--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size", "--cp-comm-type",
       "--micro-batch-size", "--global-batch-size", "--sequence-parallel", "--tp-comm-overlap",
       "--expert-model-parallel-size", "--expert-tensor-parallel-size", "--grad-reduce-in-bf16"}
)  # fmt: skip
"""Options that all but the model may decide."""
_BALANCE_LOSS = 0.01
"""Coefficient of the balance loss in published scripts."""


def write(job: Job) -> Arguments:
    """The script; InvalidConfig or InvalidLayout for a part that Megatron lacks, or that is not written here."""
    _check(job)
    chosen, gaps = _choose(job)
    gaps += job.odd_state() + job.odd_kernels(said=("attention",)) + _list_model_gaps(job)
    groups = [_model(job), _latent_attention(job), _experts(job), chosen, _training(job)]
    lines = [line for group in groups for line in _one_an_option(group)]
    uses_fsdp = "--use-megatron-fsdp" in _data_parallel(job)
    # tp and cp count on the order in which one queue starts kernels; Megatron-FSDP refuses that.
    environment = [] if uses_fsdp else ["export CUDA_DEVICE_MAX_CONNECTIONS=1"]
    torchrun = job.torchrun.replace("HOST:PORT", '"${RENDEZVOUS:?HOST:PORT of the first node}"')
    body = [
        "set -euo pipefail", *environment, "ARGUMENTS=(", *(f"    {line}" for line in lines), ")",
        f'{torchrun} pretrain_gpt.py "${{ARGUMENTS[@]}}" "$@"',
    ]  # fmt: skip
    meeting = "RENDEZVOUS=HOST:PORT " if "RENDEZVOUS" in torchrun else ""
    return Arguments(body, f"{meeting}bash FILE, in a checkout of Megatron-LM", gaps)


def choose_options(job: Job) -> tuple[dict[str, Any], list[str]]:
    """Options that all but the model decides, each with its words, and gaps; None stands for one that is left out."""
    words, gaps = _choose(job)
    options: dict[str, Any] = dict.fromkeys(CHOSEN)
    for line in _one_an_option(words):
        name, *values = line.split(" ")
        options[name] = [value.strip("'") for value in values]
    return options, gaps


def _choose(job: Job) -> tuple[list[str], list[str]]:
    """Words of the options that all but the model decides, and gaps."""
    recompute, gaps = _recompute(job)
    backend, unknown = choose("kernels.attention", job.estimate.kernels.attention, ATTENTION, "auto")
    matmuls = job.scenario.precision.matmuls
    if job.scenario.precision.matmul_format and matmuls not in MATMULS:
        gaps.append(f"precision.matmuls={matmuls} is nothing that it has: bf16 is written instead")
    groups = [
        _degrees(job), _expert_parallel(job), _data_parallel(job), recompute, _formats(job), _graphs(job), _loss(job),
        MATMULS.get(matmuls, ()), ["--attention-backend", backend],
    ]  # fmt: skip
    return [word for group in groups for word in group], gaps + unknown


def split_stages(stage_layers: Sequence[int]) -> str:
    """Blocks of each stage as --pipeline-model-parallel-layout: E embedding, t block, L loss.

    >>> split_stages((3, 4, 4, 3))
    'Et*3|(t*4|)*2t*3L'
    """
    *firsts, last = [f"t*{count}" for count in stage_layers]
    runs = [(text, len(list(same))) for text, same in groupby(firsts[1:])]
    middle = "".join(f"{text}|" if number == 1 else f"({text}|)*{number}" for text, number in runs)
    return f"E{firsts[0]}|{middle}{last}L"


def _check(job: Job) -> None:
    model, layout = job.model, job.layout
    if model.window:
        raise InvalidConfig(
            f"model {model.name}: arguments for attention to a window of {model.window} tokens are not written; "
            f"leave out --emit, or use another model"
        )
    experts = model.experts
    if model.block or (experts and (experts.router_bias or experts.shared_gate)):
        raise InvalidConfig(
            f"model {model.name}: arguments for blocks of family {model.family} are not written; leave out --emit, or "
            f"use another model"
        )
    if model.experts and layout.tp > 1 and not layout.sequence_parallel:
        raise InvalidLayout(
            f"Megatron-LM trains a mixture of experts under tp={layout.tp} only with sequence parallelism; "
            f"use --fix sequence_parallel=true"
        )


def _list_model_gaps(job: Job) -> list[str]:
    model, gaps = job.model, list[str]()
    family = find_family(model.family)
    if family.untrained and not model.latent_attention:
        gaps.append(f"model.family={family.name}: {family.untrained}, and no argument here says that")
    if not model.gated_ffn:
        gaps.append("the feed-forward without a gate takes GELU: add --squared-relu where the model has that")
    if model.experts and model.experts.bias:
        gaps.append("model.experts.bias is no option: all matmuls have a bias or none, and none is written")
    if model.experts and model.experts.score == "sigmoid" and not model.experts.normalized:
        gaps.append("model.experts.normalized=false is no option beside sigmoid scores, which are divided by their sum")
    return gaps


def _model(job: Job) -> list[str]:
    model, seq_len = job.model, job.scenario.batch.seq_len
    options = [
        "--num-layers", f"{model.num_layers}", "--hidden-size", f"{model.hidden_size}",
        "--ffn-hidden-size", f"{model.ffn_size}", "--num-attention-heads", f"{model.num_heads}",
        "--kv-channels", f"{model.head_width}", "--seq-length", f"{seq_len}", "--max-position-embeddings", f"{seq_len}",
        "--position-embedding-type", "rope", "--rotary-base", f"{model.rope_theta:.0f}",
        "--normalization", "RMSNorm", "--norm-epsilon", f"{model.norm_eps:g}", "--disable-bias-linear",
        "--attention-dropout", "0", "--hidden-dropout", "0", *["--swiglu"] * model.gated_ffn,
    ]  # fmt: skip
    if model.num_kv_heads != model.num_heads:
        options += ["--group-query-attention", "--num-query-groups", f"{model.num_kv_heads}"]
    if model.rope_scaling:
        options += ["--use-rope-scaling", "--rope-scaling-factor", f"{model.rope_scaling.factor:g}"]
    options += ["--add-qkv-bias"] * model.qkv_bias + ["--qk-layernorm"] * model.qk_norm
    return options + ["--untie-embeddings-and-output-weights"] * (not model.tied_embeddings)


def _latent_attention(job: Job) -> list[str]:
    if (latent := job.model.latent_attention) is None:
        return []
    ranks = [
        *["--q-lora-rank", f"{latent.query_rank}"] * (latent.query_rank > 0),
        "--kv-lora-rank",
        f"{latent.kv_rank}",
    ]
    return [
        "--multi-latent-attention", *ranks,
        "--qk-head-dim", f"{job.model.head_width - latent.rope_width}",
        "--qk-pos-emb-head-dim", f"{latent.rope_width}", "--v-head-dim", f"{latent.value_width}",
    ]  # fmt: skip


def _experts(job: Job) -> list[str]:
    """Arguments for the experts."""
    model = job.model
    if (experts := model.experts) is None:
        return []
    options = [
        "--num-experts", f"{experts.number}", "--moe-router-topk", f"{experts.per_token}",
        "--moe-ffn-hidden-size", f"{experts.ffn_size}", "--moe-grouped-gemm", "--moe-permute-fusion",
    ]  # fmt: skip
    options += _router(experts)
    if experts.shared_ffn_size:
        options += ["--moe-shared-expert-intermediate-size", f"{experts.shared_ffn_size}"]
    if experts.dense_layers:
        pattern = f"'([0]*{experts.dense_layers}+[1]*{model.num_layers - experts.dense_layers})'"
        options += ["--moe-layer-freq", pattern]
    return options


def _expert_parallel(job: Job) -> list[str]:
    """Arguments for ep; tp does not split experts, but shares out the tokens."""
    layout = job.layout
    if job.model.experts is None:
        return []
    options = ["--expert-model-parallel-size", f"{layout.ep}", "--expert-tensor-parallel-size", "1"]
    if layout.sends_tokens_once:
        options += ["--moe-token-dispatcher-type", "flex", "--moe-enable-deepep"]
    else:
        options += ["--moe-token-dispatcher-type", "alltoall"]
    return options + ["--overlap-moe-expert-parallel-comm"] * layout.overlaps_ep


def _router(experts: Experts) -> list[str]:
    """Arguments for scores, groups and balance; a balance loss that the model leaves out has the usual coefficient,
    unless its router has a bias for that."""
    options = list[str]()
    if experts.score == "sigmoid":
        options += ["--moe-router-score-function", "sigmoid"]
    elif not experts.normalized:
        options.append("--moe-router-pre-softmax")
    if experts.groups > 1:
        options += ["--moe-router-num-groups", f"{experts.groups}"]
        options += ["--moe-router-group-topk", f"{experts.groups_per_token}"]
    if experts.scale != 1:
        options += ["--moe-router-topk-scaling-factor", f"{experts.scale}"]
    if experts.correction_bias:
        options += ["--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", f"{experts.bias_rate}"]
    if experts.z_loss:
        options += ["--moe-z-loss-coeff", f"{experts.z_loss}"]
    if experts.correction_bias and not experts.balance_loss:
        return [*options, "--moe-router-load-balancing-type", "none"]
    coefficient = f"{experts.balance_loss or _BALANCE_LOSS}"
    return [*options, "--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", coefficient]


def _degrees(job: Job) -> list[str]:
    layout, stage_layers = job.layout, job.estimate.stage_layers
    options = [
        "--tensor-model-parallel-size", f"{layout.tp}", "--pipeline-model-parallel-size", f"{layout.pp}",
        "--context-parallel-size", f"{layout.cp}", "--micro-batch-size", f"{layout.micro_batch}",
        "--global-batch-size", f"{job.scenario.batch.global_batch}",
    ]  # fmt: skip
    options += ["--cp-comm-type", CONTEXT[layout.cp_method]] * (layout.cp > 1)
    if layout.virtual_stages > 1 and not job.scenario.engine.features.overlap_pp:
        options.append("--no-overlap-p2p-communication")
    options += ["--sequence-parallel"] * layout.shards_sequence + ["--tp-comm-overlap"] * layout.overlaps_tp
    if len({*stage_layers}) > 1:
        return [*options, "--pipeline-model-parallel-layout", f"'{split_stages(stage_layers)}'"]
    virtual = ["--num-virtual-stages-per-pipeline-rank", f"{layout.virtual_stages}"] * (layout.virtual_stages > 1)
    return options + virtual


def _data_parallel(job: Job) -> list[str]:
    layout = job.layout
    copies = ["--num-distributed-optimizer-instances", f"{layout.dp_replicate}"] * (layout.dp_replicate > 1)
    overlaps = job.scenario.engine.features.overlap_dp
    if not job.shards_state:
        return ["--overlap-grad-reduce"] * (layout.dp > 1 and overlaps)
    options = ["--use-distributed-optimizer", *["--overlap-grad-reduce", "--overlap-param-gather"] * overlaps, *copies]
    if layout.zero == 1:
        return options
    strategy = ["--data-parallel-sharding-strategy", SHARDED[layout.zero]]
    return [*options, "--use-megatron-fsdp", *strategy, "--ckpt-format", "fsdp_dtensor"]


def _formats(job: Job) -> list[str]:
    if job.scenario.precision.compute == "float16":
        return ["--fp16"]
    return ["--bf16", *["--grad-reduce-in-bf16"] * (job.scenario.engine.features.reduce_bytes == 2)]


def _loss(job: Job) -> list[str]:
    """Arguments for a loss of Transformer Engine."""
    is_fused = job.scenario.engine.features.fused_loss == "always"
    return ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"] * is_fused


def _graphs(job: Job) -> list[str]:
    """Arguments for kernels that start as CUDA graphs."""
    match job.scenario.engine.features.cuda_graphs:
        case "full":
            return ["--cuda-graph-impl", "local", "--cuda-graph-scope", "full_iteration"]
        case "attention":
            return ["--cuda-graph-impl", "transformer_engine", "--cuda-graph-scope", "attn"]
    return []


def _recompute(job: Job) -> tuple[list[str], list[str]]:
    """Arguments and gaps."""
    text, parsed = job.layout.recompute, Recompute.parse(job.layout.recompute)
    if parsed.is_selective:
        modules = job.scenario.engine.features.recompute_modules
        named = [] if modules == USUAL_MODULES else ["--recompute-modules", *modules]
        return ["--recompute-granularity", "selective", *named], []
    if parsed.every == 0:
        return [], []
    full = ["--recompute-granularity", "full", "--recompute-method"]
    if parsed.every == 1:
        return [*full, "uniform", "--recompute-num-layers", "1"], []
    stages = {*job.estimate.stage_layers}
    number = ceil(max(stages) * parsed.number / parsed.every)
    gap = f"layout.recompute={text} is nothing that it has: the first {plural(number, 'block')} of each stage instead"
    is_exact = len(stages) == 1 and number * parsed.every == max(stages) * parsed.number
    return [*full, "block", "--recompute-num-layers", f"{number}"], [gap] * (not is_exact)


def _training(job: Job) -> list[str]:
    """Arguments that a first run needs beside its layout."""
    optimizer = job.scenario.optimizer
    match optimizer:
        case AdamW():
            betas = ["--adam-beta1", f"{optimizer.beta1:g}", "--adam-beta2", f"{optimizer.beta2:g}"]
            name = ["--optimizer", "adam", *betas, "--adam-eps", f"{optimizer.eps:g}"]
        case SGD():
            name = ["--optimizer", "sgd", "--sgd-momentum", f"{optimizer.momentum:g}"]
        case Muon():
            raise InvalidConfig("--optimizer=muon is not written for Megatron-LM, which has its own; use adamw or sgd")
        case _:
            raise InvalidConfig(f"--optimizer={optimizer.name} is nothing that Megatron-LM has; use adamw or sgd")
    return [
        *name, "--lr", f"{optimizer.lr:g}", "--weight-decay", f"{optimizer.weight_decay:g}",
        "--clip-grad", f"{optimizer.max_norm:g}", "--train-iters", f"{job.steps}", "--eval-iters", "0",
        "--log-interval", "1", "--log-throughput", "--mock-data", "--tokenizer-type", "NullTokenizer",
        "--vocab-size", f"{job.model.vocab_size}", *_padding(job),
    ]  # fmt: skip


def _padding(job: Job) -> list[str]:
    """The number by whose multiples it pads the vocabulary, where by default that would be another one."""
    step = gcd(128, job.model.vocab_size // job.layout.tp)
    return [] if step == 128 else ["--make-vocab-size-divisible-by", f"{step}"]


def _one_an_option(words: Sequence[str]) -> Iterator[str]:
    """A line for each option with its values."""
    line: list[str] = []
    for word in words:
        if word.startswith("--") and line:
            yield " ".join(line)
            line = []
        line.append(word)
    if line:
        yield " ".join(line)


MEGATRON = Program(
    engine="megatron", title="Megatron-LM", version="commit 000c4ac24f",
    parser="megatron/training/arguments.py", write=write, options=choose_options, together=TOGETHER,
    first_line="#!/usr/bin/env bash",
)  # fmt: skip
