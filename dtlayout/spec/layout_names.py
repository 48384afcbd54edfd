"""Layout names: the short form in which layouts are printed, and its reader, wherever a layout is asked for.

    pp8·dp2·tp4+sp mb1 interleaved-1f1b v2 zero1 recompute=full

This is a whole name: whatever it leaves out is off. Choices name some fields and leave the others open. Their words are
parted by blanks, commas, `·` or `*`; `dp2` may be written `dp=2`, and any field `name=value` as in TOML. dp is
`dp_shard`: data parallelism without its replicas.
"""

import re
from typing import Any

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.schedules.schedule_file import FILE_PREFIX
from dtlayout.schedules.schedules import DEFAULT_SCHEDULE, SCHEDULES
from dtlayout.spec.context_parallel import CONTEXT_METHODS, DEFAULT_CONTEXT_METHOD

_AXES = {"pp": "pp", "replicate": "dp_replicate", "dp": "dp_shard", "cp": "cp", "tp": "tp"}
_NUMBERS = {**_AXES, "ep": "ep", "mb": "micro_batch", "v": "virtual_stages", "zero": "zero"}
"""Word → field, for words that a number follows."""
_SUFFIXES: dict[tuple[str, str], dict[str, Any]] = {
    ("tp", "sp"): {"sequence_parallel": True}, ("tp", "overlap"): {"tp_overlap": True},
    ("ep", "overlap"): {"ep_overlap": True}, ("ep", "deepep"): {"ep_dispatcher": "deepep"},
    **{("cp", name): {"cp_method": name} for name in CONTEXT_METHODS},
}  # fmt: skip
"""Word and suffix → the fields that it sets."""
_NOTHING = "1 rank"
_WHOLE = re.compile(
    rf"(?:{_NOTHING}|(?=pp|replicate|dp|cp|tp)"
    r"(?P<pp>pp\d+[· ]?)?(?:replicate\d+[· ]?)?(?:dp\d+[· ]?)?(?:cp\d+(?:\+[a-z-]+)?[· ]?)?(?:tp\d+)?)(?:\+[a-z]+)*"
    r" ?(?:ep\d+(?:\+[a-z]+)* )?mb\d+(?(pp) (?P<schedule>[^ ,=]+)(?: v\d+)?(?: stage_layers=\[[\d, ]*\])?) zero\d"
    r"(?: recompute=[^ ,]+)?(?: offload=[^ ,]+)?(?P<kernels>(?: [^ ,=·]+)*)"
)
"""A whole name, as `name_layout` prints it, its words parted by one blank, and the kernels that may follow."""
_EXAMPLE = "pp8·dp2·tp4+sp mb1 1f1b zero1"


def name_layout(layout: Any) -> str:
    """The short form of logs and tables: axes above 1, then the values that differ from the defaults."""
    degrees = {word: f"{word}{getattr(layout, field)}" for word, field in _AXES.items() if getattr(layout, field) > 1}
    if "cp" in degrees and layout.cp_method != DEFAULT_CONTEXT_METHOD:
        degrees["cp"] += f"+{layout.cp_method}"
    text = "·".join(degrees.values()) or _NOTHING
    text += "+sp" * layout.shards_sequence + "+overlap" * layout.overlaps_tp
    text += f" ep{layout.ep}" * (layout.ep > 1) + "+overlap" * layout.overlaps_ep
    text += "+deepep" * layout.sends_tokens_once + f" mb{layout.micro_batch}"
    if layout.pp > 1:
        text += f" {layout.schedule}" + f" v{layout.virtual_stages}" * (layout.virtual_stages > 1)
        text += f" stage_layers={list(layout.stage_layers)}".replace(", ", ",") * bool(layout.stage_layers)
    text += f" zero{layout.zero}" + f" recompute={layout.recompute}" * (layout.recompute != "none")
    return text + f" offload={layout.offload}" * (layout.offload != "none")


