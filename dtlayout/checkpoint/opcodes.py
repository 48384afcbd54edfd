"""Reads a pickle without letting it call or change anything of this process.

A pickle is a program for a stack machine. Python's own machine gives it real classes, which an instruction may then
change for the whole process, and memory of whatever size it names. The machine here knows the instructions that the
pickler writes for objects with fields, and no others. A name in the file is looked up in a table that the caller gives
and nowhere else; what it finds there is a function of ours that makes a value.

Vocabulary: an object is a value whose fields are not known yet; items are a list or dict that still grows. Both are
used once their content is known, items in one place alone. So nothing holds itself, nothing changes after it was
checked, and time and memory grow with the file's length alone.
"""

import pickle
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

_INTEGER_BYTES = 8


class RefusedPickle(ValueError):
    """A pickle with something that is not in the tables, or that is cut or damaged."""


class Name(NamedTuple):
    """Two words of a file, and nothing else."""

    module: str
    name: str

    def __str__(self) -> str:
        text = f"{self.module}.{self.name}"
        return text if text.isprintable() and len(text) < 200 else ascii(text[:200])


@dataclass(frozen=True)
class AllowedNames:
    """Names that a file may have; their functions raise RefusedPickle where they cannot make a value."""

    constants: Mapping[Name, Any]
    """Names that are values."""
    functions: Mapping[Name, Callable[[tuple[Any, ...]], Any]]
    """Names that are called: from the arguments to a value."""
    objects: Mapping[Name, Callable[[Any], Any]]
    """Names of classes in the file: from the fields to a value, which is never None."""
    keys: Collection[type]
    """Types of a dict's keys, whose hashes take no longer than they are long."""


def parse(content: bytes, tables: AllowedNames) -> Any:
    """The value that a pickle of protocol 4 or 5 describes. Nothing that the file names is imported or called.

    `content` may be bytes, or anything that is indexed and sliced like them, such as a mapped file. `tables` has every
    name that the file may use, with our value or function for it. Bytes after the pickle's end are not read.

    RefusedPickle if the file uses another name or instruction, is cut, or is damaged. Its message begins with a verb
    ("asks for os.system, which is refused"): the caller writes the file's name before it.
    """
    try:
        return _Machine(content, tables).run()
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise RefusedPickle(f"is cut or damaged: {type(error).__name__}") from None


class _Object:
    """Stands for a value until its fields are known."""

    __slots__ = ("name", "value")

    def __init__(self, name: Name):
        self.name = name
        self.value: Any = None


class _Items:
    """A list or dict that grows until it is used."""

    __slots__ = ("content", "is_used")

    def __init__(self, content: Any):
        self.content, self.is_used = content, False


