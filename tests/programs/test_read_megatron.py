"""Scripts of Megatron-LM: each is understood field by field, and what is written is read back."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from megatron_jobs import check_choices
from program_files import ROUND_TRIPS, check_understood, compare_job
from program_jobs import LAYOUTS, job_of

from dtlayout.base import toml
from dtlayout.base.errors import DtlayoutError, InvalidConfig
from dtlayout.cli import main
from dtlayout.costmodel.recompute_modules import MODULES
from dtlayout.models.presets import PRESETS
from dtlayout.programs.megatron import read as read_megatron
from dtlayout.programs.megatron.read import read_stages
from dtlayout.programs.program import Job
from dtlayout.programs.reading import parse_given, read_program
from dtlayout.programs.registry import PROGRAMS
from dtlayout.programs.understood import OtherFile, Understood
from dtlayout.spec.layout import Layout
from dtlayout.spec.optimizers import SGD, AdamW


def read(text, given, num_gpus=0):
    found = read_megatron.read(OtherFile(Path("train.sh"), text, None, given, num_gpus))
    if found.problems:
        raise InvalidConfig(found.problems)
    return found


FOLDER = Path(__file__).parent / "megatron"
LLAMA = {"family": "llama", "gated_ffn": True, "tied_embeddings": False}
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "plain.sh": {
        "gpus": (8, 8), "told": {"overlap_dp": "false"},
        "model": {
            "family": "llama", "num_layers": 24, "hidden_size": 2048, "ffn_size": 8192, "num_heads": 16,
            "num_kv_heads": 16, "vocab_size": 50304, "gated_ffn": False, "tied_embeddings": True,
        },
        "batch": {"seq_len": 2048, "global_batch": 256},
        "layout": {"micro_batch": 4, "dp_replicate": 8, "dp_shard": 1, "sequence_parallel": False},
        "precision": {"compute": "float16"}, "kernels": {},
        "optimizer": {"name": "adamw", "lr": 1.5e-4, "weight_decay": 0.01, "max_norm": 1.0},
    },
    "arrays.sh": {
        "gpus": (32, 8), "told": {"overlap_dp": "true"},
        "model": LLAMA | {
            "num_layers": 80, "hidden_size": 8192, "ffn_size": 28672, "num_heads": 64, "num_kv_heads": 8,
            "vocab_size": 128256, "norm_eps": 1e-5, "rope_theta": 5e5,
        },
        "batch": {"seq_len": 8192, "global_batch": 64},
        "layout": {
            "tp": 8, "pp": 2, "micro_batch": 1, "sequence_parallel": True, "tp_overlap": True, "virtual_stages": 8,
            "schedule": "interleaved-1f1b", "dp_shard": 2, "dp_replicate": 1, "recompute": "full",
        },
        "precision": {"compute": "bfloat16"}, "kernels": {"attention": "sdpa-cudnn"},
        "optimizer": {"name": "adamw", "lr": 1.5e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
    },
    "experts.sh": {
        "gpus": (128, 8), "told": {"overlap_dp": "true"},
        "model": LLAMA | {
            "family": "mixtral", "num_layers": 32, "hidden_size": 4096, "ffn_size": 14336, "num_heads": 32,
            "num_kv_heads": 8, "vocab_size": 32000,
            "experts": {"number": 8, "per_token": 2, "ffn_size": 14336, "balance_loss": 0.01},
        },
        "batch": {"seq_len": 4096, "global_batch": 256},
        "layout": {
            "tp": 1, "pp": 4, "ep": 8, "micro_batch": 1, "sequence_parallel": False, "dp_shard": 32, "dp_replicate": 1,
        },
        "precision": {"compute": "bfloat16"}, "kernels": {},
        "optimizer": {"name": "adamw", "lr": 1e-4, "weight_decay": 0.1, "max_norm": 1.0},
    },
    "fp8.sh": {
        "gpus": (32, 8), "told": {"overlap_dp": "false", "cuda_graphs": "full"},
        "model": LLAMA | {
            "num_layers": 32, "hidden_size": 4096, "ffn_size": 14336, "num_heads": 32, "num_kv_heads": 8,
            "vocab_size": 128256, "rope_theta": 5e5, "tied_embeddings": True,
        },
        "batch": {"seq_len": 32768, "global_batch": 128},
        "layout": {
            "cp": 4, "cp_method": "all-to-all", "tp": 2, "sequence_parallel": True, "micro_batch": 1, "dp_shard": 4,
            "dp_replicate": 1,
        },
        "precision": {"compute": "bfloat16", "matmuls": "fp8-tensorwise"}, "kernels": {},
        "optimizer": {"name": "adamw", "lr": 3e-4},
    },
    "cut.sh": {
        "gpus": (16, 8), "told": {"overlap_dp": "false"},
        "model": LLAMA | {
            "family": "qwen3", "qk_norm": True, "num_layers": 30, "hidden_size": 4096, "ffn_size": 11008,
            "num_heads": 32, "num_kv_heads": 4, "vocab_size": 32000,
        },
        "batch": {"seq_len": 4096, "global_batch": 128},
        "layout": {
            "pp": 4, "micro_batch": 2, "sequence_parallel": False, "stage_layers": [7, 8, 8, 7], "zero": 2,
            "dp_shard": 2, "dp_replicate": 2, "recompute": "every-2",
        },
        "precision": {"compute": "bfloat16"}, "kernels": {}, "optimizer": {"name": "adamw", "lr": 1e-4},
    },
    "arguments.txt": {
        "gpus": (0, 0), "told": {"overlap_dp": "false"},
        "model": LLAMA | {
            "num_layers": 16, "hidden_size": 2048, "ffn_size": 8192, "num_heads": 32, "num_kv_heads": 8,
            "vocab_size": 128256, "rope_theta": 5e5, "tied_embeddings": True,
        },
        "batch": {"seq_len": 4096, "global_batch": 64},
        "layout": {"tp": 1, "micro_batch": 2, "sequence_parallel": True},
        "precision": {"compute": "bfloat16"}, "kernels": {"attention": "flash-attn"},
        "optimizer": {"name": "sgd", "momentum": 0.9},
    },
}  # fmt: skip
"""File → what it says, in our words, without the model's name."""


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_field_of_a_script_is_understood(name):
    check_understood(FOLDER / name, {"engine": "megatron", **UNDERSTOOD[name]})


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_each_option_of_a_script_has_a_row(name):
    text = (FOLDER / name).read_text()
    shown = {word for row in read(text, {}).rows for word in row.option.split()}
    launcher = {"--nproc_per_node", "--nproc-per-node", "--nnodes", "--rdzv-endpoint", "--node_rank"}
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) - launcher - shown <= {
        "--decoder-first-pipeline-num-layers"
    }


