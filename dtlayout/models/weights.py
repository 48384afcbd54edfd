"""Weights in a Hugging Face folder: which tensors a model has, and what is wrong with a folder's. No torch.

A folder is a config.json beside model.safetensors, or beside model-00001-of-0000N.safetensors and their index
(`models.stored`). Most names are those of our modules too; `models.stored_names` has the others, and that experts lie
there one by one. Rotary embeddings turn the same pairs, so that nothing is permuted.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import plural
from dtlayout.models.beside import CONFIG, find_context, find_model_files, find_tokenizer_files
from dtlayout.models.description import BLOCKS
from dtlayout.models.families import describe, find_family
from dtlayout.models.files import find_trained_model, strip_training
from dtlayout.models.first_source import SavedModel, describe_missing, find_place, read_saved
from dtlayout.models.peft import find_base_folder, find_peft_problems, is_peft, read_adapter
from dtlayout.models.stored import FORMATS, SINGLE_FILE, StoredTensor, are_equal, find_weights, name_first
from dtlayout.models.stored_names import StoredWeight, store
from dtlayout.models.traced import find_stored_name
from dtlayout.models.weight import Weight
from dtlayout.spec.model_shape import Experts, ModelShape

FILE_BYTES = 2 << 30
"""Largest file that is written, and about what writing it takes of the host's memory."""
_UNSEEN = ("num_heads", "num_kv_heads", "norm_eps")
"""Sizes that no tensor's shape tells."""
_UNSEEN_OF_EXPERTS = ("per_token", "score", "normalized", "scale", "groups", "groups_per_token")
"""Fields of Experts that no tensor tells, and that change what a model computes."""
_COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tensors that older files hold although they follow from the sizes."""


def list_weights(model: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each parameter, in the model's order; tied embeddings once."""
    for block, weight in _list_described(model):
        yield f"{block}{weight.name}", weight.shape


def list_stored(model: ModelShape) -> Iterator[StoredWeight]:
    """Each parameter with its tensors in a Hugging Face folder, in the model's order; tied embeddings once."""
    table = find_family(model.family).stored_names
    for block, weight in _list_described(model):
        stored = store(weight, block, table)
        yield replace(stored, tensors=tuple(find_stored_name(model, name) for name in stored.tensors))


def _list_described(model: ModelShape) -> Iterator[tuple[str, Weight]]:
    """Prefix of a block's names and weight, for each parameter; the prefix is empty outside of blocks."""
    described = describe(model)
    for weight in described.before_blocks:
        yield "", weight
    for number in range(model.num_layers):
        for weight in describe(model.kind_of(number)).block_weights:
            yield f"{BLOCKS.replace('*', str(number))}.", weight
    for weight in described.after_blocks:
        yield "", weight
    if not model.tied_embeddings:
        yield "", described.head


def list_pieces(model: ModelShape) -> dict[str, tuple[str, Weight]]:
    """Our name of each parameter that is a piece of one of the model's own → our name of that one, and the weight."""
    return {
        f"{block}{weight.name}": (f"{block}{weight.piece.name}", weight)
        for block, weight in _list_described(model)
        if weight.piece is not None
    }


ENDS = ("model.embed_tokens.weight", "lm_head.weight")
"""Weights that have a row for each token."""


def find_missing_rows(weight: StoredWeight, stored: Mapping[str, StoredTensor]) -> int:
    """Rows of an embedding or a head that a folder's tensor lacks; 0 for another weight, and where it lacks none."""
    if weight.name not in ENDS or weight.piece is not None or weight.tensors[0] not in stored:
        return 0
    return max(0, weight.shape[0] - stored[weight.tensors[0]].shape[0])


def shrink_to(stored: Mapping[str, StoredTensor], model: ModelShape) -> ModelShape:
    """The model with as few rows of embedding and head as a folder has, if both have equally many and fewer."""
    ends = [weight for weight in list_stored(model) if weight.name in ENDS]
    missing = {find_missing_rows(weight, stored) for weight in ends}
    if len(missing) > 1 or model.adapter is not None or not (rows := missing.pop()):
        return model
    return replace(model, vocab_size=model.vocab_size - rows, unused_rows=0)


