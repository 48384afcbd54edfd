#!/usr/bin/env bash
NODES=${NODES:-2}
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc_per_node=8 --nnodes=$NODES scripts/training/run_recipe.py \
    --recipe llama3_8b_pretrain_config \
    model.tensor_model_parallel_size=2 model.sequence_parallel=true \
    model.context_parallel_size=1 +model.recompute_granularity=selective '+model.recompute_modules=[core_attn]' \
    train.global_batch_size=$((NODES * 64)) train.train_iters=20 \
    mixed_precision=bf16_with_fp8_current_scaling_mixed \
    optimizer.lr=0.00025 checkpoint.save=null
