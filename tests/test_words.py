"""One word, one meaning: class names are unique, and no docstring opens with a word whose subject stands elsewhere."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtlayout

PACKAGE = Path(dtlayout.__file__).parent
ROOT = PACKAGE.parent


def read_sources(*folders: Path) -> dict[str, str]:
    """Path below the checkout → source, of all modules in some folders."""
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


SOURCES = read_sources(PACKAGE)
BESIDE = read_sources(ROOT / "benchmarks", ROOT / "examples")

PRONOUN = (
    "Of|It|Its|They|Them|Their|He|His|Who|Whom|Whose|Which|Where|What|Those|These|That|Such|As|Beyond|Nothing|Likewise|"
    "Ditto|And|Or|But|The (?:same|others?|ones?)|One (?:that|who)"
)
RELATIVE = "(?:For|In|From|By|To|With|At|On|Of) (?:which|whom|what|that|it|them|those|these)"
OPENER = re.compile(rf"(?:{PRONOUN}|{RELATIVE})\b")

HOW_TO_WRITE = """
A docstring is read alone, in an editor. Begin with a concrete noun or a verb: a function's docstring says what it
returns or does, an attribute's what it holds. For example:
    not "What the first ranks send."              but "Bytes that the first ranks send."
    not "Of a schedule that nobody knows."        but "Idle share of a schedule without a closed form."
    not "The same, of gradients."                 but "Shape of the gradients, like that of `parameters`."
"""


def public_names(source: str) -> set[str]:
    """The classes and the capitalised aliases, like `Axis = str`, of a module that other modules may import."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return {name for name in names if re.match(r"[A-Z]\w*[a-z]", name)}


def find_doubles(sources: dict[str, str]) -> dict[str, list[str]]:
    """Each public name that several modules define → these modules."""
    modules = defaultdict(list)
    for path, source in sources.items():
        for name in public_names(source):
            modules[name].append(path)
    return {name: paths for name, paths in modules.items() if len(paths) > 1}


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a source: of module, classes, functions, and below attributes."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text.strip()


def find_riddles(sources: dict[str, str]) -> list[str]:
    """File, line and first line of each docstring that opens with a word whose subject stands elsewhere."""
    return [
        f"{path}:{line}: {text.splitlines()[0]}"
        for path, source in sources.items()
        for line, text in docstrings(source)
        if OPENER.match(text)
    ]


def test_public_class_names_are_unique():
    doubles = find_doubles(SOURCES)
    assert not doubles, f"one name, one meaning: rename all but one of {doubles}"


def test_no_docstring_opens_with_a_word_whose_subject_stands_elsewhere():
    assert {path.partition("/")[0] for path in BESIDE} == {"benchmarks", "examples"}
    riddles = find_riddles(SOURCES | BESIDE)
    assert not riddles, "\n".join([f"{len(riddles)} docstrings:", *riddles, HOW_TO_WRITE])


def test_doubled_classes_and_aliases_are_found_and_private_names_and_constants_are_not():
    sources = {
        "a.py": "class Step: ...\nRank = int\nWIDTH = 3\nclass _Own: ...",
        "b.py": "class Step: ...\nRank: type = str\nWIDTH = 4\nclass _Own: ...",
    }
    assert find_doubles(sources) == {"Step": ["a.py", "b.py"], "Rank": ["a.py", "b.py"]}


@pytest.mark.parametrize(
    ("text", "is_riddle"),
    [
        ("What it holds.", True),
        ("The same, of gradients.", True),
        ("For which nothing is known.", True),
        ("Whatever", False),
        ("Bytes that a rank sends.", False),
        ("For each rank, bytes.", False),
    ],
)
def test_openers_are_found_below_modules_classes_functions_and_attributes(text, is_riddle):
    templates = ['"""{}"""', 'class A:\n  """{}"""', 'def f():\n  """{}"""', 'class A:\n  x: int = 1\n  """{}"""']
    for template in templates:
        assert bool(find_riddles({"a.py": template.format(text)})) == is_riddle
