"""dtlayout generate: text from a run, a checkpoint or a Hugging Face folder; under torchrun with tp over its ranks.

With `--chat` the prompt is a question. Without `--prompt` each line of stdin is then the next one of a conversation.
"""

import argparse
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtlayout.base.errors import EXIT_DONE, EXIT_INTERRUPTED, DtlayoutError, InvalidConfig
from dtlayout.base.terminal import read_lines
from dtlayout.commands.arguments import JsonDocument, show
from dtlayout.commands.source import find_adapter_data, find_config, find_data, find_kept, find_text_length
from dtlayout.config.config import Config
from dtlayout.config.sections import DataConfig
from dtlayout.data.chat import load_template
from dtlayout.models.beside import GENERATION, TEMPLATE_NAME, find_ends, find_sampling
from dtlayout.models.peft import find_base_folder, is_hf_folder, is_peft

if TYPE_CHECKING:
    from dtlayout.data.tokenizer import Tokenizer
    from dtlayout.training.conversation import Conversation
    from dtlayout.training.generate import Sampling

EXAMPLE = "dtlayout generate runs/debug --prompt 'def '"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the prompt and how tokens are sampled."""
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="a run, a checkpoint, or a Hugging Face or PEFT folder"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="what the text goes on from")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="ask the prompt as a question, by the chat template; without --prompt hold a conversation: each line of "
        "stdin is a question",
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="with --chat, the system message that comes first")
    parser.add_argument(
        "--max-tokens", type=int, default=100, metavar="N", help="most tokens of a text or answer; 100 by default"
    )
    said = "by default what the source's generation_config.json says, else"
    parser.add_argument("--temperature", type=float, help=f"0 always takes the likeliest token; {said} 0.8")
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help=f"draw from the likeliest tokens of this probability together; unused at temperature 0; {said} 0.95",
    )
    top_k = "draw from the K likeliest tokens, 0 from all; unused at temperature 0"
    parser.add_argument("--top-k", type=int, metavar="K", help=f"{top_k}; {said} 0")
    parser.add_argument("--seed", type=int, default=0, help="0 by default")
    parser.add_argument("--tokenizer", help="bytes, or a tokenizer.json or its folder; by default the source's")
    parser.add_argument("--end-of-document", default="", metavar="TOKEN", help="the token that ends a text")
    parser.add_argument("--format", choices=("float32", "bfloat16"), default="float32", help="float32 by default")
    parser.add_argument(
        "--base",
        type=Path,
        metavar="FOLDER",
        help="where the frozen model of a run's adapter is; by default where it was",
    )


def run(options: argparse.Namespace) -> int:
    """Print the text as it comes."""
    from dtlayout.data.tokenizer import load_tokenizer  # only now: the rest imports torch
    from dtlayout.training.conversation import Conversation
    from dtlayout.training.devices import open_device
    from dtlayout.training.generate import find_shape, generate, open_model, stream_text
    from dtlayout.training.rendezvous import join_ranks

    _check(options)
    is_hf, is_conversation = is_hf_folder(options.source), options.chat and options.prompt is None
    config = None if is_hf else find_config(options.source)
    base = _find_base(options, config, is_hf=is_hf)
    sampling = _choose_sampling(options, base)
    data = _find_data(options, config, is_hf=is_hf)
    tokenizer = load_tokenizer(data.tokenizer, data.end_of_document)
    device = open_device("auto", None)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        join_ranks(device, timeout_s=600)
    conversation = None
    if options.chat:
        context = find_text_length(config, base) if is_conversation else None  # one prompt may have any length
        template = load_template(data.chat_template, data.tokenizer)
        conversation = Conversation(template, tokenizer, system=options.system, context=context)
    prompt = _write_prompt(options, tokenizer, conversation)
    vocab_size = find_shape(options.source).vocab_size
    _refuse_beyond(prompt, vocab_size)
    max_len = len(prompt) + options.max_tokens
    model = open_model(options.source, max_len, options.format, device.type, options.base)
    ends = {tokenizer.end_of_document}
    if not options.end_of_document:
        is_own = is_hf or not options.tokenizer  # then the ids are those of the model's files
        ends |= _find_other_ends(base if is_own else None, tokenizer)
    take = sampling.make()

    def answer(prompt: list[int], max_tokens: int) -> Iterator[str]:
        prompt = prompt or [tokenizer.end_of_document]  # after which a document begins
        _refuse_beyond(prompt, vocab_size)
        return stream_text(generate(model, prompt, max_tokens, take, ends=ends), tokenizer.decode, prompt)

    if conversation is not None and is_conversation:
        return _converse(options, conversation, answer)
    before = "" if options.chat else options.prompt or ""
    text = _print(options, answer(prompt, options.max_tokens), before)
    return _finish(options, {"prompt": options.prompt or "", "text": text})


def _check(options: argparse.Namespace) -> None:
    """InvalidConfig for options that do not go together, and for a source that is not there."""
    if options.max_tokens < 1:
        raise InvalidConfig(f"--max-tokens {options.max_tokens} must be at least 1")
    if options.system and not options.chat:
        raise InvalidConfig("--system is the first message of a conversation: it needs --chat")
    if not options.source.exists():
        raise InvalidConfig(f"there is no folder {options.source}; give a run, a checkpoint or a Hugging Face folder")


def _is_first() -> bool:
    """True on the rank that prints and reads stdin."""
    return os.environ.get("RANK", "0") == "0"


def _print(options: argparse.Namespace, pieces: Iterable[str], before: str = "") -> str:
    """Print the pieces of a text as they come, after the text `before`; returns the text of the pieces."""
    if not _is_first() or options.json:
        return "".join(pieces)
    print(before, end="", flush=True)
    text = ""
    for piece in pieces:
        print(piece, end="", flush=True)
        text += piece
    print(flush=True)
    return text


def _finish(options: argparse.Namespace, document: JsonDocument) -> int:
    """With `--json` print the document, which holds all the text, and return 0."""
    return show(options, document, lambda _: []) if options.json and _is_first() else EXIT_DONE


def _converse(
    options: argparse.Namespace, conversation: "Conversation", answer: Callable[[list[int], int], Iterator[str]]
) -> int:
    """Answer the questions of stdin, until it ends, Ctrl-C is pressed or a question is refused.

    With `--json` all messages are printed then, and beside them why a question is refused.
    """
    from dtlayout.training.conversation import share_prompts  # only now: it imports torch

    if "RANK" in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a rank that waits for others hears of no KeyboardInterrupt
    end: dict[str, Any] = {}
    exit_code = EXIT_DONE
    try:
        for prompt in share_prompts(map(conversation.ask, filter(str.strip, read_lines("> ")))):
            max_tokens = conversation.limit(prompt, options.max_tokens)
            conversation.add_answer(_print(options, answer(prompt, max_tokens)))
    except KeyboardInterrupt:
        exit_code = EXIT_INTERRUPTED
        if not options.json:
            print()
    except DtlayoutError as error:
        if not options.json:
            raise
        exit_code, end = error.exit_code, {"ok": False, "problems": str(error).splitlines()}
    _finish(options, {**end, "messages": conversation.messages})
    return exit_code


def _write_prompt(
    options: argparse.Namespace, tokenizer: "Tokenizer", conversation: "Conversation | None"
) -> list[int]:
    """Ids of the prompt that the options give; none where stdin has the questions.

    DataError if the chat template refuses the question, or in a conversation each one.
    """
    if conversation is None:
        return [*tokenizer.begin, *tokenizer.encode_batch([options.prompt or ""])[0].tolist()]
    if options.prompt is not None:
        return conversation.ask(options.prompt)
    conversation.check()
    return []


def _refuse_beyond(prompt: list[int], vocab_size: int) -> None:
    """InvalidConfig for ids that the model has no rows for."""
    if max(prompt, default=0) >= vocab_size:
        raise InvalidConfig(
            f"the tokenizer gives the prompt id {max(prompt)}, the model has vocab_size={vocab_size}; "
            f"give the --tokenizer that it was trained with"
        )


def _choose_sampling(options: argparse.Namespace, base: Path | None) -> "Sampling":
    """How to draw tokens: as the options say, else the source's generation_config.json, else the defaults."""
    from dtlayout.training.generate import Sampling  # only now: it imports torch

    names = ("temperature", "top_p", "top_k", "seed")
    asked = {name: value for name in names if (value := getattr(options, name)) is not None}
    ours = Sampling(**asked)
    said: dict[str, Any] = {**find_sampling(base)} if base else {}
    try:
        return replace(ours, **{**said, **asked})
    except InvalidConfig as error:
        raise InvalidConfig([f"{base}/{GENERATION}: {problem}" for problem in error.problems]) from None


