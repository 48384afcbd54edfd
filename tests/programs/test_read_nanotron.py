"""Files of nanotron: each is understood field by field, and what is written is read back."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_files import ROUND_TRIPS, check_any_value, check_rows, check_understood, compare_job
from program_jobs import LAYOUTS, job_of

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.models.presets import PRESETS
from dtlayout.programs.files.trees import read_tree
from dtlayout.programs.nanotron import read as read_nanotron
from dtlayout.programs.nanotron.write import OPTIONS
from dtlayout.programs.program import Job
from dtlayout.programs.reading import read_program
from dtlayout.programs.registry import PROGRAMS
from dtlayout.programs.understood import OtherFile, Understood
from dtlayout.spec.layout import Layout
from dtlayout.spec.optimizers import SGD, AdamW

FOLDER = Path(__file__).parent / "nanotron"
PLAIN = {"compute": "bfloat16", "reduce": "float32"}
ADAM = {"name": "adamw", "weight_decay": 0.01, "max_norm": 1.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "tiny.yaml": {
        "gpus": (8, 0), "batch": {"seq_len": 256, "global_batch": 16}, "precision": PLAIN,
        "model": {
            "family": "llama", "num_layers": 4, "hidden_size": 64, "ffn_size": 256, "num_heads": 8, "num_kv_heads": 4,
            "vocab_size": 258, "tied_embeddings": True, "norm_eps": 1e-5, "rope_theta": 1e4,
        },
        "layout": {
            "pp": 2, "tp": 2, "cp": 1, "schedule": "1f1b", "sequence_parallel": True, "micro_batch": 2,
            "dp_replicate": 2, "dp_shard": 1, "recompute": "none",
        },
        "optimizer": ADAM | {"lr": 3e-4},
    },
    "small.yaml": {
        "gpus": (64, 0), "batch": {"seq_len": 2048, "global_batch": 512}, "precision": PLAIN,
        "model": {
            "family": "llama", "num_layers": 30, "hidden_size": 576, "ffn_size": 1536, "num_heads": 9,
            "num_kv_heads": 3, "vocab_size": 49152, "tied_embeddings": True, "norm_eps": 1e-5, "rope_theta": 1e4,
        },
        "layout": {
            "pp": 1, "tp": 1, "cp": 1, "micro_batch": 8, "dp_replicate": 64, "dp_shard": 1, "recompute": "none",
        },
        "optimizer": ADAM | {"lr": 3e-3},
    },
    "qwen.yaml": {
        "gpus": (384, 0), "batch": {"seq_len": 4096, "global_batch": 576}, "precision": PLAIN,
        "model": {
            "family": "llama", "num_layers": 36, "hidden_size": 2048, "ffn_size": 11008, "num_heads": 16,
            "num_kv_heads": 4, "vocab_size": 128256, "tied_embeddings": True, "norm_eps": 1e-6, "rope_theta": 5e4,
        },
        "layout": {
            "pp": 1, "tp": 2, "cp": 1, "sequence_parallel": True, "micro_batch": 3, "dp_replicate": 192,
            "dp_shard": 1, "recompute": "none",
        },
        "optimizer": ADAM | {"lr": 2e-4, "weight_decay": 0.1},
    },
    "release-0.4.yaml": {
        "gpus": (160, 0), "batch": {"seq_len": 2048, "global_batch": 640}, "precision": PLAIN,
        "model": {
            "family": "llama", "num_layers": 24, "hidden_size": 2048, "ffn_size": 8192, "num_heads": 16,
            "num_kv_heads": 16, "vocab_size": 32000, "tied_embeddings": False, "norm_eps": 1e-5, "rope_theta": 1e4,
        },
        "layout": {
            "pp": 1, "tp": 1, "cp": 1, "micro_batch": 4, "dp_replicate": 1, "dp_shard": 160, "recompute": "none",
        },
        "optimizer": ADAM | {"lr": 3e-4, "beta2": 0.98, "max_norm": float("inf")},
    },
    "benchmark.yaml": {
        "gpus": (64, 0), "batch": {"seq_len": 4096, "global_batch": 64}, "precision": PLAIN,
        "model": {
            "family": "llama", "num_layers": 32, "hidden_size": 4096, "ffn_size": 14336, "num_heads": 32,
            "num_kv_heads": 8, "vocab_size": 131072, "tied_embeddings": False, "norm_eps": 1e-5, "rope_theta": 5e5,
        },
        "layout": {
            "pp": 2, "tp": 8, "cp": 1, "schedule": "gpipe", "sequence_parallel": True, "micro_batch": 2,
            "dp_replicate": 1, "dp_shard": 4, "recompute": "full",
        },
        "optimizer": ADAM | {"lr": 3e-4},
    },
    "window.yaml": {
        "gpus": (8, 0), "batch": {"seq_len": 8192, "global_batch": 64}, "precision": PLAIN,
        "model": {
            "family": "qwen2", "qkv_bias": True, "num_layers": 24, "hidden_size": 896, "ffn_size": 4864,
            "num_heads": 14, "num_kv_heads": 2, "vocab_size": 151666, "tied_embeddings": True, "norm_eps": 1e-6,
            "rope_theta": 1e6, "window": 1024, "window_share": 1.0,
        },
        "layout": {
            "pp": 1, "tp": 2, "cp": 1, "sequence_parallel": False, "micro_batch": 1, "dp_replicate": 4,
            "dp_shard": 1, "recompute": "none",
        },
        "optimizer": {"name": "sgd", "lr": 0.01, "weight_decay": 0.0, "max_norm": float("inf"), "momentum": 0.0},
    },
}  # fmt: skip
"""File → what it says, in our words, without the model's name."""