def describe_new_rows(text: str, model: ModelShape, new_rows: str) -> list[str]:
    """Lines about rows of embedding and head that the folder `train.init_from` lacks; none where it has all."""
    if read_saved(place := find_place(text)) is not None:
        return []
    there = shrink_to(find_weights(find_base_folder(place)), model.base).vocab_size
    lines = []
    if added := model.num_ids - there:
        how = "the mean of the others" if new_rows == "mean" else "drawn as first weights are"
        lines.append(f"{text} has {there:,} rows of embedding and head: {added:,} for more tokens are {how}")
    if model.unused_rows:
        lines.append(
            f"{model.unused_rows:,} of {model.vocab_size:,} rows of embedding and head are no tokens, so that tp "
            f"divides them; exports are without"
        )
    return lines


def describe_no_new_rows(what: str, num_rows: int, num_there: int) -> str:
    """Reason why an adapter is refused where `what` asks for `num_rows` rows, of which its frozen model lacks some."""
    return (
        f"beside [adapter] no rows are added: {what}, and the frozen model has {num_there} rows of embedding and head, "
        f"which a PEFT folder does not hold; resize it first, by transformers: "
        f"model.resize_token_embeddings({num_rows}, pad_to_multiple_of=8), and save_pretrained to a new folder for "
        f"train.init_from"
    )


def describe_cut_rows(model: ModelShape) -> list[str]:
    """A line about rows of embedding and head that an export is without; none where it has all."""
    if not model.unused_rows:
        return []
    return [f"{plural(model.unused_rows, 'row', ',')} of embedding and head cut, which were no tokens"]


def find_weight_problems(stored: Mapping[str, StoredTensor], model: ModelShape) -> list[str]:
    """Everything that keeps these tensors from being the model's, one line each; empty if they are.

    A tied weight that is stored under both its names is read under both, since only one would be taken.
    """
    wanted = {name: weight.tensor_shape for weight in list_stored(model) for name in weight.tensors}
    aliases = {
        find_stored_name(model, second): find_stored_name(model, first) for second, first in model.aliases.items()
    }
    extra = stored.keys() - wanted.keys() - aliases.keys()
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    problems += [f"{n} is in none of the model's modules" for n in sorted(extra) if not _COMPUTED.fullmatch(n)]
    there = {name: (stored[name], shape) for name, shape in wanted.items() if name in stored}
    for name, (tensor, shape) in there.items():
        if tensor.format not in FORMATS:
            problems.append(f"{name} has the format {tensor.format}; weights must be of {', '.join(FORMATS.values())}")
        elif tensor.shape != shape:
            problems.append(f"{name} has the shape {list(tensor.shape)}, where the model's is {list(shape)}")
    problems += [
        f"{second} differs from {first}, which is used in its place where embeddings are tied; to keep it, say "
        f"tied_embeddings=false (in config.json tie_word_embeddings), or remove it from its file to go on without it"
        for second, first in aliases.items()
        if second in stored and first in stored and not are_equal(stored, first, second)
    ]
    return name_first(problems)


def find_adapted_model(folder: Path) -> ModelShape:
    """The model of a PEFT folder: the frozen one that it names, with its adapter.

    InvalidConfig if one of the two folders has not the weights of that model.
    """
    base = find_base_folder(folder)
    model = replace(find_trained_model(str((base / CONFIG).absolute())), adapter=read_adapter(folder))
    problems = [f"{folder}: {problem}" for problem in find_peft_problems(folder, model)]
    problems += [f"{base}: {problem}" for problem in find_weight_problems(find_weights(base), model.base)]
    if problems:
        raise InvalidConfig(problems)
    return model


