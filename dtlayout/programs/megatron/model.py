"""Megatron-LM's options about the model, read: sizes, norms, positions, experts."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from dtlayout.programs.megatron.options import MegatronOptions
from dtlayout.programs.options import positive, real, string, whole

_SIZES: Mapping[str, str] = {
    "--num-layers": "num_layers", "--hidden-size": "hidden_size", "--ffn-hidden-size": "ffn_size",
    "--num-attention-heads": "num_heads", "--vocab-size": "vocab_size", "--padded-vocab-size": "vocab_size",
}  # fmt: skip
"""Option → size of the model."""
_EXPERTS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "--num-experts": ("number", whole), "--moe-router-topk": ("per_token", whole),
    "--moe-ffn-hidden-size": ("ffn_size", whole),
    "--moe-shared-expert-intermediate-size": ("shared_ffn_size", whole),
    "--moe-router-score-function": ("score", string), "--moe-router-num-groups": ("groups", whole),
    "--moe-router-group-topk": ("groups_per_token", whole), "--moe-router-topk-scaling-factor": ("scale", real),
    "--moe-router-bias-update-rate": ("bias_rate", real), "--moe-z-loss-coeff": ("z_loss", real),
    "--moe-aux-loss-coeff": ("balance_loss", real),
}  # fmt: skip
"""Option → key of a mixture of experts, and the function that reads its value."""
_LATENT: Mapping[str, tuple[str, int]] = {
    "--q-lora-rank": ("query_rank", 0), "--kv-lora-rank": ("kv_rank", 32),
    "--qk-pos-emb-head-dim": ("rope_width", 64), "--v-head-dim": ("value_width", 128),
}  # fmt: skip
"""Option → key of latent attention, and its default."""
_HEAD = ("--qk-head-dim", 128)
"""Option of a latent head's part that is not rotated, and its default."""
_ONLY_EXPERTS = (
    *_EXPERTS, "--moe-layer-freq", "--moe-router-load-balancing-type", "--moe-token-dispatcher-type",
    "--moe-router-enable-expert-bias", "--moe-router-pre-softmax", "--expert-tensor-parallel-size",
)  # fmt: skip
"""Options without effect where there are no experts."""


def read_model(reader: MegatronOptions) -> None:
    """Note the model, in as far as the options say it."""
    found = reader.found
    reader.assume("model", {"name": "megatron", "family": "llama"}, "", "blocks are those of a Llama, but as below")
    for name, key in _SIZES.items():
        reader.put("model", key, name, positive)
    hidden, heads = found.get("model", "hidden_size"), found.get("model", "num_heads")
    if hidden and not found.get("model", "ffn_size"):
        gated = reader.is_there("--swiglu")  # not with another gate
        size = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
        what = reader.call("--ffn-hidden-size")
        reader.assume("model", {"ffn_size": size}, what, "its default, from the hidden size")
    if reader.has("--multi-latent-attention"):
        _read_latent(reader, heads)
    else:
        _read_heads(reader, hidden, heads)
    _pad_vocabulary(reader)
    gates = [name for name in ("--swiglu", "--quick-geglu") if reader.has(name)]
    if gates:
        reader.note("model", {"gated_ffn": True}, *gates)
    else:
        note = f"no {reader.call('--swiglu')}: an activation without a gate"
        reader.note_absent("model", {"gated_ffn": False}, "--swiglu", note)
    _read_norms(reader)
    untied = "--untie-embeddings-and-output-weights"
    if reader.has(untied):
        reader.note("model", {"tied_embeddings": False}, untied)
    else:
        reader.note_absent("model", {"tied_embeddings": True}, untied, "its default")
    _read_positions(reader)
    _read_implementation(reader)


def _read_implementation(reader: MegatronOptions) -> None:
    name = "--transformer-impl"
    impl = reader.value(name, string)
    if impl == "transformer_engine":
        reader.found.ignore(reader.show(name), "as predicted", "read")
    elif impl == "local":
        note = "norms and matmuls are predicted as with Transformer Engine"
        reader.found.ignore(reader.show(name), note, "assumed")
    elif impl:
        known = "transformer_engine and local are"
        reader.found.problems.append(f"{reader.call(name)} is not understood here as {impl}; {known}")


