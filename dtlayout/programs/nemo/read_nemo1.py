"""NeMo 1, read: the YAML of megatron_gpt_pretraining.py and of its launcher, or a command that changes it.

Names that NeMo hands on to Megatron-Core are those of `core_fields`. What it calls otherwise, and where its defaults
differ from Megatron-LM's, is here; defaults are those of its models in 1.23 and 2.0.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import plural
from dtlayout.models.presets import PRESETS
from dtlayout.programs.command_line import read_options
from dtlayout.programs.files.hydra import find_file, read_overrides, split_words, start_of
from dtlayout.programs.megatron.core_fields import IGNORED as CORE_IGNORED
from dtlayout.programs.megatron.core_fields import NEUTRAL, OTHERWISE, below, list_fields
from dtlayout.programs.megatron.own_names import (
    Assumed,
    Naming,
    Options,
    Said,
    alike,
    change_as,
    choice,
    choose_value,
    find_own,
    flag,
    opposite,
    read_names,
    renamed,
    same,
    translate,
)
from dtlayout.programs.megatron.own_names import to_own as make_own
from dtlayout.programs.megatron.reader import IGNORED, count_gpus, read_job
from dtlayout.programs.megatron.write import MEGATRON
from dtlayout.programs.model_names import find_model
from dtlayout.programs.understood import OtherFile, Row, Understood

TITLE = "NeMo"
_SCRIPT = re.compile(r"(^|/)megatron_\w*(pretraining|training|finetuning|tuning)\w*\.py$")
"""A program of NeMo 1."""
_STAGE = "training."
"""Name before those of a launcher's whole config."""
_OPTIMIZERS: Mapping[str, tuple[str, bool]] = {
    "distributed_fused_adam": ("adam", True), "mcore_distributed_optim": ("adam", True), "fused_adam": ("adam", False),
    "megatron_fused_adam": ("adam", False), "adam": ("adam", False), "adamw": ("adam", False), "sgd": ("sgd", False),
}  # fmt: skip
"""Optimizer → Megatron-LM's name of it, and true if ranks share its state."""
_VOCABULARIES = {"GPT2BPETokenizer": 50257}
"""Tokenizer → rows of its vocabulary."""
_PRECISIONS: Mapping[Any, Options] = {
    **alike(("bf16", "bf16-mixed", "bf16-true"), {"--bf16": [], "--fp16": None}),
    **alike((16, "16-mixed", "16-true"), {"--bf16": None, "--fp16": []}),
    **alike((32, "32-true"), {"--bf16": None, "--fp16": None}),
}
_GATED = ("fast-swiglu", "swiglu", "geglu", "fast-geglu", "reglu", "fast-reglu")
_PLAIN = ("gelu", "openai-gelu", "approx-gelu", "squared-relu", "relu")
_SHARDING = {"full": "optim_grads_params", "grad": "optim_grads"}
"""model.fsdp_sharding_strategy → --data-parallel-sharding-strategy."""
_FIELDS_HERE = (
    "normalization", "recompute_granularity", "recompute_method", "recompute_num_layers", "fp8", "gated_linear_unit",
    "add_bias_linear", "tp_comm_overlap",
)  # fmt: skip
"""Fields of Megatron-Core that NeMo has under names of its own."""
_IGNORED: Mapping[str, str] = {
    "how it is started": r"name|run\..*|hydra\..*|defaults(\..*)?|cluster_type|restore_from_path|exp_manager\..*"
    r"|model\.(mcore_customization_config\..*|restore_from_path|resume_from_checkpoint|name|target|nemo_version)",
    "the length of the run, and logs": r"trainer\.(?!devices|num_nodes|precision|gradient_clip_val|accumulate_.*).*"
    r"|model\.(nsys_profile|memory_profile)\..*|model\.(gc_interval|gc_.*|apex_transformer_log_level|log_.*)",
    "data": r"model\.(data|tokenizer)(\..*)?",
    "checkpoints": r"model\.(dist_ckpt_.*|save_.*|from_pretrained|migrate_.*|override_.*_ckpt)",
    "the course of the learning rate": r"model\.optim\.(sched\..*|lr_.*)",
    "buckets of the optimizer": r"model\.optim\.(bucket_cap_mb|contiguous_.*|.*bucket.*|fused|adam_w_mode|foreach"
    r"|.*_param_remainders|average_in_collective|check_for_nan_in_grad)",
    **below(r"model\.", CORE_IGNORED),
}
_OTHERWISE = (
    rf"model\.({OTHERWISE}|grad_div_ar_fusion|grad_allreduce_chunk_size_mb|bias_dropout_add_fusion|masked_softmax_fusion"
    r"|reduce_amax|sync_batch_comm|gradient_as_bucket_view|fp8_params|sharp|nccl_communicator_config_path|overlap_.*_chunk"
    r"|ub_tp_comm_overlap_cfg(\..*)?|ub_tp_comm_bootstrap_backend|get_attention_mask_from_fusion|use_emha|fsdp_.*"
    r"|do_layer_norm_weight_decay|tp_comm_.*|(native_amp|hysteresis)_?.*|use_scaled_init_method|rotary_percentage"
    r"|pre_process|post_process|onnx_safe|enable_megatron_timers|megatron_timer_kwargs\..*|scale_loss.*)"
)
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    **{f"model.{name}": values for name, values in NEUTRAL.items()}, "model.headscale": (False,),
    "model.transformer_block_type": ("pre_ln",), "model.attention_type": ("multihead",),
    "model.normalize_attention_scores": (True,), "model.openai_gelu": (False, True), "model.mcore_gpt": (True,),
    "model.peft.peft_scheme": (None, "none", "null"), "trainer.accumulate_grad_batches": (1,),
    "model.num_micro_batches_with_partial_activation_checkpoints": (None,), "model.cpu_offloading_num_layers": (0,),
    "model.activations_checkpoint_layers_per_pipeline": (None,), "model.embedding_scale": (None,),
}  # fmt: skip


