"""A new run from another run, from a step of one, or from a repository in the hub's cache."""

import json
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from hf_models import save_made
from launching import read_lines
from tiny import TinyFiles, write_tiny

from dtlayout.base.checkpoint_names import list_checkpoints
from dtlayout.cli import main
from dtlayout.config.loading import load_config
from dtlayout.launch import main as train

pytestmark = pytest.mark.usefixtures("no_torchrun")
LORA = '\n[adapter]\nrank = 2\ntargets = ["q_proj", "v_proj"]\n'


def start(*arguments: str | Path) -> int:
    """Exit code of a run in this process, which a refusal does not leave joined to itself."""
    code: int = train([*map(str, arguments)])
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


@pytest.fixture
def files(tmp_path) -> TinyFiles:
    """A run of two steps with a checkpoint of each, whose validation loss is known."""
    files = write_tiny(tmp_path, num_layers=1, tied=True)
    (tmp_path / "other.txt").write_text("1 plus 1 is 2. " * 40)
    held_out = f'\n[validation]\nsource = "{tmp_path}/other.txt"\nevery = 1\nbatches = 1\nat_start = true\n'
    files.config.write_text(files.config.read_text() + held_out)
    assert start(files.config, "--checkpoint.every=1", "--checkpoint.keep=5") == 0
    return files


def write_next(files: TinyFiles, extra: str = "") -> Path:
    """The config without a model: it comes from the run."""
    text = files.config.read_text()
    path = files.config.with_name("next.toml")
    path.write_text(extra + text[text.index("[batch]") :])
    return path


def test_a_run_starts_with_the_weights_of_another_ones_newest_whole_step_or_of_the_one_that_is_named(files, capsys):
    config, losses = write_next(files), [line["validation_loss"] for line in read_lines(files.run)]
    first, newest = list_checkpoints(files.run / "checkpoints")
    sources = {files.run: losses[-1], first: losses[1], newest: losses[-1]}
    for number, (source, loss) in enumerate(sources.items()):
        run = files.run.with_name(f"next-{number}")
        assert start(config, f"--train.init_from={source}", f"--train.run_folder={run}", "--train.steps=1") == 0
        begin = read_lines(run)[0]
        assert (begin["step"], begin["validation_loss"]) == (0, pytest.approx(loss, rel=1e-6))
        assert load_config(run / "config.toml").model.num_layers == 1
    said = capsys.readouterr().out
    assert said.count(f"weights of {newest}, without its optimizer") == 2
    assert said.count(f"weights of {first}, without its optimizer") == 1 and "resumed" not in said
    tensors = next((newest / "tensors").glob("*.distcp"))
    tensors.write_bytes(tensors.read_bytes()[:-1])
    again = [config, f"--train.run_folder={files.run}-again", "--train.steps=1"]
    assert start(*again, f"--train.init_from={newest}") == 2
    assert f"train.init_from='{newest}' is damaged: tensors/" in capsys.readouterr().err
    assert start(*again, f"--train.init_from={files.run}") == 0  # the one before is whole
    assert f"weights of {first}, without its optimizer" in capsys.readouterr().out
    assert start(*again, f"--train.init_from={first}", "--train.steps=2") == 0
    counted = (
        f"note: train.init_from was {files.run} when {again[1].partition('=')[2]}/checkpoints/step-00000001 was saved"
    )
    assert f"{counted} and is {first}, which is not read: the run goes on" in (said := capsys.readouterr().out), said
    assert main(["check", str(config), *again[1:], f"--train.init_from={files.run}", "--world", "1"]) == 0
    assert f"note: train.init_from was {first} when " in capsys.readouterr().out
    # And it goes on by itself then, also where the first run is gone.
    shutil.rmtree(files.run)
    assert start(config, f"--train.run_folder={files.run}-again", "--train.steps=3", "--model.name=tiny",
                 *_sizes(again[1].partition("=")[2])) == 0  # fmt: skip