def read(text: str, num_gpus: int = 0, given: dict[str, str] | None = None) -> Understood:
    file = OtherFile(Path("job.yaml"), text, read_tree(text, given or {}), given or {}, num_gpus)
    assert read_nanotron.is_ours(file)
    found = read_nanotron.read(file)
    if found.problems:
        raise InvalidConfig(found.problems)
    return found


def change(name: str, *pairs: tuple[str, str]) -> str:
    """Text of a file of the folder, with other words."""
    text = (FOLDER / name).read_text()
    for before, after in pairs:
        assert before in text, before
        text = text.replace(before, after)
    return text


def list_rows(found: Understood, how: str) -> dict[str, str]:
    """Option → note, of the options that play one part."""
    return {row.option.partition(" = ")[0]: row.note for row in found.rows if row.how == how}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_field_of_a_file_is_understood_and_each_option_has_a_row(name):
    found = check_understood(FOLDER / name, {"engine": "nanotron", **UNDERSTOOD[name]})
    tree = read_tree((FOLDER / name).read_text(), {})
    assert tree is not None
    check_rows(found, tree.values)


def test_every_file_of_the_folder_is_held_against_what_it_says():
    assert {each.name for each in FOLDER.iterdir()} == set(UNDERSTOOD)


def test_what_has_no_effect_is_said():
    idle = list_rows(read(change("small.yaml")), "no effect")
    assert idle == {
        "parallelism.pp_engine": "pp is 1", "parallelism.tp_mode": "tp is 1",
        "parallelism.tp_linear_async_communication": "tp is 1", "parallelism.tp_recompute_allgather": "tp is 1",
    }  # fmt: skip
    idle = list_rows(read(change("qwen.yaml")), "no effect")
    assert idle == {
        "parallelism.pp_engine": "pp is 1", "parallelism.moe_layer_recompute": "the model has no experts",
        "parallelism.expert_parallel_size": "the model has no experts",
    }  # fmt: skip
    text = change("window.yaml", ("name: sgd", "name: sgd\n    adam_beta1: 0.9"))
    assert list_rows(read(text), "no effect") == {"optimizer.optimizer_factory.adam_beta1": "its SGD has no moments"}


def test_what_is_assumed_is_said():
    assumed = list_rows(read(change("qwen.yaml")), "assumed")
    assert assumed["model.model_config._use_doc_masking"] == "predicted as with false"
    assert assumed["model.model_config.no_rope_layer"] == "predicted as if it were not there"
    assert assumed["model.ddp_bucket_cap_mb"] == "predicted as with 25"
    assumed = list_rows(read(change("benchmark.yaml")), "assumed")
    assert assumed["parallelism.pp_engine"] == "its default"
    assumed = list_rows(read(change("tiny.yaml")), "assumed")
    padded = "padded to a multiple of 2, tp · model.make_vocab_size_divisible_by"
    assert assumed["model.model_config.vocab_size"] == padded
    assumed = list_rows(read(change("window.yaml")), "assumed")
    assert assumed["model.model_config._attn_implementation"] == "predicted as with flash_attention_2"
    assert assumed[""] == "its SGD has none"
    slow = change("benchmark.yaml", ("tp_linear_async_communication: true", "tp_linear_async_communication: false"))
    assert list_rows(read(slow), "assumed")["parallelism.tp_linear_async_communication"] == "predicted as with true"
    bare = change("small.yaml", ("  zero_stage: 0\n", ""), ("  dp: 64 # 8 nodes\n", ""))
    found = read(bare)
    assert (found.num_gpus, found.get("layout", "dp_replicate")) == (1, 1)
    assumed = list_rows(found, "assumed")
    assert assumed["parallelism.dp"] == "not said, and predicted as 1"
    assert "without zero_stage each rank has the whole state" in assumed.values()
    assert read(bare, 16).get("layout", "dp_replicate") == 16


