"""Files that somebody gives a page: a config.json, and a script of another program."""

HF = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
SCRIPT = """#!/bin/bash
torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --tensor-model-parallel-size 2 --num-layers 32 \\
  --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 2048 \\
  --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 128 --swiglu \\
  --normalization RMSNorm --disable-bias-linear \\
  --untie-embeddings-and-output-weights --position-embedding-type rope --bf16 --use-distributed-optimizer \\
  --sequence-parallel --tokenizer-type NullTokenizer --vocab-size 32000 --train-iters 10 --mock-data
"""
