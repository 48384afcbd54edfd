"""Readers: each file is taken by its own program's, none takes a config of ours or of a program that nobody reads."""

from contextlib import suppress
from pathlib import Path

import pytest
from program_jobs import LAYOUTS, job_of

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.files.trees import Tree, read_tree
from dtlayout.programs.reading import READERS
from dtlayout.programs.registry import PROGRAMS
from dtlayout.programs.understood import OtherFile

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "megatron": "Megatron-LM", "deepspeed": "DeepSpeed", "accelerate": "accelerate", "trainer": "Trainer",
    "trl": "TRL", "axolotl": "axolotl", "llama_factory": "LLaMA-Factory", "torchtitan": "torchtitan",
    "nanotron": "nanotron", "automodel": "AutoModel", "flagscale": "FlagScale", "nemo": "NeMo 1", "nemo2": "NeMo 2",
    "bridge": "Megatron-Bridge", "yaml_cfg": "--yaml-cfg",
}  # fmt: skip
"""Folder of files as people have them → part of its reader's title."""
BESIDE = {"stage3.json", "stage2.json", "fsdp.json", "sharded.yaml", "fsdp.yaml"}
"""Files that others name, which are of DeepSpeed, accelerate or nobody."""
HUGGING_FACE = ("DeepSpeed", "accelerate", "Trainer", "TRL", "axolotl", "LLaMA-Factory")


NAMED_ONCE = {"megatron_newest": "megatron"}
"""Folder of more files of a program → its first folder."""
FIXTURES = 6
"""Fewest files of each program, as people have them, that are understood field by field."""


def list_takers(path: Path, text: str) -> list[str]:
    """Titles of the readers that take a text, in their order."""
    file = OtherFile(path, text, read_tree(text, {}))
    return [each.title for each in READERS if each.is_ours(file)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_are_taken_by_their_own_programs_reader(folder):
    for path in sorted((Path(__file__).parent / folder).iterdir()):
        is_own = path.name not in BESIDE or (folder, path.name) == ("llama_factory", "sharded.yaml")
        if path.is_file() and is_own:
            assert FOLDERS[folder] in list_takers(path, path.read_text())[0], path


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.title)
def test_each_program_has_six_files_or_more(reader):
    count = 0
    for folder in (*FOLDERS, *NAMED_ONCE):
        for path in (Path(__file__).parent / folder).rglob("*"):
            if path.is_file() and path.name not in BESIDE:
                count += list_takers(path, path.read_text())[:1] == [reader.title]
    assert count >= FIXTURES


def test_configs_of_ours_are_nobodys():
    paths = [*(ROOT / "configs").rglob("*.toml"), *(ROOT / "examples").rglob("*.toml")]
    assert paths
    for path in paths:
        assert not list_takers(path, path.read_text()), path


@pytest.mark.parametrize("folder", ["deepspeed", "accelerate", "trl", "axolotl", "llama_factory"])
def test_whatever_a_value_is_a_file_is_read_or_refused(folder):
    count = 0
    for path in (Path(__file__).parent / folder).glob("*.[yj]*"):
        text = path.read_text()
        tree = read_tree(text, {})
        assert tree is not None
        for name in tree.values:
            for value in (None, True, "x", -1, ["a"]):
                changed = Tree(text, tree.language, {**tree.values, name: value})
                file = OtherFile(path, text, changed, {}, 8)
                reader = next((each for each in READERS if each.is_ours(file)), None)
                count += reader is not None
                with suppress(InvalidConfig):
                    if reader:
                        reader.read(file)
    assert count > 200


@pytest.mark.parametrize("engine", PROGRAMS)
@pytest.mark.parametrize("name", ["dp", "hsdp", "tp"])
def test_what_is_written_for_other_programs_is_not_hugging_faces(engine, name):
    model = "llama3.1-8b"
    text = "\n".join(PROGRAMS[engine].write(job_of(engine, LAYOUTS[name], model=model)).lines)
    taken = list_takers(Path("job"), text)
    assert not [title for title in taken for each in HUGGING_FACE if each in title], taken


@pytest.mark.parametrize("text", [
    "trainer:\n  num_nodes: 2\nmodel:\n  hidden_size: 4096\n",
    "recipe: finetune\nmodel:\n  pretrained_model_name_or_path: x/y\n_target_: a.b\n",
    "experiment:\n  task: {type: train}\ntrain:\n  system: {tensor_model_parallel_size: 2}\n",
    "model_name_or_path: x/y\n", "train_batch_size: 8\n", "base_model: x/y\n", "fp16: true\n",
    "python train.py --lr 1e-4\n", "torchrun --nproc-per-node 8 train.py config.toml\n",
])  # fmt: skip
def test_texts_without_a_programs_own_words_are_nobodys(text):
    assert list_takers(Path("job"), text) == []
