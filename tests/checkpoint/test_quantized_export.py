"""Quantized exports: `transformers` opens them, with the logits of the weights that were quantized and dequantized."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
import torch.distributed as dist
from hf_models import SIZES, open_made, save_made
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import TinyFiles, write_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from dtlayout.base.errors import InvalidConfig
from dtlayout.checkpoint import quantized_export
from dtlayout.checkpoint.export_quantizers import EXPORT_QUANTIZERS
from dtlayout.checkpoint.hf import import_weights, open_checkpoint
from dtlayout.checkpoint.manifest import find_checkpoint
from dtlayout.checkpoint.quantized_export import export_quantized
from dtlayout.cli import main
from dtlayout.launch import main as train
from dtlayout.ops.quantized import QUANTIZERS
from dtlayout.spec.export_format import EXPORT_FORMATS
from dtlayout.training import export_loss

TOKENS = torch.arange(40)[None] * 7 % 260
MATRIX = "model.layers.1.mlp.down_proj"
WIDE = SIZES | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder of a model with biases and tied embeddings, and beside it a run folder of its weights."""
    torch.manual_seed(4)
    made = Qwen2ForCausalLM(Qwen2Config(**WIDE, tie_word_embeddings=True))
    with torch.no_grad():
        for values in made.parameters():
            values.normal_(mean=float(values.dim() == 1), std=0.1)
    folder: Path = tmp_path_factory.mktemp("wide") / "hf"
    made.save_pretrained(folder)
    import_weights(folder, folder.with_name("run"))
    return folder


def list_values(opened: torch.nn.Module, name: str) -> dict[str, Tensor]:
    """Name of each quantized layer of an opened model, and the weight that it has; int4 by its documented fields."""
    values = {}
    for key, module in opened.named_modules():
        if isinstance(module, torch.nn.Linear) and type(module.weight) is not torch.nn.Parameter:
            weight: Any = module.weight
            if name == "nf4":
                values[key] = bitsandbytes.functional.dequantize_4bit(weight, weight.quant_state).float()
            else:
                values[key] = EXPORT_QUANTIZERS[name].dequantize(weight)
    return values


@pytest.mark.parametrize("name", EXPORT_FORMATS)
def test_transformers_opens_it_with_the_logits_of_the_dequantized_weights(name, folder, tmp_path):
    out = tmp_path / "out"
    source = open_checkpoint(find_checkpoint(folder.with_name("run")))
    num_bytes = export_quantized(source, out, name, file_bytes=100_000, base=folder)
    files = sorted(out.glob("*.safetensors"))
    stored = {key: tensor for file in files for key, tensor in load_file(file).items()}
    assert len(files) > 2 and num_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert json.loads((out / "model.safetensors.index.json").read_text())["weight_map"].keys() == stored.keys()

    opened = AutoModelForCausalLM.from_pretrained(out).eval()
    values = list_values(opened, name)
    assert len(values) == 2 * 7 and opened.dtype == torch.bfloat16
    expected = open_made(folder)
    with torch.no_grad():
        plain = expected(TOKENS).logits
        for key, value in values.items():
            weight = expected.get_submodule(key).weight
            quantizer = EXPORT_QUANTIZERS[name]
            kept = quantizer.dequantize(quantizer.quantize(weight.detach()))
            assert torch.equal(value, kept.bfloat16().float() if name == "nf4" else kept), key
            error = float((kept - weight).norm() / weight.norm())
            assert error < {"int8": 0.01, "int4": 0.12, "nf4": 0.1}[name]
            weight.copy_(kept)
            if name == "int4":  # whose kernel is for GPUs alone
                opened.get_submodule(key).weight = torch.nn.Parameter(kept.bfloat16(), requires_grad=False)
        exact, theirs = expected(TOKENS).logits, opened(TOKENS).logits.float()
    scale = plain.abs().max()
    assert (theirs - exact).abs().max() < 0.03 * scale  # both round to bf16 at different places
    assert (exact - plain).abs().max() > {"int8": 1e-3, "int4": 0.05, "nf4": 0.05}[name] * scale


