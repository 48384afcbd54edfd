"""Names that other programs have for our sections and keys, for the advice in refusals."""

MEANT = {
    "lora": "adapter", "qlora": "adapter", "peft": "adapter", "ia3": "adapter",
    "adapter.r": "adapter.rank", "adapter.lora_r": "adapter.rank", "adapter.lora_alpha": "adapter.alpha",
    "adapter.target_modules": "adapter.targets",
    "optimizer.learning_rate": "optimizer.lr", "train.learning_rate": "optimizer.lr", "train.lr": "optimizer.lr",
    "optimizer.warmup": "optimizer.warmup_steps", "train.warmup_steps": "optimizer.warmup_steps",
    "train.weight_decay": "optimizer.weight_decay",
    "optimizer.max_grad_norm": "optimizer.max_norm", "optimizer.grad_clip": "optimizer.max_norm",
    "train.max_grad_norm": "optimizer.max_norm", "train.grad_clip": "optimizer.max_norm",
    "train.max_steps": "train.steps", "train.num_epochs": "train.epochs", "train.num_train_epochs": "train.epochs",
    "train.output_dir": "train.run_folder", "train.save_steps": "checkpoint.every",
    "train.model": "train.init_from", "train.model_name_or_path": "train.init_from",
    "train.gradient_checkpointing": "layout.recompute",
    "batch.batch_size": "batch.global_batch", "train.batch_size": "batch.global_batch",
    "train.per_device_train_batch_size": "layout.micro_batch", "batch.micro_batch": "layout.micro_batch",
    "batch.max_seq_length": "batch.seq_len", "batch.max_length": "batch.seq_len",
    "train.max_seq_length": "batch.seq_len",
    "data.dataset": "data.source", "data.path": "data.source", "data.train_file": "data.source",
}  # fmt: skip
"""Full name → the section or key that means it."""
