"""New rows of embedding and head: for tokens that a tokenizer has more, and rows that are no tokens, for tp."""

import json
from pathlib import Path

import pytest
import torch
from hf_models import SIZES
from launching import launch, losses
from real_folders import save_words
from safetensors.torch import load_file
from tiny import write_tiny
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from dtlayout.checkpoint.manifest import find_checkpoint
from dtlayout.checkpoint.sharded import read_model
from dtlayout.cli import main
from dtlayout.config.checking import check_layout
from dtlayout.config.loading import load_config
from dtlayout.models.llama import Llama
from dtlayout.models.presets import PRESETS
from dtlayout.spec.batch import IGNORED
from dtlayout.spec.kernels import Kernels
from dtlayout.training.generate import Sampling, generate, open_model

ENDS = ("model.embed_tokens.weight", "lm_head.weight")


def save_llama(folder: Path, vocab_size: int, **more) -> Path:
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": vocab_size, "num_hidden_layers": 2}, **more)).save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def run(tmp_path):
    """Trains from a folder, in float32 on a text of numbers; the run folder. `beside` overrides the config."""
    files, log = write_tiny(tmp_path, steps=3), tmp_path / "log"
    text = files.config.read_text()
    files.config.write_text(text[text.index("[batch]") :])

    def train(name: str, num_ranks: int, folder: Path, *beside: str) -> Path:
        place = tmp_path / name
        options = (f"--train.init_from={folder}", f"--train.run_folder={place}", "--checkpoint.export=true", *beside)
        assert launch(num_ranks, files.config, *options, log=log) == 0, log.read_text()
        return place

    train.config, train.log = files.config, log
    return train


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


@pytest.mark.parametrize("tied", [False, True])
def test_an_odd_vocabulary_trains_at_tp2_as_alone_and_comes_out_with_its_own_rows(run, tmp_path, tied):
    folder = save_llama(tmp_path / "odd", 261, tie_word_embeddings=tied)
    alone, split = run("alone", 1, folder), run("split", 2, folder, "--layout.tp=2")
    assert losses(split) == pytest.approx(losses(alone), rel=1e-5)
    assert losses(alone)[-1] < losses(alone)[0]
    said = run.log.read_text()
    assert said.count("1 of 262 rows of embedding and head are no tokens, so that tp divides them; exports are") == 1
    assert said.count("note: 1 row of embedding and head cut, which were no tokens\nexported ") == 1
    shape = read_model(find_checkpoint(split))
    assert (shape.vocab_size, shape.unused_rows) == (262, 1)
    mine, theirs = read(split / "hf"), read(alone / "hf")
    for name, weight in theirs.items():
        torch.testing.assert_close(mine[name], weight, rtol=1e-4, atol=1e-5)
        assert name not in ENDS or weight.shape[0] == 261
    assert json.loads((split / "hf" / "config.json").read_text())["vocab_size"] == 261
    tokens = torch.arange(20)[None] * 7 % 257
    model = open_model(split, 24, "float32", "cpu")
    with torch.no_grad():
        ours = model(tokens)
        expected = AutoModelForCausalLM.from_pretrained(split / "hf", dtype=torch.float32)(tokens).logits
    assert (ours[..., 261:] == -torch.inf).all()
    torch.testing.assert_close(ours[..., :261], expected, rtol=1e-4, atol=1e-4)
    drawn = list(generate(model, [5], 20, Sampling(temperature=100, top_p=1).make()))
    assert len(drawn) == 20 and max(drawn) < 261


