"""Every collective that is issued, written down."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from dtlayout.dryrun.collectives import Collective, observe_collective
from dtlayout.measure.storages import any_wraps
from dtlayout.ops.composite import call_seen


class CollectiveRecorder(TorchDispatchMode):
    """Records every collective issued inside the `with` block, backward included."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Collective] = []

    def counts(self) -> Counter[str]:
        """How many of each name."""
        return Counter(event.name for event in self.events)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any_wraps(types):
            return NotImplemented
        kwargs = kwargs or {}
        result = call_seen(self, func, args, kwargs)
        event = observe_collective(func, args, kwargs, result)
        if event is not None:
            self.events.append(event)
        return result
