"""PEFT folders: an adapter's config and tensors as the library `peft` has them, and the model that they name. No torch.

A folder is an adapter_config.json beside adapter_model.safetensors. Its tensors are called after the modules of
`transformers`, with "base_model.model." before them. LoRA's matrices have their shapes here, and the vectors of (IA)³
one dimension of size 1 more: [out, 1], or [1, in] where a vector rescales inputs.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import expand, find_inside, parse_json
from dtlayout.models.adapters import LowRankLinear, RescaledLinear, list_adapted
from dtlayout.models.beside import CONFIG
from dtlayout.models.description import BLOCKS
from dtlayout.models.families import describe, find_family
from dtlayout.models.files import find_model
from dtlayout.models.first_source import ADAPTER_CONFIG, find_cached, read_saved
from dtlayout.models.operations import Linear
from dtlayout.models.routed_experts import RoutedExperts
from dtlayout.models.stored import FORMATS, StoredTensor, name_first, read_header
from dtlayout.models.stored_names import StoredWeight
from dtlayout.spec.adapter import IA3_INPUTS, Adapter
from dtlayout.spec.model_shape import ModelShape

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KINDS: dict[str, Literal["lora", "ia3"]] = {"LORA": "lora", "IA3": "ia3"}
"""peft_type → method."""
_READ = {
    "peft_type", "base_model_name_or_path", "target_modules", "feedforward_modules", "r", "lora_alpha", "use_rslora",
    "lora_dropout", "init_lora_weights",
}  # fmt: skip
_UNREAD = {
    "auto_mapping", "revision", "task_type", "inference_mode", "init_ia3_weights", "runtime_config", "peft_version",
    "fan_in_fan_out", "eva_config", "megatron_core", "qalora_group_size", "loftq_config",
}  # fmt: skip
"""Keys that change nothing of what a trained adapter computes beside linear layers."""
_OFF: tuple[Any, ...] = (None, False, 0, "", "none", [], {})
"""Values with which a key of something that is not computed here turns it off."""
_FUSED = ("gate_proj", "up_proj", "down_proj")
_OWN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the frozen weights as they are in their folder."""


def is_peft(folder: Path) -> bool:
    """True for a folder with an adapter as `peft` saves it."""
    return os.path.isfile(folder / ADAPTER_CONFIG)


def is_hf_folder(source: Path) -> bool:
    """True for a Hugging Face folder and a PEFT folder, False for a run and a checkpoint."""
    return is_peft(source) or os.path.isfile(source / CONFIG)


