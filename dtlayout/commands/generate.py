"""dtlayout generate: text from a run, a checkpoint or a Hugging Face folder; under torchrun with tp over its ranks."""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtlayout.base.errors import InvalidConfig
from dtlayout.commands.arguments import show
from dtlayout.commands.source import find_adapter_data, find_config, find_data, find_kept
from dtlayout.config.sections import DataConfig
from dtlayout.data.chat import load_template
from dtlayout.models.beside import CONFIG, TEMPLATE_NAME, find_ends
from dtlayout.models.peft import is_peft

if TYPE_CHECKING:
    from dtlayout.data.tokenizer import Tokenizer

EXAMPLE = "dtlayout generate runs/debug --prompt 'def '"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the prompt and how tokens are sampled."""
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="a run, a checkpoint, or a Hugging Face or PEFT folder"
    )
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what the text goes on from")
    parser.add_argument("--chat", action="store_true", help="the prompt is a question, asked as the chat template says")
    parser.add_argument("--max-tokens", type=int, default=100, metavar="N", help="100 by default")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest always; 0.8 by default")
    parser.add_argument("--top-p", type=float, default=0.95, metavar="P", help="0.95 by default")
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
    from dtlayout.training.devices import open_device
    from dtlayout.training.generate import Sampling, find_shape, generate, is_hf_folder, open_model, stream_text
    from dtlayout.training.rendezvous import join_ranks

    if options.max_tokens < 1:
        raise InvalidConfig(f"--max-tokens {options.max_tokens} must be at least 1")
    if not options.source.exists():
        raise InvalidConfig(f"there is no folder {options.source}; give a run, a checkpoint or a Hugging Face folder")
    sampling = Sampling(options.temperature, options.top_p, options.seed)
    is_hf = is_hf_folder(options.source)
    data = _find_data(options, is_hf=is_hf)
    tokenizer = load_tokenizer(data.tokenizer, data.end_of_document)
    device = open_device("auto", None)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        join_ranks(device, timeout_s=600)
    is_writer = os.environ.get("RANK", "0") == "0"
    if options.chat:
        template = load_template(data.chat_template, data.tokenizer)
        question = template.render([{"role": "user", "content": options.prompt}], asks=True)
        prompt = tokenizer.encode_chats([question])[0][0].tolist()
    else:
        prompt = [*tokenizer.begin, *tokenizer.encode_batch([options.prompt])[0].tolist()]
    prompt = prompt or [tokenizer.end_of_document]  # after which a document begins
    vocab_size = find_shape(options.source).vocab_size
    if max(prompt) >= vocab_size:
        raise InvalidConfig(
            f"the tokenizer gives the prompt id {max(prompt)}, the model has vocab_size={vocab_size}; "
            f"give the --tokenizer that it was trained with"
        )
    max_len = len(prompt) + options.max_tokens
    model = open_model(options.source, max_len, options.format, device.type, options.base)
    ends = {tokenizer.end_of_document, *(() if options.end_of_document else _find_other_ends(options, tokenizer))}
    ids = generate(model, prompt, options.max_tokens, sampling.make(), ends=ends)
    pieces = stream_text(ids, tokenizer.decode, prompt)
    if not is_writer or options.json:
        text = "".join(pieces)
        return show(options, {"prompt": options.prompt, "text": text}, lambda _: []) if is_writer else 0
    print("" if options.chat else options.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


def _find_other_ends(options: argparse.Namespace, tokenizer: "Tokenizer") -> set[int]:
    """Ids that end a text beside the end of a document, such as that of an answer's end."""
    is_hf = is_peft(options.source) or (options.source / CONFIG).is_file()
    base = options.source if is_hf else find_kept(options.source, find_config(options.source))
    said = find_ends(base) if base and not (options.tokenizer and not is_hf) else []
    return {end for end in (tokenizer.end_of_answer, *said) if end is not None}


def _find_data(options: argparse.Namespace, *, is_hf: bool) -> DataConfig:
    """Tokenizer and chat template of the source, from its config and the command line."""
    data: DataConfig | None
    if is_peft(options.source):
        data = find_adapter_data(options.source, options.tokenizer)
    elif is_hf:
        beside = options.source.resolve() / TEMPLATE_NAME
        template = str(beside) if beside.is_file() else ""
        data = DataConfig(tokenizer=options.tokenizer or str(options.source), chat_template=template)
    else:
        data = find_data(options.source, find_config(options.source), options.tokenizer)
    if data is None:
        raise InvalidConfig(f"{options.source} does not say which tokenizer it has; give --tokenizer")
    return replace(data, end_of_document=options.end_of_document or data.end_of_document)
