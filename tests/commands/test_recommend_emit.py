"""dtlayout recommend --emit: configs that train what was recommended, for our trainer and for other programs."""

import contextlib
import io
import json

import pytest
from hf_models import SIZES
from real_folders import save_words
from recommending import DEBUG, HF, LLAMA, ask, refuse, with_model

from dtlayout.base import files
from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.config.checking import check_layout
from dtlayout.config.loading import load_config
from dtlayout.models.files import find_model
from dtlayout.models.presets import PRESETS

FOLDER = ["--gpu", "cpu", "--gpus", "2", "--seq-len", "64", "--global-batch", "8", "--top", "1"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A function that saves a Llama with weights and a tokenizer of 337 ids, and gives its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def save(name, vocab_size=337):
        folder = tmp_path_factory.mktemp("hf") / name
        torch.manual_seed(0)
        with contextlib.redirect_stderr(io.StringIO()):  # where its progress is shown
            LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": vocab_size})).save_pretrained(folder)
        return save_words(folder, ["</s>"], tuple(f"w{i}" for i in range(337 - 1 - 143)))

    return save


def test_what_is_emitted_for_a_folder_trains_it_further(capsys, tmp_path, llama):
    folder, path = llama("mine"), tmp_path / "further.toml"
    document = ask(capsys, "--model", str(folder), *FOLDER, "--fix", "tp=2", "--emit", str(path))
    config = load_config(path)
    assert (config.train.init_from, config.data.tokenizer) == (str(folder), str(folder))
    assert (config.model.name, config.model.num_layers) == ("mine", 4)
    assert (config.model.vocab_size, config.model.unused_rows) == (338, 1)
    assert check_layout(config, 2).tp == 2
    assert f'[model]\nname = "{folder}"\n\n' in path.read_text()
    (said,) = [remark for remark in document["remarks"] if "tp divides" in remark]
    assert said.startswith("Not every tp divides 337 rows of the vocabulary, so predictions are with 338. A run ")
    assert said.endswith("for its own tp: with tp=2 it has 338, of which 1 are no tokens.")
    ask(capsys, "--model", str(folder / "config.json"), *FOLDER, "--vocab", "340", "--emit", str(path))
    config = load_config(path)
    assert (config.train.init_from, config.model.vocab_size, config.model.unused_rows) == (str(folder), 340, 0)


def test_tokens_that_only_the_tokenizer_has_are_rows_of_the_prediction_too(capsys, llama):
    document = ask(capsys, "--model", str(llama("added", 300)), *FOLDER, "--fix", "tp=1")
    assert document["scenario"]["model"]["vocab_size"] == 337 and not document["scenario"]["model"]["unused_rows"]


def test_a_folder_without_weights_is_emitted_with_sizes_and_its_tokenizer(capsys, tmp_path, llama):
    folder, path = llama("bare"), tmp_path / "bare.toml"
    (folder / "model.safetensors").unlink()
    ask(capsys, "--model", str(folder), *FOLDER, "--fix", "tp=2", "--emit", str(path))
    config = load_config(path)
    assert (config.train.init_from, config.data.tokenizer) == ("", str(folder))
    assert (config.model.vocab_size, config.model.unused_rows, check_layout(config, 2).tp) == (338, 1, 2)
    ask(capsys, "--model", str(folder), *FOLDER, "--fix", "tp=1", "--emit", str(path))
    assert load_config(path).model.vocab_size == 337


def test_weights_that_cannot_be_taken_are_not_and_the_config_says_why(capsys, tmp_path, llama):
    folder, path = llama("torn"), tmp_path / "torn.toml"
    (folder / "model.safetensors").write_bytes(b"not one")
    ask(capsys, "--model", str(folder), *FOLDER, "--emit", str(path))
    assert load_config(path).train.init_from == ""
    assert f"# It starts from random weights, not from those of {folder}: train.init_from=" in path.read_text()
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    ask(capsys, "--model", str(folder), *FOLDER, "--emit", str(path))
    assert "its tokenizer has another form than tokenizer.json" in path.read_text()


@pytest.mark.parametrize("extra", [[], ["--fix", "pp=2"], ["--engine", "aa-scaling", "--fix", "pp=4"]])
def test_an_emitted_config_loads_and_is_legal_on_that_world(capsys, tmp_path, extra):
    path = tmp_path / "best.toml"
    document = ask(capsys, *LLAMA, "--vocab", "50_000", "--emit", str(path), *extra)
    config = load_config(path)
    layout = check_layout(config, 16)
    best = document["layouts"][0]
    assert {
        name: getattr(layout, name) for name in ("tp", "pp", "dp_shard", "dp_replicate", "micro_batch", "zero")
    } == {name: best["layout"][name] for name in ("tp", "pp", "dp_shard", "dp_replicate", "micro_batch", "zero")}
    assert (config.model.vocab_size, config.train.device, config.cluster.gpu) == (50_000, "cuda", "a100-80g-sxm")
    text = path.read_text()
    assert text.startswith("# llama-7b on 16 x a100-80g-sxm") and "# Run it: torchrun --nnodes 2 " in text
    assert "uncalibrated" in text or extra[:1] == ["--engine"]
    if document["layouts"][1:]:
        following = document["layouts"][1]["name"]
        (lead,) = [line for line in text.splitlines() if line.startswith(f"# The next best is {following}; this is ")]
        assert " than that" in lead or " as that within 0.5%" in lead


def test_what_is_emitted_is_for_the_program_that_the_engine_predicts_for(capsys, tmp_path):
    path, arguments = tmp_path / "job.yaml", [*with_model(LLAMA, "llama3.1-8b"), "--engine", "nanotron", "--top", "1"]
    document = ask(capsys, *arguments, "--emit", str(path))
    assert document["emitted_for"]["program"] == "nanotron commit 00708b80c8"
    gaps = document["emitted_for"]["gaps"]
    assert any(gap.startswith("model.rope_scaling is left out") for gap in gaps)
    lines = path.read_text().splitlines()
    comments = [line for line in lines if line.startswith("# ")]
    assert lines[0] == "# llama3.1-8b on 16 x a100-80g-sxm, by dtlayout recommend."
    assert [f"# What they cannot say: {gap}." for gap in gaps] == [c for c in comments if "cannot say" in c]
    assert any("run_train.py --config-file job.yaml" in comment for comment in comments)
    assert f"  tp: {document['layouts'][0]['layout']['tp']}" in lines
    assert main(["recommend", *arguments, "--emit", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"1 is written to {path}, for nanotron commit 00708b80c8\n" in said
    assert "\n  model.rope_scaling is left out" in said


def test_a_script_begins_with_its_shell(capsys, tmp_path):
    path = tmp_path / "job.sh"
    assert main(["recommend", *LLAMA, "--engine", "megatron", "--emit", str(path), "--top", "1"]) == 0
    assert path.read_text().startswith("#!/usr/bin/env bash\n# llama-7b on 16 x")
    assert f"1 is written to {path}, for Megatron-LM commit 000c4ac24f, as a shell script\n" in capsys.readouterr().out


def test_an_emitted_config_for_the_cpu_needs_no_gpu_and_no_file(capsys, tmp_path):
    path = tmp_path / "debug.toml"
    assert main(["recommend", *DEBUG, "--precision", "compute=float32", "--emit", str(path), "--top", "1"]) == 0
    assert f"1 is written to {path}" in capsys.readouterr().out
    config = load_config(path)
    assert check_layout(config, 4).world_size == 4
    assert (config.train.device, config.data.source, config.data.tokenizer) == ("cpu", "python-stdlib", "bytes")
    assert config.model == PRESETS["debug"] and config.precision.compute == "float32"


def test_only_what_it_wrote_itself_is_written_over(capsys, tmp_path, monkeypatch):
    path = tmp_path / "best.toml"
    path.touch()  # as mktemp does
    ask(capsys, *DEBUG, "--top", "1", "--emit", str(path))
    ask(capsys, *DEBUG, "--top", "1", "--emit", str(path))
    own = path.read_text().replace("by dtlayout recommend", "by me")
    path.write_text(own)
    problem = f"{path} is there already, and is not what dtlayout recommend wrote; name another file"
    assert problem in refuse(capsys, *DEBUG, "--top", "1", "--emit", str(path))
    assert "is there already, and is not a page" in refuse(capsys, *DEBUG, "--top", "1", "--page", str(path))
    assert path.read_text() == own

    def refuse_to_open(path, *mode):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(files.Path, "open", refuse_to_open)
        with pytest.raises(InvalidConfig, match="is there already, and cannot be read: Permission denied"):
            files.check_page(path)


def test_a_vocabulary_too_small_for_bytes_asks_for_a_tokenizer(capsys, tmp_path):
    path = tmp_path / "small.toml"
    ask(capsys, *DEBUG, "--vocab", "64", "--emit", str(path))
    assert load_config(path).data.tokenizer == "data/tokenizer.json"
    assert "Bytes need 257 ids, the model has 64" in path.read_text()


def test_an_adapter_of_a_preset_asks_for_the_weights_beside_it(capsys, tmp_path):
    path = tmp_path / "lora.toml"
    asked = ["--gpu", "h100", "--gpus", "1", "--seq-len", "1024", "--global-batch", "8", "--adapter", "lora"]
    assert main(["recommend", "--model", "llama3.2-1b", *asked, "--emit", str(path)]) == 0
    kernels = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Kernels of 1: "))
    assert "experts" not in kernels
    random = "note: the frozen model beside [adapter] is drawn at random; train.init_from names its weights"
    assert main(["check", str(path), "--world", "1"]) == 0 and random in capsys.readouterr().out
    assert '# init_from = "FOLDER"' in path.read_text()


def test_an_own_model_is_emitted_with_all_sizes(capsys, tmp_path):
    hf, path = tmp_path / "config.json", tmp_path / "best.toml"
    hf.write_text(json.dumps(HF))
    ask(capsys, *with_model(LLAMA, hf), "--emit", str(path))
    model = load_config(path).model
    assert model.rope_scaling == PRESETS["llama3.1-8b"].rope_scaling and model.num_kv_heads == 8


def test_a_traced_model_is_emitted_with_what_it_uses_alone(capsys, tmp_path, monkeypatch):
    from transformers import GPTNeoXConfig

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, path = tmp_path / "neox", tmp_path / "best.toml"
    GPTNeoXConfig(**SIZES, architectures=["GPTNeoXForCausalLM"]).save_pretrained(folder)
    ask(capsys, "--model", str(folder), *FOLDER, "--emit", str(path))
    section = path.read_text().partition("[model]\n")[2].partition("\n\n")[0]
    assert [line.partition(" ")[0] for line in section.splitlines()] == [
        "name", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_size", "vocab_size", "family", "trace",
        "block_kinds",
    ]  # fmt: skip
    assert load_config(path).model == find_model(str(folder))


def test_an_emitted_config_can_say_whatever_its_model_and_its_cluster_say(capsys, tmp_path):
    hf = {**HF, "rope_theta": 1e300, "num_hidden_layers": 4}
    folder, path = tmp_path / "llama 😀 \x7f", tmp_path / "emitted.toml"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    assert main(["recommend", *with_model(LLAMA, folder), "--emit", str(path)]) == 0
    model = load_config(path).model
    assert (model.name, model.rope_theta) == (folder.name, 1e300)


def test_an_engine_whose_arguments_nobody_knows_gets_our_own_config_and_the_answer_says_so(capsys, tmp_path):
    path = tmp_path / "best.toml"
    assert main(["recommend", *LLAMA, "--engine", "aa-scaling", "--emit", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"1 is written to {path}, for our own trainer, dtlayout\n  nobody knows the arguments of aa-scaling" in said
    assert check_layout(load_config(path), 16).world_size == 16


def test_a_config_that_is_like_another_keeps_all_that_no_layout_decides(capsys, tmp_path):
    mine, path = tmp_path / "mine.toml", tmp_path / "best.toml"
    mine.write_text(
        """[model]
name = "debug"
[batch]
global_batch = 8
seq_len = 64
[layout]
tp = 2
micro_batch = 2
[kernels]
norm = "eager"
[optimizer]
lr = 3e-3
[data]
tokenizer = "bytes"
max_bad_rows = 3
[[data.mixture]]
source = "a.jsonl"
weight = 2.0
[[data.mixture]]
source = "b.txt"
[train]
epochs = 2
[validation]
every = 5
[[validation.sets]]
name = "held"
source = "held.txt"
[checkpoint]
every = 7
"""
    )
    asked = ["--like", str(mine), "--gpu", "cpu", "--gpus", "4", "--global-batch", "16", "--fix", "tp=1"]
    ask(capsys, *asked, "--emit", str(path), "--precision", "compute=float32")
    before, after = load_config(mine), load_config(path)
    assert (after.data, after.validation, after.checkpoint) == (before.data, before.validation, before.checkpoint)
    assert (after.optimizer, after.train.epochs, after.train.device) == (before.optimizer, 2, "cpu")
    assert (after.batch.global_batch, after.layout.tp, after.precision.compute) == (16, 1, "float32")
    assert after.train.run_folder == "runs/best" and "those of the file that --like names" in path.read_text()
    assert "python-stdlib" not in path.read_text()


@pytest.mark.parametrize(
    ("layout", "gpus", "problem"),
    [
        ("tp = 2\ndp_shard = 1", 4, "world size 4 does not fit the layout: tp=2 needs 2 ranks"),
        ("tp = 2", 3, "world size 3 does not fit the layout: tp=2 needs a multiple of 2 ranks"),
        ("micro_batch = 4", 4, "global_batch=8"),
    ],
)
def test_a_config_like_which_another_is_wanted_need_not_fit_the_gpus(capsys, tmp_path, layout, gpus, problem):
    mine, path = tmp_path / "mine.toml", tmp_path / "best.toml"
    text = f'[model]\nname = "debug"\n[batch]\nglobal_batch = {gpus * 2}\nseq_len = 64\n[layout]\n{layout}\n'
    mine.write_text(f'{text}[data]\ntokenizer = "bytes"\n[train]\nsteps = 2\n')
    asked = ["--like", str(mine), "--gpu", "cpu", "--gpus", str(gpus), "--top", "1"]
    document = ask(capsys, *asked, "--emit", str(path))
    assert document["yours"]["layout"] is None
    assert any(problem in each for each in document["yours"]["misfits"])
    assert check_layout(load_config(path), gpus).world_size == gpus
    assert main(["recommend", *asked]) == 0
    assert f"The layout of your file does not fit these GPUs: {document['yours']['misfits'][0]}" in " ".join(
        capsys.readouterr().out.split()
    )


def test_ranks_of_a_cpu_are_one_node_in_an_emitted_config(capsys, tmp_path):
    path = tmp_path / "cpu.toml"
    ask(capsys, *DEBUG, "--fix", "tp=2", "--emit", str(path))
    assert load_config(path).cluster.gpus_per_node == 4