def find_base_folder(folder: Path) -> Path:
    """The Hugging Face folder of the weights that a folder stands for: itself, or of a PEFT folder its frozen model's.

    That is what base_model_name_or_path says: a folder, or a repository that lies in the cache of the Hugging Face hub.
    Of a run, or a checkpoint, it is the frozen model's too, or the folder with what the run has kept of the model that
    it came from. InvalidConfig if a frozen model is not here.
    """
    if (saved := read_saved(folder)) is not None:
        if saved.adapter is not None and not os.path.isfile(saved.beside / "config.json"):
            place = saved.base or "no folder, but was drawn from a seed"
            raise InvalidConfig(f"{saved.checkpoint} is an adapter whose frozen model is not here: it was {place}")
        return saved.beside
    if not is_peft(folder):
        return folder
    config = _read_config(folder)
    name = config.get("base_model_name_or_path")
    if isinstance(name, str) and name:
        if os.path.isfile(expand(name) / "config.json"):
            return expand(name)
        if (cached := find_cached(name, _text(config.get("revision")))) is not None:
            return cached
    raise InvalidConfig(
        f"{folder / ADAPTER_CONFIG} names the frozen model {name!r}, which is no folder here with a config.json; write "
        f"the path of its folder there as base_model_name_or_path"
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / ADAPTER_CONFIG
    try:
        config = parse_json(find_inside(folder, ADAPTER_CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no table")
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{file} cannot be read: {error}") from None
    return config


def read_adapter(folder: Path) -> Adapter:
    """The adapter that a PEFT folder has, with its targets by our names.

    InvalidConfig with a line for each key that says what is not computed here, or if its frozen model is not found.
    """
    config = _read_config(folder)
    if problems := [f"{folder / ADAPTER_CONFIG}: {problem}" for problem in _find_config_problems(config)]:
        raise InvalidConfig(problems)
    base = find_model(str((find_base_folder(folder) / "config.json").absolute()))
    try:
        table: dict[str, Any] = {"method": _KINDS[config["peft_type"]], "targets": [*_translate(config, base)]}
        if table["method"] == "lora":
            table |= {"rank": config["r"], "alpha": config["lora_alpha"], "rslora": bool(config.get("use_rslora"))}
        return toml.parse(table, Adapter, "adapter")
    except KeyError as error:
        raise InvalidConfig(f"{folder / ADAPTER_CONFIG} has no {error.args[0]}") from None
    except InvalidConfig as error:
        raise InvalidConfig([f"{folder / ADAPTER_CONFIG}: {problem}" for problem in error.problems]) from None


def _find_config_problems(config: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(kind := config.get("peft_type"), str) or kind not in _KINDS:
        yield f"peft_type={kind!r} is not computed here; use one of {', '.join(_KINDS)}"
        return
    for key, value in config.items():
        if key not in _READ | _UNREAD and value not in _OFF:
            yield f"{key}={value!r} is not computed here; train without it"
    if (start := config.get("init_lora_weights", True)) not in _OWN_STARTS:
        yield f"init_lora_weights={start!r} changes the frozen weights; have peft convert it to a plain LoRA"
    targets: Any = config.get("target_modules")
    inputs = config.get("feedforward_modules") or []
    if not _is_names(targets):
        yield f"target_modules={targets!r} must be a list of names"
    elif not _is_names(inputs, allows_none=True):
        yield f"feedforward_modules={inputs!r} must be a list of names"
    elif kind == "IA3" and {each for each in targets if _last(each) in IA3_INPUTS} != {*inputs}:
        known = ", ".join(IA3_INPUTS)
        yield f"feedforward_modules={sorted(inputs)}: the inputs of {known} alone are rescaled here, and of all of them"


def _is_names(value: Any, *, allows_none: bool = False) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value) and (bool(value) or allows_none)


def _translate(config: Mapping[str, Any], base: ModelShape) -> Iterator[str]:
    """Targets by our names, each once. Names that no linear layer of a block has are left out: tensors tell of them."""
    targets = sorted(config["target_modules"])
    modules = {
        each.module: _name_on_disk(base, each.module)
        for kind, _ in base.kinds(range(base.num_layers)) for each in describe(kind).block if isinstance(each, Linear)
    }  # fmt: skip
    found = dict[str, None]()
    for target in targets:
        ours = [name for name, on_disk in modules.items() if f".{on_disk}".endswith(f".{target}")]
        is_ours = any(f".{name}".endswith(f".{target}") for name in ours)
        found |= dict.fromkeys([target] if is_ours else ours)
    if not found:
        raise InvalidConfig(f"target_modules={targets} are no linear layers of the blocks of {base.name}")
    yield from found


def find_adapter_notes(folder: Path) -> list[str]:
    """Lines about what goes on in another way than `peft` trained a PEFT folder; none of another folder."""
    dropout = _read_config(folder).get("lora_dropout") if is_peft(folder) else None
    return [f"{folder} was trained with lora_dropout={dropout}: it goes on without dropout"] if dropout else []


def find_export_notes(model: ModelShape) -> list[str]:
    """Lines about an adapter that `peft` would open as another one; empty if it opens it as it is.

    transformers 5 fused the matrices of experts, and peft takes LoRA's targets of their names for these.
    """
    adapter, taken = model.adapter, [each for each in _name_targets(model) if _last(each) in _FUSED]
    if adapter is None or adapter.method != "lora" or model.experts is None or not taken:
        return []
    return [
        f"peft beside transformers 5 takes {', '.join(taken)} for matrices of experts, and drops what was trained: "
        f"convert with --merge, or train attention alone"
    ]


def list_adapter(model: ModelShape) -> Iterator[StoredWeight]:
    """Each weight of a model's adapter with its tensor in a PEFT folder, in the model's order."""
    for number in range(model.num_layers):
        block = BLOCKS.replace("*", str(number))
        for each in list_adapted(describe(model.kind_of(number))):
            on_disk = f"{_PREFIX}{block}.{_name_on_disk(model, each.module)}"
            for weight in each.weights[len(each.own_weights) :]:
                name = weight.name.removeprefix(f"{each.module}.")
                stored = StoredWeight(f"{block}.{weight.name}", weight.shape, (f"{on_disk}.{name}",), False, False)
                if isinstance(each, RescaledLinear):
                    stored = replace(stored, tensors=(f"{on_disk}.ia3_l",), unit_dim=int(each.scales == "output"))
                yield stored


def _name_on_disk(model: ModelShape, module: str) -> str:
    """Name of a block's module in `transformers`."""
    return find_family(model.family).stored_names.get(f"{module}.weight", f"{module}.weight").removesuffix(".weight")


def find_adapter_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Name → where the tensor is stored, of a PEFT folder; InvalidConfig if its file is missing or cannot be read."""
    file = find_inside(folder, ADAPTER_WEIGHTS)
    if not file.is_file():
        advice = "; save it as safetensors: model.save_pretrained(folder)" if any(folder.glob("*.bin")) else ""
        raise InvalidConfig(f"{folder} has no {ADAPTER_WEIGHTS}{advice}")
    return read_header(file)


def find_peft_problems(folder: Path, model: ModelShape) -> list[str]:
    """Everything that keeps a PEFT folder from being the model's adapter, one line each; empty if it is."""
    try:
        said, stored = read_adapter(folder), find_adapter_tensors(folder)
    except InvalidConfig as error:
        return list(error.problems)
    own = model.adapter
    if own is None:
        return [f"{folder} holds an adapter, and the model has none: write [adapter]"]
    names = ("method", "rank", "alpha", "rslora") if own.method == said.method == "lora" else ("method",)
    problems = [
        f"it has {name}={getattr(said, name)}, and adapter.{name} is {getattr(own, name)}; leave [adapter] out"
        for name in names if getattr(said, name) != getattr(own, name)
    ]  # fmt: skip
    if problems:
        return problems
    wanted = {weight.tensors[0]: weight.tensor_shape for weight in list_adapter(model)}
    problems = [f"{name} is missing, a target of the adapter" for name in wanted if name not in stored]
    problems += [f"{name} is in none of the adapter's targets" for name in sorted(stored.keys() - wanted.keys())]
    for name, shape in wanted.items():
        tensor = stored.get(name)
        if tensor and tensor.format not in FORMATS:
            problems.append(f"{name} has the format {tensor.format}; weights must be of {', '.join(FORMATS.values())}")
        elif tensor and tensor.shape != shape:
            problems.append(f"{name} has the shape {list(tensor.shape)}, where the adapter's is {list(shape)}")
    return name_first(problems)


def write_adapter_config(model: ModelShape, base: str | None) -> dict[str, Any]:
    """The adapter_config.json of a model's adapter; `base` is the folder of the frozen model, None if it has none."""
    adapter, targets = model.adapter, _name_targets(model)
    assert adapter is not None, "a model without one has no such file"
    common = {
        "base_model_name_or_path": base, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "modules_to_save": None, "revision": None, "target_modules": targets, "task_type": "CAUSAL_LM",
    }  # fmt: skip
    if adapter.method == "ia3":
        inputs = [each for each in targets if _last(each) in IA3_INPUTS]
        del common["bias"]
        return {**common, "peft_type": "IA3", "feedforward_modules": inputs, "init_ia3_weights": True}
    alpha = int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha
    return {
        **common, "peft_type": "LORA", "r": adapter.rank, "lora_alpha": alpha, "lora_dropout": 0.0,
        "use_rslora": adapter.rslora, "use_dora": False, "init_lora_weights": True,
    }  # fmt: skip


def _name_targets(model: ModelShape) -> list[str]:
    """Names that mean exactly the modules with an adapter: their last words, or more of them where experts or others
    share these."""
    adapted, others = dict[str, None](), set[str]()
    for kind, _ in model.kinds(range(model.num_layers)):
        for each in describe(kind).block:
            if isinstance(each, LowRankLinear | RescaledLinear):
                adapted[_name_on_disk(model, each.module)] = None
            elif isinstance(each, Linear):
                others.add(_last(each.module))
            elif isinstance(each, RoutedExperts):
                others |= {_last(weight.name.removesuffix(".weight")) for weight in each.weights}
    return list(dict.fromkeys(name if _last(name) in others else _last(name) for name in adapted))


def _last(name: str) -> str:
    return name.rpartition(".")[2]
