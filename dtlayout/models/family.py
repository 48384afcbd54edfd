"""Family: what models of one kind have in common, as a record, and how a config.json says the rest. No torch."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dtlayout.models.description import Description, describe_llama
from dtlayout.models.stored_names import STORED_NAMES
from dtlayout.spec.model_shape import ModelShape


class Derived(NamedTuple):
    """A field that follows from the values of some keys of a config.json."""

    keys: tuple[str, ...]
    """Keys that it reads."""
    read: Callable[..., Any]
    """Function from their values to the field; InvalidConfig if they have none."""


@dataclass(frozen=True, kw_only=True)
class WindowRule:
    """Blocks of a family that have a window, where a config.json names one in sliding_window."""

    period: int = 0
    """Blocks among which one attends to all tokens. 0: every block has the window."""
    full: int = 0
    """Place of that block among them, from 0."""
    period_key: str = ""
    """Key of config.json that has another period; empty where none has."""
    switch: str = ""
    """Key of config.json that must be true for a window; empty where none must."""
    is_listed: bool = True
    """True if layer_types, where a file has it, says which blocks have the window."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models that differ only in sizes."""

    name: str
    """Name in `ModelShape.family`, and in the model_type of a Hugging Face config.json."""
    describe: Callable[[ModelShape], Description] = describe_llama
    """Function from a model's shape to its operations and weights."""
    architecture: str = "LlamaForCausalLM"
    """Name of the class in `transformers`, as a config.json has it."""
    module: str | Callable[..., Any] = "dtlayout.models.llama:Llama"
    """Class that builds the model or a part of it, called like `models.llama.Llama`; a text is imported when needed."""
    traits: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ModelShape that a config.json leaves out, because all models of the family have them; those of its
    experts are a table."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Key of config.json → value that `transformers` takes if a file lacks the key. For other keys `COMMON_DEFAULTS`
    has the value; a size that is in neither must be in the file."""
    heads_divide_width: bool = False
    """True if `transformers` opens only files whose heads divide hidden_size, whatever their head_dim says."""
    ignored_keys: Collection[str] = ()
    """Keys of config.json that other families compute with and this one ignores."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Field of `Experts` → key of config.json; empty where no model of the family has experts."""
    synonyms: Mapping[str, str] = field(default_factory=dict)
    """Key of config.json → another key that means the same; the second is written."""
    allowed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Key of config.json → the only values with which the blocks here compute what `transformers` does."""
    window: "WindowRule | None" = None
    """Blocks that have the window of a config.json; None where no model of the family has one that is known here."""
    untrained: str = ""
    """Reason why its models are planned and not trained; empty where they train."""
    has_class: bool = True
    """Whether `transformers` builds its models, as tracing asks for."""
    keys: Mapping[str, "str | Derived"] = field(default_factory=dict)
    """Field of `ModelShape` beside `SIZE_KEYS` → key of config.json, for a family that is planned alone. A dot leads
    into a table: "block.output_bias"."""
    stored_names: Mapping[str, str] = field(default_factory=lambda: STORED_NAMES)
    """Weight of a block → its name in a Hugging Face folder, where that is another; "*" is the number of an expert."""


SIZE_KEYS: Mapping[str, str] = {name: name for name in ("hidden_size", "head_dim", "vocab_size", "rope_theta")} | {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_size": "intermediate_size",
    "tied_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
}
"""Field of ModelShape → key of config.json."""
COMMON_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0, "hidden_act": "silu", "max_position_embeddings": None,
}  # fmt: skip
"""Key of config.json → default if neither the file nor `Family.defaults` has it; None follows from other keys."""
