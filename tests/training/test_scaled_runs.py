"""A run in fp8 says which layers multiply in it, and that a compiler would make it faster."""

from math import isfinite

import pytest
from launching import read_lines
from tiny import write_tiny

from dtlayout.launch import main as train

pytestmark = pytest.mark.usefixtures("no_torchrun")


def test_a_run_says_which_layers_multiply_in_fp8_and_what_compiling_them_would_do(tmp_path, capsys):
    files = write_tiny(tmp_path, steps=2)
    said = "--precision.compute=bfloat16", "--precision.matmuls=fp8-rowwise", "--checkpoint.save=false"
    assert train([str(files.config), *said]) == 0
    printed = capsys.readouterr().out
    names = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    assert f"{names} of blocks multiply in fp8-rowwise\n" in printed and "experts" not in printed
    assert "note: fp8 is slower where blocks are not compiled: casts are kernels of their own then\n" in printed
    assert all(isfinite(line["loss"]) for line in read_lines(files.run))


@pytest.mark.parametrize(("kernel", "name"), [("loop", "fp8-tensorwise"), ("grouped", "bfloat16")])
def test_a_run_says_in_which_format_its_experts_multiply(tmp_path, capsys, kernel, name):
    files = write_tiny(tmp_path, steps=1, num_layers=1)
    experts = "--model.experts.number=4", "--model.experts.per_token=2", "--model.experts.ffn_size=16"
    said = "--precision.compute=bfloat16", "--precision.matmuls=fp8-tensorwise", "--checkpoint.save=false"
    assert train([str(files.config), *said, *experts, f"--kernels.experts={kernel}"]) == 0
    assert f"routed experts multiply in {name} (kernels.experts={kernel})\n" in capsys.readouterr().out
    assert all(isfinite(line["loss"]) for line in read_lines(files.run))
