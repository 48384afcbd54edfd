"""What the data tests share: an empty cache without network, a tiny tokenizer.json, tokens without a tokenizer."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

WORDS = ("<unk>", "</s>", "to", "be", "or", "not")


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cuts the hub off and gives `datasets` a cache of its own; the folder of that cache."""
    import datasets
    import huggingface_hub

    cache = tmp_path / "datasets-cache"
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # both were read at import
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    return cache


@pytest.fixture
def write_tokenizer(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tokenizer.json whose words are its vocabulary; ids count up in the order given."""

    def write(words: Sequence[str] = WORDS, special: Sequence[str] = ("</s>",), name: str = "tokenizer.json") -> Path:
        import tokenizers

        model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens(list(special))
        tokenizer.save(str(tmp_path / name))
        return tmp_path / name

    return write


@pytest.fixture
def write_tokens(tmp_path: Path) -> Callable[..., Path]:
    """Writes a folder such as `prepare_tokens` leaves, with these ids, in documents of these lengths."""

    def write(
        ids: Sequence[int],
        vocab_size: int = 257,
        documents: Sequence[int] = (),
        loss_mask: Sequence[int] = (),
        name: str = "prepared",
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        np.asarray(ids, dtype="<u2").tofile(folder / "tokens.bin")
        np.cumsum([0, *(documents or [len(ids)])]).astype("<i8").tofile(folder / "documents.bin")
        if loss_mask:
            np.asarray(loss_mask, dtype="<u1").tofile(folder / "taught.bin")
        info = {"dtype": "uint16", "num_tokens": len(ids), "num_documents": len(documents or [0])}
        info["vocab_size"] = vocab_size
        (folder / "tokens.json").write_text(json.dumps({**info, "end_of_document": 256, "sha256": "0"}))
        return folder

    return write
