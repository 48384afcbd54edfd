"""What a run refuses after its first step."""

import pytest

from dtlayout.errors import KernelError
from dtlayout.training.run import check_attention


def test_another_attention_kernel_than_was_asked_for_is_an_error():
    check_attention("sdpa-flash", {"flash"})
    with pytest.raises(KernelError, match=r"attention='sdpa-flash', but math ran"):
        check_attention("sdpa-flash", {"math"})
    with pytest.raises(KernelError, match=r"but flash, math ran"):
        check_attention("sdpa-math", {"math", "flash"})
