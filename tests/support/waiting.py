"""Waiting for what other processes and threads do."""

import time
from collections.abc import Callable


def wait_until(is_true: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Return when it is true; AssertionError if it is not in time."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
