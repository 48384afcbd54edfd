"""The text model inside the config.json of a model that sees images too: that part alone is planned. No torch.

Its layers are counted, and its head; the vision tower and what joins both are not.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class TextPart(NamedTuple):
    """Text model of a kind of models that see images."""

    family: str
    """Family of a text model whose table names none."""
    tied: bool = False
    """True if head and embedding are one weight where the file says nothing."""
    either: bool = False
    """True if it is enough that the text's table, and not the file itself, ties head and embedding."""


TEXT_PARTS: Mapping[str, TextPart] = {
    "llava": TextPart("llama", either=True),
    "llava_next": TextPart("llama", either=True),
    "mistral3": TextPart("mistral", tied=True),
    "gemma3": TextPart("gemma3_text", tied=True),
    "qwen2_vl": TextPart("qwen2", either=True),
    "qwen2_5_vl": TextPart("qwen2", either=True),
    "qwen3_vl": TextPart("qwen3"),
    "internvl": TextPart("qwen2", tied=True),
}
"""model_type → its text model."""
_OTHER_NAMES = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""model_type of a text part → the family that has the same blocks."""
_OF_IMAGES = ("vision_config", "text_config", "architectures", "auto_map", "model_type")
_TIED = "tie_word_embeddings"


def find_text_part(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json of the text model in that of a known model that sees images; None for any other config.json.

    Files that older versions of `transformers` wrote for Qwen2-VL have the text's keys beside vision_config.
    """
    kind = config.get("model_type")
    part = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    inner = config.get("text_config")
    if part is None or not (isinstance(inner, dict) or (inner is None and "hidden_size" in config)):
        return None
    text = dict(inner) if isinstance(inner, dict) else {k: v for k, v in config.items() if k not in _OF_IMAGES}
    text.pop("architectures", None)
    found = text.get("model_type") or part.family
    text["model_type"] = _OTHER_NAMES.get(found, found) if isinstance(found, str) else found
    is_tied = config.get(_TIED, part.tied)
    text[_TIED] = is_tied or bool(text.get(_TIED)) if part.either else is_tied
    return {key: _drop_image_positions(value) for key, value in text.items() if not key.endswith("_token_id")}


def _drop_image_positions(value: Any) -> Any:
    """A table of the rotary embedding without the share of each axis of an image, which text does not have."""
    if not isinstance(value, dict) or "mrope_section" not in value:
        return value
    kept = {key: each for key, each in value.items() if not key.startswith("mrope_")}
    return {key: "default" if each == "mrope" else each for key, each in kept.items()}
