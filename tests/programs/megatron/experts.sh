#!/bin/bash
# A mixture of experts; the cluster's scheduler says on which node a process runs.
N=${SLURM_NNODES:-16}
RANK_ARGS="--nnodes $N --nproc_per_node 8 --node_rank ${SLURM_NODEID:-0}"
torchrun $RANK_ARGS pretrain_gpt.py \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 32768 \
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 \
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall \
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope \
    --untie-embeddings-and-output-weights --vocab-size 32000 \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 \
    --use-distributed-optimizer --overlap-grad-reduce --micro-batch-size 1 --global-batch-size 256 --bf16 \
    --lr 1e-4 --weight-decay 0.1 --clip-grad 1.0 --train-iters 500 --mock-data