_OPTIM = "model.optim.name"


def is_ours(file: OtherFile) -> bool:
    """True for YAML with NeMo's tables trainer and model, and for a command that starts one of its programs."""
    if file.tree is None:
        return any(_SCRIPT.search(word.strip("'\"\\")) for word in file.text.split())
    names = _inside(file.tree.values)
    is_hydra = any(name in names for name in ("trainer.num_nodes", "trainer.devices", "trainer.precision"))
    has_batch = "model.micro_batch_size" in names or "model.tensor_model_parallel_size" in names
    return file.tree.language == "yaml" and is_hydra and has_batch and "model._target_" not in names


def read(file: OtherFile) -> Understood:
    """The job of such a file or command; what is not understood is in its `problems`, or an InvalidConfig."""
    found = Understood(MEGATRON.engine, TITLE)
    values = file.tree.values if file.tree is not None else _read_command(file, found)
    values = _inside(values)
    count_trainer_gpus(values, found, file.num_gpus)
    rules = list_rules(file.path.parent)
    said = translate(rules, values, found.problems)
    _check(values, found)
    has_model = "--hidden-size" in said.options
    read_job(found, said.options, said, has_model=has_model)
    if not has_model:
        checkpoint = "model.restore_from_path"
        shown = said.show(checkpoint) if checkpoint in values else ""
        found.ignore(shown, "the sizes of the model are in its checkpoint: --model M says them", "assumed")
    _note_apart(said, found)
    read_names(found, said, _IGNORED, _OTHERWISE, _NEUTRAL)
    if file.tree is not None:
        stage = "" if values is file.tree.values else _STAGE

        def find(options: Options) -> tuple[dict[str, Any], list[str]]:
            own, lost = find_own(rules, options, values, IGNORED.values())
            if len(options) > 1 and own.get(_OPTIM, values.get(_OPTIM)) is None:
                lost = [*lost, f"without {_OPTIM} it takes another optimizer"]
            return {f"{stage}{name}": value for name, value in own.items()}, lost

        change_as(found, file.tree.values, find)
    return found


