"""Kernels that a step really runs: its first forward is recorded, and compared with the kernels that were asked for."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from dtlayout.measure.kernels import KernelRecorder
from dtlayout.pipelining.runtime import Runtime
from dtlayout.schedules.actions import Action, Kind
from dtlayout.spec.kernel_records import AttentionKernel
from dtlayout.spec.kernel_table import find_kernel


@contextmanager
def first_forward(runtime: Runtime, recorder: KernelRecorder) -> Iterator[None]:
    """A block around a step, of which the recorder sees the first forward: a profile of it all takes gigabytes."""
    watch, recording = runtime.before_action, ExitStack()
    first = next(action for action in runtime.actions if action.kind is Kind.FORWARD)

    def before(action: Action | None) -> None:
        watch(action)
        recording.close()
        if action is first:
            recording.enter_context(recorder)

    runtime.before_action = before
    with recording:
        yield
    runtime.before_action = watch


def find_other_attention(asked: str, executed: set[str]) -> str:
    """The problem, if another attention kernel ran than the one asked for and that one would be seen; else empty."""
    if not find_kernel(AttentionKernel, asked).traces or not executed - {asked.removeprefix("sdpa-")}:
        return ""
    return f"kernels.attention={asked!r}, but {', '.join(sorted(executed))} ran; ask for what runs here"
