"""Words of a shell: variables, arrays, defaults, quotes and numbers, filled in as bash does it. Nothing is run."""

import glob
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.shell.arithmetic import evaluate
from dtlayout.programs.shell.branches import Branches
from dtlayout.programs.shell.conditions import Token, Unknown

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Name of a variable."""
_SETS = re.compile(r"([A-Za-z_]\w*)[ \t\n]*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)[ \t\n]*([A-Za-z_]\w*)")
"""An assignment inside of an expression."""


@dataclass
class Scope:
    """Variables of a script."""

    given: Mapping[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)
    """Variables that a line sets which is not run."""

    def find(self, name: str) -> str:
        """The value of $name; of an array that of its first item."""
        if name in self.given:
            return self.given[name]
        if name in self.variables:
            return self.variables[name]
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else ""
        if "@" in self.given and (name.isdigit() or name == "#"):
            return self._find_argument(name)
        line = "no line that is run" if name in self.skipped else "no line of the script"
        reason = f"argument {name} of the script" if name.isdigit() else f"set by {line}"
        return Unknown(f"${name}", name, reason)

    def _find_argument(self, name: str) -> str:
        """An argument of the script, or their number, where they are given."""
        words = self.given["@"].split()
        if name == "#":
            return str(len(words))
        if name == "0":
            return Unknown("$0", "0", "the name of the script")
        return words[int(name) - 1] if int(name) <= len(words) else ""

    def items(self, name: str) -> list[str]:
        """The items of ${name[@]}."""
        if name in self.given:
            return self.given[name].split()
        return list(self.arrays[name]) if name in self.arrays else [self.find(name)]

    def forget(self, name: str, reason: str) -> None:
        """Have a variable without a known value from here on."""
        self.arrays.pop(name, None)
        self.variables[name] = Unknown(f"${name}", name, reason)


class _UnsaidError(Exception):
    def __init__(self, value: Unknown):
        self.value = value


class WordReader:
    """Reads words of a script, and computes what is known of their values."""

    def __init__(self, text: str, scope: Scope, first_line: int = 1):
        self.text, self.place, self.scope, self.first_line = text.replace("\r\n", "\n"), 0, scope, first_line
        self.branches = Branches()
        """Blocks that are open, and what is run."""
        self.passes_arguments = self.has_output = False

    @property
    def line(self) -> int:
        """The number of the line at the reader's place."""
        return self.text.count("\n", 0, self.place) + self.first_line

    @property
    def condition(self) -> str:
        """Words for what decides whether the statement here runs; empty where it always does."""
        branches = self.branches
        if (block := branches.unsaid) is not None:
            return block.reason or f"set inside of {block.what}" + (
                f", which ${block.decided_by} decides" if block.decided_by else ""
            )
        if branches.state != "unknown":
            return ""
        status = branches.status
        variable = status.variable if isinstance(status, Unknown) else ""
        what = f"set behind `{branches.separator}` on line {self.line}"
        return what + (f", which ${variable} decides" if variable else "")

    def _read_operand(self, ends: str) -> Token:
        """A word as a text and as a pattern, which is not split."""
        values, patterns, is_plain, begin = list[str](), list[str](), True, self.place
        while self.place < len(self.text) and self.text[self.place] not in ends:
            here, words = self.text[self.place], Words()
            self._read_part(words)
            value = join(words.all())
            is_plain = is_plain and here not in "'\"\\$`"
            quotes = here in "'\"\\" and not isinstance(value, Unknown)
            values.append(value)
            patterns.append(glob.escape(value) if quotes else value)
        if self.place == begin:
            raise InvalidConfig(f"line {self.line}: {self.text[begin : begin + 1]!r} stands where a word is read")
        return Token(join(values), join(patterns), is_plain)

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
        begin, words = self.place, Words()
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

    def _read_quoted(self, words: "Words") -> None:
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
        words = Words()
        while self.place < len(self.text) and self.text[self.place] not in ends:
            self._read_part(words)
        return [join([word, " "]) if number < len(words.found) - 1 else word for number, word in enumerate(words.all())]

    def _read_part(self, words: "Words") -> None:
        """Add what is quoted, a variable's value or a character, which is not split."""
        here = self.text[self.place]
        if here == '"':
            self._read_quoted(words)
        elif here in "$`":
            self._expand(words, splits=False)
        else:
            words.add(self._read_character())

    def _expand(self, words: "Words", *, splits: bool) -> None:
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
        elif match := NAME.match(rest) or re.match(r"[0-9@*#?$!-]", rest):
            self.place = begin + 1 + match.end()
            self._add_named(match[0], words, splits=splits)
        else:
            self.place += 1
            words.add("$")

    def _add_output(self, inside: str, begin: int, words: "Words") -> None:
        """Add the output of a command, whose text begins here."""
        self.has_output = True
        line, text = self.line, self.text[begin : self.place]
        output = self.find_output(inside, line)
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

    def _add_named(self, name: str, words: "Words", *, splits: bool) -> None:
        if name in ("@", "*"):
            if "@" in self.scope.given:
                words.add_items(self.scope.given["@"].split())
            else:
                self.passes_arguments = True
                words.add_items([])
        else:
            words.add_value(self.scope.find(name), splits=splits)

    def _add_braces(self, inside: str, words: "Words", line: int, *, splits: bool) -> None:
        match = re.match(r"([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*])(.*)", inside, re.DOTALL)
        name, rest = (match[1], match[2]) if match else ("", inside)
        if name and rest in ("[@]", "[*]"):
            items = self.scope.items(name)
            if rest == "[*]" and not splits:
                words.add(join([part for item in items for part in (item, " ")][:-1]))
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
        inner = type(self)(default, self.scope, self.line)
        value = join(inner._read_text(""))
        if "=" in rest[: 1 + has_colon]:
            self._set(name, value)
        return value

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
            for name in list_set(filled):
                self._set(name, value)
        except (ValueError, RecursionError):
            value = Unknown(f"$(({text}))", "", f"arithmetic that is not read here, on line {line}")
            for name in list_set(filled):
                self.scope.forget(name, f"set by arithmetic on line {line}")
        return value

    def _fill(self, text: str, line: int) -> str:
        """The text of an expression with values in the place of what begins with $."""
        inner, words = type(self)(text, self.scope, line), Words()
        inner.branches = self.branches
        while inner.place < len(inner.text):
            here = inner.text[inner.place]
            if here in "$`":
                inner._expand(words, splits=False)
            else:
                words.add("" if here in '"\\' else here)
                inner.place += 1
        return join(words.all())

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

    def find_output(self, text: str, line: int) -> str | None:
        """The output of commands, where it is known without running them; None for others."""
        return None


_PARTS = re.compile(r"(?:\$\([^()]*\)|`[^`]*`|\S)+")
"""A word of a text, in which a command may have blanks."""
_NESTED = re.compile(r"\$\([^()]*\(|\$\{[^}]*\s")


class Words:
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
        return [join(parts) for parts in self.found]

    def finish(self) -> list[str]:
        """The words of a command."""
        return [word for word, quoted in zip(self.all(), self.is_quoted, strict=True) if word or quoted]


def join(parts: list[str]) -> str:
    """Parts of a word as one; unknown if a part is."""
    unknown = [each for each in parts if isinstance(each, Unknown)]
    text = "".join(parts)
    return Unknown(text, unknown[0].variable, unknown[0].reason) if unknown else text


def list_set(text: str) -> list[str]:
    """Variables that an expression sets."""
    return [match[1] or match[2] for match in _SETS.finditer(text)]
