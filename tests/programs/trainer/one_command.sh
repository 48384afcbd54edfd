accelerate launch --use_deepspeed --zero_stage 3 --num_machines 1 --num_processes 4 --mixed_precision bf16 \
    --offload_optimizer_device none --offload_param_device none --gradient_accumulation_steps 2 train.py \
    --model_name_or_path Qwen/Qwen3-4B --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --bf16 true \
    --max_length 4096 --gradient_checkpointing true --attn_implementation eager --adam_epsilon 1e-6
