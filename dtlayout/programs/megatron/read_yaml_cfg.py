"""Megatron-LM's own YAML, which --yaml-cfg takes, read: two tables of Megatron-Core's fields and options."""

import re
from collections.abc import Mapping
from typing import Any

from dtlayout.programs.megatron.core_fields import IGNORED as CORE_IGNORED
from dtlayout.programs.megatron.core_fields import NEUTRAL, OTHERWISE, below, list_fields
from dtlayout.programs.megatron.options import FLAGS
from dtlayout.programs.megatron.own_names import (
    Assumed,
    Naming,
    Options,
    alike,
    choice,
    flag,
    opposite,
    read_names,
    same,
    translate,
)
from dtlayout.programs.megatron.own_names import to_own as make_own
from dtlayout.programs.megatron.reader import IGNORED, read_job
from dtlayout.programs.megatron.write import MEGATRON
from dtlayout.programs.shell.script import Unknown
from dtlayout.programs.understood import OtherFile, Understood

_MODEL, _RANKS = "language_model", "model_parallel"
_FIELDS_OF_RANKS = (
    r".*_parallel_(size|layout)|sequence_parallel|num_layers_in_.*|tp_comm_.*|overlap_p2p_comm|overlap_moe_.*"
    r"|account_for_.*"
)
"""Fields of the table of ranks; others lie in that of the model."""
_BESIDE = (
    "make_vocab_size_divisible_by", "position_embedding_type", "rotary_base", "transformer_impl", "rope_scaling",
    "rope_scaling_factor", "share_embeddings_and_output_weights", "virtual_pipeline_model_parallel_size",
    "gated_linear_unit", "attention_backend", "overlap_p2p_comm",
)  # fmt: skip
"""Fields that a file has as options beside the tables, or that the program sets itself."""
_GATED: Mapping[Any, Options] = {
    "swiglu": {"--swiglu": []},
    **alike(("gelu", "squaredrelu", "squared_relu"), {"--swiglu": None}),
}
_ALONE: Mapping[str, str] = {
    **below(rf"({_MODEL}|{_RANKS})\.", CORE_IGNORED),
    "what the program sets itself": rf"{_RANKS}\.virtual_pipeline_.*|{_MODEL}\.gated_linear_unit|group_query_attention"
    r"|swiglu",
    "models of other kinds": r"(encoder|decoder|retriever)_.*|mask_prob|short_seq_prob|sample_rate|bert_.*"
    rf"|vocab_extra_ids|retro_.*|biencoder_.*|dino_.*|vision_.*|{_RANKS}\.pipeline_model_parallel_split_rank",
    "how it is started": r"delay_(grad|param)_.*|scatter_gather_.*|adlr_.*|standalone_embedding_stage"
    rf"|{_RANKS}\._cpu_offloading_context",
}  # fmt: skip
"""Subject → names that no option of Megatron-LM stands for."""


def is_ours(file: OtherFile) -> bool:
    """True for YAML with its two tables."""
    if file.tree is None or file.tree.language != "yaml":
        return False
    return {f"{_MODEL}.num_layers", f"{_RANKS}.tensor_model_parallel_size"} <= set(file.tree.values)


def read(file: OtherFile) -> Understood:
    """The job of such a file; what is not understood is in its `problems`, or an InvalidConfig."""
    assert file.tree is not None
    found = Understood(MEGATRON.engine, MEGATRON.title, num_gpus=file.num_gpus)
    said = translate(_list_rules(file.tree.values), file.tree.values, found.problems, _place)
    read_job(found, said.options, said)
    otherwise = rf"({_MODEL}|{_RANKS})\.({OTHERWISE})"
    neutral = {f"{table}.{name}": known for table in (_MODEL, _RANKS) for name, known in NEUTRAL.items()}
    read_names(found, said, _ALONE, otherwise, neutral)
    return found


def to_own(options: Options, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Dotted name → value of such a file that says options of Megatron-LM; None takes one out.

    It is the inverse of what `read` makes of such names. `values` are those of the file.
    """
    rules = _list_rules(values or {})
    known = {option for rule in rules for option in rule.options}
    for option, words in options.items():
        if option not in known:
            is_flag = option in FLAGS if words is None else not words
            rules.append(flag(_place(option), option) if is_flag else same(_place(option), option))
    return make_own(rules, options, values or {}, IGNORED.values())


def _place(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _at(field: str) -> str:
    return f"{_RANKS if re.fullmatch(_FIELDS_OF_RANKS, field) else _MODEL}.{field}"


def _list_rules(values: Mapping[str, Any]) -> list[Naming]:
    rules = [
        *list_fields(_at, _BESIDE), choice(f"{_MODEL}.activation_func", _GATED),
        flag(f"{_RANKS}.bf16", "--bf16"), flag(f"{_RANKS}.fp16", "--fp16"), _name_overlap(),
    ]  # fmt: skip
    for name, value in values.items():
        if "." not in name and not any(re.fullmatch(names, name) for names in _ALONE.values()):
            option = f"--{name.replace('_', '-')}"
            is_flag = isinstance(value, bool) or (isinstance(value, Unknown) and option in FLAGS)
            rules.append(flag(name, option) if is_flag else same(name, option))
    return rules


def _name_overlap() -> Naming:
    name, virtual = f"{_RANKS}.overlap_p2p_comm", "num_layers_per_virtual_pipeline_stage"
    option, layout = "--no-overlap-p2p-communication", f"{_RANKS}.pipeline_model_parallel_layout"
    plain = opposite(name, option)

    def to(values: Mapping[str, Any]) -> Options:
        if virtual not in values and layout not in values:
            return {}
        return plain.to(values) if name in values else {option: Assumed([], f"{name} is false by default")}

    def idle(values: Mapping[str, Any]) -> Mapping[str, str]:
        is_alone = virtual not in values and layout not in values
        return {name: f"without {virtual}"} if name in values and is_alone else {}

    return plain._replace(names=(name, virtual, layout), to=to, idle=idle, shown=(name,))
