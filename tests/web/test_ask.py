"""ask: what a page is answered is what the terminal prints, refusals name their field, and nothing reads the disk."""

import json
import os
import re
import shlex
import threading
from pathlib import Path

import pytest
from given_files import HF, SCRIPT

from dtlayout.base.confined import confined
from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.commands.ask import ask
from dtlayout.costmodel.engine_constants import Constants
from dtlayout.costmodel.estimate import TimeEstimate
from dtlayout.costmodel.memory import MemoryEstimate
from dtlayout.costmodel.messages import MESSAGE_AXES
from dtlayout.models.presets import PRESETS
from dtlayout.spec.cluster import known_gpus
from dtlayout.web import origins

LLAMA = {"model": "llama-7b", "gpu": "a100-80g-sxm", "gpus": 16, "seq_len": 2048, "global_batch": 128}


def terminal(capsys, folder: Path, *arguments: str):
    """The document that a command line prints in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        main([*arguments, "--json"])
    finally:
        os.chdir(before)
    return json.loads(capsys.readouterr().out)


def without_command(document):
    return {key: value for key, value in document.items() if key not in ("asked", "fields")}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"engine": "megatron", "fix": ["tp=2"], "avoid": ["recompute=full"], "top": "2"},
        {"why_not": "pp=4,tp=2", "max_memory": "0.9", "precision": ["reduce=bfloat16"], "optimizer": "sgd"},
        {"tokens": "1T", "price": "2.5", "gpus_per_node": 4, "vocab": "50000"},
        {"fix": ["tp=5"]},
        {"gpus": "1"},
    ],
)
def test_an_answer_is_the_document_that_its_own_command_prints(capsys, tmp_path, more):
    document = ask(LLAMA | more)
    (command,) = document["asked"]["commands"]
    assert without_command(document) == terminal(capsys, tmp_path, *shlex.split(command)[1:])
    assert document["ok"] == (more.get("fix") != ["tp=5"] and more.get("gpus") != "1")


def test_clusters_side_by_side_are_those_of_the_terminal(capsys, tmp_path):
    document = ask(LLAMA | {"ask": "scale", "scale": "8,16,32", "tokens": "1T", "price": "2"})
    assert [row["num_gpus"] for row in document["scale"]] == [8, 16, 32] and document["marks"]
    (command,) = document["asked"]["commands"]
    assert without_command(document) == terminal(capsys, tmp_path, *shlex.split(command)[1:])


@pytest.mark.parametrize("more", [{}, {"engine": "megatron", "precision": ["reduce=float32"]}])
def test_a_layout_is_opened_as_the_terminal_opens_its_config(capsys, tmp_path, more):
    found = ask(LLAMA | more | {"fix": ["pp=2"]})
    best = found["layouts"][0]
    opened = {name: ask(LLAMA | more | {"ask": name, "layout": best["name"]}) for name in ("explain", "timeline")}
    assert opened["explain"]["step_time_s"] == pytest.approx(best["step_time_s"])
    assert opened["explain"]["peak_memory_bytes"] == pytest.approx(best["peak_bytes"])
    assert len(opened["timeline"]["ranks"]) == len(opened["explain"]["memory_bytes"]) == 2
    if not more:  # of other programs --emit writes their own file, and not our config
        for document in opened.values():
            for command in document["asked"]["commands"]:
                printed = terminal(capsys, tmp_path, *shlex.split(command)[1:])
            assert without_command(document) == printed


def test_two_layouts_stand_side_by_side_as_in_the_terminal(capsys, tmp_path):
    best = ask(LLAMA)["layouts"][0]["name"]
    document = ask(LLAMA | {"ask": "compare", "layout": best, "other": "pp=2,tp=2"})
    for command in document["asked"]["commands"]:
        printed = terminal(capsys, tmp_path, *shlex.split(command)[1:])
    assert without_command(document) == printed and len(document["compared"]) == 2


@pytest.mark.parametrize("engine", ["dtlayout", "megatron", "torchtitan", "automodel", "nanotron"])
def test_a_file_is_the_one_that_the_terminal_writes(capsys, tmp_path, engine):
    question = LLAMA | {"ask": "emit", "engine": engine}
    document = ask(question)
    (command,) = document["asked"]["commands"]
    printed = terminal(capsys, tmp_path, *shlex.split(command)[1:])
    assert (
        document["text"] == (tmp_path / document["name"]).read_text()
        and document["emitted_for"] == (printed["emitted_for"])
    )
    second = ask(LLAMA | {"engine": engine})["layouts"][1]["name"]
    assert ask(question | {"layout": second})["text"] != document["text"]


def test_a_config_json_is_the_model(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF))
    question = {**LLAMA, "model": "", "file": {"name": "config.json", "text": json.dumps(HF)}}
    document = ask(question)
    (command,) = document["asked"]["commands"]
    assert command.startswith("dtlayout recommend --model config.json ")
    printed = terminal(capsys, tmp_path, *shlex.split(command)[1:])
    found = without_command(document)
    for each in (found, printed):  # a model is called after its folder
        each["scenario"]["model"]["name"] = ""
    assert found == printed and document["scenario"]["parameters"] > 8e9


def test_a_training_file_is_read_and_its_own_layout_stands_beside_the_best(capsys, tmp_path):
    (tmp_path / "train.sh").write_text(SCRIPT)
    document = ask({"file": {"name": "train.sh", "text": SCRIPT}, "gpu": "a100-80g-sxm"})
    (command,) = document["asked"]["commands"]
    assert command == "dtlayout recommend --like train.sh --gpu a100-80g-sxm"
    assert without_command(document) == terminal(capsys, tmp_path, *shlex.split(command)[1:])
    assert document["yours"]["path"] == "train.sh" and document["yours"]["layout"]["layout"]["tp"] == 2
    patched = ask({"ask": "patch", "file": {"name": "train.sh", "text": SCRIPT}, "gpu": "a100-80g-sxm"})
    for command in patched["asked"]["commands"]:
        terminal(capsys, tmp_path, *shlex.split(command)[1:])
    assert patched["text"] == (tmp_path / patched["name"]).read_text() != SCRIPT
    assert patched["diff"] == (tmp_path / "train.sh.patch").read_text() and patched["change"]
    best = document["layouts"][0]
    asked = {"ask": "explain", "layout": best["name"], "file": {"name": "train.sh", "text": SCRIPT}}
    opened = ask(asked | {"gpu": "a100-80g-sxm"})
    assert (opened["step_time_s"], opened["engine"]) == (pytest.approx(best["step_time_s"]), "megatron")
    assert any("train.sh is read as a job of Megatron-LM" in note for note in document["asked"]["notes"])


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("model", "llama3-8b", "did you mean llama3.1-8b?"),
        ("model", "", "--model is missing"),
        ("gpu", "h1000", "GPU type 'h1000' is unknown"),
        ("gpus", "abc", "argument --gpus: invalid int value: 'abc'"),
        ("gpus", "0", "num_gpus=0 must be a whole number of at least 1"),
        ("gpus", "", "the number of GPUs is missing"),
        ("gpus", "9999999999999999", "--gpus=9999999999999999 must be at most"),
        ("gpus_per_node", "0", "gpus_per_node=0"),
        ("seq_len", "-5", "batch.seq_len=-5 must be from 1 to a billion"),
        ("seq_len", "", "--seq-len is missing"),
        ("global_batch", "1.5", "argument --global-batch: invalid int value"),
        ("engine", "deepspede", "engine 'deepspede' is unknown"),
        ("engine_set", ["a=b"], "a=b is no choice of this engine"),
        ("precision", ["matmuls=fp9"], "precision.matmuls='fp9' is unknown"),
        ("optimizer", "adammm", "optimizer.name='adammm' is unknown"),
        ("max_memory", "2", "--max-memory=2.0 must lie above 0"),
        ("tokens", "many", "'many' is no number of tokens"),
        ("price", "3", "--price is money for a GPU-hour"),
        ("fix", ["tpp=2"], "tpp is unknown; did you mean tp?"),
        ("fix", ["tp=two"], "tp=two must be a whole number"),
        ("avoid", ["tq=2"], "tq is unknown"),
        ("why_not", "tq=3", "tq is unknown"),
        ("vocab", "x", "argument --vocab: invalid int value"),
    ],
)
def test_a_refusal_is_the_terminals_and_names_the_field_that_it_is_about(field, value, said):
    document = ask(LLAMA | {field: value})
    assert document["ok"] is False
    (problem,) = document["problems"]
    # an engine's refusal names its engine
    assert said in problem and document["fields"] == [{"engine_set": "engine"}.get(field, field)]


@pytest.mark.parametrize("name", ["out", "layout.toml", "best.toml", "written", "changed-train.sh", "x.patch"])
def test_a_file_may_have_any_name(name):
    question = {"file": {"name": name, "text": SCRIPT}, "gpu": "a100-80g-sxm"}
    best = ask(question)["layouts"][0]["name"]
    for each in ("emit", "patch", "explain"):
        document = ask(question | {"ask": each, "layout": best})
        assert document["ok"] and not any("/" in word for word in " ".join(document["asked"]["commands"]).split())


def test_where_nothing_fits_no_field_is_to_blame():
    document = ask(LLAMA | {"gpus": "1"})
    assert document["problems"][0].startswith("no layout can train llama-7b here") and {*document["fields"]} == {""}


SECRET = "only-in-this-file"


@pytest.fixture
def secret(tmp_path) -> Path:
    """A file of the machine that could be taken for a model, a schedule and a table."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(HF | {"model_type": SECRET}))
    return path


