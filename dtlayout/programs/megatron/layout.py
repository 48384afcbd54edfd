"""Megatron-LM's options about the layout, read: degrees, stages, sharding, blocks that are computed again."""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import plural
from dtlayout.costmodel.engine_features import JOINT
from dtlayout.costmodel.recompute_modules import MODULES, USUAL_MODULES, find_missing, name_parts
from dtlayout.programs.megatron.options import MegatronOptions
from dtlayout.programs.megatron.write import CONTEXT, SHARDED
from dtlayout.programs.options import ask_for, positive, string, whole
from dtlayout.programs.shell.script import Unknown

_DEGREES: Mapping[str, str] = {
    "--tensor-model-parallel-size": "tp", "--pipeline-model-parallel-size": "pp", "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep", "--micro-batch-size": "micro_batch",
}  # fmt: skip
"""Option → key of the layout."""
_LONGEST = 8
"""Most blocks of a period by which those are said that stages of different lengths compute again."""
_FSDP = ("--use-megatron-fsdp", "--use-custom-fsdp")
_MODULES, _OLDER = "--recompute-modules", "--moe-layer-recompute"
"""Option that names the modules of selective recomputation, and an older one that adds moe to them."""
_ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
_COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
"""Options that count a table, or the loss, as a block of the first or the last stage."""


def read_batch(reader: MegatronOptions) -> None:
    """Note the batch."""
    reader.put("batch", "seq_len", "--seq-length", positive)
    reader.put("batch", "global_batch", "--global-batch-size", positive)
    if reader.has("--rampup-batch-size"):
        reader.found.ignore(reader.show("--rampup-batch-size"), "the batch that it ends with is predicted")


def read_layout(reader: MegatronOptions) -> None:
    """Note the layout."""
    found = reader.found
    for name, key in _DEGREES.items():
        reader.put("layout", key, name, positive)
    layout = found.tables.setdefault("layout", {})
    tp, pp, cp = (layout.get(key, 1) for key in ("tp", "pp", "cp"))
    _read_sequence(reader, layout, tp)
    _read_context(reader, cp)
    _read_stages(reader, pp)
    _read_sharding(reader, tp * pp * cp)
    _read_recompute(reader)
    dispatcher = reader.value("--moe-token-dispatcher-type", string)
    deep = reader.has("--moe-enable-deepep")
    if dispatcher == "flex" or deep:
        names = ("--moe-token-dispatcher-type", "--moe-enable-deepep")
        reader.note("layout", {"ep_dispatcher": "deepep"}, *names)
    _read_backend(reader, dispatcher)
    if reader.has("--overlap-moe-expert-parallel-comm"):
        reader.note("layout", {"ep_overlap": True}, "--overlap-moe-expert-parallel-comm")


def _read_backend(reader: MegatronOptions, dispatcher: str | None) -> None:
    """Note the library by which tokens are sent, of a dispatcher that leaves it open."""
    name = "--moe-flex-dispatcher-backend"
    backend = reader.value(name, string)
    if backend and dispatcher != "flex":
        what = f"without {reader.call('--moe-token-dispatcher-type')} flex"
        reader.found.ignore(reader.show_all(name) or reader.call(name), what, "no effect")
    elif backend == "hybridep":
        reader.found.ignore(reader.show_all(name), "predicted as deepep", "assumed")
    elif backend and backend != "deepep":
        reader.found.problems.append(f"{reader.call(name)} {backend} is nothing that is known here; use deepep")


def _read_sequence(reader: MegatronOptions, layout: dict[str, Any], tp: int) -> None:
    name = "--sequence-parallel"
    if not reader.has(name):
        reader.note_absent("layout", {"sequence_parallel": False}, name)
    elif tp == 1:
        reader.found.ignore(reader.show(name), "tp is 1", "no effect")
        layout["sequence_parallel"] = True
    else:
        reader.note("layout", {"sequence_parallel": True}, name)
    if reader.has("--tp-comm-overlap"):
        if tp == 1:
            reader.found.ignore(reader.show("--tp-comm-overlap"), "tp is 1", "no effect")
        else:
            reader.note("layout", {"tp_overlap": True}, "--tp-comm-overlap")


def _read_context(reader: MegatronOptions, cp: int) -> None:
    name, known = "--cp-comm-type", {theirs: ours for ours, theirs in CONTEXT.items()}
    method = reader.value(name, string)
    if method in known:
        reader.note("layout", {"cp_method": known[method]}, name)
    elif method:
        words = " or ".join(known)
        reader.found.problems.append(f"{reader.call(name)} {method} is nothing that is known here; use {words}")
    elif cp > 1:
        reader.assume("layout", {"cp_method": "ring"}, reader.call(name), "its default, p2p")


