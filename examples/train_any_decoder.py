"""Two models that dtlayout does not describe: traced, proved, trained on pp2 · tp2, and opened by transformers again.

GPT-NeoX is no known family, so its folder is traced when it is named. Gemma is a planned one: its trace is a file here.

python examples/train_any_decoder.py
"""

import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GemmaConfig, GPTNeoXConfig

folder = Path(tempfile.mkdtemp())
sizes: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 320,
}
GPTNeoXConfig(**sizes).save_pretrained(folder / "neox")
GemmaConfig(**sizes, num_key_value_heads=2, head_dim=16).save_pretrained(folder / "gemma")
text = torch.tensor([*Path(tempfile.__file__).read_bytes()[: 16 * 64]]).view(16, 64)


def start(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", *arguments], check=True)


def train(model: Path, name: str) -> None:
    overrides = {"model.name": model, "train.run_folder": folder / f"{name}-run", "layout.pp": 2, "layout.tp": 2}
    few = {"batch.global_batch": 8, "batch.seq_len": 32, "train.steps": 20, "data.max_tokens": 100_000}
    options = [f"--{key}={value}" for key, value in {**overrides, **few, "checkpoint.export": "true"}.items()]
    start("dtlayout", "check", "configs/debug.toml", "--world", "4", "--prove", *options)
    start("dtlayout", "train", "configs/debug.toml", "--ranks", "4", *options)
    exported = AutoModelForCausalLM.from_pretrained(folder / f"{name}-run" / "hf")
    with torch.no_grad():
        loss = float(exported(text, labels=text).loss)
    assert loss < math.log(320) - 1, f"{loss} is hardly better than guessing"
    print(f"loss {loss:.2f} on text that it may not have seen, guessing has {math.log(320):.2f}")
    print(f"{name} was trained, and transformers opens it as {type(exported).__name__}", flush=True)


train(folder / "neox", "neox")
start("dtlayout", "trace", f"{folder}/gemma", "--output", f"{folder}/gemma.json")
train(folder / "gemma.json", "gemma")
