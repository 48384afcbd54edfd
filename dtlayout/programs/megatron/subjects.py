"""Subjects of Megatron-LM's options that its reader does not put into a job: ignored, predicted otherwise, or refused.

Options are those of its scripts from 2023 to 2026. One that is in no table is refused by its name alone.
"""

from collections.abc import Mapping, Sequence

IGNORED: Mapping[str, str] = {
    "data": r"--(data-path|.*-data-path|data-cache-path|split|mock-data|tokenizer-.*|vocab-file|merge-file"
    r"|dataloader-.*|num-workers|reset-position-ids|reset-attention-mask|eod-mask-loss|no-create-.*"
    r"|num-dataset-builder-threads|.*data-args-path|num-tokens|no-mmap-bin-files|tiktoken-.*|trust-remote-code"
    r"|create-attention-mask.*|extra-vocab-size|vocab-extra-ids|patch-tokenizer-type|dataset|mid-level-dataset-.*"
    r"|(object-storage|s3)-cache-path|no-data-sharding|fim-.*|packing-buffer-size|sft-.*|no-use-tokenizer-.*)",
    "logs and evaluation": r"--(log-.*|tensorboard-.*|wandb-.*|eval-.*|timing-.*|no-log-.*|profile.*|one-logger.*"
    r"|no-one-logger|enable-one-logger|logging-level|.*exit-.*|record-memory-history|memory-snapshot-path|app-tag-.*"
    r"|no-barrier-with-.*|barrier-with-.*|config-logger-dir|straggler-.*|result-rejected-tracker-filename)",
    "checkpoints": r"--(save.*|load|no-save-.*|no-load-.*|ckpt-.*|no-ckpt-.*|auto-detect-ckpt-format|async-.*"
    r"|dist-ckpt-.*|use-dist-ckpt|use-checkpoint-.*|override-opt.*|finetune|non-persistent-.*|pretrained-checkpoint"
    r"|use-persistent-ckpt-worker|load-main-params-from-ckpt|replication.*|verify-integrity|(en|dis)able-msc)",
    "what runs when it fails": r"--(inprocess-.*|ft-.*|enable-ft-package|calc-ft-timeouts|error-injection-.*"
    r"|check-weight-hash-.*|adlr-autoresume.*)",
    "the course of the learning rate": r"--(min-lr|lr-.*|train-iters|train-samples|override-lr.*|use-checkpoint-opt.*"
    r"|start-weight-decay|end-weight-decay|weight-decay-incr-style|phase-transition-.*|no-weight-decay-cond.*"
    r"|apply-wd-to-.*|decrease-batch-size-if-needed)",
    "initial values and chance": r"--(init-method-.*|seed|data-parallel-random-init|no-initialization"
    r"|apply-layernorm-1p|initial-loss-scale|min-loss-scale|loss-scale.*|hysteresis|no-query-key-layer-scaling"
    r"|decoupled-.*|embedding-init-method-.*|init-model-with-meta-device|deterministic-mode|batch-invariant-mode"
    r"|moe-use-upcycling|moe-upcycling-.*)",
    "how ranks meet": r"--(distributed-backend|distributed-timeout-minutes|local-rank|lazy-mpu-init|use-mcore-models"
    r"|use-legacy-models|no-use-legacy-models|no-async-tensor-.*|manual-gc.*|no-check-for-nan.*|check-for-nan.*"
    r"|rerun-mode|enable-experimental|nccl-.*|use-tp-pp-dp-mapping|disable-straggler.*|high-priority-stream-groups"
    r"|use-nccl-ub|disable-gloo-.*|enable-gloo-.*|use-sharp|sharp-.*|suggested-communication-.*|create-all-gather-group"
    r"|ddp-pad-buckets-.*|ddp-reduce-scatter-.*|(no-)?gradient-reduce-div-fusion|no-align-.*|fsdp-manual-registration"
    r"|pipeline-model-parallel-comm-backend|disable-tp-comm-.*|symmetric-ar-type|moe-.*-num-sms)",
    "dropout": r"--(attention|hidden)-dropout", "settings of another optimizer": r"--(muon|lion)-.*",
    "what its blocks do alike": r"--(no-position-embedding|add-position-embedding|ddp-num-.*|ddp-bucket-size"
    r"|ddp-average-.*|tp-comm-.*-.*|bias-.*-fusion|use-fused-.*|moe-grouped-gemm|moe-permute-fusion|moe-router-fusion"
    r"|moe-router-dtype|moe-per-layer-logging|moe-input-jitter-eps|attention-softmax-in-fp32|use-rotary-.*|position-.*"
    r"|max-position-embeddings|rotary-(percent|interleaved|seq-.*|scaling-.*)|original-max-.*|rope-.*|fp8-margin"
    r"|fp8-amax-.*|fp8-interval|moe-router-padding-.*|cuda-graph-warmup-steps|te-rng-tracker|use-te-rng-tracker"
    r"|moe-router-pre-softmax-scale|calculate-per-token-loss|use-cpu-initialization|apply-query-key-layer-scaling"
    r"|mscale.*|beta-(fast|slow)|yarn-.*|moe-router-force-.*|moe-token-drop-policy|moe-apply-probs-on-input"
    r"|moe-use-legacy-grouped-gemm|export-.*|use-te-activation-func|openai-gelu|glu-linear-offset)",
    "what is not used in training": r"--inference-.*",
}  # fmt: skip
"""Subject of options that change no prediction here → a pattern of their names."""
OTHERWISE = (
    r"--(no-bias-.*-fusion|no-masked-softmax-fusion|no-rope-fusion|no-persist-layer-norm|no-gradient-accumulation-fusion"
    r"|cross-entropy-.*|fp8-param-gather|fp8-wgrad|empty-unused-.*|delay-wgrad.*|accumulate-allreduce-grads-in-fp32"
    r"|overlap-param-gather-with-optimizer-step|align-.*|train-sync-interval|DDP-impl|squared-relu|sft"
    r"|fsdp-double-buffer|fsdp-db-.*|keep-fp8-.*|no-fp8-weight-.*|reuse-grad-buf-.*|fp4-param-gather|megatron-fsdp-.*"
    r"|use-megatron-fsdp-v2|first-last-layers-bf16|num-layers-at-(start|end)-in-bf16|disable-bf16-reduced-.*"
    r"|fp16-lm-cross-entropy|moe-shared-expert-overlap|overlap-p2p-communication-.*|defer-embedding-.*"
    r"|wgrad-deferral-limit|use-transformer-engine-op-fuser|disable-jit-fuser|no-scatter-gather-.*"
    r"|microbatch-group-size-.*|activation-func-.*|qk-clip.*|qk-l2-norm|use-mup|mup-.*|no-pin-cpu-.*)"
)
"""Options that change a little of time or memory, which is predicted as if they were not there."""
NEUTRAL: Mapping[str, Sequence[str]] = {
    "--softmax-type": ("vanilla",), "--outer-dp-sharding-strategy": ("no_shard",), "--mtp-num-layers": ("0",),
    "--cpu-offloading-num-layers": ("0",), "--window-attn-skip-freq": ("1",),
}  # fmt: skip
"""Option → words with which nothing is otherwise; others are refused."""
REFUSED: Mapping[str, str] = {
    "tokens behind the next": r"--mtp-.*", "tokens that experts drop": r"--moe-(expert-capacity-factor"
    r"|pad-expert-input-to-capacity|token-dropping)",
    "experts of another form": r"--moe-(latent-size|shared-expert-gate|extended-tp|router-topk-limited-devices)",
    "attention to a window, or of another form": r"--(window-.*|softmax-type|no-rope-freq|attention-output-gate"
    r"|linear-.*|experimental-attention-variant|dsa-.*|chunked-attention.*)",
    "blocks of several kinds": r"--(hybrid-(override-pattern|attention-ratio|mlp-ratio|layer-pattern)|is-hybrid-model"
    r"|mamba-.*|spec|heterogeneous-.*|enable-gpt-oss)",
    "what lies in the host's memory": r"--(optimizer-(cpu-offload|offload-.*)|overlap-cpu-optimizer-.*"
    r"|use-torch-optimizer-.*|cpu-offloading.*|fine-grained-activation-offloading|offload-modules|min-offloaded-tensor-size)",
    "PyTorch's FSDP": r"--(use-torch-fsdp2|torch-fsdp2-.*)", "an optimizer that copies share": r"--outer-dp-.*",
    "a residual stream in fp32": r"--fp32-residual-connection",
    "inputs of blocks that tp shares out": r"--distribute-saved-activations",
    "contexts of several levels or lengths": r"--(hierarchical-context-.*|hybrid-context-.*|max-seqlen-per-.*"
    r"|dynamic-.*)",
    "reinforcement learning": r"--(rl-.*|perform-rl-step|grpo-.*)", "adapters": r"--lora-.*",
    "formats that another file says": r"--(te-precision-config-file|(use-)?kitchen.*)",
    "a stage of embeddings alone": r"--standalone-embedding-stage", "a batch that changes": r"--step-batch-size-.*",
    "what another file says": r"--yaml-cfg",
}  # fmt: skip
"""Subject that is not predicted → a pattern of options that ask for it."""
