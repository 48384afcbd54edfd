"""What is wrong with a config's data that can be seen without torch, and without reading them."""

from dtlayout.config import Config
from dtlayout.data.chat import load_template
from dtlayout.data.sources import list_files
from dtlayout.data.tokenizer import load_tokenizer
from dtlayout.data.tokens import refuse_larger


def check_data(config: Config) -> None:
    """DataError if a source matches no file here, or its tokenizer or chat template cannot be used with the model."""
    validation = config.validation_data
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.end_of_document)  # of all sources
    refuse_larger(tokenizer.vocab_size, config.model.vocab_size)
    for data in (*config.data.sources, *((validation,) if validation else ())):
        list_files(data.source)
        if data.messages_field:
            load_template(data.chat_template, data.tokenizer)
