"""What an engine cannot run of a layout that is legal."""

from dtlayout.costmodel.scenario import Scenario
from dtlayout.errors import InvalidLayout
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout


def find_refusals(scenario: Scenario, layout: Layout, kernels: Kernels) -> list[str]:
    """Everything that keeps the engine from running `kernels` with this layout on this device; one line each."""
    device_type = scenario.cluster.gpu.device_type
    problems = kernels.problems(scenario.precision, device_type, tp=layout.tp, recompute=layout.recompute)
    try:
        scenario.engine.check_recompute(layout.recompute)
    except InvalidLayout as error:
        problems += error.problems
    return problems
