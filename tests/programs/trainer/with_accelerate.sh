accelerate launch --config_file sharded.yaml --num_processes 8 --main_process_port 29600 train.py \
    --model_name_or_path Qwen/Qwen2.5-7B-Instruct \
    --dataset_name my/chats \
    --per_device_train_batch_size 1 --gradient_accumulation_steps 4 \
    --max_seq_length 8192 --packing True \
    --gradient_checkpointing --gradient_checkpointing_kwargs '{"use_reentrant": false}' \
    --bf16 --torch_dtype bfloat16 --attn_implementation flash_attention_2 \
    --optim adamw_torch_fused --learning_rate 1e-5 --adam_beta2 0.95 --max_grad_norm 0.3 \
    --use_liger_kernel --seed 7 --output_dir out
