"""Sweeps whose trials are a stand-in for the trainer."""

from collections import Counter
from pathlib import Path

from tiny import write_tiny

FAKE = Path(__file__).with_name("fake_trainer.py")


def write_sweep(folder: Path, *, seeds: int, timeout_s: float = 15, more: str = "") -> Path:
    """A sweep over seeds, which end as fake_trainer.py says; within the time limit a busy machine starts them all."""
    write_tiny(folder)
    path = folder / "sweep.toml"
    path.write_text(
        f"""
config = "tiny.toml"
world = 2
steps = 6
warmup_steps = 2
timeout_s = {timeout_s}
grace_s = 0.3
overrides = ["--train.device=cpu"]
launch = "'{{python}}' '{FAKE}' '{{config}}'"
{more}
[axes.train]
seed = {list(range(seeds))}
""",
        encoding="utf-8",
    )
    return path


def read_starts(folder: Path) -> Counter[int]:
    return Counter(map(int, (folder / "starts.txt").read_text().split()))
