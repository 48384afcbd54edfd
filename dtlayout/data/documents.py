"""Rows of a corpus as documents: ids, and a loss mask that says which of them are targets.

In plain text all ids are targets. In a conversation only the answers are, each with the token that ends it, unless
`loss_on` says "last", for the last answer alone, or "all".
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dtlayout.base.errors import DataError
from dtlayout.base.files import parse_json
from dtlayout.config.sections import DataConfig
from dtlayout.data.chat import ChatTemplate, load_template
from dtlayout.data.messages import ASSISTANT, ContentForm, check_messages, find_form, find_rules, fit_content
from dtlayout.data.readers import BadRow, SourceRow
from dtlayout.data.sources import BrokenFile, Corpus
from dtlayout.data.template import Spans
from dtlayout.data.tokenizer import Ids, Tokenizer

_BATCH_CHARACTERS = 1 << 20  # tokenized at once: enough for every core to have work, little enough to forget

LossMask = npt.NDArray[np.bool_]


class Document(NamedTuple):
    """One tokenized row."""

    ids: Ids
    """Token ids, with those that begin and end the document."""
    loss_mask: LossMask | None
    """For each id whether it counts as a target; None if all of them do."""
    has_text: bool
    """Whether the document has any text or answer to learn from."""
    num_rewritten: int = 0
    """Answers that are no targets, since the template has rewritten them."""
    num_unanswered: int = 0
    """1 for a conversation without a message of the assistant, whose answers alone would be targets; else 0."""


class DocumentRead(NamedTuple):
    """A row that was read, or the end of a unit."""

    unit: int
    """Index of the unit of the corpus."""
    row: int
    """Number of the row there; at the end of the unit, the number of its rows."""
    document: Document | None
    """The row's document; None at the end of the unit."""
    position: int
    """Bytes of the file, or rows of the hub's dataset, that were read up to there."""
    broken: str
    """Reason why a file is not read to its end; empty where nothing is wrong."""


def read_documents(
    corpus: Corpus,
    data: DataConfig,
    tokenizer: Tokenizer,
    firsts: Sequence[int | None],
    note_bad: Callable[[int, int, str], None],
) -> Generator[DocumentRead, None, None]:
    """The documents of a corpus; one batch is tokenized while the next one is read.

    `firsts` has for each unit the number of the row to begin with, or None for a unit that is not read. `note_bad` is
    called with unit, row and reason, which names the place, for a row that cannot be read or lacks a field that `data`
    names; what it raises ends the reading. A file that cannot be read any further ends there, and the next one follows.
    So does one whose last row is cut, or that is no text, unless `note_bad` lets it pass. DataError where a dataset of
    the hub cannot be read any further.
    """
    kind = _Chats(data, tokenizer) if data.messages_field else _Texts(data, tokenizer)
    yield from _encode_ahead(_batch(_read(corpus, kind, firsts, note_bad)), kind.encode)


class _Text(NamedTuple):
    """The text of a row, before it is tokenized."""

    text: str
    answers: Spans | None = None
    """Spans of the answers in a conversation; None where all text is a target."""
    is_answered: bool = True
    """Whether the last message is an answer."""
    num_rewritten: int = 0
    num_unanswered: int = 0


class _Texts:
    """Reads rows that hold plain text."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer):
        self.field, self.tokenizer = data.text_field, tokenizer

    def read(self, row: SourceRow) -> _Text:
        """The text of a row; DataError, without file and row, if it holds no text."""
        text = _find(row, self.field, "text_field")
        if text is None:
            raise DataError(f"there is nothing in field {self.field!r}; set text_field or remove that row")
        if not isinstance(text, str):
            raise DataError(
                f"field {self.field!r} holds {type(text).__name__}, not text; set text_field or remove that row"
            )
        return _Text(text)

    def encode(self, items: Sequence[_Text]) -> list[Document]:
        """A document for each text."""
        begin, end = (np.array(ids, dtype=np.int64) for ids in (self.tokenizer.begin, [self.tokenizer.end_of_document]))
        return [
            Document(np.concatenate((begin, ids, end)), None, has_text=ids.size > 0)
            for ids in self.tokenizer.encode_batch([item.text for item in items])
        ]


class _Chats:
    """Reads rows that hold conversations, which a template writes as text."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer):
        self.field, self.tokenizer = data.messages_field, tokenizer
        self.template: ChatTemplate = load_template(data.chat_template, data.tokenizer)
        self.loss_on = data.loss_on
        self.rules = find_rules(self.template.source)

    @cached_property
    def _form(self) -> ContentForm:
        """Form of the content that the template writes."""
        return find_form(self.template.render)

    def read(self, row: SourceRow) -> _Text:
        """The text of a row's conversation; DataError, without file and row, if the row holds none."""
        messages = _find(row, self.field, "messages_field, or for plain text in [validation] its text_field")
        if not isinstance(messages, list) or not all(isinstance(each, Mapping) for each in messages):
            raise DataError(f"field {self.field!r} holds no list of messages; set messages_field or remove that row")
        messages = _without_none(messages)
        try:
            check_messages(messages, self.rules)
        except DataError as error:
            raise DataError(f"field {self.field!r}: {error}") from None
        messages = [fit_content(each, self._form) for each in messages]
        tools = _read_tools(row.get("tools"))
        if self.loss_on == "all":
            return _Text(self.template.render(messages, tools))
        found = self.template.find_answers(messages, tools, only_last=self.loss_on == "last")
        return _Text(*found, num_unanswered=int(all(each["role"] != ASSISTANT for each in messages)))

    def encode(self, items: Sequence[_Text]) -> list[Document]:
        """A document for each conversation."""
        encoded = self.tokenizer.encode_chats([item.text for item in items])
        return [
            self._end(ids, self._find_loss_mask(places, item))._replace(
                num_rewritten=item.num_rewritten, num_unanswered=item.num_unanswered
            )
            for item, (ids, places) in zip(items, encoded, strict=True)
        ]

    @staticmethod
    def _find_loss_mask(places: Ids, item: _Text) -> LossMask | None:
        """For each id whether it begins in an answer; for the document's end, whether the last message is one."""
        if item.answers is None:
            return None
        loss_mask = np.zeros(places.size + 1, dtype=np.bool_)
        for first, end in item.answers:
            loss_mask[:-1] |= (places >= first) & (places < end)
        loss_mask[-1] = item.is_answered
        return loss_mask

    def _end(self, ids: Ids, loss_mask: LossMask | None) -> Document:
        """The document of a conversation: its begin is the template's, its end is added if the template wrote none."""
        if not (ids.size and ids[-1] == self.tokenizer.end_of_document):
            ids = np.append(ids, self.tokenizer.end_of_document)
        loss_mask = None if loss_mask is None else loss_mask[: ids.size]
        return Document(ids, loss_mask, has_text=ids.size > 1 if loss_mask is None else bool(loss_mask.any()))


