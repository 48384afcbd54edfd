"""Engines that a test made known, and that no other test has."""

from dtlayout.costmodel import engine


def forget_engines() -> None:
    """Let engines and their constants be read from the package's files again, without those that were registered."""
    for read in (engine._engine_tables, engine._read_engines, engine._achieved_on):
        read.cache_clear()
