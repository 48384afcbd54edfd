#!/bin/bash
# A file beside it, two values of which are changed.
DUMP=${DUMP:-./runs/again}
NGPU=8 CONFIG_FILE="./llama3_8b.toml" ./run_train.sh --job.dump_folder "$DUMP" \
    --training.local_batch_size 4 --parallelism.data_parallel_shard_degree 4 --parallelism.tensor_parallel_degree 2 \
    --activation_checkpoint.selective_ac_option op --compile.enable --model.converters quantize.linear.float8
