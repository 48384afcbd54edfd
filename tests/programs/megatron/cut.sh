#!/bin/bash
# Stages of different sizes, and blocks that are recomputed in part.
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 30 --hidden-size 4096 --ffn-hidden-size 11008 \
  --num-attention-heads 32 --seq-length 4096 --vocab-size 32000 --swiglu --normalization RMSNorm --disable-bias-linear \
  --position-embedding-type rope --untie-embeddings-and-output-weights --qk-layernorm --group-query-attention --num-query-groups 4 \
  --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7 \
  --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --num-distributed-optimizer-instances 2 \
  --recompute-granularity full --recompute-method block --recompute-num-layers 4 \
  --micro-batch-size 2 --global-batch-size 128 --bf16 --lr 1e-4