def _read_latent(reader: MegatronOptions, heads: Any) -> None:
    """Note attention whose keys and values come out of narrow vectors."""
    latent = {key: reader.value(name, positive) or default for name, (key, default) in _LATENT.items()}
    name, default = _HEAD
    width = (reader.value(name, positive) or default) + latent["rope_width"]
    values = {"latent_attention": latent, "head_dim": width, "num_kv_heads": heads, "family": "deepseek_v2"}
    reader.note("model", values, "--multi-latent-attention", *_LATENT, name)
    for name in ("--group-query-attention", "--num-query-groups", "--kv-channels"):
        if reader.has(name):
            reader.found.ignore(reader.show(name), f"with {reader.call('--multi-latent-attention')}", "no effect")


def _read_heads(reader: MegatronOptions, hidden: Any, heads: Any) -> None:
    found, grouping, number = reader.found, "--group-query-attention", "--num-query-groups"
    groups, grouped = reader.value(number, positive), reader.has(grouping)
    if grouped and groups:
        reader.note("model", {"num_kv_heads": groups}, number)
    elif grouped:
        note = f"its default of {reader.call(number)}"
        reader.assume("model", {"num_kv_heads": 1}, reader.show(grouping), note)
    elif heads:
        reader.note_absent("model", {"num_kv_heads": heads}, grouping)
        if groups:
            found.ignore(reader.show(number), f"without {reader.call(grouping)}", "no effect")
    for name in (*_LATENT, _HEAD[0]):
        if reader.has(name):
            found.ignore(reader.show(name), f"without {reader.call('--multi-latent-attention')}", "no effect")
    width = reader.value("--kv-channels", positive)
    if width and hidden and heads and width * heads != hidden:
        reader.note("model", {"head_dim": width}, "--kv-channels")
    elif width:
        found.ignore(reader.show("--kv-channels"), "it is hidden size / heads")


def _pad_vocabulary(reader: MegatronOptions) -> None:
    """Rows are added up to a multiple of tp and of a number, unless the file says them padded."""
    step = (reader.value("--make-vocab-size-divisible-by", positive) or 128) * (
        reader.value("--tensor-model-parallel-size", positive) or 1
    )
    size = reader.found.get("model", "vocab_size")
    if size and size % step and not reader.is_there("--padded-vocab-size"):
        padded, shown = -(-size // step) * step, reader.show("--vocab-size")
        reader.assume("model", {"vocab_size": padded}, shown, f"padded to a multiple of {step}")


def _read_norms(reader: MegatronOptions) -> None:
    found = reader.found
    norm = reader.value("--normalization", string) or "LayerNorm"
    if norm != "RMSNorm":
        what = reader.show_all("--normalization") or f"{reader.call('--normalization')} {norm}"
        found.ignore(what, "a norm's time and memory are those of an RMSNorm here")
    reader.put("model", "norm_eps", "--norm-epsilon", real)
    _read_scaling(reader)
    if reader.has("--disable-bias-linear"):
        found.ignore(reader.show("--disable-bias-linear"), "our blocks have no biases either")
    else:
        note = "biases of linear layers, its default, are left out: a thousandth of the parameters"
        found.ignore(reader.show_all("--disable-bias-linear"), note)
    if reader.has("--add-qkv-bias"):
        reader.note("model", {"family": "qwen2", "qkv_bias": True}, "--add-qkv-bias")
    if reader.has("--qk-layernorm") and found.get("model", "latent_attention"):
        found.ignore(reader.show("--qk-layernorm"), "norms of its narrow vectors, which are predicted")
    elif reader.has("--qk-layernorm"):
        reader.note("model", {"family": "qwen3", "qk_norm": True}, "--qk-layernorm")


def _read_scaling(reader: MegatronOptions) -> None:
    if reader.has("--use-rope-scaling"):
        factor = reader.value("--rope-scaling-factor", real) or 8.0
        scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}
        reader.note("model", {"rope_scaling": scaling}, "--use-rope-scaling")


