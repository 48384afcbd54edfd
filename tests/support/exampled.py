"""An example as one rank of a pool that lives on, instead of a launch of its own."""

import contextlib
import io
import runpy
from unittest import mock

import torch.distributed as dist


def run_example(path: str) -> str:
    """Text that an example prints on this rank; the pool's process group outlives it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), mock.patch.object(dist, "destroy_process_group"):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()
