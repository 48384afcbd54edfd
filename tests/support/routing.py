"""Routing that is told and not learned: how many copies of tokens the fullest of ep's ranks gets."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from parity import Case
from torch import Tensor

from dtlayout.ops.routing import choose


def routed_as_stated(case: Case) -> AbstractContextManager[Any]:
    """Have routers choose, after their own choice, as `experts.imbalance` says: the last of ep's ranks is the fullest.

    Each of its experts gets as many copies as the others of it, and so do those of the other ranks.
    """
    rules, ep = case.model.experts, case.layout.ep
    if rules is None:
        return nullcontext()
    own, others = rules.number // ep, rules.number - rules.number // ep

    def choose_as_stated(*inputs: Any) -> Tensor:
        chosen = choose(*inputs)
        num_fullest = round(chosen.numel() * rules.fullest_share(ep) / ep)
        experts = torch.arange(chosen.numel())
        rest = experts % others if others else experts
        return torch.where(experts < num_fullest, others + experts % own, rest).view_as(chosen)

    return mock.patch("dtlayout.models.feed_forward.choose", choose_as_stated)
