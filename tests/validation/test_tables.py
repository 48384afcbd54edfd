"""Rows of a table become runs, and what is no table is refused by name."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import GIB
from dtlayout.costmodel.engine_features import CHOICES
from dtlayout.models.counting import count_model_flops_per_token
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts, LatentAttention
from dtlayout.spec.optimizers import SGD, AdamW
from dtlayout.spec.precision import MATMUL_FORMATS
from dtlayout.validation.notes import read_note
from dtlayout.validation.predict import describe_changes
from dtlayout.validation.tables import find_tables, read_tables

ROW = {
    "table": "sweep", "row": "7", "model": "small", "hidden": "1024", "layers": "8", "heads": "16", "kv_heads": "4",
    "ffn": "2816", "vocab": "32000", "tied": "True", "seq_len": "2048", "engine": "megatron", "gpu": "h100-80g-sxm",
    "gpus": "32", "gpus_per_node": "8", "global_batch": "256", "micro_batch": "2", "dp": "4", "tp": "2", "pp": "4",
    "cp": "1", "virtual_stages": "2", "sequence_parallel": "True", "zero": "1", "recompute": "full",
    "kernel": "flash2", "status": "ok", "step_time_s": "1.5", "mfu": "0.25", "peak_memory_gb": "12.5",
}  # fmt: skip


MORE = {
    "head_dim": "128", "gated": "False", "qk_norm": "True", "precision": "bf16", "compile": "True", "ep": "1",
    "experts": "", "experts_per_token": "", "expert_ffn": "", "shared_expert_ffn": "", "dense_layers": "",
    "schedule": "interleaved", "optimizer": "sgd", "tokens_per_s_gpu": "", "source": "a page", "note": "by hand",
}  # fmt: skip


EXPERTS = {
    "ep": "4", "experts": "64", "experts_per_token": "6", "expert_ffn": "512", "shared_expert_ffn": "256",
    "dense_layers": "1",
}  # fmt: skip


def write(path: Path, *rows: dict[str, str], columns=tuple(ROW)) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(path: Path, **cells: str):
    (run,) = read_tables([write(path / "runs.csv", ROW | cells, columns=(ROW | cells).keys())]).runs
    return run


def test_a_row_becomes_a_run(tmp_path):
    run = read(tmp_path)
    assert (run.table, run.row, run.outcome, run.step_time_s, run.mfu) == ("sweep", "7", "ok", 1.5, 0.25)
    assert run.peak_bytes == 12.5 * GIB
    assert run.ran
    assert run.layout == Layout(
        pp=4, dp_shard=4, tp=2, micro_batch=2, schedule="interleaved-1f1b", virtual_stages=2, recompute="full",
        tp_overlap=True,
    )  # fmt: skip
    assert run.kernels == Kernels(attention="sdpa-cudnn")  # Transformer Engine's
    model, batch, cluster = run.scenario.model, run.scenario.batch, run.scenario.cluster
    assert (model.name, model.hidden_size, model.num_layers, model.num_heads) == ("small", 1024, 8, 16)
    assert (model.num_kv_heads, model.ffn_size, model.vocab_size, model.tied_embeddings) == (4, 2816, 32000, True)
    assert (batch.global_batch, batch.seq_len) == (256, 2048)
    assert (cluster.gpu.name, cluster.num_gpus, cluster.gpus_per_node) == ("h100-80g-sxm", 32, 8)
    assert run.scenario.engine.name == "megatron"


def test_what_the_model_knows_of_further_columns_goes_into_the_run(tmp_path):
    run = read(tmp_path, **MORE)
    model = run.scenario.model
    assert (model.head_dim, model.gated_ffn, model.qk_norm) == (128, False, True)
    assert (run.layout.schedule, run.layout.virtual_stages) == ("interleaved-1f1b", 2)
    assert (run.kernels.compile, run.scenario.optimizer, run.source, run.note) == ("blocks", SGD(), "a page", "by hand")
    assert read(tmp_path, **MORE | {"optimizer": "adam"}).scenario.optimizer == AdamW()
    assert (
        read(tmp_path, **MORE | {"schedule": "gpipe", "virtual_stages": "1", "engine": "nanotron"}).layout.schedule
        == "gpipe"
    )
    assert read(tmp_path, **MORE | {"schedule": "zbv", "engine": "torchtitan"}).layout.schedule == "zb-v"
    assert (
        read(tmp_path, **MORE | {"pp": "1", "dp": "16", "schedule": "zbv"}).layout.pp == 1
    )  # no pipeline, no schedule


def test_columns_of_experts_become_the_model_and_the_layout(tmp_path):
    run = read(tmp_path, **MORE | EXPERTS)
    assert run.scenario.model.experts == Experts(
        number=64, per_token=6, ffn_size=512, shared_ffn_size=256, dense_layers=1
    )
    assert (run.layout.ep, run.layout.overlaps_ep) == (4, False)
    assert read(tmp_path, **EXPERTS | {"note": "dispatcher deepep; a2a overlap; dropless"}).layout.overlaps_ep
    assert [
        read(tmp_path, **EXPERTS | {"note": f"dispatcher {name}; dropless"}).layout.sends_tokens_once
        for name in ("deepep", "hybridep", "alltoall")
    ] == [True, True, False]
    bare = read(tmp_path, **EXPERTS | {"shared_expert_ffn": "", "dense_layers": ""}).scenario.model.experts
    assert (bare.shared_ffn_size, bare.dense_layers) == (0, 0)


def test_a_note_on_windows_is_one_on_gpt_oss(tmp_path):
    note = "dropless; every other layer has a 128-token window, mfu counts full attention"
    model = read(tmp_path, **EXPERTS | {"note": note}).scenario.model
    assert (model.window, model.experts.bias) == (128, True)
    model = read(tmp_path, **EXPERTS).scenario.model
    assert (model.window, model.experts.bias) == (0, False)


def test_a_note_on_latent_attention_becomes_the_model(tmp_path):
    note = "MLA q_lora 96 kv_lora 48 qk 128+64 v 128; by hand"
    model = read(tmp_path, **MORE | {"head_dim": "192", "kv_heads": "16", "note": note}).scenario.model
    assert model.latent_attention == LatentAttention(query_rank=96, kv_rank=48, rope_width=64, value_width=128)
    assert model.head_width == 192


def test_a_table_without_a_column_has_what_is_usual(tmp_path):
    names = {"engine", "recompute", "sequence_parallel", "zero"}
    path = write(tmp_path / "runs.csv", ROW, columns=[name for name in ROW if name not in names])
    (run,) = read_tables([path]).runs
    assert run.scenario.engine.name == "megatron"
    assert (run.layout.recompute, run.layout.sequence_parallel, run.layout.zero) == ("none", False, 1)


def test_step_time_and_mfu_follow_from_tokens_a_second(tmp_path):
    run = read(tmp_path, tokens_per_s_gpu="8192", step_time_s="", mfu="")
    assert (run.step_time_s, run.measured.tokens_per_s) == (256 * 2048 / (8192 * 32), 8192 * 32)
    flops = count_model_flops_per_token(run.scenario.model, 2048)
    assert run.mfu == pytest.approx(8192 * flops / run.scenario.cluster.gpu.peak_flops_per_s)
    assert run.ran
    printed = {"tokens_per_s_gpu": "8192", "step_time_s": "2.03", "mfu": f"{1.01 * run.mfu}"}  # as far as rounding goes
    assert (read(tmp_path, **printed).step_time_s, read(tmp_path, **printed).mfu) == (2.03, run.mfu)
    for name, wrong in {"step_time_s": "2.05", "mfu": f"{1.03 * run.mfu}"}.items():
        assert find_reasons(tmp_path, **printed | {name: wrong}) == (f"{name} contradicts tokens_per_s_gpu",)


def find_reasons(path: Path, **cells: str) -> tuple[str, ...]:
    """Why a row is not predicted; one beside it is."""
    row = ROW | {"row": "8"} | cells
    path = write(path / "runs.csv", ROW | {"precision": "bf16"}, row, columns=row.keys())
    runs, unpredicted, num_repeats = read_tables([path])
    assert ([run.row for run in runs], num_repeats) == (["7"], 0)
    ((table, name, reasons),) = unpredicted
    assert (table, name) == ("sweep", "8")
    return reasons


@pytest.mark.parametrize(
    ("cells", "reasons"),
    [
        ({"engine": "steam"}, ["engine steam is not known"]),
        ({"engine": ""}, ["engine is not stated, --engine names one"]),
        ({"gpu": "abacus"}, ["GPU type abacus is not known"]),
        ({"precision": "int4", "mfu": "1.4"}, ["precision int4"]),
        ({"precision": "nvfp4", "mfu": "1.4"}, ["h100-80g-sxm does not multiply in nvfp4"]),
        ({"precision": ""}, ["precision is not stated"]),
        ({**EXPERTS, "engine": "nanotron"}, ["engine nanotron has no experts or latent attention"]),
        ({**EXPERTS, "precision": "mxfp8"}, ["h100-80g-sxm does not multiply in mxfp8"]),
        (
            {**EXPERTS, "expert_ffn": "", "ep": ""},
            ["experts_per_token or expert_ffn is not stated", "ep is not stated"],
        ),
        ({"note": "MLA, as ever"}, ["multi-head latent attention, its ranks not stated"]),
        ({"experts": "0", "optimizer": "shampoo"}, ["optimizer shampoo is not known"]),
        ({"schedule": "hanayo", "engine": "torchtitan"}, ["schedule hanayo is not known"]),
        ({"schedule": "gpipe", "virtual_stages": "1"}, ["engine megatron has no schedule gpipe"]),
        ({"zero": "3"}, ["engine megatron has no zero=3 in pipelines"]),
        ({**EXPERTS, "note": "25.09: token drop, capacity not stated"}, ["tokens are dropped"]),
        ({**EXPERTS, "expert_tp": "2"}, ["experts are split by tp"]),
        ({"schedule": "1f1b"}, ["schedule 1f1b does not go with virtual_stages=2"]),
        ({"schedule": "interleaved", "virtual_stages": ""}, ["virtual_stages is not stated"]),
        ({"global_batch": "", "micro_batch": ""}, ["global_batch is not stated"]),
        ({"recompute": "", "kernel": ""}, ["kernel is not stated"]),
        ({"zero": "", "sequence_parallel": ""}, ["sequence_parallel is not stated"]),
        (
            {"engine": "fsdp1", "zero": "", "micro_batch": "", "recompute": ""},
            ["micro_batch is not stated", "recompute is not stated", "zero is not stated"],
        ),
    ],
)
def test_a_row_that_cannot_be_predicted_is_named_with_its_reasons(tmp_path, cells, reasons):
    assert find_reasons(tmp_path, **{"precision": "bf16", "optimizer": "adamw"} | cells) == tuple(reasons)


def test_what_would_not_matter_need_not_be_stated(tmp_path):
    assert read(tmp_path, zero="", dp="1", gpus="8").layout.dp_shard == 1
    assert not read(tmp_path, sequence_parallel="", tp="1", dp="8").layout.sequence_parallel


def test_what_a_row_does_not_say_is_what_its_engine_usually_does(tmp_path):
    run = read(tmp_path, micro_batch="", recompute="", zero="")
    keys = ("micro_batch=1", "zero=1", 'recompute="none"', "tp_overlap=true", 'gradients="bfloat16"')
    assert run.assumed == tuple(f"not stated: {key}, what megatron usually does" for key in keys)
    assert (run.layout.micro_batch, run.layout.recompute, run.layout.zero) == (1, "none", 1)
    assert 'not stated: recompute="none", what megatron usually does' in describe_changes(run)
    assert read(tmp_path, tp_overlap="false", gradients="float32").assumed == ()


def test_zero_3_in_a_pipeline_of_fsdp2_is_what_its_program_makes_of_it(tmp_path):
    run = read(tmp_path, engine="torchtitan", zero="3")
    assert run.layout.zero == 1
    assert "zero=3 in a pipeline: torchtitan keeps parameters gathered and gradients whole" in describe_changes(run)


def test_notes_say_what_is_sent_beside_matmuls(tmp_path):
    assert read(tmp_path, note="torch.compile; AsyncTP").layout.tp_overlap
    assert read(tmp_path, note="async TP; local batch 32").layout.tp_overlap
    assert not read(tmp_path, note="no async TP").layout.tp_overlap


def test_columns_say_what_a_run_of_its_program_is_told(tmp_path):
    engine = read(tmp_path, overlap_dp="false", overlap_pp="false", cuda_graphs="attention").scenario.engine
    assert (engine.features.overlap_dp, engine.features.overlap_pp) == (False, False)
    assert engine.features.cuda_graphs == "attention"
    again = read(tmp_path, recompute="selective", recompute_modules="moe_act+layernorm").scenario.engine
    assert again.features.recompute_modules == ("layernorm", "moe_act")
    assert find_reasons(tmp_path, engine="fsdp1", pp="1", dp="16", virtual_stages="1", overlap_dp="false") == (
        f"engine fsdp1 cannot be told {' or '.join(CHOICES)} as stated",
    )


def test_gradients_are_in_the_format_that_a_row_says_or_in_that_of_published_runs(tmp_path):
    def find_bytes(**cells: str) -> int:
        return read(tmp_path, **cells).scenario.engine.features.gradient_bytes

    assert (find_bytes(gradients="float32"), find_bytes(gradients="bfloat16"), find_bytes()) == (4, 2, 2)
    assert read(tmp_path, engine="torchtitan", gradients="bfloat16").scenario.precision.reduce == "bfloat16"
    assert read(tmp_path, state_format="bfloat16").scenario.optimizer == AdamW(state_format="bfloat16")


def test_columns_name_kernels_methods_and_experts(tmp_path):
    run = read(tmp_path, attention="fa3", loss="linear", experts_kernel="grouped", engine="prime-rl")
    assert (run.kernels.attention, run.kernels.loss, run.kernels.experts) == ("fa3", "linear", "grouped")
    assert read(tmp_path, cp="2", gpus="64", cp_method="gather").layout.cp_method == "gather"
    model = read(tmp_path, **EXPERTS | {"imbalance": "1.25", "expert_bias": "true", "window": "64"}).scenario.model
    assert (model.experts.imbalance, model.experts.bias, model.window) == (1.25, True, 64)
    latent = {"query_rank": "0", "kv_rank": "48", "rope_width": "64", "value_width": "128"}
    model = read(tmp_path, **MORE | {"head_dim": "192", "kv_heads": "16"} | latent).scenario.model
    assert model.latent_attention == LatentAttention(query_rank=0, kv_rank=48, rope_width=64, value_width=128)


@pytest.mark.parametrize(
    ("note", "cells"),
    [
        ("no overlap of any kind; fp32 gradient reduce", {"overlap_dp": "false", "gradients": "float32"}),
        ("no gradient or parameter overlap", {"overlap_dp": "false"}),
        (
            "a2a overlap; recompute modules layernorm+moe_act; dropless",
            {"recompute": "selective", "recompute_modules": "layernorm+moe_act"},
        ),
        ("recompute core_attn; 20 steps", {"recompute": "selective", "recompute_modules": "core_attn"}),
        ("recompute modules moe+gdn_norm_out", {"recompute_modules": "moe+gdn_norm_out"}),
        ("cuda graphs local:full_iteration", {"cuda_graphs": "full"}),
        ("cuda graphs transformer_engine:[attn+ moe_router]", {"cuda_graphs": "attention"}),
        ("MLA q_lora none kv_lora 512 qk 128+64 v 128", {"query_rank": 0, "kv_rank": 512, "rope_width": 64}),
        ("layers cut to 12; CP by all-to-all", {"cp_method": "all-to-all"}),
        ("sft trainer step; flash_attention_3", {"attention": "fa3"}),
        ("experts packed; routing not forced", {"experts_kernel": "grouped"}),
        ("experts unpacked; routing not forced", {"experts_kernel": "loop"}),
        ("activations of 20 layers offloaded to host", {"tells_memory": False}),
        ("recompute from release 25.11's recipe with this layout", {"tells_memory": False}),
        ("a quiet day", {}),
    ],
)
def test_notes_are_read_into_columns(note, cells):
    found = read_note(note)
    assert cells.items() <= found.items() and bool(found) == bool(cells)


@pytest.mark.parametrize(
    ("source", "fused"),
    [
        ("NVIDIA-NeMo/Megatron-Bridge performance summary", "always"),
        ("pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md", "never"),
        ("torchtitan repo", "never"),
        ("pytorch/torchtitan benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md", None),
    ],
)
def test_a_source_says_whether_its_loss_was_fused(source, fused):
    assert read_note("", source).get("fused_loss") == fused


def test_a_source_says_the_format_of_its_optimizers_state(tmp_path):
    source = "Megatron-Bridge skills/nemo-mbridge-perf-activation-recompute"
    assert read(tmp_path, source=source).scenario.optimizer.state_format == "bfloat16"
    assert read(tmp_path, source="Megatron-Bridge docs").scenario.optimizer.state_format == ""


def test_the_loss_of_a_source_is_what_the_run_is_told_and_a_column_goes_before_it(tmp_path):
    source = "Megatron-Bridge docs"
    assert read(tmp_path).scenario.engine.features.fused_loss == "never"
    assert read(tmp_path, source=source).scenario.engine.features.fused_loss == "always"
    assert read(tmp_path, source=source, fused_loss="never").scenario.engine.features.fused_loss == "never"


def test_modules_of_a_note_are_what_the_run_is_told_and_a_column_goes_before_it(tmp_path):
    note = "recompute modules mla_up_proj+mlp; dropless"
    run = read(tmp_path, recompute="", note=note)
    assert run.layout.recompute == "selective" and run.tells_memory
    assert run.scenario.engine.features.recompute_modules == ("mla_up_proj", "mlp")
    assert read(tmp_path, recompute="full", note=note).layout.recompute == "full"
    engine = read(tmp_path, recompute="selective", recompute_modules="moe", note=note).scenario.engine
    assert engine.features.recompute_modules == ("moe",)
    assert read(tmp_path, recompute="selective").scenario.engine.features.recompute_modules == ("core_attn",)


def test_modules_that_nobody_knows_are_a_reason_in_a_note_and_an_error_in_a_column(tmp_path):
    assert find_reasons(tmp_path, recompute="selective", note="recompute modules moe+gdn_norm_out") == (
        "recompute_modules moe+gdn_norm_out are not known",
    )
    with pytest.raises(InvalidConfig, match="column recompute_modules: gdn_norm_out is unknown; use core_attn or lay"):
        read(tmp_path, recompute="selective", recompute_modules="gdn_norm_out")
    assert find_reasons(
        tmp_path, engine="fsdp1", pp="1", dp="16", virtual_stages="1", recompute="selective", recompute_modules="mlp"
    ) == (f"engine fsdp1 cannot be told {' or '.join(CHOICES)} as stated",)


def test_a_row_that_leaves_recomputation_or_offload_open_does_not_tell_what_memory_holds(tmp_path):
    assert read(tmp_path, recompute="none").tells_memory and read(tmp_path, tells_memory="true").tells_memory
    for cells in ({"recompute": ""}, {"tells_memory": "false"}, {"note": "activations of 4 layers offloaded"}):
        assert not read(tmp_path, **cells).tells_memory


def test_a_column_goes_before_a_note(tmp_path):
    assert read(tmp_path, note="async TP", tp_overlap="false").layout.tp_overlap is False


def test_a_megatron_without_flash_attention_is_that_of_2021(tmp_path):
    run = read(tmp_path, kernel="megatron-softmax", precision="fp16", zero="1")
    assert (run.scenario.engine.name, run.scenario.precision.compute) == ("megatron-2021", "float16")
    assert "kernel=megatron-softmax: the Megatron of 2021, in which nothing is overlapped" in run.assumed
    assert (run.scenario.engine.features.overlap_dp, run.scenario.engine.features.gradient_bytes) == (False, 4)


def test_the_organisation_of_a_source_is_a_rows_site(tmp_path):
    assert read(tmp_path, source="NVIDIA-NeMo/Megatron-Bridge a page").site == "nvidia"
    assert read(tmp_path, source="https://docs.nvidia.com/nemo-framework/user-guide").site == "nvidia"
    assert read(tmp_path, table="playbook/8B/2nodes").site == "playbook"


def test_a_causal_kernel_may_pass_an_mfu_of_1(tmp_path):
    assert read(tmp_path, mfu="1.05").mfu == 1.05


def test_a_pipeline_that_is_filled_once_has_as_many_microbatches_as_ranks(tmp_path):
    run = read(tmp_path, engine="torchtitan", micro_batch="")
    assert run.layout.micro_batch == 256 // (4 * 4)
    assert run.assumed == ("not stated: micro_batch=16, what torchtitan usually does",)
    assert find_reasons(tmp_path, engine="torchtitan", micro_batch="", pp="1", dp="16", virtual_stages="1") == (
        "micro_batch is not stated",
    )


def test_a_note_says_over_how_many_ranks_the_optimizer_is_sharded(tmp_path):
    layout = read(tmp_path, note="optimizer shards over 2 GPUs; a page").layout
    assert (layout.dp_replicate, layout.dp_shard) == (2, 2)
    assert read(tmp_path, note="optimizer shards over 3 GPUs").layout.dp_shard == 4  # of which 4 ranks make no groups


@pytest.mark.parametrize("name", MATMUL_FORMATS)
def test_matmuls_below_bf16_are_read(tmp_path, name):
    run = read(tmp_path, precision=name, gpu="gb300", gpus_per_node="4")
    assert run.scenario.precision.matmul_format is MATMUL_FORMATS[name]


def test_a_model_of_two_names_is_one(tmp_path):
    rows = [ROW, ROW | {"model": "Small-8L"}, ROW | {"model": "large", "layers": "16"}]
    runs = read_tables([write(tmp_path / "runs.csv", *rows)]).runs
    assert [run.scenario.model.name for run in runs] == ["small", "small", "large"]
    assert runs[0].scenario == runs[1].scenario


def test_a_layout_that_was_run_again_counts_once(tmp_path):
    rows = [ROW | {"note": "a cable; same layout as in later"}, ROW | {"table": "later", "note": ""}]
    one, two = (write(tmp_path / f"{row['table']}.csv", row, columns=row.keys()) for row in rows)
    (run,), _, num_repeats = read_tables([one, two])
    assert (run.table, num_repeats) == ("later", 1)
    assert len(read_tables([one]).runs) == 1  # nobody else has it


@pytest.mark.parametrize(("zero", "layout"), [("0", (4, 1, 1)), ("1", (1, 4, 1)), ("2", (1, 4, 2)), ("3", (1, 4, 3))])
def test_zero_says_what_is_sharded_and_0_is_replicated_state(tmp_path, zero, layout):
    found = read(tmp_path, zero=zero, engine="nanotron").layout
    assert (found.dp_replicate, found.dp_shard, found.zero) == layout


def test_an_empty_cell_is_what_the_source_does_not_say(tmp_path):
    names = ("step_time_s", "mfu", "peak_memory_gb", "cp", "virtual_stages", "tied", "head_dim", "gated", "qk_norm",
             "compile", "schedule", "optimizer", "tokens_per_s_gpu", "experts")  # fmt: skip
    run = read(tmp_path, **dict.fromkeys(names, ""))
    assert (run.step_time_s, run.mfu, run.peak_bytes, run.ran) == (None, None, None, False)
    assert (run.layout.cp, run.layout.virtual_stages, run.layout.schedule) == (1, 1, "1f1b")
    assert run.scenario.model == replace(read(tmp_path).scenario.model, tied_embeddings=False)
    assert (run.kernels.compile, run.scenario.optimizer) == ("none", AdamW())


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
    found = read(tmp_path, kernel=kernel, engine="nanotron").kernels
    assert found == Kernels(attention=attention, norm=norm)


def test_an_engine_says_which_kernels_a_word_leaves_open(tmp_path):
    found = read(tmp_path, kernel="flash2", engine="fsdp1").kernels
    assert found == Kernels(attention="flash1")


def test_layouts_that_our_trainer_refuses_are_read(tmp_path):
    cells = {"dp": "1", "cp": "2", "tp": "3", "pp": "64", "gpus": "384"}
    layout = read(tmp_path, **cells, virtual_stages="1", micro_batch="300").layout
    assert (layout.tp, layout.pp, layout.cp, layout.micro_batch) == (3, 64, 2, 300)


def test_an_engine_can_be_put_in_the_place_of_the_rows_own(tmp_path):
    path = write(tmp_path / "runs.csv", ROW, ROW | {"engine": "no such thing"})
    assert {run.scenario.engine.name for run in read_tables([path], engine="nanotron").runs} == {"nanotron"}


def test_several_tables_are_read_in_their_order(tmp_path):
    paths = [write(tmp_path / f"{name}.csv", ROW | {"table": name}) for name in ("b", "a")]
    assert [run.table for run in read_tables(paths).runs] == ["b", "a"]


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        ({"kernel": "fast"}, "column kernel: 'fast' is unknown; use torch, megatron-softmax"),
        ({"mfu": "1.8"}, "mfu=1.8 is above 12/7, which takes a format below bf16"),
        ({"layers": "many"}, "many"),
        ({"tp": "0"}, "column tp: '0' must be a whole number of at least 1"),
        ({**EXPERTS, "ep": "3"}, "ep=3 does not divide dp·cp·tp=8"),
        ({**EXPERTS, "experts": "62"}, "ep=4 does not divide experts=62"),
        ({**EXPERTS, "experts_per_token": "65"}, "model.experts.per_token=65 is more than number=64"),
        ({"heads": "7"}, "hidden_size=1024 does not split into num_heads=7"),
    ],
)
def test_a_wrong_row_is_refused_with_file_and_line(tmp_path, cells, problem):
    path = write(tmp_path / "runs.csv", ROW, ROW | cells, columns=(ROW | cells).keys())
    with pytest.raises(InvalidConfig) as caught:
        read_tables([path])
    assert str(caught.value).startswith(f"table {path}, line 3")
    assert problem in str(caught.value)


def test_a_folder_may_have_tables_of_another_kind(tmp_path):
    runs = write(tmp_path / "runs.csv", ROW)
    other = write(tmp_path / "finetune.csv", ROW, columns=[name for name in ROW if name not in ("dp", "tp")])
    (tmp_path / "README.md").write_text("not a table")
    assert find_tables(tmp_path) == ([runs], [f"left out: table {other} has no column dp, tp"])
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidConfig, match=r"bytes.csv is not CSV"):
        find_tables(tmp_path)


def test_a_file_that_is_no_table_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="has no column dp, tp"):
        read_tables([write(tmp_path / "short.csv", ROW, columns=[name for name in ROW if name not in ("dp", "tp")])])
    with pytest.raises(InvalidConfig, match="cannot be read: No such file"):
        read_tables([tmp_path / "none.csv"])
    empty = write(tmp_path / "empty.csv")
    with pytest.raises(InvalidConfig, match=f"^table {empty} has columns and no rows$"):
        read_tables([write(tmp_path / "runs.csv", ROW), empty])
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidConfig, match="is not CSV"):
        read_tables([tmp_path / "binary.csv"])
