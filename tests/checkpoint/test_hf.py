"""Hugging Face folders: into every layout and out of it to the bit, and what is wrong with one is named before."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_ranks import ADAMW, join_starts, load_each, start_and_save, start_from_hf, step_from_hf
from hf_models import MADE, save_made
from launching import launch, read_lines
from resuming import list_scheduled
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from thorough import thorough
from tiny import SHAPE, write_tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM

from benchmarks.convert import measure
from dtlayout.base.errors import CheckpointError, InvalidConfig
from dtlayout.checkpoint import hf, sharded
from dtlayout.checkpoint.hf import export_weights, import_weights
from dtlayout.checkpoint.manifest import find_checkpoint
from dtlayout.cli import main
from dtlayout.config.loading import load_config, parse_config
from dtlayout.config.sections import DataConfig
from dtlayout.models.beside import find_ends
from dtlayout.models.files import find_model, to_hf
from dtlayout.models.llama import Llama
from dtlayout.models.stored import find_weights
from dtlayout.models.weights import check_init_from, find_other_positions, list_weights
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.optimizers import SGD, Optimizer

LAYOUTS = [
    Layout(tp=4),
    Layout(cp=2, dp_shard=2, cp_method="gather"),
    Layout(cp=2, tp=2),
    Layout(dp_shard=4, zero=3, offload="optimizer"),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(dp_replicate=2, tp=2),
    Layout(pp=2, tp=2, schedule="interleaved-1f1b", virtual_stages=2),
    Layout(pp=4),
]
LAYOUTS_OF_TIED = [*LAYOUTS, *(layout for layout in list_scheduled() if layout.num_stages <= 4)]
TOKENS = torch.arange(40)[None] * 7 % 260


@pytest.fixture(scope="module", params=MADE)
def folder(request, tmp_path_factory) -> Path:
    """A model that `transformers` made and saved, in several files."""
    return save_made(request.param, tmp_path_factory.mktemp(request.param))


def read_all(folder: Path) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor.float().numpy() for file in files for name, tensor in load_file(file).items()}


def test_every_layout_starts_from_the_bits_of_the_folder_and_reads_no_more_than_it_holds(ranks4, folder):
    model, stored = find_model(str(folder)), read_all(folder)
    assert len([*folder.glob("*.safetensors")]) > 1
    layouts = LAYOUTS_OF_TIED if model.tied_embeddings else LAYOUTS
    by_rank = ranks4.run(start_from_hf, layouts, model, folder, timeout_s=150)
    for number, layout in enumerate(layouts):
        found, num_read = join_starts(by_rank, number)
        assert found.keys() == {name for name, _ in list_weights(model)}
        for name, value in found.items():
            np.testing.assert_array_equal(value, stored[name], err_msg=f"{layout} {name}")
        is_both_ends_of_a_pipeline = model.tied_embeddings and layout.pp > 1
        assert num_read == sum(stored[name].size for name in found) + is_both_ends_of_a_pipeline * 260 * 32


def test_out_again_it_has_the_same_bits_and_transformers_computes_the_same(ranks4, folder, tmp_path):
    model = find_model(str(folder))
    ranks4.run(start_and_save, Layout(dp_shard=2, tp=2), model, folder, tmp_path / "checkpoints")
    checkpoint = tmp_path / "checkpoints" / "step-00000000"
    export_weights(checkpoint, tmp_path / "out", number_format="float32", file_bytes=60_000, max_seq_len=64)
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 1
    before, after = read_all(folder), read_all(tmp_path / "out")
    assert after.keys() == {name for name, _ in list_weights(model)}
    for name, value in after.items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    assert replace(find_model(str(tmp_path / "out")), name=model.name) == model
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours = Llama(model, Kernels(), 64)
    ours.load_state_dict({name: torch.tensor(value) for name, value in after.items()}, strict=not model.tied_embeddings)
    torch.testing.assert_close(ours(TOKENS), opened(TOKENS).logits, rtol=1e-4, atol=1e-5)


def test_back_again_they_are_the_same_files_to_the_bit(ranks4, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sharded, "_PIECE_BYTES", 5000)  # 39 rows of an embedding of 260
    ranks4.run(start_and_save, Layout(dp_shard=2, tp=2), find_model(str(folder)), folder, tmp_path / "own")
    source, exported = tmp_path / "own" / "step-00000000", []
    for trip in ("first", "second"):
        out = tmp_path / trip
        export_weights(source, out, number_format="float32", file_bytes=60_000)
        exported.append({file.name: file.read_bytes() for file in out.iterdir()})
        import_weights(out, tmp_path / f"{trip}-run")
        source = find_checkpoint(tmp_path / f"{trip}-run")
    assert exported[0] == exported[1] and len(exported[0]) > 3
    assert len([*(source / "tensors").glob("*.distcp")]) > len(find_weights(tmp_path / "first"))


@pytest.mark.parametrize("settings", [ADAMW, thorough(SGD())], ids=["adamw", "sgd"])
@pytest.mark.parametrize("folder", ["llama3"], indirect=True)
def test_a_run_goes_from_such_a_checkpoint_as_from_the_folder_itself(ranks4, folder, tmp_path, settings: Optimizer):
    model = find_model(str(folder))
    in_bf16 = tmp_path / "bf16"
    ranks4.run(start_and_save, Layout(tp=4), model, folder, tmp_path / "own")
    export_weights(tmp_path / "own" / "step-00000000", in_bf16)
    import_weights(in_bf16, tmp_path / "run")
    checkpoint = find_checkpoint(tmp_path / "run")
    layouts = LAYOUTS_OF_TIED
    loaded = ranks4.run(load_each, layouts, model, checkpoint, settings, timeout_s=150)
    started = ranks4.run(step_from_hf, layouts, model, in_bf16, settings, timeout_s=150)
    for of_rank, expected in zip(loaded, started, strict=True):
        for layout, (step, before, after), state in zip(layouts, of_rank, expected, strict=True):
            assert step == 0 and {name.partition(" ")[0] for name in before} == {"parameter"}
            assert after.keys() == state.keys()
            for name, value in state.items():
                np.testing.assert_array_equal(after[name], value, err_msg=f"{layout} {name}")


def test_a_folder_that_cannot_be_a_checkpoint_leaves_nothing(damaged, tmp_path, monkeypatch, capsys):
    run = tmp_path / "runs" / "mine"
    assert main(["convert", str(damaged), str(run), "--format", "float32"]) == 2
    assert "--format is for the way to a Hugging Face folder" in capsys.readouterr().err

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sharded.dcp, "save", fail)
        with pytest.raises(
            CheckpointError, match=r"step-00000000 cannot be written: OSError .*No space left on device"
        ):
            import_weights(damaged, run)
    tensors = load_file(damaged / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.zeros(7)}, damaged / "model.safetensors")
    with pytest.raises(InvalidConfig, match=r"model.norm.weight has the shape \[7\], where the model's is \[32\]"):
        import_weights(damaged, run)
    assert not run.exists() and not [*run.parent.glob("*")]


def test_memory_is_that_of_a_piece_and_of_a_file_and_not_of_the_model(tmp_path):
    model = replace(SHAPE, hidden_size=512, ffn_size=2048, num_layers=32, vocab_size=16_000)
    file_bytes, piece_bytes = 16 << 20, 4 << 20  # the embedding is one file
    into_checkpoint, out = measure(model, tmp_path, file_bytes, piece_bytes)
    assert into_checkpoint["num_bytes"] == out["num_bytes"] > 290e6
    assert into_checkpoint["peak_bytes"] - into_checkpoint["base_bytes"] < 100e6
    assert out["peak_bytes"] - out["base_bytes"] < 150e6


def test_bf16_is_rounded_once(ranks4, tmp_path, folder):
    model = find_model(str(folder))
    ranks4.run(start_and_save, Layout(tp=4), model, folder, tmp_path / "checkpoints")
    export_weights(tmp_path / "checkpoints" / "step-00000000", tmp_path / "out")
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, torch.tensor(read_all(folder)[name]).bfloat16()), name


@pytest.fixture
def damaged(tmp_path) -> Path:
    """A folder with one file, for tests to spoil."""
    make, config = MADE["llama"]
    make(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def problems_of(folder: Path) -> list[str]:
    return check_init_from(str(folder), find_model(str(folder)))


def test_what_is_wrong_with_a_folder_is_named_before_anything_is_allocated(damaged):
    assert problems_of(damaged) == []
    tensors = load_file(damaged / "model.safetensors")
    query = "model.layers.2.self_attn.q_proj.weight"
    spoilt = tensors | {query: tensors[query][:16].clone(), "model.extra": torch.zeros(2)}
    spoilt["model.norm.weight"] = torch.zeros(32, dtype=torch.int8)
    spoilt["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # of older versions
    del spoilt["lm_head.weight"]
    save_file(spoilt, damaged / "model.safetensors")
    where = f"train.init_from={str(damaged)!r}: "
    assert problems_of(damaged) == [
        f"{where}lm_head.weight is missing",
        f"{where}model.extra is in none of the model's modules",
        f"{where}{query} has the shape [16, 32], where the model's is [32, 32]",
        f"{where}model.norm.weight has the format I8; weights must be of float64, float32, float16, bfloat16",
    ]
    larger = replace(find_model(str(damaged)), num_layers=9)
    assert check_init_from(str(damaged), larger)[-1] == f"{where}and 44 more"


def test_sizes_that_no_shape_tells_must_be_the_folders(damaged):
    other = replace(find_model(str(damaged)), num_heads=8, num_kv_heads=8, rope_theta=5e5)
    assert [problem.partition(": ")[2] for problem in check_init_from(str(damaged), other)] == [
        "its config.json has num_heads=4, the model num_heads=8",
        "its config.json has num_kv_heads=4, the model num_kv_heads=8",
    ]
    assert find_other_positions(str(damaged), other) == [f"rope_theta is 500000.0, that of {damaged} 10000.0"]


def test_a_failed_export_leaves_what_was_there_and_nothing_else(ranks4, damaged, tmp_path, monkeypatch):
    model = find_model(str(damaged))
    ranks4.run(start_and_save, Layout(tp=4), model, damaged, tmp_path / "checkpoints")
    checkpoint, out = tmp_path / "checkpoints" / "step-00000000", tmp_path / "exports" / "out"
    tokenizer = tmp_path / "other.json"
    made = Tokenizer(WordLevel({"word": 0, "</s>": 7}, unk_token="word"))
    made.add_special_tokens(["</s>"])
    made.save(str(tokenizer))
    export_weights(checkpoint, out, data=DataConfig(tokenizer=str(tokenizer)))
    assert (out / "tokenizer.json").read_text() == tokenizer.read_text()
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 7
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')  # as beside a chat model's
    export_weights(checkpoint, tmp_path / "chat", data=DataConfig(tokenizer=str(tokenizer)))
    assert find_ends(tmp_path / "chat") == [7, 0]
    before = sorted(path.name for path in out.iterdir())

    def fail(*_: object, **__: object) -> None:
        raise SafetensorError("no space left on device")

    monkeypatch.setattr(hf, "save_file", fail)
    with pytest.raises(CheckpointError, match=r"cannot be written to .* no space left on device"):
        export_weights(checkpoint, out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert sorted(path.name for path in out.iterdir()) == before


def test_what_no_config_json_says_is_not_exported():
    with pytest.raises(InvalidConfig, match=r"has what no config.json of model_type='llama' says"):
        to_hf(replace(SHAPE, qkv_bias=True), "float32")


def test_files_that_are_not_there_or_no_safetensors_are_named(damaged):
    (damaged / "model.safetensors").write_bytes(b"no header")
    assert "model.safetensors cannot be read" in problems_of(damaged)[0]
    (damaged / "model.safetensors").rename(damaged / "pytorch_model.bin")
    assert "has no model.safetensors; save its weights as safetensors" in problems_of(damaged)[0]
    (damaged / "model.safetensors.index.json").write_text("[]")
    assert "model.safetensors.index.json cannot be read" in problems_of(damaged)[0]
    assert "is no folder" in check_init_from("nowhere", SHAPE)[0]


def test_a_folder_gives_a_config_its_sizes(damaged, monkeypatch):
    tables = {
        "batch": {"global_batch": 2, "seq_len": 16}, "train": {"steps": 1, "init_from": str(damaged)},
        "precision": {"compute": "float32"},
    }  # fmt: skip
    assert parse_config(tables).model == find_model(str(damaged))
    longer = parse_config({**tables, "model": {"name": str(damaged), "rope_theta": 5e5}}).model
    assert (longer.name, longer.hidden_size, longer.rope_theta) == ("model", 32, 5e5)
    for nowhere in ("nowhere", "~nobody", "~nobody/model"):
        with pytest.raises(InvalidConfig, match="is no preset and no Hugging Face folder"):
            parse_config({**tables, "model": {"name": nowhere}})
    monkeypatch.setenv("HOME", str(damaged.parent))
    at_home = {"steps": 1, "init_from": "~/model"}
    assert parse_config({**tables, "train": at_home}).model == find_model(str(damaged))
    assert check_init_from("~/model", find_model(str(damaged))) == []


def test_a_run_starts_from_a_folder_and_leaves_one(damaged, tmp_path, capsys):
    files, log = write_tiny(tmp_path, steps=2), tmp_path / "log"
    as_made = "--model.norm_eps=1e-6"
    overrides = (f"--train.init_from={damaged}", as_made, "--layout.tp=2", "--checkpoint.export=true")
    assert launch(2, files.config, *overrides, log=log) == 0, log.read_text()
    with torch.no_grad():
        opened = AutoModelForCausalLM.from_pretrained(files.run / "hf", dtype=torch.float32)
        assert opened(TOKENS).logits.isfinite().all()
    first_loss = read_lines(files.run)[0]["loss"]
    assert main(["convert", str(files.run), str(tmp_path / "out"), "--format", "float32", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["files"] == ["config.json", "generation_config.json", "model.safetensors"]
    assert read_all(tmp_path / "out").keys() == find_weights(damaged).keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["max_position_embeddings"], config["eos_token_id"]) == (64, 256)

    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "more")]) == 0
    assert f"start with train.run_folder={tmp_path / 'more'}" in capsys.readouterr().out
    again = (as_made, f"--train.run_folder={tmp_path / 'more'}", "--train.steps=1")
    assert launch(1, files.config, *again, log=log) == 0, log.read_text()
    assert read_lines(tmp_path / "more")[0]["loss"] < first_loss and "after 0 steps" in log.read_text()

    assert main(["convert", str(files.run), str(tmp_path / "out")]) != 0
    assert "is there already" in capsys.readouterr().err
    assert main(["convert", str(tmp_path), str(tmp_path / "new")]) != 0
    assert "is no checkpoint and no run folder with one" in capsys.readouterr().err
    (damaged / "model.safetensors").unlink()
    missing = (f"--train.init_from={damaged}", f"--train.run_folder={tmp_path / 'new'}")
    assert launch(1, files.config, *missing, log=log) == 2
    assert "has no model.safetensors" in log.read_text()
    assert load_config(files.run / "config.toml").train.init_from == str(damaged)
