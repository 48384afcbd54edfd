"""A schedule from outside: one file, and layouts, searches, dry runs and the ranks of a pipeline know it."""

import pytest
from launching import losses
from plugged import ON_CPU, ask_programs, count_files, plugged_in

from dtlayout import launch

FIXED = ("--fix", "schedule=eager-1f1b", "--fix", "pp=2", "--fix", "micro_batch=1")


@pytest.fixture(autouse=True)
def registered():
    with plugged_in("eager_1f1b"):
        yield


def test_it_takes_one_file():
    assert count_files("eager_1f1b") == 1


def test_four_programs_know_it(tmp_path, capsys):
    answers = ask_programs(capsys, tmp_path, *FIXED, num_gpus=2, plugin="eager_1f1b")
    layout = answers.recommend["layouts"][0]["layout"]
    assert (layout["schedule"], layout["pp"]) == ("eager-1f1b", 2)
    assert answers.check["layout"] == answers.dryrun["layout"] == layout
    assert len(answers.dryrun["ranks"]) == 2
    for rank in answers.dryrun["ranks"]:
        compared = rank["compared_bytes"]["peak"]
        assert compared["dry"] == pytest.approx(compared["predicted"], rel=0.02)

    alone = f"{answers.run}-alone"
    one_rank = ("--layout.pp=1", "--layout.schedule=1f1b", "--train.steps=2", "--train.device=cpu")
    data = (f"--data.source={tmp_path}/corpus.txt", f"--data.folder={tmp_path}/tokens", "--data.max_tokens=0")
    assert launch.main([str(answers.config), *one_rank, *ON_CPU, *data, f"--train.run_folder={alone}"]) == 0
    assert losses(answers.run) == pytest.approx(losses(type(answers.run)(alone)), rel=1e-5)