@pytest.mark.parametrize(
    "make",
    [
        lambda path: {"model": str(path)},
        lambda path: {"model": str(path.parent)},
        lambda path: {"fix": [f"schedule=csv:{path}"]},
        lambda path: {"why_not": f"schedule=csv:{path}"},
        lambda path: {"cluster": str(path)},
        lambda path: {"like": str(path)},
        lambda path: {"emit": str(path)},
        lambda path: {"page": str(path)},
        lambda path: {"gpus": f"16 --emit {path}"},
        lambda path: {"gpus": f"--emit={path}"},
        lambda path: {"gpu": f"--cluster={path}"},
        lambda path: {"file": {"name": str(path), "text": "{}"}},
        lambda path: {"file": {"name": "../config.json", "text": "{}"}},
        lambda path: {"model": "", "file": {"name": "a.toml", "text": f"[model]\nname = {str(path)!r}\n"}},
        lambda path: {
            "model": "",
            "file": {"name": "a.toml", "text": f"[train]\ninit_from = {str(path.parent)!r}\nsteps = 1\n"},
        },
        lambda path: {
            "model": "",
            "file": {"name": "a.toml", "text": f"[cluster]\nfile = {str(path)!r}\n[model]\nname='debug'\n"},
        },
        lambda path: {"model": "", "file": {"name": "a.sh", "text": f"CONFIG_FILE={path} ./run_train.sh\n"}},
        lambda path: {"file": {"name": "a.sh", "text": f"X=$(cat {path})\n" + SCRIPT.replace("32000", "$X")}},
        lambda path: {"file": {"name": "a.sh", "text": f"touch {path}.new\n" + SCRIPT.replace("32000", "none")}},
        lambda path: {
            "model": "",
            "file": {
                "name": "a.sh",
                "text": SCRIPT.replace(
                    "NullTokenizer", f"HuggingFaceTokenizer --tokenizer-model {path.parent}"
                ).replace("--vocab-size 32000", ""),
            },
        },
        lambda path: {"ask": "emit", "layout": f"dp16 --emit={path}"},
        lambda path: {"ask": "explain", "layout": str(path)},
        lambda path: {"ask": "compare", "layout": "dp16 mb1 zero3", "other": str(path)},
        lambda path: {"ask": "../../etc"},
        lambda path: {"ask": "patch"},
        lambda path: {"model": None},
        lambda path: {"model": ["debug"]},
        lambda path: {"fix": ["tp=1"] * 1000},
        lambda path: {"fix": "x" * 10_000},
        lambda path: {"gpus": True},
        lambda path: {"gpus": {"$ne": 1}},
        lambda path: {"file": {"name": "config.json", "text": "[" * 100_000}},
        lambda path: {"file": {"name": "config.json", "text": "x" * 500_000}},
        lambda path: {"file": {"name": "config.json", "text": json.dumps({"model_type": ["llama"]})}},
        lambda path: {"file": {"name": "config.json"}},
        lambda path: {"model": "a\0b"},
    ],
)
def test_a_hostile_question_is_refused_and_reads_and_writes_nothing(secret, make):
    before = sorted(secret.parent.iterdir()), secret.read_text()
    document = ask(LLAMA | make(secret))
    assert document["ok"] is False and document["problems"] and len(document["problems"]) == len(document["fields"])
    assert SECRET not in json.dumps(document)
    assert (sorted(secret.parent.iterdir()), secret.read_text()) == before


