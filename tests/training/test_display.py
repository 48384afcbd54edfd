"""What a person sees: lines where a log is written, a bar on a terminal, and a table."""

import io
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from dtlayout.training.display import Display, TimeLeft, compare, describe_peaks, format_bytes
from dtlayout.training.metrics import StepMetrics


def metrics(step: int, **others) -> StepMetrics:
    usual = StepMetrics(
        step=step, loss=2.5, grad_norm=0.125, lr=3e-4, tokens=step, step_time_s=1.0, tokens_per_s=12345.0,
        tokens_per_s_per_gpu=1.0, model_tflops_per_gpu=1.0, mfu=None, peak_memory_bytes=None,
    )  # fmt: skip
    return replace(usual, **others)


def shown(steps: Sequence[StepMetrics], *, num_steps: int, log_every: int, clock=time.perf_counter, **console) -> str:
    written = io.StringIO()
    with Display(Console(file=written, width=200, **console), num_steps, log_every, clock) as display:
        for step in steps:
            display.show(step)
    return written.getvalue()


def lines_of(steps: Sequence[StepMetrics], **arguments) -> list[str]:
    return [line for line in shown(steps, **arguments).splitlines() if line]


def ticking(seconds: float) -> Callable[[], float]:
    """A clock that is so much later each time."""
    return partial(next, count(0.0, seconds))


def test_a_log_has_a_line_for_the_first_step_the_last_and_every_nth_between():
    lines = lines_of(list(map(metrics, range(1, 26))), num_steps=25, log_every=10, clock=ticking(1.0))
    assert [int(re.findall(r"\d+", line)[0]) for line in lines] == [1, 10, 20, 25]
    assert lines[0] == "step  1/25  loss 2.5000  grad_norm 0.125  lr 3.00e-04  1.000 s  12,345 tok/s"
    assert lines[1] == "step 10/25  loss 2.5000  grad_norm 0.125  lr 3.00e-04  1.000 s  12,345 tok/s  0:15 left"


def test_the_last_step_of_a_run_that_ends_early_has_a_line_too_and_only_one():
    written = io.StringIO()
    with Display(Console(file=written, width=200), 25, 10) as display:
        display.show_last()
        for step in range(1, 14):
            display.show(metrics(step))
        display.show_last()
        display.show_last()
    lines = written.getvalue().splitlines()
    assert [int(re.findall(r"\d+", line)[0]) for line in lines] == [1, 10, 13]
    assert "1.000 s  12,345 tok/s" in lines[-1]


def test_mfu_is_shown_where_it_is_known():
    for mfu, text in ((0.705, "  MFU 70.5%"), (1.42, "  MFU 142.0%")):
        assert text in shown([metrics(1, mfu=mfu)], num_steps=1, log_every=1)
    assert "MFU" not in shown([metrics(1)], num_steps=1, log_every=1)


def test_the_newest_peak_is_shown_with_the_next_line():
    steps = [metrics(step, peak_memory_bytes={2: 3 << 20, 4: 5 << 20}.get(step)) for step in range(1, 7)]
    lines = lines_of(steps, num_steps=6, log_every=3)
    assert ["peak" in line for line in lines] == [False, True, True]
    assert lines[1].endswith("peak 3.00 MiB") and lines[2].endswith("peak 5.00 MiB")


def test_validation_has_a_line_of_its_own_whether_its_step_has_one_or_not():
    steps = [metrics(step, validation_loss=1.5 if step in (10, 14) else None) for step in range(1, 15)]
    for terminal in (False, True):
        lines = lines_of(steps, num_steps=100, log_every=10, force_terminal=terminal)
        said = [line for line in lines if "validation" in line]
        assert [line[-36:] for line in said] == [f"step  {step}/100  validation loss 1.5000" for step in (10, 14)]


@given(
    values=st.lists(
        st.tuples(st.floats(0, 99), st.floats(1e-3, 999), st.floats(1e-3, 99), st.floats(1, 1e6)), min_size=1
    ),
    mfu=st.none() | st.floats(0, 1),
)
@settings(deadline=None)
def test_lines_are_short_and_once_a_column_is_wide_enough_its_numbers_end_below_each_other(values, mfu):
    num_steps = 100_000
    steps = [
        metrics(
            num_steps - 1 - i, loss=loss, grad_norm=norm, step_time_s=seconds, tokens_per_s=speed, mfu=mfu,
            peak_memory_bytes=80 << 30,
        )
        for i, (loss, norm, seconds, speed) in enumerate(values)
    ]  # fmt: skip
    # The same steps twice: the second time no number is wider than all before it.
    lines = lines_of([*steps, *steps], num_steps=num_steps, log_every=1)[len(steps) :]
    ends = {tuple(found.end() for found in re.finditer(r"[\d%:/](?=  | s | tok| G)", line)) for line in lines}
    assert len({ending[:6] for ending in ends}) == 1
    assert all(len(line) <= 130 for line in lines)


