"""Megatron-LM's options, read as a job of ours: all that its scripts, and trees of other programs, say of it.

Defaults are those of the commit that `megatron.MEGATRON` names. Options that only name data, logs, checkpoints or the
learning rate's course change no prediction.
"""

from collections.abc import Mapping

from dtlayout.programs.megatron.formats import read_engine, read_formats, read_optimizer
from dtlayout.programs.megatron.layout import read_batch, read_layout
from dtlayout.programs.megatron.model import read_experts, read_model
from dtlayout.programs.megatron.options import MegatronOptions
from dtlayout.programs.megatron.own_names import Said
from dtlayout.programs.megatron.subjects import IGNORED as IGNORED
from dtlayout.programs.megatron.subjects import NEUTRAL, OTHERWISE, REFUSED
from dtlayout.programs.understood import Understood

_OF_MODEL: Mapping[str, str] = {
    "the model, whose sizes lie elsewhere": r"--(num-(layers|attention-heads|query-groups|experts)|hidden-size"
    r"|kv-channels|ffn-hidden-size|group-query-attention|normalization|norm-epsilon|rotary-.*|.*rope-scaling.*|swiglu|untie-.*"
    r"|disable-bias-linear|add-qkv-bias|qk-layernorm|.*vocab-size.*|position-embedding-type|transformer-impl|moe-.*"
    r"|expert-tensor-parallel-size)",
}
_RANKS = ("--nproc_per_node", "--nproc-per-node"), ("--nnodes",)


def read_job(
    found: Understood, options: Mapping[str, list[str]], said: Said | None = None,
    ignored: Mapping[str, str] = IGNORED, *, has_model: bool = True,
) -> None:  # fmt: skip
    """Fill a value by the options, section by section.

    `said` has the names that a tree has for the options; `ignored` are patterns by subject. Without `has_model` the
    model is left out, whose sizes no option says.
    """
    reader = MegatronOptions(found, options, said)
    if has_model:
        read_model(reader)
        read_experts(reader)
    read_batch(reader)
    read_layout(reader)
    read_formats(reader)
    read_optimizer(reader)
    read_engine(reader)
    reader.refuse(NEUTRAL, REFUSED)
    reader.read_rest(ignored if has_model else {**ignored, **_OF_MODEL}, OTHERWISE)


def count_gpus(found: Understood, ranks: Mapping[str, str], num_gpus: int) -> None:
    """Note the GPUs that torchrun's options start, or those that are said in their place."""
    counts = []
    for names in _RANKS:
        word = next((ranks[name] for name in names if name in ranks), None)
        counts.append(int(word) if word is not None and word.isdigit() else 0)
    per_node, nodes = counts
    if per_node:
        found.gpus_per_node = per_node
        has_nodes = any(name in ranks for name in _RANKS[1])
        found.num_gpus = per_node * (nodes if has_nodes else 1)
    found.num_gpus = num_gpus or found.num_gpus
