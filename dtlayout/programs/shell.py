"""Shell: the commands of a script, with its variables filled in. Nothing is run.

Read are assignments, `export`, arrays, defaults such as ${A:-1}, whole numbers in $((…)), quotes, comments and
here-documents. A value that is set inside of a condition, a loop or a function, by a command, or by the script's own
arguments is an `Unknown` word, which says so and for which a caller may give a value.
"""

import ast
import re
from collections.abc import Mapping
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
    condition: str = ""
    """Condition, loop or function that it lies in; empty where it lies in none."""
    passes_arguments: bool = False
    """True if it gets the script's own arguments, as "$@"."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set where it stands, its own among them; some values may be `Unknown`."""


@dataclass
class _Scope:
    given: Mapping[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)

    def find(self, name: str) -> str:
        """The value of $name; of an array that of its first item."""
        if name in self.given:
            return self.given[name]
        if name in self.variables:
            return self.variables[name]
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else ""
        reason = f"argument {name} of the script" if name.isdigit() else "set by no line of the script"
        return Unknown(f"${name}", name, reason)

    def items(self, name: str) -> list[str]:
        """The items of ${name[@]}."""
        if name in self.given:
            return self.given[name].split()
        return list(self.arrays[name]) if name in self.arrays else [self.find(name)]

    def forget(self, name: str, reason: str) -> None:
        """Have a variable without a known value from here on."""
        self.arrays.pop(name, None)
        self.variables[name] = Unknown(f"${name}", name, reason)


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]\n]*\])?(\+?=)")
_DESCRIPTOR = re.compile(r"[0-9]+(?=[<>])")
_HERE = re.compile(r"<<-?[ \t]*(['\"]?)([A-Za-z0-9_]+)\1")
_FUNCTION = re.compile(
    r"(?:function[ \t]+)?([A-Za-z_][\w-]*)[ \t]*\(\)[ \t\n]*|function[ \t]+([A-Za-z_][\w-]*)[ \t\n]*"
)
_OPENING = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
_BEFORE = {"then", "else", "elif", "do", "{", "!", "time", "export", "declare", "local", "readonly", "typeset"}
"""Words behind which an assignment may stand."""
_SETTERS = {"export", "declare", "local", "readonly", "typeset"}
_SILENT = {
    *_SETTERS,
    "set",
    "shift",
    "cd",
    "source",
    ".",
    "{",
    "}",
    "fi",
    "done",
    "esac",
    "unset",
    "read",
    "let",
    "trap",
}
"""Words of statements that are no command of a program."""
_SEPARATORS = ("&&", "||", ";;", "\n", ";", "&", "|")


def read_commands(text: str, given: Mapping[str, str] | None = None) -> list[Command]:
    """The commands of a script, in their order.

    `given` are values of variables that take the place of the script's; "@" names its own arguments. InvalidConfig for
    what is no script of a shell.
    """
    reader = _Reader(text, _Scope(given or {}))
    reader.read()
    return reader.commands