def _without_none(value: Any) -> Any:
    """The value without the None that Arrow fills in for keys that other rows have."""
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def _read_tools(tools: Any) -> Any:
    """The tools of a row, given as a list or as JSON of one; DataError for anything else."""
    if isinstance(tools, str):
        try:
            tools = parse_json(tools)
        except ValueError:
            raise DataError("field 'tools' is neither a list of tools nor the JSON of one") from None
    if tools is not None and not isinstance(tools, list):
        raise DataError("field 'tools' is neither a list of tools nor the JSON of one")
    return _without_none(tools)


def _find(row: SourceRow, field: str, key: str) -> Any:
    if field not in row:
        raise DataError(f"there is no field {field!r}; it has {', '.join(sorted(row))}: set {key}")
    return row[field]


class _Place(NamedTuple):
    """A row's place and its text, or the end of a unit without one."""

    unit: int
    row: int
    text: _Text | None
    position: int
    broken: str = ""


def _read(
    corpus: Corpus, kind: _Texts | _Chats, firsts: Sequence[int | None], note_bad: Callable[[int, int, str], None]
) -> Iterator[_Place]:
    for unit, first in enumerate(firsts):
        if first is not None:
            yield from _read_unit(corpus, kind, unit, first, note_bad)


def _read_unit(
    corpus: Corpus, kind: _Texts | _Chats, unit: int, first: int, note_bad: Callable[[int, int, str], None]
) -> Iterator[_Place]:
    number, broken = first, ""
    try:
        for row in corpus.read(unit, first):
            if isinstance(row, BadRow):
                _note_unread(corpus, unit, number, row, note_bad)
            else:
                try:
                    text = kind.read(row)
                except DataError as error:
                    note_bad(unit, number, f"{corpus.place(unit, number)}: {error}")
                else:
                    yield _Place(unit, number, text, corpus.position.tell() if corpus.files else number + 1)
            number += 1
    except BrokenFile as error:
        broken = str(error)
    yield _Place(unit, number, None, corpus.files[unit].stat().st_size if corpus.files else number, broken)


def _note_unread(
    corpus: Corpus, unit: int, number: int, row: BadRow, note_bad: Callable[[int, int, str], None]
) -> None:
    """Note a row that is none; BrokenFile where `note_bad` refuses it and the file as a whole is to blame."""
    why = corpus.describe_bad(unit, row)
    try:
        note_bad(unit, number, why)
    except DataError as error:
        if row.is_cut or not row.place:
            ends = ": the file ends inside of a row, as one that is only half there does" * row.is_cut
            raise BrokenFile(f"{error}{ends}") from error
        raise


def _batch(places: Iterable[_Place]) -> Iterator[list[_Place]]:
    batch: list[_Place] = []
    num_characters = 0
    try:
        for place in places:
            batch.append(place)
            num_characters += 1 + (len(place.text.text) if place.text else 0)  # 1 +: empty documents fill a batch too
            if num_characters >= _BATCH_CHARACTERS:
                yield batch
                batch, num_characters = [], 0
    except DataError:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def _encode(batch: list[_Place], encode: Callable[[list[_Text]], list[Document]]) -> list[DocumentRead]:
    documents = iter(encode([place.text for place in batch if place.text is not None]))
    return [
        DocumentRead(
            place.unit, place.row, None if place.text is None else next(documents), place.position, place.broken
        )
        for place in batch
    ]  # fmt: skip


def _encode_ahead(
    batches: Iterable[list[_Place]], encode: Callable[[list[_Text]], list[Document]]
) -> Iterator[DocumentRead]:
    """Documents of each batch; the tokenizer uses all cores for one batch while this thread reads the next.

    If reading fails, what was read before comes first.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        under_way: Future[list[DocumentRead]] | None = None
        try:
            for batch in batches:
                following = pool.submit(_encode, batch, encode)
                if under_way is not None:
                    yield from under_way.result()
                under_way = following
        except DataError:
            if under_way is not None:
                yield from under_way.result()
            raise
        if under_way is not None:
            yield from under_way.result()
