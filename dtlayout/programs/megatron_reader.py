"""Megatron-LM's options, read as a job of ours: all that its scripts, and trees of other programs, say of it.

Defaults are those of the commit that `megatron.MEGATRON` names. Options that only name data, logs, checkpoints or the
learning rate's course change no prediction.
"""

from collections.abc import Mapping

from dtlayout.programs.megatron_formats import read_engine, read_formats, read_optimizer
from dtlayout.programs.megatron_layout import read_batch, read_layout
from dtlayout.programs.megatron_model import read_experts, read_model
from dtlayout.programs.megatron_options import MegatronOptions
from dtlayout.programs.own_names import Said
from dtlayout.programs.understood import Understood

IGNORED: Mapping[str, str] = {
    "data": r"--(data-path|.*-data-path|data-cache-path|split|mock-data|tokenizer-.*|vocab-file|merge-file"
    r"|dataloader-type|num-workers|reset-position-ids|reset-attention-mask|eod-mask-loss|no-create-.*"
    r"|num-dataset-builder-threads|data-args-path|num-tokens|no-mmap-bin-files|tiktoken-.*|trust-remote-code"
    r"|create-attention-mask.*|extra-vocab-size|patch-tokenizer-type|dataset)",
    "logs and evaluation": r"--(log-.*|tensorboard-.*|wandb-.*|eval-.*|timing-.*|no-log-.*|profile.*|one-logger.*"
    r"|no-one-logger|enable-one-logger|logging-level|.*exit-.*)",
    "checkpoints": r"--(save.*|load|no-save-.*|no-load-.*|ckpt-.*|auto-detect-ckpt-format|async-save|dist-ckpt-.*"
    r"|use-dist-ckpt|use-checkpoint-.*|override-opt.*|finetune|non-persistent-.*|pretrained-checkpoint)",
    "the course of the learning rate": r"--(min-lr|lr-.*|train-iters|train-samples|override-lr.*|use-checkpoint-opt.*"
    r"|start-weight-decay|end-weight-decay|weight-decay-incr-style)",
    "initial values and chance": r"--(init-method-.*|seed|data-parallel-random-init|no-initialization"
    r"|apply-layernorm-1p|initial-loss-scale|min-loss-scale|loss-scale.*|hysteresis|no-query-key-layer-scaling|decoupled-.*)",
    "how ranks meet": r"--(distributed-backend|distributed-timeout-minutes|local-rank|lazy-mpu-init|use-mcore-models"
    r"|use-legacy-models|no-async-tensor-.*|manual-gc.*|no-check-for-nan.*|check-for-nan.*"
    r"|rerun-mode|enable-experimental|nccl-.*|use-tp-pp-dp-mapping|disable-straggler.*|high-priority-stream-groups)",
    "dropout": r"--(attention|hidden)-dropout",
    "what its blocks do alike": r"--(no-position-embedding|ddp-num-.*|ddp-bucket-size|ddp-average-.*|tp-comm-.*-.*"
    r"|bias-.*-fusion|use-fused-.*|moe-grouped-gemm|moe-permute-fusion|moe-router-fusion|moe-router-dtype"
    r"|moe-per-layer-logging|moe-input-jitter-eps|attention-softmax-in-fp32|use-rotary-.*|position-.*"
    r"|max-position-embeddings|rotary-(percent|interleaved|seq-.*)|original-max-.*|rope-.*|fp8-margin|fp8-amax-.*"
    r"|fp8-interval|moe-router-padding-.*|cuda-graph-warmup-steps|te-rng-tracker|use-te-rng-tracker"
    r"|moe-router-pre-softmax-scale|calculate-per-token-loss|use-cpu-initialization|apply-query-key-layer-scaling)",
}  # fmt: skip
"""Subject of options that change no prediction here → a pattern of their names."""
OTHERWISE = (
    r"--(no-bias-.*-fusion|no-masked-softmax-fusion|no-rope-fusion|no-persist-layer-norm|no-gradient-accumulation-fusion"
    r"|cross-entropy-.*|fp8-param-gather|fp8-wgrad|empty-unused-.*|delay-wgrad.*|accumulate-allreduce-grads-in-fp32"
    r"|overlap-param-gather-with-optimizer-step|align-.*|train-sync-interval|DDP-impl)"
)
"""Options that change a little of time or memory, which is predicted as if they were not there."""
_OF_MODEL: Mapping[str, str] = {
    "the model, whose sizes lie elsewhere": r"--(num-(layers|attention-heads|query-groups|experts)|hidden-size"
    r"|kv-channels|ffn-hidden-size|group-query-attention|normalization|norm-epsilon|rotary-.*|.*rope-scaling.*|swiglu|untie-.*"
    r"|disable-bias-linear|add-qkv-bias|qk-layernorm|.*vocab-size.*|position-embedding-type|transformer-impl|moe-.*"
    r"|expert-tensor-parallel-size)",
}
_RANKS = ("--nproc_per_node", "--nproc-per-node"), ("--nnodes",)


def read_job(
    found: Understood, options: Mapping[str, list[str]], said: Said | None = None,
    ignored: Mapping[str, str] = IGNORED, *, has_model: bool = True,
) -> None:  # fmt: skip
    """Fill a value by the options, section by section.

    `said` has the names that a tree has for the options; `ignored` are patterns by subject. Without `has_model` the
    model is left out, whose sizes no option says.
    """
    reader = MegatronOptions(found, options, said)
    if has_model:
        read_model(reader)
        read_experts(reader)
    read_batch(reader)
    read_layout(reader)
    read_formats(reader)
    read_optimizer(reader)
    read_engine(reader)
    reader.read_rest(ignored if has_model else {**ignored, **_OF_MODEL}, OTHERWISE)


def count_gpus(found: Understood, ranks: Mapping[str, str], num_gpus: int) -> None:
    """Note the GPUs that torchrun's options start, or those that are said in their place."""
    counts = []
    for names in _RANKS:
        word = next((ranks[name] for name in names if name in ranks), None)
        counts.append(int(word) if word is not None and word.isdigit() else 0)
    per_node, nodes = counts
    if per_node:
        found.gpus_per_node = per_node
        has_nodes = any(name in ranks for name in _RANKS[1])
        found.num_gpus = per_node * (nodes if has_nodes else 1)
    found.num_gpus = num_gpus or found.num_gpus
