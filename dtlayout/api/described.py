"""A module of one's own as a model that can be predicted: its shape, which shows what its blocks compute."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from dtlayout.models.counting import count_model_flops_per_token
from dtlayout.models.trace_text import describe_sizes, describe_trace, list_kinds, list_lacks
from dtlayout.models.traced import Trace, read_trace
from dtlayout.spec.model_shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor, nn

_SEQ_LEN = 4096
"""Tokens of the sequence for which FLOPs are shown."""


class DescribedModule(ModelShape):
    """Shape of a module that was read off its code; `print` shows its blocks, and a notebook shows them as tables.

    It equals the shape that the trace's file has, and every question takes it as its model.
    """

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelShape):
            return NotImplemented
        return all(getattr(self, each.name) == getattr(other, each.name) for each in fields(ModelShape))

    __hash__ = ModelShape.__hash__

    @property
    def _trace(self) -> Trace:
        return read_trace(self.trace)

    def _describe_flops(self) -> str:
        flops = count_model_flops_per_token(self, _SEQ_LEN)
        return f"{flops / 1e9:.3g} GFLOPs a token, forward and backward, in a sequence of {_SEQ_LEN:,}"

    def __str__(self) -> str:
        return "\n".join(describe_trace(self._trace, self._describe_flops()))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from dtlayout.report import html  # only now: it imports matplotlib

        parts = [html.paragraph(each) for each in (describe_sizes(self._trace), self._describe_flops())]
        for heading, rows in list_kinds(self._trace):
            parts.append(html.table([["operation", "what it computes"], *map(list, rows)], heading))
        return html.fragment(self.name, [*parts, html.bullets(list_lacks(self._trace))])


def describe_module(
    module: "nn.Module", example_inputs: "Mapping[str, Tensor]", file: str | Path, name: str = "own"
) -> DescribedModule:
    """The shape of a causal model of one's own, a module with a list of blocks that each attend once, for predictions.

    A copy of the module runs on fake tensors like the first sequence of `example_inputs`, its arguments by name, of
    which the first are tokens [B, S]. The trace is written to `file`, which commands take as --model. The list of
    blocks is an `nn.ModuleList` or an `nn.Sequential`. The head is the last `nn.Linear` behind them, and the embedding
    the `nn.Embedding` before them with as many rows, else with most. InvalidConfig if the module is no such model,
    attends to later tokens, or reads values of tensors.
    """
    from dtlayout.tracing.trace import describe_module as trace_module  # only now: it imports torch

    shape = trace_module(module, example_inputs, file, name)
    return DescribedModule(**{each.name: getattr(shape, each.name) for each in fields(ModelShape)})
