accelerate launch --num_processes 8 -m axolotl.cli.train with_deepspeed.yml --learning_rate 2e-5
