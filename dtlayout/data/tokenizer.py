"""Text to token ids: raw bytes, or any tokenizer.json.

Vocabulary: the end of document is the id that `prepare` writes after every document; text never produces it.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dtlayout.base.errors import DataError
from dtlayout.base.files import expand
from dtlayout.models.beside import TOKENIZER, find_end_token
from dtlayout.models.first_source import find_place
from dtlayout.models.peft import find_base_folder

if TYPE_CHECKING:
    import tokenizers

Ids = npt.NDArray[np.int64]

END_OF_DOCUMENT_TOKENS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>")
"""Special tokens that may end a document, tried in this order if none is named: Llama 2, Llama 3, GPT-2, Gemma."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, as preparing tokens needs it."""

    vocab_size: int
    """One more than the largest id, so that an embedding of this many rows is large enough."""
    end_of_document: int
    """The id that separates documents."""
    fingerprint: str
    """A text that is equal for two tokenizers only if they give equal ids."""
    encode_batch: Callable[[Sequence[str]], list[Ids]]
    """Ids of each text, without any special token; may use all cores."""
    encode_chats: Callable[[Sequence[str]], list[tuple[Ids, Ids]]]
    """Ids of each text, and the index of the character where each id begins; spelt special tokens become one id."""
    decode: Callable[[Sequence[int]], str]
    """Text of ids, without special tokens; an unfinished character at the end becomes U+FFFD."""
    spell: Callable[[Sequence[int]], str]
    """Text of ids as `decode` gives it, but with special tokens."""
    begin: tuple[int, ...] = ()
    """Ids that models expect before each document: Llama's <s>, Llama 3's <|begin_of_text|>; or none."""
    spelt: frozenset[str] = frozenset()
    """Tokens that become one id where the text of a conversation spells them."""
    end_of_answer: int | None = None
    """The id that ends an answer, where the files beside tokenizer.json name one as `eos_token`."""


def _encode_bytes(texts: Sequence[str]) -> list[Ids]:
    """Bytes of each text; characters that UTF-8 cannot hold (a lone surrogate) become `?`."""
    return [np.frombuffer(text.encode(errors="replace"), dtype=np.uint8).astype(np.int64) for text in texts]


def _encode_chats_as_bytes(texts: Sequence[str]) -> list[tuple[Ids, Ids]]:
    widths = [[len(character.encode(errors="replace")) for character in text] for text in texts]
    places = [np.repeat(np.arange(len(each), dtype=np.int64), each) for each in widths]
    return list(zip(_encode_bytes(texts), places, strict=True))


def _decode_bytes(ids: Sequence[int]) -> str:
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def _spell_bytes(ids: Sequence[int]) -> str:
    groups = (list(group) for _, group in groupby(ids, lambda each: each < 256))
    return "".join(
        bytes(group).decode(errors="replace") if group[0] < 256 else "<end>" * len(group) for group in groups
    )


BYTES = Tokenizer(
    vocab_size=257,
    end_of_document=256,
    fingerprint="bytes",
    encode_batch=_encode_bytes,
    encode_chats=_encode_chats_as_bytes,
    decode=_decode_bytes,
    spell=_spell_bytes,
)
"""A tokenizer whose ids 0 to 255 are the bytes of UTF-8, and 256 ends a document: nothing to download or train."""


def find_file(spec: str) -> Path | None:
    """Path of the tokenizer.json that `spec` means, even if it does not exist; None for "bytes"."""
    if spec == "bytes":
        return None
    path = expand(spec)
    return path / TOKENIZER if path.is_dir() else path


def find_other_tokenizer(spec: str, init_from: str) -> list[str]:
    """A warning line if `spec` is another tokenizer than the one in the folder of `init_from`; else empty."""
    own, place = find_file(spec), find_place(init_from)
    other = place / TOKENIZER
    if init_from and not other.is_file():  # an adapter without one reads texts as its frozen model does
        other = find_base_folder(place) / TOKENIZER
    if not init_from or not other.is_file() or (own and own.is_file() and own.read_bytes() == other.read_bytes()):
        return []
    return [f"data.tokenizer is {spec}, not that of {init_from}: its weights learned other texts for these ids"]


