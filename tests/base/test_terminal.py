"""What is printed: no escape sequence of a name or a file, any encoding, streams that are full or closed, Ctrl-C."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from tiny import ROOT, write_tiny

from dtlayout import cli
from dtlayout.base import terminal
from dtlayout.base.interpreter import run_code, run_module
from dtlayout.base.terminal import clean, guarded, open_console
from dtlayout.cli import main

ATTACKS = ("\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\x07", "\x08\x08", "\r", "\x1bP+q\x1b\\", "\u202e", "\x7f")
SIZES = ("--seq-len", "4096", "--global-batch", "1024")
BAD = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@given(st.text())
def test_no_control_character_is_left_and_all_else_stays(text):
    cleaned = clean(text)
    assert not [each for each in cleaned if unicodedata.category(each) == "Cc" and each not in "\t\n"]
    assert not BAD.search(cleaned) and clean(cleaned) == cleaned
    assert cleaned.count("\n") == text.count("\n")
    if text.isascii() and text.isprintable():
        assert cleaned == text


@given(st.text(), st.sampled_from(["latin-1", "ascii", "cp1252", "utf-8", "utf-16"]))
def test_every_encoding_takes_every_letter(text, encoding):
    raw = io.BytesIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, newline=""))
        with guarded(is_answer=True):
            print(text, end="")
            sys.stdout.flush()
        said = raw.getvalue().decode(encoding)
    assert len(said) >= len(clean(text)) and (said == clean(text) or encoding != "utf-8" or not text.isprintable())


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("is_json", [False, True])
def test_names_paths_and_files_reach_no_terminal_as_they_are(tmp_path, capsys, attack, is_json):
    config = write_tiny(tmp_path).config
    named = config.with_name("name.toml")
    named.write_text(config.read_text().replace('name = "tiny"', f"name = {json.dumps('tiny' + attack)}"))
    more = ["--json"] * is_json
    assert main(["check", str(named), *more]) == 0  # the model's name
    refusals = (
        [f"x{attack}"], ["check", f"none{attack}.toml"], ["check", str(config), f"--layout.schedule=x{attack}"],
        ["check", str(config), f"--a.b{attack}=1"], ["report", str(tmp_path / f"none{attack}")],
        ["check", str(config), "--data", f"--data.source=none{attack}/*.txt"],
        ["recommend", "--model", f"m{attack}", "--gpu", "h100-80g-sxm", "--gpus", "8", *SIZES],
        ["generate", f"none{attack}"], ["plot", f"none{attack}"], ["convert", f"none{attack}", "to"],
    )  # fmt: skip
    for arguments in refusals:
        assert main([*arguments, *more]) == 2, arguments
    with pytest.raises(SystemExit):
        main(["check", str(config), f"--unknown{attack}", *more])
    printed = capsys.readouterr()
    assert not BAD.search(printed.out) and not BAD.search(printed.err)
    assert bool(printed.err) != is_json


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_drawn_has_the_sequences_of_the_console_alone(monkeypatch, attack):
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    console = open_console(stderr=True, width=60, force_terminal=True, color_system=None)
    table = Table(title=f"title{attack}")
    table.add_column(f"column{attack}")
    table.add_row(f"cell{attack}")
    console.print(f"line{attack}", markup=False, soft_wrap=True)
    console.print(table)
    assert not BAD.search(written.getvalue()) and "line" in written.getvalue()


USAGE_ERRORS = (
    ["check", "--nonsense"], ["check"], ["recommend", "--gpus", "many"], ["recommend", "--top"], ["xyz"],
    ["--nonsense"], [], ["plot", "--unknown", "x"], ["data", "hide", "x"], ["generate"], ["sweep"],
    ["validate", "--engine"],
)  # fmt: skip


@pytest.mark.parametrize("arguments", USAGE_ERRORS)
def test_errors_of_usage_are_one_document_too(capsys, arguments):
    try:
        exit_code = main([*arguments, "--json"])
    except SystemExit as ended:
        exit_code = ended.code
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert (exit_code, document["ok"], printed.err) == (2, False, "")
    assert document["problems"] and all(document["problems"])


def test_of_several_ranks_one_prints_the_document(capsys, monkeypatch, tmp_path):
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert main(["check", str(tmp_path / "none"), "--json"]) == 2
        assert bool(capsys.readouterr().out) == (rank == 0)


def start(arguments, environment=None, **streams):
    """The command in a process of its own."""
    return subprocess.Popen(
        run_module("dtlayout.cli", *arguments),
        env={**os.environ, "PYTHONUNBUFFERED": "", **(environment or {})},
        **streams,
    )


ANSWERS = (["config"], ["check", "--help"], ["check", "none.toml", "--json"])


def code_of(arguments):
    return 2 if "none.toml" in arguments else 0


@pytest.mark.parametrize("arguments", ANSWERS)
def test_a_full_disk_is_said_in_a_line(arguments):
    with open("/dev/full", "w") as full:
        ended = start(arguments, stdout=full, stderr=subprocess.PIPE, text=True)
        said = ended.communicate(timeout=60)[1]
    assert ended.returncode == 2
    if not code_of(arguments):
        assert said == "the answer cannot be written to stdout: No space left on device\n"
    assert "Traceback" not in said and "Exception ignored" not in said


@pytest.mark.parametrize("arguments", [*ANSWERS, ["check", "none.toml"], ["check", "--nonsense"]])
@pytest.mark.parametrize("closed", ["stdout", "stderr", "both"])
def test_a_closed_pipe_changes_no_exit_code_and_says_nothing(arguments, closed):
    reading, writing = os.pipe()
    os.close(reading)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    streams |= {name: writing for name in streams if closed in (name, "both")}
    ended = start(arguments, text=True, **streams)
    said = [text or "" for text in ended.communicate(timeout=60)]
    os.close(writing)
    assert ended.returncode == (2 if "--nonsense" in arguments else code_of(arguments))
    assert not any("Traceback" in text or "Exception ignored" in text or "Broken" in text for text in said)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii:strict"])
def test_an_encoding_without_our_letters_is_no_error(encoding):
    for arguments in (["config"], ["check", "no\u2026ne\u65e5.toml"]):
        ended = start(
            arguments, {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        said = b"".join(ended.communicate(timeout=60))
        assert ended.returncode == (2 if "check" in arguments else 0) and b"Traceback" not in said
        assert said.decode(encoding.partition(":")[0])


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_ctrl_c_is_a_line_and_130_whatever_the_command(command, monkeypatch, capsys, tmp_path):
    def interrupted(_):
        raise KeyboardInterrupt

    needed = {"convert": ["a", "b"], "data": ["show", "a"], "calibrate": ["--out", "a"], "checkpoint": ["list", "a"]}
    needed |= {
        "recommend": ["--model", "a", *SIZES],
        "compare": ["a", "b"],
        "refit": ["--into", "a", "b"],
        "config": [],
        "web": [],
        "completion": ["bash"],
    }
    monkeypatch.setattr(f"dtlayout.commands.{command}.run", interrupted)
    assert main([command, *needed.get(command, ["a"])]) == 130
    assert capsys.readouterr() == ("", "stopped\n")


def test_ctrl_c_at_any_moment_of_a_search_is_a_line():
    arguments = ["recommend", "--model", "llama3.1-405b", "--gpu", "h100-80g-sxm", "--gpus", "16384", *SIZES]
    code = "from dtlayout.cli import main; print('ready', file=sys.stderr, flush=True); sys.exit(main(sys.argv[1:]))"
    codes = []
    for delay_s in (0.0, 0.2, 0.5):
        process = subprocess.Popen(
            [*run_code(code), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr.readline() == "ready\n"
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
        codes.append(process.returncode)
        assert (process.returncode, error) in ((130, "stopped\n"), (0, "")) and bool(out) == (process.returncode == 0)
    assert 130 in codes


def test_a_console_outside_a_command_is_clean_too(capsys):
    terminal.open_console().print("a\x1b[2Jb", markup=False)
    assert capsys.readouterr().out == "a\\x1b[2Jb\n"


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_training_goes_on_and_refuses_whoever_hears_it(closed):
    with open("/dev/full", "w") as full:
        for arguments, exit_code in ((["--help"], 0), (["none.toml"], 2)):
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {closed: full}
            ended = subprocess.run(run_module("dtlayout.launch", *arguments), text=True, timeout=60, **streams)
            said = (ended.stdout or "") + (ended.stderr or "")
            assert ended.returncode == exit_code and "Traceback" not in said and "Exception ignored" not in said


def test_one_module_opens_consoles_and_nobody_goes_around_it():
    around = re.compile(r"(?<!open_)\bConsole\(|sys\.__std|os\.write\([12]")
    sources = {
        path.relative_to(ROOT / "dtlayout").as_posix(): path.read_text() for path in (ROOT / "dtlayout").rglob("*.py")
    }
    assert [name for name, source in sources.items() if around.search(source)] == ["base/terminal.py"]
