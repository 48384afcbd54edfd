"""Another layout in the names of a tree whose program is Megatron-LM beneath: little changes, and it is read back."""

import argparse
from pathlib import Path

import pytest

from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.commands.case import Case, find_other, read_case
from dtlayout.commands.their_file import TheirFile
from dtlayout.planner.explain import explain
from dtlayout.programs.files.trees import read_tree

FOLDER = Path(__file__).parent
FILES = [
    "bridge/saved.yaml", "nemo2/recipe.yaml", "nemo/llama.yaml", "nemo/experts.yaml", "nemo/fsdp.yaml",
    "flagscale/llama/train/70b.yaml", "flagscale/qwen/train/30b_a3b.yaml",
]  # fmt: skip


def ask(path: Path) -> tuple[TheirFile, Case]:
    options = argparse.Namespace(gpu="h100-80g-sxm", engine="dtlayout", engine_set=[], given=[], world=None)
    found = find_other(path, options)
    assert found is not None
    return TheirFile(found, path, [], options), read_case(path, [], options)


@pytest.mark.parametrize("name", FILES)
def test_each_change_of_a_tree_is_read_back_and_changes_little(name):
    path = FOLDER / name
    file, case = ask(path)
    changes = [each.estimate for each in explain(*case).changes]
    assert changes
    patches = 0
    for wanted in changes:
        try:
            patch = file.find_patch(case, wanted)  # which has read it back
        except InvalidConfig as error:
            assert "cannot be changed by these alone" in str(error) or "no option of" in str(error)
            continue
        patches += 1
        before, after = (read_tree(text, {}).values for text in (path.read_text(), patch.text))
        differ = {key for key in {*before, *after} if before.get(key) != after.get(key)}
        assert differ <= {*patch.changes}, differ - {*patch.changes}
        assert not any(key.startswith("--") for key in patch.changes)
    assert patches >= len(changes) / 2


def test_explain_writes_the_changed_file(tmp_path, capsys):
    path, changed = str(FOLDER / "bridge/saved.yaml"), tmp_path / "changed.yaml"
    asked = ["--gpu", "h100-80g-sxm", "--patch", str(changed), "--take", "best"]
    assert main(["explain", path, *asked]) == 0
    said = capsys.readouterr().out
    assert f"as changes of {path}:" in said and "train.micro_batch_size" in said
    assert main(["explain", str(changed), "--gpu", "h100-80g-sxm"]) == 0
