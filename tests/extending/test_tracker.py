"""A tracker from outside: one file, and runs write to it."""

import pytest
from launching import losses
from plugged import count_files, plugged_in
from tiny import write_tiny

from dtlayout import launch
from dtlayout.cli import main


@pytest.fixture(autouse=True)
def lines():
    with plugged_in("my_tracker") as plugin:
        yield plugin


def test_it_takes_one_file():
    assert count_files("my_tracker") == 1


def test_a_config_names_it_and_a_run_sends_it_every_step(tmp_path, capsys):
    files, override = write_tiny(tmp_path), '--metrics.to=["lines"]'
    assert main(["check", str(files.config), '--metrics.to=["line"]']) == 2
    assert "metrics.to has 'line', which is unknown; did you mean 'lines'?" in capsys.readouterr().err
    assert launch.main([str(files.config), override]) == 0
    assert f"lines: {files.run / 'lines.txt'}\n" in capsys.readouterr().out
    written = (files.run / "lines.txt").read_text().splitlines()
    assert written == [*(f"{step} {loss}" for step, loss in enumerate(losses(files.run), 1)), "fine"]