@pytest.mark.parametrize("new_rows", ["mean", "normal"])
def test_tokens_that_were_added_to_the_tokenizer_have_rows_and_a_resume_keeps_them(run, tmp_path, new_rows):
    folder = save_words(tmp_path / "words", ["</s>"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    num_before = tokenizer.get_vocab_size()
    save_llama(folder, num_before)
    before = read(folder)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["whole", "new", *(["odd"] * ((num_before + 4) % 2 == 0))])
    tokenizer.save(str(folder / "tokenizer.json"))
    num_ids = tokenizer.get_vocab_size()
    assert num_ids % 2 == 1
    still = ("--optimizer.lr=1e-30", f"--train.new_rows={new_rows}")
    degrees = (2, 1) if new_rows == "mean" else (1, 2)
    place = run("new", degrees[0], folder, f"--layout.tp={degrees[0]}", "--train.steps=1", *still)
    how = "the mean of the others" if new_rows == "mean" else "drawn as first weights are"
    said = f"{folder} has {num_before} rows of embedding and head: {num_ids - num_before} for more tokens are {how}\n"
    assert said in run.log.read_text()
    after = read(place / "hf")
    for name in ENDS:
        assert torch.equal(after[name][:num_before], before[name]) and after[name].shape[0] == num_ids
        added = after[name][num_before:]
        if new_rows == "mean":
            torch.testing.assert_close(added, before[name].mean(0).expand_as(added))
        else:
            assert 0.01 < added.std() < 0.04 and not torch.equal(added[0], added[1])
    exported = AutoModelForCausalLM.from_pretrained(place / "hf")
    assert exported.get_input_embeddings().weight.shape[0] == num_ids == exported.config.vocab_size
    run("new", degrees[1], folder, f"--layout.tp={degrees[1]}", "--train.steps=2", *still)
    said = run.log.read_text()
    assert f"note: the layout was {'tp2+sp mb2 zero1' if degrees[0] == 2 else '1 rank mb2 zero1'} when this was" in said
    counted = (
        f"embedding and head had {num_ids} rows when this was saved and have {num_ids + 1}, so that tp divides them"
    )
    assert (f"note: {counted}: 1 row is no token\n" in said) == (degrees == (1, 2))
    assert (shape := read_model(find_checkpoint(place))).vocab_size == num_ids + 1 and shape.unused_rows == 1
    again = read(place / "hf")
    assert all(torch.equal(again[name], weight) for name, weight in after.items())


def test_rows_are_decided_by_tokenizer_and_tp_and_not_where_the_config_says_them(run, tmp_path):
    folder = save_llama(tmp_path / "odd", 261)

    def sizes(*overrides: str) -> tuple[int, int]:
        model = load_config(run.config, [f"--train.init_from={folder}", *overrides]).model
        return model.vocab_size, model.unused_rows

    assert sizes() == sizes("--layout.tp=3") == (261, 0)
    assert sizes("--layout.tp=2") == (262, 1)
    assert sizes("--layout.tp=4") == (264, 3)
    assert sizes(f"--model.name={folder}", "--model.vocab_size=300", "--layout.tp=4") == (300, 0)
    assert sizes("--adapter.rank=2", "--layout.tp=2") == (261, 0)
    small = save_llama(tmp_path / "small", 200)
    assert sizes(f"--train.init_from={small}", "--layout.tp=2") == (200, 0)  # no tokenizer is named
    assert sizes(f"--train.init_from={small}", "--data.tokenizer=bytes", "--layout.tp=2") == (258, 1)

    begun, asked = tmp_path / "begun", [f"--model.name={folder}", f"--train.run_folder={tmp_path / 'begun'}"]
    assert main(["convert", str(folder), str(begun)]) == 0
    begin = ["--train.init_from=", *asked]
    assert sizes(*begin) == (261, 0) and sizes(*begin, "--layout.tp=4") == (264, 3)
    assert sizes(*begin, "--model.vocab_size=261", "--layout.tp=2") == (262, 1)  # as a run's own config says it
    assert sizes(*begin, "--model.vocab_size=300", "--layout.tp=2") == (300, 0)
    assert sizes(f"--train.init_from={begun}", "--layout.tp=2") == (262, 1)
    config = load_config(run.config, [f"--train.init_from={begun}", "--layout.tp=2"])
    assert check_layout(config, 2).tp == 2


def test_a_folder_that_becomes_a_run_has_a_row_for_each_token(tmp_path, capsys):
    folder = save_words(tmp_path / "words", ["</s>"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    save_llama(folder, num_before := tokenizer.get_vocab_size() - 2)
    assert main(["convert", str(folder), str(tmp_path / "run")]) == 0
    said = f"note: {folder} has {num_before} rows of embedding and head: 2 for more tokens are the mean of the others\n"
    assert said in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "float32"]) == 0
    before, after = read(folder), read(tmp_path / "out")
    for name in ENDS:
        assert after[name].shape[0] == num_before + 2 and torch.equal(after[name][:num_before], before[name])
        torch.testing.assert_close(after[name][num_before:], before[name].mean(0).expand(2, -1))


def test_check_says_new_rows_and_how_much_an_adapter_trains(run, tmp_path, capsys):
    folder = save_words(tmp_path / "words", ["</s>"])
    num_ids = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    save_llama(folder, num_ids - 3 - num_ids % 2)
    asked = [str(run.config), f"--train.init_from={folder}", f"--train.run_folder={tmp_path / 'none'}", "--world", "2"]
    capsys.readouterr()
    assert main(["check", *asked, "--layout.tp=2"]) == 0
    said = capsys.readouterr().out
    first = f"note: {folder} has {num_ids - 3 - num_ids % 2} rows of embedding and head: {3 + num_ids % 2} for more"
    assert first in said and ("are no tokens, so that tp divides them" in said) == bool(num_ids % 2)
    assert " trained, " not in said and "optimizer.lr=" not in said
    assert main(["check", *asked, "--layout.tp=2", "--optimizer.lr=3e-4"]) == 0
    rate = (
        "note: optimizer.lr=0.0003 is the default, for a model that has learnt nothing, and optimizer.warmup_steps is 0"
    )
    assert rate in (said := capsys.readouterr().out) and "1e-5 to 2e-5" in said
    save_llama(folder, num_ids)
    assert main(["check", *asked, "--adapter.rank=2", "--adapter.targets=['q_proj']"]) == 0
    trained, width = 2 * 2 * (32 + 32), 32  # two blocks, two matrices of rank 2
    total = 2 * num_ids * width + 2 * (4 * width**2 + 3 * width * 48 + 2 * width) + width + trained
    assert f"{total:,} parameters ({trained:,} trained, {trained / total:.2%})\n" in capsys.readouterr().out


@pytest.mark.parametrize("loss", ["eager", "chunked", "linear"])
def test_unused_rows_take_no_part_in_the_loss(loss):
    from dataclasses import replace

    shape = replace(PRESETS["debug"], vocab_size=31, num_layers=1, unused_rows=4)
    torch.manual_seed(0)
    model, cut = (Llama(each, Kernels(loss=loss, attention="sdpa-math"), 8) for each in (shape, shape.without_unused))
    with torch.no_grad():
        for (name, weight), whole in zip(cut.named_parameters(), model.parameters(), strict=True):
            torch.nn.init.normal_(whole, std=0.3)
            weight.copy_(whole[:27] if name in ENDS else whole)
    tokens = torch.randint(27, (2, 8))
    targets = tokens.roll(1).masked_fill(tokens % 3 == 0, IGNORED)
    found = [each(tokens, targets=targets, num_targets=5.0) for each in (model, cut)]
    assert found[0] == found[1]
    for each in found:
        each.backward()
    for (name, weight), whole in zip(cut.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(whole.grad[:27] if name in ENDS else whole.grad, weight.grad)
        assert name not in ENDS or not whole.grad[27:].any()
    with torch.no_grad():
        assert torch.equal(model(tokens)[..., :27], cut(tokens)) and (model(tokens)[..., 27:] == -torch.inf).all()


def test_a_traced_model_without_the_rows_that_it_needs_is_refused_with_the_call_that_makes_them(run, tmp_path, capsys):
    torch.manual_seed(3)
    few = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=255, **few))
    model.save_pretrained(folder := tmp_path / "odd")

    def check(place: Path, *beside: str) -> tuple[int, str]:
        options = (f"--model.name={place}", f"--train.init_from={place}", *beside)
        return main(["check", str(run.config), "--world", "2", *options]), capsys.readouterr().err

    call = "resize it, by transformers: model.resize_token_embeddings(257, pad_to_multiple_of=8), and save_pretrained"
    code, said = check(folder)
    few_rows = "the tokenizer has 257 ids, the model 255 rows of embedding and head"
    assert code == 2 and f"a traced model gets no new rows: {few_rows}; {call}" in said
    code, said = check(folder, "--layout.tp=2")
    assert code == 2 and f"{few_rows}; tp=2 does not divide 255 rows; {call}" in said
    assert "tp=2 does not divide vocab_size=255; use tp=1" in said

    model.resize_token_embeddings(257, pad_to_multiple_of=8)
    model.save_pretrained(tmp_path / "grown")
    assert check(tmp_path / "grown", "--layout.tp=2", "--train.force=true")[0] == 0


