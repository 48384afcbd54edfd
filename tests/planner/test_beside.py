"""Frozen models beside the trained one: their weights on the fullest rank, and their forwards."""

import json
from pathlib import Path

import pytest
from program_jobs import job_of

from dtlayout.base.errors import InvalidLayout
from dtlayout.cli import main
from dtlayout.models.counting import count_parameters
from dtlayout.models.presets import PRESETS
from dtlayout.planner.beside import weigh_beside
from dtlayout.spec.layout import Layout

SCRIPT = str(Path(__file__).parents[1] / "programs" / "megatron" / "arrays.sh")
SMALL, LARGE = PRESETS["llama3.2-1b"], PRESETS["llama3.1-8b"]


def weigh(layout, *models, engine="torchtitan"):
    made = job_of(engine, layout)
    return made.estimate, weigh_beside(made.scenario, made.estimate, models)


@pytest.mark.parametrize(
    ("layout", "shards"),
    [
        (Layout(dp_shard=8, zero=3), 8), (Layout(dp_shard=8, zero=2), 1), (Layout(dp_shard=4, tp=2, zero=3), 8),
        (Layout(dp_shard=4, tp=2, zero=1), 2), (Layout(dp_shard=2, cp=4, zero=3), 8),
        (Layout(dp_replicate=2, dp_shard=4, zero=3), 4),
    ],
)  # fmt: skip
def test_weights_are_cut_as_those_of_the_trained_model(layout, shards):
    now, found = weigh(layout, LARGE, SMALL)
    for each, model in zip(found.models, (LARGE, SMALL), strict=True):
        assert each.name == model.name
        assert each.weight_bytes == pytest.approx(2 * count_parameters(model) / shards, rel=0.01)
        assert each.forward_s > 0
    assert found.peak_bytes == now.peak_bytes + sum(each.weight_bytes for each in found.models)
    assert found.step_time_s == now.step_time_s + sum(each.forward_s for each in found.models)
    assert found.fits == (found.peak_bytes <= now.capacity_bytes)


def test_a_forward_takes_a_third_of_what_is_computed():
    now, found = weigh(Layout(dp_shard=8, zero=3), LARGE)
    assert found.models[0].forward_s == pytest.approx(now.time.compute / 3, rel=0.2)
    assert weigh(Layout(dp_shard=8, zero=3), SMALL)[1].models[0].forward_s < found.models[0].forward_s / 3


def test_in_a_pipeline_each_rank_has_its_stages():
    _, alone = weigh(Layout(dp_shard=8, zero=1), LARGE, engine="megatron")
    _, piped = weigh(Layout(dp_shard=4, pp=2, zero=1), LARGE, engine="megatron")
    assert 0.45 < piped.models[0].weight_bytes / alone.models[0].weight_bytes < 0.6
    assert piped.models[0].forward_s == pytest.approx(alone.models[0].forward_s, rel=0.25)  # half the work, twice over


def test_a_model_that_cannot_be_cut_so_is_refused():
    with pytest.raises(InvalidLayout, match=r"qwen2\.5-0\.5b beside it: "):
        weigh(Layout(dp_shard=2, tp=4), PRESETS["qwen2.5-0.5b"])


def test_explain_takes_frozen_models(capsys):
    asked = ["explain", SCRIPT, "--gpu", "h100-80g-sxm", "--beside", "llama3.1-70b", "--beside", "llama3.1-8b"]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["beside"]
    assert [each["name"] for each in found["models"]] == ["llama3.1-70b", "llama3.1-8b"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert "frozen beside it" in text and "with them: " in text and "at least" in text
    assert main([*asked, "--beside", "nothing"]) == 2