def test_every_file_of_the_folder_is_held_against_what_it_says():
    assert {each.name for each in FOLDER.iterdir()} == set(UNDERSTOOD)


def list_rows(text: str, how: str) -> dict[str, str]:
    """Option → note, of the options that play one part."""
    return {each.option: each.note for each in read(text, {}).rows if each.how == how}


def test_what_has_no_effect_is_said():
    text = (FOLDER / "arguments.txt").read_text()
    assert list_rows(text, "no effect") == {
        "--sequence-parallel": "tp is 1", "--recompute-method": "without --recompute-granularity",
        "--adam-beta1 0.9": "with --optimizer sgd",
    }  # fmt: skip
    assert list_rows(text + " --num-query-groups 8", "no effect").keys() >= {"--sequence-parallel"}
    plain = (FOLDER / "plain.sh").read_text()
    assert "--attention-dropout 0.1" in list_rows(plain, "ignored")
    assert list_rows(plain, "assumed")["--ffn-hidden-size"] == "its default, from the hidden size"
    alone = plain.replace("--fp16", "--bf16 --fp8-recipe mxfp8 --num-query-groups 4")
    assert list_rows(alone, "no effect") == {
        "--num-query-groups 4": "without --group-query-attention", "--fp8-recipe mxfp8": "without --fp8-format",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("--bf16", "--bf16 --new-thing 3"), "--new-thing is not understood here; without it"),
        (("--num-layers 80", "--num-layers $L"), "--num-layers is $L, set by no line of the script: --given L=VALUE"),
        (("--num-layers 80", "--num-layers $1"), "--num-layers is $1, argument 1 of the script: --given 1=VALUE"),
        (("--num-layers 80", "--num-layers $(cat n)"), "--num-layers is $(cat n), the output of a command, on line"),
        (("--num-layers 80", "--num-layers eighty"), "--num-layers=eighty is no whole number above 0"),
        (("--num-layers 80", "--num-layers 80 90"), "--num-layers has 2 values, and takes one"),
        (("pipeline-stage 5", "pipeline-stage 7"), "--num-layers-per-virtual-pipeline-stage 7 does not divide the 80"),
        (("TP=${TP:-8}", "TP=${TP:-3}"), "32 GPUs are no multiple of tp * pp * cp = 6"),
        (("--bf16", "--bf16 --cp-comm-type p2p+a2a"), "--cp-comm-type p2p+a2a is not"),
        (("--bf16", "--bf16 --fp8-format e4m3 --fp8-recipe own"), "--fp8-recipe own is nothing that is known here"),
        (("--optimizer adam", "--optimizer lion"), "--optimizer lion is nothing that is known here"),
        (("TP=${TP:-8}", "TP=0"), "--tensor-model-parallel-size=0 is no whole number above 0"),
        (("--sequence-parallel", "--sequence-parallel $MORE"), "$MORE may hold options, and is set by no line of"),
        (("--sequence-parallel", "--sequence-parallel false"), "--sequence-parallel takes no value, and has false"),
        (("--bf16", "--bf16 --moe-expert-capacity-factor 1.5"), "--moe-expert-capacity-factor is not understood here"),
        (("--bf16", "--bf16 --transformer-impl inference"), "--transformer-impl is not understood here"),
        (("--bf16", "--bf16 --num-experts 8"), "experts are cut by 8 ranks of tp, which is not predicted"),
        (("torchrun", "if true; then torchrun"), "the `if` of line"),
        (("PARALLEL+=(--use", "[ $X ] && PARALLEL+=(--use"), "$PARALLEL may hold options, and is set behind `&&`"),
        (("backend fused", "backend own"), "--attention-backend own is nothing that is known here"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named(change, problem):
    text = (FOLDER / "arrays.sh").read_text()
    assert change[0] in text
    with pytest.raises(InvalidConfig) as caught:
        read(text.replace(*change), {})
    assert any(problem in each for each in caught.value.problems), caught.value.problems


def change(name: str, *pairs: tuple[str, str]) -> Understood:
    """A file of the folder with other words, as it is read."""
    text = (FOLDER / name).read_text()
    for before, after in pairs:
        assert before in text
        text = text.replace(before, after)
    return read(text, {})


def test_a_script_whose_yaml_says_everything_names_it():
    for option in ("--yaml-cfg gpt.yaml", "--yaml-cfg=gpt.yaml"):
        with pytest.raises(InvalidConfig, match=r"--yaml-cfg gpt\.yaml says everything: give that file"):
            read(f"torchrun --nproc_per_node 8 pretrain_gpt.py {option}", {})


def test_blocks_without_transformer_engine_keep_the_scores_of_attention():
    for before, after in (
        (" --attention-backend fused", " --transformer-impl local"),
        ("--bf16", "--bf16 --transformer-impl local"),
    ):
        plain = change("arrays.sh", (before, after))
        assert plain.get("kernels", "attention") == "megatron-softmax"
    assert [row.note for row in plain.rows if row.option == "--attention-backend fused"] == [
        "with --transformer-impl local"
    ]
    flash = change("arrays.sh", ("--attention-backend fused", "--use-flash-attn --transformer-impl local"))
    assert flash.get("kernels", "attention") == "flash-attn"
    assert change("arrays.sh", ("backend fused", "backend unfused")).get("kernels", "attention") == "megatron-softmax"


def test_defaults_are_those_of_the_program():
    one = change("arrays.sh", (" --num-query-groups 8", ""))
    assert one.get("model", "num_kv_heads") == 1
    padded = change("arrays.sh", ("--padded-vocab-size 128256", "--vocab-size 50257"))
    assert padded.get("model", "vocab_size") == 51200  # a multiple of 128 · tp
    own = change("arrays.sh", ("--padded-vocab-size 128256", "--vocab-size 50257 --make-vocab-size-divisible-by 8"))
    assert own.get("model", "vocab_size") == 50304
    text = (FOLDER / "plain.sh").read_text().rstrip() + " --no-rope-fusion"
    assert list_rows(text, "assumed")["--no-rope-fusion"] == "predicted as if it were not there"
    for pattern, dense in (
        ("'([0]*3+[1]*29)'", 3),
        ("([0]+[1]*31)", 1),
        ("[1]*32", 0),
        ("1", 0),
        ("([0]*1+[1]*31)*1", 1),
    ):
        found = change("experts.sh", ("--num-experts 8", f'--num-experts 8 --moe-layer-freq "{pattern}"'))
        assert found.get("model", "experts").get("dense_layers", 0) == dense, pattern
    with pytest.raises(InvalidConfig, match="only dense blocks before those with experts"):
        change("experts.sh", ("--num-experts 8", "--num-experts 8 --moe-layer-freq 2"))


@pytest.mark.parametrize(
    ("number", "recompute"), [(1, "every-8"), (4, "every-2"), (6, "3-of-4"), (7, "7-of-8"), (8, "full")]
)
def test_recomputed_blocks_of_a_stage_become_every_nth_or_all(number, recompute):
    found = change(
        "cut.sh", ("--num-layers 30", "--num-layers 32"),
        ("--recompute-num-layers 4", f"--recompute-num-layers {number}"),
        ("--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7 ", ""),
    )  # fmt: skip
    assert found.get("layout", "recompute") == recompute


def test_a_command_in_a_word_is_read_like_a_script():
    text = (FOLDER / "fp8.sh").read_text()
    start = text[text.index("torchrun") :].strip()
    found = read(text.replace(start, f'COMMAND="{start}"\neval $COMMAND'), {})
    assert found.get("layout", "cp") == 4 and found.get("precision", "matmuls") == "fp8-tensorwise"
    bare = (FOLDER / "arguments.txt").read_text().replace("\n", " ")
    found = read(f'C="python `pwd`/pretrain_gpt.py {bare}"\nsrun --output=$LOG sh -c "cd here && $C"', {})
    assert found.get("model", "num_layers") == 16 and found.get("optimizer", "name") == "sgd"


def test_the_number_of_gpus_may_be_said_beside_the_script():
    text = (FOLDER / "arrays.sh").read_text()
    assert read(text, {}, 64).get("layout", "dp_shard") == 4
    bare = (FOLDER / "arguments.txt").read_text()
    assert read(bare, {}, 16).get("layout", "dp_replicate") == 16
    fsdp = bare + " --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    assert read(fsdp, {}, 16).tables["layout"].items() >= {"zero": 3, "dp_shard": 16}.items()
    assert read(fsdp, {}).get("layout", "zero") == 3


def test_what_a_prediction_needs_and_a_script_does_not_say_is_asked_for(tmp_path, capsys):
    script = tmp_path / "job.txt"
    script.write_text("--num-layers 4 --hidden-size 256 --num-attention-heads 4 --micro-batch-size 1 --bf16")
    assert main(["explain", str(script), "--gpu", "h100-80g-sxm"]) == 2
    said = capsys.readouterr().err
    for key in ("--model.vocab_size=N", "--batch.seq_len=N", "--batch.global_batch=N", "--world N"):
        assert key in said
    more = ["--model.vocab_size=1024", "--batch.seq_len=512", "--batch.global_batch=8", "--world", "4"]
    assert main(["explain", str(script), "--gpu", "h100-80g-sxm", *more]) == 0


def test_arguments_of_the_script_itself_are_told_as_unknown():
    text = (FOLDER / "arrays.sh").read_text()
    assert list_rows(text, "assumed")['"$@"'].startswith("options that the script itself is given are not known")
    assert '"$@"' not in {each.option for each in read(text, {"@": "--qk-layernorm"}).rows}
    assert read(text, {"@": "--qk-layernorm"}).get("model", "qk_norm") is True


def test_a_value_that_is_given_takes_the_place_of_the_scripts():
    text = (FOLDER / "arrays.sh").read_text()
    found = read(text, parse_given(["TP=4", "NODES=8"]))
    assert found.num_gpus == 64 and found.get("layout", "tp") == 4 and found.get("layout", "dp_shard") == 8
    with pytest.raises(InvalidConfig, match="--given TP is no NAME=VALUE"):
        parse_given(["TP"])


def compare(job: Job, found: Understood) -> None:
    """Fail unless a job was read back as it was, but for what its gaps say."""
    gaps = PROGRAMS["megatron"].write(job).gaps
    differ = {"params", "reduce"}
    if job.layout.schedule == "gpipe":
        differ |= {"schedule"}
    if job.layout.effective.recompute.startswith("every"):
        differ |= {"recompute"}
    if any("precision.matmuls" in gap for gap in gaps):
        differ |= {"matmuls"}
    compare_job(job, found, differ)
    check_choices(job, found)


DIVISORS = st.sampled_from([1, 2, 4])


@st.composite
def draw_jobs(draw: Any) -> Job:
    """A job that Megatron-LM can be told, on whole nodes."""
    model = draw(st.sampled_from(["llama3.1-8b", "llama-13b", "qwen2.5-7b", "qwen3-8b", "qwen3-0.6b", "mixtral-8x7b"]))
    shape = PRESETS[model]
    tp, cp = draw(DIVISORS), draw(st.sampled_from([1, 2]))
    pp = draw(st.sampled_from([n for n in (1, 2, 4) if shape.num_layers % n == 0]))
    dp = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if tp * cp * pp * n % 8 == 0] or [8]))
    virtual = draw(st.sampled_from([1, 2])) if pp > 1 and shape.num_layers % (2 * pp) == 0 else 1
    layout = Layout(
        tp=tp, cp=cp, pp=pp, dp_shard=dp, virtual_stages=virtual,
        schedule="interleaved-1f1b" if virtual > 1 else "1f1b", micro_batch=draw(st.sampled_from([1, 2])),
        sequence_parallel=draw(st.booleans()) if not shape.experts else True,
        recompute=draw(st.sampled_from(["none", "full", "selective"])),
        cp_method=draw(st.sampled_from(["ring", "gather", "all-to-all"])),
        ep=draw(st.sampled_from([1, 2])) if shape.experts and dp * cp * tp % 2 == 0 else 1,
    )  # fmt: skip
    optimizer = draw(st.sampled_from([AdamW(lr=1e-4, beta2=0.98, weight_decay=0.05), SGD(momentum=0.8)]))
    formats = draw(st.sampled_from([{}, {"matmuls": "fp8-tensorwise"}, {"compute": "float16"}]))
    told = {"recompute_modules": "+".join(draw(st.lists(st.sampled_from([*MODULES]), min_size=1)))}
    return job_of("megatron", layout, model=model, optimizer=optimizer, told=told, **formats)