def test_beside_an_adapter_more_rows_than_the_folder_has_are_refused_and_a_resized_folder_trains(run, tmp_path, capsys):
    folder = save_words(tmp_path / "words", ["</s>"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    save_llama(folder, num_before := tokenizer.get_vocab_size())
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    num_ids = num_before + 2
    asked = ("--adapter.rank=2", f"--train.run_folder={tmp_path / 'run'}", f"--train.init_from={folder}")

    def refuse(*beside: str) -> str:
        assert main(["check", str(run.config), "--world", "1", *asked, *beside]) == 2
        return capsys.readouterr().err

    advice = (
        f"and the frozen model has {num_before} rows of embedding and head, which a PEFT folder does not hold; resize "
        f"it first, by transformers: model.resize_token_embeddings({{}}, pad_to_multiple_of=8), and save_pretrained to "
        f"a new folder for train.init_from"
    )
    said = refuse()
    assert f"beside [adapter] no rows are added: the tokenizer has {num_ids} ids, {advice.format(num_ids)}" in said
    said = refuse(f"--model.name={folder}", f"--model.vocab_size={num_ids + 1}")
    assert (
        f"model.vocab_size={num_ids + 1}, {advice.format(num_ids + 1)}" in said and said.count("no rows are added") == 1
    )

    saved = save_llama(tmp_path / "odd", 261)
    said = refuse(f"--train.init_from={saved}", "--layout.tp=2")
    assert "tp=2 does not divide vocab_size=261; use tp=1" in said
    assert (
        "beside [adapter] no rows fill up vocab_size=261 for tp=2; resize the frozen model, by transformers: " in said
    )
    assert "model.resize_token_embeddings(261, pad_to_multiple_of=8), and save_pretrained to a new folder" in said

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(num_ids, pad_to_multiple_of=8)
    model.save_pretrained(grown := tmp_path / "grown")
    tokenizer.save(str(grown / "tokenizer.json"))
    place = run("adapted", 2, grown, "--layout.tp=2", "--train.steps=1", "--adapter.rank=2")
    assert read(place / "hf") and model.config.vocab_size % 8 == 0
