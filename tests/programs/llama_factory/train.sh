#!/bin/bash
FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=0 NPROC_PER_NODE=8 MASTER_ADDR=10.0.0.1 llamafactory-cli train full.yaml \
    learning_rate=2.0e-5 cutoff_len=4096