def _read_positions(reader: MegatronOptions) -> None:
    base, name = reader.value("--rotary-base", real), "--position-embedding-type"
    if base:
        reader.note("model", {"rope_theta": base}, "--rotary-base")
    kind = reader.value(name, string)
    if kind is None:
        kind = "rope" if reader.has("--use-rotary-position-embeddings") else "learned_absolute"
    if kind != "rope":
        note = f"positions of {kind} cost a token less than rotary ones, and no matmul"
        reader.found.ignore(reader.show_all(name) or f"{reader.call(name)} {kind}", note)


def read_experts(reader: MegatronOptions) -> None:
    """Note the experts, and what tp and the dispatcher do with them."""
    if not reader.has("--num-experts"):
        for name in _ONLY_EXPERTS:
            if reader.has(name):
                reader.found.ignore(reader.show(name), f"without {reader.call('--num-experts')}", "no effect")
        return
    found, experts = reader.found, dict[str, Any]()
    for name, (key, kind) in _EXPERTS.items():
        if (value := reader.value(name, kind)) is not None:
            experts[key] = value
            reader.note_row(f"model.experts.{key}={value}", name)
    experts.setdefault("per_token", 2)
    experts.setdefault("ffn_size", found.get("model", "ffn_size"))
    _read_dense(reader, experts)
    for name, key, value in (
        ("--moe-router-enable-expert-bias", "correction_bias", True),
        ("--moe-router-pre-softmax", "normalized", False),
    ):
        if key == "normalized" and experts.get("score") == "sigmoid" and reader.has(name):
            reader.found.ignore(reader.show(name), "with sigmoid scores", "no effect")
        elif reader.has(name):
            experts[key] = value
            reader.note_row(f"model.experts.{key}={str(value).lower()}", name)
    reader.value("--moe-router-load-balancing-type", string)
    tp, name = reader.value("--tensor-model-parallel-size", positive) or 1, "--expert-tensor-parallel-size"
    if (cut := reader.value(name, positive) or tp) > 1:
        found.problems.append(f"experts are cut by {cut} ranks of tp, which is not predicted; {reader.call(name)} 1 is")
    dispatcher = "--moe-token-dispatcher-type"
    if (limit := reader.value(dispatcher, string)) in (None, "allgather"):
        note = "its default is allgather" if limit is None else "predicted as alltoall"
        what = reader.show_all(dispatcher) or reader.call(dispatcher)
        reader.assume("layout", {"ep_dispatcher": "alltoall"}, what, note)
    family = "qwen3_moe" if found.get("model", "qk_norm") else "mixtral"
    if found.get("model", "latent_attention"):
        family = "deepseek_v3" if experts.get("score") == "sigmoid" else "deepseek_v2"
    found.tables["model"] |= {"experts": experts, "family": family}


def _read_dense(reader: MegatronOptions, experts: dict[str, Any]) -> None:
    """Blocks without experts before those that have some."""
    pattern = reader.value("--moe-layer-freq", string)
    if not pattern:
        return
    shown, dense = reader.show("--moe-layer-freq"), count_dense(pattern)
    if dense is None:
        reader.found.problems.append(f"{shown}: only dense blocks before those with experts")
    else:
        experts["dense_layers"] = dense
        reader.note_row(f"model.experts.dense_layers={dense}", "--moe-layer-freq")


def count_dense(pattern: str) -> int | None:
    """Dense blocks at the beginning, of a pattern such as ([0]*3+[1]*58); None for another one.

    >>> count_dense("([0]*3+[1]*58)"), count_dense("[0, 1, 1, 1]"), count_dense("1"), count_dense("2")
    (3, 1, 0, None)
    """
    bare = re.sub(r"[\s'\"]", "", pattern)
    if bare == "1":
        return 0
    if listed := re.fullmatch(r"\[((?:0,)*)(?:1,)*1\]", bare):
        return listed[1].count("0")
    bare = re.sub(r"^\((.*)\)(\*1)?$", r"\1", bare)
    match = re.fullmatch(r"(?:\[0\](?:\*(\d+))?\+)?\[1\](?:\*\d+)?", bare)
    if match is None:
        return None
    return int(match[1] or 1) if bare.startswith("[0]") else 0