def test_nf4_is_what_bitsandbytes_would_have_stored(folder):
    weight = open_made(folder).get_submodule(MATRIX).weight.detach()
    ours = EXPORT_QUANTIZERS["nf4"].quantize(weight).list_tensors()
    codes, state = bitsandbytes.functional.quantize_4bit(weight.bfloat16().float(), quant_type="nf4", blocksize=64)
    again = EXPORT_QUANTIZERS["nf4"].quantize(weight.bfloat16().float())
    assert torch.equal(again.codes, codes) and torch.equal(again.scales, state.absmax)
    theirs = state.as_dict(packed=True)
    assert torch.equal(ours[".quant_map"], theirs["quant_map"])
    settings = [
        json.loads(bytes(each["." * dot + "quant_state.bitsandbytes__nf4"].tolist()))
        for dot, each in ((1, ours), (0, theirs))
    ]
    assert settings[0] == settings[1] | {"dtype": "bfloat16"}


def train_here(files: TinyFiles, *overrides: str) -> int:
    """Exit code of a run of a model that every format takes, in this process."""
    sizes = ("--model.hidden_size=128", "--model.ffn_size=128", "--model.num_layers=1")
    code: int = train([str(files.config), *sizes, *overrides])
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def convert(capfd: pytest.CaptureFixture[str], *asked: object) -> tuple[int, str]:
    """Exit code of the command, and what it said where somebody sees it."""
    capfd.readouterr()
    code = main(["convert", *map(str, asked)])
    out, err = capfd.readouterr()
    return code, err if code else out


@pytest.mark.usefixtures("no_torchrun")
def test_losses_before_and_after_stand_beside_each_other(tmp_path, capfd, monkeypatch):
    files, held_out = write_tiny(tmp_path), tmp_path / "held_out.txt"
    held_out.write_text("".join(f"{i} plus {i} is {2 * i}. " for i in range(200)), encoding="utf-8")
    validated = (f"--validation.source={held_out}", "--validation.batches=2", "--data.document_mask=true")
    assert train_here(files, *validated) == 0
    lines = [json.loads(line) for line in (files.run / "metrics.jsonl").read_text().splitlines()]
    with monkeypatch.context() as patch:  # the run computed with weights that were not rounded
        patch.setattr(export_loss, "dequantize", lambda source, weight, exact, name: exact)
        code, said = convert(capfd, files.run, tmp_path / "exact", "--quantize", "nf4", "--json")
    found = json.loads(said)["validation"]
    assert code == 0 and found["loss"] == found["quantized_loss"]
    assert found["loss"] == pytest.approx(lines[-1]["validation_loss"], rel=1e-6)

    code, said = convert(capfd, files.run, tmp_path / "nf4", "--quantize", "nf4", "--json")
    found = json.loads(said)["validation"]
    assert code == 0 and (found["num_samples"], found["num_targets"], found["format"]) == (16, 256, "nf4")
    assert found["loss"] == pytest.approx(lines[-1]["validation_loss"], rel=2e-3)
    assert 1e-5 < abs(found["quantized_loss"] - found["loss"]) < 0.1

    code, said = convert(
        capfd, files.run, tmp_path / "int8", "--quantize=int8", f"--validation={files.corpus}", "--validation-samples=3"
    )
    assert code == 0 and f"of 48 targets in 3 samples of {files.corpus}" in said and " in int8 (" in said
    code, said = convert(capfd, files.run, tmp_path / "none", "--quantize=nf4", "--validation-samples=0")
    assert code == 0 and "validation loss " in said and "as --validation-samples=0 asks" in said
    checkpoint = find_checkpoint(files.run).rename(tmp_path / "step-00000002")
    code, said = convert(capfd, checkpoint, tmp_path / "lone", "--quantize=nf4")
    assert code == 0 and "no validation data are named here; name some with --validation SOURCE" in said
    code, said = convert(capfd, checkpoint, tmp_path / "no", "--quantize=nf4", "--validation", held_out)
    assert code == 2 and f"needs a tokenizer, and {checkpoint} names none; give --tokenizer" in said
    asked = ("--validation", held_out, "--tokenizer=bytes", "--validation-samples=1")
    code, said = convert(capfd, checkpoint, tmp_path / "asked", "--quantize=nf4", *asked)
    assert code == 0 and "of 1,024 targets in 1 sample of " in said