def test_what_a_script_would_run_or_read_is_neither_run_nor_read(secret):
    before = sorted(secret.parent.iterdir())
    text = f"source {secret}\ntouch {secret}.new\nX=$(cat {secret})\n{SCRIPT}"
    document = ask({"gpu": "a100-80g-sxm", "file": {"name": "a.sh", "text": text}})
    assert SECRET not in json.dumps(document) and sorted(secret.parent.iterdir()) == before


@pytest.mark.parametrize("content", [None, [], 3, "recommend", {"ask": "recommend", "what": 1}])
def test_no_question_at_all_is_refused(content):
    assert ask(content)["ok"] is False


def test_an_unknown_family_is_not_traced_for_a_page(monkeypatch):
    monkeypatch.setattr("dtlayout.models.files.trace_model", lambda *_: pytest.fail("traced"))
    text = json.dumps(HF | {"model_type": "gpt_neox"})
    document = ask(LLAMA | {"file": {"name": "config.json", "text": text}})
    assert document["fields"] == ["file"] and "dtlayout trace config.json" in document["problems"][0]


def test_a_confined_thread_alone_reads_only_its_folder(tmp_path):
    (tmp_path / "in").mkdir()
    for path in (tmp_path / "in" / "own", tmp_path / "out"):
        path.write_text("text")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    with confined(tmp_path / "in"):
        assert (tmp_path / "in" / "own").read_text() == "text"
        for name in ("out", "in/link", "in/../out"):
            with pytest.raises(InvalidConfig, match="is a file of this machine"):
                (tmp_path / name).read_text()
        with pytest.raises(InvalidConfig, match="starts no program"):
            os.system("true")
        other = []
        thread = threading.Thread(target=lambda: other.append((tmp_path / "out").read_text()))
        thread.start()
        thread.join()
        assert other == ["text"]
    assert (tmp_path / "out").read_text() == "text"