def split_name(text: str) -> list[str]:
    """The words of a name, each with its suffixes or its value.

    >>> split_name("pp2·tp4+sp, stage_layers = [2, 4]")
    ['pp2', 'tp4+sp', 'stage_layers=[2,4]']
    """
    text = re.sub(r"\s*=\s*", "=", text.replace(_NOTHING, " "))
    text = re.sub(r"\[[^\]]*\]", lambda found: found[0].replace(" ", ""), text)
    return [word for word in re.split(r"[\s·*,]+(?![^\[]*\])", text) if word]


def read_word(word: str) -> dict[str, Any]:
    """The fields of a layout that one word sets; nothing where it is none of a name.

    >>> read_word("tp4+sp"), read_word("dp=2"), read_word("quick")
    ({'tp': 4, 'sequence_parallel': True}, {'dp_shard': 2}, {})
    """
    if word in SCHEDULES or word.startswith(FILE_PREFIX):
        return {"schedule": word}
    name, equals, value = word.partition("=")
    if equals:
        value = toml.parse_value(value)
        return {_NUMBERS.get(name, name): tuple(value) if isinstance(value, list) else value}
    head, *suffixes = word.split("+")
    found = re.fullmatch(r"([a-z]+)(\d+)", head)
    if found is None or found[1] not in _NUMBERS or any((found[1], suffix) not in _SUFFIXES for suffix in suffixes):
        return {}
    fields: dict[str, Any] = {_NUMBERS[found[1]]: int(found[2])}
    for suffix in suffixes:
        fields |= _SUFFIXES[found[1], suffix]
    return fields


def is_whole(text: str) -> bool:
    """Whether a text is a whole layout name, not some choices.

    A whole name has the axes (or `1 rank`), mb and zero in the printed order, and the schedule if it has pp. Words of
    kernels may follow; they are not checked here.

    >>> is_whole("tp4+sp mb2 zero3 loss linear"), is_whole("tp=4,mb=2,zero=3"), is_whole("tp4+sp mb2")
    (True, False, False)
    """
    found = _WHOLE.fullmatch(re.sub(r" ?[·*] ?", "·", " ".join(text.split())))
    if found is None or (found["schedule"] and "schedule" not in read_word(found["schedule"])):
        return False
    return not any(map(read_word, found["kernels"].split()))


def complete_name(text: str, fields: dict[str, Any]) -> dict[str, Any]:
    """All fields that a text sets; `fields` are those that its words name.

    A whole name sets everything else to off, or to its default. Of choices, `fields` is the answer.
    """
    if not is_whole(text):
        return fields
    off: dict[str, Any] = dict.fromkeys([*_AXES.values(), "ep", "virtual_stages"], 1)
    off |= {"schedule": DEFAULT_SCHEDULE, "stage_layers": (), "recompute": "none", "offload": "none"}
    off |= {"cp_method": DEFAULT_CONTEXT_METHOD, "tp_overlap": False, "ep_overlap": False, "ep_dispatcher": "alltoall"}
    off["sequence_parallel"] = fields.get("tp", 1) == 1  # where it has no effect it is not printed
    return off | fields


def read_name(text: str) -> dict[str, Any]:
    """The fields of a layout that a whole name or some choices set.

    InvalidConfig names the word that is none, or two words that contradict each other.
    """
    fields, words = dict[str, Any](), dict[str, str]()
    for word in split_name(text):
        if not (found := read_word(word)):
            raise describe_unknown_word(word)
        for name, value in found.items():
            if fields.get(name, value) != value:
                raise InvalidConfig(f"{word} and {words[name]}: say one of them")
            words[name] = word
        fields |= found
    return complete_name(text, fields)


def describe_unknown_word(word: str) -> InvalidConfig:
    """The refusal of a word that is no choice."""
    return InvalidConfig(f"{word!r} is no choice; write a layout as it is printed, such as {_EXAMPLE}, or name=value")
