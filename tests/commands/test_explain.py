"""dtlayout explain: numbers that add up, on stdout for people or for programs, without torch."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from tiny import ROOT, TinyFiles, write_tiny

from dtlayout.base.refusals import show_value
from dtlayout.cli import main
from dtlayout.commands.explain import EXAMPLE, LINKS
from dtlayout.costmodel.memory import MemoryEstimate

EXPERTS = ("number", "per_token", "ffn_size")
LATENT = ("query_rank", "kv_rank", "rope_width", "value_width")
LLAMA = str(ROOT / "configs" / "llama-13b-64xa100.toml")


@pytest.fixture
def files(tmp_path: Path) -> TinyFiles:
    return write_tiny(tmp_path)


def explain(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    printed = capsys.readouterr()
    assumed = "note: this is for 1 rank, the fewest that the layout needs: --world says how many there are\n"
    assert printed.err == ("" if {"--gpus", "--world"}.intersection(arguments) else assumed)
    return printed.out


def test_the_memory_of_each_pipeline_rank_and_the_step_add_up(capsys):
    document = json.loads(explain(capsys, LLAMA, "--gpus", "64", "--layout.pp=4", "--layout.tp=2", "--json"))
    assert (document["ok"], document["gpu"], document["gpus"], document["engine"]) == (
        True, "a100-80g-sxm", 64, "dtlayout",
    )  # fmt: skip
    assert len(document["memory_bytes"]) == document["layout"]["pp"] == 4
    for rank in document["memory_bytes"]:
        total = rank.pop("total")
        assert total == pytest.approx(sum(rank.values()))
        assert total <= document["peak_memory_bytes"]
    assert sum(document["time_s"].values()) == pytest.approx(document["step_time_s"])
    assert document["fits"] == (document["peak_memory_bytes"] <= document["capacity_bytes"])
    assert 0 < document["mfu"] < 1


def test_each_change_is_an_override_that_explains_to_what_was_promised(capsys):
    arguments = (LLAMA, "--gpus", "64", "--layout.pp=4", "--layout.tp=2", "--layout.recompute=full")
    document = json.loads(explain(capsys, *arguments, "--json"))
    assert 0 < len(document["changes"]) <= 5 and document["growth"] is None
    for change in document["changes"]:
        after = json.loads(explain(capsys, *arguments, *change["overrides"], "--json"))
        for key in ("layout", "kernels", "step_time_s", "mfu", "peak_memory_bytes", "fits"):
            assert after[key] == change[key]
        assert change["saved_s"] == pytest.approx(document["step_time_s"] - after["step_time_s"])
        assert change["saved_bytes"] == document["peak_memory_bytes"] - after["peak_memory_bytes"]


def test_people_see_aligned_tables_a_bar_and_what_would_help(capsys):
    text = explain(capsys, LLAMA, "--gpus", "64", "--layout.pp=4", "--layout.recompute=full")
    lines = text.splitlines()
    head = {line[:14].strip(): line[14:] for line in lines[:5]}
    assert head.keys() == {"layout", "engine", "fits", "step", "bound by"}
    assert head["layout"] == "pp4·dp16 mb1 1f1b zero1 recompute=full on 64 x a100-80g-sxm"
    assert head["engine"].startswith("dtlayout, ") and head["fits"].startswith("yes: ")
    assert head["bound by"].endswith("of the step")
    interleaved = ("--layout.schedule=interleaved-1f1b", "--layout.virtual_stages=7")
    fuller = explain(capsys, LLAMA, "--gpus", "64", "--layout.pp=2", "--layout.micro_batch=2", *interleaved)
    assert "\nfits          yes, if the prediction holds: 58.3" in fuller, "a peak of its range is beyond the GPU"
    assert all(" rows of engines that no fit had seen" in line for line in lines[5:7])
    reserved = float(lines[7].removeprefix("reserved      at most ").split()[0])
    assert reserved > float(head["fits"].split()[1])
    assert lines[7].endswith(" GiB by PyTorch's allocator, with fragments that it cannot use")
    assert lines[8].startswith("assumed of dtlayout: precision.reduce bfloat16, overlap_dp true, ")
    table = lines[10:15]
    assert table[0].split()[2:] == [*(field.name for field in fields(MemoryEstimate)), "total"]
    assert len({len(line) for line in table}) == 1
    assert [line.split()[1] for line in table[1:]] == ["0", "1", "2", "3"]
    assert lines[16].count("|") == 1 and "% of " in lines[16]
    assert any(line.startswith("change ") for line in lines)
    assert "--layout.recompute=none" in text


def test_messages_of_the_steps_rank_are_a_table_of_what_the_document_has(capsys):
    arguments = (LLAMA, "--gpus", "64", "--layout.pp=2", "--layout.tp=4")
    text, document = explain(capsys, *arguments), json.loads(explain(capsys, *arguments, "--json"))
    rank, lines = document["step_rank"], text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"sent by rank {rank}  "))
    messages = document["messages"][rank]
    assert lines[at + 1 + len(messages)] == LINKS and [each["axis"] for each in messages] == ["tp", "pp", "dp"]
    for line, each in zip(lines[at + 1 :], messages, strict=False):
        axis, near, far, sending_s, waited_s, hidden = line.split()
        assert axis == each["axis"] and float(near) == pytest.approx(each["fast_link_bytes"] / 1e9, abs=1e-3)
        assert float(far) == pytest.approx(each["network_bytes"] / 1e9, abs=1e-3)
        assert float(sending_s) == pytest.approx(each["sending_s"], abs=1e-4)
        assert float(waited_s) == pytest.approx(each["waited_s"], abs=1e-4)
        assert hidden == f"{each['hidden_share']:.0%}"
    assert len(document["messages"]) == 2 and messages[0]["waited_s"] == pytest.approx(document["time_s"]["tp"])
    alone = explain(capsys, LLAMA, "--gpus", "1", "--layout.dp_shard=1")
    assert "sent by rank" not in alone


def test_a_bar_beyond_the_capacity_goes_on_behind_it(capsys):
    text = explain(capsys, LLAMA, "--gpus", "1")
    bar = next(line for line in text.splitlines() if line.startswith("rank 0  p")).split()[2]
    inside, _, outside = bar.partition("|")
    assert "." not in inside and len(outside) > len(inside)
    assert "no: " in text and "if it did fit" in text and "bound by      memory: optimizer, " in text


def test_where_the_hosts_memory_helps_it_is_offered_and_described(capsys):
    assert "--layout.offload=optimizer  " in explain(capsys, LLAMA, "--gpus", "1")
    text = explain(capsys, LLAMA, "--gpus", "1", "--layout.offload=optimizer")
    found = re.search(
        r"^on the host +([\d.]+) GiB of [\d.]+ GiB a GPU; copies take ([\d.]+) s of a step, of which ", text, re.M
    )
    assert float(found[1]) > 190 and float(found[2]) > 1
    document = json.loads(explain(capsys, LLAMA, "--gpus", "1", "--layout.offload=optimizer", "--json"))
    assert document["fits"] and document["waited_s"] < document["copied_s"]
    assert document["host_memory_bytes"] == [pytest.approx(float(found[1]) * 2**30, rel=1e-3)]


DISK = """
gpu = "a100-80g-sxm"
gpus = 1

