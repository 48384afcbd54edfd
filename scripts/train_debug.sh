#!/bin/sh
# Start the first run: one rank a GPU where torch sees any, else 8 ranks on the CPU. Takes the folder of torchrun.
set -eu
bin=${1:?usage: train_debug.sh FOLDER_OF_TORCHRUN}

gpus=$("$bin/python" -c "import sys; sys.path[:] = filter(None, sys.path); import torch; print(torch.cuda.device_count())")
if [ "$gpus" -eq 0 ]; then
    export OMP_NUM_THREADS=1 # the ranks share the cores
    set -- --nproc-per-node 8 train.py configs/debug.toml
else
    set -- --nproc-per-node "$gpus" train.py configs/debug.toml --precision.compute=bfloat16 \
        --batch.global_batch=$((4 * gpus)) --layout.micro_batch=1
    if [ $((gpus % 4)) -ne 0 ]; then
        set -- "$@" --layout.pp=1 --layout.tp=1
    fi
fi
set -x
exec "$bin/torchrun" "$@"
