#!/bin/sh
# Start the first run: one rank a GPU where torch sees any, else 8 ranks on the CPU. Takes the folder of dtlayout.
set -eu
bin=${1:?usage: train_debug.sh FOLDER_OF_DTLAYOUT}

gpus=$("$bin/python" -c "import sys; sys.path[:] = filter(None, sys.path); import torch; print(torch.cuda.device_count())")
if [ "$gpus" -eq 0 ]; then
    export OMP_NUM_THREADS=1 # the ranks share the cores
    set -- train configs/debug.toml --ranks 8
else
    set -- train configs/debug.toml --ranks "$gpus" --precision.compute=bfloat16 \
        --batch.global_batch=$((4 * gpus)) --layout.micro_batch=1
    if [ $((gpus % 4)) -ne 0 ]; then
        set -- "$@" --layout.pp=1 --layout.tp=1
    fi
fi
set -x
exec "$bin/dtlayout" "$@"