class _Machine:
    """Runs the instructions of one file."""

    def __init__(self, content: bytes, tables: AllowedNames):
        self._content, self._at, self._tables = content, 0, tables
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        content, find = self._content, _OPERATIONS.get
        while (code := content[self._at]) != _STOP:
            self._at += 1
            if (operation := find(code)) is None:
                raise RefusedPickle(f"has the instruction {bytes([code])!r}, which is refused")
            operation(self)
        if len(self._stack) != 1 or self._marks:
            raise RefusedPickle("does not describe exactly one value")
        return self._use(self._stack[0])

    # --- instructions that put something on the stack

    def _check_version(self) -> None:
        if self._read_number(1) not in (4, 5):
            raise RefusedPickle("is of another version than 4 or 5")

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _push_byte(self) -> None:
        self._stack.append(self._content[self._at])
        self._at += 1

    def _push_number(self, size: int, *, signed: bool = False) -> None:
        self._stack.append(self._read_number(size, signed=signed))

    def _push_long(self) -> None:
        if (size := self._read_number(1)) > _INTEGER_BYTES:
            raise RefusedPickle(f"has a number of {size} bytes; {_INTEGER_BYTES} are the most")
        self._push_number(size, signed=True)

    def _push_text(self, length_bytes: int) -> None:
        self._stack.append(str(self._read(self._read_number(length_bytes)), "utf-8"))

    def _push_named(self) -> None:
        word, module = self._stack.pop(), self._stack.pop()
        if type(module) is not str or type(word) is not str:
            raise RefusedPickle("has a name that is no text")
        name, tables = Name(module, word), self._tables
        if name in tables.constants:
            self._stack.append(tables.constants[name])
        elif name in tables.functions or name in tables.objects:
            self._stack.append(name)
        else:
            raise RefusedPickle(f"asks for {name}, which is refused")

    def _push_list(self) -> None:
        self._stack.append(_Items([]))

    def _push_dict(self) -> None:
        self._stack.append(_Items({}))

    def _push_kept(self) -> None:
        self._stack.append(self._memo[self._content[self._at]])
        self._at += 1

    def _push_kept_far(self) -> None:
        self._stack.append(self._memo[self._read_number(4)])

    # --- instructions that make something of what is on the stack

    def _make_tuple(self, size: int) -> None:
        parts = [self._use(self._stack.pop()) for _ in range(size)]
        self._stack.append(tuple(reversed(parts)))

    def _make_marked_tuple(self) -> None:
        self._stack.append(tuple(self._pop_marked()))

    def _append(self) -> None:
        value = self._use(self._stack.pop())
        self._top(list).append(value)

    def _append_marked(self) -> None:
        values = self._pop_marked()
        self._top(list).extend(values)

    def _set_item(self) -> None:
        value, key = self._use(self._stack.pop()), self._use(self._stack.pop())
        self._set([key, value])

    def _set_marked(self) -> None:
        self._set(self._pop_marked())

    def _set(self, entries: list[Any]) -> None:
        content = self._top(dict)
        if len(entries) % 2:
            raise RefusedPickle("has a key without a value")
        for key, value in zip(entries[::2], entries[1::2], strict=True):
            if type(key) not in self._tables.keys:
                raise RefusedPickle(f"has a key that is a {type(key).__name__}, which is refused")
            content[key] = value

    def _make_object(self) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        if type(name) is not Name or name not in self._tables.objects or arguments != ():
            raise RefusedPickle(f"makes an object of {_describe(name)}, which is refused")
        self._stack.append(_Object(name))

    def _set_fields(self) -> None:
        fields, made = self._use(self._stack.pop()), self._stack[-1]
        if type(made) is not _Object or made.value is not None:
            raise RefusedPickle(f"sets fields of {_describe(made)}, which is refused")
        made.value = self._tables.objects[made.name](fields)

    def _call(self) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        if type(name) is not Name or name not in self._tables.functions or type(arguments) is not tuple:
            raise RefusedPickle(f"calls {_describe(name)}, which is refused")
        self._stack.append(self._tables.functions[name](arguments))

    # --- the stack, the marks in it, and what is kept of it

    def _set_mark(self) -> None:
        self._marks.append(len(self._stack))

    def _keep(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _pop_marked(self) -> list[Any]:
        if (start := self._marks.pop()) > len(self._stack):
            raise RefusedPickle("takes more than there is")
        values = [self._use(value) for value in self._stack[start:]]
        del self._stack[start:]
        return values

    def _top(self, kind: type) -> Any:
        items = self._stack[-1]
        if type(items) is not _Items or type(items.content) is not kind or items.is_used:
            raise RefusedPickle(f"changes {_describe(items)}, which is refused")
        return items.content

    def _use(self, value: Any) -> Any:
        """A value whose content changes no more."""
        if type(value) not in _UNREADY:
            return value
        if type(value) is _Object:
            if value.value is None:
                raise RefusedPickle(f"uses {value.name} before it has fields")
            return value.value
        if type(value) is _Items:
            if value.is_used:
                raise RefusedPickle("uses one list or dict in two places")
            value.is_used = True
            return value.content
        raise RefusedPickle(f"uses {value} as a value, which is refused")

    def _read(self, size: int) -> bytes:
        part = self._content[self._at : self._at + size]
        if len(part) < size:
            raise RefusedPickle("ends too early")
        self._at += size
        return part

    def _read_number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self._read(size), "little", signed=signed)


def _describe(value: Any) -> str:
    return str(value) if type(value) is Name else f"a {type(value).__name__.strip('_').lower()}"


_UNREADY = (_Object, _Items, Name)
_STOP = pickle.STOP[0]
_BY_CODE: dict[bytes, Callable[[_Machine], object]] = {
    pickle.PROTO: _Machine._check_version,
    pickle.FRAME: partial(_Machine._read, size=8),
    pickle.NONE: partial(_Machine._push, value=None),
    pickle.NEWTRUE: partial(_Machine._push, value=True),
    pickle.NEWFALSE: partial(_Machine._push, value=False),
    pickle.BININT1: _Machine._push_byte,
    pickle.BININT2: partial(_Machine._push_number, size=2),
    pickle.BININT: partial(_Machine._push_number, size=4, signed=True),
    pickle.LONG1: _Machine._push_long,
    pickle.SHORT_BINUNICODE: partial(_Machine._push_text, length_bytes=1),
    pickle.BINUNICODE: partial(_Machine._push_text, length_bytes=4),
    pickle.STACK_GLOBAL: _Machine._push_named,
    pickle.EMPTY_LIST: _Machine._push_list,
    pickle.EMPTY_DICT: _Machine._push_dict,
    pickle.EMPTY_TUPLE: partial(_Machine._make_tuple, size=0),
    pickle.TUPLE1: partial(_Machine._make_tuple, size=1),
    pickle.TUPLE2: partial(_Machine._make_tuple, size=2),
    pickle.TUPLE3: partial(_Machine._make_tuple, size=3),
    pickle.MARK: _Machine._set_mark,
    pickle.TUPLE: _Machine._make_marked_tuple,
    pickle.APPEND: _Machine._append,
    pickle.APPENDS: _Machine._append_marked,
    pickle.SETITEM: _Machine._set_item,
    pickle.SETITEMS: _Machine._set_marked,
    pickle.NEWOBJ: _Machine._make_object,
    pickle.BUILD: _Machine._set_fields,
    pickle.REDUCE: _Machine._call,
    pickle.MEMOIZE: _Machine._keep,
    pickle.BINGET: _Machine._push_kept,
    pickle.LONG_BINGET: _Machine._push_kept_far,
}
_OPERATIONS = {code[0]: operation for code, operation in _BY_CODE.items()}
