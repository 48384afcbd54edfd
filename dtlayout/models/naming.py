"""The name of a model that has a Hugging Face config.json. No torch."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtlayout.models.hf_text_part import find_text_part
from dtlayout.models.presets import PRESETS
from dtlayout.spec.model_shape import ModelShape

NAME_KEY = "_name_or_path"
"""Key of config.json under which `transformers` notes the place that a model came from."""
_PUBLISHED = re.compile(r"(?:\w[\w.-]*/)?(\w[\w.-]*)", re.ASCII)
_IN_CACHE = re.compile(r"models--(?:.+?--)?(.+)")


def name_model(model: ModelShape, config: Mapping[str, Any], path: Path) -> ModelShape:
    """`model` with a name; `config` is its parsed config.json and `path` that file. The first of these is taken:

    1. `_name_or_path` in `config`, without the owner, if it reads `name` or `owner/name`
    2. the name of the repository, without the owner, if the file lies in the Hugging Face cache
    3. the name of the preset that is equal in all but the name
    4. the name of the file's folder

    Where the file is of a model that sees images too, "-text-part" is added: no more of it is planned.
    """
    suffix = "" if find_text_part(config) is None else "-text-part"
    own, folder = config.get(NAME_KEY), path.absolute().parent
    said = _PUBLISHED.fullmatch(own) if isinstance(own, str) else None
    if folder.parent.name == "snapshots":
        said = said or _IN_CACHE.fullmatch(folder.parent.parent.name)
    if said:
        return replace(model, name=f"{said[1]}{suffix}")
    alike = (preset for preset in PRESETS.values() if replace(model, name=preset.name) == preset)
    named = replace(model, name=f"{folder.name or 'own'}{suffix}")
    return named if suffix else next(alike, named)
