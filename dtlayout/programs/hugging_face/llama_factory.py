"""LLaMA-Factory: the words of its YAML file."""

from collections.abc import Mapping
from typing import Any

from dtlayout.programs.hugging_face import trainer
from dtlayout.programs.hugging_face.trainer import Dialect
from dtlayout.programs.program import Job

ATTENTION: Mapping[str, str] = {
    "fa2": "flash-attn", "sdpa": "sdpa-flash", "disabled": "torch", "fa3": "fa3", "auto": "sdpa-flash",
}  # fmt: skip
"""flash_attn → kernels.attention; of several for one of ours, the first is written."""
LLAMA_FACTORY = Dialect(
    title="LLaMA-Factory",
    names={
        "max_length": ("cutoff_len",), "lora_r": ("lora_rank",), "lora_target_modules": ("lora_target",),
        "lora_modules_to_save": ("additional_target",), "use_liger_kernel": ("enable_liger_kernel",),
        "use_peft": ("finetuning_type",), "bnb_4bit_quant_type": ("quantization_type",),
    },
    defaults={"lora_r": 8, "lora_alpha": lambda rank: 2 * rank, "max_length": 2048, "gradient_checkpointing": True},
    ignored={
        "data": r"dataset_dir|media_dir|tokenized_path|mix_strategy|interleave_probs|buffer_size|reserved_label_len"
        r"|tool_format|eval_num_beams|data_shared_file_system|enable_thinking|default_system|efficient_eos|skip_.*"
        r"|disable_shuffling|val_size|cutoff_.*",
        "evaluation": r"eval_on_each_dataset|ref_model.*|max_new_tokens|top_[pk]|temperature|num_beams|do_sample"
        r"|repetition_penalty|length_penalty|infer_.*|vllm_.*|sglang_.*",
        "where weights come from": r"adapter_name_or_path|adapter_folder|create_new_adapter|resize_vocab|add_.*tokens"
        r"|new_special_tokens_config|init_special_tokens|split_special_tokens|offload_folder|train_from_scratch"
        r"|rope_scaling|use_kv_cache|print_param_status|use_fast_tokenizer|export_.*",
        "images, video and sound": r"image_.*|video_.*|audio_.*|use_audio_in_video|crop_to_patches|freeze_vision_tower"
        r"|freeze_multi_modal_projector",
        "how ranks meet": r"ray_.*|placement_strategy|resources_per_worker",
    },
    otherwise=r"double_quantization|quantization_device_map|upcast_(layernorm|lmhead_output)|use_reentrant_gc"
    r"|moe_aux_loss_coef|use_v1_kernels|fp8_.*",
)  # fmt: skip
"""Words of LLaMA-Factory's arguments, beside those of TrainingArguments."""


def choose_options(job: Job) -> tuple[dict[str, Any], list[str]]:
    """Options of the YAML that layout, batch, kernels and formats decide, and gaps; None for one that is left out."""
    options, gaps = trainer.choose_options(job, LLAMA_FACTORY)
    precision, layout = job.scenario.precision, job.layout
    for name in ("gradient_checkpointing", "load_in_4bit", "load_in_8bit", "dtype", "attn_implementation"):
        options.pop(name)
    bits = {"nf4": 4, "int8": 8}
    names = {ours: theirs for theirs, ours in reversed([*ATTENTION.items()])}
    is_pure = job.scenario.engine.name == "accelerate" and precision.params == precision.compute == "bfloat16"
    options |= {
        "disable_gradient_checkpointing": layout.recompute == "none", "quantization_bit": bits.get(precision.base),
        "use_unsloth_gc": layout.offloads_activations, "flash_attn": names.get(job.estimate.kernels.attention, "sdpa"),
        "pure_bf16": is_pure, "bf16": precision.compute == "bfloat16" and not is_pure,
    }  # fmt: skip
    if job.model.adapter is not None and job.scenario.engine.name == "accelerate" and precision.compute == "float32":
        gaps.append("precision.compute=float32 is not written: frozen weights are as their checkpoint has them")
    return options, gaps