class _Reader:
    def __init__(self, text: str, scope: _Scope):
        self.text, self.place, self.scope = text.replace("\r\n", "\n"), 0, scope
        self.commands = list[Command]()
        self.blocks = list[tuple[str, str]]()
        """Word that closes each block that is open, and words for it."""
        self.separator = "\n"
        """Separator before the statement that is read."""
        self.here = list[str]()
        """Words that end here-documents of the line that is read."""
        self.passes_arguments = False

    @property
    def line(self) -> int:
        """The number of the line at the reader's place."""
        return self.text.count("\n", 0, self.place) + 1

    @property
    def condition(self) -> str:
        """Words for what decides whether the statement here runs; empty where it always does."""
        closing = [what for end, what in self.blocks if what]
        if closing:
            return f"set inside of {closing[0]}"
        return f"set behind `{self.separator}` on line {self.line}" if self.separator in ("&&", "||") else ""

    def read(self) -> None:
        """Read all statements, and note their commands."""
        while True:
            self._pass_space()
            if self.place >= len(self.text):
                break
            if not self._pass_separator():
                self._read_statement()
        if self.blocks:
            end, what = self.blocks[-1]
            raise InvalidConfig(f"{what or 'a block'} has no `{end}`")

    def _pass_separator(self) -> bool:
        for each in _SEPARATORS:
            if self.text.startswith(each, self.place):
                self.place += len(each)
                self.separator = each
                if each == "\n":
                    self._pass_documents()
                return True
        return False

    def _pass_documents(self) -> None:
        for end in self.here:
            match = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(self.text, self.place)
            self.place = len(self.text) if match is None else match.end()
        self.here = []

    # Statements

    def _read_statement(self) -> None:
        line, words = self.line, list[str]()
        self.passes_arguments = False
        if (match := _FUNCTION.match(self.text, self.place)) and self._opens_body(match.end()):
            self.place = match.end() + 1
            self.blocks.append(("}", f"the function {match[1] or match[2]} of line {line}"))
            return
        if self.text.startswith("((", self.place):
            self._pass_arithmetic(line)
            return
        if self.text[self.place] == "(":
            self.place += 1
            self.blocks.append((")", f"the parentheses of line {line}"))
            return
        while self.place < len(self.text) and not self.text.startswith(_SEPARATORS, self.place):
            if all(word in _BEFORE for word in words) and self._read_assignment():
                self._pass_space()
                continue
            here = self.text[self.place]
            if here == ")":
                self.place += 1
                if self.blocks and self.blocks[-1][0] == ")":
                    self.blocks.pop()
                elif self.blocks and self.blocks[-1][0] == "esac":
                    words = []  # a pattern, behind which statements follow
                    self._pass_space()
                    continue
                break
            if here in "<>":
                self._pass_redirection()
            elif match := _DESCRIPTOR.match(self.text, self.place):
                self.place = match.end()
            else:
                words += self._read_word()
                self._open_or_close(words, line)
                if words and words[0] in ("if", "while", "until"):
                    words = []
            self._pass_space()
        self._note(words, line)

    def _opens_body(self, place: int) -> bool:
        return self.text[place : place + 1] == "{"

    def _open_or_close(self, words: list[str], line: int) -> None:
        """Open or close a block by the word that was read last, where it stands first of a statement."""
        word = words[-1]
        if any(each not in _BEFORE for each in words[:-1]) or isinstance(word, Unknown):
            return
        if word in _OPENING:
            self.blocks.append((_OPENING[word], f"the `{word}` of line {line}"))
        elif word == "{":
            self.blocks.append(("}", ""))
        elif word in (*_OPENING.values(), "}"):
            if not self.blocks or self.blocks[-1][0] != word:
                raise InvalidConfig(f"line {line}: `{word}` closes nothing")
            self.blocks.pop()

    def _note(self, words: list[str], line: int) -> None:
        """Note a command, or forget what a statement sets."""
        bare = [word for word in words if word not in ("then", "else", "do", "{", "!", "time")]
        if not bare:
            return
        if bare[0] in ("unset", "read", "let", "mapfile", "readarray", "for", "select"):
            names = [match[0] for word in bare[1:] if (match := _NAME.match(word))]
            names = names[:1] if bare[0] in ("for", "select") else names
            for name in names:
                self.scope.forget(name, self.condition or f"set by `{bare[0]}` on line {line}")
        if bare[0] in _SILENT or bare[0] in _OPENING:
            return
        found = Command(tuple(bare), line, self._find_block(), self.passes_arguments, dict(self.scope.variables))
        self.commands.append(found)

    def _find_block(self) -> str:
        return next((what for _, what in self.blocks if what), "")

    def _pass_arithmetic(self, line: int) -> None:
        """Pass over ((…)); what it may set is not known."""
        begin = self.place + 2
        self.place = self._find_close(begin, "(", ")", line, depth=2)
        for name in _NAME.findall(self.text[begin : self.place - 2]):
            self.scope.forget(name, f"set by arithmetic on line {line}")

    def _pass_redirection(self) -> None:
        if match := _HERE.match(self.text, self.place):
            self.here.append(match[2])
            self.place = match.end()
            return
        while self.place < len(self.text) and self.text[self.place] in "<>&|":
            self.place += 1
        if self.text[self.place : self.place + 1] == "(":
            self.place = self._find_close(self.place + 1, "(", ")", self.line)
            return
        self._pass_space()
        if not self._is_at_end():
            self._read_word()

    def _read_assignment(self) -> bool:
        """Read NAME=value, NAME+=value or NAME=(…), and note it; False where there is none."""
        match = _ASSIGNMENT.match(self.text, self.place)
        if match is None:
            return False
        name, adds, condition = match[1], match[3] == "+=", self.condition
        self.place = match.end()
        if self.text[self.place : self.place + 1] == "(":
            self.place += 1
            values = self._read_array()
            self.scope.arrays[name] = (self.scope.items(name) if adds and self._is_set(name) else []) + values
            self.scope.variables.pop(name, None)
        else:
            value = _join(self._read_text(" \t\n;&|)"))
            if adds:
                value = _join([self.scope.find(name) if self._is_set(name) else "", value])
            if name in self.scope.arrays:
                self.scope.arrays.pop(name)
            self.scope.variables[name] = value
        if match[2]:
            condition = condition or f"an item set on line {self.line}"
        if condition:
            self.scope.forget(name, condition)
        return True

    def _is_set(self, name: str) -> bool:
        return name in self.scope.variables or name in self.scope.arrays or name in self.scope.given

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
            if here in " \t" or (lines and here in "\n"):
                self.place += 1
            elif self.text.startswith("\\\n", self.place):
                self.place += 2
            elif here == "#" and (self.place == 0 or self.text[self.place - 1] in " \t\n;("):
                end = self.text.find("\n", self.place)
                self.place = len(self.text) if end < 0 else end
            else:
                return

    def _read_word(self) -> list[str]:
        """The words that one word becomes: several where a variable outside of quotes holds blanks, or an array."""
        begin, words = self.place, _Words()
        while not self._is_at_end():
            here = self.text[self.place]
            if here == '"':
                self._read_quoted(words)
            elif here in "$`":
                self._expand(words, splits=True)
            elif here in "<>":
                break
            elif here == "(":
                self.place = self._find_close(self.place + 1, "(", ")", self.line)
                words.add(Unknown(self.text[begin : self.place], "", f"nothing that is read here, on line {self.line}"))
            else:
                words.add(self._read_character())
        return words.finish()

    def _read_character(self) -> str:
        """One character, or all between single quotes."""
        here = self.text[self.place]
        if here == "'":
            return self._read_until("'")
        if here == "\\":
            self.place += 2
            return self.text[self.place - 1 : self.place].replace("\n", "")
        self.place += 1
        return here

    def _read_until(self, end: str) -> str:
        line, begin = self.line, self.place + 1
        close = self.text.find(end, begin)
        if close < 0:
            raise InvalidConfig(f"line {line}: a quote is not closed")
        self.place = close + 1
        return self.text[begin:close]

    def _read_quoted(self, words: "_Words") -> None:
        line = self.line
        self.place += 1
        words.quote()
        while self.place < len(self.text) and self.text[self.place] != '"':
            here = self.text[self.place]
            if here == "\\" and self.text[self.place + 1 : self.place + 2] in ('"', "\\", "$", "`", "\n"):
                words.add(self.text[self.place + 1].replace("\n", ""))
                self.place += 2
            elif here in "$`":
                self._expand(words, splits=False)
            else:
                words.add(here)
                self.place += 1
        if self.place >= len(self.text):
            raise InvalidConfig(f"line {line}: a quote is not closed")
        self.place += 1

    def _read_text(self, ends: str) -> list[str]:
        """Parts of a text that is one word whatever it holds, as behind = or in a default."""
        words = _Words()
        while self.place < len(self.text) and self.text[self.place] not in ends:
            here = self.text[self.place]
            if here == '"':
                self._read_quoted(words)
            elif here in "$`":
                self._expand(words, splits=False)
            else:
                words.add(self._read_character())
        return [
            _join([word, " "]) if number < len(words.found) - 1 else word for number, word in enumerate(words.all())
        ]

    def _expand(self, words: "_Words", *, splits: bool) -> None:
        """Add the value of what begins with $ or a backquote."""
        line, begin = self.line, self.place
        if self.text[begin] == "`":
            words.add(Unknown(f"`{self._read_until('`')}`", "", f"the output of a command, on line {line}"))
            return
        rest = self.text[begin + 1 :]
        if rest.startswith("(("):
            self.place = self._find_close(begin + 3, "(", ")", line, depth=2)
            words.add(self._compute(self.text[begin + 3 : self.place - 2], line))
        elif rest.startswith("("):
            self.place = self._find_close(begin + 2, "(", ")", line)
            words.add(Unknown(self.text[begin : self.place], "", f"the output of a command, on line {line}"))
        elif rest.startswith("{"):
            self.place = self._find_close(begin + 2, "{", "}", line)
            self._add_braces(self.text[begin + 2 : self.place - 1], words, line, splits=splits)
        elif match := _NAME.match(rest) or re.match(r"[0-9@*#?$!-]", rest):
            self.place = begin + 1 + match.end()
            self._add_named(match[0], words, splits=splits)
        else:
            self.place += 1
            words.add("$")

    def _find_close(self, begin: int, opening: str, closing: str, line: int, depth: int = 1) -> int:
        """The place behind what closes a bracket, whose inside begins at `begin`."""
        place, quote = begin, ""
        while depth:
            if place >= len(self.text):
                raise InvalidConfig(f"line {line}: {opening} is not closed")
            here = self.text[place]
            if here == "\\":
                place += 1
            elif quote:
                quote = "" if here == quote else quote
            elif here in "'\"":
                quote = here
            else:
                depth += (here == opening) - (here == closing)
            place += 1
        return place

    def _add_named(self, name: str, words: "_Words", *, splits: bool) -> None:
        if name in ("@", "*"):
            if "@" in self.scope.given:
                words.add_items(self.scope.given["@"].split())
            else:
                self.passes_arguments = True
                words.add_items([])
        else:
            words.add_value(self.scope.find(name), splits=splits)

    def _add_braces(self, inside: str, words: "_Words", line: int, *, splits: bool) -> None:
        match = re.match(r"([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*])(.*)", inside, re.DOTALL)
        name, rest = (match[1], match[2]) if match else ("", inside)
        if name and rest in ("[@]", "[*]"):
            items = self.scope.items(name)
            if rest == "[*]" and not splits:
                words.add(_join([part for item in items for part in (item, " ")][:-1]))
            else:
                words.add_items(items, splits=splits)
        elif name and not rest:
            self._add_named(name, words, splits=splits)
        elif name and (rest[:2] in (":-", ":=", ":?") or rest[:1] in ("-", "=", "?")):
            words.add_value(self._choose_default(name, rest), splits=splits)
        else:
            words.add(Unknown(f"${{{inside}}}", name, f"nothing that is read here, on line {line}"))

    def _choose_default(self, name: str, rest: str) -> str:
        value, has_colon = self.scope.find(name), rest[0] == ":"
        default = rest[1 + has_colon :]
        is_unset = isinstance(value, Unknown) and value.reason.startswith(("set by no", "argument"))
        if "?" in rest[: 1 + has_colon] or (isinstance(value, Unknown) and not is_unset):
            return value
        if not is_unset and (value or not has_colon):
            return value
        inner = _Reader(default, self.scope)
        return _join(inner._read_text(""))

    def _compute(self, text: str, line: int) -> str:
        """The value of an expression of whole numbers and variables."""
        unknown = Unknown(f"$(({text}))", "", f"arithmetic that is not read here, on line {line}")
        found = list[Unknown]()

        def fill(match: re.Match[str]) -> str:
            value = self.scope.find(match[1] or match[2])
            if isinstance(value, Unknown):
                found.append(value)
            return f"({value or 0})"

        if "${" in re.sub(r"\$\{\w+\}", "", text):
            return unknown
        filled = re.sub(r"\$\{?(\w+)\}?|(?<![\w.])([A-Za-z_]\w*)", fill, text)
        if found:
            return Unknown(f"$(({text}))", found[0].variable, found[0].reason)
        try:
            return str(_evaluate(ast.parse(filled.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, TypeError, RecursionError, MemoryError):
            return unknown


class _Words:
    """Words that grow by the parts of one word of a script."""

    def __init__(self) -> None:
        self.found: list[list[str]] = [[]]
        self.is_quoted = [False]
        self.has_ended = False

    def _begin(self) -> None:
        self.found.append([])
        self.is_quoted.append(False)
        self.has_ended = False

    def quote(self) -> None:
        """Have the word even if it is empty."""
        if self.has_ended:
            self._begin()
        self.is_quoted[-1] = True

    def add(self, part: str) -> None:
        """Add to the last word."""
        if self.has_ended and part:
            self._begin()
        self.found[-1].append(part)

    def add_value(self, value: str, *, splits: bool) -> None:
        """Add a variable's value, which is several words where it has blanks and stands outside of quotes."""
        if isinstance(value, Unknown) or not splits:
            self.add(value)
            return
        parts = value.split()
        if value[:1].isspace() and any(self.found[-1]):
            self.has_ended = True
        for number, part in enumerate(parts):
            if number:
                self._begin()
            self.add(part)
        if parts and value[-1:].isspace():
            self.has_ended = True

    def add_items(self, items: list[str], *, splits: bool = False) -> None:
        """Add an array's items, each a word; no word at all where there are none."""
        if not items and self.is_quoted[-1] and not any(self.found[-1]):
            self.is_quoted[-1] = False
        for number, item in enumerate(items):
            if number:
                self._begin()
                self.is_quoted[-1] = not splits
            self.add_value(item, splits=splits)

    def all(self) -> list[str]:
        """The words, empty ones too."""
        return [_join(parts) for parts in self.found]

    def finish(self) -> list[str]:
        """The words of a command."""
        return [word for word, quoted in zip(self.all(), self.is_quoted, strict=True) if word or quoted]


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _evaluate(left), _evaluate(right)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div():  # towards zero, as shells do
                    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
                case ast.Mod():
                    return a - b * (abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
    raise ValueError(node)


def _join(parts: list[str]) -> str:
    """Parts of a word as one; unknown if a part is."""
    unknown = [each for each in parts if isinstance(each, Unknown)]
    text = "".join(parts)
    return Unknown(text, unknown[0].variable, unknown[0].reason) if unknown else text