@ROUND_TRIPS
@given(draw_jobs())
def test_what_is_written_is_read_back(job):
    try:
        lines = PROGRAMS["megatron"].write(job).lines
    except DtlayoutError:
        assume(False)
    compare(job, read("\n".join(lines), {"RENDEZVOUS": "host:29500"}))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "cut"])
def test_each_kind_of_layout_is_read_back(name):
    job = job_of("megatron", LAYOUTS[name])
    compare(job, read("\n".join(PROGRAMS["megatron"].write(job).lines), {"RENDEZVOUS": "host:29500"}))


def test_a_layout_of_stages_is_read_as_it_is_written():
    assert read_stages("Et*3|(t*4|)*2t*3L") == [3, 4, 4, 3] == read_stages("'Ettt|tttt|tttt|tttL'")
    with pytest.raises(InvalidConfig, match="'x' is no part of a stage"):
        read_stages("Et|x")


def test_explain_takes_a_script_and_predicts_its_program(capsys):
    script = str(FOLDER / "arrays.sh")
    assert main(["explain", script, "--gpu", "h100-80g-sxm", "--json"]) == 0
    said = capsys.readouterr()
    assert "is read as a job of Megatron-LM; dtlayout read shows how" in said.err
    document = json.loads(said.out)
    assert document["engine"] == "megatron" and document["gpus"] == 32
    assert main(["explain", script, "--gpu", "h100-80g-sxm", "--given", "TP=4", "--layout.recompute=none"]) == 0
    assert "tp4+sp" in capsys.readouterr().out
    bare = str(FOLDER / "arguments.txt")
    assert main(["explain", bare, "--gpu", "h100-80g-sxm", "--world", "8", "--engine-set", "overlap_dp=true"]) == 0
    assert "overlap_dp true" in capsys.readouterr().out


