"""dtlayout compare: sides beside each other, their differences, and what it refuses."""

import json

import pytest
from tiny import ROOT

from dtlayout.cli import main

LLAMA = str(ROOT / "configs" / "llama-13b-64xa100.toml")


def ask(capsys, *arguments):
    assert main(["compare", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["compared"]


def read(capsys, *arguments):
    assert main(["compare", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def row(lines, name):
    """The cells behind a name, of the first row that begins with it."""
    return next(line.split()[1:] for line in lines if line.split()[:1] == [name])


def test_sides_have_what_explain_says_of_each(capsys):
    first, second = ask(capsys, LLAMA, "tp=2,recompute=full", "--gpus", "64")
    for side, overrides in ((first, []), (second, ["--layout.tp=2", "--layout.recompute=full"])):
        assert main(["explain", LLAMA, "--gpus", "64", "--json", *overrides]) == 0
        explained = json.loads(capsys.readouterr().out)
        fullest = max(explained["memory_bytes"], key=lambda memory: memory["total"])
        assert side["memory_bytes"] == {key: value for key, value in fullest.items() if key != "total"}
        for key in ("layout", "kernels", "step_time_s", "mfu", "time_s", "peak_memory_bytes", "tokens_per_s_per_gpu"):
            assert side[key] == explained[key]
    assert (first["name"], second["name"]) == ("llama-13b-64xa100", "tp=2,recompute=full")


def test_differences_are_of_the_first(capsys):
    lines = read(capsys, LLAMA, "tp=2", "pp=2,micro_batch=2", "--gpus", "64")
    sides = ask(capsys, LLAMA, "tp=2", "pp=2,micro_batch=2", "--gpus", "64")
    steps = [side["step_time_s"] for side in sides]
    assert row(lines, "total") == [f"{s:.3f}" for s in steps] + [f"{s - steps[0]:+.3f}" for s in steps[1:]]
    assert row(lines, "tp")[0] == row(lines, "tp")[2] == "0.000" and float(row(lines, "tp")[1]) > 0
    assert not any(line.startswith("recompute") for line in lines), "nobody recomputes"
    assert lines[0].startswith("alike: model llama-13b, sequences a step 2048 of 2,048, GPUs 64 x a100-80g-sxm")
    fewer = 1 - sides[1]["tokens_per_s_per_gpu"] / sides[0]["tokens_per_s_per_gpu"]
    assert lines[-2].startswith(f"2 trains {fewer:.1%} fewer tokens a second and GPU than 1, with ")
    assert lines[-2].endswith(" GiB less on the fullest rank, most of it gradients.")
    assert lines[-1].endswith(" GiB less on the fullest rank, most of it gradients.")  # activations are more


def test_files_are_compared_whatever_their_models_and_their_size(capsys, tmp_path):
    plan = tmp_path / "small.toml"
    plan.write_text(
        '[model]\nname = "llama-7b"\n[batch]\nglobal_batch = 64\nseq_len = 4096\n[layout]\ndp_shard = 32\n'
        '[cluster]\ngpu = "h100-80g-sxm"\n'
    )
    lines = read(capsys, LLAMA, str(plan))
    assert next(line for line in lines if line.startswith("model")).split()[1:] == ["llama-13b", "llama-7b"]
    assert next(line for line in lines if line.startswith("GPUs")).split()[-3:] == ["32", "x", "h100-80g-sxm"]
    assert "more tokens a second and GPU than 1, with " in lines[-1]
    assert " on the fullest rank, most of it " in lines[-1]


def test_one_that_does_not_fit_and_one_that_is_the_same_are_said(capsys):
    lines = read(capsys, LLAMA, "micro_batch=8", "tp=1", "--gpus", "64")
    assert lines[-2].endswith("; it does not fit.") and row(lines, "fits") == ["yes", "no", "yes"]
    assert lines[-1] == ("3 trains as many tokens a second and GPU as 1, with as much memory on the fullest rank.")


def test_a_layout_is_read_as_it_is_printed(capsys):
    printed, named = (
        ask(capsys, LLAMA, text, "--gpus", "64")[1] for text in ("pp2·tp2 mb2", "pp=2,tp=2,micro_batch=2")
    )
    assert printed["layout"] == named["layout"] and printed["step_time_s"] == named["step_time_s"]


def test_an_override_holds_for_all(capsys):
    sides = ask(capsys, LLAMA, "tp=2", "--gpus", "64", "--layout.recompute=full")
    assert [side["layout"]["recompute"] for side in sides] == ["full", "full"]


def test_another_engine_is_predicted_with_its_kernels(capsys):
    own, _ = ask(capsys, LLAMA, "tp=2", "--gpus", "64")
    other, _ = ask(capsys, LLAMA, "tp=2", "--gpus", "64", "--engine", "megatron")
    assert (own["engine"], other["engine"]) == ("dtlayout", "megatron")
    assert own["step_time_s"] != other["step_time_s"]


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ("none.toml", "config none.toml cannot be read: No such file or directory"),
        ("tp", "'tp' is no choice; write a layout as it is printed"),
        ("tq=2", "tq is unknown"),
        ("tp=3", "tp=3 does not divide"),
    ],
)
def test_what_is_no_layout_is_refused(capsys, other, problem):
    assert main(["compare", LLAMA, other]) == 2
    assert problem in capsys.readouterr().err


def test_data_parallelism_that_is_not_named_takes_up_the_gpus_of_the_first(capsys, tmp_path):
    best = tmp_path / "best.toml"
    question = ["--model", "llama-7b", "--gpu", "a100-80g-sxm", "--gpus", "16", "--seq-len", "2048"]
    assert main(["recommend", *question, "--global-batch", "128", "--fix", "dp16", "--emit", str(best)]) == 0
    capsys.readouterr()
    first, wide, deep, named = ask(capsys, str(best), "tp=2", "pp=4,micro_batch=2", "dp4·tp2")
    assert first["layout"]["dp_shard"] == 16 and wide["layout"]["dp_shard"] == 8 and deep["layout"]["dp_shard"] == 4
    assert [side["gpus"] for side in (first, wide, deep, named)] == [16, 16, 16, 8]


def test_a_legend_says_which_layout_each_column_is(capsys):
    lines = read(capsys, LLAMA, "tp=2", "--gpus", "64")
    head = next(i for i, line in enumerate(lines) if line.split() == ["what", "layout"])
    assert [line.split()[:2] for line in lines[head + 1 : head + 3]] == [["1", "llama-13b-64xa100"], ["2", "tp=2"]]
    assert lines[head + 2].split()[2].startswith("dp32·tp2")
