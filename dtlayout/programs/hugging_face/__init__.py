"""Programs around Hugging Face's Trainer: accelerate, DeepSpeed, TRL, axolotl and LLaMA-Factory."""
