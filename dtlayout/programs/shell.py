"""Shell: the one command of a script that starts a training program, with its variables filled in. Nothing is run.

Read are assignments, `export`, arrays, defaults such as ${A:-1}, whole numbers in $((…)), quotes, comments and lines
that go on. What depends on the machine, on the script's own arguments or on an `if` is an `Unknown` word that says so,
and that a caller may give a value for. Other constructs of a shell are refused by the number of their line.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from dtlayout.base.errors import InvalidConfig


class Unknown(str):
    """A word whose value the script alone does not say; the word itself is its text in the script."""

    variable: str
    """Variable that would say it; empty where none does."""
    reason: str
    """Words that say what its value depends on."""

    def __new__(cls, text: str, variable: str, reason: str) -> "Unknown":
        """A word with this text."""
        made = super().__new__(cls, text)
        made.variable, made.reason = variable, reason
        return made


@dataclass(frozen=True)
class Command:
    """A command of a script."""

    words: tuple[str, ...]
    """Words, of which some may be `Unknown`."""
    line: int
    """Number of the line on which it begins."""


@dataclass
class _Scope:
    given: Mapping[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)

    def find(self, name: str) -> str:
        if name in self.given:
            return self.given[name]
        if name in self.variables:
            return self.variables[name]
        if name in self.arrays:
            return " ".join(self.arrays[name])
        if name.isdigit():
            return Unknown(f"${name}", name, f"argument {name} of the script")
        return Unknown(f"${name}", name, "set by no line of the script")


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=)")
_ALL = ('@"', '@}"', '@]}"')
"""Ends of quoted words that are no word at all where an array is empty."""
_DESCRIPTOR = re.compile(r"[0-9]+(?=[<>])")
_OPENING = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac"}
_ENDS = ("\n", ";", "&", "|")


def read_commands(text: str, given: Mapping[str, str] | None = None) -> list[Command]:
    """The commands of a script, in their order; those inside of `if` and loops are left out.

    `given` are values of variables that take the place of the script's. InvalidConfig for what is no such script.
    """
    return list(_Reader(text, given or {}).read())


class _Reader:
    def __init__(self, text: str, given: Mapping[str, str]):
        self.text, self.place, self.scope = text.replace("\r\n", "\n"), 0, _Scope(given)

    @property
    def line(self) -> int:
        """The number of the line at the reader's place."""
        return self.text.count("\n", 0, self.place) + 1

    def read(self) -> Iterator[Command]:
        """The commands outside of conditions."""
        while (words := self._read_statement()) is not None:
            line, found = words
            if not found:
                continue
            if (end := _OPENING.get(found[0])) is not None:
                self._skip(found[0], end, line)
            elif found[0] not in ("set", "export", "declare", "local", "readonly", "shift", "cd", "source", "."):
                yield Command(tuple(found), line)

    def _skip(self, word: str, end: str, line: int) -> None:
        """Pass over a condition or a loop; what is assigned inside is not known."""
        known = set(self.scope.variables) | set(self.scope.arrays)
        depth, before = 1, _Scope({}, dict(self.scope.variables), dict(self.scope.arrays))
        while depth:
            statement = self._read_statement()
            if statement is None:
                raise InvalidConfig(f"line {line}: `{word}` has no `{end}`")
            _, found = statement
            while found and found[0] in ("then", "do", "else", "elif"):
                found = found[1:]
            depth += (found[:1] == [word]) - (found[:1] == [end])
        reason = f"set inside of the `{word}` of line {line}"
        for name in (set(self.scope.variables) | set(self.scope.arrays)) - known:
            self._forget(name, reason)
        for name in known:
            if self.scope.variables.get(name) != before.variables.get(name) or self.scope.arrays.get(
                name
            ) != before.arrays.get(name):
                self._forget(name, reason)

    def _forget(self, name: str, reason: str) -> None:
        self.scope.arrays.pop(name, None)
        self.scope.variables[name] = Unknown(f"${name}", name, reason)

    # Statements

    def _read_statement(self) -> tuple[int, list[str]] | None:
        """Line and words of the next statement, which may be an assignment and has none then; None at the end."""
        self._pass_space(lines=True)
        if self.place >= len(self.text):
            return None
        line, words = self.line, list[str]()
        while self.place < len(self.text) and self.text[self.place] not in _ENDS:
            can_assign = not words or words[0] in ("export", "declare", "local", "readonly")
            if can_assign and self._read_assignment():
                self._pass_space()
                continue
            if self.text[self.place] in "()":
                if self.text.startswith("()", self.place) and words:
                    raise InvalidConfig(f"line {line}: functions of a shell are not read; write the command plainly")
                self.place += 1
            elif self.text[self.place] in "<>":
                self._pass_redirection()
            elif match := _DESCRIPTOR.match(self.text, self.place):
                self.place = match.end()
            else:
                words += self._read_word()
            self._pass_space()
        self.place += 1
        return line, words

    def _pass_redirection(self) -> None:
        while self.place < len(self.text) and self.text[self.place] in "<>&":
            self.place += 1
        self._pass_space()
        self._read_word()

    def _read_assignment(self) -> bool:
        """Read NAME=value, NAME+=value or NAME=(…), and note it; False where there is none."""
        match = _ASSIGNMENT.match(self.text, self.place)
        if match is None:
            return False
        name, adds = match[1], match[2] == "+="
        self.place = match.end()
        if self.text[self.place : self.place + 1] == "(":
            self.place += 1
            values = self._read_array()
            self.scope.arrays[name] = (self.scope.arrays.get(name, []) if adds else []) + values
            self.scope.variables.pop(name, None)
            return True
        words = self._read_word() if not self._is_at_end() else [""]
        value = words[0] if len(words) == 1 else " ".join(words)
        if adds:
            before = self.scope.find(name) if name in self.scope.variables else ""
            value = _join([before, value])
        self.scope.variables[name] = value
        return True

    def _read_array(self) -> list[str]:
        line, values = self.line, list[str]()
        while True:
            self._pass_space(lines=True)
            if self.place >= len(self.text):
                raise InvalidConfig(f"line {line}: an array has no closing parenthesis")
            if self.text[self.place] == ")":
                self.place += 1
                return values
            values += self._read_word()

    # Words

    def _is_at_end(self) -> bool:
        return self.place >= len(self.text) or self.text[self.place] in " \t\n;&|)"

    def _pass_space(self, *, lines: bool = False) -> None:
        while self.place < len(self.text):
            here = self.text[self.place]
            if here in " \t" or (lines and here in "\n;&|"):
                self.place += 1
            elif self.text.startswith("\\\n", self.place):
                self.place += 2
            elif here == "#" and (self.place == 0 or self.text[self.place - 1] in " \t\n;"):
                end = self.text.find("\n", self.place)
                self.place = len(self.text) if end < 0 else end
            else:
                return

    def _read_word(self) -> list[str]:
        """The words that one word becomes: several where a variable outside of quotes holds spaces, or an array."""
        found: list[list[str]] = [[]]
        quoted = False
        begin = self.place
        while not self._is_at_end():
            here = self.text[self.place]
            if here == "\\":
                found[-1].append(self.text[self.place + 1 : self.place + 2].replace("\n", ""))
                self.place += 2
            elif here == "'":
                quoted = True
                found[-1].append(self._read_until("'"))
            elif here == '"':
                quoted = True
                self._read_quoted(found)
            elif here in "$`":
                self._add(found, self._read_expansion(), splits=True)
            elif here in "(<>":
                break
            else:
                found[-1].append(here)
                self.place += 1
        if self.place == begin:
            raise InvalidConfig(f"line {self.line}: {self.text[begin : begin + 1]!r} is nothing that is read here")
        words = [_join(parts) for parts in found]
        return [word for word in words if word or (quoted and not self.text[begin : self.place].endswith(_ALL))]

    def _read_until(self, end: str) -> str:
        line, begin = self.line, self.place + 1
        close = self.text.find(end, begin)
        if close < 0:
            raise InvalidConfig(f"line {line}: a quote is not closed")
        self.place = close + 1
        return self.text[begin:close]

    def _read_quoted(self, found: list[list[str]]) -> None:
        line = self.line
        self.place += 1
        while self.place < len(self.text) and self.text[self.place] != '"':
            here = self.text[self.place]
            if here == "\\" and self.text[self.place + 1 : self.place + 2] in '"\\$`\n':
                found[-1].append(self.text[self.place + 1].replace("\n", ""))
                self.place += 2
            elif here in "$`":
                self._add(found, self._read_expansion(), splits=False)
            else:
                found[-1].append(here)
                self.place += 1
        if self.place >= len(self.text):
            raise InvalidConfig(f"line {line}: a quote is not closed")
        self.place += 1

    def _add(self, found: list[list[str]], values: str | list[str], *, splits: bool) -> None:
        """Add what an expansion gives to the last word; further words where it is several."""
        if isinstance(values, str):
            is_one = isinstance(values, Unknown) or not splits
            values = [values] if is_one else values.split()
        for number, value in enumerate(values):
            if number:
                found.append([])
            found[-1].append(value)

    def _read_expansion(self) -> str | list[str]:
        """The value of what begins with $ or a backquote."""
        line, begin = self.line, self.place
        if self.text[begin] == "`":
            return Unknown(f"`{self._read_until('`')}`", "", f"the output of a command, on line {line}")
        rest = self.text[begin + 1 :]
        if rest.startswith("(("):
            end = rest.find("))")
            if end < 0:
                raise InvalidConfig(f"line {line}: $(( is not closed")
            self.place = begin + 1 + end + 2
            return self._compute(rest[2:end], line)
        if rest.startswith("("):
            self.place = begin + 2
            self._pass_parentheses(line)
            return Unknown(self.text[begin : self.place], "", f"the output of a command, on line {line}")
        if rest.startswith("{"):
            return self._read_braces(line)
        if match := _NAME.match(rest) or re.match(r"[0-9@*#?$!-]", rest):
            self.place = begin + 1 + match.end()
            return [] if match[0] in "@*" else self.scope.find(match[0])
        self.place += 1
        return "$"

    def _pass_parentheses(self, line: int) -> None:
        depth = 1
        while depth:
            if self.place >= len(self.text):
                raise InvalidConfig(f"line {line}: $( is not closed")
            depth += {"(": 1, ")": -1}.get(self.text[self.place], 0)
            self.place += 1

    def _read_braces(self, line: int) -> str | list[str]:
        begin = self.place + 2
        depth, end = 1, begin
        while depth and end < len(self.text):
            depth += {"{": 1, "}": -1}.get(self.text[end], 0)
            end += 1
        if depth:
            raise InvalidConfig(f"line {line}: ${{ is not closed")
        inside, self.place = self.text[begin : end - 1], end
        match = re.match(r"([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*])(.*)", inside, re.DOTALL)
        if match is None:
            return Unknown(f"${{{inside}}}", "", f"nothing that is read here, on line {line}")
        name, rest = match[1], match[2]
        if rest in ("[@]", "[*]"):
            if name in self.scope.arrays:
                return list(self.scope.arrays[name])
            value = self.scope.find(name)
            return [value] if isinstance(value, Unknown) else value.split()
        if name in ("@", "*"):
            return []
        value = self.scope.find(name)
        if not rest:
            return value
        if rest[:2] in (":-", ":=", ":?") or rest[:1] in ("-", "=", "?"):
            word = rest[2:] if rest[0] == ":" else rest[1:]
            is_question = "?" in rest[:2]
            if not isinstance(value, Unknown) and (value or rest[0] != ":"):
                return value
            if is_question or (isinstance(value, Unknown) and not value.reason.startswith(("set by no", "argument"))):
                return value
            inner = _Reader(word, self.scope.given)
            inner.scope = self.scope
            return _join(inner._read_word()) if word else ""
        return Unknown(f"${{{inside}}}", name, f"nothing that is read here, on line {line}")

    def _compute(self, text: str, line: int) -> str:
        """The value of an expression of whole numbers and variables."""

        def fill(match: re.Match[str]) -> str:
            value = self.scope.find(match[1])
            if isinstance(value, Unknown):
                unknown.append(value)
            return value or "0"

        unknown = list[Unknown]()
        filled = re.sub(r"\$?\{?([A-Za-z_][A-Za-z0-9_]*|(?<=\$)[0-9]+)\}?", fill, text)
        if unknown:
            return Unknown(f"$(({text}))", unknown[0].variable, unknown[0].reason)
        try:
            return str(_evaluate(ast.parse(filled.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, TypeError):
            raise InvalidConfig(f"line {line}: $(({text})) is no arithmetic of whole numbers") from None


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.Div: operator.floordiv,
}  # fmt: skip


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left), _evaluate(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
    raise ValueError(node)


def _join(parts: list[str]) -> str:
    """Parts of a word as one; unknown if a part is."""
    unknown = [each for each in parts if isinstance(each, Unknown)]
    text = "".join(parts)
    if not unknown:
        return text
    return Unknown(text, unknown[0].variable, unknown[0].reason)
