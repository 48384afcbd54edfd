"""What lies beside a folder's weights: it comes out of a run as it came in, wherever the export is made."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from real_folders import CHATML, REAL, find_id, save_real, save_words
from safetensors.torch import load_file
from tiny import write_tiny
from tokenizers import Tokenizer

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.checkpoint.kept import write_beside
from dtlayout.cli import main
from dtlayout.config.config import Config
from dtlayout.config.loading import load_config, parse_config
from dtlayout.config.sections import DataConfig
from dtlayout.launch import main as train
from dtlayout.models.files import find_model
from dtlayout.models.weights import check_init_from

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture(params=REAL)
def folder(request, tmp_path) -> Path:
    return save_real(request.param, tmp_path / "from" / request.param)


def read_beside(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".safetensors")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def start(folder: Path, tmp_path: Path, *overrides: str) -> Path:
    """Train a step from a folder, with its sizes, on this process; the run's folder."""
    files = write_tiny(tmp_path, steps=1)
    text = files.config.read_text()
    files.config.write_text(text[text.index("[batch]") :])
    assert train([str(files.config), f"--train.init_from={folder}", *overrides]) == 0
    return files.run


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_there_and_back_every_file_is_the_same(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(folder), "run"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder.rename(tmp_path / "gone")  # an export needs it no more
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert read_beside(tmp_path / "out") == read_beside(tmp_path / "gone")
    (before, after) = (load_file(each / "model.safetensors") for each in (tmp_path / "gone", tmp_path / "out"))
    assert all(before[name].equal(after[name]) for name in after)


def test_a_step_changes_the_weights_and_no_other_file(folder, tmp_path, monkeypatch, capfd):
    said = "--precision.compute=bfloat16", "--checkpoint.export=true"
    run = start(folder, tmp_path, *said)
    assert "other texts by the same ids" not in capfd.readouterr().out
    assert load_config(run / "config.toml").data.tokenizer == str(folder)
    assert read_beside(run / "hf") == read_beside(folder)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    before = read_beside(folder)
    folder.rename(tmp_path / "gone")
    assert main(["convert", str(run), "out"]) == 0
    assert read_beside(Path("out")) == before
    assert main(["convert", str(run), "in-fp32", "--format", "float32"]) == 0
    changed = {name for name, content in read_beside(Path("in-fp32")).items() if content != before[name]}
    assert changed == {"config.json"}
    config, was = json.loads(Path("in-fp32/config.json").read_text()), json.loads(before["config.json"])
    assert {key for key in config if config[key] != was[key]} <= {
        "dtype",
        "torch_dtype",
    } and config.keys() == was.keys()
    assert main(["generate", str(run), "--prompt", "3 times", "--max-tokens", "2"]) == 0


def test_what_training_changes_is_said_and_nothing_else(tmp_path, capfd):
    folder = save_real("llama-3.1-instruct", tmp_path / "llama")
    longer = f"--model.name={folder}", "--model.rope_theta=7e5", "--batch.seq_len=300", "--batch.global_batch=2"
    run = start(folder, tmp_path, *longer, "--precision.compute=bfloat16")
    said = capfd.readouterr().out
    assert f"note: rope_theta is 700000.0, that of {folder} 500000.0\n" in said
    assert f"note: {folder} is made for 256 tokens, and batch.seq_len is 300: an export is made for as many\n" in said
    assert main(["convert", str(run), str(tmp_path / "out")]) == 0
    config, was = (json.loads((each / "config.json").read_text()) for each in (tmp_path / "out", folder))
    scaling = {key: value for key, value in was.pop("rope_parameters").items() if key != "rope_theta"}
    assert config.pop("rope_theta") == 7e5 and config.pop("rope_scaling") == scaling
    assert config == was | {"max_position_embeddings": 300}


@pytest.mark.parametrize(("kind", "has_template"), [("qwen-2.5-instruct", True), ("llama-2", False)])
def test_conversations_and_new_tokens_change_the_rows_and_no_other_word_beside_the_weights(
    tmp_path, kind, has_template
):
    """The context, rope, generation config, special tokens and templates are the folder's, but what is asked for."""
    folder = save_real(kind, tmp_path / kind)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<tool>"])
    tokenizer.add_tokens([f"new{i}" for i in range(300 - tokenizer.get_vocab_size())])
    tokenizer.save(str(folder / "tokenizer.json"))
    talk = [{"role": "user", "content": "3 times <tool>"}, {"role": "assistant", "content": "is new1 6."}]
    (tmp_path / "talks.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 8)
    (tmp_path / "own.jinja").write_text(CHATML)
    options = [f"--data.source={tmp_path / 'talks.jsonl'}", "--data.messages_field=messages", "--data.samples=best-fit"]
    options += [] if has_template else [f"--data.chat_template={tmp_path / 'own.jinja'}"]
    run = start(folder, tmp_path, *options, "--precision.compute=bfloat16", "--checkpoint.export=true")
    before, after = read_beside(folder), read_beside(run / "hf")
    asked = set() if has_template else {"chat_template.jinja"}
    assert after.keys() == before.keys() | asked
    assert {name for name in after if after[name] != before.get(name)} == {"config.json"} | asked
    config, was = json.loads(after["config.json"]), json.loads(before["config.json"])
    assert config == was | {"vocab_size": 300}


def test_another_tokenizer_takes_the_place_of_the_folders(tmp_path, capfd):
    folder = save_real("qwen-2.5-instruct", tmp_path / "qwen")
    other = save_words(tmp_path / "other", ["<s>", "</s>", "<end>"])
    (other / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    run = start(folder, tmp_path, f"--data.tokenizer={other}")
    assert f"data.tokenizer is {other}, not that of {folder}" in capfd.readouterr().out
    assert main(["convert", str(run), str(tmp_path / "out")]) == 0
    out = read_beside(tmp_path / "out")
    assert out.keys() == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert out["tokenizer.json"] == (other / "tokenizer.json").read_bytes()
    ids = {"bos_token_id": find_id(other, "<s>"), "eos_token_id": [find_id(other, "</s>"), find_id(other, "<end>")]}
    generation = json.loads(out["generation_config.json"])
    assert generation == {"pad_token_id": None, "repetition_penalty": 1.1, "top_k": 20} | ids
    assert ids.items() <= json.loads(out["config.json"]).items()


def test_answers_end_with_the_tokenizers_own_token_and_documents_with_theirs(tmp_path):
    folder = save_words(tmp_path / "words", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ("</s>",))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    files = write_tiny(tmp_path, steps=1)
    assert train([str(files.config), f"--data.tokenizer={folder}"]) == 0
    assert main(["convert", str(files.run), str(tmp_path / "out")]) == 0
    ends = [find_id(folder, "<|endoftext|>"), find_id(folder, "<|im_end|>")]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == ends
    assert json.loads((tmp_path / "out" / "config.json").read_text())["_name_or_path"] == "tiny"


def test_a_resume_without_the_folder_keeps_what_there_was(tmp_path):
    folder = save_real("llama-2", tmp_path / "llama")
    before = read_beside(folder)
    run = start(folder, tmp_path, "--precision.compute=bfloat16")
    folder.rename(tmp_path / "gone")
    sizes = [f"--model.name={tmp_path / 'gone'}"]
    assert train([str(tmp_path / "tiny.toml"), f"--train.init_from={folder}", *sizes, "--train.steps=2"]) == 0
    assert load_config(run / "config.toml").data.tokenizer == str(run / "kept")
    assert main(["convert", str(run), str(tmp_path / "out")]) == 0
    assert read_beside(tmp_path / "out") == before


def parse(folder: Path, run: Path, **tables: dict) -> Config:
    train = {"steps": 1, "init_from": str(folder), "run_folder": str(run)}
    return parse_config({"batch": {"global_batch": 2, "seq_len": 16}, "train": train, **tables})


def test_a_run_reads_texts_as_its_weights_do_unless_another_tokenizer_is_named(tmp_path, capsys):
    folder, run = save_real("llama-2", tmp_path / "model"), tmp_path / "run"
    assert parse(folder, run).data.tokenizer == str(folder)
    assert parse(folder, run, data={"source": "x"}).data.tokenizer == str(folder)
    assert parse(folder, run, data={"tokenizer": "bytes"}).data.tokenizer == "bytes"
    config = tmp_path / "config.toml"
    config.write_text(parse(folder, run).to_toml())
    assert main(["check", str(config), "--data.tokenizer=bytes"]) == 0
    assert f"note: data.tokenizer is bytes, not that of {folder}" in capsys.readouterr().out
    assert main(["check", str(config), "--data"]) == 0
    assert "not that of" not in capsys.readouterr().out
    save_words(folder, ["<s>", "</s>", *(f"<{i}>" for i in range(300))])  # more than the model has rows
    assert main(["check", str(config), "--data"]) == 2
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert parse(folder, run).data.tokenizer == str(folder)  # of the run only checkpoints were copied here
    (run / "config.toml").write_text(parse(folder, run, data={"tokenizer": "bytes"}).to_toml())
    assert parse(folder, run).data.tokenizer == "bytes"  # it has begun so, before it kept any
    (run / "config.toml").write_text(parse(folder, run, data={"tokenizer": str(folder)}).to_toml())
    assert parse(folder, run).data.tokenizer == str(folder)
    (run / "kept").mkdir()
    (folder / "tokenizer.json").rename(run / "kept" / "tokenizer.json")
    assert parse(folder, run).data.tokenizer == str(run / "kept")
    (run / "kept" / "tokenizer.json").rename(run / "kept" / "tokenizer.model")
    shutil.rmtree(folder)
    with pytest.raises(InvalidConfig, match=r"kept has a tokenizer, but no tokenizer\.json"):
        parse(folder, run)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tokenizer_config.json"])
def test_a_tokenizer_of_another_form_is_refused_and_not_forgotten(tmp_path, name):
    folder, run = save_real("llama-2", tmp_path / "model"), tmp_path / "run"
    for file in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        (folder / file).unlink()
    assert parse(folder, run).data.tokenizer == "bytes"
    (folder / name).write_text("{}")
    with pytest.raises(InvalidConfig, match=r"has a tokenizer, but no tokenizer\.json; save it with AutoTokenizer"):
        parse(folder, run)
    assert parse(folder, run, data={"tokenizer": "bytes"}).data.tokenizer == "bytes"


def test_files_beside_the_weights_that_lead_elsewhere_do_not_go_along(tmp_path, capsys):
    folder = save_real("llama-2", tmp_path / "model")
    (tmp_path / "secret").write_text("a key")
    (folder / "vocab.json").symlink_to(tmp_path / "secret")
    assert main(["convert", str(folder), str(tmp_path / "run")]) == 2
    assert "'vocab.json' leads out of" in capsys.readouterr().err and not (tmp_path / "run").exists()
    (problem,) = check_init_from(str(folder), find_model(str(folder)))
    assert "'vocab.json' leads out of" in problem


def test_a_tokenizer_that_a_user_links_to_goes_along_with_what_lies_beside_it(tmp_path):
    shared, linked, out = save_real("llama-2", tmp_path / "shared"), tmp_path / "linked", tmp_path / "out"
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    for folder in (linked, out):
        folder.mkdir()
    for name in names:
        (linked / name).symlink_to(shared / name)
    write_beside(out, None, DataConfig(tokenizer=str(linked)))
    assert read_beside(out).keys() == {*names, "generation_config.json"}
    assert all((out / name).read_bytes() == (shared / name).read_bytes() for name in names)
    (linked / "vocab.json").symlink_to(write_tiny(tmp_path).config)
    with pytest.raises(InvalidConfig, match=r"'vocab.json' leads out of"):
        write_beside(out, None, DataConfig(tokenizer=str(linked)))


def test_an_export_from_another_directory_needs_no_file_of_the_first(tmp_path, monkeypatch, capsys):
    """With a config whose paths begin in the working directory, the cluster's and the tokenizer's among them."""
    save_words(tmp_path / "words", ["<s>", "</s>"])
    files = write_tiny(tmp_path, steps=1)
    cluster = 'gpus_per_node = 8\n[gpu]\nname = "cpu"\n'
    (tmp_path / "cluster.toml").write_text(cluster)
    (tmp_path / "chat.jinja").write_text(CHATML)
    monkeypatch.chdir(tmp_path)
    said = ["--data.tokenizer=words", "--data.chat_template=chat.jinja", "--train.run_folder=runs/mine"]
    assert train([str(files.config), *said]) == 0
    config = tmp_path / "runs" / "mine" / "config.toml"
    config.write_text(config.read_text().replace('file = ""', 'file = "cluster.toml"'))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "words").rename(tmp_path / "gone")
    for out, source in ((Path("a"), "../runs/mine"), (Path("b"), "../runs/mine/checkpoints/step-00000001")):
        assert main(["convert", source, str(out)]) == 0
        assert (out / "tokenizer.json").read_bytes() == (tmp_path / "gone" / "tokenizer.json").read_bytes()
        assert (out / "chat_template.jinja").read_text() == CHATML
        assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 16
    capsys.readouterr()
    assert main(["generate", "../runs/mine", "--prompt", "3 times", "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("3 times")


def test_answers_of_a_run_end_as_its_tokenizer_says(tmp_path, monkeypatch):
    folder = save_words(tmp_path / "words", ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<stop>"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": find_id(folder, "<stop>")}))
    files = write_tiny(tmp_path, steps=1)
    assert train([str(files.config), f"--data.tokenizer={folder}"]) == 0
    assert main(["convert", str(files.run), str(tmp_path / "out")]) == 0
    seen = []
    monkeypatch.setattr("dtlayout.training.generate.generate", lambda *_, ends: seen.append(ends) or [])
    for source in (files.run, tmp_path / "out"):
        assert main(["generate", str(source), "--prompt", "3"]) == 0
    assert main(["generate", str(files.run), "--prompt", "3", "--end-of-document", "times"]) == 0
    ends = {find_id(folder, token) for token in ("<|endoftext|>", "<|im_end|>", "<stop>")}
    assert seen == [ends, ends, {find_id(folder, "times")}]


def test_a_run_is_no_other_model_because_of_a_folder_with_its_models_name(tmp_path, monkeypatch):
    """Its config says all sizes; what it leaves out is not there, and is not to be looked up."""
    monkeypatch.chdir(tmp_path)
    save_real("llama-3.1-instruct", Path("tiny"))
    said = write_tiny(tmp_path).config
    whole = load_config(said, ["--model.name=other"])
    again = toml.loads(whole.to_toml())
    again["model"]["name"] = "tiny"
    assert parse_config(again).model == replace(whole.model, name="tiny")
