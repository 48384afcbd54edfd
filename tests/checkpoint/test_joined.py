"""Folders whose tensors hold several of our weights, or lie transposed, come back as they were."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import make_config
from transformers import AutoModelForCausalLM

from dtlayout.base.checkpoint_names import list_checkpoints
from dtlayout.base.errors import InvalidConfig
from dtlayout.checkpoint.hf import export_weights, import_weights
from dtlayout.checkpoint.quantized_export import check_quantized
from dtlayout.checkpoint.sharded import read_model
from dtlayout.models.weights import list_weights


@pytest.fixture(params=["gpt2", "phi3"])
def folder(request, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = make_config(request.param)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "theirs")
    table = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert table["model_type"] == request.param
    return tmp_path / "theirs"


def test_a_folder_goes_into_a_checkpoint_and_out_again(folder, tmp_path):
    import_weights(folder, tmp_path / "run")
    (checkpoint,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    model = read_model(checkpoint)
    assert any(name.endswith(("c_attn.1.weight", "qkv_proj.1.weight")) for name, _ in list_weights(model))
    export_weights(checkpoint, tmp_path / "ours", number_format="float32", base=folder)
    theirs, ours = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "ours"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    with pytest.raises(InvalidConfig, match="is several of our weights, or a transposed one; leave --quantize out"):
        check_quantized(model, "int8")


def test_a_value_that_is_no_number_and_a_wrong_shape_are_named_by_the_tensor(folder, tmp_path):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "c_attn.weight" in name or "qkv_proj.weight" in name)
    spoiled = tensors[name].clone()
    spoiled[3, 5] = float("nan")
    save_file(tensors | {name: spoiled}, file, metadata={"format": "pt"})
    with pytest.raises(InvalidConfig, match=f"{name} is NaN or infinite in 1 place"):
        import_weights(folder, tmp_path / "run")
    save_file(tensors | {name: tensors[name][:-1].clone()}, file, metadata={"format": "pt"})
    with pytest.raises(InvalidConfig, match=f"{name} has the shape"):
        import_weights(folder, tmp_path / "run")
