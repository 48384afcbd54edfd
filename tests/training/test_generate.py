"""Generated text: the tokens that `transformers` takes, on one process and under tp, and text that comes in pieces."""

import json
from pathlib import Path

import pytest
import torch
from hf_models import MADE, save_made
from tiny import write_tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM

from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.config.loading import load_config
from dtlayout.data.tokenizer import BYTES
from dtlayout.launch import main as train
from dtlayout.training.generate import Sampling, generate, open_model, stream_text

PROMPT = [*range(3, 60, 5)]
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module", params=[*MADE, "mixtral", "hub's qwen3_moe"])
def folder(request, tmp_path_factory) -> Path:
    return save_made(request.param, tmp_path_factory.mktemp("made"))


def continue_prompt(folder: Path) -> list[int]:
    model = open_model(folder, 40, "float32", "cpu")
    return list(generate(model, PROMPT, 20, GREEDY.make()))


def test_greedy_tokens_are_those_of_transformers(ranks4, folder):
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(PROMPT) :].tolist()  # fmt: skip
    assert len(set(wanted)) > 3
    assert continue_prompt(folder) == wanted
    assert ranks4.run(continue_prompt, folder) == [wanted] * 4


def test_a_model_is_as_it_was_after_a_text(folder):
    model = open_model(folder, 40, "float32", "cpu")
    tokens = torch.tensor([PROMPT])
    before = model(tokens)
    ids = generate(model, PROMPT, 20, GREEDY.make())
    next(ids)
    ids.close()
    assert torch.equal(model(tokens), before)


def test_a_text_may_be_longer_than_the_model_was_opened_for(folder):
    model = open_model(folder, 8, "float32", "cpu")
    assert list(generate(model, PROMPT, 20, GREEDY.make())) == continue_prompt(folder)


def test_it_ends_at_the_end_of_a_document(folder):
    model = open_model(folder, 40, "float32", "cpu")
    whole = list(generate(model, PROMPT, 20, GREEDY.make()))
    assert list(generate(model, PROMPT, 20, GREEDY.make(), ends={whole[3]})) == whole[: whole.index(whole[3])]


def test_tokens_are_taken_as_often_as_they_are_likely():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()

    def shares(**how: float) -> list[float]:
        take = Sampling(seed=1, **how).make()
        taken = [take(logits) for _ in range(4000)]
        return [taken.count(token) / len(taken) for token in range(4)]

    assert shares(temperature=1.0, top_p=1.0) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert shares(temperature=1.0, top_p=0.6) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert shares(temperature=0.5, top_p=1.0) == pytest.approx([0.685, 0.247, 0.062, 0.007], abs=0.03)
    assert shares(temperature=1.0, top_p=1.0, top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert shares(temperature=1.0, top_p=0.6, top_k=2) == [1, 0, 0, 0]  # of those two, the first has 0.625
    assert shares(temperature=0.0) == [1, 0, 0, 0]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(InvalidConfig) as caught:
        Sampling(temperature=-1, top_p=0, top_k=-1, seed=2**63)
    assert [problem.partition("=")[0] for problem in caught.value.problems] == ["temperature", "top_p", "top_k", "seed"]


def test_characters_come_when_they_are_whole():
    text = "a é 漢 🙂 end"
    pieces = list(stream_text(list(text.encode()), BYTES.decode))
    assert "".join(pieces) == text
    assert "🙂" in pieces
    assert "".join(stream_text("é".encode()[:1], BYTES.decode)) == "\N{REPLACEMENT CHARACTER}"


def test_the_space_between_prompt_and_text_stays_where_tokenizers_drop_a_first_one():
    words = [" 12", " times", " hello"]

    def decode(ids):
        return "".join(words[i] for i in ids).removeprefix(" ")

    assert list(stream_text([1, 2], decode, before=[0])) == [" times", " hello", ""]


def test_ids_beyond_the_model_are_refused(tmp_path, capsys):
    folder = save_made("llama", tmp_path)
    tokenizer = Tokenizer(WordLevel({"word": 700, "</s>": 1}, unk_token="word"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "big.json"))
    assert main(["generate", str(folder), "--prompt", "word", "--tokenizer", str(tmp_path / "big.json")]) == 2
    assert "gives the prompt id 700, the model has vocab_size=260" in capsys.readouterr().err


def test_a_run_writes_text(tmp_path, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    files = write_tiny(tmp_path, steps=2)
    assert main(["generate", str(files.run), "--prompt", "1 times"]) == 2
    assert f"there is no folder {files.run}; give a run" in capsys.readouterr().err
    files.run.mkdir()
    assert main(["generate", str(files.run), "--prompt", "1 times"]) == 2
    assert "does not say which tokenizer it has" in capsys.readouterr().err
    assert load_config(files.config).train.steps == 2
    assert train([str(files.config)]) == 0
    capsys.readouterr()
    asked = ["generate", str(files.run), "--prompt", "1 times", "--max-tokens", "5"]
    assert main(asked) == 0
    streamed = capsys.readouterr().out
    assert streamed.startswith("1 times")
    assert main([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["prompt"] + document["text"] + "\n" == streamed
    assert main([*asked, "--max-tokens", "0"]) == 2


def test_a_frozen_model_is_named_for_a_run_with_an_adapter_alone(tmp_path):
    folder = save_made("llama", tmp_path / "made")
    with pytest.raises(InvalidConfig, match=r"--base is for a run with an adapter, and .*made is none"):
        open_model(folder, 8, "float32", "cpu", tmp_path)
