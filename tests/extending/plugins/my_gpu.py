"""A GPU type that is not shipped, as somebody adds it: a file of numbers, and the line that makes it known."""

from pathlib import Path

from dtlayout import register_gpu

register_gpu(Path(__file__).with_name("my_gpu.toml"))
