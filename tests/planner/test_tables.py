"""Rows of a table become runs, and what is no table is refused by name."""

import csv
from pathlib import Path

import pytest

from dtlayout.errors import InvalidConfig
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.planner.tables import read_tables
from dtlayout.text import GIB

ROW = {
    "table": "sweep", "row": "7", "model": "small", "hidden": "1024", "layers": "8", "heads": "16", "kv_heads": "4",
    "ffn": "2816", "vocab": "32000", "tied": "True", "seq_len": "2048", "engine": "megatron", "gpu": "h100-80g-sxm",
    "gpus": "32", "gpus_per_node": "8", "global_batch": "256", "micro_batch": "2", "dp": "4", "tp": "2", "pp": "4",
    "cp": "1", "virtual_stages": "2", "sequence_parallel": "True", "zero": "1", "recompute": "full",
    "kernel": "flash2", "status": "ok", "step_time_s": "1.5", "mfu": "0.25", "peak_memory_gb": "12.5",
}  # fmt: skip


def write(path: Path, *rows: dict[str, str], columns=tuple(ROW)) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(path: Path, **cells: str):
    (run,) = read_tables([write(path / "runs.csv", ROW | cells)])
    return run


def test_a_row_becomes_a_run(tmp_path):
    run = read(tmp_path)
    assert (run.table, run.row, run.outcome, run.step_time_s, run.mfu) == ("sweep", "7", "ok", 1.5, 0.25)
    assert run.peak_bytes == 12.5 * GIB
    assert run.ran
    assert run.layout == Layout(
        pp=4, dp_shard=4, tp=2, micro_batch=2, schedule="interleaved-1f1b", virtual_stages=2, recompute="full"
    )
    assert run.kernels == Kernels(attention="sdpa-flash", norm="eager")
    model, batch, cluster = run.scenario.model, run.scenario.batch, run.scenario.cluster
    assert (model.name, model.hidden_size, model.num_layers, model.num_heads) == ("small", 1024, 8, 16)
    assert (model.num_kv_heads, model.ffn_size, model.vocab_size, model.tied_embeddings) == (4, 2816, 32000, True)
    assert (batch.global_batch, batch.seq_len) == (256, 2048)
    assert (cluster.gpu.name, cluster.num_gpus, cluster.gpus_per_node) == ("h100-80g-sxm", 32, 8)
    assert run.scenario.engine.name == "megatron"


@pytest.mark.parametrize(
    ("zero", "layout"), [("0", (4, 1, 1)), ("1", (1, 4, 1)), ("2", (1, 4, 2)), ("3", (1, 4, 3)), ("", (1, 4, 1))]
)
def test_zero_says_what_is_sharded_and_0_is_replicated_state(tmp_path, zero, layout):
    found = read(tmp_path, zero=zero).layout
    assert (found.dp_replicate, found.dp_shard, found.zero) == layout


def test_an_empty_cell_is_what_the_source_does_not_say(tmp_path):
    names = ("step_time_s", "mfu", "peak_memory_gb", "cp", "virtual_stages", "recompute", "sequence_parallel", "tied")
    run = read(tmp_path, **dict.fromkeys(names, ""))
    assert (run.step_time_s, run.mfu, run.peak_bytes, run.ran) == (None, None, None, False)
    assert (run.layout.cp, run.layout.virtual_stages, run.layout.schedule) == (1, 1, "1f1b")
    assert (run.layout.recompute, run.layout.sequence_parallel) == ("none", False)
    assert not run.scenario.model.tied_embeddings


def test_a_run_that_did_not_end_well_did_not_run(tmp_path):
    assert not read(tmp_path, status="oom").ran


@pytest.mark.parametrize(
    ("kernel", "attention", "norm"),
    [
        ("torch", "torch", "eager"),
        ("megatron-softmax", "megatron-softmax", "eager"),
        ("flash1", "flash1", "eager"),
        ("flash2+rmsnorm", "sdpa-flash", "fused"),
    ],
)
def test_a_kernel_names_attention_and_norm(tmp_path, kernel, attention, norm):
    assert read(tmp_path, kernel=kernel).kernels == Kernels(attention=attention, norm=norm)


def test_layouts_that_our_trainer_refuses_are_read(tmp_path):
    cells = {"dp": "1", "cp": "2", "tp": "3", "pp": "64", "gpus": "384"}
    layout = read(tmp_path, **cells, virtual_stages="1", micro_batch="300").layout
    assert (layout.tp, layout.pp, layout.cp, layout.micro_batch) == (3, 64, 2, 300)


def test_an_engine_can_be_put_in_the_place_of_the_rows_own(tmp_path):
    path = write(tmp_path / "runs.csv", ROW, ROW | {"engine": "no such thing"})
    assert {run.scenario.engine.name for run in read_tables([path], engine="nanotron")} == {"nanotron"}


def test_several_tables_are_read_in_their_order(tmp_path):
    paths = [write(tmp_path / f"{name}.csv", ROW | {"table": name}) for name in ("b", "a")]
    assert [run.table for run in read_tables(paths)] == ["b", "a"]


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        ({"kernel": "fast"}, "column kernel: 'fast' is unknown; use torch, megatron-softmax"),
        ({"gpu": "abacus"}, "GPU type 'abacus' is unknown"),
        ({"engine": "steam"}, "column engine: 'steam' is unknown; use one of aa-scaling, "),
        ({"layers": "many"}, "many"),
        ({"tp": "0"}, "column tp: '0' must be a whole number of at least 1"),
        ({"heads": "7"}, "hidden_size=1024 does not split into num_heads=7"),
    ],
)
def test_a_wrong_row_is_refused_with_file_and_line(tmp_path, cells, problem):
    path = write(tmp_path / "runs.csv", ROW, ROW | cells)
    with pytest.raises(InvalidConfig) as caught:
        read_tables([path])
    assert str(caught.value).startswith(f"table {path}, line 3")
    assert problem in str(caught.value)


def test_a_file_that_is_no_table_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="has no column dp, tp"):
        read_tables([write(tmp_path / "short.csv", ROW, columns=[name for name in ROW if name not in ("dp", "tp")])])
    with pytest.raises(InvalidConfig, match="cannot be read: No such file"):
        read_tables([tmp_path / "none.csv"])
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidConfig, match="is not CSV"):
        read_tables([tmp_path / "binary.csv"])
