"""Patches: another layout in the options of another program's file, where nothing but these options changes."""

import argparse
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.commands.case import Case, find_other, read_case
from dtlayout.commands.their_file import TheirFile
from dtlayout.costmodel.estimate import estimate
from dtlayout.planner.explain import explain
from dtlayout.programs.shell.edits import edit_assignments, edit_script

FOLDER = Path(__file__).parent
FILES = [
    "megatron/arrays.sh", "megatron/experts.sh", "megatron/plain.sh", "torchtitan/llama3_70b.toml",
    "torchtitan/named.sh", "torchtitan/nodes.slurm", "nanotron/benchmark.yaml", "automodel/pretrain.yaml",
    "automodel/start.sh", "flagscale/cut.yaml", "nemo/train.sh", "bridge/saved.yaml", "bridge/nodes.sh",
    "nemo2/start.sh", "deepspeed/on_the_host.json", "accelerate/four_axes.yaml", "axolotl/lora.yml",
    "llama_factory/lora.yaml", "trl/full.yaml", "trainer/with_accelerate.sh",
]  # fmt: skip
"""A file and a command of each program."""
NOT_SAID = {
    "deepspeed": ["--model=llama3.1-8b", "--batch.seq_len=2048"],
    "accelerate": ["--model=llama3.1-8b", "--batch.seq_len=2048", "--batch.global_batch=64"],
}
"""Folder of files that say no model → what is said beside them."""
SAY_GPUS = {"nanotron", "nemo", "bridge", "nemo2", "megatron", "accelerate", "trainer"}
"""Folders of files that say how many GPUs they start."""
TITAN = """# on four nodes
[model]
name = "llama3"      # Llama 3.1
flavor = "8B"

[training]
local_batch_size = 2  # sequences
seq_len = 8192
steps = 10

[parallelism]
tensor_parallel_degree = 1  # inside a node

[activation_checkpoint]
mode = "full"
"""


def ask(path, overrides=(), **more):
    options = argparse.Namespace(
        gpu="h100-80g-sxm", engine="dtlayout", engine_set=[], given=[], world=more.get("world")
    )
    return TheirFile(find_other(path, options), path, overrides, options), read_case(path, overrides, options)


def count_words(text):
    """How often each word stands in a text, with dashes as underscores and without those before it."""
    words = (word.lower().lstrip("-").replace("-", "_") for word in re.split(r"[\s=()\[\]{},:'\"]+", text))
    return Counter(word for word in words if word)


@pytest.mark.parametrize("name", FILES)
def test_each_change_of_a_file_is_read_back_and_changes_little(name):
    path = FOLDER / name
    folder = name.split("/")[0]
    file, case = ask(path, NOT_SAID.get(folder, ()), world=None if folder in SAY_GPUS else 64)
    changes = [each.estimate for each in explain(*case).changes]
    changes = [each for each in changes if file.says_otherwise(case, each.layout, each.kernels)]
    assert changes
    patches = 0
    for wanted in changes[:3]:
        try:
            patch = file.find_patch(case, wanted)  # which has read it back
        except InvalidConfig as error:
            assert "cannot be changed by these alone" in str(error)
            continue
        patches += 1
        values = [*patch.changes, *patch.changes.values(), *patch.before.values()]
        allowed = count_words(" ".join(map(str, values)))
        before, after = count_words(path.read_text()), count_words(patch.text)
        differ = {word for word in ((before - after) + (after - before)) if not word.startswith("$")}
        parts = {part for word in allowed for part in word.split(".")}
        assert differ <= {*allowed, *parts, "\\", "null", "activation_checkpoint", "none", "full"}, differ - {*allowed}
    assert patches >= 0.6 * len(changes[:3])


def test_a_variable_is_changed_where_it_is_set_unless_others_count_on_it():
    file, case = ask(FOLDER / "megatron" / "arrays.sh")
    layout = case.layout.__class__(**{**vars(case.layout), "tp": 4, "pp": 4, "virtual_stages": 4})
    patch = file.find_patch(case, estimate(case.scenario, layout, case.kernels))
    assert "TP=${TP:-4}\nPP=${PP:-4}" in patch.text  # DP stays, and BATCH with it
    layout = case.layout.__class__(**{**vars(case.layout), "tp": 4, "dp_shard": 4})
    patch = file.find_patch(case, estimate(case.scenario, layout, case.kernels))
    assert "TP=${TP:-8}" in patch.text and "--tensor-model-parallel-size 4" in patch.text  # BATCH counts on TP
    assert list(patch.describe(has_flags=True)) == ["--tensor-model-parallel-size 4 (was 8)"]


