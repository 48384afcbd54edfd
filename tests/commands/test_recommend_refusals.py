"""What dtlayout recommend refuses, and what it says where nothing fits or nothing is legal."""

import json

import pytest
from recommending import HF, LLAMA, refuse, with_model

from dtlayout.cli import main

MIXTURE = [*with_model(LLAMA, "mixtral-8x7b"), "--fix", "ep=2"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (with_model(LLAMA, "llama-7c"), "model 'llama-7c' is no preset, config.json or TOML file; did you mean"),
        (with_model(LLAMA, "/"), "model '/' is a folder without a config.json; presets are "),
        (with_model(LLAMA, "none.json"), "model none.json cannot be read: No such file"),
        ([*LLAMA, "--fix", "tpp=2"], "tpp is unknown; did you mean tp?"),
        ([*LLAMA, "--avoid", "recompute=ful"], "layout.recompute='ful' is unknown"),
        ([*LLAMA, "--why-not", "tp"], "'tp' is no choice"),
        ([*LLAMA, "--engine", "own"], "engine 'own' is unknown"),
        ([*LLAMA, "--optimizer", "adam"], "optimizer.name='adam' is unknown; use one of adamw, sgd, muon"),
        ([*LLAMA, "--precision", "params=float8"], "precision.params='float8' is unknown"),
        ([*LLAMA, "--precision", "weights=float32"], "precision 'weights' is unknown"),
        (
            [*LLAMA, "--precision", "reduce=float32", "--precision", "reduce=bfloat16"],
            "reduce=bfloat16 and reduce=float",
        ),
        ([*LLAMA, "--fix", "tp=2", "--avoid", "tp=2"], "--fix tp=2 and --avoid tp=2 leave no layout; say one of them"),
        ([*LLAMA, "--fix", "tp=2", "--fix", "tp=4"], "tp=4 and tp=2: say one of them"),
        ([*LLAMA, "--avoid", "tp2+sp mb1 zero1"], "--avoid 'tp2+sp mb1 zero1' is a whole layout"),
        (
            [*LLAMA, "--engine", "megatron", "--fix", "ep_dispatcher=deepep"],
            "ep_dispatcher=deepep has an effect only where ep is above 1",
        ),
        ([*LLAMA, "--fix", "experts=grouped"], "experts=grouped has no effect, since model"),
        ([*LLAMA, "--fix", "tp=1,tp_overlap=true"], "tp_overlap=true has an effect only where tp is above 1"),
        (
            [*LLAMA, "--engine", "torchtitan", "--fix", "ep_overlap=true"],
            "layout.ep_overlap=true is nothing that torchtitan has; use layout.ep_overlap=false",
        ),
        (
            [*MIXTURE, "--fix", "ep_dispatcher=deepep"],
            "layout.ep_dispatcher=deepep can be predicted, not trained; use layout.ep_dispatcher=alltoall",
        ),
        (
            [*MIXTURE, "--fix", "ep_overlap=true"],
            "layout.ep_overlap=true can be predicted, not trained; use layout.ep_overlap=false",
        ),
        (
            [*LLAMA, "--gpu", "h100-80g-sxm", "--engine", "megatron", "--precision", "matmuls=nvfp4"],
            "precision.matmuls=nvfp4 is no format that h100-80g-sxm multiplies in; "
            "use precision.matmuls=compute or fp8-tensorwise",
        ),
        (
            [*LLAMA, "--engine", "nanotron", "--precision", "reduce=bfloat16"],
            "precision.reduce=bfloat16 is nothing that nanotron has; use precision.reduce=float32",
        ),
        (
            [*LLAMA, "--gpu", "v100-32g-sxm"],
            "precision.compute=bfloat16 is nothing that v100-32g-sxm, of compute capability 7.0, multiplies in; use "
            "precision.compute=float16, whose loss is scaled",
        ),
        (
            [*LLAMA, "--engine", "megatron", "--precision", "fake_quant=int4"],
            "precision.fake_quant=int4 is nothing that megatron has; use precision.fake_quant=none",
        ),
        ([*LLAMA, "--optimizer", "adamw,beta3=1"], "optimizer.beta3 is unknown"),
        ([*LLAMA, "--top", "0"], "--top=0 must be at least 1"),
        ([*LLAMA, "--max-memory", "1.5"], "--max-memory=1.5 must lie above 0"),
        ([*LLAMA, "--scale", "8,x"], "--scale=8,x is no list of numbers"),
        ([*LLAMA, "--scale", "0"], "--scale=0 must name at least 1 GPU"),
        ([*LLAMA, "--scale", "8", "--min-gpus"], "--scale compares clusters"),
        ([*LLAMA[:4], *LLAMA[6:]], "the number of GPUs is missing; give --gpus N"),
        ([*LLAMA[:2], *LLAMA[4:]], "the cluster is missing; give --gpu NAME --gpus N, or --cluster FILE"),
        ([*LLAMA, "--gpus", "0"], "num_gpus=0 must be a whole number"),
        ([*LLAMA, "--gpu", "a1000"], "GPU type 'a1000' is unknown"),
        (
            [*LLAMA, "--emit", "none/none/best.toml"],
            "none/none/best.toml cannot be written: there is no folder none/none",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_line(capsys, arguments, problem):
    assert refuse(capsys, *arguments).startswith(problem)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "it is no table of sizes"),
        (json.dumps({**HF, "model_type": "nothing"}), "knows no model_type='nothing'"),
        (json.dumps({**HF, "attention_bias": True}), "attention_bias=true is not known"),
        (json.dumps({**HF, "hidden_size": None}), "hidden_size is missing"),
        (json.dumps({**HF, "hidden_size": "4096"}), "model.hidden_size='4096' must be a whole number"),
        (json.dumps({**HF, "head_dim": 63}), "head_dim=63 must be even"),
        (json.dumps({**HF, "use_sliding_window": True}), "use_sliding_window=true is not known"),
        (json.dumps({**HF, "rope_scaling": {"type": "linear"}}), "rope_scaling of type 'linear' is not known"),
        (json.dumps({**HF, "rope_scaling": {"type": "llama3"}}), "rope_scaling.factor is missing"),
    ],
)
def test_a_config_json_that_is_no_llama_is_refused(capsys, tmp_path, content, problem):
    path = tmp_path / "config.json"
    path.write_text(content)
    assert problem in refuse(capsys, *with_model(LLAMA, path))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[model", "is not TOML"),
        ("[batch]", "it has no section [model]"),
        ('[model]\nname = "own"', "model.hidden_size is missing"),
        ('[model]\nname = "debug"\nhiden_size = 3', "model.hiden_size is unknown; did you mean model.hidden_size?"),
        (
            '[model]\nname = "debug"\nrope_scaling = 2',
            "model.rope_scaling is a table: write [model.rope_scaling] with factor",
        ),
        ('[model]\nname = "debug"\nrope_scaling = {factor = 2.0}', "model.rope_scaling.low_freq_factor is missing"),
        ('[model]\nname = "debug"\nnum_layers = 0', "model.num_layers=0 must be from 1 to 10,000"),
    ],
)
def test_a_model_file_that_makes_no_model_is_refused(capsys, tmp_path, content, problem):
    path = tmp_path / "own.toml"
    path.write_text(content)
    assert problem in refuse(capsys, *with_model(LLAMA, path))