def load_tokenizer(spec: str, end_of_document: str = "") -> Tokenizer:
    """The tokenizer that `spec` names: "bytes", a tokenizer.json, or a folder that holds one.

    `end_of_document` names the token that separates documents. If it is empty, that is the first of
    `END_OF_DOCUMENT_TOKENS` that is a special token of the tokenizer, or else its own `eos_token`. Text that is spelt
    like such a token does not become one.
    """
    path = find_file(spec)
    if path is None:
        if end_of_document:
            raise DataError(
                f"end_of_document={end_of_document!r} asked of the tokenizer 'bytes', which ends documents with id 256 "
                "whatever is asked; leave end_of_document empty"
            )
        return BYTES
    if not path.is_file():
        raise DataError(
            f"tokenizer {spec!r}: there is no file {str(path)!r}; give 'bytes' or the path of a tokenizer.json"
        )
    stat = path.stat()
    return _load(path.absolute(), stat.st_size, stat.st_mtime_ns, end_of_document, find_end_token(path.parent))


@lru_cache(maxsize=1)  # all sources have the same one, which is checked before it is used, and takes a second to read
def _load(path: Path, size: int, mtime_ns: int, end_of_document: str, end_of_answer: str | None) -> Tokenizer:
    """The tokenizer of a file; `size` and `mtime_ns` change with the file, `end_of_answer` is its `eos_token`."""
    tokenizer = _read_tokenizer(path)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    end = _find_end_of_document(ids, special, end_of_document, end_of_answer, path)

    def encode_batch(texts: Sequence[str]) -> list[Ids]:
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    of_chats = cache(partial(_read_tokenizer, path, spells_special=True))  # read when there are conversations

    def encode_chats(texts: Sequence[str]) -> list[tuple[Ids, Ids]]:
        encodings = of_chats().encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(each.ids, dtype=np.int64), np.array([first for first, _ in each.offsets], dtype=np.int64))
            for each in encodings
        ]

    probe = tokenizer.encode("a", add_special_tokens=True)
    num_before = probe.special_tokens_mask.index(0) if 0 in probe.special_tokens_mask else 0
    begin = tuple(probe.ids[:num_before])

    return Tokenizer(
        vocab_size=max(ids.values(), default=-1) + 1,  # ids may have holes, so this isn't their number
        end_of_document=end,
        fingerprint="-".join((hashlib.sha256(path.read_bytes()).hexdigest(), *map(str, (end, *begin)))),
        encode_batch=encode_batch,
        encode_chats=encode_chats,
        decode=tokenizer.decode,
        spell=partial(tokenizer.decode, skip_special_tokens=False),
        begin=begin,
        spelt=frozenset(token.content for token in added),
        end_of_answer=ids.get(end_of_answer) if end_of_answer else None,
    )


def _read_tokenizer(path: Path, *, spells_special: bool = False) -> "tokenizers.Tokenizer":
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{str(path)!r} is not a tokenizer.json that `tokenizers` can read: {error}") from error
    tokenizer.no_truncation()  # the file may carry the features of a chat or a classifier
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not spells_special  # a document that spells "</s>" must not end itself
    return tokenizer


def _find_end_of_document(
    ids: dict[str, int], special: set[str], named: str, end_of_answer: str | None, path: Path
) -> int:
    """Id of the token `named`, else of the first usual end token that is special, else of the `eos_token`."""
    usual = [token for token in END_OF_DOCUMENT_TOKENS if token in special]
    for token in (named,) if named else (*usual, *([end_of_answer] if end_of_answer else [])):
        if token in ids:
            return ids[token]
    tried = named or f"{', '.join(END_OF_DOCUMENT_TOKENS)} as a special token, and no eos_token,"
    raise DataError(
        f"{str(path)!r} has none of the tokens {tried} to end a document; name one of its tokens with end_of_document"
    )
