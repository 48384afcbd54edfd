#!/bin/bash
# Latent attention and experts, on as many nodes as are given.
NODES=${NODES:-16}
EP=${EP:-8}
((GPUS = NODES * 8, GBS = GPUS > 64 ? GPUS * 16 : 2 ** 10))
let "SAMPLES = GBS * 1000"
WARMUP=$(expr $SAMPLES / 100)
MLA_ARGS=(
    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --rotary-scaling-factor 40
    --mscale 1.0
    --mscale-all-dim 1.0
    --qk-layernorm
)
MOE_ARGS=(
    --num-experts 256
    --moe-layer-freq "([0]*3+[1]*$((61 - 3)))"
    --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-router-load-balancing-type seq_aux_loss
    --moe-router-topk 8
    --moe-router-pre-softmax
    --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3
    --moe-router-num-groups 8
    --moe-router-group-topk 4
    --moe-router-topk-scaling-factor 2.5
    --moe-router-dtype fp32
    --moe-router-force-load-balancing
    --moe-router-padding-for-quantization
    --moe-aux-loss-coeff 1e-4
    --moe-token-dispatcher-type flex
    --moe-flex-dispatcher-backend hybridep
    --moe-hybridep-num-sms 32
    --moe-grouped-gemm
    --moe-permute-fusion
)
torchrun --nproc_per_node 8 --nnodes $NODES pretrain_gpt.py \
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 \
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 10000 \
    --make-vocab-size-divisible-by 3232 --vocab-size 129280 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu \
    --disable-bias-linear --untie-embeddings-and-output-weights "${MLA_ARGS[@]}" "${MOE_ARGS[@]}" \
    --tensor-model-parallel-size 1 --expert-model-parallel-size $EP --expert-tensor-parallel-size 1 \
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --calculate-per-token-loss \
    --init-model-with-meta-device --ckpt-format fsdp_dtensor --fsdp-double-buffer --use-nccl-ub \
    --megatron-fsdp-grad-comm-dtype bf16 --megatron-fsdp-main-grads-dtype bf16 --outer-dp-sharding-strategy no_shard \
    --recompute-granularity selective --recompute-modules mlp moe mla_up_proj layernorm \
    --micro-batch-size 1 --global-batch-size $GBS --train-samples $SAMPLES --lr-warmup-samples $WARMUP --lr 3.9e-6 \
    --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-params-dtype fp16 \
    --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --weight-decay 0.1 --bf16 --attention-backend auto \
    --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --enable-experimental --mock-data --tokenizer-type NullTokenizer
