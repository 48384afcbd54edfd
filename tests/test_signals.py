"""Signals that ask a run to stop."""

import os
import signal

import pytest

from dtlayout.signals import SIGNALS, note_signals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_what_handled_it_before_comes_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with note_signals() as stop:
        assert not stop.is_made
        os.kill(os.getpid(), number)
        assert stop.is_made
    assert signal.getsignal(number) is before