[host_memory]
value = 8_589_934_592
unit = "byte"
source = "64 GiB in a server of 8 GPUs"

[disk_bandwidth]
value = 6e9
unit = "byte/s"
source = "two NVMe drives"
"""


def test_where_the_disk_alone_helps_it_is_offered_and_described(capsys, tmp_path):
    """The host has 57.6 GiB to give, of which gradients take 52; state in its memory would take 208."""
    (tmp_path / "lab.toml").write_text(DISK)
    options = (LLAMA, "--gpus", "1", f"--cluster.file={tmp_path / 'lab.toml'}")
    text = explain(capsys, *options)
    assert "--layout.offload=disk --layout.offload_folder=FOLDER  " in text
    assert "--layout.offload=optimizer" not in text and "on its disk" not in text
    on_disk = (*options, "--layout.offload=disk", f"--layout.offload_folder={tmp_path}")
    found = re.search(
        r"^on its disk +([\d.]+) GiB a GPU, read and written ([\d.]+) s of a step$", explain(capsys, *on_disk), re.M
    )
    document = json.loads(explain(capsys, *on_disk, "--json"))
    assert document["fits"] and document["disk_bytes"] == [pytest.approx(float(found[1]) * 2**30, rel=1e-3)]
    assert document["on_disk_s"] == pytest.approx(float(found[2]), abs=1e-3)
    # An update reads and writes all; ZeRO-1 reads masters, a third, once more.
    assert document["on_disk_s"] == pytest.approx((2 + 1 / 3) * document["disk_bytes"][0] / 6e9, rel=1e-3)
    unknown = explain(capsys, LLAMA, "--gpus", "1", "--gpu", "a100-80g-pcie")
    assert "layout.offload=disk is not tried: no disk_bandwidth is known of a100-80g-pcie; give one in" in unknown


def test_where_nothing_single_fits_the_component_and_the_gpus_are_named(capsys):
    """On cards, of whose server nothing is known."""
    text = explain(capsys, LLAMA, "--gpus", "1", "--gpu", "a100-80g-pcie")
    assert "no single change fits; the largest component is optimizer, " in text
    assert " GPUs would do, as " in text
    document = json.loads(explain(capsys, LLAMA, "--gpus", "1", "--gpu", "a100-80g-pcie", "--json"))
    assert document["changes"] == [] and not document["fits"]
    assert document["growth"]["fits"] and f"{document['growth']['gpus']} GPUs would do" in text
    hopeless = explain(
        capsys, LLAMA, "--gpus", "1", "--gpu", "a100-80g-pcie", "--batch.global_batch=1", "--model.hidden_size=655360"
    )
    assert "no number of GPUs that was tried fits either; take a smaller" in hopeless


def test_a_layout_that_nothing_improves_says_so(files, capsys):
    arguments = (str(files.config), "--gpu", "h100-80g-sxm", "--precision.compute=bfloat16", "--layout.micro_batch=8")
    arguments += ("--kernels.compile=blocks",)
    assert "no single change is predicted to be faster" in explain(capsys, *arguments)


def test_a_host_that_starts_kernels_too_slowly_is_what_binds_a_step(files, capsys):
    arguments = (str(files.config), "--gpu", "h100-80g-sxm", "--precision.compute=bfloat16")
    text = explain(capsys, *arguments, "--kernels.compile=none")
    assert re.search(r"^bound by +host: the GPUs wait for it, [\d.]+% of the step$", text, re.M)
    document = json.loads(explain(capsys, *arguments, "--kernels.compile=none", "--json"))
    assert document["limit"]["component"] == "host"
    assert ["--kernels.compile=blocks"] in [change["overrides"] for change in document["changes"]]
    large = json.loads(explain(capsys, LLAMA, "--gpus", "64", "--kernels.compile=none", "--json"))
    assert (large["limit"]["component"], large["time_s"]["host"]) == ("compute", 0)


def test_the_cpu_has_no_mfu(files, capsys):
    assert "MFU n/a" in explain(capsys, str(files.config), "--gpu", "cpu")
    assert json.loads(explain(capsys, str(files.config), "--gpu", "cpu", "--json"))["mfu"] is None


def test_another_engine_is_explained_by_its_own_habits_and_kernels(capsys):
    own = json.loads(explain(capsys, LLAMA, "--world", "64", "--json"))
    other = json.loads(
        explain(capsys, LLAMA, "--world", "64", "--engine", "megatron", "--kernels.attention=flash1", "--json")
    )
    assert other["engine"] == "megatron"
    assert own["memory_bytes"] != other["memory_bytes"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "cluster.gpu='auto' is the GPU of a run, and nothing runs here; give --gpu with one of cpu, a10-24g"),
        (("--gpu", "voodoo2"), "GPU type 'voodoo2' is unknown; use one of "),
        (("--gpu", "cpu", "--engine", "steam"), "engine 'steam' is unknown; use one of "),
        (("--gpu", "cpu", "--world", "4", "--layout.tp=3"), "world size 4 does not fit the layout"),
        (
            ("--gpu", "cpu", "--engine", "megatron", "--layout.cp=3", "--precision.compute=bfloat16"),
            "2 * cp = 6 does not divide seq_len=16",
        ),
        (
            ("--gpu", "cpu", "--engine", "megatron"),
            "precision.compute=float32 is nothing that megatron has; use precision.compute=bfloat16",
        ),
        (
            ("--gpu", "cpu", "--engine", "nanotron", "--precision.compute=bfloat16", "--precision.reduce=bfloat16"),
            "precision.reduce=bfloat16 is nothing that nanotron has; use precision.reduce=float32",
        ),
        (
            (
                "--gpu",
                "cpu",
                "--engine",
                "nanotron",
                "--precision.compute=bfloat16",
                *(f"--model.experts.{name}=2" for name in EXPERTS),
            ),
            "model.experts: nanotron has no mixture of experts; use a model without, or another engine",
        ),
        (
            ("--gpu", "cpu", *(f"--model.experts.{name}=2" for name in EXPERTS), "--model.experts.bias=true"),
            "model.experts.bias=true can be predicted, not trained; use experts.bias=false",
        ),
        (
            ("--gpu", "cpu", *(f"--model.latent_attention.{name}=2" for name in LATENT)),
            "model.latent_attention can be predicted, not trained; use a model without",
        ),
        (
            ("--gpu", "cpu", "--model.window=8"),
            "model.window=8 can be predicted, not trained; use window=0",
        ),
        (
            ("--gpu", "h100-80g-sxm", "--kernels.attention=sdpa-flash"),
            "kernels.attention=sdpa-flash does not compute in precision.compute=float32",
        ),
    ],
)
def test_what_cannot_be_explained_is_refused_with_what_works(files, capsys, arguments, problem):
    assert main(["explain", str(files.config), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(problem)


def test_the_example_works_and_imports_nothing_heavy():
    code = (
        "import sys; from dtlayout.cli import main; code = main(sys.argv[1:]);"
        "print(sorted({'torch', 'datasets', 'tokenizers', 'rich'} & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *shlex.split(EXAMPLE)[1:]],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "[]"


def test_auto_is_explained_as_the_kernels_that_it_stands_for(files, capsys):
    arguments = (str(files.config), "--gpu", "h100-80g-sxm", "--precision.compute=bfloat16", "--json")
    document = json.loads(explain(capsys, *arguments))
    assert (document["kernels"]["attention"], document["kernels"]["compile"]) == ("sdpa-cudnn", "blocks")
    named = (f"--kernels.{name}={show_value(value)}" for name, value in document["kernels"].items())
    assert document == json.loads(explain(capsys, *arguments, *named))
    other = json.loads(explain(capsys, *arguments, "--engine", "torchtitan"))
    assert (other["kernels"]["attention"], other["kernels"]["compile"]) == ("sdpa-flash", "none")


def test_a_format_that_the_gpu_lacks_is_refused_and_never_takes_for_ever(capsys):
    for gpu, name, able in (("a100-80g-sxm", "fp8-tensorwise", ""), ("h100-80g-sxm", "nvfp4", " or fp8-tensorwise")):
        arguments = ("--gpu", gpu, "--engine", "megatron", f"--precision.matmuls={name}", "--world", "64")
        assert main(["explain", str(LLAMA), *arguments]) == 2
        problem = f"precision.matmuls={name} is no format that {gpu} multiplies in; use precision.matmuls=compute{able}"
        assert capsys.readouterr().err == f"{problem}\n"


def test_a_format_that_is_asked_for_counts_for_megatron_too(capsys):
    arguments = (LLAMA, "--gpus", "64", "--layout.pp=4", "--engine", "megatron", "--json")
    peaks = [
        json.loads(explain(capsys, *arguments, f"--precision.reduce={reduce}"))["peak_memory_bytes"]
        for reduce in ("bfloat16", "float32")
    ]
    own = json.loads(explain(capsys, *arguments))  # the config asks for bf16
    assert own["peak_memory_bytes"] == peaks[0] < peaks[1]


def test_the_studys_own_config_is_explained_for_the_studys_program(capsys):
    arguments = (LLAMA, "--gpus", "64", "--layout.pp=4", "--engine", "aa-scaling", "--json")
    kept = json.loads(explain(capsys, *arguments))  # it keeps gradients in bf16, as its config says
    assert (
        kept["peak_memory_bytes"]
        == json.loads(explain(capsys, *arguments, "--precision.reduce=bfloat16"))["peak_memory_bytes"]
    )
    assert main(["explain", *map(str, arguments), "--precision.reduce=float32"]) == 2
    assert (
        "precision.reduce=float32 is nothing that aa-scaling has; use precision.reduce=bfloat16"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("verb", ["explain", "compare", "timeline", "check", "dryrun"])
def test_two_numbers_of_ranks_are_refused(files, capsys, verb):
    others = ["tp=2"] * (verb == "compare")
    with pytest.raises(SystemExit) as ended:
        main([verb, str(files.config), *others, "--gpus", "64", "--world", "8"])
    assert ended.value.code == 2
    problem = "--world and --gpus mean one number, and here are 64 and 8: say one of them, once"
    assert capsys.readouterr().err.endswith(f"{problem}\n")


def test_a_mask_that_an_engine_does_not_know_is_named(capsys):
    arguments = (LLAMA, "--gpus", "64", "--layout.pp=4", "--engine", "megatron", "--data.document_mask=true")
    assert main(["explain", *arguments]) == 0
    assert capsys.readouterr().err == "note: data.document_mask changes nothing that is predicted for megatron\n"


@pytest.mark.parametrize("verb", ["explain", "compare", "timeline", "sweep", "dryrun"])
def test_a_cpu_that_nobody_calibrated_has_no_step_time(capsys, tmp_path, verb):
    debug, machine = str(ROOT / "configs" / "debug.toml"), ["--gpu", "cpu", "--gpus", "4"]
    sweep = tmp_path / "sweep.toml"
    sweep.write_text(
        f'config = "{debug}"\nworld = 4\noverrides = ["--train.device=cpu"]\n[axes.layout]\nmicro_batch = [1, 2]\n'
    )
    arguments = {
        "compare": [debug, "micro_batch=1", *machine], "sweep": [str(sweep), "--list"],
        "dryrun": [debug, *machine, "--compare", "--ranks", "0,3"],
    }.get(verb, [debug, *machine])  # fmt: skip
    assert main([verb, *arguments, "--json"]) == 0
    seconds = list(find_seconds(json.loads(capsys.readouterr().out)))
    assert seconds and not [name for name, value in seconds if value is not None]
    assert main([verb, *arguments]) == 0
    assert not re.search(r"\d (s|ms)\b", capsys.readouterr().out)


def find_seconds(document):
    """Each predicted time of a document, by name."""
    names = {"step_time_s", "pipeline_s", "step_time_range_s", "time_s", "tokens_per_s_per_gpu", "predicted", "dry"}
    for name, value in document.items() if isinstance(document, dict) else enumerate(document):
        if name in names and not (isinstance(value, dict) and "calibrated" in value) and name != "measured":
            yield name, value
        elif isinstance(value, dict | list) and name not in ("compared_bytes", "run"):
            yield from find_seconds(value)
