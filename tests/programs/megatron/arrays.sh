#!/bin/bash
set -euxo pipefail
# Several nodes, arrays with comments, sizes by arithmetic.
NODES=${NODES:-4}
PER_NODE=${PER_NODE:-8}
TP=${TP:-8}
PP=${PP:-2}
DP=$(( NODES * PER_NODE / (TP * PP) ))
BATCH=$((DP*32))

LAUNCH=(
    --nproc-per-node "$PER_NODE"   # all GPUs of a node
    --nnodes "$NODES"
    --rdzv-endpoint "${HOST:-localhost}:29500"
)
MODEL=(
    --num-layers 80
    --hidden-size 8192 --ffn-hidden-size 28672
    --num-attention-heads 64
    --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --normalization RMSNorm --norm-epsilon 1e-5
    --swiglu --disable-bias-linear
    --position-embedding-type rope --rotary-base 500000
    --untie-embeddings-and-output-weights
    --padded-vocab-size 128256
)
PARALLEL=(--tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP)
PARALLEL+=(--num-layers-per-virtual-pipeline-stage 5 --sequence-parallel)
PARALLEL+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --tp-comm-overlap)

torchrun "${LAUNCH[@]}" pretrain_gpt.py "${MODEL[@]}" "${PARALLEL[@]}" \
    --micro-batch-size 1 --global-batch-size "$BATCH" \
    --bf16 --attention-backend fused \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 1.5e-4 --min-lr 1.5e-5 \
    --save checkpoints --save-interval 1000 --log-interval 1 "$@" > train.log 2>&1