def test_where_nothing_fits_the_nearest_and_what_helps_are_named(capsys):
    problems = refuse(capsys, *with_model(LLAMA, "llama3.1-405b")).splitlines()
    assert problems[0].startswith("no layout can train llama3.1-405b here: ")
    assert problems[1].startswith("the one that misses by least, ") and "GiB too much" in problems[1]
    assert problems[2].startswith("To fine-tune, --adapter lora trains ")
    assert problems[3] == "--min-gpus finds the smallest cluster that works", "its state alone is too large"
    long = [*with_model(LLAMA, "llama3.1-8b")[:-3], "1048576", "--global-batch", "1", "--gpus", "4"]
    assert "a shorter --seq-len needs less" in refuse(capsys, *long)


def test_where_nothing_is_legal_an_example_says_why(capsys):
    problems = refuse(capsys, *LLAMA, "--fix", "tp=16", "--fix", "pp=2")
    assert problems.splitlines() == [
        "no layout can train llama-7b here: none has these degrees on so many GPUs",
        "for example pp2·tp16+sp mb1 1f1b zero1: tp=16 * pp=2 = 32 does not divide the 16 GPUs of the cluster; use "
        "degrees that do",
        "use fewer --fix and --avoid, or another number of GPUs or global batch",
    ]


def test_of_a_dp_that_cannot_be_nothing_is_said(capsys):
    problems = refuse(capsys, *LLAMA, "--fix", "tp=3")
    assert "tp=3 does not divide num_heads=32" in problems and "global_batch" not in problems


def test_a_refusal_is_a_document_too(capsys):
    assert main(["recommend", *LLAMA, "--fix", "tpp=2", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"ok": False, "problems": ["tpp is unknown; did you mean tp?"]}
