"""YAML files: their values, and their text with a value changed, put in or taken out. JSON is YAML."""

import json
import re
from typing import Any

import yaml

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.files.yaml import dump

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Reader of YAML; in C where PyYAML was built with it, which is ten times faster."""


def load(text: str) -> Any:
    """The value of a text, as YAML 1.1 has it; ValueError if it is no YAML."""
    try:
        return yaml.load(text, _LOADER)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None


def change(text: str, path: list[str], value: Any) -> str:
    """The text with a value put into a place, or taken out of it."""
    mapping = yaml.compose(text, _LOADER)
    while isinstance(mapping, yaml.MappingNode):
        key, rest = path[0], path[1:]
        pair = next((each for each in mapping.value if each[0].value == key), None)
        if pair is None:
            return text if value is None else _insert(text, mapping, key, _nest(rest, value))
        if rest and isinstance(pair[1], yaml.MappingNode) and pair[1].value:
            mapping, path = pair[1], rest
            continue
        if value is None:
            return _take_out(text, mapping, pair)
        return _put(text, pair, _nest(rest, value))
    raise InvalidConfig(f"{'.'.join(path)} lies in no table")


def _nest(path: list[str], value: Any) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def _put(text: str, pair: tuple[yaml.Node, yaml.Node], value: Any) -> str:
    node, end = pair[1], _find_end(text, pair)
    if node.start_mark.index >= end:  # nothing stood behind the colon
        return f"{text[:end]} {_to_flow(value)}{text[end:]}"
    old = text[node.start_mark.index : end]
    if "#" in old and "\n" in old:
        raise InvalidConfig(f"{pair[0].value} has comments inside, which would be lost")
    written = _to_flow(value, quote=old[:1])
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:  # its lines begin below the key
        return f"{text[: _find_colon(text, pair)]} {written}{text[end:]}"
    return text[: node.start_mark.index] + written + text[end:]


def _find_colon(text: str, pair: tuple[yaml.Node, yaml.Node]) -> int:
    """The place behind the colon of a key."""
    return text.index(":", pair[0].end_mark.index) + 1


def _find_end(text: str, pair: tuple[yaml.Node, yaml.Node]) -> int:
    """The place behind the last letter of a value; marks of blocks end where the next key begins."""
    node = pair[1]
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _find_end(text, last if isinstance(last, tuple) else (pair[0], last))
    if node.start_mark.index == node.end_mark.index:
        return _find_colon(text, pair)
    return len(text[: node.end_mark.index].rstrip())


def _insert(text: str, mapping: yaml.MappingNode, key: str, value: Any) -> str:
    """The text with one more key, before the first of a table in braces, and behind the last of another one."""
    first = mapping.value[0][0] if mapping.value else None
    if mapping.flow_style:
        place = mapping.start_mark.index + 1
        if first is None:
            return f"{text[:place]}{json.dumps(key)}: {_to_flow(value)}{text[place:]}"
        space = text[place : first.start_mark.index]
        return f"{text[:place]}{space}{json.dumps(key)}: {_to_flow(value)},{'' if space else ' '}{text[place:]}"
    assert first is not None, "a table without braces has a key"
    indent = " " * first.start_mark.column
    end = text.find("\n", _find_end(text, mapping.value[-1]))
    end = len(text) if end < 0 else end
    return text[:end] + "".join(f"\n{line}" for line in dump({key: value}, indent)) + text[end:]


def _take_out(text: str, mapping: yaml.MappingNode, pair: tuple[yaml.Node, yaml.Node]) -> str:
    begin, end = pair[0].start_mark.index, _find_end(text, pair)
    if mapping.flow_style:
        after = re.match(r"\s*,\s*", text[end:])
        if after:
            return text[:begin] + text[end + after.end() :]
        before = re.search(r",\s*$", text[:begin])
        return text[: before.start() if before else begin] + text[end:]
    if len(mapping.value) == 1:
        raise InvalidConfig(f"{pair[0].value} is all that its table has")
    line_end = text.find("\n", end)
    line_end = len(text) if line_end < 0 else line_end + 1
    line_begin = text.rfind("\n", 0, begin) + 1
    if text[line_begin:begin].strip():  # behind the dash of a list
        raise InvalidConfig(f"{pair[0].value} begins an entry of a list")
    return text[:line_begin] + text[line_end:]


def _to_flow(value: Any, quote: str = "") -> str:
    """A value on one line, in the quotes of the value before."""
    if isinstance(value, str):
        if quote == "'":
            return "'" + value.replace("'", "''") + "'"
        if quote == '"' or not re.fullmatch(r"[A-Za-z][\w./-]*", value) or load(value) != value:
            return json.dumps(value)
        return value
    if isinstance(value, float):
        text = json.dumps(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    return json.dumps(value)