def test_time_left_is_of_recent_steps_and_of_what_passes_between_them():
    now = iter([0.0, 2.0, 4.0, 16.0])
    left = TimeLeft(10, lambda: next(now))
    assert left.after(1, 60.0) is None  # a first step compiles
    assert left.after(2, 2.0) == 8 * 2.0
    assert left.after(3, 2.0) == 7 * 2.0
    assert left.after(4, 2.0) == pytest.approx(6 * (2.0 + 10.0 / 3))  # 10 s of a checkpoint, every third step


def test_time_left_does_not_know_the_steps_before_a_resume_and_follows_a_new_speed():
    left = TimeLeft(1000, ticking(1.0))
    assert left.after(501, 9.0) is None
    for step in range(502, 600):
        assert left.after(step, 1.0) == 1000 - step
    slow = TimeLeft(1000, ticking(4.0))
    found = [slow.after(step, 1.0 if step < 100 else 4.0) for step in range(1, 200)]
    assert found[-1] == pytest.approx(801 * (4.0 + 98 * 3.0 / 198))


def test_a_terminal_has_a_bar_with_the_newest_numbers_and_no_lines():
    text = shown(list(map(metrics, (1, 2, 3))), num_steps=4, log_every=1, force_terminal=True, clock=ticking(1.0))
    assert "3/4" in text and "12,345 tok/s" in text and "0:01 left" in text
    assert "lr" not in text


def test_a_quiet_console_shows_nothing():
    steps = [metrics(1), metrics(2, validation_loss=1.0)]
    assert shown(steps, num_steps=2, log_every=1, quiet=True) == ""


def test_text_with_brackets_is_said_as_it_stands_and_is_not_wrapped():
    written = io.StringIO()
    display = Display(Console(file=written, width=20), 1, 1)
    display.say("saved /runs/[red]/step-1 " + "x" * 40)
    assert written.getvalue() == "saved /runs/[red]/step-1 " + "x" * 40 + "\n"


def test_a_table_shows_its_title_and_every_row():
    written = io.StringIO()
    Display(Console(file=written, width=80), 1, 1).show_table("done", [("MFU", "n/a"), ("loss", "1.5")])
    text = written.getvalue()
    assert text.startswith("done") and re.search(r"MFU +│ n/a", text) and re.search(r"loss +│ 1\.5", text)


@pytest.mark.parametrize(
    ("measured", "predicted", "text"),
    [
        (None, None, "n/a"),
        (0.5, None, "0.50 s"),
        (None, 0.6, "n/a, predicted 0.60 s"),
        (0.5, 0.6, "0.50 s, predicted 0.60 s (+20 %)"),
        (0.5, 0.4, "0.50 s, predicted 0.40 s (-20 %)"),
        (0.0, 0.4, "0.00 s, predicted 0.40 s"),
    ],
)
def test_a_measured_number_stands_beside_its_prediction(measured, predicted, text):
    assert compare(measured, predicted, "{:.2f} s".format) == text


@pytest.mark.parametrize(
    ("measured", "predicted", "texts"),
    [
        (None, None, []),
        ([2048, 1024], None, ["2.00 KiB", "1.00 KiB"]),
        (None, [2048], ["n/a, predicted 2.00 KiB"]),
        ([2048, 1024], [1024, 1024], ["2.00 KiB, predicted 1.00 KiB (-50 %)", "1.00 KiB, predicted 1.00 KiB (+0 %)"]),
    ],
)
def test_every_pipeline_rank_has_a_row_measured_or_predicted(measured, predicted, texts):
    rows = [(f"peak memory, pipeline rank {rank}", text) for rank, text in enumerate(texts)]
    assert describe_peaks(measured, predicted) == rows


@given(st.integers(0, 1 << 50))
def test_bytes_are_shown_in_the_unit_that_makes_them_readable(count):
    number, unit = format_bytes(count).split()
    power = ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    assert float(number) * 1024**power == pytest.approx(count, rel=6e-3)
    assert float(number) <= 1024 and (power == 0 or float(number) >= 1)


def test_a_count_of_bytes_below_a_kibibyte_is_a_whole_number():
    assert [format_bytes(count) for count in (0, 999, 1000, 1023)] == ["0 B", "999 B", "1000 B", "1023 B"]
