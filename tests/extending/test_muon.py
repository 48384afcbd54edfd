"""An optimizer from outside that takes matrices alone: one file that says so, and AdamW updates the rest."""

import json
from dataclasses import dataclass

import pytest
import torch.distributed as dist
from launching import read_lines
from plugged import ask, count_files, plugged_in
from tiny import write_tiny

from dtlayout import launch
from dtlayout.base.checkpoint_names import list_checkpoints
from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.config.loading import load_config
from dtlayout.models.counting import count_block_parameters
from dtlayout.models.presets import find_preset
from dtlayout.spec.layout import Layout
from dtlayout.spec.optimizers import AdamW, Optimizer, register_optimizer

REFUSED = "optimizer.name=torch-muon updates whole weights, which dp_shard=2 splits; use dp_replicate and pp instead"


@pytest.fixture(autouse=True)
def muon():
    with plugged_in("muon") as plugin:
        yield plugin


@pytest.fixture
def config(tmp_path):
    path = write_tiny(tmp_path).config
    keys = '[optimizer]\nname = "torch-muon"\nmomentum = 0.9\nrest = { lr = 1e-3, beta2 = 0.9 }\n'
    path.write_text(path.read_text().replace("[optimizer]\n", keys))
    return path


def test_it_takes_one_file():
    assert count_files("muon") == 1


def test_configs_name_it_and_what_updates_the_rest(muon, config, capsys):
    assert load_config(config).optimizer == muon.TorchMuon(lr=1e-2, momentum=0.9, rest=AdamW(lr=1e-3, beta2=0.9))
    assert main(["check", str(config), "--optimizer.rest.warmup_steps=3", "--optimizer.rest.momentum=0.5"]) == 2
    assert capsys.readouterr().err == (
        "optimizer.rest.momentum is a key of optimizer.rest.name=sgd; name that, or leave momentum out\n"
    )
    with pytest.raises(InvalidConfig, match=r"^optimizer.rest.max_norm would change nothing: say it in \[optimizer\]"):
        muon.TorchMuon(rest=AdamW(max_norm=2.0))


def test_a_layout_that_splits_weights_is_refused_in_a_line_before_anything_starts(muon, config, capsys):
    assert main(["check", str(config), "--layout.dp_shard=2", "--world", "2"]) == 2
    assert capsys.readouterr().err == f"{REFUSED}\n"
    assert ask(capsys, "check", config, "--layout.dp_shard=1", "--layout.dp_replicate=2", "--world", "2")["ok"]
    for split in (Layout(tp=2), Layout(cp=2), Layout(dp_shard=2)):
        assert len(muon.TorchMuon().layout_problems(split)) == 1
    assert not AdamW().layout_problems(Layout(tp=2)) + muon.TorchMuon().layout_problems(Layout(pp=2, dp_replicate=2))


def test_a_search_finds_layouts_with_whole_weights_and_counts_state_by_role(capsys):
    scenario = ["--model", "debug", "--gpu", "h100-80g-sxm", "--gpus", "4", "--seq-len", "64", "--global-batch", "32"]
    found = ask(capsys, "recommend", *scenario, "--optimizer", "torch-muon", "--fix", "pp=1", "--top", "20")["layouts"]
    assert found and {(each["layout"]["dp_shard"], each["layout"]["tp"]) for each in found} == {(1, 1)}
    model = find_preset("debug")
    vectors = 2 * model.hidden_size
    matrices = model.num_layers * (count_block_parameters(model) - vectors)
    rest = 2 * model.vocab_size * model.hidden_size + model.num_layers * vectors + model.hidden_size
    counters = 4 * (3 + 2 * model.num_layers)
    assert found[0]["memory"][0]["optimizer"] == 4 * matrices + 8 * rest + counters


def test_a_dry_run_holds_what_is_predicted(config, capsys):
    for rank in ask(capsys, "dryrun", config, "--gpu", "cpu", "--world", "1")["ranks"]:
        compared = rank["compared_bytes"]["optimizer"]
        assert 0 < compared["dry"] == compared["predicted"]


def test_a_run_trains_with_it_saves_the_state_of_each_role_and_goes_on(config, tmp_path):
    asked = [str(config), "--optimizer.decay_steps=2"]
    for steps in (1, 2):
        assert launch.main([*asked, f"--train.run_folder={tmp_path / 'parts'}", f"--train.steps={steps}"]) == 0
    assert launch.main([*asked, f"--train.run_folder={tmp_path / 'whole'}"]) == 0
    losses = [[line["loss"] for line in read_lines(tmp_path / run)] for run in ("parts", "whole")]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    state = json.loads((list_checkpoints(tmp_path / "parts" / "checkpoints")[-1] / "state.json").read_text())
    assert state["optimizer"] == {"name": "torch-muon, adamw", "state": ["momentum_buffer", "exp_avg", "exp_avg_sq"]}


def test_one_that_does_not_say_its_roles_is_refused_in_a_line(config, capsys):
    @register_optimizer
    @dataclass(frozen=True, kw_only=True)
    class Everywhere(Optimizer):
        """Muon, of which nobody said that it takes matrices alone."""

        name: str = "everywhere"

        torch_class = "torch.optim:Muon"

    config.write_text(config.read_text().replace('name = "torch-muon"\nmomentum = 0.9\n', 'name = "everywhere"\n'))
    config.write_text(config.read_text().replace("rest = { lr = 1e-3, beta2 = 0.9 }\n", ""))
    assert launch.main([str(config)]) == 2
    dist.destroy_process_group()  # a run that fails leaves it: NCCL would wait for ranks that do not come
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "optimizer" in each]
    assert line.startswith("optimizer.name=everywhere: torch.optim:Muon refuses the weights that it gets: Muon only")
    assert line.endswith("an optimizer of some weights alone is a RoleOptimizer, which says their roles")