@pytest.mark.usefixtures("no_torchrun")
def test_a_merge_is_quantized_after_its_sum_in_fp32(tmp_path, capfd):
    files = write_tiny(tmp_path, steps=2)
    files.config.write_text(files.config.read_text() + "\n[adapter]\nrank = 2\n")
    assert train_here(files) == 0
    code, said = convert(capfd, files.run, tmp_path / "alone", "--quantize=nf4")
    assert code == 2 and "--quantize is for --merge, and the adapter alone is written here" in said
    assert convert(capfd, files.run, tmp_path / "exact", "--merge", "--format=float32")[0] == 0
    assert convert(capfd, files.run, tmp_path / "nf4", "--merge", "--quantize=nf4")[0] == 0
    exact, stored = (load_file(tmp_path / each / "model.safetensors") for each in ("exact", "nf4"))
    name = "model.layers.0.mlp.up_proj.weight"
    codes, scales = QUANTIZERS["nf4"].quantize(exact[name], torch.float32)
    assert torch.equal(stored[name], codes.view(-1, 1)) and torch.equal(stored[f"{name}.absmax"], scales.flatten())


def test_a_peft_folder_is_merged_before_it_is_quantized(folder, tmp_path, capfd):
    made = open_made(folder)
    made.name_or_path = str(folder)
    config = LoraConfig(r=4, target_modules=["down_proj"], init_lora_weights=False)
    get_peft_model(made, config).save_pretrained(tmp_path / "peft")
    assert convert(capfd, tmp_path / "peft", tmp_path / "exact", "--merge", "--format=float32")[0] == 0
    code, said = convert(capfd, tmp_path / "peft", tmp_path / "int8", "--merge", "--quantize=int8")
    assert code == 0 and "MB of int8" in said and "no validation data are named here" in said
    exact, stored = (load_file(tmp_path / each / "model.safetensors") for each in ("exact", "int8"))
    made = EXPORT_QUANTIZERS["int8"].quantize(exact[f"{MATRIX}.weight"])
    assert torch.equal(stored[f"{MATRIX}._weight_qdata"], made.qdata)
    assert not torch.equal(exact[f"{MATRIX}.weight"], open_made(folder).get_submodule(MATRIX).weight)


def test_what_cannot_be_quantized_is_refused_by_a_line_before_anything_is_written(folder, tmp_path, capfd, monkeypatch):
    run, out = folder.with_name("run"), tmp_path / "out"
    for kind in ("llama", "qwen3_moe"):
        import_weights(save_made(kind, tmp_path / kind), tmp_path / f"{kind}-run")
    small = tmp_path / "llama-run"
    refused = {
        (folder, "--quantize=int8"): "--quantize is for the way to a Hugging Face folder",
        (run, "--quantize=int8", "--format=float32"): "--format is for weights that are not quantized",
        (run, "--validation=x"): "--validation is for --quantize",
        (run, "--validation-samples=0"): "--validation-samples is for --quantize",
        (run, "--quantize=nf4", "--validation-samples=-1"): "--validation-samples=-1 must not be negative",
        (
            small,
            "--quantize=int4",
        ): "has groups of 128 columns, which do not divide the 32 of model.layers.0.self_attn.",
        (small, "--quantize=nf4"): "q_proj.weight; use int8",
        (tmp_path / "qwen3_moe-run", "--quantize=int8"): "a mixture of experts: transformers joins experts in a stack",
    }
    for asked, line in refused.items():
        code, said = convert(capfd, asked[0], out, *asked[1:])
        assert code == 2 and line in said and len(said.splitlines()) == 1, (asked, said)
    monkeypatch.setattr(quantized_export, "is_installed", lambda module: False)
    code, said = convert(capfd, run, out, "--quantize=int8")
    assert code == 2 and "no package torchao here; install it: pip install 'dtlayout[quantize]'" in said
    assert convert(capfd, run, tmp_path / "needs none", "--quantize=nf4")[0] == 0
    assert not out.exists()


def test_weights_that_are_not_finite_are_refused_before_they_are_hidden_in_codes(folder, tmp_path):
    source = open_checkpoint(find_checkpoint(folder.with_name("run")))

    def spoil(places: Any) -> dict[str, Tensor]:
        tensors = source.load(places)
        for name in tensors.keys() & {f"{MATRIX}.weight"}:
            tensors[name][0, 0] = float("nan")
        return tensors

    with pytest.raises(InvalidConfig, match=rf"in nf4: {MATRIX}.weight is NaN or infinite in 1 place"):
        export_quantized(replace(source, load=spoil), tmp_path / "out", "nf4")
    assert not (tmp_path / "out").exists()
