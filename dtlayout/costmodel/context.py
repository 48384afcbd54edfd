"""Seconds that a block waits for cp's ranks, one function for each way to attend over them (spec/context_parallel.py).

Keys and values are as wide as the heads of a tp rank have them; what a rank sends, and in which format, says
plans/context.py. Ranks of cp are tp apart.
"""

from collections.abc import Callable

from dtlayout.costmodel.comm import Link, data_link, half_all_reduce_s
from dtlayout.costmodel.scenario import Scenario, activation_size, tokens_of
from dtlayout.models.families import describe
from dtlayout.spec.layout import Layout


def block_cp_s(
    scenario: Scenario, layout: Layout, attention_forward_s: float, attention_backward_s: float
) -> tuple[float, float]:
    """Seconds that a block's forward and its backward wait for cp's messages, beside those that attention hides."""
    if layout.cp == 1:
        return 0.0, 0.0
    link = data_link(scenario, layout, layout.tp, layout.cp)
    return _WAITS[layout.cp_method](scenario, layout, link, attention_forward_s, attention_backward_s)


def _wait_for_ring(
    scenario: Scenario, layout: Layout, link: Link, attention_forward_s: float, attention_backward_s: float
) -> tuple[float, float]:
    """Each of cp - 1 hops sends a rank's keys and values, in backward also gradients (arXiv:2310.01889, sec. 3).

    Meanwhile those that came before are attended to, 1 / cp of all attention.
    """
    kv, gradients = _size_kv(scenario, layout)

    def exposed_s(size: float, attention_s: float) -> float:
        return (layout.cp - 1) * max(0.0, size / link.bytes_per_s + link.latency_s - attention_s / layout.cp)

    return exposed_s(kv, attention_forward_s), exposed_s(kv + gradients, attention_backward_s)


def _wait_for_gather(scenario: Scenario, layout: Layout, link: Link, *attention_s: float) -> tuple[float, float]:
    """All keys and values are gathered in each direction, and their gradients scattered; nothing hides it."""
    kv, gradients = _size_kv(scenario, layout)
    gather_s = half_all_reduce_s(layout.cp * kv, layout.cp, link)
    return gather_s, gather_s + half_all_reduce_s(layout.cp * gradients, layout.cp, link)


def _wait_for_heads(scenario: Scenario, layout: Layout, link: Link, *attention_s: float) -> tuple[float, float]:
    """Two exchanges, of queries, keys and values, and of the results; as much in backward, and nothing hides them.

    In an all-to-all a rank sends 1 / cp of its bytes to each of the others (arXiv:2309.14509, sec. 3.2).
    """
    attention = describe(scenario.model).attention
    size = _size(scenario, layout, attention.input_width + attention.output_width)
    exchanges_s = 2 * (link.start_s + link.latency_s) + (layout.cp - 1) / layout.cp * size / link.bytes_per_s
    return exchanges_s, exchanges_s


def _size_kv(scenario: Scenario, layout: Layout) -> tuple[float, float]:
    """Bytes of a rank's keys and values, and of their gradients, which an fsdp2 engine sums in fp32 or finer."""
    kv, e = _size(scenario, layout, describe(scenario.model).attention.kv_width), activation_size(scenario)
    return kv, kv * (max(e, 4) / e if scenario.engine.features.sharding == "fsdp2" else 1.0)


def _size(scenario: Scenario, layout: Layout, width: int) -> float:
    """Bytes of a microbatch's activations with so many elements a token, over tp."""
    return tokens_of(scenario, layout) * width / layout.tp * activation_size(scenario)


_WAITS: dict[str, Callable[..., tuple[float, float]]] = {
    "ring": _wait_for_ring,
    "gather": _wait_for_gather,
    "all-to-all": _wait_for_heads,
}
