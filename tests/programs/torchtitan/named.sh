#!/usr/bin/env bash
# A config of release 0.3 by its name, with other values behind it.
set -euo pipefail
export NGPU=8
export MODULE=llama3 CONFIG=llama3_8b
export LOG_RANK=0

./run_train.sh \
    --training.steps 200 --training.local-batch-size 2 --training.disable-cuda-graphs \
    --parallelism.tensor_parallel_degree=2 --parallelism.data-parallel-shard-degree -1 \
    --compile.enable --compile.components model,loss --compile.enable-async-tensor-parallel \
    --optimizer.param-groups.0.optimizer-kwargs.lr 1e-4 \
    --optimizer.param-groups.0.optimizer-kwargs.betas 0.9 0.98 \
    --optimizer.implementation fused_opt_states_bf16 \
    --checkpoint.no-enable --metrics.no-enable-tensorboard --dataloader.dataset c4 \
    activation-checkpoint:full
