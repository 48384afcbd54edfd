#!/bin/bash
set -e
export NEMO_HOME=/work/nemo
nemo llm pretrain --factory "llama3_70b(num_nodes=16, name='long')" \
    trainer.strategy.tensor_model_parallel_size=8 trainer.strategy.virtual_pipeline_model_parallel_size=10 \
    data.global_batch_size=256 log.log_dir=/logs trainer.max_steps=50 optim.config.lr=1e-4 -y