def to_own(options: Options, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Dotted name → value of NeMo's YAML that says options of Megatron-LM; None takes one out.

    It is the inverse of what `read` makes of such names. `values` are those of the file. InvalidConfig for what NeMo
    has no name for.
    """
    return make_own(list_rules(Path()), options, values or {}, IGNORED.values())


def list_rules(folder: Path) -> list[Naming]:
    """Rules of NeMo's names; `folder` may hold models that its tokenizer names."""
    plain: Options = {"--swiglu": None}
    activations = {**alike(_GATED, {"--swiglu": []}), **alike(_PLAIN, plain)}
    norms = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "layernorm1p": "LayerNorm"}
    reduced: Mapping[Any, Options] = {
        **alike(("bf16", "bfloat16", "torch.bfloat16"), {"--grad-reduce-in-bf16": []}),
        **alike(("fp32", 32, "float32", "torch.float32"), {"--grad-reduce-in-bf16": None}),
    }
    return [
        choice("trainer.precision", _PRECISIONS), choice("model.precision", _PRECISIONS),
        same("trainer.gradient_clip_val", "--clip-grad"),
        same("model.micro_batch_size", "--micro-batch-size"), same("model.global_batch_size", "--global-batch-size"),
        same("model.rampup_batch_size", "--rampup-batch-size"),
        same("model.encoder_seq_length", "--seq-length"), same("model.data.seq_length", "--seq-length"),
        same("model.data.train_ds.max_seq_length", "--seq-length"),
        *list_fields(lambda field: f"model.{field}", _FIELDS_HERE),
        choice("model.activation", activations, default="gelu"), flag("model.gated_linear_unit", "--swiglu"),
        renamed("model.normalization", "--normalization", norms, default="layernorm"),
        opposite("model.bias", "--disable-bias-linear"), opposite("model.add_bias_linear", "--disable-bias-linear"),
        flag("model.qkv_bias", "--add-qkv-bias"), flag("model.scale_positional_embedding", "--use-rope-scaling"),
        same("model.activations_checkpoint_granularity", "--recompute-granularity"),
        same("model.activations_checkpoint_method", "--recompute-method"), _name_blocks(),
        _name_tp_overlap(), flag("model.use_flash_attention", "--use-flash-attn"), _name_fp8(),
        *_list_optimizer(), choice("model.optim.grad_sync_dtype", reduced),
        choice("model.fsdp_grad_reduce_dtype", reduced), _name_fsdp(), *_list_vocabulary(folder),
    ]  # fmt: skip


# Names that say several things, or one together


def _name_blocks() -> Naming:
    name, option = "model.activations_checkpoint_num_layers", "--recompute-num-layers"
    plain = same(name, option)

    def to(values: Mapping[str, Any]) -> Options:
        return {} if str(values[name]) == "0" else plain.to(values)

    def idle(values: Mapping[str, Any]) -> Mapping[str, str]:
        return {name: "none is said"} if str(values.get(name)) == "0" else {}

    return plain._replace(to=to, idle=idle)


def _name_tp_overlap() -> Naming:
    name, by_sequence, option = "model.ub_tp_comm_overlap", "model.sequence_parallel", "--tp-comm-overlap"
    plain = flag(name, option)

    def has_effect(values: Mapping[str, Any]) -> bool:
        return str(values.get(by_sequence)).lower() == "true" or str(values.get(name)).lower() != "true"

    def to(values: Mapping[str, Any]) -> Options:
        return plain.to(values) if name in values and has_effect(values) else {}

    def idle(values: Mapping[str, Any]) -> Mapping[str, str]:
        return {} if has_effect(values) else {name: f"without {by_sequence}"}

    return Naming((name, by_sequence), (option,), to, plain.back, idle=idle, shown=(name,))


def _name_fp8() -> Naming:
    on, first, hybrid, engine = (f"model.{name}" for name in ("fp8", "fp8_e4m3", "fp8_hybrid", "transformer_engine"))
    option = "--fp8-format"

    def is_on(values: Mapping[str, Any], name: str) -> bool:
        return name in values and bool(choose_value(name, values[name], (True, False), is_truth=True))

    def to(values: Mapping[str, Any]) -> Options:
        if str(values.get(on)) in ("e4m3", "hybrid"):  # Megatron-Core's own word, in newer files
            return {option: [values[on]]}
        if not is_on(values, on) or not is_on(values, engine):
            return {option: None} if on in values else {}
        if not is_on(values, first) and not is_on(values, hybrid):
            raise InvalidConfig(f"{on}=true without {first} or {hybrid} is no format")
        return {option: ["e4m3" if is_on(values, first) else "hybrid"]}

    def idle(values: Mapping[str, Any]) -> Mapping[str, str]:
        if is_on(values, on) and not is_on(values, engine):
            return {name: f"without {engine}" for name in (on, first, hybrid) if name in values}
        if not is_on(values, on):
            return {name: f"without {on}" for name in (first, hybrid) if name in values}
        return {hybrid: f"{first} says it"} if is_on(values, first) and hybrid in values else {}

    def idle_or_none(values: Mapping[str, Any]) -> Mapping[str, str]:
        try:
            return idle(values) if str(values.get(on)) not in ("e4m3", "hybrid") else {}
        except InvalidConfig:
            return {}

    def back(options: Options) -> Mapping[str, Any]:
        words = options[option]
        if words is None:
            return {on: False}
        return {on: True, first: words[0] == "e4m3", hybrid: words[0] != "e4m3", engine: True}

    return Naming((on, first, hybrid, engine), (option,), to, back, idle=idle_or_none, shown=(on, first, hybrid))


