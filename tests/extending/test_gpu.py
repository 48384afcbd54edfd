"""A GPU type from outside: a file of numbers, and every program names it, predicts for it and counts MFU by it."""

import pytest
from launching import read_lines
from plugged import PLUGINS, ask_programs, count_files, plugged_in

from dtlayout.base.errors import InvalidConfig
from dtlayout.spec.cluster import find_gpu, find_gpu_by_device, register_gpu


@pytest.fixture(autouse=True)
def registered():
    with plugged_in("my_gpu"):
        yield


def test_it_takes_two_files():
    assert count_files("my_gpu") == 2


def test_four_programs_know_it(tmp_path, capsys):
    answers = ask_programs(capsys, tmp_path, gpu="a2-16g")
    assert answers.recommend["scenario"]["gpu"] == answers.dryrun["gpu"] == "a2-16g"
    assert answers.dryrun["capacity_bytes"] < find_gpu("a2-16g").memory_bytes
    assert answers.check["ok"] and 'gpu = "a2-16g"' in answers.config.read_text()
    assert all(0 < line["mfu"] < 1e-3 for line in read_lines(answers.run))  # of a peak that this machine has not


def test_a_run_finds_it_by_what_torch_calls_it():
    assert find_gpu_by_device("NVIDIA A2") is find_gpu("a2-16g")


def test_a_name_that_is_taken_and_a_file_that_is_wrong_are_refused(tmp_path):
    with pytest.raises(InvalidConfig, match=r"my_gpu\.toml: GPU type 'a2-16g' is there already; give yours another"):
        register_gpu(PLUGINS / "my_gpu.toml")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text((PLUGINS / "my_gpu.toml").read_text().replace("18e12", "-1.0"))
    with pytest.raises(InvalidConfig, match=r"wrong\.toml: peak_bf16\.value=-1 must be a number above 0"):
        register_gpu(wrong)
    with pytest.raises(InvalidConfig, match=r"^GPU type nowhere\.toml cannot be read"):
        register_gpu("nowhere.toml")
