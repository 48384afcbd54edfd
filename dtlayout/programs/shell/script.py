"""Shell: the commands of a script, with its variables filled in. Nothing is run.

Read are assignments, `export`, arrays, defaults such as ${A:-1}, whole numbers in $((…)), ((…)), `let` and $(expr …),
quotes, comments and here-documents. Of `if`, `case`, && and || that part counts whose condition is true, where its
words are known. A value that is set where nobody knows whether it is, in a loop or a function, by a command, or by the
script's own arguments is an `Unknown` word, which says so and for which a caller may give a value.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.shell.arithmetic import evaluate
from dtlayout.programs.shell.branches import OPENING, UNSAID
from dtlayout.programs.shell.conditions import Decision, Token, decide_test, decide_tokens
from dtlayout.programs.shell.conditions import Unknown as Unknown
from dtlayout.programs.shell.words import NAME, Scope, WordReader, join, list_set


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


_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]\n]*\])?(\+?=)")
_DESCRIPTOR = re.compile(r"[0-9]+(?=[<>])")
_HERE = re.compile(r"<<-?[ \t]*(['\"]?)([A-Za-z0-9_]+)\1")
_FUNCTION = re.compile(
    r"(?:function[ \t]+)?([A-Za-z_][\w-]*)[ \t]*\(\)[ \t\n]*|function[ \t]+([A-Za-z_][\w-]*)[ \t\n]*"
)
_KEYWORD = re.compile(r"(if|then|elif|else|while|until|do|\{|!|time)(?=[\s;&|()<>]|$)")
"""A word behind which a statement of its own begins."""
_BEFORE = {"export", "declare", "local", "readonly", "typeset"}
"""Words behind which an assignment may stand."""
_SILENT = {*_BEFORE, "set", "shift", "cd", "source", ".", "}", "fi", "done", "esac", "unset", "read", "let", "trap"}
"""Words of statements that are no command of a program."""
_CLOSING = {*OPENING.values(), "}"}
_OF_EXPR = re.compile(r"-?[0-9]+|[-+*/%()]|[<>]=?|!=|==?")
"""Words of expr whose meaning is that of arithmetic."""
_SUCCEEDS: Decision = True
"""Status of an assignment."""
_SIGNS = ("]]", "&&", "||", "(", ")", "<", ">")
"""Signs of [[ … ]] that end a word."""
_SEPARATORS = ("&&", "||", ";;", "\n", ";", "&", "|")


def find_dead(text: str, given: Mapping[str, str] | None = None) -> list[tuple[int, int]]:
    """Begin and end of each statement of a script that is not run, since a condition is known and false.

    `given` and errors are those of `read_commands`.
    """
    reader = _Reader(text, Scope(given or {}))
    reader.read()
    places = [place for place in range(len(text)) if not text.startswith("\r\n", place)]
    places.append(len(text))
    return [(places[begin], places[end]) for begin, end in reader.dead]


def read_commands(text: str, given: Mapping[str, str] | None = None) -> list[Command]:
    """The commands of a script, in their order.

    `given` are values of variables that take the place of the script's; "@" names its own arguments. InvalidConfig for
    what is no script of a shell.
    """
    reader = _Reader(text, Scope(given or {}))
    reader.read()
    return reader.commands


class _Reader(WordReader):
    """Reads statements, and notes their commands."""

    def __init__(self, text: str, scope: Scope, first_line: int = 1):
        super().__init__(text, scope, first_line)
        self.commands = list[Command]()
        self.dead = list[tuple[int, int]]()
        """Begin and end of each statement that is not run."""
        self.here = list[str]()
        """Words that end here-documents of the line that is read."""
        self.has_statement = False

    def read(self) -> None:
        """Read all statements, and note their commands."""
        while True:
            self._pass_space()
            if self.place >= len(self.text):
                break
            if not self._pass_separator():
                self._read_next()
        if (block := self.branches.innermost) is not None:
            raise InvalidConfig(f"{block.what or 'a block'} has no `{block.end}`")

    def _pass_separator(self) -> bool:
        block = self.branches.innermost
        if block is not None and block.end == "esac" and self.text.startswith((";;&", ";&"), self.place):
            self.branches.fall_through()
            self.place = self.text.index("&", self.place) + 1
            return True
        for each in _SEPARATORS:
            if self.text.startswith(each, self.place):
                self.place += len(each)
                if each == ";;" and block is not None and block.end == "esac":
                    block.in_patterns = True
                if each != "\n" or self.has_statement or self.branches.separator not in ("&&", "||"):
                    self.branches.separator = each
                self.has_statement = False
                if each == "|":
                    self.branches.status = UNSAID
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

    def _read_next(self) -> None:
        """Read a statement; one that is not run has no effect but on blocks."""
        is_dead, begin, count = self.branches.state == "dead", self.place, len(self.commands)
        kept = (dict(self.scope.variables), dict(self.scope.arrays)) if is_dead else ({}, {})
        block = self.branches.innermost
        if block is not None and block.in_patterns:
            self._read_pattern()
        else:
            self._read_statement()
        self.has_statement = True
        if is_dead:
            self.scope.skipped |= (
                (self.scope.variables.keys() | self.scope.arrays.keys()) - kept[0].keys() - kept[1].keys()
            )
            self.scope.variables, self.scope.arrays = kept
            del self.commands[count:]
            self.dead.append((begin, self.place))

    def _read_statement(self) -> None:
        line, words = self.line, list[str]()
        self.passes_arguments = self.has_output = False
        if self._read_opening(line):
            return
        status, state = _SUCCEEDS, self.branches.state
        while self.place < len(self.text) and not self.text.startswith(_SEPARATORS, self.place):
            if self._may_assign(words) and self._read_assignment(is_number=self._sets_numbers(words)):
                status = UNSAID if self.has_output else status  # that of the command
                self._pass_space()
                continue
            here = self.text[self.place]
            is_loop = words == ["for"]
            if self.text.startswith("((", self.place) and (not words or is_loop):
                status = self._read_arithmetic(is_loop=is_loop)
                self._pass_space()
                continue
            if not words and re.compile(r"\[\[(?=\s)").match(self.text, self.place):
                status = self._read_double(line)
                self._pass_space()
                continue
            if here == ")":
                self.place += 1
                block = self.branches.innermost
                if block is not None and block.end == ")":
                    self.branches.close(")", line)
                    return
                break
            if here in "<>":
                self._pass_redirection()
            elif match := _DESCRIPTOR.match(self.text, self.place):
                self.place = match.end()
            else:
                words += self._read_word()
                if len(words) == 1 and words[0] in _CLOSING and not isinstance(words[0], Unknown):
                    self.branches.close(words[0], line)
                elif words == ["for"] or words == ["select"]:
                    self.branches.open(words[0], "done", f"the `{words[0]}` of line {line}")
            self._pass_space()
        self._note(words, line)
        if not words or words[0] not in _CLOSING:
            self.branches.note(_find_status(words) if words else status)
        if words[:1] == ["exit"] and state == "live":
            self.branches.has_ended = True

    def _read_opening(self, line: int) -> bool:
        """Read what opens a block or a branch, or stands before a statement; False for other statements."""
        if (match := _FUNCTION.match(self.text, self.place)) and self._opens_body(match.end()):
            self.place = match.end() + 1
            self.branches.open(
                "function", "}", f"the function {match[1] or match[2]} of line {line}"
            ).branch = "unknown"
            return True
        if self.text[self.place] == "(" and not self.text.startswith("((", self.place):
            self.place += 1
            self.branches.open("(", ")", f"the parentheses of line {line}").branch = "unknown"
            return True
        match = _KEYWORD.match(self.text, self.place)
        if match is None:
            return self._read_case(line)
        word, self.place = match[1], match.end()
        if word in OPENING:
            self.branches.open(word, OPENING[word], f"the `{word}` of line {line}")
        elif word == "{":
            condition = self.condition
            self.branches.open("{", "}", "").reason = condition
        elif word == "!":
            self.branches.negates = not self.branches.negates
        elif word != "time" and not self.branches.turn(word):
            raise InvalidConfig(f"line {line}: `{word}` belongs to nothing")
        return True

    def _read_case(self, line: int) -> bool:
        """Read `case WORD in`; False for other statements."""
        if not re.compile(r"case(?=\s)").match(self.text, self.place):
            return False
        self.place += len("case")
        block = self.branches.open("case", "esac", f"the `case` of line {line}")
        self._pass_space(lines=True)
        block.word = join(self._read_text(" \t\n;"))
        self._pass_space(lines=True)
        if not self.text.startswith("in", self.place):
            raise InvalidConfig(f"line {line}: `case` has no `in`")
        self.place += len("in")
        return True

    def _read_pattern(self) -> None:
        """Read the patterns of a branch of `case`, or the word that closes it."""
        line, patterns = self.line, list[str]()
        if re.compile(r"esac(?=[\s;&|()<>]|$)").match(self.text, self.place):
            self.branches.blocks[-1].in_patterns = False
            self._read_statement()
            return
        self.place += self.text[self.place] == "("
        while True:
            self._pass_space(lines=True)
            patterns.append(self._read_operand(" \t\n|)").pattern)
            self._pass_space(lines=True)
            if self.place >= len(self.text) or self.text[self.place] not in "|)":
                raise InvalidConfig(f"line {line}: a pattern of `case` has no `)`")
            self.place += 1
            if self.text[self.place - 1] == ")":
                break
        self.branches.enter_case(patterns)

    def _read_double(self, line: int) -> Decision:
        """The answer of [[ … ]]."""
        self.place += len("[[")
        tokens = list[Token]()
        while True:
            self._pass_space(lines=True)
            if self.place >= len(self.text):
                raise InvalidConfig(f"line {line}: `[[` has no `]]`")
            sign = next((each for each in _SIGNS if self.text.startswith(each, self.place)), "")
            if sign:
                self.place += len(sign)
                if sign == "]]":
                    return decide_tokens(tokens)
                tokens.append(Token(sign, sign, True))
            elif tokens and tokens[-1] == Token("=~", "=~", True):
                begin = self.place
                while self.place < len(self.text) and self.text[self.place] not in " \t\n":
                    self.place += 1
                reason = f"a pattern that is not read here, on line {line}"
                tokens.append(Token(Unknown(self.text[begin : self.place], "", reason)))
            else:
                tokens.append(self._read_operand(" \t\n&|()<>;"))

    def _may_assign(self, words: list[str]) -> bool:
        """True where an assignment may stand behind some words of a statement."""
        plain = [word for word in words if not word.startswith(("-", "+"))]
        return all(word in _BEFORE for word in plain) and (plain == words or plain != [])

    def _sets_numbers(self, words: list[str]) -> bool:
        """True behind declare -i, whose values are expressions."""
        return any(word.startswith("-") and "i" in word for word in words)

    def _opens_body(self, place: int) -> bool:
        return self.text[place : place + 1] == "{"

    def _note(self, words: list[str], line: int) -> None:
        """Note a command, or forget what a statement sets."""
        if not words or words[0] in ("[", "test"):
            return
        if words[0] == "let":
            for word in words[1:]:
                if isinstance(word, Unknown):
                    for name in list_set(word):
                        self.scope.forget(name, word.reason)
                else:
                    self._compute(word, line)
        if words[0] in ("unset", "read", "mapfile", "readarray", "for", "select"):
            names = [match[0] for word in words[1:] if (match := NAME.match(word))]
            names = names[:1] if words[0] in ("for", "select") else names
            for name in names:
                self.scope.forget(name, self.condition or f"set by `{words[0]}` on line {line}")
        if words[0] in _SILENT or words[0] in ("for", "select"):
            return
        found = Command(tuple(words), line, self._find_block(), self.passes_arguments, dict(self.scope.variables))
        self.commands.append(found)

    def _find_block(self) -> str:
        block = self.branches.unsaid
        return block.what if block is not None else ""

    def _read_arithmetic(self, *, is_loop: bool) -> Decision:
        """Read ((…)), and note what it sets; true where its value is not 0. What a loop counts is not known."""
        line, begin = self.line, self.place + 2
        self.place = self._find_close(begin, "(", ")", line, depth=2)
        text = self.text[begin : self.place - 2]
        if not is_loop:
            value = self._compute(text, line)
            return value if isinstance(value, Unknown) else value != "0"
        for name in list_set(text):
            self.scope.forget(name, self.condition)
        return True

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
            value = join(self._read_text(" \t\n;&|)"))
            if is_number:
                value = self._compute(value, self.line)
            if adds:
                value = join([self.scope.find(name) if self._is_set(name) else "", value])
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

    def find_output(self, text: str, line: int) -> str | None:
        """The output of $(expr …) alone; None for other commands."""
        inner = _Reader(text, Scope(self.scope.given, dict(self.scope.variables), dict(self.scope.arrays)), line)
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


def _find_status(words: list[str]) -> Decision:
    """The status of a command by its words alone."""
    name, last = words[0], words[-1]
    if name == "test" or (name == "[" and last == "]"):
        return decide_test(words[1 : None if name == "test" else -1])
    if name in ("true", ":", *_BEFORE):
        return True
    return False if name == "false" else UNSAID
