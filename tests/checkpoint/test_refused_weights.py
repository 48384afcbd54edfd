"""Weights that would be dropped or spread without a word: a head beside a tied embedding, and NaN."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import start_from_hf
from hf_models import save_made
from safetensors.torch import load_file, save_file

from dtlayout.base.errors import DtlayoutError, InvalidConfig
from dtlayout.checkpoint.first_weights import load_weights
from dtlayout.checkpoint.hf import export_weights, import_weights
from dtlayout.checkpoint.manifest import find_checkpoint
from dtlayout.cli import main
from dtlayout.models.files import find_model
from dtlayout.models.llama import Llama
from dtlayout.models.weights import check_init_from
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
WAYS_OUT = "to keep it, say tied_embeddings=false (in config.json tie_word_embeddings), or remove it from its file"


def make_one_file(folder: Path, changes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give a folder one file of its weights with these changes, all tensors of it."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    save_file(tensors | changes, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors | changes


def refuse_all(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What each way in says of a folder that it refuses with 2: convert, generate and a config's init_from."""
    said = []
    for asked in (["convert", folder, tmp_path / "run"], ["generate", folder, "--tokenizer=bytes", "--max-tokens=1"]):
        assert main([str(each) for each in asked]) == 2
        said.append(capsys.readouterr().err)
    assert not (tmp_path / "run").exists()
    return [*said, *check_init_from(str(folder), find_model(str(folder)))]


@pytest.mark.parametrize("kind", ["llama3", "qwen2"])
def test_a_head_that_differs_from_the_embedding_that_it_is_tied_to_is_not_dropped(kind, tmp_path, capsys):
    folder = save_made(kind, tmp_path / "model")
    embedding = make_one_file(folder, {})[EMBEDDING]
    for equal in (embedding.clone(), embedding.double()):
        make_one_file(folder, {HEAD: equal})
        assert check_init_from(str(folder), find_model(str(folder))) == []
    for other in (embedding + torch.eye(*embedding.shape) * 1e-3, embedding[:-1].clone()):
        make_one_file(folder, {HEAD: other})
        said = refuse_all(folder, tmp_path, capsys)
        assert len(said) == 3 and all(f"{HEAD} differs from {EMBEDDING}" in each and WAYS_OUT in each for each in said)
    make_one_file(folder, {HEAD: embedding + 1})
    untied = replace(find_model(str(folder)), tied_embeddings=False)
    assert check_init_from(str(folder), untied) == []
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert main(["convert", str(folder), str(tmp_path / "run")]) == 0
    out = tmp_path / "out"
    export_weights(find_checkpoint(tmp_path / "run"), out, number_format="float32")
    assert torch.equal(load_file(out / "model.safetensors")[HEAD], embedding + 1)


def test_to_tie_a_folder_that_is_not_is_refused(tmp_path):
    folder = save_made("llama", tmp_path / "model")
    tied = replace(find_model(str(folder)), tied_embeddings=True)
    (problem,) = check_init_from(str(folder), tied)
    assert f"{HEAD} differs from {EMBEDDING}" in problem and WAYS_OUT in problem


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_named_and_refused(value, tmp_path, capsys):
    folder = save_made("llama", tmp_path / "model")
    name = "model.layers.1.mlp.up_proj.weight"
    weight = make_one_file(folder, {})[name]
    weight[3, 5] = weight[47, 31] = value
    make_one_file(folder, {name: weight, "model.norm.weight": torch.full((32,), value)})
    for asked in (["convert", folder, tmp_path / "run"], ["generate", folder, "--tokenizer=bytes", "--max-tokens=1"]):
        assert main([str(each) for each in asked]) == 2
        said = capsys.readouterr().err
        assert f"{folder}: {name} is NaN or infinite in 2 places" in said and "model.norm.weight" in said
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_overflows_in_the_format_of_the_parameters_is_infinite_too(tmp_path):
    folder = save_made("llama", tmp_path / "model")
    norm = torch.full((32,), 1e300, dtype=torch.float64)
    make_one_file(folder, {"model.norm.weight": norm})
    model = find_model(str(folder))
    with torch.device("meta"):
        modules = [Llama(model, Kernels(), 8)]
    with pytest.raises(InvalidConfig, match=r"model.norm.weight is NaN or infinite in 32 places"):
        load_weights(folder, modules, model, 0, "cpu")
    import_weights(folder, tmp_path / "run")  # which keeps its format
    out = tmp_path / "out"
    with pytest.raises(DtlayoutError, match=r"step-00000000 in bfloat16: model.norm.weight is NaN or infinite in 32"):
        export_weights(find_checkpoint(tmp_path / "run"), out)
    assert not out.exists()


def refuse_on_rank(layout: Layout, model: object, folder: Path) -> str:
    try:
        start_from_hf([layout], model, folder)  # type: ignore[arg-type]
    except InvalidConfig as error:
        return str(error)
    return ""


def test_every_rank_refuses_what_one_has_read(ranks4, tmp_path):
    folder = save_made("llama", tmp_path / "model")
    embedding = make_one_file(folder, {})[EMBEDDING]
    embedding[259, 0] = float("nan")
    make_one_file(folder, {EMBEDDING: embedding})
    for layout in (Layout(tp=4), Layout(pp=4), Layout(dp_replicate=4)):
        said = ranks4.run(refuse_on_rank, layout, find_model(str(folder)), folder)
        assert said == [f"{folder}: {EMBEDDING} is NaN or infinite in 1 place"] * 4