def _list_optimizer() -> list[Naming]:
    name, reduces, gathers, copies = (
        f"model.optim.{key}"
        for key in ("name", "overlap_grad_sync", "overlap_param_sync", "num_distributed_optimizer_instances")
    )
    kind, sharded, fsdp = "--optimizer", "--use-distributed-optimizer", "--use-megatron-fsdp"
    copies_option = "--num-distributed-optimizer-instances"

    def to(values: Mapping[str, Any]) -> Options:
        ours, shares = _OPTIMIZERS[choose_value(name, values[name], _OPTIMIZERS)]
        return {kind: [ours], sharded: [] if shares else None}

    def back(options: Options) -> Mapping[str, Any]:
        words, several = options.get(kind) or ["adam"], options.get(copies_option) is not None
        if several and options.get(fsdp) is not None:
            raise InvalidConfig("model.fsdp has no name for copies of what its ranks share")
        shares = options.get(sharded) is not None and options.get(fsdp) is None
        if not (shares or several):
            return {name: {"adam": "fused_adam"}.get(words[0], words[0])}
        if words[0] != "adam":
            raise InvalidConfig(f"{name} has no value of {words[0]} whose state ranks share")
        return {name: "mcore_distributed_optim" if several else "distributed_fused_adam"}

    def overlap(own: str, option: str) -> Naming:
        plain = flag(own, option)

        def to_overlap(values: Mapping[str, Any]) -> Options:
            if own in values:
                return plain.to(values)
            by_default = own == reduces and values.get(name) == "distributed_fused_adam"
            return {option: Assumed([], f"the default of {values[name]}")} if by_default else {}

        return Naming((own, name), (option,), to_overlap, plain.back, shown=(own,))

    betas = "model.optim.betas"

    def to_betas(values: Mapping[str, Any]) -> Options:
        if not isinstance(values[betas], list) or len(values[betas]) != 2:
            raise InvalidConfig(f"{betas}={values[betas]} is no list of two numbers")
        return {
            option: [str(value)] for option, value in zip(("--adam-beta1", "--adam-beta2"), values[betas], strict=True)
        }

    def back_betas(options: Options) -> Mapping[str, Any]:
        words = [options.get("--adam-beta1"), options.get("--adam-beta2")]
        if not all(words):
            return {betas: None}
        return {betas: [float(each[0]) for each in words if each]}

    return [
        Naming((name,), (kind, sharded), to, back, default="fused_adam", asks=(fsdp, copies_option)),
        same("model.optim.lr", "--lr"), same("model.optim.weight_decay", "--weight-decay"),
        same("model.optim.eps", "--adam-eps"), same("model.optim.momentum", "--sgd-momentum"),
        Naming((betas,), ("--adam-beta1", "--adam-beta2"), to_betas, back_betas),
        overlap(reduces, "--overlap-grad-reduce"), overlap(gathers, "--overlap-param-gather"),
        same(copies, copies_option),
    ]  # fmt: skip


def _name_fsdp() -> Naming:
    on, how = "model.fsdp", "model.fsdp_sharding_strategy"
    option, strategy = "--use-megatron-fsdp", "--data-parallel-sharding-strategy"

    def to(values: Mapping[str, Any]) -> Options:
        if not choose_value(on, values.get(on, False), (True, False), is_truth=True):
            return {option: None}
        word = _SHARDING[choose_value(how, values.get(how, "full"), _SHARDING)]
        return {option: Assumed([], "PyTorch's FSDP, predicted as Megatron's own"), strategy: [word]}

    def idle(values: Mapping[str, Any]) -> Mapping[str, str]:
        return {how: f"without {on}"} if str(values.get(on)).lower() != "true" and how in values else {}

    def back(options: Options) -> Mapping[str, Any]:
        found: dict[str, Any] = {on: options[option] is not None} if option in options else {}
        if found.get(on) and options.get("--fp8-format") is not None:
            raise InvalidConfig(f"{on} has no fp8")
        words = options.get(strategy)
        theirs = {word: name for name, word in _SHARDING.items()}
        if words and words[0] not in theirs:
            raise InvalidConfig(f"{how} has no value that says {words[0]}")
        return found | ({how: theirs[words[0]] if words else None} if strategy in options else {})

    homes = {strategy: how}
    return Naming((on, how), (option, strategy), to, back, idle=idle, homes=homes, asks=("--fp8-format",))