def check_init_from(text: str, model: ModelShape) -> list[str]:
    """Problems of `train.init_from`, one line each: of a folder with a whole model, or with an adapter and its model.

    A model with an adapter needs the frozen weights alone.
    """
    where = f"train.init_from={text!r}"
    folder = find_place(text)
    try:
        if (saved := read_saved(folder)) is not None:
            return [f"{where}: {problem}" for problem in _find_saved_problems(saved, model)]
        if not is_peft(folder) and not os.path.isfile(folder / CONFIG):
            return [describe_missing(text)]
        of_adapter = find_peft_problems(folder, model) if is_peft(folder) else []
        if of_adapter:
            return [f"{where}: {problem}" for problem in of_adapter]
        folder = find_base_folder(folder)
        stored = find_weights(folder)
        there = shrink_to(stored, model.base)
        if model.adapter is not None and there.vocab_size < model.vocab_size:
            return [describe_no_new_rows(f"model.vocab_size={model.vocab_size}", model.vocab_size, there.vocab_size)]
        problems = find_weight_problems(stored, there)
        made_for = find_trained_model(str(folder / CONFIG))
        find_model_files(folder), find_tokenizer_files(folder)  # which an export takes along
    except InvalidConfig as error:
        return [f"{where}: {problem}" for problem in error.problems]
    problems += [
        f"its config.json has {name}={old}, the model {name}={new}"
        for name, old, new in _list_unseen(made_for, model) if old != new
    ]  # fmt: skip
    return [f"{where}: {problem}" for problem in problems]


def _find_saved_problems(saved: SavedModel, model: ModelShape) -> list[str]:
    """Problems of a checkpoint as the source of a model's first weights, one line each."""
    table = {**saved.model, **({"adapter": saved.adapter} if saved.adapter else {})}
    found = toml.parse(table, ModelShape, "model")
    if model.adapter is not None and found.adapter is None:
        run = saved.run if saved.run.is_dir() else saved.checkpoint
        return [
            f"{saved.checkpoint} holds a whole model, and an adapter lies beside a folder: dtlayout convert {run} "
            f"FOLDER writes one"
        ]
    theirs, ours = (asdict(replace(strip_training(each.without_unused), name="")) for each in (found, model))
    changes = [f"{key}={theirs[key]} (config: {value})" for key, value in ours.items() if theirs[key] != value]
    if changes:
        return [f"{saved.checkpoint} holds another model: {', '.join(changes)}"]
    if found.adapter is None:
        return []
    base = find_base_folder(saved.checkpoint)
    return [f"{base}: {problem}" for problem in find_weight_problems(find_weights(base), model.base)]


def _list_unseen(made_for: ModelShape, model: ModelShape) -> Iterator[tuple[str, Any, Any]]:
    """Name of what no tensor tells, and its values in two models."""
    for name in _UNSEEN:
        yield name, getattr(made_for, name), getattr(model, name)
    ours, theirs = made_for.experts, model.experts
    if isinstance(ours, Experts) and isinstance(theirs, Experts):  # else tensors are missing, and tell
        for name in _UNSEEN_OF_EXPERTS:
            yield f"experts.{name}", getattr(ours, name), getattr(theirs, name)


def find_other_positions(text: str, model: ModelShape) -> list[str]:
    """Settings of a model's rotary embedding that differ from the folder `train.init_from`, one line each."""
    if read_saved(place := find_place(text)) is not None:  # it was refused, unless it is the same model
        return []
    made_for = find_trained_model(str(find_base_folder(place) / CONFIG))
    values = {name: (getattr(made_for, name), getattr(model, name)) for name in ("rope_theta", "rope_scaling")}
    return [f"{name} is {new}, that of {text} {old}" for name, (old, new) in values.items() if old != new]


def describe_longer_context(text: str, seq_len: int) -> list[str]:
    """A line if samples are longer than the texts that the folder `train.init_from` is made for; exports say so too."""
    known = find_context(find_base_folder(find_place(text)))
    if known is None or seq_len <= known:
        return []
    return [f"{text} is made for {known:,} tokens, and batch.seq_len is {seq_len:,}: an export is made for as many"]


def plan_files(sizes: Mapping[str, int], most_bytes: int) -> dict[str, list[str]]:
    """File name → names of its tensors, in their order; a file has `most_bytes` at most, or one tensor."""
    files: list[list[str]] = [[]]
    room = most_bytes
    for name, size in sizes.items():
        if size > room and files[-1]:
            files.append([])
            room = most_bytes
        files[-1].append(name)
        room -= size
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}


def make_index(files: Mapping[str, list[str]], sizes: Mapping[str, int]) -> dict[str, Any]:
    """The index of several files."""
    mapping = {name: file for file, names in files.items() for name in names}
    return {"metadata": {"total_size": sum(sizes.values())}, "weight_map": mapping}
