"""Arithmetic of a shell: whole numbers of 64 bits, variables and assignments, as bash computes them. Nothing is run.

Operators and their order are those of bash; arrays are not read.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count

_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+#\w+|\d\w*|[A-Za-z_]\w*"
    r"|<<=|>>=|\*\*|\+\+|--|&&|\|\||<<|>>|<=|>=|==|!=|[-+*/%&|^]=|[-+*/%<>=!~&|^?:,()])",
    re.ASCII,
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_BITS = 64
_DEEPEST = 60
"""Most brackets, and variables of variables, inside of each other."""
_LONGEST = 10_000
"""Most letters of an expression."""
_MOST_USES = 1000
"""Most uses of variables in one."""
_LARGEST_BASE = 36
"""Largest base of a number whose letters may be small or large."""
_COMPUTE: Mapping[str, Callable[[int, int], int]] = {
    "|": lambda a, b: a | b, "^": lambda a, b: a ^ b, "&": lambda a, b: a & b,
    "==": lambda a, b: a == b, "!=": lambda a, b: a != b, "<": lambda a, b: a < b, ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b, ">=": lambda a, b: a >= b,
    "<<": lambda a, b: a << (b % _BITS), ">>": lambda a, b: a >> (b % _BITS),
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
    "/": lambda a, b: _divide(a, b), "%": lambda a, b: a - b * _divide(a, b),
}  # fmt: skip
"""Operator of two numbers → its function."""
_LEVELS: Sequence[tuple[str, ...]] = (
    ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"), ("*", "/", "%"),
)  # fmt: skip
"""Operators of two numbers, those that bind less first; && and || bind less than all, and ** binds more."""
_SUMS = _LEVELS.index(("+", "-"))
"""Level of sums."""
_ASSIGNS = ("=", "*=", "/=", "%=", "+=", "-=", "<<=", ">>=", "&=", "^=", "|=")


def evaluate(text: str, find: Callable[[str], str], put: Callable[[str, int], None]) -> int:
    """The value of an expression.

    `find` says the text of a variable, and may raise what it likes; `put` sets one. ValueError for what is no such
    expression, or has no value.

    >>> evaluate("2 ** 3 - (7 % 4 > 2 ? A : 0)", {"A": "3"}.__getitem__, print)
    5
    """
    return _evaluate(text, find, put, 0, count())


def _evaluate(
    text: str, find: Callable[[str], str], put: Callable[[str, int], None], depth: int, uses: Iterator[int]
) -> int:
    if depth > _DEEPEST or len(text) > _LONGEST or next(uses) > _MOST_USES:
        raise ValueError(text)
    parser = _Parser(text, find, put, depth, uses)
    return parser.read() if parser.tokens else 0


class _Parser:
    """Reads an expression and computes it on the way; a part that does not count has no effect."""

    def __init__(
        self, text: str, find: Callable[[str], str], put: Callable[[str, int], None], depth: int, uses: Iterator[int]
    ):
        self.find, self.put, self.depth, self.uses = find, put, depth, uses
        self.tokens, self.place, self.skips = list[str](), 0, 0
        end = 0
        while match := _TOKEN.match(text, end):
            self.tokens.append(match[1])
            end = match.end()
        if text[end:].strip():
            raise ValueError(text)

    def read(self) -> int:
        value = self._read_list()
        if self.place < len(self.tokens):
            raise ValueError(self.tokens[self.place])
        return value

    def _see(self, offset: int = 0) -> str:
        place = self.place + offset
        return self.tokens[place] if place < len(self.tokens) else ""

    def _take(self, *tokens: str) -> str:
        """The token here if it is one of some, which is then passed; empty otherwise."""
        token = self._see()
        if token not in tokens:
            return ""
        self.place += 1
        return token

    def _need(self, token: str) -> None:
        if not self._take(token):
            raise ValueError(f"no {token}")

    def _read_list(self) -> int:
        value = self._read_assignment()
        while self._take(","):
            value = self._read_assignment()
        return value

    def _read_assignment(self) -> int:
        name = self._see()
        if not (_NAME.fullmatch(name) and self._see(1) in _ASSIGNS):
            return self._read_choice()
        self.place += 1
        operator = self._take(*_ASSIGNS)
        before = self._look_up(name) if operator != "=" else 0
        value = self._read_assignment()
        return self._set(name, value if operator == "=" else self._compute(operator[:-1], before, value))

    def _read_choice(self) -> int:
        condition = self._read_or()
        if not self._take("?"):
            return condition
        first = self._read_if(bool(condition), self._read_list)
        self._need(":")
        second = self._read_if(not condition, self._read_choice)
        return first if condition else second

    def _read_if(self, counts: bool, read: Callable[[], int]) -> int:
        self.skips += not counts
        try:
            return read()
        finally:
            self.skips -= not counts

    def _read_or(self) -> int:
        value = self._read_and()
        while self._take("||"):
            other = self._read_if(not value, self._read_and)
            value = int(bool(value or other))
        return value

    def _read_and(self) -> int:
        value = self._read_level(0)
        while self._take("&&"):
            other = self._read_if(bool(value), lambda: self._read_level(0))
            value = int(bool(value and other))
        return value

    def _read_level(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._read_power()
        value = self._read_level(level + 1)
        while True:
            operator = self._take(*_LEVELS[level])
            if not operator and level == _SUMS and self._see() in ("++", "--") and not _NAME.fullmatch(self._see(1)):
                operator = self._split_sign()  # as in 5--3
            if not operator:
                return value
            value = self._compute(operator, value, self._read_level(level + 1))

    def _split_sign(self) -> str:
        """Read two signs as one each, and pass over the first."""
        sign = self._see()[0]
        self.tokens[self.place : self.place + 1] = [sign, sign]
        self.place += 1
        return sign

    def _read_power(self) -> int:
        value = self._read_sign()
        if not self._take("**"):
            return value
        exponent = self._read_power()
        if exponent < 0:
            raise ValueError("an exponent below 0")
        return _wrap(pow(value, exponent, 1 << _BITS))

    def _read_sign(self) -> int:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise ValueError("too deep")
        try:
            match self._see():
                case "++" | "--" as operator if _NAME.fullmatch(self._see(1)):
                    self.place += 2
                    name = self.tokens[self.place - 1]
                    return self._set(name, self._look_up(name) + (1 if operator == "++" else -1))
                case "++" | "--":  # before a number: two signs
                    sign = self._split_sign()
                    value = self._read_sign()
                    return value if sign == "+" else _wrap(-value)
                case "+" | "-" | "!" | "~" as sign:
                    self.place += 1
                    value = self._read_sign()
                    return {"+": value, "-": _wrap(-value), "!": int(not value), "~": ~value}[sign]
            return self._read_operand()
        finally:
            self.depth -= 1

    def _read_operand(self) -> int:
        if self._take("("):
            value = self._read_list()
            self._need(")")
            return value
        token = self._see()
        self.place += 1
        if not _NAME.fullmatch(token):
            return _to_number(token)
        value = self._look_up(token)
        if operator := self._take("++", "--"):
            self._set(token, value + (1 if operator == "++" else -1))
        return value

    def _look_up(self, name: str) -> int:
        """The value of a variable, whose text is an expression too."""
        return 0 if self.skips else _evaluate(self.find(name), self.find, self.put, self.depth + 1, self.uses)

    def _set(self, name: str, value: int) -> int:
        value = _wrap(value)
        if not self.skips:
            self.put(name, value)
        return value

    def _compute(self, operator: str, one: int, other: int) -> int:
        if self.skips and operator in ("/", "%"):
            other = other or 1  # bash does not mind a division that it skips, but does mind an exponent
        return _wrap(int(_COMPUTE[operator](one, other)))


def _wrap(value: int) -> int:
    """A number in 64 bits with a sign."""
    half = 1 << (_BITS - 1)
    return (value + half) % (1 << _BITS) - half


def _divide(one: int, other: int) -> int:
    """A quotient, towards zero; ValueError for one by 0."""
    if other == 0:
        raise ValueError("division by 0")
    return abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)


def _to_number(token: str) -> int:
    """A number such as 8, 010, 0x8 or 2#1000; ValueError for another text."""
    if token[:2] in ("0x", "0X"):
        return _wrap(int(token, 16))
    base, mark, digits = token.partition("#")
    if mark:
        if not 2 <= int(base) <= _LARGEST_BASE or "_" in digits:
            raise ValueError(token)
        return _wrap(int(digits, int(base)))
    if not token.isdigit():
        raise ValueError(token)
    return _wrap(int(token, 8) if token.startswith("0") else int(token))
