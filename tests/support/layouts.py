"""All layouts of a space one by one, legal or not: what a search is compared with."""

from collections.abc import Iterator
from itertools import product

from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.planner.space import Space


def all_layouts(space: Space) -> Iterator[tuple[Layout, Kernels]]:
    for tp, pp, dp in space.degrees:
        for (schedule, v), micro_batch, sp, recompute, sharding, kernels in product(
            space.orders(pp), space.micro_batches, space.sequence_parallel(tp), space.recompute,
            space.shardings(tp, dp), space.kernels,
        ):  # fmt: skip
            layout = Layout(
                tp=tp, pp=pp, dp_shard=dp, micro_batch=micro_batch, schedule=schedule, virtual_stages=v,
                sequence_parallel=sp, recompute=recompute, **space.constant,
            )  # fmt: skip
            yield sharding.of(layout), kernels