def _sizes(run: str) -> list[str]:
    """The model of a run as overrides."""
    model = load_config(Path(run) / "config.toml").model
    names = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_size", "vocab_size")
    return [*(f"--model.{name}={getattr(model, name)}" for name in names), "--model.tied_embeddings=true"]


def test_a_run_with_an_adapter_is_trained_further_beside_its_frozen_model(files, tmp_path, capsys):
    base = save_made("llama", tmp_path / "base")
    config, first = write_next(files, LORA), tmp_path / "first"
    assert start(config, f"--train.init_from={base}", f"--train.run_folder={first}") == 0
    plain = write_next(files)  # without [adapter]: the run has it
    assert start(plain, f"--train.init_from={first}", f"--train.run_folder={tmp_path / 'second'}") == 0
    before, after = read_lines(first), read_lines(tmp_path / "second")
    assert after[0]["validation_loss"] == pytest.approx(before[-1]["validation_loss"], rel=1e-6)
    assert after[-1]["validation_loss"] < before[-1]["validation_loss"]
    assert load_config(tmp_path / "second" / "config.toml").model.adapter.rank == 2
    assert (
        start(plain, f"--train.init_from={first}", f"--train.run_folder={tmp_path / 'second'}", "--train.steps=3") == 0
    )
    assert "resumed from" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "second"), str(tmp_path / "peft")]) == 0
    written = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(base)
    other = [plain, f"--train.init_from={first}", f"--train.run_folder={tmp_path / 'third'}"]
    assert start(*other, "--adapter.rank=4", '--adapter.targets=["q_proj", "v_proj"]') == 2
    assert "holds another model: adapter=" in capsys.readouterr().err
    assert start(write_next(files, LORA), f"--train.init_from={files.run}", f"--train.run_folder={tmp_path / 'x'}") == 2
    assert f"an adapter lies beside a folder: dtlayout convert {files.run} FOLDER writes" in capsys.readouterr().err
    shutil.rmtree(base)
    assert start(*other) == 2
    assert f"is an adapter whose frozen model is not here: it was {base}" in capsys.readouterr().err


def test_another_model_than_the_runs_is_refused_with_both(files, capsys):
    command = [files.config, f"--train.init_from={files.run}", f"--train.run_folder={files.run}-other"]
    assert start(*command, "--model.hidden_size=64") == 2
    assert "holds another model: hidden_size=32 (config: 64)" in capsys.readouterr().err


def test_a_repository_in_the_cache_is_the_folder_of_its_snapshot(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    config = write_next(files)
    command = [config, "--train.init_from=someone/small", f"--train.run_folder={tmp_path / 'cached'}"]
    assert start(*command) == 2
    said = capsys.readouterr().err
    assert f"the hub's cache, {tmp_path / 'hub'}, has neither its config.json nor" in said
    assert "hf download someone/small fetches it" in said
    snapshot = save_made("llama", tmp_path / "hub" / "models--someone--small" / "snapshots" / "abc")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    assert start(*command) == 0
    assert load_config(tmp_path / "cached" / "config.toml").model.name == "small"
    assert "weights of someone/small" in capsys.readouterr().out
    shutil.copytree(snapshot, tmp_path / "someone" / "small")  # a folder goes before the cache
    for file in (tmp_path / "someone" / "small").glob("*.safetensors*"):
        file.unlink()
    assert start(*command[:2], f"--train.run_folder={tmp_path / 'here'}") == 2
    assert "someone/small has no model.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("nowhere", "is no folder; give a Hugging Face or PEFT folder, a run folder, a step of one (RUN/checkpoints/"),
        ("empty", "has no config.json, no adapter_config.json and no checkpoints/step-*; give a Hugging Face or PEFT"),
        ("a/b/c", "or owner/name of a repository in the hub's cache"),
    ],
)
def test_what_was_looked_for_is_said(tmp_path, monkeypatch, capsys, source, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    files = write_tiny(tmp_path)
    for config in (files.config, write_next(files)):
        assert start(config, f"--train.init_from={source}") == 2
        assert why in capsys.readouterr().err
