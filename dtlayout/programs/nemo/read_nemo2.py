"""NeMo 2, read: YAML of a recipe as NeMo-Run writes it, or a command with changes of a recipe, as our config.

Its parts are those of Megatron-Bridge's configs under other names: what `bridge_rules` has, at the places of
Lightning's trainer and its strategy, plugins and callbacks.
"""

import re
from collections.abc import Mapping
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.command_line import count_ranks, read_options
from dtlayout.programs.files.hydra import find_values, read_overrides, split_words, start_of
from dtlayout.programs.megatron.own_names import (
    Naming,
    Options,
    alike,
    change_as,
    choice,
    find_own,
    opposite,
    show_value,
    translate,
)
from dtlayout.programs.megatron.own_names import to_own as make_own
from dtlayout.programs.megatron.reader import IGNORED, read_job
from dtlayout.programs.megatron.write import MEGATRON
from dtlayout.programs.nemo.read_bridge import has_part, list_class, mark_known, note_names
from dtlayout.programs.nemo.read_nemo1 import count_trainer_gpus
from dtlayout.programs.nemo.recipes import NEMO_RECIPES, list_recipe
from dtlayout.programs.nemo.rules import At, list_rules
from dtlayout.programs.shell.script import Unknown
from dtlayout.programs.understood import OtherFile, Row, Understood

TITLE = "NeMo 2"
_PROGRAM = re.compile(r"(^|/)nemo$")
_COMMAND = re.compile(r"(^|[\s/;&|])nemo\s+llm\s+(pretrain|finetune)\b")
_STRATEGY = frozenset((
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "sequence_parallel", "expert_model_parallel_size", "expert_tensor_parallel_size",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "moe_extended_tp",
    "num_distributed_optimizer_instances", "hierarchical_context_parallel_sizes", "pipeline_dtype",
    "use_te_rng_tracker", "microbatch_group_size_per_vp_stage", "pipeline_model_parallel_comm_backend",
    "gradient_accumulation_fusion",
))  # fmt: skip
"""Fields of the strategy; those of a model that are none lie in its own config."""
_LISTS: Mapping[str, str] = {
    "trainer.callbacks": "MegatronCommOverlapCallback", "trainer.plugins": "MegatronMixedPrecision",
}  # fmt: skip
"""List of classes → the one whose fields are read."""
_CALLBACK = "nemo.lightning.pytorch.callbacks.megatron_comm_overlap.MegatronCommOverlapCallback"
_PRECISIONS: Mapping[Any, Options] = {
    **alike(("bf16-mixed", "bf16", "bf16-true"), {"--bf16": [], "--fp16": None}),
    **alike(("16-mixed", 16, "fp16"), {"--bf16": None, "--fp16": []}),
    **alike((32, "fp32", "32-true"), {"--bf16": None, "--fp16": None}),
}
_SHARDS: Mapping[Any, Options] = {"megatron": {"--use-megatron-fsdp": []}}
_WATCHERS = re.compile(
    r".*(Timing|GarbageCollection|Nsys|Chakra|FLOPsMeasurement|Preemption|ModelCheckpoint|LearningRateMonitor|Memory\w*"
    r"|Parity\w*|Progress\w*|Profiler|Straggler\w*|FaultTolerance|RuntimeEstimator|SpeedMonitor|Optimizer(Monitor)?"
    r"|EarlyStopping|ModelSummary|StochasticWeight\w*|RichModelSummary|MegatronEnableExperimental|Debug\w*|Inspector\w*)"
    r"(Callback|Checker|Printer|Bar|Profiler|Tester)?"
)
"""Classes of callbacks that watch a run, and change nothing of a step."""
_STARTS = ("y", "yes", "no-confirm", "to-yaml", "dryrun", "tail", "detach", "repl", "verbose")
"""Options of a command that start it."""
_OTHERS: Mapping[str, str] = {
    "how it is started": r"name|executor(\..*)?|_partial_|run\..*|trainer\.(accelerator|use_distributed_sampler"
    r"|strategy|strategy\.(lazy_init|find_unused_.*|setup_optimizers|init_model_parallel|cluster_environment|parallel_devices))",
    "the length of the run, and logs": r"log(\..*)?|trainer\.(limit_.*|log_.*|logger.*|max_.*|min_.*|val_.*|enable_.*"
    r"|num_sanity_.*|profiler|strategy\.(replace_progress_bar|progress_interval|megatron_log_level))",
    "checkpoints": r"resume(\..*)?|trainer\.strategy\.(ckpt_.*|save_ckpt_.*|restore_config(\..*)?|checkpoint_io)"
    r"|model\.(tokenizer|model_transform)(\..*)?",
    "the course of the learning rate": r"optim\.(lr_scheduler(\..*)?|no_weight_decay_cond|scale_lr_cond|lr_mult)",
    "how ranks meet": r"trainer\.strategy\.(gradient_as_bucket_view|use_tp_pp_dp_mapping|use_sharp|nccl_.*)",
    "data": r"data\.(?!micro_batch_size|global_batch_size|rampup_batch_size|seq_length).*|data|tokenizer(\..*)?",
}  # fmt: skip
"""Subject → names beside those of the parts."""


