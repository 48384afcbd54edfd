"""A sweep's file stands for trials: every combination once, or the best of a search, and says what is wrong with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import ROOT, write_tiny

from dtlayout.base.errors import InvalidConfig
from dtlayout.spec.cluster import find_gpu
from dtlayout.sweep.spec import Trial, find_trial_gpu, make_trials, read_sweep, to_command


def trials_of(folder: Path, text: str, world: int = 4) -> list[Trial]:
    write_tiny(folder)
    (folder / "sweep.toml").write_text(f'config = "tiny.toml"\nworld = {world}\n{text}')
    return make_trials(read_sweep(folder / "sweep.toml"), folder / "out")


def test_axes_of_several_sections_are_combined_and_predicted_the_fastest_first(tmp_path):
    text = '[axes.layout]\ntp = [1, 2]\nrecompute = ["none", "full"]\n[axes.kernels]\nloss = ["eager", "linear"]'
    trials = trials_of(tmp_path, f'overrides = ["--train.device=cpu"]\nsteps = 7\n{text}')
    assert len(trials) == len({trial.key for trial in trials}) == 8
    times = [trial.estimate.step_time_s for trial in trials if trial.estimate]
    assert len(times) == 8 and times == sorted(times)
    configs = [trial.config for trial in trials if trial.config]
    assert {(c.layout.tp, c.layout.recompute, c.kernels.loss) for c in configs} == {
        (tp, recompute, loss) for tp in (1, 2) for recompute in ("none", "full") for loss in ("eager", "linear")
    }
    assert {(c.train.steps, c.checkpoint.save, c.train.device) for c in configs} == {(7, False, "cpu")}
    longer = trials_of(tmp_path, f'overrides = ["--train.device=cpu"]\nsteps = 9\n{text}')
    assert [t.setting for t in longer] == [t.setting for t in trials] and len({t.setting for t in trials}) == len(
        trials
    )
    assert not {t.key for t in longer} & {t.key for t in trials}
    assert {c.train.run_folder for c in configs} == {f"{tmp_path}/out/trials/{trial.key}/run" for trial in trials}


def test_configs_that_come_out_the_same_are_one_trial(tmp_path):
    trials = trials_of(tmp_path, "[axes.layout]\ndp_shard = [-1, 4]")
    assert len(trials) == 1


def test_a_trial_is_another_one_in_another_world(tmp_path):
    keys = {trials_of(tmp_path, "[axes.layout]\ntp = [1]\ndp_shard = [-1]", world)[0].key for world in (2, 4)}
    assert len(keys) == 2


def test_what_is_not_possible_says_why_and_comes_last(tmp_path):
    possible, impossible = trials_of(tmp_path, "[axes.layout]\ntp = [3, 1]")
    assert possible.config is not None and possible.problems == ()
    assert impossible.config is None and "tp=3 does not divide num_heads" in "".join(impossible.problems)


def test_the_best_of_a_search_are_trials_of_which_axes_vary_the_rest(tmp_path):
    text = 'from = "recommend:3"\noverrides = ["--train.device=cpu"]\n[axes.kernels]\nloss = ["eager", "chunked"]'
    trials = trials_of(tmp_path, text)
    assert len(trials) == 6
    losses = [(trial.overrides[-1], trial.config.kernels.loss) for trial in trials if trial.config]
    assert sorted(losses) == [("--kernels.loss=chunked", "chunked")] * 3 + [("--kernels.loss=eager", "eager")] * 3
    for trial in trials:
        assert trial.config is not None and trial.run is not None and trial.run.layout.world_size == 4
        assert trial.config.kernels.attention == "sdpa-flash"


@pytest.mark.parametrize(
    ("device", "gpu", "name", "found"),
    [
        ("cpu", None, "NVIDIA H100 80GB HBM3", "cpu"),
        ("auto", "a100-80g-sxm", "", "a100-80g-sxm"),
        ("auto", None, "", "cpu"),
        ("auto", None, "NVIDIA H100 80GB HBM3", "h100-80g-sxm"),
        ("cuda", None, "GPU of tomorrow", None),
        ("cuda", None, "", None),
    ],
)
def test_predictions_are_for_the_named_gpu_or_the_one_that_is_there(monkeypatch, device, gpu, name, found):
    monkeypatch.setattr("dtlayout.sweep.spec.ask_device_names", lambda: (name,) if name else ())
    find_trial_gpu.cache_clear()
    known = find_trial_gpu(device, gpu and find_gpu(gpu))
    find_trial_gpu.cache_clear()
    assert (known.name if known else None) == found


def test_a_search_that_finds_nothing_is_refused(tmp_path):
    text = 'from = "recommend:3"\noverrides = ["--cluster.gpu=a100-80g-sxm", "--model.vocab_size=1_000_000_000"]'
    with pytest.raises(InvalidConfig, match="no layout of tiny is legal and fits on 4 x a100-80g-sxm"):
        trials_of(tmp_path, text)


def test_the_command_of_a_trial_can_be_any(tmp_path):
    write_tiny(tmp_path)
    path = tmp_path / "sweep.toml"
    path.write_text(
        'config = "tiny.toml"\nworld = 16\nlaunch = "srun -n {world} train.py \'{config}\'"\n[axes.layout]\ntp = [1]'
    )
    command = to_command(read_sweep(path), tmp_path / "a b" / "config.toml")
    assert command == ["srun", "-n", "16", "train.py", f"{tmp_path}/a b/config.toml"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("world = 4\n[axes.layout]\ntp = [1]", "config is missing"),
        ('config = "tiny.toml"\n[axes.layout]\ntp = [1]', "world is missing"),
        ('config = "tiny.toml"\nworld = 4', "nothing is swept"),
        ('config = "tiny.toml"\nworld = 4\n[axes.layout]\ntp = 2', "axes.layout.tp=2 must be a list"),
        ('config = "tiny.toml"\nworld = 0\n[axes.layout]\ntp = [1]', "world=0 must be at least 1"),
        ('config = "tiny.toml"\nworld = 4\nstep = 3\n[axes.layout]\ntp = [1]', "did you mean steps?"),
        ('config = "tiny.toml"\nworld = 4\nfrom = "best:3"', "from='best:3' must be recommend:K"),
        ('config = "tiny.toml"\nworld = 4\nfrom = "recommend:3"\n[axes.layout]\ntp = [1]', "leave one of them out"),
        ('config = "tiny.toml"\nworld = 4\nsteps = 4\nwarmup_steps = 4\n[axes.layout]\ntp = [1]', "use more steps"),
        ('config = "tiny.toml"\nworld = 4\noverrides = "-a"\n[axes.layout]\ntp = [1]', "overrides='-a' must be a list"),
        ("config = 3\nworld = 4.5\n[axes.layout]\ntp = [1]", "world=4.5 must be a whole number"),
        ('config = "tiny.toml"\nworld = 4\nlaunch = 3\n[axes.layout]\ntp = [1]', "launch=3 must be a string"),
        ('config = "tiny.toml"\nworld = 4\naxes = 3', "axes is a table: write [axes]"),
        ('config = "tiny.toml"\nworld = 4\nlaunch = "run {host}"\n[axes.layout]\ntp = [1]', "launch"),
        ("world = [", "is not TOML"),
        ('config = "a"\nworld = 2\n[axes.train]\nsteps = [5, 9]', "axes.train.steps: a sweep says how many"),
    ],
)
def test_a_file_that_says_something_wrong_is_refused_in_a_line(tmp_path, text, problem):
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        read_sweep(path)
    assert problem in str(caught.value)


BEST = {
    "llama-13b-2k-64xa100": {"micro_batch": 1, "tp": 1, "pp": 1},
    "llama-13b-8k-128xa100": {"micro_batch": 1, "tp": 2, "pp": 2},
    "llama-30b-2k-256xa100": {"micro_batch": 1, "tp": 2, "pp": 4},
    "llama-30b-8k-128xa100": {"micro_batch": 1, "tp": 4, "pp": 4},
    "llama-65b-2k-128xa100": {"micro_batch": 1, "tp": 2, "pp": 4},
}
"""What the study found to be fastest, without recomputation and with FlashAttention-2 and a fused norm."""


@pytest.mark.parametrize("name", BEST)
def test_the_sweeps_of_the_study_hold_what_it_found_to_be_fastest(name):
    path = ROOT / "configs" / "sweeps" / f"{name}.toml"
    sweep = read_sweep(path)
    best = {**BEST[name], "recompute": "none", "attention": "sdpa-flash", "norm": "fused"}
    wanted = {f"--{'kernels' if key in ('attention', 'norm') else 'layout'}.{key}={best[key]}" for key in best}
    (trial,) = (t for t in make_trials(replace(sweep, axes=_only(sweep.axes, best)), Path("out")))
    assert set(trial.overrides) == wanted
    assert trial.run is not None and trial.run.layout.world_size == sweep.world
    assert trial.estimate is not None and trial.estimate.fits
    assert to_command(sweep, Path("c.toml"))[:3] == ["srun", f"--nodes={sweep.world // 8}", "--ntasks-per-node=1"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sweeps").glob("*-sp.toml")), ids=lambda path: path.stem)
def test_the_sweeps_of_sequence_parallelism_try_each_layout_with_it_and_without(path):
    sweep = read_sweep(path)
    trials = [trial for trial in make_trials(sweep, Path("out")) if trial.run is not None]
    runnable = [trial.run.layout for trial in trials if trial.run and trial.estimate and trial.estimate.fits]
    pairs = [layout for layout in runnable if layout.shards_sequence]
    found = {trial.run.layout for trial in trials if trial.run}
    assert pairs and all(replace(layout, sequence_parallel=False) in found for layout in pairs)
    assert path.stem.split("-")[3] == f"{sweep.world}xa100"


def _only(axes: dict[str, list[Any]], values: dict[str, Any]) -> dict[str, list[Any]]:
    """Axes of one value each, which they had."""
    chosen = {key: values[key.rpartition(".")[2]] for key in axes}
    assert all(chosen[key] in axes[key] for key in axes)
    return {key: [value] for key, value in chosen.items()}


def test_what_is_wrong_with_all_trials_is_refused_and_no_result(tmp_path):
    with pytest.raises(InvalidConfig, match="layot"):
        trials_of(tmp_path, 'overrides = ["--layot.tp=2"]\n[axes.layout]\ntp = [1, 2]')
    (tmp_path / "sweep.toml").write_text('config = "tinny.toml"\nworld = 4\n[axes.layout]\ntp = [1]')
    with pytest.raises(InvalidConfig, match=r"tinny.toml cannot be read"):
        make_trials(read_sweep(tmp_path / "sweep.toml"), tmp_path / "out")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="cannot be read: No such file"):
        read_sweep(tmp_path / "none.toml")
