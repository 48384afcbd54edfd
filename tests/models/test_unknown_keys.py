"""What a config.json with a key of unknown effect is answered: the key, and that its code can be traced."""

import json

import pytest

from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.models.families import FAMILIES
from dtlayout.models.family import Family
from dtlayout.models.files import find_model
from dtlayout.models.traced import read_trace

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
BIASED = {**LLAMA, "attention_bias": True}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BIASED))
    return tmp_path


def test_recommend_says_how_a_described_family_with_an_unknown_key_is_had(folder, capsys):
    options = ["--gpu", "h100-80g-sxm", "--gpus", "2", "--seq-len", "128", "--global-batch", "8"]
    assert main(["recommend", "--model", str(folder), *options]) == 2
    first, second = capsys.readouterr().err.strip().splitlines()
    assert "attention_bias=true is not known" in first
    assert second.endswith(
        f"dtlayout trace {folder / 'config.json'} --output model.json reads off the code of transformers what it "
        f"computes; use --model model.json then"
    )
    assert main(["trace", str(folder), "--output", str(folder / "model.json")]) == 0
    assert main(["recommend", "--model", str(folder / "model.json"), *options]) == 0
    block = read_trace(str(folder / "model.json")).kinds[0].block
    assert any(weight.name == "self_attn.q_proj.bias" for each in block for weight in each.weights)


@pytest.mark.parametrize("other", [{"hidden_size": None}, {"model_type": None, "architectures": ["LlamaForCausalLM"]}])
def test_a_file_that_cannot_be_traced_either_has_no_such_line(folder, other):
    (folder / "config.json").write_text(json.dumps({**BIASED, **other}))
    with pytest.raises(InvalidConfig, match="attention_bias=true is not known") as caught:
        find_model(str(folder))
    assert "dtlayout trace" not in str(caught.value)


def test_a_family_that_a_user_registered_has_no_such_line(folder, monkeypatch):
    monkeypatch.setitem(FAMILIES, "mine", Family(name="mine"))
    (folder / "config.json").write_text(json.dumps({**BIASED, "model_type": "mine", "intermediate_size": 96}))
    with pytest.raises(InvalidConfig, match="attention_bias=true is not known") as caught:
        find_model(str(folder))
    assert "dtlayout trace" not in str(caught.value)
