"""Runs with an adapter: what they save, what they go on from, and what comes out of them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from codes import needs_codes
from hf_models import OF_BLOCKS, save_made
from launching import read_lines
from safetensors.torch import load_file, save_file
from tiny import TinyFiles, write_tiny
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dtlayout.checkpoint.manifest import find_checkpoint, read_manifest
from dtlayout.checkpoint.reader import Reader
from dtlayout.cli import main
from dtlayout.config.loading import load_config
from dtlayout.launch import main as train
from dtlayout.models.counting import count_parameters
from dtlayout.models.files import find_model
from dtlayout.spec.adapter import Adapter

pytestmark = pytest.mark.usefixtures("no_torchrun")
LORA = """
[adapter]
rank = 1
targets = ["q_proj", "v_proj"]
"""


def write(folder: Path, adapter: str = LORA) -> TinyFiles:
    """The smallest config, of four steps, of a model that a folder has."""
    files = write_tiny(folder, steps=4)
    text = files.config.read_text()
    files.config.write_text(adapter + text[text.index("[batch]") :])
    return files


@pytest.fixture
def base(tmp_path) -> Path:
    return save_made("llama", tmp_path / "base")


def read_tensors(run: Path) -> dict[str, Tensor]:
    """The adapter of a run's newest checkpoint."""
    assert main(["convert", str(run), str(run / "read")]) == 0
    tensors = load_file(run / "read" / "adapter_model.safetensors")
    shutil.rmtree(run / "read")
    return tensors


def start(files: TinyFiles, base: Path, run: Path, *overrides: str) -> int:
    said = f"--train.init_from={base}", f"--train.run_folder={run}", "--optimizer.decay_steps=4"
    return train_here([str(files.config), *said, *overrides])


def train_here(arguments: list[str]) -> int:
    """Exit code of a run in this process, which a refusal does not leave joined to itself."""
    code: int = train(arguments)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


