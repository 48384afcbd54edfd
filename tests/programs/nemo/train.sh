#!/bin/bash
# A command with changes of a YAML beside it.
NODES=${NODES:-2}
python -u /opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py \
  --config-path=conf --config-name=small \
  trainer.num_nodes=$NODES trainer.devices=8 \
  model.tensor_model_parallel_size=2 model.sequence_parallel=True \
  ++model.optim.betas=[0.9,0.95] +model.attention_backend=flash ~model.data.data_impl \
  exp_manager.explicit_log_dir="/results"