def is_ours(file: OtherFile) -> bool:
    """True for YAML with classes of NeMo 2, and for a command of it."""
    if file.tree is None:
        return _COMMAND.search(file.text.replace("\\\n", " ")) is not None
    values = file.tree.values
    targets = [str(values.get(name)) for name in ("_target_", "model._target_", "model.config._target_")]
    return file.tree.language == "yaml" and any(
        target.startswith("nemo.collections.llm") for target in [*targets, str(values.get("data._target_"))]
    )


def read(file: OtherFile) -> Understood:
    """The job of such a file or command; what is not understood is in its `problems`, or an InvalidConfig."""
    found = Understood(MEGATRON.engine, TITLE)
    known: Mapping[str, Any] = {}
    values = file.tree.values if file.tree is not None else {}
    if file.tree is None:
        known, values = _read_command(file, found)
    values = _lift(values)
    at = _find_names({**known, **values})
    source = "of that factory" if known else "of that class"
    known = known or list_class(at, values, found)
    merged = {**known, **values}
    rules = _list_rules(merged, at)
    said = translate(rules, merged, found.problems)
    if "--hidden-size" not in said.options:
        raise InvalidConfig(
            "the file does not say the sizes of the model: give the YAML that --to-yaml writes, or a class with sizes "
            "in its name, such as Llama3Config8B"
        )
    if found.num_gpus == 0 or file.num_gpus:
        count_trainer_gpus(merged, found, file.num_gpus)
    read_job(found, said.options, said)
    _check(merged, found)
    note_names(said, at, found, _OTHERS)
    mark_known(found, values, source)
    if (tree := file.tree) is not None:

        def find(options: Options) -> tuple[dict[str, Any], list[str]]:
            own, lost = find_own(rules, options, values, IGNORED.values())
            return _put_back(own, tree.values), lost

        change_as(found, tree.values, find)
    return found