def _read_stages(reader: MegatronOptions, pp: int) -> None:
    found, layers = reader.found, reader.found.get("model", "num_layers", 0)
    number, size = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"
    layout = "--pipeline-model-parallel-layout"
    virtual = reader.value(number, positive)
    counted = [reader.has(name) for name in _COUNTED]
    all_layers = layers + sum(counted)
    if blocks := reader.value(size, positive):
        virtual = all_layers // pp // blocks
        if pp * virtual * blocks != all_layers:
            what = f"{reader.call(size)} {blocks}"
            found.problems.append(f"{what} does not divide the {all_layers} blocks of {pp} ranks")
    if any(counted):
        _share_counted(reader, counted, layers, pp * (virtual or 1))
    if text := reader.value(layout, string):
        stages = read_stages(text, reader.call(layout))
        virtual = len(stages) // pp
        reader.note("layout", {"stage_layers": stages}, layout)
    first, last = (reader.value(name, whole) for name in _ENDS)
    if first is not None or last is not None:
        ends = [each for each in (first, last) if each is not None]
        between = pp - len(ends)
        rest = (layers - sum(ends)) // between if between else 0
        stages = [*([first] if first is not None else []), *[rest] * between, *([last] if last is not None else [])]
        reader.note("layout", {"stage_layers": stages}, *_ENDS)
    if virtual and virtual > 1:
        values = {"virtual_stages": virtual, "schedule": "interleaved-1f1b"}
        reader.note("layout", values, number, size, layout)


def _share_counted(reader: MegatronOptions, counted: Sequence[bool], layers: int, stages: int) -> None:
    """Note blocks of stages of which the first counts its table as a block, or the last the loss."""
    each, left = divmod(layers + sum(counted), stages)
    if left:
        names = [reader.call(name) for name, counts in zip(_COUNTED, counted, strict=True) if counts]
        what = f"{layers} blocks, with those of {' and '.join(names)},"
        reader.found.problems.append(f"{what} are no multiple of {plural(stages, 'stage')}")
        return
    blocks = [each] * stages
    for place, counts in zip((0, -1), counted, strict=True):
        blocks[place] -= counts
    reader.note("layout", {"stage_layers": blocks}, *_COUNTED)


