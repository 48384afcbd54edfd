NNODES=2
torchrun --nnodes $NNODES --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint $HOST:29500 \
    run_clm.py \
    --model_name_or_path meta-llama/Meta-Llama-3-8B \
    --block_size 4096 \
    --per_device_train_batch_size 2 \
    --fsdp "full_shard auto_wrap" \
    --fsdp_config fsdp.json \
    --bf16 \
    --torch_compile \
    --neftune_noise_alpha 5 \
    --do_train --overwrite_output_dir --output_dir out