@pytest.mark.parametrize(
    ("name", "change_of", "problem"),
    [
        ("tiny.yaml", ("  tp: 2", "  tp: two"), "parallelism.tp=two is no whole number above 0"),
        ("tiny.yaml", ("  dp: 2", "  dp: 0"), "parallelism.dp=0 is no whole number above 0"),
        ("tiny.yaml", ("  tp: 2", "  tp: 2\n  new_thing: 3"), "parallelism.new_thing is not understood here; without"),
        ("tiny.yaml", ("pp_engine: 1f1b", "pp_engine: zb"), "parallelism.pp_engine=zb is nothing that is known here"),
        ("tiny.yaml", ("REDUCE_SCATTER", "RING"), "parallelism.tp_mode=RING is nothing that is known here"),
        ("tiny.yaml", ("REDUCE_SCATTER", "ALL_REDUCE"), "tp_linear_async_communication=true runs only with"),
        ("tiny.yaml", ("zero_stage: 0", "zero_stage: 3"), "optimizer.zero_stage=3 is nothing that is known here"),
        ("tiny.yaml", ("in_fp32: true", "in_fp32: false"), "optimizer.accumulate_grad_in_fp32=false keeps parameters"),
        ("tiny.yaml", ("name: adamW", "name: lamb"), "optimizer.optimizer_factory.name=lamb is nothing that is known"),
        ("tiny.yaml", ("dtype: bfloat16", "dtype: float8"), "model.dtype=float8 is nothing that is known here"),
        ("tiny.yaml", ("expert_parallel_size: 1", "expert_parallel_size: 2"), "shares out experts, and the model has"),
        ("qwen.yaml", ("moe_config: null", "moe_config: {num_experts: 8, top_k: 2}"), "moe_config has experts, with"),
        ("tiny.yaml", ("is_llama_config", "is_starcoder2_config"), "is_starcoder2_config: of its models Llama and"),
        ("tiny.yaml", ("vocab_size: 257", "vocab_size: many"), "model.model_config.vocab_size=many is no whole number"),
        ("tiny.yaml", ("vocab_size: 257", "vocab_size: 0"), "model.model_config.vocab_size=0 is no whole number"),
        ("tiny.yaml", ("  tp: 2", "  tp: 2\n  recompute_granularity: SELECTIVE"), "recompute_granularity is not under"),
        ("tiny.yaml", ("  tp: 2", "  tp: ${oc.env:TP}"), "parallelism.tp is ${oc.env:TP}, the variable TP of its"),
        ("tiny.yaml", ("micro_batch_size: 2", "micro_batch_size: -1"), "tokens.micro_batch_size=-1 is no whole number"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named(name, change_of, problem):
    with pytest.raises(InvalidConfig) as caught:
        read(change(name, change_of))
    assert any(problem in each for each in caught.value.problems), caught.value.problems


def test_degrees_and_gpus_that_contradict_are_refused():
    with pytest.raises(InvalidConfig, match="dp · tp · pp · cp is 8, and the job has 16 GPUs"):
        read(change("tiny.yaml"), 16)
    assert read(change("tiny.yaml"), 8).num_gpus == 8
    assert read(change("tiny.yaml", ("  tp: 2", "  tp: ${oc.env:TP}")), given={"TP": "4"}).num_gpus == 16


@pytest.mark.parametrize("name", ["tiny.yaml", "window.yaml"])
def test_no_value_of_an_option_ends_in_anything_but_a_sentence(name):
    assert check_any_value(read_nanotron.read, FOLDER / name) > 500


def test_only_its_own_files_are_taken():
    for text in (
        "model: {model_config: {hidden_size: 8}}\ntokens: {train_steps: 1}",
        "parallelism: {tp: 2}\nmodel: {name: llama}\ntokens: {train_steps: 1}",
        "model_name_or_path: gpt2\nlearning_rate: 1.0e-5\nbf16: true",
        "[parallelism]\ntp = 1\n[tokens]\nn = 1\n[model.model_config]\nhidden_size = 4",
        "torchrun run_train.py --config-file x.yaml",
    ):
        assert not read_nanotron.is_ours(OtherFile(Path("x"), text, read_tree(text, {}))), text
    for ours in (Path(__file__).parents[2] / "configs").glob("*.toml"):
        assert read_program(ours, {}) is None


def test_context_parallelism_goes_with_the_ring():
    text = change("qwen.yaml", ("context_parallel_size: 1", "context_parallel_size: 4"), ("flash_attention_2", "ring"))
    found = read(text)
    assert found.num_gpus == 192 * 2 * 4 and found.get("layout", "cp_method") == "ring"


GAPS = {
    "layout.schedule": {"schedule", "virtual_stages"}, "layout.zero": {"zero"}, "layout.recompute": {"recompute"},
    "layout.dp_replicate": {"dp_replicate", "dp_shard"}, "layout.tp_overlap": {"tp_overlap"},
    "its stages": {"stage_layers"}, "precision.matmuls": {"matmuls"}, "precision.compute": {"compute"},
    "optimizer.momentum": {"optimizer"},
}  # fmt: skip
"""Beginning of a gap → what of a job it names."""


def compare(job: Job) -> None:
    """Fail unless a job is read back as it was written, but for what its gaps name."""
    arguments = PROGRAMS["nanotron"].write(job)
    differ = {
        each for gap in arguments.gaps for start, names in GAPS.items() if gap.startswith(start) for each in names
    }
    compare_job(job, read("\n".join(arguments.lines)), differ)


@st.composite
def draw_jobs(draw: Any) -> Job:
    """A job that nanotron can be told, or nearly so."""
    model = draw(st.sampled_from(["llama3.1-8b", "llama-13b", "llama3.2-1b", "qwen2.5-7b", "qwen2.5-0.5b"]))
    shape = PRESETS[model]
    tp = draw(st.sampled_from([n for n in (1, 2, 4) if shape.num_kv_heads % n == 0]))
    pp = draw(st.sampled_from([1, 2, 3, 4]))
    dp, zero = draw(st.sampled_from([1, 2, 4, 8, 16])), draw(st.sampled_from([1, 1, 2]))
    sharded = draw(st.booleans())
    layout = Layout(
        tp=tp, pp=pp, cp=draw(st.sampled_from([1, 1, 2])), micro_batch=draw(st.sampled_from([1, 2, 4])),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])), sequence_parallel=sharded,
        tp_overlap=sharded and draw(st.sampled_from([False, False, True])),
        recompute=draw(st.sampled_from(["none", "full", "full", "every-2"])),
        **({"dp_shard": dp, "zero": zero if dp > 1 else 1} if draw(st.booleans()) else {"dp_replicate": dp}),
    )  # fmt: skip
    rate = draw(st.sampled_from([1e-4, 3e-3, 2.5e-5]))
    adam = AdamW(
        lr=rate, beta1=0.8, beta2=0.98, eps=1e-7, weight_decay=0.05, max_norm=draw(st.sampled_from([1.0, 0.5]))
    )
    optimizer = draw(st.sampled_from([adam, SGD(lr=rate, momentum=0.0), SGD(lr=rate, momentum=0.8)]))
    formats = draw(st.sampled_from([{}, {}, {"matmuls": "fp8-tensorwise"}, {"compute": "float16"}]))
    return job_of("nanotron", layout, model=model, optimizer=optimizer, **formats)


