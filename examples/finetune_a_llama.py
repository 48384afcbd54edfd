"""A Llama from Hugging Face, made on the spot: trained further, taught to answer, exported, and asked.

python examples/finetune_a_llama.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

folder = Path(tempfile.mkdtemp())
sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(vocab_size=320, **sizes)).save_pretrained(folder / "base")

colours = {"the sky": "blue", "grass": "green", "snow": "white", "coal": "black"}
with (folder / "chats.jsonl").open("w") as file:
    for thing, colour in colours.items():
        messages = [{"role": "user", "content": f"What colour has {thing}?"}, {"role": "assistant", "content": colour}]
        file.write(json.dumps({"messages": messages}) + "\n")
lines = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
(folder / "chat.jinja").write_text(lines + "{% if add_generation_prompt %}assistant: {% endif %}")


def train(name: str, start: str, *options: str) -> None:
    overrides = {"model.name": start, "train.init_from": start, "train.run_folder": f"{folder}/{name}", "layout.pp": 1}
    sizes = {"batch.global_batch": 8, "batch.seq_len": 64, "train.steps": 200, "checkpoint.export": "true"}
    arguments = [f"--{key}={value}" for key, value in {**overrides, **sizes}.items()]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    subprocess.run([sys.executable, *launcher, "train.py", "configs/debug.toml", *arguments, *options], check=True)


train("further", f"{folder}/base", "--layout.tp=1", "--train.steps=20", "--data.max_tokens=100_000")
chats = (f"--data.source={folder}/chats.jsonl", "--data.messages_field=messages", "--data.samples=padded")
train("taught", f"{folder}/further/hf", *chats, f"--data.chat_template={folder}/chat.jinja", "--data.max_tokens=0")

ask = ("generate", f"{folder}/taught/hf", "--tokenizer=bytes", "--chat", "--prompt=What colour has snow?")
answer = subprocess.run([sys.executable, "-m", "dtlayout.cli", *ask, "--temperature=0"], capture_output=True, text=True)
print(f"What colour has snow? {answer.stdout.strip()}")
