export WANDB_PROJECT=sft
accelerate launch --num_processes 2 --mixed_precision bf16 examples/scripts/sft.py \
    --model_name_or_path meta-llama/Llama-3.2-3B --dtype bfloat16 \
    --dataset_name my/chats --use_peft --lora_r 8 --load_in_8bit \
    --per_device_train_batch_size 8 --max_length 1024 --packing --packing_strategy wrapped \
    --eval_strategy steps --eval_steps 100 --output_dir out
