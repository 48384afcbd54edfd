"""Signals that ask a run to stop."""

import os
import signal
import threading

import pytest

from dtlayout.base.signals import SIGNALS, note_signals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_what_handled_it_before_comes_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with note_signals() as stop:
        assert not stop.is_made
        os.kill(os.getpid(), number)
        assert stop.is_made
    assert signal.getsignal(number) is before


def test_until_something_has_begun_a_signal_is_heard_of_beside_whatever_the_main_thread_does() -> None:
    ended = threading.Event()
    with note_signals() as stop:
        stop.early_end = ended.set
        with stop.changing:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not ended.wait(0.05)
        assert ended.wait(10) and stop.is_made
        ended.clear()
        stop.begin()
        os.kill(os.getpid(), signal.SIGTERM)
    assert not ended.is_set()


def test_people_hear_once_and_at_once_that_a_signal_waits_for_the_step() -> None:
    told, times = threading.Event(), []
    with note_signals() as stop:
        stop.on_wish = lambda: (times.append(1), told.set())
        stop.early_end = lambda: None
        os.kill(os.getpid(), signal.SIGTERM)
        assert not told.wait(0.05)
        stop.begin()
        os.kill(os.getpid(), signal.SIGINT)
        assert told.wait(10)
        os.kill(os.getpid(), signal.SIGINT)
    assert times == [1]
