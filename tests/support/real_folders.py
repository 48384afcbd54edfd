"""Small Hugging Face folders that have what published ones have beside their weights."""

import json
from pathlib import Path
from typing import Any

import torch
from hf_models import SIZES, STRETCHED
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

CHATML = "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
WORDS = ("<unk>", "times", "is", *(f"{i}" for i in range(40)), *(f"{i}." for i in range(100)))


def save_real(kind: str, folder: Path) -> Path:
    """The folder of one of `REAL`, whose weights are bf16 in one file."""
    make, config, special, ordinary, beside = REAL[kind]
    torch.manual_seed(3)
    make(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("generation_config.json", "tokenizer_config.json"):  # what is not said below is not there
        (folder / name).unlink(missing_ok=True)
    save_words(folder, special, ordinary)
    for name, content in beside.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content, indent=2))
    config_file = folder / "config.json"
    said = json.loads(config_file.read_text())
    said |= {"_name_or_path": f"someone/{kind}", "pretraining_tp": 1, "use_cache": False}
    if kind == "llama-2":  # as older versions wrote it
        said |= {"torch_dtype": said.pop("dtype"), "rope_scaling": None, **said.pop("rope_parameters")}
        said.pop("rope_type")
    config_file.write_text(json.dumps(said, indent=4) + "\n")
    return folder


def save_words(folder: Path, special: list[str], ordinary: tuple[str, ...] = ()) -> Path:
    """A tokenizer.json of words, whose special tokens come last; the first of them begins each text if it is a <s>."""
    words = [*WORDS, *ordinary, *special]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    if special[0] in ("<s>", "<|begin_of_text|>"):
        tokenizer.post_processor = TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], words.index(special[0]))]
        )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def find_id(folder: Path, token: str) -> int:
    """The id of a token of a folder's tokenizer."""
    number: int = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(token)
    return number


_FIRST = len(WORDS)
_LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
_QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
REAL: dict[str, tuple[Any, Any, list[str], tuple[str, ...], dict[str, Any]]] = {
    "llama-3.1-instruct": (
        LlamaForCausalLM,
        LlamaConfig(
            **SIZES | {"max_position_embeddings": 256},
            rope_parameters=STRETCHED | {"original_max_position_embeddings": 32},
            bos_token_id=_FIRST, eos_token_id=[_FIRST + 1, _FIRST + 2, _FIRST + 3],
        ),
        _LLAMA3,
        ("</s>",),
        {
            "generation_config.json": {
                "bos_token_id": _FIRST, "eos_token_id": [_FIRST + 1, _FIRST + 2, _FIRST + 3], "do_sample": True,
                "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.42.3",
            },
            "tokenizer_config.json": {"bos_token": _LLAMA3[0], "eos_token": "<|eot_id|>", "model_max_length": 131072},
            "special_tokens_map.json": {"bos_token": {"content": _LLAMA3[0]}, "eos_token": {"content": "<|eot_id|>"}},
            "chat_template.jinja": CHATML,
            "additional_chat_templates/tools.jinja": "{{ tools }}",
        },
    ),
    "qwen-2.5-instruct": (
        Qwen2ForCausalLM,
        Qwen2Config(
            **SIZES | {"max_position_embeddings": 32768}, tie_word_embeddings=True, bos_token_id=_FIRST + 1,
            eos_token_id=_FIRST + 3,
        ),
        _QWEN,
        ("</s>",),
        {
            "generation_config.json": {
                "bos_token_id": _FIRST + 1, "pad_token_id": _FIRST + 1, "eos_token_id": [_FIRST + 3, _FIRST + 1],
                "repetition_penalty": 1.1, "top_k": 20,
            },
            "tokenizer_config.json": {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": CHATML},
            "vocab.json": {"of": 0}, "merges.txt": "#version: 0.2\n", "added_tokens.json": {"<|im_end|>": _FIRST + 3},
        },
    ),
    "llama-2": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES | {"max_position_embeddings": 4096}, bos_token_id=_FIRST, eos_token_id=_FIRST + 1),
        ["<s>", "</s>"],
        (),
        {
            "tokenizer_config.json": {"bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>"}},
            "tokenizer.model": "not read here",
        },
    ),
}  # fmt: skip
"""Name → class, config, special tokens, words that look like some but are none, and files beside the weights."""
