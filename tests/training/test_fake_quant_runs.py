"""A run that multiplies by rounded weights: its export of the same format has them, and it resumes to the bit."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import read_lines
from safetensors.torch import load_file
from thorough import thorough
from tiny import write_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from dtlayout.checkpoint.export_quantizers import EXPORT_QUANTIZERS
from dtlayout.checkpoint.hf import export_weights
from dtlayout.checkpoint.manifest import find_checkpoint
from dtlayout.cli import main
from dtlayout.config.loading import load_config
from dtlayout.launch import main as train
from dtlayout.models.llama import Llama
from dtlayout.plans.fake_quantize import fake_quantize_linears
from dtlayout.plans.plan import find_fake_quantized
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.model_shape import ModelShape

pytestmark = pytest.mark.usefixtures("no_torchrun")
ALONE: Any = SimpleNamespace(size=lambda: 1)
"""A mesh of one rank."""
TOKENS = torch.arange(16)[None] * 7 % 260


def run_tiny(folder: Path, name: str, *overrides: str) -> int:
    files = write_tiny(folder, steps=4)
    sizes = ("--model.hidden_size=128", "--model.ffn_size=128", "--model.num_layers=2", "--precision.compute=bfloat16")
    said = (f"--precision.fake_quant={name}", "--optimizer.decay_steps=4", *overrides)
    code: int = train([str(files.config), *sizes, *said])
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def read_masters(run: Path) -> dict[str, Tensor]:
    """Weights of a run's newest checkpoint, in fp32."""
    export_weights(find_checkpoint(run), run / "exact", number_format="float32")
    tensors = load_file(run / "exact" / "model.safetensors")
    shutil.rmtree(run / "exact")
    return tensors


@torch.no_grad()
def check_logits(folder: Path, shape: ModelShape, masters: dict[str, Tensor], name: str) -> None:
    """What a folder holds computes what rounded weights compute: to the bit by our model, nearly by transformers'."""
    opened = AutoModelForCausalLM.from_pretrained(folder).eval()
    trained, exported = (Llama(shape, Kernels(), 16, dtype=torch.bfloat16) for _ in range(2))
    trained.load_state_dict({key: each.bfloat16() for key, each in masters.items()}, strict=False)
    fake_quantize_linears(trained, find_fake_quantized(shape), name, ALONE)
    exported.load_state_dict(trained.state_dict())
    plain = exported(TOKENS)
    for key, linear in opened.model.named_modules():
        if isinstance(linear, torch.nn.Linear):
            stored = EXPORT_QUANTIZERS[name].dequantize(linear.weight)
            exported.get_submodule(f"model.{key}").weight.copy_(stored)
    logits = trained(TOKENS)
    assert torch.equal(logits, exported(TOKENS)) and not torch.equal(logits, plain)
    if name == "int8":  # int4 computes on GPUs alone
        theirs = opened(TOKENS).logits
        assert (theirs - logits).abs().max() < 0.03 * logits.abs().max()


@pytest.mark.parametrize("name", [thorough("int8"), "int4"])
def test_an_export_computes_what_the_run_computed_and_a_resume_has_the_same_bits(tmp_path, capsys, name):
    whole, parts, out = tmp_path / "run", tmp_path / "parts", tmp_path / "out"
    assert run_tiny(tmp_path, name) == 0
    assert f"down_proj of blocks multiply by weights rounded to {name}, as --quantize writes" in capsys.readouterr().out
    masters, config = read_masters(whole), load_config(whole / "config.toml")
    if name == "int4":
        said = f"--train.run_folder={parts}"
        assert run_tiny(tmp_path, name, said, "--train.steps=2") == run_tiny(tmp_path, name, said) == 0
        assert [each["loss"] for each in read_lines(parts)] == [each["loss"] for each in read_lines(whole)]
        assert all(torch.equal(each, masters[key]) for key, each in read_masters(parts).items())

    assert main(["convert", str(whole), str(out), "--quantize", name, "--validation-samples=0"]) == 0
    check_logits(out, config.model, masters, name)

    capsys.readouterr()
    assert main(["convert", str(whole), str(tmp_path / "plain"), "--format=float32"]) == 0
    note = f"the run multiplied by weights in {name}, and --quantize {name} writes these"
    assert note in capsys.readouterr().out.replace("\n", " ")
