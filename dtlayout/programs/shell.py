"""Shell: the commands of a script, with its variables filled in. Nothing is run.

Read are assignments, `export`, arrays, defaults such as ${A:-1}, whole numbers in $((…)), ((…)), `let` and $(expr …),
quotes, comments and here-documents. A value that is set inside of a condition, a loop or a function, by a command, or
by the script's own arguments is an `Unknown` word, which says so and for which a caller may give a value.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.arithmetic import evaluate


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
_OF_EXPR = re.compile(r"-?[0-9]+|[-+*/%()]|[<>]=?|!=|==?")
"""Words of expr whose meaning is that of arithmetic."""
_SETS = re.compile(r"([A-Za-z_]\w*)[ \t\n]*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)[ \t\n]*([A-Za-z_]\w*)")
"""An assignment inside of an expression."""
_SEPARATORS = ("&&", "||", ";;", "\n", ";", "&", "|")


def read_commands(text: str, given: Mapping[str, str] | None = None) -> list[Command]:
    """The commands of a script, in their order.

    `given` are values of variables that take the place of the script's; "@" names its own arguments. InvalidConfig for
    what is no script of a shell.
    """
    reader = _Reader(text, _Scope(given or {}))
    reader.read()
    return reader.commands


class _UnsaidError(Exception):
    def __init__(self, value: Unknown):
        self.value = value


class _Reader:
    def __init__(self, text: str, scope: _Scope, first_line: int = 1):
        self.text, self.place, self.scope, self.first_line = text.replace("\r\n", "\n"), 0, scope, first_line
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
        return self.text.count("\n", 0, self.place) + self.first_line

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
        if self.text[self.place] == "(" and not self.text.startswith("((", self.place):
            self.place += 1
            self.blocks.append((")", f"the parentheses of line {line}"))
            return
        while self.place < len(self.text) and not self.text.startswith(_SEPARATORS, self.place):
            if self._may_assign(words) and self._read_assignment(is_number=self._sets_numbers(words)):
                self._pass_space()
                continue
            here = self.text[self.place]
            is_loop, is_first = words == ["for"], all(word in _BEFORE for word in words)
            if self.text.startswith("((", self.place) and (is_first or is_loop):
                self._read_arithmetic(is_loop=is_loop)
                self._pass_space()
                continue
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

    def _may_assign(self, words: list[str]) -> bool:
        """True where an assignment may stand behind some words of a statement."""
        plain = [word for word in words if not word.startswith(("-", "+"))]
        return all(word in _BEFORE for word in plain) and (plain == words or (plain[:1] != [] and plain[0] in _SETTERS))

    def _sets_numbers(self, words: list[str]) -> bool:
        """True behind declare -i, whose values are expressions."""
        return any(word.startswith("-") and "i" in word for word in words)

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
        if bare[0] == "let":
            for word in bare[1:]:
                if isinstance(word, Unknown):
                    for name in _list_set(word):
                        self.scope.forget(name, word.reason)
                else:
                    self._compute(word, line)
        if bare[0] in ("unset", "read", "mapfile", "readarray", "for", "select"):
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

    def _read_arithmetic(self, *, is_loop: bool) -> None:
        """Read ((…)), and note what it sets; what a loop counts is not known."""
        line, begin = self.line, self.place + 2
        self.place = self._find_close(begin, "(", ")", line, depth=2)
        text = self.text[begin : self.place - 2]
        if is_loop:
            for name in _list_set(text):
                self.scope.forget(name, self.condition)
        else:
            self._compute(text, line)

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

    def _read_assignment(self, *, is_number: bool) -> bool:
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
            if is_number:
                value = self._compute(value, self.line)
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
            self._add_output(re.sub(r"\\([$`\\])", r"\1", self._read_until("`")), begin, words)
            return
        rest = self.text[begin + 1 :]
        if rest.startswith("(("):
            self.place = self._find_close(begin + 3, "(", ")", line, depth=2)
            words.add(self._compute(self.text[begin + 3 : self.place - 2], line))
        elif rest.startswith("("):
            self.place = self._find_close(begin + 2, "(", ")", line)
            self._add_output(self.text[begin + 2 : self.place - 1], begin, words)
        elif rest.startswith("["):
            self.place = self._find_close(begin + 2, "[", "]", line)
            words.add(self._compute(self.text[begin + 2 : self.place - 1], line))
        elif rest.startswith("{"):
            self.place = self._find_close(begin + 2, "{", "}", line)
            self._add_braces(self.text[begin + 2 : self.place - 1], words, line, splits=splits)
        elif match := _NAME.match(rest) or re.match(r"[0-9@*#?$!-]", rest):
            self.place = begin + 1 + match.end()
            self._add_named(match[0], words, splits=splits)
        else:
            self.place += 1
            words.add("$")

    def _add_output(self, inside: str, begin: int, words: "_Words") -> None:
        """Add the output of a command, whose text begins here."""
        line, text = self.line, self.text[begin : self.place]
        output = self._compute_output(inside, line)
        if output is None or isinstance(output, Unknown):
            variable, reason = (output.variable, output.reason) if output is not None else ("", "")
            output = Unknown(text, variable, reason or f"the output of a command, on line {line}")
        words.add(output)

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
        inner = _Reader(default, self.scope, self.line)
        return _join(inner._read_text(""))

    # Arithmetic

    def _compute(self, text: str, line: int) -> str:
        """The value of an expression, which may set variables."""
        filled = self._fill(text, line)
        try:
            if isinstance(filled, Unknown):
                raise _UnsaidError(filled)
            return str(evaluate(filled, self._find_known, lambda name, value: self._set(name, str(value))))
        except _UnsaidError as error:
            value = Unknown(f"$(({text}))", error.value.variable, error.value.reason)
            for name in _list_set(filled):
                self._set(name, value)
        except (ValueError, RecursionError):
            value = Unknown(f"$(({text}))", "", f"arithmetic that is not read here, on line {line}")
            for name in _list_set(filled):
                self.scope.forget(name, f"set by arithmetic on line {line}")
        return value

    def _fill(self, text: str, line: int) -> str:
        """The text of an expression with values in the place of what begins with $."""
        inner, words = _Reader(text, self.scope, line), _Words()
        inner.blocks, inner.separator = self.blocks, self.separator
        while inner.place < len(inner.text):
            here = inner.text[inner.place]
            if here in "$`":
                inner._expand(words, splits=False)
            else:
                words.add("" if here in '"\\' else here)
                inner.place += 1
        return _join(words.all())

    def _find_known(self, name: str) -> str:
        value = self.scope.find(name)
        if isinstance(value, Unknown):
            raise _UnsaidError(value)
        return value

    def _set(self, name: str, value: str) -> None:
        """Note the value of a variable that a statement here sets."""
        self.scope.arrays.pop(name, None)
        self.scope.variables[name] = value
        if condition := self.condition:
            self.scope.forget(name, condition)

    def _compute_output(self, text: str, line: int) -> str | None:
        """The output of $(expr …) alone; None for other commands."""
        inner = _Reader(text, _Scope(self.scope.given, dict(self.scope.variables), dict(self.scope.arrays)), line)
        try:
            inner.read()
        except InvalidConfig:
            return None
        if len(inner.commands) != 1 or inner.commands[0].words[0] not in ("expr", "/usr/bin/expr"):
            return None
        words = inner.commands[0].words[1:]
        if unknown := next((word for word in words if isinstance(word, Unknown)), None):
            return unknown
        if not all(_OF_EXPR.fullmatch(word) for word in words):
            return None
        signs = ["==" if word == "=" else str(int(word)) if word.lstrip("-").isdigit() else word for word in words]
        try:
            return str(evaluate(" ".join(signs), str, lambda name, value: None))
        except ValueError:
            return None


_PARTS = re.compile(r"(?:\$\([^()]*\)|`[^`]*`|\S)+")
"""A word of a text, in which a command may have blanks."""
_NESTED = re.compile(r"\$\([^()]*\(|\$\{[^}]*\s")


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
        if not splits or (isinstance(value, Unknown) and _NESTED.search(value)):
            self.add(value)
            return
        parts = value.split()
        if isinstance(value, Unknown):  # of a value that is known but for some parts, the others are words
            texts = _PARTS.findall(value)
            parts = [
                Unknown(part, value.variable, value.reason) if "$" in part or "`" in part else part for part in texts
            ]
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


def _join(parts: list[str]) -> str:
    """Parts of a word as one; unknown if a part is."""
    unknown = [each for each in parts if isinstance(each, Unknown)]
    text = "".join(parts)
    return Unknown(text, unknown[0].variable, unknown[0].reason) if unknown else text


def _list_set(text: str) -> list[str]:
    """Variables that an expression sets."""
    return [match[1] or match[2] for match in _SETS.finditer(text)]
