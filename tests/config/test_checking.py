"""Checking: the trainer asks its engine's file, and everything that is wrong with a config comes at once."""

from dataclasses import replace

import pytest

from dtlayout.base.errors import InvalidLayout
from dtlayout.config.checking import check_layout
from dtlayout.config.config import Config
from dtlayout.config.loading import parse_config
from dtlayout.costmodel import engine

EXPERTS = {"number": 4, "per_token": 2, "ffn_size": 16}


def config_with(model: dict[str, object], **sections: dict[str, object]) -> Config:
    batch, train = {"global_batch": 8, "seq_len": 16}, {"steps": 3}
    return parse_config({"model": {"name": "debug", **model}, "batch": batch, "train": train, **sections})


def problems_of(config: Config) -> list[str]:
    with pytest.raises(InvalidLayout) as caught:
        check_layout(config, 1)
    return caught.value.problems


def test_a_capability_of_the_trainer_is_a_row_of_its_engines_file(monkeypatch):
    rows = {
        "model.window=8 can be predicted, not trained; use window=0": config_with({"window": 8}),
        "model.gated_ffn=false can be predicted, not trained; use gated_ffn=true": config_with({"gated_ffn": False}),
        "precision.matmuls=mxfp8 can be predicted, not trained; use precision.matmuls=compute": config_with(
            {}, precision={"matmuls": "mxfp8"}
        ),
        "model.experts.bias=true can be predicted, not trained; use experts.bias=false": config_with(
            {"experts": EXPERTS | {"bias": True}}
        ),
    }
    for problem, config in rows.items():
        assert problems_of(config) == [problem]
    tables = engine._read_engines()[engine.OWN_ENGINE]
    features = tables["features"]
    gained = replace(features, matmuls=("mxfp8",), untrained=())
    monkeypatch.setitem(tables, "features", gained)
    for config in rows.values():
        assert check_layout(config, 1).world_size == 1


def test_what_has_no_effect_is_not_refused():
    assert check_layout(config_with({}, layout={"ep_overlap": True, "ep_dispatcher": "deepep"}), 1).ep_overlap


def test_problems_of_every_owner_come_at_once():
    config = config_with(
        {"window": 8}, layout={"tp": 3}, kernels={"attention": "flash1"}, optimizer={"warmup_steps": 4},
        checkpoint={"save": False, "export": True}, precision={"matmuls": "mxfp8"}, spikes={"action": "save"},
    )  # fmt: skip
    starts = (
        "world size 1", "tp=3 does not divide num_heads", "checkpoint.export=true", 'spikes.action="save"',
        "optimizer.warmup_steps=4", "precision.matmuls=mxfp8", "model.window=8", "kernels.attention=flash1",
    )  # fmt: skip
    found = problems_of(config)
    places = [next(i for i, problem in enumerate(found) if problem.startswith(start)) for start in starts]
    assert places == sorted(places)