def _list_vocabulary(folder: Path) -> list[Naming]:
    own, kind, model = "model.override_vocab_size", "model.tokenizer.type", "model.tokenizer.model"
    padded, size = "--padded-vocab-size", "--vocab-size"

    def to(values: Mapping[str, Any]) -> Options:
        return {padded: [str(values[own])]}

    def back(options: Options) -> Mapping[str, Any]:
        words = options.get(padded) or options.get(size)
        return {own: int(words[0]) if words else None}

    def guess(values: Mapping[str, Any]) -> Options:
        if own in values:
            return {}
        for name in (str(values[each]) for each in (kind, model) if each in values):
            preset = find_model(name, folder) if "/" in name else None
            rows = PRESETS[preset["name"]].vocab_size if preset and preset["name"] in PRESETS else None
            if rows := rows or _VOCABULARIES.get(name):
                return {size: Assumed([str(rows)], f"that of {name}")}
        return {}

    return [
        Naming((own,), (padded, size), to, back),
        Naming((kind, model, own), (size,), guess, lambda options: {}, passes=True, shown=(kind, model)),
    ]


# What a file says beside its options


def _inside(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Values of a launcher's whole config without the name of its stage."""
    if any(name.startswith(f"{_STAGE}model.") for name in values):
        return {name.removeprefix(_STAGE): value for name, value in values.items()}
    return values


def count_trainer_gpus(values: Mapping[str, Any], found: Understood, num_gpus: int) -> None:
    """Note the GPUs that Lightning's trainer starts."""
    names = ("trainer.devices", "trainer.num_nodes")
    devices, nodes = (values.get(name) for name in names)
    devices = len(devices) if isinstance(devices, list) else devices
    ranks = {"--nproc_per_node": str(devices), "--nnodes": str(1 if nodes is None else nodes)}
    count_gpus(found, ranks if str(devices).isdigit() else {}, num_gpus)
    said = [name for name in names if values.get(name) is not None]
    if said:
        text = ", ".join(f"{name} = {values[name]}" for name in said)
        ours = plural(found.num_gpus, "GPU") if found.num_gpus else ""
        found.rows.append(Row(text, ours, "read" if ours else "ignored", "" if ours else "GPUs are not said by it"))


def _check(values: Mapping[str, Any], found: Understood) -> None:
    """Problems where two names of a file contradict each other."""
    name, other = "model.encoder_seq_length", "model.data.seq_length"
    if name in values and values.get(other) is not None and str(values[name]) != str(values[other]):
        found.problems.append(f"{name}={values[name]} and {other}={values[other]} contradict each other")
    if str(values.get("model.fsdp")).lower() == "true" and str(values.get("model.fp8") or "false").lower() != "false":
        found.problems.append("model.fsdp and model.fp8 contradict each other: PyTorch's FSDP has no fp8 here")


def _note_apart(said: Said, found: Understood) -> None:
    """Note what is predicted otherwise than it is said: weights in fp32, blocks without Transformer Engine, shapes."""
    for name, expected, default, note in (
        ("model.megatron_amp_O2", "true", "false", "weights in fp32 under autocast, predicted as in half precision"),
        ("model.transformer_engine", "true", "false", "predicted as with Transformer Engine"),
        ("model.mcore_gpt", "true", "true", "predicted as Megatron-Core's model"),
    ):
        value = str(said.values.get(name, default)).lower()
        if value == expected and name in said.values:
            found.ignore(said.show(name), "as predicted", "read")
        elif value != expected:
            found.ignore(said.show(name) if name in said.values else name, note, "assumed")


# Commands


def _read_command(file: OtherFile, found: Understood) -> Mapping[str, Any]:
    """Values of the YAML that a command names, with the changes behind it."""
    command = start_of(file, _SCRIPT)
    _, own = split_words(command, _SCRIPT)
    changes = read_overrides(own, found)
    return {**find_file(read_options([word for word in own if word.startswith("-")], found), file, found), **changes}
