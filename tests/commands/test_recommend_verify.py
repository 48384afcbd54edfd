"""dtlayout recommend --verify: the best are dry run before they are named."""

import json
from dataclasses import asdict, replace

import pytest
from recommending import DEBUG, ask_with_progress, refuse

from dtlayout.commands.verify import verify
from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.presets import PRESETS
from dtlayout.planner.search import Search
from dtlayout.planner.space import Space
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu


def test_the_best_are_dry_run_and_a_misfit_is_dropped(capsys, monkeypatch):
    """Predictions are right here, so that only a planted oom leaves anything to correct."""
    one = [*DEBUG, "--fix", "zero=1", "--fix", "micro_batch=2", "--top", "3"]
    honest = ask_with_progress(capsys, *one, "--verify", "2")
    assert [v["fits"] for v in honest["verified"]] == [True, True]
    for found in honest["verified"]:
        assert found["peak_memory_bytes"] == pytest.approx(found["predicted_peak_memory_bytes"], rel=0.05)

    def find_oom(subjects, **_):
        for subject in subjects:
            is_best = json.loads(json.dumps(asdict(subject.layout))) == honest["layouts"][0]["layout"]
            yield subject, 2**40 if is_best else 2**20

    monkeypatch.setattr("dtlayout.commands.verify.find_peaks", find_oom)
    corrected = ask_with_progress(capsys, *one, "--verify", "1")
    assert [v["fits"] for v in corrected["verified"]] == [False, True]
    assert corrected["layouts"][0]["layout"] == honest["layouts"][1]["layout"]
    assert "does not fit" in refuse(capsys, *one[:-1], "1", "--verify", "1")
    monkeypatch.setattr("dtlayout.commands.verify.find_peaks", lambda subjects, **_: [(s, 2**20) for s in subjects])
    assert [v["fits"] for v in ask_with_progress(capsys, *one, "--verify", "9")["verified"]] == [True] * 3


def test_dry_runs_show_progress_and_what_differs_in_compiling_alone_is_run_once(capsys, monkeypatch):
    gpu = find_gpu("h100-80g-sxm")
    scenario = Scenario(
        model=PRESETS["llama3.2-1b"], batch=Batch(global_batch=64, seq_len=4096),
        engine=find_engine("dtlayout", gpu.name), cluster=Cluster(gpu=gpu, num_gpus=8, gpus_per_node=8),
    )  # fmt: skip
    search = Search(Space(scenario, {"pp": 1}), 1.0)
    best = search.run(top=1).ranked[0]
    compiled, eager = (replace(best, kernels=replace(best.kernels, compile=how)) for how in ("blocks", "none"))
    runs = []

    def run(subjects, **_):
        runs.extend((subject.layout, subject.rank) for subject in subjects)
        return [(subject, 2**30) for subject in subjects]

    monkeypatch.setattr("dtlayout.commands.verify.find_peaks", run)
    result = search.run(top=1)._replace(ranked=(compiled, eager))
    found = verify(search.space.scenario, result, 2)
    assert runs == [(best.layout, 0)] and len(found) == 2
    printed = capsys.readouterr().err
    assert "dry run of 1 layout as 1 rank" in printed and f"rank 0 of {best.layout} done, 1 of 1" in printed


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--verify", "-1"], "--verify=-1"),
        (["--verify", "1", "--engine", "megatron"], "--engine=megatron"),
        (["--verify", "1", "--scale", "4,8"], "--scale"),
    ],
)
def test_what_cannot_be_dry_run_is_refused(capsys, arguments, reason):
    assert reason in refuse(capsys, *DEBUG, *arguments)
