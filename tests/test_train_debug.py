"""`make train` starts a legal run on any number of GPUs, and says with which overrides."""

import subprocess
from pathlib import Path

import pytest

from dtlayout.config.checking import check_layout
from dtlayout.config.loading import load_config

ROOT = Path(__file__).parents[1]


def start(tmp_path: Path, num_gpus: int) -> tuple[list[str], str]:
    """The arguments that dtlayout gets where torch sees so many GPUs, and what the script prints."""
    for name, text in (("python", f"echo {num_gpus}"), ("dtlayout", 'printf "%s\\n" "$@"')):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts" / "train_debug.sh", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("num_gpus", [0, 1, 2, 3, 4, 6, 8, 12, 16, 64])
def test_any_number_of_gpus_gets_a_legal_layout(tmp_path: Path, num_gpus: int) -> None:
    (command, config, option, ranks, *overrides), printed = start(tmp_path, num_gpus)
    assert (command, option) == ("train", "--ranks")
    assert int(ranks) == (num_gpus or 8)
    layout = check_layout(load_config(ROOT / config, overrides), int(ranks))
    assert (layout.pp, layout.tp) == ((1, 1) if num_gpus % 4 else (2, 2))
    assert all(override in printed for override in overrides)