def test_a_toml_file_is_changed_with_what_it_left_to_defaults(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(TITAN)
    file, case = ask(path, world=32)
    layout = case.layout.__class__(**{**vars(case.layout), "micro_batch": 1})
    patch = file.find_patch(case, estimate(case.scenario, layout, case.kernels))
    assert dict(patch.changes) == {"training.local_batch_size": 1, "training.global_batch_size": 64}
    gone = [line for line in TITAN.splitlines() if line not in patch.text.splitlines()]
    assert gone == ["local_batch_size = 2  # sequences"]
    assert "local_batch_size = 1  # sequences\n" in patch.text
    other = Case(case.scenario, case.layout, case.kernels.__class__(**{**vars(case.kernels), "loss": "chunked"}))
    with pytest.raises(InvalidConfig, match="no option of torchtitan says it"):
        file.find_patch(case, estimate(*other))


def test_explain_says_changes_in_the_files_own_words_and_writes_one(tmp_path, capsys):
    script, changed = str(FOLDER / "megatron" / "arrays.sh"), tmp_path / "new.sh"
    asked = ["explain", script, "--gpu", "h100-80g-sxm"]
    assert main([*asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["file"]
    assert said["program"] == "Megatron-LM" and 1 <= len(said["changes"]) <= 3
    assert "without --recompute-granularity full" in said["changes"][0]["change"]
    assert main([*asked, "--patch", str(changed), "--take", "best"]) == 0
    text = capsys.readouterr().out
    assert f"as changes of {script}:" in text and f"written to {changed}: " in text
    assert main(["explain", str(changed), "--gpu", "h100-80g-sxm", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_time_s"] == pytest.approx(said["best"]["step_time_s"])
    assert again["file"]["best"]["change"] == []
    for wrong, why in (("7", "--take 7 is no change here; there is 1 or "), ("x", "--take x is no change")):
        assert main([*asked, "--patch", str(changed), "--take", wrong]) == 2
        assert why in capsys.readouterr().err
    assert main([*asked, "--patch", script]) == 2
    assert "is the file itself; write another one" in capsys.readouterr().err
    own = str(FOLDER.parents[1] / "configs" / "debug.toml")
    assert main(["explain", own, "--gpu", "cpu", "--patch", str(changed)]) == 2
    assert "is a config of ours" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs the command patch")
def test_a_difference_is_what_the_command_patch_takes(tmp_path, capsys):
    script, difference = tmp_path / "train.sh", tmp_path / "job.patch"
    shutil.copy(FOLDER / "megatron" / "fp8.sh", script)
    asked = ["explain", str(script), "--gpu", "h100-80g-sxm", "--world", "64", "--take", "best"]
    assert main([*asked, "--patch", str(tmp_path / "whole.sh")]) == 0
    assert main([*asked, "--patch", str(difference)]) == 0
    subprocess.run(["patch", str(script), str(difference)], check=True, capture_output=True, timeout=60)
    assert script.read_text() == (tmp_path / "whole.sh").read_text()


def test_recommend_takes_the_job_of_a_file_and_puts_its_layout_beside(tmp_path, capsys):
    script, changed = str(FOLDER / "megatron" / "arrays.sh"), tmp_path / "new.sh"
    asked = ["recommend", "--like", script, "--gpu", "h100-80g-sxm", "--top", "1"]
    assert main([*asked, "--json", "--patch", str(changed)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["scenario"]["engine"] == "megatron" and document["scenario"]["num_gpus"] == 32
    yours = document["yours"]
    assert yours["layout"]["layout"]["tp"] == 8 and yours["slower_than_best"] > 0.1 and yours["change"]
    assert main(["explain", str(changed), "--gpu", "h100-80g-sxm", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_time_s"] == pytest.approx(document["layouts"][0]["step_time_s"])
    assert main([*asked, "--gpus", "64", "--seq-len", "4096", "--fix", "tp=4", "--batch.global_batch=128"]) == 0
    text = capsys.readouterr().out
    assert "Yours, " in text and f"  1 in {script}: " in text


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ([], "--model, --seq-len, --global-batch are missing; or give --like FILE"),
        (["--patch", "x"], "--patch writes the file of --like: give one"),
        (["--like", "{script}", "--cluster", "x.toml"], "--like takes the GPU type from --gpu"),
        (["--like", "{script}", "--vocab", "9"], "--like has the model of the file"),
        (["--like", "{own}", "--patch", "x"], "--patch changes a file of another program"),
        (["--like", "nothing.sh"], "nothing.sh cannot be read"),
    ],
)
def test_what_recommend_cannot_take_is_refused(more, why, capsys):
    places = {"script": FOLDER / "megatron" / "fp8.sh", "own": FOLDER.parents[1] / "configs" / "debug.toml"}
    gpu = [] if "--cluster" in more else ["--gpu", "cpu" if "{own}" in more else "h100-80g-sxm"]
    assert main(["recommend", *(each.format(**places) for each in more), *gpu]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "changes", "wanted"),
    [
        ("a --tp 2 --b", {"--tp": ["4"]}, "a --tp 4 --b"),
        ("a --tp=2 --b", {"--tp": ["4"]}, "a --tp=4 --b"),
        ("a --tp 2 --b", {"--tp": None}, "a --b"),
        ("a --b --tp 2", {"--tp": None}, "a --b "),
        ("(\n  --tp 2 # of 8\n  --b\n)", {"--tp": ["4"]}, "(\n  --tp 4 # of 8\n  --b\n)"),
        ("(\n  --tp 2\n  --b\n)", {"--tp": None}, "(\n  --b\n)"),
        ("x \\\n  --tp 2 \\\n  --b", {"--tp": None}, "x \\\n  --b"),
        ("x \\\n  --b 1", {"--c": []}, "x \\\n  --c \\\n  --b 1"),
        ("(\n  --b 1\n)", {"--c": ["it's"]}, "(\n  --c 'it'\"'\"'s'\n  --b 1\n)"),
        ("# --tp 8\nA='--tp 2 --b'", {"--tp": ["4"]}, "# --tp 8\nA='--tp 4 --b'"),
        ("T=2\nx --tp $T --b", {"--tp": ["4"]}, "T=4\nx --tp $T --b"),
        ("T=${1:-2}\nx --tp ${T} --b", {"--tp": ["4"]}, "T=${1:-4}\nx --tp ${T} --b"),
        ("T=$U\nx --tp $T --b", {"--tp": ["4"]}, "T=$U\nx --tp 4 --b"),
        ("x --m a b --b", {"--m": ["c"]}, "x --m c --b"),
        ("x --a.b 1 --c.d", {"a.b": 2, "c.d": None}, "x --a.b 2"),
    ],
)
def test_options_of_a_script_are_changed_in_its_text(text, changes, wanted):
    assert edit_script(text, changes, ["--b"], by_variables=True).rstrip() == wanted.rstrip()


def test_an_option_that_stands_twice_or_finds_no_place_is_refused():
    with pytest.raises(InvalidConfig, match="--tp stands in the script 2 times"):
        edit_script("a --tp 2\nb --tp 2", {"--tp": ["4"]}, [], by_variables=False)
    with pytest.raises(InvalidConfig, match="--c 1 finds no place in the script"):
        edit_script("a --tp 2", {"--c": ["1"]}, ["--b"], by_variables=False)


def test_what_else_a_variable_says_stays_as_it_is(tmp_path):
    script = tmp_path / "train.sh"
    text = (FOLDER / "megatron" / "arrays.sh").read_text()
    script.write_text(text.replace("--save checkpoints", "--save checkpoints/tp$TP"))
    file, case = ask(script)
    layout = case.layout.__class__(**{**vars(case.layout), "tp": 4, "pp": 4, "virtual_stages": 4})
    patch = file.find_patch(case, estimate(case.scenario, layout, case.kernels))
    assert "TP=${TP:-8}" in patch.text and "--tensor-model-parallel-size 4 " in patch.text  # else it saves elsewhere


def test_ends_of_lines_stay_and_a_difference_knows_a_file_without_a_last_one(tmp_path, capsys):
    text = (FOLDER / "nanotron" / "benchmark.yaml").read_text().rstrip()
    path, changed = tmp_path / "job.yaml", tmp_path / "changed.yaml"
    path.write_bytes(text.replace("\n", "\r\n").encode())
    assert main(["explain", str(path), "--gpu", "h100-80g-sxm", "--patch", str(changed)]) == 0
    after = changed.read_bytes()
    assert after.count(b"\r\n") == after.count(b"\n") == text.count("\n")
    path.write_text(text)
    difference = tmp_path / "job.patch"
    assert main(["explain", str(path), "--gpu", "h100-80g-sxm", "--patch", str(difference)]) == 0
    lines = difference.read_text().splitlines()
    assert all(line[:1] in "+- @\\" for line in lines)
    capsys.readouterr()


def test_what_a_file_cannot_say_is_no_patch():
    file, case = ask(FOLDER / "trl" / "full.yaml", world=16)
    layout = case.layout.__class__(**{**vars(case.layout), "dp_shard": 8, "cp": 2})
    with pytest.raises(InvalidConfig, match="the file cannot say it: "):
        file.find_patch(case, estimate(case.scenario, layout, case.kernels))


SIZED = """#!/bin/bash
SIZE=${1:-8b}  # 8b or 70b
if [ "$SIZE" = 70b ]; then
    TP=8; PP=4
    ARCH="--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64"
elif [[ $SIZE == 8b ]]; then
    TP=4
    PP=1   # one node
    ARCH="--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
fi
case $SIZE in
    70b) MORE="--micro-batch-size 1 --recompute-activations" ;;
    *) MORE="--micro-batch-size 1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1" ;;
esac
[ $TP -gt 8 ] && MORE="$MORE --tp-comm-overlap"
torchrun --nproc_per_node 8 pretrain_gpt.py $ARCH --seq-length 4096 --global-batch-size 64 --swiglu --bf16 \\
    --group-query-attention --num-query-groups 8 --untie-embeddings-and-output-weights --vocab-size 128256 \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --sequence-parallel $MORE \\
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
"""


def test_a_branch_that_is_not_taken_is_not_changed(tmp_path, capsys):
    path, changed = tmp_path / "train.sh", tmp_path / "changed.sh"
    path.write_text(SIZED)
    asked = ["explain", str(path), "--gpu", "h100-80g-sxm", "--patch", str(changed), "--take", "best"]
    assert main(asked) == 0
    capsys.readouterr()
    before, after = SIZED.splitlines(), changed.read_text().splitlines()
    assert len(before) == len(after)
    differ = {number for number, (one, other) in enumerate(zip(before, after, strict=True)) if one != other}
    assert differ and differ <= {6, 7, 12, 16, 17, 18, 19}, after
    assert main(["explain", str(changed), "--gpu", "h100-80g-sxm"]) == 0
    capsys.readouterr()
    assert main([*asked, "--given", "SIZE=70b", "--world", "64"]) == 0
    capsys.readouterr()
    after = changed.read_text().splitlines()
    assert all(after[number] == before[number] for number in (1, 2, 5, 6, 7, 8, 12, 14))


def test_an_assignment_stands_before_one_in_quotes():
    changes = {"a.layout": "Et*2|t*3L", "a.size": 2}
    assert edit_assignments("run a.b=1", changes) == "run a.size=2 'a.layout=Et*2|t*3L' a.b=1"
    assert edit_assignments('MORE="a.b=1 a.c=2"', {"a.size": 2}) == 'MORE="a.size=2 a.b=1 a.c=2"'


def explain_on(capsys, name, *more):
    """What is said of changes of a file, as a document."""
    assert main(["explain", str(FOLDER / name), "--gpu", "h100-80g-sxm", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_kernels_that_a_program_has_no_word_for_are_not_offered(capsys):
    document = explain_on(capsys, "axolotl/qlora.yml", "--world", "2")
    assert document["changes"]
    assert not any("--kernels" in word for each in document["changes"] for word in each["overrides"])


def test_attention_that_packed_samples_need_stays(capsys):
    best = explain_on(capsys, "axolotl/qlora.yml", "--world", "2")["file"]["best"]
    words = " ".join(best["change"])
    assert "gradient_checkpointing = false" in words
    assert "attention" not in words.replace("gradient_checkpointing", "")


def test_a_value_before_is_the_commands_and_not_that_of_the_json_file_that_it_names(capsys):
    document = explain_on(capsys, "trainer/with_deepspeed.sh")
    words = document["file"]["changes"][0]["change"]
    assert words == ["--per_device_train_batch_size 8 (was 4)", "--gradient_accumulation_steps 1 (was 2)"]


def test_options_without_effect_are_taken_out_where_a_change_would_give_them_one(capsys):
    best = explain_on(capsys, "axolotl/lora.yml", "--world", "4")["file"]["best"]
    assert "without liger_rope = true" in best["change"] and "micro_batch_size = 4 (was 2)" in best["change"]


def test_a_flag_that_is_true_by_default_is_denied_by_its_word(tmp_path, capsys):
    path = tmp_path / "sft.sh"
    path.write_text(
        "trl sft --model_name_or_path Qwen/Qwen2.5-7B --use_peft --dtype bfloat16 --num_processes 8 --max_length 4096 "
        "--per_device_train_batch_size 2 --gradient_checkpointing --bf16 --packing --attn_implementation sdpa\n"
    )
    document = explain_on(capsys, str(path))
    assert document["file"]["changes"][0]["change"] == ["--gradient_checkpointing False (was true)"]
