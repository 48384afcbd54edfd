#!/bin/bash
# fp8, context parallelism, and a program that is a variable.
PROGRAM=pretrain_gpt.py
WORLD=32
ARGS="
    --num-layers 32
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 32768 --max-position-embeddings 32768
    --context-parallel-size 4 --cp-comm-type a2a --tensor-model-parallel-size 2 --sequence-parallel
    --bf16 --fp8-format hybrid --fp8-recipe tensorwise
    --micro-batch-size 1 --global-batch-size 128 --vocab-size 128256
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --rotary-base 500000 --use-distributed-optimizer
    --cuda-graph-impl local --cuda-graph-scope full_iteration
"
torchrun --nproc_per_node 8 --nnodes $((WORLD / 8)) ${PROGRAM} ${ARGS} --lr 3e-4 --mock-data
