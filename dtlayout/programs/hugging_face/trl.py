"""TRL: the words of SFTConfig and ModelConfig, in a YAML file of `trl sft --config` or behind the command."""

from typing import Any

from dtlayout.programs.hugging_face import trainer
from dtlayout.programs.hugging_face.trainer import Dialect
from dtlayout.programs.program import Job

OLDER = {"gradient_checkpointing": False, "bf16": False}
"""Defaults of releases before 0.20, which have max_seq_length in the place of max_length."""
TRL = Dialect(
    title="TRL",
    names={
        "max_length": ("max_length", "max_seq_length"),
        "dtype": ("dtype", "torch_dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype"),
        "attn_implementation": ("attn_implementation", "model_init_kwargs.attn_implementation"),
        "use_liger_kernel": ("use_liger_kernel", "use_liger"),
    },
    defaults={
        "gradient_checkpointing": True, "bf16": True, "learning_rate": 2e-5, "lora_r": 16, "lora_alpha": 32,
        "max_length": 1024, "packing": False, "dtype": "float32", "loss_type": "chunked_nll",
    },
    ignored={
        "data": r"datasets|dataset_(mixer|splits|configs|kwargs)(\..*)?|eos_token|pad_token|num_of_sequences"
        r"|chars_per_token|eval_packing|base_model_revision|columns(\..*)?",
        "how ranks meet": r"env(\..*)?|accelerate_config",
        "the course of the learning rate": r"lr_scheduler_kwargs\..*",
    },
    losses={"eager": "nll", "linear": "chunked_nll"},
)  # fmt: skip
"""Words of TRL 1.0 and above, and of earlier ones where they have others."""


def choose_options(job: Job) -> tuple[dict[str, Any], list[str]]:
    """Options of the YAML that layout, batch, kernels and formats decide, and gaps; None for one that is left out."""
    options, gaps = trainer.choose_options(job, TRL)
    return {**options, "activation_offloading": job.layout.offloads_activations}, gaps
