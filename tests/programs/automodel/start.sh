#!/bin/bash
export HF_HOME=/scratch/hf
NODES=${NODES:-2}
torchrun --nproc-per-node 8 --nnodes $NODES --rdzv-backend c10d -m nemo_automodel.cli.app lora.yaml \
    --step_scheduler.local_batch_size 2 --distributed.tp_size=2 --dataset.seq_length 1024 --optimizer.betas "[0.9, 0.95]"
