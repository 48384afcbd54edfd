"""Branches of a shell script: the blocks that are open, and whether the statement at a place is run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.shell.conditions import Decision, Unknown, both, either, match_pattern, negate

State = Literal["live", "dead", "unknown"]
"""Live: a statement is run, once. Dead: it is not. Unknown: in a loop or a function, or nobody knows the condition."""

OPENING = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
"""Word that opens a block → the one that closes it."""
UNSAID = Unknown("", "", "something outside of the script")
"""Status of a command that nobody knows."""
_LOOPS = {"for", "while", "until", "select"}


@dataclass
class OpenBlock:
    """A block that is open."""

    end: str
    """Word that closes it."""
    what: str
    """Words for it; empty for braces."""
    outside: State
    """State of the block as a whole."""
    before: Decision
    """Status of the statement before it."""
    branch: State
    """State of the branch that is read, beside that of the whole."""
    in_condition: bool = False
    """True between `if` or `elif` and `then`."""
    in_patterns: bool = False
    """True where patterns of `case` stand."""
    word: str = ""
    """Word of `case`, which may be `Unknown`."""
    reason: str = ""
    """Words for what decides braces; empty where nothing does."""
    taken: Decision = False
    """True if a branch of it has been taken, and false if none has."""

    @property
    def state(self) -> State:
        """State of a statement inside."""
        states = (self.outside, self.branch)
        return "dead" if "dead" in states else "unknown" if "unknown" in states else "live"

    @property
    def decided_by(self) -> str:
        """Variable that decides its branch; empty if none does."""
        return self.taken.variable if isinstance(self.taken, Unknown) else ""


@dataclass
class Branches:
    """Blocks that are open, the status of the last statement, and what follows for the next."""

    blocks: list[OpenBlock] = field(default_factory=list)
    """Blocks, the innermost last."""
    status: Decision = True
    """Status of the last statement."""
    separator: str = "\n"
    """Separator before the statement that is read."""
    negates: bool = False
    """True behind `!`."""
    has_ended: bool = False
    """True behind an `exit` that is run."""

    @property
    def innermost(self) -> OpenBlock | None:
        """The block that is read; None outside of all."""
        return self.blocks[-1] if self.blocks else None

    @property
    def around(self) -> State:
        """State of what is read here, whatever the separator."""
        states = [block.state for block in self.blocks]
        return "dead" if self.has_ended or "dead" in states else "unknown" if "unknown" in states else "live"

    @property
    def state(self) -> State:
        """State of the statement behind the separator."""
        if self.around == "dead" or self.separator not in ("&&", "||"):
            return self.around
        status = self.status
        if isinstance(status, Unknown):
            return "unknown"
        return self.around if status is (self.separator == "&&") else "dead"

    @property
    def unsaid(self) -> OpenBlock | None:
        """The outermost block of which nobody knows whether it is run; None if there is none."""
        return next((block for block in self.blocks if block.state == "unknown" and (block.what or block.reason)), None)

    def note(self, status: Decision) -> None:
        """Note the status of a statement that has been read. In a loop or a function nobody knows it."""
        state = self.state
        if state != "dead":
            self.status = UNSAID if state == "unknown" and not isinstance(status, Unknown) else status
            if self.negates:
                self.status = negate(self.status)
        self.negates = False

    def open(self, word: str, end: str, what: str) -> OpenBlock:
        """A block that begins here, with this word."""
        block = OpenBlock(end, what, self.state, self.status, "unknown" if word in _LOOPS else "live")
        block.in_condition, block.in_patterns = word == "if", word == "case"
        self.blocks.append(block)
        self.separator = "\n"
        return block

    def turn(self, word: str) -> bool:
        """Go on behind `then`, `elif`, `else` or `do`; False where the word belongs to nothing."""
        block = self.innermost
        if block is None or block.end not in ("fi", "done") or (block.end == "done") != (word == "do"):
            return False
        if word == "then":
            self._enter(block, self.status)
            block.in_condition = False
        elif word == "elif":
            block.in_condition = True
            block.branch = "live" if block.taken is False else "dead" if block.taken is True else "unknown"
        elif word == "else":
            self._enter(block, True)
        self.separator = "\n"
        return True

    def fall_through(self) -> None:
        """Go on behind the end of a branch of `case` that does not end it: what follows is not known."""
        block = self.blocks[-1]
        block.in_patterns = True
        if block.state != "dead":
            block.taken = block.word = UNSAID

    def enter_case(self, patterns: Sequence[str]) -> None:
        """Go on behind patterns of `case`, of which one is enough."""
        block = self.blocks[-1]
        block.in_patterns = False
        self.separator = "\n"
        self._enter(block, either(*(match_pattern(pattern, block.word) for pattern in patterns)))

    def _enter(self, block: OpenBlock, condition: Decision) -> None:
        """Begin the branch with that condition."""
        runs = both(negate(block.taken), condition)
        block.branch = "live" if runs is True else "dead" if runs is False else "unknown"
        if block.taken is not True and runs is not False:
            block.taken = runs

    def close(self, word: str, line: int) -> None:
        """Close the innermost block by its word; InvalidConfig where another is open."""
        if not self.blocks or self.blocks[-1].end != word:
            raise InvalidConfig(f"line {line}: `{word}` closes nothing")
        block = self.blocks.pop()
        if block.outside == "dead":
            self.status = block.before
        elif block.outside == "unknown" or word in ("done", ")") or isinstance(block.taken, Unknown):
            self.status = UNSAID
        elif word in ("fi", "esac") and block.taken is False:
            self.status = True
        self.separator = "\n"
