"""The samples of a run, from a config's [data] section."""

from dtlayout.batch import Batch
from dtlayout.config import DataConfig
from dtlayout.data.prepare import prepare_tokens
from dtlayout.data.samples import Samples, TokenFile


def open_samples(data: DataConfig, vocab_size: int, batch: Batch, *, seed: int) -> Samples:
    """The prepared tokens, cut into samples; whoever comes first on a filesystem prepares them, the others wait.

    DataError if the tokens do not fit the model's vocabulary or hold less than one sample.
    """
    folder = prepare_tokens(
        data.source, data.tokenizer, data.folder, text_field=data.text_field, split=data.split,
        end_of_document=data.end_of_document, max_tokens=data.max_tokens,
    )  # fmt: skip
    tokens = TokenFile.open(folder)
    tokens.check_vocab(vocab_size)
    return Samples(tokens, batch.seq_len, batch.global_batch, seed)
