"""Names of models in files of other programs, as [model] of ours: a folder with its config.json, or a preset."""

import re
from pathlib import Path
from typing import Any

from dtlayout.models.presets import PRESETS

_TRAINED_FURTHER = r"-(instruct|base|chat|hf|it|v0\.\d|bnb-4bit|unsloth|thinking|\d{4}|gptq|awq|fp8|math|coder)(?=-|$)"
"""Part of a hub name that says how the model was trained or stored, and nothing of its sizes."""
_SAME_SIZES = {"llama3-8b": "llama3.1-8b", "llama3-70b": "llama3.1-70b", "llama3.3-70b": "llama3.1-70b"}
"""Model → preset of another one with the same sizes."""


def find_model(name: str, folder: Path) -> dict[str, Any] | None:
    """[model] for a name in a file of that folder; None if nothing here says the sizes.

    A name is a path, from the folder or from here, or a name of the hub. A config.json in the folder is that of a model
    which is found nowhere else.
    """
    for place in (folder / name, Path(name)):
        if (place / "config.json").is_file():
            return {"name": str(place)}
    bare = name.rstrip("/").rpartition("/")[2].lower()
    while (shorter := re.sub(_TRAINED_FURTHER, "", bare)) != bare:
        bare = shorter
    bare = re.sub(r"^llama-(?=\d)", "llama", bare.removeprefix("meta-"))
    preset = _SAME_SIZES.get(bare, bare)
    if preset in PRESETS:
        return {"name": preset}
    return {"name": str(folder / "config.json")} if (folder / "config.json").is_file() else None
