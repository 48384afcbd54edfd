"""InternLM's modules, imported where a run is built."""

from typing import Any

import torch
from torch import nn

from dtlayout.models.llama import Llama
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.model_shape import ModelShape


class InternLM(Llama):
    """As `extending.plugins.internlm` describes it."""

    def __init__(
        self, shape: ModelShape, kernels: Kernels, max_seq_len: int, *, dtype: torch.dtype = torch.float32, **part: Any
    ):
        super().__init__(shape, kernels, max_seq_len, dtype=dtype, **part)
        for block in self.model.layers.values():
            block.self_attn.o_proj = nn.Linear(shape.query_width, shape.hidden_size, dtype=dtype)
