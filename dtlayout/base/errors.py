"""The errors that users see: one line a problem, no traceback.

Each message says what was asked, what broke (with numbers) and what would work. Exit codes are the contract of
`train.py` and of every `dtlayout` command.
"""

from collections.abc import Sequence

EXIT_DONE = 0
EXIT_CRASHED = 1
"""Exit code of a rank that ends since another rank is lost, and Python's own for an error that nobody expected."""
EXIT_REFUSED = 2
EXIT_STOPPED = 3
EXIT_NON_FINITE = 4
EXIT_INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ends, as in shells: 128 plus the number of SIGINT."""


class DtlayoutError(Exception):
    """An error with a message for people; commands print it and exit with `exit_code`."""

    exit_code = EXIT_REFUSED


class _ProblemList(DtlayoutError):
    """Several problems of one kind, all found before the first is reported."""

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class InvalidConfig(_ProblemList):
    """A TOML file or an override with something unknown or of the wrong type."""


class InvalidLayout(_ProblemList):
    """A layout that cannot train this model with this batch; has all reasons at once."""


class DataError(DtlayoutError):
    """A corpus, a tokenizer or a token file that cannot be used."""


class CheckpointError(DtlayoutError):
    """A checkpoint that does not fit the run that wants to resume from it."""


class KernelError(DtlayoutError):
    """A kernel that is not available here, or that silently gave way to another one."""


class LostRanks(DtlayoutError):
    """Some ranks of a start are missing; another start may have them."""

    exit_code = EXIT_CRASHED
