"""Spread: how ranks share the state of a job of Hugging Face's Trainer, whichever of its files says it.

The Trainer's arguments, accelerate's YAML, its command line and DeepSpeed's JSON say parts of one thing. Each reader
fills in a `Spread`; `settle_layout` and `settle_formats` make our keys of it.
"""

from dataclasses import dataclass, field
from typing import Literal

from dtlayout.programs.understood import Understood

NODE = 8
"""GPUs of a node, where nothing says them."""


@dataclass
class Spread:
    """Sharding, degrees, formats and offload that files of a job say."""

    kind: Literal["copies", "fsdp", "zero"] = "copies"
    """Copies: each rank has the whole state, as with DDP or on one GPU. FSDP is torch's, ZeRO is DeepSpeed's."""
    shown: str = ""
    """Option that says so; empty where none does."""
    zero: int = 1
    """Stage of ZeRO, or the like of FSDP; 0 where DeepSpeed shares nothing."""
    is_hybrid: bool = False
    """True if each node has copies of the shards."""
    offloads: bool = False
    """True if the host updates the state."""
    on_disk: bool = False
    """True if the state lies on its disk."""
    offload_shown: str = ""
    """Option that says so."""
    keeps_on_host: str = ""
    """Option by which activations lie in the host's memory; empty where they do not."""
    recomputes: str = ""
    """Option by which the sharding recomputes blocks; empty where it does not."""
    degrees: dict[str, int] = field(default_factory=dict)
    """Degrees of tp, cp, dp_replicate and dp_shard that are said."""
    degrees_shown: str = ""
    """Options that say them."""
    cp_method: str = ""
    """Way to attend over cp, in our words."""
    mixed: str = ""
    """Format of mixed precision: bfloat16, float16, float32 for none; empty where nothing says it."""
    mixed_shown: str = ""
    """Option that says it."""
    casts: bool = True
    """False if FSDP casts nothing, so that masters are as weights are loaded."""
    masters: str = ""
    """Format of the masters, where the sharding says another one than float32."""
    masters_shown: str = ""
    """Option that says it."""
    reduces: str = ""
    """Format in which gradients are reduced, where the sharding says it."""
    reduces_shown: str = ""
    """Option that says it."""

    @property
    def engine(self) -> str:
        """Name of the engine that predicts it."""
        return "deepspeed" if self.kind == "zero" else "accelerate"


def settle_layout(found: Understood, spread: Spread) -> int:
    """Put the degrees, the stage of ZeRO and the offload; the ranks that have other samples, or 0 if not known."""
    world, degrees = found.num_gpus, spread.degrees
    ranks = degrees.get("tp", 1) * degrees.get("cp", 1)
    axes = {name: degrees[name] for name in ("tp", "cp") if degrees.get(name, 1) > 1}
    if axes:
        found.put("layout", axes, spread.degrees_shown)
    if "tp" in axes:
        found.put(
            "layout", {"sequence_parallel": False}, "", "assumed", "transformers' plans of tp keep the sequence whole"
        )
    if "cp" in axes:
        found.put("layout", {"cp_method": spread.cp_method or "gather"}, spread.degrees_shown)
    is_sharded = spread.kind == "fsdp" or (spread.kind == "zero" and spread.zero > 0)
    if is_sharded and world == 1:
        found.ignore(spread.shown, "one GPU shares its state with nobody", "no effect")
    found.put("layout", {"zero": max(1, spread.zero)}, spread.shown, "read" if spread.shown else "assumed",
              "" if spread.shown else "nothing is sharded")  # fmt: skip
    if spread.offloads or spread.keeps_on_host:
        kind = "disk" if spread.on_disk else "both" if spread.offloads and spread.keeps_on_host else ""
        kind = kind or ("optimizer" if spread.offloads else "activations")
        found.put("layout", {"offload": kind}, ", ".join(filter(None, (spread.offload_shown, spread.keeps_on_host))))
    if world % ranks:
        found.problems.append(f"{world} GPUs are no multiple of tp * cp = {ranks}, of {spread.degrees_shown}")
        return 0
    dp = world // ranks
    if spread.kind == "copies" and degrees.get("cp", 1) > 1 and dp == 1:
        found.problems.append(
            f"{spread.degrees_shown}: ranks of cp that all have the whole state are not predicted; use FSDP"
        )
    _put_data_parallel(found, spread, dp, is_sharded=is_sharded)
    return dp


