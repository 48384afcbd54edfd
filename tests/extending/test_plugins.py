"""DTLAYOUT_PLUGINS: modules that are imported wherever dtlayout is."""

import os
import subprocess
import sys

from tiny import ROOT

PROGRAM = """
import sys
import dtlayout
from dtlayout.models.families import FAMILIES
from dtlayout.spec.optimizers import OPTIMIZERS
print(*(name for name, family in FAMILIES.items() if not family.untrained), *OPTIMIZERS, "torch" in sys.modules)
"""


def run(plugins: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DTLAYOUT_PLUGINS": plugins, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_what_they_register_is_there_without_torch():
    done = run("tests.extending.plugins.lion, tests.extending.plugins.internlm, tests.extending.plugins.my_observer,")
    trained = {"llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "dots1", "mistral", "internlm"}
    families, others = (words := done.stdout.split())[: len(trained)], words[len(trained) :]
    assert (set(families), others) == (trained, ["adamw", "sgd", "muon", "lion", "False"]), done.stderr


def test_one_that_is_not_there_ends_the_process_with_the_variables_name():
    done = run("no_such_plugin")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: DTLAYOUT_PLUGINS names 'no_such_plugin': No module named 'no_such_plugin'; install it, put its "
        "folder into PYTHONPATH, or unset the variable"
    )
