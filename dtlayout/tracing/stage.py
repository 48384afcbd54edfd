"""The module of a pipeline stage of a traced model, from its shape."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from dtlayout.models.traced import read_trace
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.model_shape import ModelShape
from dtlayout.tracing.module import TracedModel


def build_traced(
    shape: ModelShape,
    kernels: Kernels,
    max_seq_len: int,
    *,
    layers: Sequence[int] | None = None,
    embedding: bool = True,
    head: bool = True,
    dtype: torch.dtype = torch.float32,
) -> TracedModel:
    """The part of a traced model that a stage holds; arguments are those of `models.llama.Llama`.

    InvalidConfig if transformers, in the version that is installed, does not build the model.
    """
    config, trace = read_config(shape.trace), read_trace(shape.trace)
    return TracedModel(
        config, kernels, max_seq_len, layers=layers, embedding=embedding, head=head, dtype=dtype,
        operations=[trace.kinds[kind].block for kind in trace.shape.block_kinds],
        divided=[trace.divided[kind] for kind in trace.shape.block_kinds],
    )  # fmt: skip


@lru_cache(maxsize=8)
def read_config(trace: str) -> Any:
    """The config of transformers in a trace's file, of the part that reads text."""
    from dtlayout.tracing.trace import parse_config

    return parse_config(read_trace(trace).config)
