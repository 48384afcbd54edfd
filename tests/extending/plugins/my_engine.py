"""A training program that is not shipped, as somebody adds it: a file, and the line that makes it known."""

from pathlib import Path

from dtlayout import register_engine

register_engine(Path(__file__).with_name("my_engine.toml"))