def _put_data_parallel(found: Understood, spread: Spread, dp: int, *, is_sharded: bool) -> None:
    said = {name: spread.degrees[name] for name in ("dp_replicate", "dp_shard") if name in spread.degrees}
    copies, shards = said.get("dp_replicate", 1), said.get("dp_shard", 0)
    shown, note = spread.degrees_shown if said else spread.shown, ""
    if not is_sharded:
        if shards > 1:
            found.problems.append(f"{spread.degrees_shown}: dp_shard={shards} is without FSDP, which alone shards")
        copies, shards = max(1, dp), 1
    elif spread.is_hybrid and "dp_replicate" not in said and dp:
        per_node = found.gpus_per_node or min(NODE, found.num_gpus)
        note = "" if found.gpus_per_node else f"{per_node} GPUs a node"
        shards = min(dp, per_node)
        copies = dp // shards
    elif dp and not shards:
        shards = dp // copies
    if dp and copies * shards != dp:
        found.problems.append(f"{copies} copies of {shards} shards, of {shown}, are no {dp} ranks of data parallelism")
    if dp or said:
        values = {"dp_replicate": copies, "dp_shard": max(1, shards)}
        how: Literal["read", "assumed"] = "assumed" if note or not shown else "read"
        found.put("layout", values, shown, how, note or ("" if shown else "each GPU has a copy"))


def settle_formats(found: Understood, spread: Spread, compute: str, loaded: str, loaded_shown: str) -> None:
    """Put the formats of masters and gradients, beside a compute format that is put already.

    `loaded` is the format in which weights are loaded, empty where nothing says it. What trains an adapter has it in
    float32, beside frozen weights in the compute format.
    """
    has_adapter, base = "adapter" in found.tables, found.get("precision", "base", "compute")
    if has_adapter:
        masters, note = "float32", "PEFT has adapters in float32"
        if loaded == "float32" != compute and base == "compute" and spread.kind != "zero":
            found.problems.append(
                f"{loaded_shown or 'dtype'} keeps frozen weights in float32 beside {compute}, which is not predicted; "
                f"with bfloat16 they are, and take half"
            )
    elif spread.kind == "zero":
        masters, note = spread.masters or "float32", "" if spread.masters else "DeepSpeed's masters"
        masters = masters if compute != "float32" else "float32"
    elif spread.kind == "fsdp" and compute != "float32" and spread.mixed != "float32" and spread.casts:
        masters, note = "float32", "accelerate has masters of FSDP in float32 beside mixed precision"
    else:
        masters, note = loaded or "float32", "" if loaded else "weights are loaded in float32"
    if masters == "float16":
        found.problems.append(
            f"{loaded_shown}: weights in float16 cannot be trained; use bfloat16, or float32 with fp16"
        )
        return
    shown = spread.masters_shown if spread.masters and spread.kind == "zero" else ""
    shown = shown or (loaded_shown if not note else "")
    found.put("precision", {"params": masters}, shown, "read" if shown else "assumed", note if not shown else "")
    reduce = spread.reduces or (compute if spread.kind != "copies" else masters)
    note = {"copies": "gradients are as the weights", "fsdp": "the policy of FSDP's mixed precision",
            "zero": "communication_data_type is that of training"}[spread.kind]  # fmt: skip
    how: Literal["read", "assumed"] = "read" if spread.reduces else "assumed"
    found.put("precision", {"reduce": reduce}, spread.reduces_shown, how, "" if spread.reduces else note)
