"""What the model of a config.json is called."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dtlayout.models.files import find_model, to_hf
from dtlayout.models.presets import PRESETS

SMALL = replace(PRESETS["debug"], name="small", num_layers=3)


def write(folder: Path, model=SMALL, **said: object) -> Path:
    config = to_hf(model, "bfloat16")
    del config["_name_or_path"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | said))
    return folder


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("gpt2", "gpt2"),
        ("", "tmp1"), (None, "tmp1"), (7, "tmp1"),
        ("/home/me/out", "tmp1"), ("./out", "tmp1"), ("../out", "tmp1"), ("a/b/c", "tmp1"),
        ("x\x1b[31m", "tmp1"), ("a b", "tmp1"), ("x\n", "tmp1"), ("..", "tmp1"),
    ],
)  # fmt: skip
def test_it_is_called_what_it_says_itself_if_that_is_a_name(tmp_path, said, name):
    assert find_model(str(write(tmp_path / "tmp1", _name_or_path=said))).name == name


def test_or_like_its_repository_or_the_preset_that_it_is_or_its_folder(tmp_path, monkeypatch):
    cached = write(tmp_path / "models--someone--Small-1B-it" / "snapshots" / "0f1e2d3c")
    assert find_model(str(cached)).name == "Small-1B-it"
    assert find_model(str(write(tmp_path / "models--gpt2" / "snapshots" / "1"))).name == "gpt2"
    published = write(tmp_path / "tmp2", PRESETS["qwen3-4b"])
    assert find_model(str(published / "config.json")) == PRESETS["qwen3-4b"]
    monkeypatch.chdir(write(tmp_path / "mine"))
    assert find_model("config.json").name == find_model(".").name == "mine"


def test_an_export_says_what_its_model_is_called(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_hf(SMALL, "float32")))
    assert find_model(str(tmp_path)) == SMALL


def test_a_stretched_model_is_exported_for_the_texts_that_it_is_stretched_for():
    model = PRESETS["llama3.1-8b"]
    assert model.rope_scaling is not None and model.rope_scaling.original_context == 8192
    lengths = {given: to_hf(model, "bfloat16", given)["max_position_embeddings"] for given in (None, 2048, 131_072)}
    assert lengths == {None: 65_536, 2048: 65_536, 131_072: 131_072}
