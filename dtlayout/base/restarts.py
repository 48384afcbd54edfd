"""What a start under torchrun leaves for the next one, since torchrun restarts ranks after any exit code but 0.

How a run has ended stands in RUN/summary.json. A start that may not write there leaves its reason where torchrun's
agent of this node keeps the errors of its ranks: one folder for all starts of one agent, that no other agent has.
"""

import os
from contextlib import suppress
from pathlib import Path

_NAME = "dtlayout-refused"


def is_restart() -> bool:
    """Whether torchrun has started this run before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def refuse_restarts(reason: str) -> None:
    """Tell torchrun's agent of this node, by a file, that each later start shall end at once and print `reason`.

    Call it before an error that another start cannot cure, such as a run folder that another run holds. Nothing happens
    without torchrun. A file that cannot be written raises nothing: the next start then finds the error again by itself.
    """
    if path := _find_path():
        with suppress(OSError):  # then each start finds the reason again by itself
            path.write_text(reason, encoding="utf-8")


def find_refusal() -> str:
    """Why an earlier start by the same agent was refused for good; empty if none was."""
    if path := _find_path():
        with suppress(OSError):
            return path.read_text(encoding="utf-8")
    return ""


def _find_path() -> Path | None:
    """In the agent's folder, where each attempt has one with a folder for each rank; None without torchrun."""
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    has_agent = len(error_file.parts) > 3 and error_file.parents[1].name.startswith("attempt_")
    return error_file.parents[2] / _NAME if has_agent else None
