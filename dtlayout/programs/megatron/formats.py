"""Megatron-LM's options about formats of numbers, attention, the optimizer and what overlaps, read."""

from collections.abc import Mapping

from dtlayout.programs.megatron.options import MegatronOptions
from dtlayout.programs.megatron.write import ATTENTION, MATMULS
from dtlayout.programs.options import real, string

_UNFUSED = dict.fromkeys(("unfused", "local"), "megatron-softmax")
"""--attention-backend → our kernel, which keeps scores."""
_OPTIMIZER: Mapping[str, str] = {
    "--lr": "lr", "--weight-decay": "weight_decay", "--clip-grad": "max_norm", "--adam-beta1": "beta1",
    "--adam-beta2": "beta2", "--adam-eps": "eps", "--sgd-momentum": "momentum",
}  # fmt: skip
"""Option → key of the optimizer."""
_OWNERS: Mapping[str, str] = {"beta1": "adamw", "beta2": "adamw", "eps": "adamw", "momentum": "sgd"}
"""Key → the one optimizer that has it."""

_AWARE = "--use-precision-aware-optimizer"
_STATE = ("--exp-avg-dtype", "--exp-avg-sq-dtype")
"""Options with formats of the state of Adam, which it has under `_AWARE`."""
_MAIN = ("--main-grads-dtype", "--main-params-dtype")
"""Options with formats of what it updates, which are float32 here."""


def read_formats(reader: MegatronOptions) -> None:
    """Note the formats of numbers and the kernel of attention."""
    for name, compute in (("--fp16", "float16"), ("--bf16", "bfloat16")):
        if reader.has(name):
            reader.note("precision", {"compute": compute}, name)
            break
    else:
        note = f"neither {reader.call('--bf16')} nor {reader.call('--fp16')}"
        note = note if reader.call("--bf16") != reader.call("--fp16") else f"no {reader.call('--bf16')}"
        reader.note_absent("precision", {"compute": "float32"}, "--bf16", note)
    _read_matmuls(reader)
    _read_attention(reader)


def _read_attention(reader: MegatronOptions) -> None:
    """Note the kernel of attention, also of blocks without Transformer Engine."""
    backend, name, impl = reader.value("--attention-backend", string), "--attention-backend", "--transformer-impl"
    if reader.has("--use-flash-attn"):
        backend = backend or "flash"
    is_plain = reader.is_there(impl) and reader.value(impl, string) == "local"
    known = {theirs: ours for ours, theirs in reversed(ATTENTION.items())} | _UNFUSED
    if is_plain and not reader.is_there("--use-flash-attn"):
        reader.note("kernels", {"attention": _UNFUSED["local"]}, impl)
        if reader.is_there(name):
            reader.found.ignore(reader.show(name), f"with {reader.show(impl)}", "no effect")
    elif backend in known:
        reader.note("kernels", {"attention": known[backend]}, name, "--use-flash-attn")
    elif backend and backend != "auto":
        reader.found.problems.append(f"{reader.call(name)} {backend} is nothing that is known here")


def _read_matmuls(reader: MegatronOptions) -> None:
    found = reader.found
    recipe, is_fp8 = reader.value("--fp8-recipe", string), reader.value("--fp8-format", string)
    four = reader.value("--fp4-format", string)
    reader.value("--fp4-recipe", string)
    if is_fp8:
        names = {words[3]: ours for ours, words in MATMULS.items()} | {"delayed": "fp8-tensorwise"}
        ours = names.get(recipe or "delayed")
        if ours is None:
            what = f"{reader.call('--fp8-recipe')} {recipe}"
            found.problems.append(f"{what} is nothing that is known here; use {' or '.join(names)}")
        else:
            reader.note("precision", {"matmuls": ours}, "--fp8-format", "--fp8-recipe")
    elif recipe:
        found.ignore(reader.show("--fp8-recipe"), f"without {reader.call('--fp8-format')}", "no effect")
    if four:
        reader.note("precision", {"matmuls": "nvfp4"}, "--fp4-format", "--fp4-recipe")