def _find_base(options: argparse.Namespace, config: Config | None, *, is_hf: bool) -> Path | None:
    """The folder with the config.json and generation_config.json of a source's model, or None."""
    return find_base_folder(options.source) if is_hf else find_kept(options.source, config) or options.base


def _find_other_ends(base: Path | None, tokenizer: "Tokenizer") -> set[int]:
    """Ids that end a text beside the end of a document, such as that of an answer's end."""
    return {end for end in (tokenizer.end_of_answer, *(find_ends(base) if base else [])) if end is not None}


def _find_data(options: argparse.Namespace, config: Config | None, *, is_hf: bool) -> DataConfig:
    """Tokenizer and chat template of the source, from its config and the command line."""
    data: DataConfig | None
    if is_peft(options.source):
        data = find_adapter_data(options.source, options.tokenizer)
    elif is_hf:
        beside = options.source.resolve() / TEMPLATE_NAME
        template = str(beside) if beside.is_file() else ""
        data = DataConfig(tokenizer=options.tokenizer or str(options.source), chat_template=template)
    else:
        data = find_data(options.source, config, options.tokenizer)
    if data is None:
        raise InvalidConfig(f"{options.source} does not say which tokenizer it has; give --tokenizer")
    return replace(data, end_of_document=options.end_of_document or data.end_of_document)
