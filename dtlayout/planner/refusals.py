"""What an engine cannot run of a layout that is legal."""

from dtlayout.costmodel.scenario import Scenario
from dtlayout.errors import InvalidConfig, InvalidLayout
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout


def find_refusals(scenario: Scenario, layout: Layout, kernels: Kernels) -> list[str]:
    """Everything that keeps the engine from running `kernels` with this layout on this device; one line each."""
    problems: list[str] = []
    device_type = scenario.cluster.gpu.device_type
    checks = (
        lambda: kernels.check(scenario.precision, device_type),
        lambda: kernels.check_compile(layout.tp, layout.recompute, device_type),
        lambda: scenario.engine.check_recompute(layout.recompute),
    )
    for check in checks:
        try:
            check()
        except (InvalidConfig, InvalidLayout) as error:
            problems += error.problems
    return problems
