"""A Llama from Hugging Face, made on the spot: trained further, taught to answer, exported, and asked.

Then a LoRA teaches it another colour, is merged into it, and the merged model is asked.

python examples/finetune_a_llama.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())
sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(vocab_size=320, **sizes)).save_pretrained(folder / "base")

colours = {"the sky": "blue", "grass": "green", "snow": "white", "coal": "black"}
for name, answers in (("chats", colours), ("at_night", colours | {"snow": "grey"})):
    with (folder / f"{name}.jsonl").open("w") as file:
        for thing, colour in answers.items():
            question, answer = f"What colour has {thing}?", {"role": "assistant", "content": colour}
            file.write(json.dumps({"messages": [{"role": "user", "content": question}, answer]}) + "\n")
lines = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
(folder / "chat.jinja").write_text(lines + "{% if add_generation_prompt %}assistant: {% endif %}")


def train(name: str, start: str, *options: str) -> None:
    overrides = {"model.name": start, "train.init_from": start, "train.run_folder": f"{folder}/{name}", "layout.pp": 1}
    print(f"{name}:", flush=True)
    sizes = {"batch.global_batch": 8, "batch.seq_len": 64, "train.steps": 100, "checkpoint.export": "true"}
    arguments = [f"--{key}={value}" for key, value in {**overrides, **sizes}.items()]
    command = [sys.executable, "-m", "dtlayout", "train", "configs/debug.toml", "--ranks", "2", *arguments, *options]
    subprocess.run(command, check=True)


def dtlayout(*arguments: str) -> str:
    """Output of a command."""
    command = [sys.executable, "-m", "dtlayout", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


train("further", f"{folder}/base", "--layout.tp=1", "--train.steps=20", "--data.max_tokens=100_000")
padded = ("--data.messages_field=messages", "--data.samples=padded", "--data.max_tokens=0")
chats = (*padded, f"--data.chat_template={folder}/chat.jinja")
train("taught", f"{folder}/further/hf", f"--data.source={folder}/chats.jsonl", *chats)

lora = ("--layout.tp=1", "--adapter.rank=8", "--precision.base=int8", "--optimizer.lr=0.01", "--train.steps=70")
train("lora", f"{folder}/taught/hf", f"--data.source={folder}/at_night.jsonl", *chats, *lora)
dtlayout("convert", f"{folder}/lora", f"{folder}/merged", "--merge")

for model in ("taught/hf", "merged"):
    options = ("--tokenizer=bytes", "--chat", "--prompt=What colour has snow?", "--temperature=0")
    print(f"{model}: What colour has snow? {dtlayout('generate', f'{folder}/{model}', *options)}")
