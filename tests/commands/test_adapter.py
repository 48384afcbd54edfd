"""What commands say of a model with an adapter: recommend's options, what it writes, and what others make of that."""

import json

import pytest
from recommending import LLAMA, ask, refuse, with_model

from dtlayout.cli import main
from dtlayout.config.loading import load_config
from dtlayout.spec.adapter import Adapter

EIGHT = ["--model", "llama3.1-8b", "--gpu", "h100-80g-sxm", "--gpus", "8", "--seq-len", "4096", "--global-batch", "64"]
FLOPS = "4 FLOPs a token for a frozen parameter, not 6"


def answer(capsys, *arguments):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_an_adapter_is_predicted_written_and_accepted_by_whoever_reads_the_config(capsys, tmp_path):
    path, asked = tmp_path / "best.toml", ["--adapter", "lora", "--adapter.rank=64", '--adapter.targets=["q_proj"]']
    document = ask(capsys, *EIGHT, *asked, "--emit", str(path))
    expected = Adapter(rank=64, targets=("q_proj",))
    assert load_config(path).model.adapter == expected
    assert document["scenario"]["trained_parameters"] == 32 * 64 * (4096 + 4096)
    on = ["--gpu", "h100-80g-sxm", "--world", "8"]
    best = document["layouts"][0]
    explained = json.loads(answer(capsys, "explain", str(path), *on, "--json"))
    assert (explained["peak_memory_bytes"], explained["mfu"]) == (best["peak_bytes"], best["mfu"])
    assert FLOPS in answer(capsys, "explain", str(path), *on) and "predicted peak" in answer(
        capsys, "check", str(path), *on
    )
    (one, other) = json.loads(answer(capsys, "compare", str(path), "zero=1", *on, "--json"))["compared"]
    assert one["peak_memory_bytes"] == best["peak_bytes"] < other["peak_memory_bytes"]
    again = ask(capsys, *with_model(EIGHT, path))  # the file names the model, and has the adapter
    assert again["scenario"]["model"]["adapter"]["rank"] == 64


def test_people_are_told_what_is_trained(capsys):
    said = answer(capsys, "recommend", *EIGHT, "--adapter", "ia3", "--top", "1")
    assert f"0.5 million of them trained by ia3; MFU counts {FLOPS})" in said


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--adapter.rank=4"], "--adapter.rank belongs to an adapter; give --adapter lora too"),
        (["--adapter", "dora"], "adapter.method='dora' is unknown; use one of ['lora', 'ia3']"),
        (["--adapter", "lora", "--adapter.rank=0"], "adapter.rank=0 must be from 1 to a million"),
        (
            ["--adapter", "lora", '--adapter.targets=["query"]'],
            "adapter.targets: no linear layer of a block is called query; use some of q_proj, k_proj, v_proj, o_proj, "
            "gate_proj, up_proj, down_proj",
        ),
    ],
)
def test_an_adapter_that_cannot_be_is_refused_in_a_line(capsys, arguments, problem):
    assert refuse(capsys, *LLAMA, *arguments) == f"{problem}\n"


@pytest.mark.parametrize("engine", ["torchtitan", "automodel", "megatron", "nanotron"])
def test_arguments_of_a_program_that_cannot_say_an_adapter_are_refused_by_its_name(capsys, tmp_path, engine):
    path = tmp_path / "job"
    said = refuse(capsys, *EIGHT, "--adapter", "lora", "--engine", engine, "--emit", str(path), "--top", "1")
    assert said.startswith("adapter.method=lora: arguments of ") and said.count("\n") == 1
    assert said.endswith(" for an adapter are not written; leave out --emit, or use --engine dtlayout\n")
    assert not path.exists()


def test_fewer_gpus_train_an_adapter(capsys):
    question = ["--model", "llama3.1-8b", "--gpu", "h100-80g-sxm", "--seq-len", "4096", "--global-batch", "64"]
    sizes = [
        ask(capsys, *question, "--min-gpus", "--top", "1", *more)["scenario"]["num_gpus"]
        for more in ([], ["--adapter", "lora"])
    ]
    assert sizes[1] == 1 < sizes[0]


def test_where_nothing_fits_an_adapter_is_offered_last_of_what_would(capsys, tmp_path):
    one = [*EIGHT[:5], "1", *EIGHT[6:]]
    *_, offload, adapter, helps = refuse(capsys, *one).splitlines()
    assert offload.startswith("With --fix offload=") and helps.startswith("--min-gpus finds")
    assert adapter.startswith("To fine-tune, --adapter lora trains small matrices beside a frozen model: 1 rank ")
    assert "--adapter" not in refuse(capsys, *one, "--adapter", "lora", "--max-memory", "0.1")

    config = tmp_path / "config.toml"
    config.write_text(
        '[model]\nname = "llama3.1-8b"\n[batch]\nglobal_batch = 8\nseq_len = 4096\n[layout]\nzero = 3\n'
        '[kernels]\nloss = "linear"\n[train]\nsteps = 1\n'
    )
    asked = ["explain", str(config), "--gpu", "h100-80g-sxm", "--world", "1"]
    offered = json.loads(answer(capsys, *asked, "--json"))["fine_tuning"]
    assert offered["overrides"] == ["--adapter.method=lora"] and offered["fits"]
    *_, title, head, row = answer(capsys, *asked).splitlines()
    assert title == "to fine-tune, a frozen model with an adapter fits:" and head.startswith("change")
    assert row.startswith("--adapter.method=lora")
    adapted = json.loads(answer(capsys, *asked, "--adapter.method=lora", "--json"))
    assert adapted["fine_tuning"] is None and adapted["peak_memory_bytes"] == offered["peak_memory_bytes"]
