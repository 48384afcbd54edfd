# Two nodes, by the launcher's own names.
./scripts/training/train.sh --nodes 2 --gpus-per-node 8 --mode pretrain --model qwen3_8b -gb 128 -mb 4 -tp 2 \
    --lr 1e-4 --max_steps 100 --peft_scheme none comm_overlap.tp_comm_overlap=false dataset.num_workers=8
