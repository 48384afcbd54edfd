"""Work of operators, by local shapes as they are issued: matmuls, attention, and bytes that are read and written."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import dtlayout.ops.scaled_groups  # it registers an operator, and so does what it imports
import dtlayout.ops.weight_sum  # noqa: F401  (so does this)
from dtlayout.measure.storages import each_tensor
from dtlayout.models.kernel_calls import AttentionCall, KernelCall, Matmul, Pass

aten = torch.ops.aten
COLLECTIVE_NAMESPACES = {"c10d", "_c10d_functional", "_dtensor"}


class WorkCounter:
    """Counts operations under the `label` of their moment; `observe` has to be called for each operator."""

    def __init__(self, label: Callable[[], Any]) -> None:
        self.counts: Counter[tuple[Any, KernelCall]] = Counter()
        """(label, operation) → number of calls."""
        self._label = label
        self._fake_mode = active_fake_mode()

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Count an operator on plain tensors."""
        # DTensor runs an operator on fake tensors of its own to learn the shape of its result.
        if active_fake_mode() is self._fake_mode:
            operation = describe(func, args, kwargs, result)
            if operation is not None:
                self.counts[self._label(), operation] += 1


def bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an operator by their names in its schema."""
    return dict(zip(_argument_names(func), args, strict=False)) | kwargs


def describe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> KernelCall | None:
    """Work of an operator; None for views, allocations, collectives and what is opened up."""
    packet = func.overloadpacket
    if packet in _MATMULS:
        left, right = (args[i].shape for i in _MATMULS[packet])
        *batch, m, k = left
        work = Matmul(m, right[-1], k, *batch)
        return replace(work, is_scaled=True) if packet is aten._scaled_mm else work
    if packet in _ATTENTION:
        count, num_tensors = _ATTENTION[packet]
        given = bind(func, args, kwargs)
        is_masked = given.get("is_causal") or given.get("attn_mask") is not None
        *upstream, query, key, value = (tensor.shape for tensor in args[:num_tensors])
        # One head of keys and values for each query head that they serve.
        key, value = ((shape[0], query[1], *shape[2:]) for shape in (key, value))
        return AttentionCall(int(count(*upstream, query, key, value)) * (1 if is_masked else 2))
    assert packet not in flop_registry, f"{func} computes, and nobody says how much"
    if func.is_view or packet in _ALLOCATIONS or packet in _OPENED or func.namespace in COLLECTIVE_NAMESPACES:
        return None
    moved_bytes = _count_moved(func, args, kwargs, result)
    return Pass(moved_bytes) if moved_bytes else None


_MATMULS = {
    aten.mm: (0, 1), aten.bmm: (0, 1),
    aten._scaled_mm: (0, 1), aten._grouped_mm: (0, 1), torch.ops.dtlayout.grouped_mm: (0, 1),
    torch.ops.dtlayout.add_product: (1, 2),
    aten.addmm: (1, 2), aten.addmm_: (1, 2), aten.baddbmm: (1, 2), aten.baddbmm_: (1, 2),
}  # fmt: skip
"""Operator → indices of the two arguments that are multiplied. The rows of all experts count as if they shared one
matrix."""
_OPENED = {torch.ops.dtlayout.scaled_grouped_mm}
"""Operators of ops/composite.py whose inner ones are matmuls and passes."""
_ATTENTION: dict[Any, tuple[Callable[..., int], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (sdpa_flop_count, 3),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (sdpa_backward_flop_count, 4),
}
"""Flash kernel of a dry run → (formula of its FLOPs, number of leading tensors whose shapes it takes). torch does not
count these FLOPs."""
_ALLOCATIONS = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided}
_OVERWRITING = {aten.copy_, aten.fill_, aten.zero_}
"""Operators that write their first argument and do not read it."""
_LOOKUPS = {aten.embedding, aten.gather, aten.index, aten.index_select}
"""Operators that read only as many bytes of their first argument as they return."""
_SCATTERS = {aten.scatter_, aten.scatter_add_, aten.index_put_, aten.index_add_}
"""Operators that write only as many bytes of their first argument as their other arguments have."""
_UNWRITTEN = {aten._fused_adamw_: "grads", aten._fused_sgd_: "grads"}
"""Operator → argument that is written by its schema, but really only where the update divides gradients."""


def _count_moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    given = bind(func, args, kwargs)
    packet = func.overloadpacket
    unwritten = _UNWRITTEN.get(packet) if given.get("grad_scale") is None else None
    names = [name for name in _written_names(func) if name != unwritten]
    written = list(each_tensor([given.get(name) for name in names]))
    known = {id(tensor.untyped_storage()) for tensor in each_tensor(given)}
    made = [tensor for tensor in each_tensor(result) if id(tensor.untyped_storage()) not in known]
    if not written and not made:
        return 0
    if packet in _LOOKUPS:
        return 2 * _count_bytes(made)
    if packet in _SCATTERS:
        return 2 * _count_bytes(each_tensor([value for name, value in given.items() if name != "self"]))
    is_overwritten = packet in _OVERWRITING
    read = (value for name, value in given.items() if name != "out" and not (is_overwritten and name == "self"))
    return _count_bytes(each_tensor(list(read))) + _count_bytes(written) + _count_bytes(made)


@cache
def _argument_names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


@cache
def _written_names(func: Any) -> tuple[str, ...]:
    return tuple(a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def _count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors; an expanded tensor counts no more than its storage."""
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)
