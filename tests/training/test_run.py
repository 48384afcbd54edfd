"""What a run refuses after it has been built."""

from pathlib import Path

import pytest

from dtlayout.errors import CheckpointError, KernelError
from dtlayout.training.run import check_attention, check_steps_left


def test_another_attention_kernel_than_was_asked_for_is_an_error():
    check_attention("sdpa-flash", {"flash"})
    with pytest.raises(KernelError, match=r"attention='sdpa-flash', but math ran"):
        check_attention("sdpa-flash", {"math"})
    with pytest.raises(KernelError, match=r"but flash, math ran"):
        check_attention("sdpa-math", {"math", "flash"})


def test_a_checkpoint_beyond_the_last_step_is_refused():
    check_steps_left(Path("step-8"), 8, 8)
    with pytest.raises(CheckpointError, match=r"step-8 has done 8 steps, more than train.steps=7; raise train.steps"):
        check_steps_left(Path("step-8"), 8, 7)
