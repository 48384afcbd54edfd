"""Messages from one start under torchrun to the next: torchrun restarts ranks after any exit code but 0.

RUN/summary.json says how a run has ended. A start that may not write there leaves its reason in the folder where
torchrun's agent of this node keeps the errors of its ranks. All starts of one agent share that folder, and no other
agent has it.
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
    """Reason why an earlier start by the same agent was refused for good; empty if none was."""
    if path := _find_path():
        with suppress(OSError):
            return path.read_text(encoding="utf-8")
    return ""


def _find_path() -> Path | None:
    """File in the folder of torchrun's agent, which is two levels above a rank's own; None without torchrun."""
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    has_agent = len(error_file.parts) > 3 and error_file.parents[1].name.startswith("attempt_")
    return error_file.parents[2] / _NAME if has_agent else None
