CUDA_VISIBLE_DEVICES=0 python qlora.py \
    --model_name_or_path unsloth/Meta-Llama-3.1-8B-Instruct \
    --use_peft --lora_r 64 --lora_alpha 16 --lora_dropout 0.05 --target_modules all-linear \
    --load_in_4bit --bnb_4bit_quant_type nf4 --bnb_4bit_compute_dtype bfloat16 --use_bnb_nested_quant \
    --bf16 --optim paged_adamw_8bit --learning_rate 2e-4 \
    --per_device_train_batch_size 4 --gradient_accumulation_steps 4 --gradient_checkpointing \
    --max_seq_length 2048 --group_by_length --max_steps 1000 --output_dir out
