#!/bin/bash
export TOKENIZERS_PARALLELISM=false
MODEL=${MODEL:-meta-llama/Llama-2-13b-hf}
deepspeed --num_gpus 8 --num_nodes 2 --master_port 29511 finetune.py \
    --deepspeed stage2.json \
    --model_name_or_path $MODEL \
    --data_path data/instructions.json \
    --bf16 True \
    --output_dir checkpoints/13b \
    --num_train_epochs 3 \
    --per_device_train_batch_size 4 \
    --per_device_eval_batch_size 4 \
    --gradient_accumulation_steps 2 \
    --evaluation_strategy no \
    --save_strategy steps --save_steps 500 --save_total_limit 2 \
    --learning_rate 2e-5 --weight_decay 0. --warmup_ratio 0.03 --lr_scheduler_type cosine \
    --logging_steps 1 \
    --tf32 True \
    --model_max_length 2048 \
    --gradient_checkpointing True \
    --use_flash_attn True \
    --dataloader_num_workers 4 \
    --lazy_preprocess True \
    --report_to wandb
