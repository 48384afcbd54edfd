"""A model family from outside whose block is no Llama's: one file that describes it, and one of torch."""

import json

import pytest
import torch
from plugged import ask_programs, count_files, plugged_in

from dtlayout.models.description import BLOCKS
from dtlayout.models.families import describe
from dtlayout.models.presets import find_preset
from dtlayout.spec.kernels import Kernels

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 48, "vocab_size": 260}  # fmt: skip


@pytest.fixture(autouse=True)
def registered():
    with plugged_in("internlm") as plugin:
        yield plugin


def test_it_takes_two_files():
    assert count_files("internlm") == 2


def test_its_description_has_the_parameters_of_its_modules():
    from extending.plugins.internlm_torch import InternLM

    shape = find_preset("internlm-7b")
    with torch.device("meta"):
        model = InternLM(shape, Kernels(), 8, layers=[0])
    blocks = BLOCKS.replace("*", "0.")
    built = {name: tuple(p.shape) for name, p in model.named_parameters() if name.startswith(blocks)}
    assert built == {f"{blocks}{weight.name}": weight.shape for weight in describe(shape).block_weights}
    assert built["model.layers.0.self_attn.o_proj.bias"] == (4096,)


def test_four_programs_know_it(tmp_path, capsys):
    config_json = tmp_path / "config.json"
    config_json.write_text(json.dumps({"model_type": "internlm", **SIZES}))
    answers = ask_programs(capsys, tmp_path, model=config_json)
    assert 'family = "internlm"' in answers.config.read_text() and answers.check["ok"]
    (rank,) = answers.dryrun["ranks"]
    for compared in rank["compared_bytes"].values():
        assert compared["dry"] == pytest.approx(compared["predicted"], rel=0.01)
