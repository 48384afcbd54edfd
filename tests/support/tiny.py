"""The smallest run there is: a Llama of some 50,000 parameters on ten kilobytes of text, as a config file."""

from dataclasses import dataclass
from pathlib import Path

from dtlayout.spec.model_shape import ModelShape

ROOT = Path(__file__).parents[2]
"""The checkout: train.py and configs/ are here."""

SHAPE = ModelShape(
    name="tiny", hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=4, ffn_size=48, vocab_size=260
)  # fmt: skip


@dataclass(frozen=True)
class TinyFiles:
    """A config and the text that it trains on."""

    config: Path
    corpus: Path
    tokens: Path
    run: Path


def write_tiny(folder: Path, *, steps: int = 2, num_layers: int = SHAPE.num_layers, tied: bool = False) -> TinyFiles:
    """Write the config and its corpus into `folder`; nothing is prepared or run."""
    files = TinyFiles(folder / "tiny.toml", folder / "corpus.txt", folder / "tokens", folder / "run")
    files.corpus.write_text("".join(f"{i} times {i} is {i * i}. " for i in range(400)), encoding="utf-8")
    sizes = ("hidden_size", "num_heads", "num_kv_heads", "ffn_size", "vocab_size")
    model = "\n".join(f"{name} = {getattr(SHAPE, name)}" for name in sizes)
    files.config.write_text(
        f"""
[model]
name = "tiny"
{model}
num_layers = {num_layers}
tied_embeddings = {str(tied).lower()}

[batch]
global_batch = 8
seq_len = 16

[layout]
micro_batch = 2

[precision]
compute = "float32"

[data]
source = '{files.corpus}'
folder = '{files.tokens}'

[optimizer]
lr = 1e-2

[train]
steps = {steps}
run_folder = '{files.run}'
timeout_s = 60
""",
        encoding="utf-8",
    )
    return files
