"""The dtlayout command: answers on stdout, refusals with exit code 2, one JSON document where a program reads."""

import gzip
import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tiny import ROOT, TinyFiles, write_tiny

from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.commands.overview import STAGES
from dtlayout.config.loading import load_config
from dtlayout.plans.plan import make_plan

COMMANDS = ("check", "compare", "config", "explain", "prepare", "recommend", "sweep")
"""Those whose example takes a moment and no measured rows."""


@pytest.fixture
def files(tmp_path: Path) -> TinyFiles:
    return write_tiny(tmp_path)


def test_the_versions_are_those_that_are_installed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"dtlayout {version('dtlayout')}, torch {version('torch')}\n"


def test_check_says_what_a_legal_config_would_do(files, capsys):
    assert main(["check", str(files.config), "--world", "8", "--layout.tp=2", "--layout.pp=2"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert [line.split(maxsplit=1) for line in printed.out.replace("tokens a step", "tokens").splitlines()] == [
        ["layout", "pp2·dp2·tp2+sp mb2 1f1b zero1 on 8 ranks"],
        ["model", "tiny, 51,744 parameters"],
        ["stages", "blocks 2, 2"],
        ["microbatches", "2 of 2 on each of 2 dp ranks"],
        ["tokens", "128"],
        ["memory", "not predicted: nobody names a GPU type, with --gpu or as cluster.gpu"],
        ["data", "not checked here: --data looks for them"],
        ["kernels", "those that are auto depend on the run's GPU: name it with --gpu, or as cluster.gpu"],
    ]


def test_check_takes_the_fewest_ranks_without_a_world(files, capsys):
    assert main(["check", str(files.config), "--layout.tp=2", "--layout.pp=2"]) == 0
    assert "on 4 ranks" in capsys.readouterr().out


def test_check_refuses_with_every_problem_on_a_line_of_stderr(files, capsys):
    assert main(["check", str(files.config), "--world", "8", "--layout.tp=3", "--layout.pp=5"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert lines[0].startswith("world size 8 does not fit the layout")
    assert [line.partition(" ")[0] for line in lines[1:]].count("tp=3") == len(lines) - 3
    assert any(line.startswith("pp=5") for line in lines)


def test_check_refuses_a_config_that_cannot_be_read(tmp_path, capsys):
    assert main(["check", str(tmp_path / "none.toml")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"config {tmp_path / 'none.toml'} cannot be read: No such file or directory\n"


def test_json_is_one_document_with_the_layout_that_fits(files, capsys):
    assert main(["check", str(files.config), "--json", "--world", "4", "--layout.tp=2", "--plan"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert printed.err == ""
    assert document.keys() == {
        "ok", "world_size", "layout", "kernels", "predicted_peak_memory_bytes", "chosen", "notes"
    }  # fmt: skip
    assert document["predicted_peak_memory_bytes"] is None
    assert (document["ok"], document["world_size"], document["notes"]) == (True, 4, [])
    assert (document["layout"]["tp"], document["layout"]["dp_shard"]) == (2, 2)


@pytest.mark.parametrize(
    ("gpu", "said", "compile"),
    [
        ("cpu", "compile none: a CPU gains little", "none"),
        ("h100-80g-sxm", "attention sdpa-cudnn: the fastest of PyTorch's on Hopper and Blackwell", "blocks"),
        ("auto", "those that are auto depend on the run's GPU: name it with --gpu, or as cluster.gpu", "auto"),
    ],
)
def test_check_says_what_auto_is_on_the_device_that_is_named(files, capsys, gpu, said, compile):
    arguments = ["check", str(files.config), f"--cluster.gpu={gpu}", "--train.device=auto"]
    arguments += ["--precision.compute=bfloat16"]
    assert main(arguments) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["kernels", said] in lines
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kernels"]["compile"] == compile
    if gpu != "auto":
        elsewhere = ["--cluster.gpu=v100-32g-sxm", "--train.device=cpu"]
        assert main([*arguments, *elsewhere, "--json", "--gpu", gpu]) == 0
        assert json.loads(capsys.readouterr().out) == document
    assert document["chosen"] == ([] if gpu == "auto" else [line for key, line in lines if key == "kernels"])


def test_json_is_one_document_with_the_problems_of_a_refusal(files, capsys):
    assert main(["check", str(files.config), "--world", "4", "--layout.tp=3", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document.keys() == {"ok", "problems"}
    assert document["ok"] is False
    assert len(document["problems"]) == 5
    assert all("\n" not in problem for problem in document["problems"])


def test_plan_prints_what_happens_to_which_module(files, capsys):
    assert main(["check", str(files.config), "--layout.tp=2", "--plan"]) == 0
    with_plan = capsys.readouterr().out
    assert main(["check", str(files.config), "--layout.tp=2"]) == 0
    without = capsys.readouterr().out
    config = load_config(files.config, ["--layout.tp=2"])
    layout = config.layout.resolve(2)
    plan = make_plan(config.model, layout, config.choose_kernels(config.device, layout).kernels, config.precision)
    assert with_plan == f"{without}\n{plan}\n"


@pytest.mark.parametrize(
    ("overrides", "world_size", "notes"),
    [
        (["--layout.tp=2", "--cluster.gpus_per_node=2"], 4, []),
        (
            ["--layout.tp=4", "--cluster.gpus_per_node=2"],
            4,
            ["tp=4 crosses nodes of 2 GPUs, and tp talks most; keep tp <= 2"],
        ),
        (["--layout.tp=4", "--cluster.gpus_per_node=2", "--cluster.gpu=gb200", "--train.device=cuda"], 4, []),
        (["--layout.zero=3"], 2, []),
        (
            ["--layout.zero=3", "--layout.tp=2"],
            2,
            ["zero=3 shards nothing at dp_shard=1, and frees only the copies that are computed with"],
        ),
        (["--layout.zero=2"], 1, ["zero=2 shards nothing at dp_shard=1"]),
        (["--layout.zero=2", "--layout.cp=2"], 2, []),
    ],
)
def test_what_is_legal_but_hardly_meant_is_noted(files, capsys, overrides, world_size, notes):
    arguments = ["check", str(files.config), "--world", str(world_size), *overrides]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == notes
    assert main(arguments) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")] == [
        f"note: {note}" for note in notes
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--kernels.attention=fa3"], "kernels.attention=fa3 runs on compute capability 9, and this GPU has 8.0; use"),
        (
            ["--precision.compute=float32", "--kernels.attention=sdpa-flash"],
            "sdpa-flash does not compute in precision.compute=float32 on CUDA; use",
        ),
        (["--world", "4"], "layout dp4 mb1 zero1 is predicted to need "),
        (
            ["--cluster.gpu=cpu", "--kernels.norm=liger"],
            "kernels.norm=liger runs on CUDA alone; use kernels.norm=fused",
        ),
        (
            ["--train.device=cpu", "--kernels.norm=liger"],
            "kernels.norm=liger runs on CUDA alone; use kernels.norm=fused",
        ),
    ],
)
def test_what_the_gpu_that_a_config_names_cannot_run_is_refused_before_there_is_one(capsys, arguments, problem):
    assert main(["check", str(ROOT / "configs" / "llama-13b-64xa100.toml"), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


def test_a_package_that_is_not_here_is_noted_since_the_run_may_be_elsewhere(capsys, monkeypatch):
    monkeypatch.setattr("dtlayout.spec.kernel_table.find_spec", lambda module: None)
    arguments = [str(ROOT / "configs" / "llama-13b-64xa100.toml"), "--data.tokenizer=bytes"]
    assert main(["check", *arguments, "--world", "64", "--kernels.attention=flash-attn", "--json"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert note.startswith("kernels.attention=flash-attn: no package flash_attn here; install it: ")


def test_a_tokenizer_that_is_not_here_is_noted_and_with_data_refused(files, capsys, tmp_path):
    for spec, path in (("byts", "byts"), (str(tmp_path), str(tmp_path / "tokenizer.json")), ("~no/body", "~no/body")):
        assert main(["check", str(files.config), "--world", "1", f"--data.tokenizer={spec}", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["notes"] == [
            f"data.tokenizer={spec!r}: no file {path!r} here; without it there is no run"
        ]
        assert main(["check", str(files.config), f"--data.tokenizer={spec}", "--data"]) == 2
        assert f"there is no file {path!r}" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["check", str(files.config), "--world", "1", f"--data.tokenizer={tmp_path}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []


def test_prepare_tokenizes_once_and_then_finds_it(files, capsys):
    assert main(["prepare", str(files.config), "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["sources"]
    num_bytes = files.corpus.stat().st_size
    assert document["num_tokens"] == num_bytes + 1  # and the end of the document
    assert document["num_samples"] == num_bytes // 16
    prepared = Path(document["folder"])
    assert prepared.parent == files.tokens
    written = (prepared / "tokens.bin").stat().st_mtime_ns
    assert main(["prepare", str(files.config)]) == 0
    assert capsys.readouterr().out == (
        f"{num_bytes + 1:,} tokens, {num_bytes // 16:,} samples of 16 in {document['folder']}\n"
    )
    assert (prepared / "tokens.bin").stat().st_mtime_ns == written
    assert main(["prepare", str(files.config), "--verify"]) == 0
    assert capsys.readouterr().out.endswith("\nthe checksums of 2 files are right\n")


def test_prepare_tokenizes_all_that_is_whole_and_names_each_broken_file_of_each_source(files, capsys, tmp_path):
    rows = [json.dumps({"text": f"some words {i} " * 20}) + "\n" for i in range(400)]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            (tmp_path / name / f"{i}.jsonl.gz").write_bytes(gzip.compress("".join(rows).encode()))
    packed = (tmp_path / "a" / "1.jsonl.gz").read_bytes()
    (tmp_path / "a" / "1.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "b" / "0.jsonl.gz").write_bytes(gzip.compress("".join(rows).encode()[:-20]))
    sources = ", ".join(f"{{source = '{tmp_path / name}'}}" for name in ("a", "b"))
    command = ["prepare", str(files.config), f"--data.mixture=[{sources}]"]
    assert main([*command, "--json"]) == 2
    said = capsys.readouterr()
    first, broken, second, cut = json.loads(said.out)["problems"]
    assert first.startswith("1 of 3 files of ") and second.startswith("1 of 3 files of ")
    assert "/a/1.jsonl.gz': EOFError" in broken and "broke at line 400 of " in cut and "ends inside of a row" in cut
    assert said.err.count("; going on with other files\n") == 2
    (tmp_path / "a" / "1.jsonl.gz").write_bytes(packed)
    (tmp_path / "b" / "0.jsonl.gz").write_bytes(gzip.compress("".join(rows).encode()))
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tokenized"]["num_documents"] == 2 * 400, "of files that were mended alone"
    assert [each["num_documents"] for each in document["sources"]] == [1200, 1200]


def test_prepare_says_of_each_source_what_it_holds_and_cuts(files, capsys, tmp_path):
    (tmp_path / "short.jsonl").write_text('{"text": "abc"}\n' * 2 + '{"text": ""}\n')
    sources = ", ".join(f"{{source = {str(path)!r}}}" for path in (files.corpus, tmp_path / "short.jsonl"))
    assert main(["prepare", str(files.config), f"--data.mixture=[{sources}]", "--data.samples=padded"]) == 0
    speed, corpus, note, short, filling, without = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"tokenized [\d,]+ tokens of 4 documents in [\d.]+ s, [\d,]+ tokens/s", speed)
    assert ", 1 sample of 16 in " in corpus
    assert note == (
        f"{files.corpus}, padded: 0.0% of the samples is padding; 1 of 1 document cut, 100.0%: longer than a sample"
    )
    assert short.startswith("9 tokens, 3 samples of 16 in ")
    assert filling.endswith("short.jsonl, padded: 82.4% of the samples is padding; no document is cut")
    assert without == (
        f"note: nothing is learnt from 1 sample of {tmp_path / 'short.jsonl'}, which hold no target: a document "
        "there is empty, or of one token, before which there is none"
    )


def test_prepare_in_shards_and_processes_gives_the_tokens_of_one_process(files, capsys, tmp_path):
    corpus, homes = tmp_path / "corpus", [tmp_path / name for name in ("one", "many")]
    corpus.mkdir()
    for i in range(7):
        (corpus / f"{i}.jsonl").write_text("".join(json.dumps({"text": f"{i} {j} " * j}) + "\n" for j in range(9 * i)))
    command = ["prepare", str(files.config), f"--data.source={corpus}"]
    assert main([*command, f"--data.folder={homes[0]}"]) == 0
    capsys.readouterr()
    many, said = [*command, f"--data.folder={homes[1]}", "--json"], []
    for shard in ("2/3", "3/3", "1/3"):
        assert main([*many, "--shard", shard]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert (
        sum(each["sources"][0]["files"] for each in said) == 7
        and [each["sources"][0]["of"] for each in said] == [7] * 3
    )
    assert main([*many]) == 0
    joined = json.loads(capsys.readouterr().out)
    assert joined["tokenized"]["num_documents"] == 0, "all was tokenized by shards"
    assert sum(each["tokenized"]["num_tokens"] for each in said) == joined["sources"][0]["num_tokens"]
    assert main([*many[:-1], "--shard", "1/3"]) == 0
    line, following = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"shard 1/3: \d of 7 files of .*, tokenized in " + re.escape(joined["sources"][0]["folder"]), line
    )
    assert following == "once all shards are done, dtlayout prepare without --shard joins them"
    one, other = (next(home.iterdir()) for home in homes)
    assert {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()
    }


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--shard", "0/3"], "--shard='0/3' must be I/N with I from 1 to N, such as 3/16"),
        (["--shard", "4/3"], "--shard='4/3' must be I/N"),
        (["--shard", "3"], "--shard='3' must be I/N"),
        (["--shard", "1/2", "--verify"], "--verify is for tokens that are whole"),
        (["--shard", "1/2", "--data.max_tokens=9"], "data.max_tokens=9 counts tokens from the first file on"),
        (["--shard", "1/2", "--data.source=owner/name"], "hf download --repo-type dataset owner/name --local-dir"),
        (["--processes", "0"], "--processes=0 must be at least 1"),
    ],
)
def test_shards_that_are_none_are_refused(files, capsys, options, problem):
    assert main(["prepare", str(files.config), *options]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("--data.source=none/*.txt", "no file matches 'none/*.txt'"),
        ("--model.vocab_size=256", "the tokenizer has 257 ids, the model's vocab_size=256"),
        ("--batch.seq_len=99_999", "one sample of seq_len=99999 needs 100000"),
        ("--data.max_tokens=-1", "max_tokens=-1 must not be negative"),
    ],
)
def test_prepare_refuses_data_that_cannot_be_trained_on(files, capsys, override, problem):
    assert main(["prepare", str(files.config), override, "--json"]) == 2
    (line,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem in line


@pytest.mark.parametrize("arguments", [["--wrold", "8"], ["--layout.tp", "2"], ["--wrold=8"], ["-x"]])
def test_an_unknown_argument_is_refused_by_name(files, capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(["check", str(files.config), *arguments])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "unrecognized arguments: " in printed.err and arguments[-1] in printed.err
    is_near = arguments[0].startswith("--wrold")
    assert ("did you mean --world?" in printed.err) == is_near
    assert ("an override is written --section.key=value" in printed.err) == (not is_near)


def test_a_second_config_is_no_override(files, capsys):
    assert main(["check", str(files.config), "other.toml"]) == 2
    assert capsys.readouterr().err.startswith("'other.toml' is not an override")


def test_the_help_lists_the_commands_and_each_has_a_help_with_an_example_that_works(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    listed = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n    {command}" in listed
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
        example = capsys.readouterr().out.partition("example: dtlayout ")[2]
        is_of_config = "configs/" in example and command != "sweep"
        overrides = [f"--data.folder={tmp_path}", "--data.max_tokens=9999"] if is_of_config else []
        assert main([*shlex.split(example), *overrides]) == 0
        capsys.readouterr()


def test_an_unknown_command_is_refused(capsys):
    assert main(["recommned"]) == 2
    assert capsys.readouterr().err == "recommned is unknown; did you mean recommend?\n"
    assert main(["xyz"]) == 2
    assert capsys.readouterr().err.startswith("xyz is unknown; known: calibrate, recommend, ")


def test_without_a_command_all_are_shown_in_the_order_of_the_work_with_one_to_start_with(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    stages = [line for line in lines if line in STAGES]
    asked = ["What do I have?", "Which layout?", "Does it fit?", "Train", "Measure", "Learn", "This command line"]
    assert stages == list(STAGES) == asked
    modules = {path.stem for path in (ROOT / "dtlayout" / "commands").glob("*.py") if "EXAMPLE = " in path.read_text()}
    assert {line.split()[0] for line in lines if line.startswith("  ")} - {"torchrun"} == modules
    assert any(line.startswith("Start with: dtlayout recommend --model ") for line in lines)


@pytest.mark.parametrize("command", ["check", "explain"])
def test_a_plan_needs_no_training(files, capsys, tmp_path, command):
    plan = tmp_path / "plan.toml"
    plan.write_text(files.config.read_text().partition("[train]")[0] + '[cluster]\ngpu = "cpu"\n')
    assert main([command, str(plan), "--optimizer.warmup_steps=10"]) == 0
    said = capsys.readouterr().out
    assert ("note: train.steps is missing: this can be predicted" in said) == (command == "check")
    with pytest.raises(InvalidConfig, match=r"train\.steps is missing"):
        load_config(plan)
    plan.write_text(f"train = 3\n{plan.read_text()}")
    assert main([command, str(plan)]) == 2
    assert "train is a table" in capsys.readouterr().err


def test_check_says_what_memory_is_needed(capsys):
    config, bytes_of = str(ROOT / "configs" / "llama-13b-64xa100.toml"), "predicted_peak_memory_bytes"
    assert main(["check", config, "--world", "64"]) == 0
    assert re.search(
        r"memory +predicted peak 68\.7 GiB \(.* to .*\) on pipeline rank 0 of 77\.3 GiB\n", capsys.readouterr().out
    )
    assert main(["check", config, "--world", "64", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)[bytes_of]
    assert main(["check", config, "--world", "64", "--json", "--layout.zero=3"]) == 0
    assert json.loads(capsys.readouterr().out)[bytes_of] < whole
    assert main(["check", config]) == 0  # on one GPU, where it cannot fit
    printed = capsys.readouterr().out
    assert ": it does not fit\n" in printed
    assert "note: this is for 1 rank, the fewest that the layout needs: --world says how many there are\n" in printed


def test_checking_imports_nothing_heavy_and_refuses_without_a_traceback(files):
    code = (
        "import sys; from dtlayout.cli import main; code = main(sys.argv[1:]);"
        "print(sorted({'torch', 'datasets', 'tokenizers', 'rich'} & set(sys.modules))); sys.exit(code)"
    )
    for arguments, exit_code, printed in ((["--world", "4"], 0, ""), (["--layout.tp=3"], 2, "tp=3 does not divide")):
        done = subprocess.run(
            [sys.executable, "-c", code, "check", str(files.config), *arguments, "--plan"],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == exit_code
        assert done.stdout.splitlines()[-1] == "[]"
        assert done.stderr.startswith(printed) and "Traceback" not in done.stderr


@pytest.mark.parametrize("world_size", ["0", "-1"])
def test_a_world_without_ranks_is_refused_with_one_that_has_some(files, capsys, world_size):
    assert main(["check", str(files.config), "--world", world_size]) == 2
    assert "start 0" not in capsys.readouterr().err
