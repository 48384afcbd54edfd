"""Answers from tables are pairs that differ in the choice alone, with their rows; without tables there are none."""

import csv
from pathlib import Path

import pytest

from benchmarks import open_questions
from benchmarks.open_questions import count_parameters, pair_formats, read_rows, state_share

LLAMA_8B = {
    "model": "llama3-8b", "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256,
    "tied": False, "seq_len": 8192, "engine": "megatron", "gpu": "h100-80g-sxm", "gpus": 8, "gpus_per_node": 8,
    "global_batch": 128, "micro_batch": 1, "dp": 4, "tp": 2, "pp": 1, "cp": 1, "virtual_stages": 1,
    "sequence_parallel": True, "zero": 1, "recompute": "none", "kernel": "flash2+rmsnorm", "status": "ok",
    "step_time_s": "", "mfu": 0.5, "peak_memory_gb": "", "precision": "bf16", "tokens_per_s_gpu": 10_000, "note": "",
}  # fmt: skip
ROWS = (
    {"table": "bridge-1-bf16", "row": "a"},
    {"table": "bridge-1-fp8", "row": "b", "precision": "fp8-tensorwise", "tokens_per_s_gpu": 13_000},
    {"table": "bridge-1-fp8", "row": "c", "precision": "fp8-tensorwise", "tokens_per_s_gpu": 14_000, "tp": 1, "dp": 8},
    {"table": "bridge-1-fp8", "row": "d", "precision": "fp8-tensorwise", "tokens_per_s_gpu": 30_000,
     "note": "token drop"},
    {"table": "bridge-2", "row": "e", "precision": "mxfp8", "tokens_per_s_gpu": 12_000, "virtual_stages": ""},
    {"table": "bridge-2", "row": "f", "sequence_parallel": False, "tokens_per_s_gpu": "", "step_time_s": 16.384},
    {"table": "bridge-2", "row": "g", "status": "oom", "tokens_per_s_gpu": ""},
)  # fmt: skip


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["table", "row", *LLAMA_8B])
        writer.writeheader()
        writer.writerows({**LLAMA_8B, **row} for row in ROWS)
    return path


def test_formats_are_compared_in_rows_that_share_all_else(table):
    found = {
        name: {a["row"] + b["row"] for a, b in pairs} for name, pairs in pair_formats(read_rows([table])).items()
    }  # fmt: skip
    assert found == {
        "one layout, one release": {"ab"},
        "one layout, two releases": {"ae", "be"},
        "the fastest of each, one release": {"ac", "fe"},
        "the fastest of each, whatever release, GPUs and batch": {"ae", "ce"},
    }


def test_the_report_names_each_pair_with_its_rows(table, capsys):
    open_questions.main([str(table)])
    shown = capsys.readouterr().out
    assert "asked of 6 rows that ran" in shown
    assert "| one layout, one release | bf16 | fp8-tensorwise | megatron | h100-80g-sxm | 1 | 1 | ×1.30 |" in shown
    assert "| dp4 tp2 mb1; dp8 mb1 | bf16, fp8-tensorwise | ×1.40 | bridge-1-bf16 a, bridge-1-fp8 c |" in shown
    assert "Pairs of rows of one layout with and without it: 0." in shown  # f and a are of two releases


def test_parameters_and_state_are_those_of_published_models():
    deepseek = {
        **LLAMA_8B, "hidden": 7168, "layers": 61, "heads": 128, "kv_heads": 128, "ffn": 18432, "vocab": 129280,
        "experts": 256, "expert_ffn": 2048, "shared_expert_ffn": 2048, "dense_layers": 3, "ep": 64, "pp": 8,
        "gpus": 1024, "note": "MLA q_lora 1536 kv_lora 512 qk 128+64 v 128",
    }  # fmt: skip
    total, routed = count_parameters({name: str(cell) for name, cell in deepseek.items()})
    assert total == pytest.approx(671e9, rel=1e-3)  # arXiv:2412.19437, sec. 4.2
    assert routed == 58 * 256 * 3 * 7168 * 2048
    llama = {name: str(cell) for name, cell in LLAMA_8B.items()}
    assert count_parameters(llama)[0] == pytest.approx(8.03e9, rel=1e-3)
    n = count_parameters(llama)[0]
    assert state_share(llama) == pytest.approx((4 * n / 2 + 12 * n / 8) / 85.0e9, rel=0.01)
    assert state_share(llama, halved=2) == pytest.approx((4 * n + 12 * n / 8) / 85.0e9, rel=0.01)
    assert state_share(llama, halved=4) is None  # there is no less of tp·pp
    assert state_share({**llama, "zero": "3"}) is None