def to_own(options: Options, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Dotted name → value of NeMo 2's YAML that says options of Megatron-LM; None takes one out.

    It is the inverse of what `read` makes of such names. `values` are those of the file. A list of callbacks is one
    value, and comes whole. InvalidConfig for what the program has no name for.
    """
    values = values or {}
    lifted = _lift(values)
    at = _find_names(lifted)
    found = make_own(_list_rules(lifted, at), options, lifted, IGNORED.values())
    return _put_back(found, values)


def _find_names(values: Mapping[str, Any]) -> At:
    """Function that says dotted names of parts and fields as such a file has them."""
    callback = next((name.rpartition(".")[0] for name, value in values.items()
                     if re.fullmatch(r"trainer\.callbacks\[\d+\]\._target_", name)
                     and str(value).endswith(_LISTS["trainer.callbacks"])), "trainer.callbacks[0]")  # fmt: skip
    plugin = next((name.rpartition(".")[0] for name in values if re.match(r"trainer\.plugins\[\d+\]\.", name)),
                  "trainer.plugins")  # fmt: skip
    places = {
        "model": "model.config", "train": "data", "dataset": "data", "tokenizer": "data.tokenizer",
        "optimizer": "optim.config", "ddp": "trainer.strategy.ddp", "mixed_precision": plugin,
        "comm_overlap": callback, "dist": "trainer.strategy.dist",
    }  # fmt: skip

    def at(part: str, field: str) -> str:
        place = "trainer.strategy" if part in ("model", "ddp") and field in _STRATEGY else places[part]
        return f"{place}.{field}" if field else place

    return at


def _list_rules(values: Mapping[str, Any], at: At) -> list[Naming]:
    precision, reduced = at("mixed_precision", "precision"), at("mixed_precision", "grad_reduce_in_fp32")
    option = "--grad-reduce-in-bf16"
    plain = opposite(reduced, option)

    def to(found: Mapping[str, Any]) -> Options:
        return plain.to(found) if reduced in found else {option: None}

    has_callback = any(
        name.startswith("trainer.callbacks[") and str(value) == _CALLBACK for name, value in values.items()
    )
    parts = list_rules(at, lambda part: has_callback if part == "comm_overlap" else has_part(values, at, part))
    no_names = (at("mixed_precision", "bf16"), at("mixed_precision", "fp16"))
    return [
        choice(precision, _PRECISIONS), choice("trainer.precision", _PRECISIONS),
        choice("trainer.strategy.fsdp", _SHARDS),
        plain._replace(names=(reduced, precision), to=to, shown=(reduced,)),
        *(rule for rule in parts if rule.names[0] not in no_names),
    ]  # fmt: skip


def _check(values: Mapping[str, Any], found: Understood) -> None:
    for name, value in values.items():
        if not re.fullmatch(r"trainer\.callbacks\[\d+\]", name):
            continue
        if _WATCHERS.fullmatch(str(value)):
            found.ignore(f"{name} = {show_value(value)}", "about the length of the run, and logs")
        else:
            what = str(value).rpartition(".")[2]
            found.problems.append(
                f"{name}={what} is not understood here: it may change the model, or what is sent; without it the rest "
                f"can be predicted"
            )
    name = "trainer.accumulate_grad_batches"
    value = values.get(name)
    if str(value) == "1":
        found.ignore(f"{name} = {value}", "its default", "no effect")
    elif value is not None:
        found.problems.append(f"{name}={value} is not understood here; 1 is")


# Lists of classes, which are one value of a tree


def _lift(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Values with the fields of classes in lists under names such as trainer.callbacks[0].tp_comm_overlap."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name not in _LISTS or not isinstance(value, list):
            found[name] = value
            continue
        for place, each in enumerate(value):
            target = str(each.get("_target_")) if isinstance(each, Mapping) else str(each)
            if isinstance(each, Mapping) and target.endswith(_LISTS[name]):
                found.update({f"{name}[{place}].{field}": inner for field, inner in each.items()})
            else:
                found[f"{name}[{place}]"] = target
    return found


def _put_back(found: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Changes with whole lists in the place of their parts; `values` are those of the file.

    A command has no list, and changes nothing in that of the YAML that it names.
    """
    changes: dict[str, Any] = {}
    for name, value in found.items():
        match = re.fullmatch(r"(trainer\.\w+)\[(\d+)\]\.(\w+)", name)
        if match is None:
            changes[name] = value
            continue
        listed = changes.get(match[1], values.get(match[1]))
        if listed is None and any(each.startswith(f"{match[1]}[") for each in values):
            continue  # in a list of the YAML that a command names, which the command cannot change
        there = listed if isinstance(listed, list) else []
        classes = [dict(each) if isinstance(each, Mapping) else each for each in there]
        if not any(isinstance(each, Mapping) and str(each.get("_target_")).endswith(_LISTS[match[1]])
                   for each in classes):  # fmt: skip
            if value is None:
                continue
            classes.insert(int(match[2]), {"_target_": _CALLBACK})
        own = classes[int(match[2])]
        own.pop(match[3], None)
        changes[match[1]] = classes
        if value is not None:
            own[match[3]] = value
    return changes


# Commands


def _read_command(file: OtherFile, found: Understood) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Values of the recipe that a command names; and those that it changes, with those of the YAML that it names."""
    command = start_of(file, _PROGRAM)
    before, own = split_words(command, _PROGRAM)
    count_ranks(read_options(before, found), found)
    if own[:2] != ["llm", "pretrain"]:
        raise InvalidConfig(f"nemo {' '.join(own[:2])} is not understood here; nemo llm pretrain is")
    changes = read_overrides(own, found)
    names = [word for word in own[2:] if word.startswith("-") or "=" not in word or "(" in word]
    options = read_options(names, found)
    yaml, recipe = options.pop("yaml", None), options.pop("factory", options.pop("f", None))
    for name, value in options.items():
        if name in _STARTS:
            dash = "-" if len(name) == 1 else "--"
            found.ignore(f"{dash}{name}" if value is True else f"{dash}{name} {value}", "about how it is started")
        else:
            found.problems.append(f"--{name} is not understood here; without it the rest can be predicted")
    values = find_values(yaml, file) if yaml else {}
    return _find_recipe(recipe, found) if recipe is not None else {}, {**values, **changes}


def _find_recipe(recipe: Any, found: Understood) -> dict[str, Any]:
    """Values of a recipe's function, which may have arguments, such as llama3_8b(num_nodes=2)."""
    if isinstance(recipe, Unknown):
        raise InvalidConfig(f"the recipe is {recipe}, {recipe.reason}: --given {recipe.variable}=NAME says it")
    text = " ".join(recipe) if isinstance(recipe, list) else str(recipe)
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", text)
    known = NEMO_RECIPES.get(match[1]) if match else None
    if match is None or known is None:
        names = ", ".join(NEMO_RECIPES)
        raise InvalidConfig(f"recipe {text} is in the program's code; {names} are known here; or give the YAML that "
                            f"--to-yaml writes")  # fmt: skip
    found.rows.append(Row(f"--factory {text}", "", "read", "the values of that name"))
    at = _find_names({})
    values = {at(*name): value for name, value in list_recipe(known).items()}
    values[at("optimizer", "use_distributed_optimizer")] = values.pop(at("ddp", "use_distributed_optimizer"))
    values |= {"trainer.plugins.precision": "bf16-mixed", "optim.config.adam_eps": 1e-5, "trainer.devices": 8}
    values = {name: value for name, value in values.items() if name != "trainer.plugins.bf16"}
    arguments = {"num_nodes": "trainer.num_nodes", "num_gpus_per_node": "trainer.devices"}
    for name, value in re.findall(r"(\w+)\s*=\s*([^,]+)", match[2] or ""):
        if name in arguments:
            values[arguments[name]] = int(value) if value.isdigit() else value
        elif name not in ("name", "dir"):
            raise InvalidConfig(f"argument {name} of recipe {match[1]} is not understood here")
    return values
