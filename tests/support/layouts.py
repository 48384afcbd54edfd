"""All layouts of a space one by one, legal or not: what a search is compared with."""

from collections.abc import Iterator
from itertools import product

from dtlayout.planner.space import Space
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout


def all_layouts(space: Space) -> Iterator[tuple[Layout, Kernels]]:
    """Each layout is built once, whatever kernels it is with: most of the time of a walk is that of its checks."""
    for degrees in space.degrees:
        tp, pp, cp, ep, dp = degrees
        shardings = [*space.shardings(degrees)]
        for (schedule, v), micro_batch, method, sp, overlap, (exchange, dispatcher), recompute in product(
            space.orders(pp),
            space.micro_batches(cp),
            space.cp_methods(cp),
            space.sequence_parallel(tp),
            space.tp_overlap(tp),
            space.exchanges(ep, is_interleaved=True, recompute="none"),
            space.recompute,
        ):
            layout = Layout(
                tp=tp, pp=pp, cp=cp, cp_method=method, ep=ep, dp_shard=dp, micro_batch=micro_batch, schedule=schedule,
                virtual_stages=v, sequence_parallel=sp, tp_overlap=overlap, ep_overlap=exchange,
                ep_dispatcher=dispatcher, recompute=recompute, **space.constant,
            )  # fmt: skip
            for sharding in shardings:
                shared = sharding.of(layout)
                for kernels in space.kernels:
                    yield shared, kernels
