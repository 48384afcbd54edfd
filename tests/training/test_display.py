"""What a person sees: lines where a log is written, a bar on a terminal, and a table."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dtlayout.training.display import Display, compare, describe_peaks, format_bytes
from dtlayout.training.metrics import StepMetrics


def metrics(step: int, mfu: float | None = None) -> StepMetrics:
    return StepMetrics(
        step=step, loss=2.5, grad_norm=0.125, lr=3e-4, tokens=step, step_time_s=1.0, tokens_per_s=12345.0,
        tokens_per_s_per_gpu=1.0, model_tflops_per_gpu=1.0, mfu=mfu, peak_memory_bytes=None,
    )  # fmt: skip


def shown(steps: list[int], *, num_steps: int, log_every: int, mfu: float | None = None, **console) -> str:
    written = io.StringIO()
    with Display(Console(file=written, width=200, **console), num_steps, log_every) as display:
        for step in steps:
            display.show(metrics(step, mfu))
    return written.getvalue()


def test_a_log_has_a_line_for_the_first_step_the_last_and_every_nth_between():
    lines = [line for line in shown(list(range(1, 26)), num_steps=25, log_every=10).splitlines() if line]
    assert [int(re.findall(r"\d+", line)[0]) for line in lines] == [1, 10, 20, 25]
    assert lines[1] == "step    10/25  loss 2.5000  grad_norm 0.125  12,345 tokens/s  lr 3.00e-04"


def test_mfu_is_shown_where_it_is_known():
    assert "MFU 70.5%" in shown([1], num_steps=1, log_every=1, mfu=0.705)
    assert "MFU 142.0%" in shown([1], num_steps=1, log_every=1, mfu=1.42)
    assert "MFU" not in shown([1], num_steps=1, log_every=1)


def test_a_terminal_has_a_bar_with_the_newest_numbers_and_no_lines():
    text = shown([1, 2, 3], num_steps=3, log_every=1, force_terminal=True)
    assert "3/3" in text and "12,345 tokens/s" in text
    assert "lr" not in text


def test_a_quiet_console_shows_nothing():
    assert shown([1, 2], num_steps=2, log_every=1, quiet=True) == ""


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
