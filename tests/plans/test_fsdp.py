"""What FSDP2 is told of the state's place."""

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from dtlayout.models.presets import find_preset
from dtlayout.plans.fsdp import _find_offload
from dtlayout.plans.plan import make_plan
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import Precision


@pytest.mark.parametrize(
    ("offload", "device_type", "pins"),
    [("none", "cuda", None), ("optimizer", "cuda", True), ("optimizer", "cpu", False), ("disk", "cuda", False)],
)
def test_a_state_on_the_host_is_pinned_beside_a_gpu_if_it_is_in_no_file(offload, device_type, pins):
    plan = make_plan(find_preset("debug"), Layout(offload=offload), Kernels(), Precision())
    found = _find_offload(plan, device_type)
    assert found == (OffloadPolicy() if pins is None else CPUOffloadPolicy(pin_memory=pins))
