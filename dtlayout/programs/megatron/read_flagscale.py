"""FlagScale, read: YAML of Megatron-LM's options, with underscores for dashes, as our config.

Three kinds of files: one with the tables system, model and data; the one of an experiment, which names such a file
beside it and says on how many GPUs it runs; and a recipe of Megatron-LM itself, whose options lie below ARGS or
MODEL_ARGS.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import plural
from dtlayout.programs.files.trees import Tree, read_tree
from dtlayout.programs.megatron.options import FLAGS
from dtlayout.programs.megatron.own_names import (
    Assumed,
    Naming,
    Options,
    change_as,
    find_own,
    flag,
    read_names,
    same,
    translate,
)
from dtlayout.programs.megatron.own_names import to_own as make_own
from dtlayout.programs.megatron.reader import IGNORED, count_gpus, read_job
from dtlayout.programs.megatron.write import MEGATRON
from dtlayout.programs.shell.script import Unknown
from dtlayout.programs.understood import OtherFile, Row, Understood

TITLE = "FlagScale"
_TABLES = ("system", "model", "data")
"""Tables of a file, in the order in which a later one has the word."""
_RECIPES = ("ARGS", "MODEL_ARGS")
"""Tables of a recipe of Megatron-LM."""
_PRECISION = ("bf16", "fp16", "grad_reduce_in_bf16")
_SYSTEM = (
    r".*parallel.*|.*pipeline.*|.*overlap.*|use_.*|.*fsdp.*|num_distributed_.*|cp_comm_type|tp_.*|cuda_graph_.*"
    r"|attention_backend|moe_token_dispatcher_type|moe_enable_deepep|ckpt_format"
)
"""Names that stand in the table system, where a file does not have them elsewhere."""
_WIDTH = ("--multiple-of", "--hidden-dim-multiplier")
"""Options from which FlagScale makes the inner width of a feed-forward that no option says."""
_OWN: Mapping[str, str] = {
    "how it is started": r"--(no-shared-fs|log-dir)",
    "the files of its tokenizer": r"--(special-tokens-file|legacy-tokenizer)",
    "what its blocks do alike": rf"{IGNORED['what its blocks do alike']}|--rotary-interleaved-patch",
    "initial values and chance": rf"{IGNORED['initial values and chance']}|--norm-init-weight",
}
_STARTS: Mapping[str, str] = {
    "how it is started": r"experiment\..*|action|hydra\..*|defaults", "its surroundings": r"ENV_VARS\..*",
    "what it is built from": r"DEPENDENCIES\..*|BASE_IMAGE|TEST_TYPE|MODE|METRICS",
}  # fmt: skip
"""Subject → names beside the options."""


def is_ours(file: OtherFile) -> bool:
    """True for YAML with tables of Megatron-LM's options, and for an experiment of FlagScale that names one."""
    if file.tree is None or file.tree.language != "yaml":
        return False
    values = file.tree.values
    return _find_tables(values) != () or _is_experiment(values)