def read_optimizer(reader: MegatronOptions) -> None:
    """Note the optimizer."""
    name = reader.value("--optimizer", string) or "adam"
    ours = {"adam": "adamw", "sgd": "sgd", "muon": "muon"}.get(name)
    if ours is None:
        reader.found.problems.append(
            f"{reader.call('--optimizer')} {name} is nothing that is known here; use adam or sgd"
        )
        return
    if reader.is_there("--optimizer"):
        reader.note("optimizer", {"name": ours}, "--optimizer")
    else:
        reader.assume("optimizer", {"name": ours}, "", f"its default of {reader.call('--optimizer')}, {name}")
    for option, key in _OPTIMIZER.items():
        if _OWNERS.get(key, ours) == ours:
            reader.put("optimizer", key, option, real)
        elif reader.has(option):
            reader.found.ignore(reader.show(option), f"with {reader.show_all('--optimizer')}", "no effect")
    _read_state(reader, ours)


def _read_state(reader: MegatronOptions, optimizer: str) -> None:
    """Note the formats of the optimizer's state."""
    found, is_aware = reader.found, reader.has(_AWARE)
    formats = {name: reader.value(name, string) or "fp32" for name in (*_STATE, *_MAIN)}
    coarse = [name for name, word in formats.items() if word != "fp32"]
    if coarse and not is_aware:
        what = ", ".join(f"{reader.call(name)} {formats[name]}" for name in coarse)
        found.problems.append(f"{what} needs {reader.call(_AWARE)}")
    elif coarse and optimizer != "adamw":
        found.ignore(reader.show_all(*coarse), f"with {reader.show_all('--optimizer')}", "no effect")
    elif all(formats[name] == "bf16" for name in _STATE):
        reader.note("optimizer", {"state_format": "bfloat16"}, _AWARE, *_STATE)
    elif any(name in _STATE for name in coarse):
        what = ", ".join(f"{reader.call(name)} {formats[name]}" for name in _STATE)
        found.problems.append(f"{what} is not predicted; fp32 or bf16 for both is")
    main = [name for name in coarse if name in _MAIN]
    if main and is_aware and optimizer == "adamw":
        found.ignore(reader.show_all(*main), "predicted as fp32", "assumed")


def read_engine(reader: MegatronOptions) -> None:
    """Note settings of the engine: what overlaps, graphs, the format of gradients."""
    found = reader.found
    overlaps = reader.has("--overlap-grad-reduce")
    reader.has("--overlap-param-gather")
    found.told["overlap_dp"] = "true" if overlaps else "false"
    note = "" if overlaps or reader.is_denied("--overlap-grad-reduce") else f"no {reader.call('--overlap-grad-reduce')}"
    reader.note_row(f"engine overlap_dp={found.told['overlap_dp']}", "--overlap-grad-reduce", otherwise=note)
    if reader.has("--no-overlap-p2p-communication"):
        found.told["overlap_pp"] = "false"
        reader.note_row("engine overlap_pp=false", "--no-overlap-p2p-communication")
    comm, sends_bf16 = "--megatron-fsdp-grad-comm-dtype", reader.has("--grad-reduce-in-bf16")
    if sends_bf16 or (reader.has(comm) and reader.options[comm] == ["bf16"]):
        reader.note("precision", {"reduce": "bfloat16"}, "--grad-reduce-in-bf16" if sends_bf16 else comm)
    _read_graphs(reader)
    _read_loss(reader)


def _read_loss(reader: MegatronOptions) -> None:
    """Note a loss of Transformer Engine; other fused ones are predicted as none."""
    option = "--cross-entropy-fusion-impl"
    if reader.options.get(option) == ["te"] and reader.has("--cross-entropy-loss-fusion"):
        reader.has(option)
        reader.found.told["fused_loss"] = "always"
        reader.note_row("engine fused_loss=always", "--cross-entropy-loss-fusion", option)


def _read_graphs(reader: MegatronOptions) -> None:
    found, older = reader.found, {"--enable-cuda-graph": "local", "--external-cuda-graph": "transformer_engine"}
    for name, word in older.items():
        if reader.has(name):
            graphs = "full" if word == "local" else "attention"
            found.told["cuda_graphs"] = graphs
            reader.note_row(f"engine cuda_graphs={graphs}", name)
    impl, scope_option = reader.value("--cuda-graph-impl", string), "--cuda-graph-scope"
    scope = next(iter(reader.options[scope_option]), None) if reader.has(scope_option) else None
    if impl and impl != "none":
        graphs = "full" if scope == "full_iteration" or (impl == "local" and scope is None) else "attention"
        found.told["cuda_graphs"] = graphs
        reader.note_row(f"engine cuda_graphs={graphs}", "--cuda-graph-impl", scope_option)
