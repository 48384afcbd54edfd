#!/bin/bash
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
# The recipe lies beside this script.
HERE=$(cd "$(dirname "$0")" && pwd)
NODES=8
MB=2
nemo llm pretrain --yaml recipe.yaml \
  trainer.num_nodes=$NODES \
  data.micro_batch_size=$MB data.global_batch_size=$((NODES * 8 * MB)) \
  trainer.strategy.pipeline_model_parallel_size=1 trainer.strategy.virtual_pipeline_model_parallel_size=null \
  model.config.recompute_granularity=full model.config.recompute_method=uniform model.config.recompute_num_layers=1 \
  log.ckpt=null trainer.max_steps=20 --yes
