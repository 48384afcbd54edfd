"""Signals that ask a run to stop."""

import os
import signal

import pytest

from dtlayout.signals import SIGNALS, Stopped, note_signals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_what_handled_it_before_comes_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with note_signals() as stop:
        assert not stop.is_made
        os.kill(os.getpid(), number)
        assert stop.is_made
    assert signal.getsignal(number) is before


def test_before_anything_has_begun_the_first_signal_ends_the_block_and_a_second_does_not_disturb_that() -> None:
    with pytest.raises(Stopped), note_signals() as stop:
        stop.is_early = True
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("the block went on")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
    assert stop.is_made


def test_a_signal_within_an_import_waits_for_its_end() -> None:
    reached = []
    with pytest.raises(Stopped), note_signals() as stop:
        stop.is_early = True
        with stop.held_back():
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append("the end")
        pytest.fail("the block went on")
    assert reached == ["the end"]