@pytest.mark.parametrize("stored", ["compute", pytest.param("nf4", marks=needs_codes)])
def test_a_resumed_run_ends_with_the_same_bits_and_saves_what_trains_alone(tmp_path, stored):
    files, said, base = write(tmp_path), f"--precision.base={stored}", tmp_path / "base"
    LlamaForCausalLM(LlamaConfig(**OF_BLOCKS)).save_pretrained(base)
    assert start(files, base, tmp_path / "whole", said) == 0
    assert start(files, base, tmp_path / "parts", said, "--train.steps=2") == 0
    assert start(files, base, tmp_path / "parts", said) == 0
    losses = [[line["loss"] for line in read_lines(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    whole, parts = (read_tensors(tmp_path / name) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    assert all(tensor.any() for tensor in whole.values())

    model = load_config(tmp_path / "whole" / "config.toml").model
    saved = Reader(find_checkpoint(tmp_path / "whole") / "tensors").read_metadata().state_dict_metadata
    kinds = {name.partition(".")[0] for name in saved}
    assert kinds == {"parameters", "exp_avg", "exp_avg_sq"} and all("lora_" in name for name in saved)
    manifest = read_manifest(find_checkpoint(tmp_path / "whole"))
    assert manifest is not None and manifest["base"]["folder"] == str(base)
    num_saved = sum(tensor.size.numel() for tensor in saved.values())
    assert num_saved == 3 * (count_parameters(model) - count_parameters(model.base))


def test_a_checkpoint_is_below_a_hundredth_of_its_frozen_model(tmp_path):
    files = write_tiny(tmp_path, steps=1)
    files.config.write_text(files.config.read_text() + LORA)
    assert train_here([str(files.config), "--model.hidden_size=256", "--model.vocab_size=16000"]) == 0
    checkpoint = find_checkpoint(files.run)
    num_bytes = sum(file.stat().st_size for file in (checkpoint / "tensors").iterdir())
    assert num_bytes < 0.01 * 4 * count_parameters(load_config(files.run / "config.toml").model.base)


def test_another_frozen_model_is_refused_with_both_named(tmp_path, base, capfd):
    files, run = write(tmp_path), tmp_path / "run"
    assert start(files, base, run, "--train.steps=1") == 0
    moved = Path(shutil.copytree(base, tmp_path / "moved"))
    assert start(files, moved, run, "--train.steps=2") == 0
    for file in moved.glob("*.safetensors"):
        save_file({name: t + 1 for name, t in load_file(file).items()}, file, metadata={"format": "pt"})
    capfd.readouterr()
    assert start(files, moved, run) == 2
    said = capfd.readouterr().err
    assert f"holds an adapter of {tmp_path / 'moved'} (fingerprint " in said
    assert f"frozen model is another one, {moved} (fingerprint " in said
    assert main(["convert", str(run), str(tmp_path / "out"), "--merge"]) == 2
    assert "is another one; give the first" in capfd.readouterr().err
    shutil.rmtree(moved)
    assert start(files, moved, run) == 2
    assert f"{str(moved)!r} is no folder; give a Hugging Face or PEFT folder" in capfd.readouterr().err
    assert main(["generate", str(run), "--prompt", "1", "--tokenizer", "bytes"]) == 2
    assert f"which is not at {moved}: " in capfd.readouterr().err
    assert main(["generate", str(run), "--prompt", "1", "--tokenizer", "bytes", "--base", str(base)]) == 0
    assert train_here([str(files.config), "--train.seed=3", f"--model={base}", f"--train.run_folder={run}"]) == 2
    assert "this run's frozen model is another one, weights drawn from train.seed=3" in capfd.readouterr().err


def test_an_adapter_of_drawn_weights_goes_on_and_is_merged(tmp_path, base, capfd):
    files = write(tmp_path, '[adapter]\nmethod = "ia3"\n')
    drawn = [str(files.config), f"--model={base}", "--optimizer.decay_steps=4", "--checkpoint.export=true"]
    assert train_here([*drawn, "--train.steps=2"]) == 0 and train_here(drawn) == 0
    assert json.loads((files.run / "hf" / "adapter_config.json").read_text())["base_model_name_or_path"] is None
    texts = [text_of(capfd, files.run)]
    assert main(["convert", str(files.run), str(tmp_path / "out"), "--merge", "--format", "float32"]) == 0
    assert texts == [text_of(capfd, tmp_path / "out")]
    spoil = find_checkpoint(files.run) / "state.json"
    state = json.loads(spoil.read_text())
    del state["origin"]["base"]
    spoil.write_text(json.dumps(state))
    assert main(["convert", str(files.run), str(tmp_path / "more"), "--merge"]) == 2
    assert "holds an adapter and does not say of which frozen model" in capfd.readouterr().err


def text_of(capfd: pytest.CaptureFixture[str], source: Path, *options: str) -> str:
    """The likeliest text of a model."""
    capfd.readouterr()
    asked = ["generate", str(source), "--prompt", "3 times", "--tokenizer", "bytes", "--temperature", "0", "--json"]
    assert main([*asked, "--max-tokens", "8", *options]) == 0
    text: str = json.loads(capfd.readouterr().out)["text"]
    return text


def test_an_adapter_comes_out_goes_on_and_is_merged(tmp_path, base, capfd):
    files = write(tmp_path)
    assert start(files, base, tmp_path / "run", "--checkpoint.export=true", "--optimizer.lr=0.1") == 0
    run, adapter = tmp_path / "run", tmp_path / "run" / "hf"
    assert {file.name for file in adapter.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (adapter / "config.json").exists()
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["target_modules"]) == (str(base), ["q_proj", "v_proj"])
    assert main(["convert", str(run), str(tmp_path / "merged"), "--merge", "--format", "float32"]) == 0
    assert main(["convert", str(adapter), str(tmp_path / "again"), "--merge", "--format", "float32"]) == 0
    texts = {text_of(capfd, source) for source in (run, adapter, tmp_path / "merged", tmp_path / "again")}
    assert len(texts) == 1 and texts != {text_of(capfd, base)}

    further = write(tmp_path, "")
    assert start(further, adapter, tmp_path / "further", "--train.steps=1") == 0
    found = load_config(tmp_path / "further" / "config.toml")
    assert found.model.adapter == Adapter(rank=1, targets=("q_proj", "v_proj"))
    assert found.model.base == find_model(str(base))
    before, after = (read_lines(each)[0]["loss"] for each in (run, tmp_path / "further"))
    assert after < before


def refused(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The line with which a conversion is refused."""
    assert main(["convert", *map(str, arguments)]) == 2
    return capfd.readouterr().err


def test_options_that_do_not_fit_are_refused(tmp_path, base, capfd):
    files = write(tmp_path)
    assert start(files, base, tmp_path / "run", "--train.steps=1", "--checkpoint.export=true") == 0
    run, out = tmp_path / "run", tmp_path / "out"
    assert "--base is for --merge, and the adapter alone" in refused(capfd, run, out, "--base", base)
    assert "--merge is for a run with an adapter, and" in refused(capfd, base, out, "--merge")
    assert "is an adapter: train it further with train.init_from" in refused(capfd, run / "hf", out)
    assert "--base is for a run; a PEFT folder names" in refused(capfd, run / "hf", out, "--merge", "--base", base)
    assert main(["convert", str(base), str(tmp_path / "full")]) == 0
    assert "has none" in refused(capfd, tmp_path / "full", out, "--merge")
    assert start(write(tmp_path), base, tmp_path / "full", "--train.steps=1") == 2
    assert "holds a whole model and no adapter; make it a folder" in capfd.readouterr().err