def test_choices_are_everything_that_is_known():
    document = ask({"ask": "choices"})
    assert [each["name"] for each in document["models"]] == list(PRESETS)
    assert [each["name"] for each in document["gpus"]] == list(known_gpus())
    assert sum(each["is_own"] for each in document["engines"]) == 1


@pytest.mark.parametrize("engine", ["dtlayout", "megatron"])
def test_every_part_of_an_answer_has_an_origin(engine):
    document = ask(LLAMA | {"ask": "origins", "engine": engine})
    best = ask(LLAMA | {"engine": engine, "top": "1"})["layouts"][0]
    parts = document["parts"]
    assert {f"time.{name}" for name in best["time"]} | {f"memory.{name}" for name in best["memory"][0]} <= parts.keys()
    for part in parts.values():
        assert part["meaning"] and part["formula"]
        for constant in part["constants"]:
            assert constant["source"] and constant["unit"] and isinstance(constant["value"], float | int)


def test_origins_name_parts_constants_and_headings_that_there_are():
    root = Path(__file__).parents[2]
    assert list(origins.TIME) == list(TimeEstimate.__dataclass_fields__)
    assert list(origins.MESSAGES) == list(MESSAGE_AXES)
    assert list(origins.MEMORY) == list(MemoryEstimate.__dataclass_fields__)
    for each in (origins.TIME, origins.MEMORY, origins.MEMORY_FSDP2, origins.MESSAGES, origins.OTHERS):
        for origin in each.values():
            assert {*origin.constants} <= {*Constants.__dataclass_fields__}
            path, _, anchor = origin.page.partition("#")
            headings = re.findall(r"^#+ (.*)$", (root / path).read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", each).lower().replace(" ", "-") for each in headings]
