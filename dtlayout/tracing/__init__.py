"""Models that `transformers` builds: their parts, and the part of one that a pipeline stage holds."""
