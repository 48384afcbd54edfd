"""FLOPs of matmuls and attention as they are issued, 2·m·n·k each, counted on local shapes.

Attention counts whole, without a mask, as MFU does: 4·S²·K a head and sample forward, 2.5 times that backward.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from dtlayout.measure.storages import current_fake_mode


class FlopCounter:
    """Adds up FLOPs by what `label` says when an operator comes; who sees operators calls `observe`."""

    def __init__(self, label: Callable[[], Any]) -> None:
        self.flops: Counter[Any] = Counter()
        """Label → FLOPs."""
        self._label = label
        self._fake_mode = current_fake_mode()

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Count an operator on plain tensors."""
        count: Any = _OWN.get(func) or flop_registry.get(func.overloadpacket)
        # DTensor tries an operator on fake tensors of its own to learn what comes out of it.
        if count is not None and current_fake_mode() is self._fake_mode:
            self.flops[self._label()] += int(count(*args, **kwargs, out_val=result))


def _count_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, _grouped(key, query), _grouped(value, query)))


def _count_attention_backward(grad_out: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    shapes = grad_out.shape, query.shape, _grouped(key, query), _grouped(value, query)
    return int(sdpa_backward_flop_count(*shapes))


def _grouped(key: torch.Tensor, query: torch.Tensor) -> tuple[int, ...]:
    """The shape of keys or values with one head for every query head that they serve."""
    return (key.shape[0], query.shape[1], *key.shape[2:])


_OWN = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _count_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _count_attention_backward,
}
"""What torch counts on CUDA alone."""
