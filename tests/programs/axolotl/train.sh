CUDA_VISIBLE_DEVICES=0,1 axolotl train qlora.yml --micro-batch-size 1 --launcher torchrun -- --nproc_per_node=2 --nnodes=1
