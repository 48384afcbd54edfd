"""Conditions of a shell: tests whose words are known, as bash decides them. Nothing is run, and no file is looked at.

A decision is true, false, or an `Unknown` that says what decides it.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple


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


class Token(NamedTuple):
    """A part of [[ … ]]."""

    text: str
    """Value of the word, which may be `Unknown`."""
    pattern: str = ""
    """Pattern of the word, in which what was quoted stands for itself."""
    is_operator: bool = False
    """True for one that is not quoted, and holds no variable: it may be an operator."""


Decision = bool | Unknown
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b, "-ne": lambda a, b: a != b, "-lt": lambda a, b: a < b, "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b, "-ge": lambda a, b: a >= b,
}  # fmt: skip
"""Operator of two numbers → its function."""
_EQUAL, _ORDERS = ("=", "==", "!="), ("<", ">")
_BINARY = (*_NUMBERS, *_EQUAL, *_ORDERS, "-nt", "-ot", "-ef", "=~")
_OF_FILES = frozenset(f"-{letter}" for letter in "abcdefghkoprstuwxGLNORSv")
"""Tests of one word whose answer no script says."""
_UNARY = {"-z", "-n", *_OF_FILES}
_EXTENDED = re.compile(r"[?*+@!]\(")
"""Beginning of a pattern of bash that is not read here."""
_LETTERS = re.compile(r"[A-Za-z]")


def decide_test(words: Sequence[str]) -> Decision:
    """The answer of [ … ] with these words between the brackets; what is no test is false, as for bash.

    >>> decide_test(["4", "-gt", "2", "-a", "-n", "x"])
    True
    """
    return _decide([Token(word, is_operator=not isinstance(word, Unknown)) for word in words], _compare_words)


def decide_tokens(tokens: Sequence[Token]) -> Decision:
    """The answer of [[ … ]], in whose tokens && and || stand for -a and -o, and patterns behind == and !=."""
    signs = {"&&": "-a", "||": "-o"}
    changed = [each._replace(text=signs.get(each.text, each.text)) if each.is_operator else each for each in tokens]
    try:
        return _Parser(changed, _compare_patterns).read()
    except ValueError:
        return Unknown("", "", "a condition that is not read here")


def match_pattern(pattern: str, text: str) -> Decision:
    """True if a pattern of `case` or of [[ == ]] is that of a text."""
    for word in (pattern, text):
        if isinstance(word, Unknown):
            return word
    if _EXTENDED.search(pattern):
        return Unknown(pattern, "", "a pattern that is not read here")
    return fnmatch.fnmatchcase(text, pattern.replace("[^", "[!"))


def negate(decision: Decision) -> Decision:
    """The opposite of a decision."""
    return decision if isinstance(decision, Unknown) else not decision


def both(one: Decision, other: Decision) -> Decision:
    """True if both decisions are, false if one is false."""
    if one is False or other is False:
        return False
    return next((each for each in (one, other) if isinstance(each, Unknown)), True)


def either(*decisions: Decision) -> Decision:
    """True if one of some decisions is."""
    none: Decision = True
    return negate(reduce(both, map(negate, decisions), none))


Compare = Callable[[Token, str, Token], Decision]
_MOST_FIXED = 4
"""Most words of a test whose meaning follows from their number."""


def _decide(tokens: Sequence[Token], compare: Compare) -> Decision:
    """The answer of [ … ]: what words mean follows from their number, up to four."""
    number = len(tokens)
    texts = [token.text if token.is_operator else "" for token in tokens]
    if number == 0:
        return False
    if number == 1:
        return _is_long(tokens[0])
    if number == 3 and texts[1] in _BINARY:
        return compare(tokens[0], texts[1], tokens[2])
    if number <= _MOST_FIXED and texts[0] == "!":
        return negate(_decide(tokens[1:], compare))
    if number > 2 and number <= _MOST_FIXED and texts[0] == "(" and texts[-1] == ")":
        return _decide(tokens[1:-1], compare)
    try:
        return _Parser(tokens, compare).read()
    except ValueError:  # an error of the test, unless an unknown word makes one of it
        return _find_unknown(*tokens) or False


def _is_long(token: Token) -> Decision:
    return token.text if isinstance(token.text, Unknown) else token.text != ""


class _Parser:
    """Reads or, and, not, brackets and tests."""

    def __init__(self, tokens: Sequence[Token], compare: Compare):
        self.tokens, self.place, self.compare = tokens, 0, compare

    def read(self) -> Decision:
        answer = self._read_or()
        if self.place < len(self.tokens):
            raise ValueError(self.tokens[self.place])
        return answer

    def _sign(self, offset: int = 0) -> str:
        place = self.place + offset
        return self.tokens[place].text if place < len(self.tokens) and self.tokens[place].is_operator else ""

    def _take(self) -> Token:
        if self.place >= len(self.tokens):
            raise ValueError("a word is missing")
        self.place += 1
        return self.tokens[self.place - 1]

    def _read_joined(self, sign: str, read: Callable[[], Decision]) -> list[Decision]:
        found = [read()]
        while self._sign() == sign:
            self.place += 1
            found.append(read())
        return found

    def _read_or(self) -> Decision:
        return either(*self._read_joined("-o", self._read_and))

    def _read_and(self) -> Decision:
        return reduce(both, self._read_joined("-a", self._read_not))

    def _read_not(self) -> Decision:
        if self._sign() == "!" and self._sign(1) not in _BINARY:
            self.place += 1
            return negate(self._read_not())
        return self._read_test()

    def _read_test(self) -> Decision:
        if self._sign(1) in _BINARY and self.place + 2 < len(self.tokens):
            one, operator, other = self._take(), self._take().text, self._take()
            return self.compare(one, operator, other)
        if self._sign() == "(":
            self.place += 1
            answer = self._read_or()
            if self._take().text != ")":
                raise ValueError("a bracket is not closed")
            return answer
        if self._sign() in _UNARY and self.place + 1 < len(self.tokens):
            operator, word = self._take().text, self._take()
            if operator in _OF_FILES:
                return Unknown(f"{operator} {word.text}", "", "something outside of the script")
            return _is_long(word) if operator == "-n" else negate(_is_long(word))
        if self._sign() in (")", "-a", "-o"):
            raise ValueError(self._sign())
        return _is_long(self._take())


def _compare_words(one: Token, operator: str, other: Token) -> Decision:
    """The answer of a test of two words in [ … ]."""
    if unknown := _find_unknown(one, other):
        return unknown
    if operator in _NUMBERS:
        numbers = [re.fullmatch(r"\s*([+-]?\d+)\s*", token.text) for token in (one, other)]
        found = [int(number[1]) for number in numbers if number]
        return len(found) == len(numbers) and _NUMBERS[operator](*found)
    if operator in _EQUAL:
        return (one.text == other.text) is (operator != "!=")
    return _order(one.text, operator, other.text)


def _compare_patterns(one: Token, operator: str, other: Token) -> Decision:
    """The answer of a test of two words in [[ … ]]."""
    if unknown := _find_unknown(one, other):
        return unknown
    if operator in _NUMBERS:
        if not all(re.fullmatch(r"[+-]?(0|[1-9]\d*)", token.text.strip()) for token in (one, other)):
            return Unknown("", "", "a number that is not read here")
        return _NUMBERS[operator](int(one.text), int(other.text))
    if operator in _EQUAL:
        answer = match_pattern(other.pattern, one.text)
        return answer if operator != "!=" else negate(answer)
    return _order(one.text, operator, other.text)


def _order(one: str, operator: str, other: str) -> Decision:
    """The order of two texts, which for letters is that of a language."""
    if operator not in _ORDERS or _LETTERS.search(one + other):
        return Unknown("", "", "something outside of the script")
    return one < other if operator == "<" else one > other


def _find_unknown(*tokens: Token) -> Unknown | None:
    return next((each.text for each in tokens if isinstance(each.text, Unknown)), None)
