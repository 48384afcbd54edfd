accelerate launch --config_file fsdp.yaml src/train.py \
    --stage sft --do_train --model_name_or_path meta-llama/Llama-2-7b-hf --finetuning_type full \
    --dataset my_chats --template llama2 --cutoff_len 1024 --output_dir saves/old --bf16 \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 1e-5 --flash_attn fa2