def _find_tables(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Tables of a file that have options; none if it is no such file."""
    for table in _RECIPES:
        if any(_to_option(name) == "--num-layers" and name.startswith(f"{table}.") for name in values):
            return (table,)
    tables = {name.partition(".")[0] for name in values}
    has_sizes = any(name in values for name in ("model.num_layers", "model.hidden_size"))
    return _TABLES if {"system", "model"} <= tables and has_sizes else ()


def _is_experiment(values: Mapping[str, Any]) -> bool:
    return "experiment.task.backend" in values or (
        any(name.startswith("experiment.runner.") for name in values) and _find_named(values) is not None
    )


def _find_named(values: Mapping[str, Any]) -> str | None:
    """The file of options that an experiment names."""
    defaults = values.get("defaults")
    entries = defaults if isinstance(defaults, list) else []
    named = [each["train"] for each in entries if isinstance(each, Mapping) and isinstance(each.get("train"), str)]
    return named[0] if named else None


def read(file: OtherFile) -> Understood:
    """The job of such a file; what is not understood is in its `problems`, or an InvalidConfig."""
    assert file.tree is not None
    found = Understood(MEGATRON.engine, TITLE)
    experiment: Mapping[str, Any] = {}
    values, where = file.tree.values, ""
    if not _find_tables(values):
        experiment, values = values, _read_train(file, found)
    elif (naming := _find_experiment(file)) is not None:
        where, experiment = f"in {naming[0]}, which names this file", naming[1].values
        tree = read_tree(file.tree.text, file.given, experiment)
        values = tree.values if tree is not None else values
    tables = _find_tables(values)
    if not tables:
        raise InvalidConfig("the file that the experiment names has no sizes of a model: give one that has")
    if tables[0] in _RECIPES:
        found.title = MEGATRON.title
    _count_gpus(experiment, found, file.num_gpus, where)
    said = translate(_list_rules(values, tables), values, found.problems, lambda option: _place(option, tables))
    if not where:
        beside = {name: value for name, value in experiment.items() if not name.startswith("train.")}
        said.values = {**beside, **values}
    read_job(found, said.options, said, {**IGNORED, **_OWN})
    read_names(found, said, _STARTS)
    if _find_tables(own := file.tree.values):
        change_as(found, own, lambda options: find_own(_list_for(options, own), options, own))
    return found


def to_own(options: Options, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Dotted name → value of a file with system, model and data that says options of Megatron-LM; None takes one out.

    It is the inverse of what `read` makes of such names. `values` are those of the file, in which an option keeps its
    table.
    """
    values = values or {}
    return make_own(_list_for(options, values), options, values)


def _list_for(options: Options, values: Mapping[str, Any]) -> list[Naming]:
    """A rule for each option, with the name that the file has for it, or would have."""
    places = {_to_option(name): name for name in _list_names(values, _find_tables(values) or _TABLES)}
    rules = []
    for option, words in options.items():
        name = places.get(option) or _place(option, _find_tables(values))
        is_flag = option in FLAGS if words is None else not words
        rules.append(flag(name, option) if is_flag else same(name, option))
    return rules


def _place(option: str, tables: Sequence[str]) -> str:
    """Dotted name of an option that a file does not have."""
    key = option.removeprefix("--").replace("-", "_")
    if tables and tables[0] in _RECIPES:
        return f"{tables[0]}.{key if tables[0] == 'ARGS' else option}"
    if key in _PRECISION or key.startswith(("fp8_", "fp4_")):
        return f"system.precision.{key}"
    if key.startswith("recompute_"):
        return f"system.recompute.{key}"
    if key.startswith(("adam_", "sgd_")) or key in ("optimizer", "weight_decay"):
        return f"model.optimizer.{key}"
    if key.startswith("lr") or key == "min_lr":
        return f"model.optimizer.lr_scheduler.{key}"
    if "vocab" in key or key.startswith("tokenizer_"):
        return f"data.tokenizer.{key}"
    if re.fullmatch(_SYSTEM, key) and key != "use_rope_scaling":
        return f"system.{key}"
    return f"data.{key}" if key in ("data_path", "mock_data", "split") else f"model.{key}"


# Options


def _to_option(name: str) -> str:
    """Option of Megatron-LM that the last part of a dotted name stands for."""
    last = name.rpartition(".")[2]
    return last if last.startswith("--") else f"--{last.replace('_', '-')}"


def _list_names(values: Mapping[str, Any], tables: Sequence[str]) -> Iterator[str]:
    """Names of options, those before others that have the word.

    The program joins its tables: of two with one key, the later takes its place; then the last of an option has the
    word.
    """
    joined: dict[str, list[str]] = {}
    replaced = list[str]()
    for table in tables:
        own: dict[str, list[str]] = {}
        for name in values:
            if name.startswith(f"{table}."):
                own.setdefault(name.split(".")[1], []).append(name)
        for key, names in own.items():
            replaced += joined.get(key, [])
            joined[key] = names
    yield from reversed([name for names in joined.values() for name in names])
    yield from reversed(replaced)


def _list_rules(values: Mapping[str, Any], tables: Sequence[str]) -> list[Naming]:
    named = {name: _to_option(name) for name in _list_names(values, tables)}
    rules = []
    for name, option in named.items():
        if option not in _WIDTH:
            is_flag = isinstance(values[name], bool) or (isinstance(values[name], Unknown) and option in FLAGS)
            rules.append(flag(name, option) if is_flag else same(name, option))
    first = {option: name for name, option in reversed(named.items())}
    return [*rules, _make_ffn(first)] if _WIDTH[0] in first else rules


def _make_ffn(names: Mapping[str, str]) -> Naming:
    """FlagScale's own default of the inner width of a feed-forward: a multiple of what the file says.

    `names` are those of the file by their options.
    """
    multiple, hidden, factor = (names.get(option, "") for option in (_WIDTH[0], "--hidden-size", _WIDTH[1]))
    inner = "--ffn-hidden-size"

    def to(values: Mapping[str, Any]) -> Options:
        try:
            step, width = int(values[multiple]), int(4 * int(values[hidden]) * 2 / 3)
            width = int(width * float(values.get(factor, 1)))
        except (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError):
            return {}
        return {inner: Assumed([str(-(-width // step) * step)], f"its default, a multiple of {multiple}")}

    def idle(values: Mapping[str, Any]) -> Mapping[str, str]:
        reason = f"{names[inner]} says it" if inner in names else ""
        return {name: reason for name in (multiple, factor) if reason and name in values}

    return Naming(tuple(filter(None, (multiple, hidden, factor))), (inner,), to, lambda options: {}, idle=idle,
                homes={inner: "model.ffn_hidden_size"}, passes=True)  # fmt: skip


# Experiments


def _read_train(file: OtherFile, found: Understood) -> Mapping[str, Any]:
    """Values of the file of options that an experiment names, with its own changes of them."""
    assert file.tree is not None
    values, named = file.tree.values, _find_named(file.tree.values)
    if values.get("experiment.task.backend", "megatron") != "megatron":
        raise InvalidConfig(
            f"experiment.task.backend={values['experiment.task.backend']} is none of Megatron-LM's; megatron is"
        )
    if named is None:
        raise InvalidConfig("defaults name no file of options, as train: 7b does")
    path = file.path.parent / "train" / f"{named}.yaml"
    try:
        tree = read_tree(path.read_text(encoding="utf-8"), file.given, values)
    except (OSError, ValueError):
        tree = None
    if tree is None:
        raise InvalidConfig(f"defaults name train: {named}, and train/{named}.yaml is not there, beside the file")
    found.rows.append(Row(f"defaults, train: {named}", "", "read", f"the options of train/{named}.yaml"))
    own = {name.removeprefix("train."): value for name, value in values.items() if name.startswith("train.")}
    return {**tree.values, **own}


def _find_experiment(file: OtherFile) -> tuple[str, Tree] | None:
    """Name and tree of the one experiment beside a file of options that names it; None where there is no such one."""
    if file.path.parent.name != "train":
        return None
    found = list[tuple[str, Tree]]()
    for path in sorted(file.path.parent.parent.glob("*.yaml")):
        try:
            tree = read_tree(path.read_text(encoding="utf-8"), file.given)
        except (OSError, ValueError):
            continue
        if tree is not None and _is_experiment(tree.values) and _find_named(tree.values) == file.path.stem:
            found.append((path.name, tree))
    return found[0] if len(found) == 1 else None


def _count_gpus(experiment: Mapping[str, Any], found: Understood, num_gpus: int, where: str) -> None:
    """Note the GPUs that an experiment starts."""
    names = {key: f"experiment.runner.{key}" for key in ("nproc_per_node", "nnodes", "per_node_task")}
    visible = str(experiment.get("experiment.envs.CUDA_VISIBLE_DEVICES") or "")
    per_node, nodes = (str(experiment.get(names[key]) or "") for key in ("nproc_per_node", "nnodes"))
    counts = [int(per_node)] if per_node.isdigit() else []
    counts += [len(visible.split(","))] if visible and not isinstance(visible, Unknown) else []
    ranks = {"--nproc_per_node": str(min(counts))} if counts else {}
    shown = {names["nproc_per_node"]: per_node, names["nnodes"]: nodes,
             "experiment.envs.CUDA_VISIBLE_DEVICES": visible}  # fmt: skip
    if experiment.get(names["per_node_task"]) is True:
        nodes = ""
    elif nodes or experiment.get("experiment.runner.hostfile"):
        ranks["--nnodes"] = nodes.partition(":")[0]
    if ranks and counts:
        count_gpus(found, ranks, num_gpus)
        text = ", ".join(f"{name} = {value}" for name, value in shown.items() if value)
        found.rows.append(Row(text, plural(found.num_gpus, "GPU") if found.num_gpus else "", "read", where))
    found.num_gpus = num_gpus or found.num_gpus
