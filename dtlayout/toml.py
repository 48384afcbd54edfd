"""Read TOML on every supported Python: the standard library's reader came with 3.11."""

import difflib
import sys
from collections.abc import Collection

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

loads = tomllib.loads
TOMLDecodeError = tomllib.TOMLDecodeError


def describe_unknown_key(key: str, known: Collection[str], prefix: str = "") -> str:
    """Why a key of a table is refused: the nearest that is known, or all of them; `prefix` names the table."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    advice = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(known)}"
    return f"{prefix}{key} is unknown; {advice}"
