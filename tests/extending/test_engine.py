"""An engine from outside: a file of features and constants, and every prediction that names it is its own."""

import pytest
from plugged import PLUGINS, ask, ask_programs, count_files, plugged_in

from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.engine import find_engine, register_engine

LLAMA = ("--model", "llama3.1-8b", "--gpu", "h100-80g-sxm", "--gpus", "16", "--seq-len", "4096", "--global-batch", "64")


@pytest.fixture(autouse=True)
def registered():
    with plugged_in("my_engine"):
        yield


def test_it_takes_two_files():
    assert count_files("my_engine") == 2


def test_what_is_recommended_for_it_is_checked_dry_run_and_trained(tmp_path, capsys):
    answers = ask_programs(capsys, tmp_path, "--engine", "mine")
    assert answers.recommend["scenario"]["engine"] == "mine"
    assert answers.check["layout"] == answers.dryrun["layout"]
    assert answers.check["layout"].items() <= answers.recommend["layouts"][0]["layout"].items()


def test_its_features_and_constants_make_the_step(capsys):
    fixed = ("--fix", "dp_shard=16", "--fix", "tp=1", "--fix", "pp=1", "--top", "1")
    mine, own = (ask(capsys, "recommend", *LLAMA, *fixed, "--engine", name) for name in ("mine", "dtlayout"))
    (mine,), (own,) = mine["layouts"], own["layouts"]
    assert mine["time"]["dp"] > own["time"]["dp"]  # nothing hides it
    assert find_engine("mine", "h100-80g-sxm").fitted == ("matmul_efficiency",)
    assert not find_engine("mine", "a100-80g-sxm").is_calibrated


def test_a_name_that_is_taken_and_a_file_that_is_wrong_are_refused(tmp_path):
    with pytest.raises(InvalidConfig, match=r"my_engine\.toml: engine 'mine' is there already; give yours another"):
        register_engine(PLUGINS / "my_engine.toml")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('engine = "wrong"\n[constants]\nspeed = 1.0\noverlap = 2.0')
    with pytest.raises(InvalidConfig) as caught:
        register_engine(wrong)
    assert len(caught.value.problems) == 2 and all(p.startswith(f"{wrong}: constants.") for p in caught.value.problems)
    with pytest.raises(InvalidConfig, match=r"^engine nowhere\.toml cannot be read"):
        register_engine("nowhere.toml")
