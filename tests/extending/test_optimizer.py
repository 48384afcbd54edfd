"""An optimizer from outside: one file that describes it and one of torch, and everything knows it."""

import json
from dataclasses import dataclass

import pytest
from launching import read_lines
from plugged import ask, count_files, plugged_in
from tiny import write_tiny

from dtlayout import RoleOptimizer, launch, register_optimizer
from dtlayout.base.checkpoint_names import list_checkpoints
from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.config.loading import load_config
from dtlayout.spec.optimizers import OPTIMIZERS

LLAMA = ["--model", "llama3.1-8b", "--gpu", "h100-80g-sxm", "--gpus", "16", "--seq-len", "4096", "--global-batch", "64"]
NUM_PARAMETERS = 8_030_261_248


@pytest.fixture(autouse=True)
def lion():
    with plugged_in("lion") as plugin:
        yield plugin


@pytest.fixture
def config(tmp_path):
    path = write_tiny(tmp_path).config
    path.write_text(path.read_text().replace("[optimizer]\n", '[optimizer]\nname = "lion"\nlookahead = 0.8\n'))
    return path


def test_it_takes_two_files():
    assert count_files("lion") == 2


def test_configs_name_it_and_its_keys(lion, config, capsys):
    assert ask(capsys, "check", config)["ok"]
    assert load_config(config).optimizer == lion.Lion(lr=1e-2, lookahead=0.8)
    assert main(["check", str(config), "--optimizer.lookahead=2", "--optimizer.beta1=0.9"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "optimizer.beta1 is a key of optimizer.name=adamw; name that, or leave beta1 out",
        "optimizer.lookahead=2.0 must lie between 0 and 1",
    ]


def test_recommend_knows_its_memory_and_its_traffic_and_emits_it(lion, tmp_path, capsys):
    fixed = ["--fix", "dp_shard=16", "--fix", "tp=1", "--fix", "pp=1", "--top", "1"]
    emitted = tmp_path / "emitted.toml"
    ours = ask(capsys, "recommend", *LLAMA, *fixed, "--optimizer", "lion", "--emit", emitted)
    theirs = ask(capsys, "recommend", *LLAMA, *fixed)
    assert (ours["scenario"]["optimizer"], theirs["scenario"]["optimizer"]) == ("lion", "adamw")
    assert main(["recommend", *LLAMA, *fixed, "--optimizer", "lion"]) == 0
    assert "tokens a step, updated by lion\n" in capsys.readouterr().out
    (mine,), (adamw,) = ours["layouts"], theirs["layouts"]
    assert mine["memory"][0]["optimizer"] == pytest.approx(NUM_PARAMETERS * 2 / 16, rel=1e-3)
    assert adamw["memory"][0]["optimizer"] == pytest.approx(NUM_PARAMETERS * 8 / 16, rel=1e-3)
    around = 12 + 10 + 10  # bytes a parameter of casts and the norm, of weights cast back, and of one sum of gradients
    assert mine["time"]["optimizer"] / adamw["time"]["optimizer"] == pytest.approx(
        (around + 16 / 16) / (around + 28 / 16)
    )
    assert load_config(emitted).optimizer == lion.Lion()


def test_a_dry_run_holds_what_is_predicted(config, capsys):
    document = ask(capsys, "dryrun", config, "--gpu", "cpu", "--world", "2")
    for rank in document["ranks"]:
        compared = rank["compared_bytes"]["optimizer"]
        assert 0 < compared["dry"] == compared["predicted"]


def test_two_steps_train_with_it_and_a_checkpoint_holds_its_state(config, tmp_path):
    assert launch.main([str(config), "--checkpoint.every=1"]) == 0
    assert len(read_lines(tmp_path / "run")) == 2
    (first, second) = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert json.loads((second / "state.json").read_text())["optimizer"] == {"name": "lion", "state": ["momentum"]}
    assert first != second


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "does not say whose weights it updates"),
        ({"roles": frozenset()}, "does not say whose weights it updates"),
        ({"roles": "matrix"}, "has roles='matrix'"),
        ({"roles": frozenset({"matrices"})}, "has roles=frozenset({'matrices'})"),
    ],
)
def test_an_optimizer_of_some_weights_that_does_not_say_which_is_refused(given, said):
    @dataclass(frozen=True, kw_only=True)
    class OfSome(type("Roles", (RoleOptimizer,), given)):
        name: str = "of-some"

    line = (
        f"optimizer 'of-some' {said}; give its class roles = frozenset({{...}}), some of "
        "matrix, embedding, head, vector, expert, adapter"
    )
    for use in (register_optimizer, lambda optimizer: optimizer()):
        with pytest.raises(InvalidConfig) as refused:
            use(OfSome)
        assert str(refused.value) == line
    assert "of-some" not in OPTIMIZERS