def _read_sharding(reader: MegatronOptions, ranks_of_model: int) -> None:
    found, num_gpus = reader.found, reader.found.num_gpus
    copies_option, strategy_option = "--num-distributed-optimizer-instances", "--data-parallel-sharding-strategy"
    copies = reader.value(copies_option, positive) or 1
    sharded = reader.has("--use-distributed-optimizer")
    strategy = reader.value(strategy_option, string)
    fsdp = [name for name in _FSDP if reader.has(name)]
    dp = num_gpus // ranks_of_model if num_gpus else 0
    if num_gpus and num_gpus % ranks_of_model:
        found.problems.append(f"{num_gpus} GPUs are no multiple of tp * pp * cp = {ranks_of_model}")
    if fsdp:
        stages = {theirs: stage for stage, theirs in SHARDED.items()} | {"optim": 1, "no_shard": 1}
        zero = stages.get(strategy or "no_shard")
        if zero is None:
            found.problems.append(f"{reader.call(strategy_option)} {strategy} is nothing that is known here")
            return
        reader.note("layout", {"zero": zero}, *_FSDP, strategy_option)
    elif strategy:
        found.ignore(reader.show(strategy_option), f"without {reader.call(_FSDP[0])}", "no effect")
    if not dp:
        found.ignore("(GPUs)", "dp is what tp, pp and cp leave of them", "assumed")
    elif copies > 1 and dp % copies:
        found.problems.append(f"{reader.call(copies_option)} {copies} does not divide dp = {dp}")
    elif sharded or fsdp:
        names = ("--use-distributed-optimizer", copies_option) if sharded else (*_FSDP, copies_option)
        reader.note("layout", {"dp_shard": dp // copies, "dp_replicate": copies}, *names)
        if dp == copies:
            found.ignore(reader.call(names[0]), "one rank has each copy: there is nothing to share", "no effect")
    else:
        reader.note_absent("layout", {"dp_replicate": dp, "dp_shard": 1}, "--use-distributed-optimizer")


def _read_recompute(reader: MegatronOptions) -> None:
    found = reader.found
    which, how_blocks, count = "--recompute-granularity", "--recompute-method", "--recompute-num-layers"
    how, modules = reader.value(which, string), _read_modules(reader)
    method, number = reader.value(how_blocks, string), reader.value(count, positive)
    for name in ("--recompute-activations", _OLDER):
        if reader.has(name):
            how = how or "selective"
    if how == "selective":
        names = (which, "--recompute-activations", _OLDER)
        reader.note("layout", {"recompute": "none" if modules == () else "selective"}, *names)
        _note_modules(reader, modules)
        return
    if reader.is_there(_OLDER):
        found.problems.append(f"{reader.call(_OLDER)} goes with selective recomputation, not with {how}")
    if reader.is_there(_MODULES):
        reason = f"with {reader.show(which)}" if how else f"without {reader.call(which)}"
        found.ignore(reader.show(_MODULES), reason, "no effect")
    if how is None:
        if method or number:
            name = how_blocks if method else count
            shown = reader.show(name) if reader.said else reader.call(name)
            found.ignore(shown, f"without {reader.call(which)}", "no effect")
        return
    stages = found.get("layout", "pp", 1) * found.get("layout", "virtual_stages", 1)
    layers = found.get("model", "num_layers", 1)
    is_even = layers % stages == 0 and len({*(found.get("layout", "stage_layers") or ())}) < 2
    ours, note = _choose_blocks(method, number, layers, stages, is_even=is_even)
    reader.note("layout", {"recompute": ours}, which, how_blocks, count, otherwise=note)


def _read_modules(reader: MegatronOptions) -> tuple[str, ...] | None:
    """Modules that the file names, of `MODULES`, in their order there; None where it names none itself."""
    words = list(reader.options[_MODULES]) if reader.has(_MODULES) else None
    if reader.is_there(_OLDER):
        words = [*(USUAL_MODULES if words is None else words), "moe"]
    for word in words or ():
        if isinstance(word, Unknown):
            reader.found.problems.append(ask_for(reader.call(_MODULES), word))
        elif word.strip("'\"") not in MODULES:
            what = f"{reader.call(_MODULES)} {word} is nothing that is known here"
            reader.found.problems.append(f"{what}; use {' or '.join(MODULES)}")
    named = [word.strip("'\"") for word in words or ()]
    return None if words is None else tuple(name for name in MODULES if name in named)


def _note_modules(reader: MegatronOptions, modules: tuple[str, ...] | None) -> None:
    """Note the modules that selective recomputation computes again, and those that the model has not.

    A model that only a name says may have any of them.
    """
    if not modules:
        if modules == ():
            reader.found.ignore(reader.show(_MODULES), "no module is computed again", "read")
        return
    told = JOINT.join(modules)
    if modules != USUAL_MODULES:
        reader.found.told["recompute_modules"] = told
    reader.note_row(f"engine recompute_modules={told}", _MODULES, _OLDER)
    model = reader.found.tables.get("model", {})
    if "num_layers" not in model:
        return
    experts = model.get("experts") or {}
    has = name_parts(
        attends=True, is_latent=bool(model.get("latent_attention")), has_experts=bool(experts),
        has_dense=not experts or bool(experts.get("dense_layers")), is_shared=bool(experts.get("shared_ffn_size")),
    )  # fmt: skip
    for name, parts in find_missing(modules, has).items():
        if not MODULES[name].is_refused:
            reader.found.ignore(f"{reader.call(_MODULES)} {name}", f"the model has no {parts}", "no effect")


def _choose_blocks(
    method: str | None, number: int | None, layers: int, stages: int, *, is_even: bool
) -> tuple[str, str]:
    """Our word for the blocks that are computed again, and a note where it is not the same.

    The first of a stage's blocks are computed again, and ours are the last of each period: as many, and alike.
    """
    if method != "block" or not number or number * stages >= layers:
        return "full", "several blocks keep one input" if method == "uniform" and (number or 1) > 1 else ""
    share, note = Fraction(number * stages, layers), ""
    if not is_even:
        share, note = share.limit_denominator(_LONGEST), f"{number} blocks of each stage, and stages differ"
    ours = f"every-{share.denominator}" if share.numerator == 1 else f"{share.numerator}-of-{share.denominator}"
    return ours, note


def read_stages(text: str, name: str = "--pipeline-model-parallel-layout") -> list[int]:
    """Blocks of each stage from --pipeline-model-parallel-layout; InvalidConfig for another language.

    >>> read_stages("Et*3|(t*4|)*2t*3L")
    [3, 4, 4, 3]
    """
    bare = re.sub(r"\(([^()]*)\)\*(\d+)", lambda match: match[1] * int(match[2]), text.strip("'\"").replace(",", ""))
    stages = []
    for stage in bare.split("|"):
        if not re.fullmatch(r"(?:[A-Za-z](?:\*\d+)?)*", stage):
            raise InvalidConfig(f"{name} {text}: {stage!r} is no stage")
        count = 0
        for letter, times in re.findall(r"([A-Za-z])(?:\*(\d+))?", stage):
            if letter not in "EtLm":
                raise InvalidConfig(f"{name} {text}: {letter!r} is no part of a stage")
            count += (int(times) if times else 1) * (letter == "t")
        stages.append(count)
    return stages