def test_read_shows_each_option_and_writes_our_config(tmp_path, capsys):
    config = tmp_path / "job.toml"
    assert main(["read", str(FOLDER / "experts.sh"), "--output", str(config)]) == 0
    said = capsys.readouterr().out
    assert "Megatron-LM, 128 GPUs, 8 a node" in said and "model.experts.per_token=2" in said
    tables = toml.loads(config.read_text())
    assert tables["model"]["experts"]["number"] == 8
    assert config.read_text().startswith("# A job of Megatron-LM: dtlayout explain FILE --engine megatron")
    assert main(["explain", str(config), "--engine", "megatron", "--world", "128", "--gpu", "h100-80g-sxm"]) == 0
    assert main(["read", str(FOLDER / "plain.sh"), "--json"]) == 0
    capsys.readouterr()
    assert main(["read", str(config)]) == 2
    assert "is no file of a program that is read here" in capsys.readouterr().err
    assert main(["read", str(tmp_path / "none.sh")]) == 2


def test_our_own_configs_are_none_of_megatrons():
    assert read_program(Path(__file__).parents[2] / "configs" / "debug.toml", {}) is None


def test_what_contradicts_itself_or_shards_nothing_is_said(tmp_path, capsys):
    script = tmp_path / "one.sh"
    text = (FOLDER / "arguments.txt").read_text().replace("--micro-batch-size=2", "--micro-batch-size=3")
    script.write_text(text.replace("\n", " ") + " --use-distributed-optimizer")
    assert main(["read", str(script), "--world", "1"]) == 0
    said = capsys.readouterr().out
    assert "contradicts itself: global_batch=64 is not a multiple of dp * micro_batch = 1 * 3 = 3" in said
    assert "no effect: one rank has each copy: there is nothing to share" in said
    assert main(["read", str(FOLDER / "arrays.sh"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["contradictions"] == []
    assert main(["read", str(script)]) == 0
    assert "contradicts" not in capsys.readouterr().out  # nobody says how many GPUs there are


def test_our_trainer_rehearses_the_job_of_a_script(tmp_path, capsys):
    script = tmp_path / "small.txt"
    script.write_text(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --bf16 --vocab-size 256 "
        "--seq-length 64 --global-batch-size 4 --swiglu --tensor-model-parallel-size 2 --sequence-parallel "
        "--use-distributed-optimizer --untie-embeddings-and-output-weights"
    )
    assert main(["dryrun", str(script), "--gpu", "h100-80g-sxm", "--world", "4", "--ranks", "0"]) == 0
    said = capsys.readouterr()
    assert "is a job of Megatron-LM; our own trainer takes it" in said.err and "dp2·tp2+sp" in said.out


def test_a_launcher_in_a_variable_says_the_ranks_though_a_part_of_it_is_unknown(tmp_path):
    arguments = (FOLDER / "arguments.txt").read_text().replace("\n", " ")
    script = tmp_path / "train.sh"
    launcher = (
        'HOST=$(scontrol show hostnames $LIST | head -n 1)\nL="torchrun --nproc_per_node 8 --nnodes 4 --x $HOST:6"'
    )
    script.write_text(f"{launcher}\nsrun --label $L pretrain_gpt.py {arguments}")
    found = read_program(script, {})
    assert (found.num_gpus, found.gpus_per_node) == (32, 8)
