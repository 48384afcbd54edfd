"""How a family makes logits of final hidden states: scale, bias and softcap, found by running its own code.

Every family that is understood computes c·tanh(s·(W·h + b)/c), or s·(W·h + b) where c = 0. Its causal model is run
with chosen hidden states in the place of its base model, and with chosen products in the place of its head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import first_line
from dtlayout.tracing.shell import Stub, replace

_HUGE = 1e9
_SMALL = 1e-9


class Logits(NamedTuple):
    """Operations between the product of head and final hidden states, and logits."""

    scale: float = 1.0
    """Factor of the product."""
    softcap: float = 0.0
    """Bound c of c·tanh(x/c); 0 for none."""


def find_logits(model: Any, base: str, head: str) -> Logits:
    """Scale and softcap of a causal model, whose base model and head have these paths.

    InvalidConfig where it computes something else.
    """
    width = model.get_submodule(head).in_features
    hidden = torch.linspace(-2, 3, 2 * 3 * width, dtype=torch.float64, device="cpu").view(2, 3, width)
    factor, _ = _run(model, base, head, hidden, torch.ones(2, 3, 5, dtype=torch.float64, device="cpu"))
    products = torch.linspace(-90, 90, 2 * 3 * 5, dtype=torch.float64, device="cpu").view(2, 3, 5)

    def make(values: Tensor) -> Tensor:
        return _run(model, base, head, hidden, values)[1]

    lowest = make(products * _SMALL)
    is_exact = lowest.dtype == torch.float64  # some families compute in fp32, whatever their format
    slope, highest = _ratio(lowest, products * _SMALL), float(make(torch.full_like(products, _HUGE)).max())
    if not is_exact:
        slope, highest = float(f"{slope:.6g}"), float(f"{highest:.6g}")
    found = Logits(slope * factor, 0.0 if highest > _HUGE * abs(slope) / 2 else highest)
    expected = products * slope
    if found.softcap:
        expected = found.softcap * (expected / found.softcap).tanh()
    tolerance = 1e-9 if is_exact else 1e-5
    if not torch.allclose(make(products).double(), expected, rtol=tolerance, atol=tolerance):
        raise InvalidConfig(_describe(model, "computes logits by a rule that is neither a factor nor a softcap"))
    return found


def _run(model: Any, base: str, head: str, hidden: Tensor, products: Tensor) -> tuple[float, Tensor]:
    """The factor of hidden states before the head, and the logits of the head's products."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Output(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            return None  # of routers and the like

    seen: list[Tensor] = []

    def multiply(h: Tensor) -> Tensor:
        seen.append(h)
        return products.clone()

    real_base = replace(model, base, Stub(lambda *_, **__: Output(last_hidden_state=hidden.clone())))
    real_head = replace(model, head, Stub(multiply))
    try:
        with torch.device("cpu"), torch.no_grad():
            tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64)
            logits = model(input_ids=tokens, use_cache=False).logits
    except Exception as error:
        raise InvalidConfig(
            _describe(model, f"computes no logits of hidden states alone: {first_line(error)}")
        ) from error
    finally:
        replace(model, base, real_base)
        replace(model, head, real_head)
    if len(seen) != 1 or seen[0].shape != hidden.shape or logits.shape != products.shape:
        raise InvalidConfig(_describe(model, "runs its head in another way than once for all tokens"))
    factor = _ratio(seen[0], hidden)
    if not torch.allclose(seen[0], hidden * factor, rtol=1e-9, atol=0):
        raise InvalidConfig(_describe(model, "changes hidden states between the final norm and the head"))
    return factor, logits


def _ratio(result: Tensor, values: Tensor) -> float:
    largest = int(values.abs().argmax())
    return float(result.flatten()[largest].double() / values.flatten()[largest])


def _describe(model: nn.Module, what: str) -> str:
    return f"{type(model).__name__} {what}; train it with its own program"
