"""A tracker and an observer from outside: one file each, and runs write to both."""

import pytest
from launching import losses
from plugged import count_files, plugged_in
from tiny import write_tiny

from dtlayout import Observer, launch, register_observer
from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main


@pytest.fixture(autouse=True)
def plugins():
    with plugged_in("my_tracker"), plugged_in("my_observer") as observer:
        yield observer


@pytest.mark.parametrize("name", ["my_tracker", "my_observer"])
def test_it_takes_one_file(name):
    assert count_files(name) == 1


def test_a_name_that_is_taken_is_refused(plugins):
    with pytest.raises(InvalidConfig, match="the observer 'worst-step' is there already; give yours another name"):
        register_observer("worst-step", "elsewhere:Worst")


def test_a_config_names_the_tracker_and_a_run_sends_it_every_step_and_tells_the_observer(tmp_path, capsys):
    files, override = write_tiny(tmp_path), '--metrics.to=["lines"]'
    assert main(["check", str(files.config), '--metrics.to=["line"]']) == 2
    assert "metrics.to has 'line', which is unknown; did you mean 'lines'?" in capsys.readouterr().err
    assert launch.main([str(files.config), override]) == 0
    said, found = capsys.readouterr().out, losses(files.run)
    assert f"lines: {files.run / 'lines.txt'}\n" in said
    written = (files.run / "lines.txt").read_text().splitlines()
    assert written == [*(f"{step} {loss}" for step, loss in enumerate(found, 1)), "fine"]
    worst = found.index(max(found)) + 1
    assert (files.run / "worst_step.txt").read_text() == f"{worst} {max(found)}\n"
    saved = said.index(f"saved {files.run / 'checkpoints'}")
    assert said.index(f"step {worst} of 2 had the largest loss\n") > saved  # it is told after those of dtlayout


def test_an_observer_of_which_nothing_is_overridden_watches_in_vain():
    observer = Observer()
    with observer.around_launch(1):
        observer.before_action(None)
    assert observer.on_result(None) is observer.after_step(None) is observer.at_end(0, 1) is None
    assert observer.pauses(None) is False
