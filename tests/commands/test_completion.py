"""dtlayout completion: a shell that has read the code completes commands, options, names and keys."""

import shutil
import subprocess

import pytest

from dtlayout.cli import main
from dtlayout.commands.overview import COMMANDS

ASK = """
try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _dtlayout; echo "${COMPREPLY[*]}"; }
try dtlayout rec
try dtlayout recommend --gpu a100-80
try dtlayout check CONFIG.toml --layout.tp
try dtlayout recommend --layout.tp
try dtlayout train con
try dtlayout checkpoint v
"""


@pytest.fixture
def code(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", "bash"]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_names_and_keys(code):
    done = subprocess.run(["bash", "-c", code + ASK], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "recommend", "a100-80g-pcie a100-80g-sxm", "--layout.tp= --layout.tp_overlap=", "", "", "verify"
    ]  # fmt: skip
    assert done.stderr == ""


def test_every_command_is_in_the_code_and_zsh_takes_the_same_after_a_line(code, capsys):
    assert f'words="{" ".join(COMMANDS)}"' in code
    assert main(["completion", "zsh"]) == 0
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert first == "autoload -Uz bashcompinit && bashcompinit"
    assert rest.replace("complete -o nospace -o", "complete -o") == code
