#!/bin/sh
# Start the first run: one rank a GPU where there are GPUs, else 8 ranks on the CPU.
set -eu
bin=${1:?usage: train_debug.sh FOLDER_OF_TORCHRUN}

gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
ranks=$gpus
overrides=""
if [ "$gpus" -eq 0 ]; then
    ranks=8
    export OMP_NUM_THREADS=1 # the ranks share the cores
else
    overrides="--precision.compute=bfloat16"
    if [ $((gpus % 4)) -ne 0 ]; then
        overrides="$overrides --layout.pp=1 --layout.tp=1 --layout.micro_batch=1 --batch.global_batch=$((16 * gpus))"
    fi
fi
set -x
# shellcheck disable=SC2086 # the overrides are words
exec "$bin/torchrun" --nproc-per-node "$ranks" train.py configs/debug.toml $overrides
