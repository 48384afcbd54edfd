#!/usr/bin/env bash
# A dense model on one node: variables and strings of arguments.
GPUS_PER_NODE=8
DATA=/data/tokens_text_document
export OMP_NUM_THREADS=4
export CUDA_DEVICE_MAX_CONNECTIONS=1

SIZE="--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048"
SIZE="$SIZE --max-position-embeddings 2048 --vocab-size 50304"

python -m torch.distributed.launch --nproc_per_node=$GPUS_PER_NODE --nnodes=1 \
    pretrain_gpt.py $SIZE \
    --micro-batch-size 4 --global-batch-size 256 \
    --fp16 --lr 1.5e-4 --lr-decay-style cosine --train-iters 500000 --lr-warmup-fraction .01 \
    --data-path $DATA --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt \
    --attention-dropout 0.1 --weight-decay 1e-2 --clip-grad 1.0