@ROUND_TRIPS
@given(draw_jobs())
def test_what_is_written_is_read_back(job):
    compare(job)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_kind_of_layout_is_read_back(name):
    compare(job_of("nanotron", LAYOUTS[name]))


def test_the_options_of_a_job_are_those_that_are_written():
    for name, layout in LAYOUTS.items():
        job = job_of("nanotron", layout)
        options, _ = PROGRAMS["nanotron"].options(job)
        tree = read_tree("\n".join(PROGRAMS["nanotron"].write(job).lines), {})
        assert tree is not None
        written = {key: value for key, value in options.items() if value is not None}
        assert written.items() <= tree.values.items(), name
        assert {option.name for option in OPTIONS} <= options.keys()


def test_explain_and_read_take_a_file(tmp_path, capsys):
    file, config = str(FOLDER / "benchmark.yaml"), tmp_path / "job.toml"
    assert main(["explain", file, "--gpu", "h100-80g-sxm", "--json"]) == 0
    said = capsys.readouterr()
    assert "is read as a job of nanotron; dtlayout read shows how" in said.err
    document = json.loads(said.out)
    assert document["engine"] == "nanotron" and document["gpus"] == 64
    assert main(["explain", file, "--gpu", "h100-80g-sxm", "--layout.recompute=none"]) == 0
    assert "recompute" not in capsys.readouterr().out.splitlines()[0]
    assert main(["read", str(FOLDER / "window.yaml"), "--output", str(config)]) == 0
    assert "nanotron, 8 GPUs" in capsys.readouterr().out
    assert toml.loads(config.read_text())["optimizer"]["max_norm"] == float("inf")
    assert main(["explain", str(config), "--engine", "nanotron", "--gpus", "8", "--gpu", "h100-80g-sxm"]) == 0
