#!/bin/bash
trl sft \
    --config smallest.yaml \
    --accelerate_config zero2 --num_processes 4 \
    --model_name_or_path Qwen/Qwen2.5-7B \
    --learning_rate 5e-6 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \
    --max_length 2048 --no_gradient_checkpointing --torch_compile --output_dir out
