"""What CUDA alone takes runs on a CPU too, behind a stand-in, or stands in a list with the reason why it cannot.

A place is a function of a module that imports torch. It uses torch.cuda, pins memory, shares memory between GPUs, or
goes one way on CUDA and another way elsewhere. docs/project/cuda.md has each of them in one of its two tables. The
tests that the first table names are run here, and leave out no statement of the functions that they are named for.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cuda_lines
import pytest
from tiny import ROOT

PAGE = (ROOT / "docs" / "project" / "cuda.md").read_text(encoding="utf-8")
NAMES = ("cuda", "is_cuda", "pin_memory", "symm_mem", "_dump_nccl_trace")
DEVICES = ("cuda", "cpu", "nccl")
Place = tuple[str, str]
"""Path of a module below dtlayout/, and the name of a function in it."""


def list_inside(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all that is inside it, but for annotations."""
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if name not in ("annotation", "returns") and isinstance(child, ast.AST):
                yield from list_inside(child)


def list_functions(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions of a module and methods of its classes, by name; a function's own functions are part of it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield f"{name}{child.name}", child
        elif isinstance(child, (ast.ClassDef, ast.If, ast.Try, ast.With)):
            yield from list_functions(child, f"{name}{child.name}." if isinstance(child, ast.ClassDef) else name)


def imports_torch(tree: ast.Module) -> bool:
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in imports if isinstance(node, ast.ImportFrom)]
    return any(name.partition(".")[0] == "torch" for name in names)


def is_cudas(node: ast.AST) -> bool:
    """Whether this node by itself is used on CUDA alone, or goes another way there."""
    if isinstance(node, ast.Attribute):
        return node.attr in NAMES
    if isinstance(node, ast.keyword):
        return node.arg == "pin_memory"
    if isinstance(node, ast.ImportFrom):  # a package whose kernels are for CUDA alone
        return (node.module or "").startswith("liger_kernel")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("mm", "addmm"):
        return any(each.arg == "out_dtype" for each in node.keywords)  # no CPU has it
    if not isinstance(node, (ast.If, ast.IfExp)):
        return False
    compared = [each for each in ast.walk(node.test) if isinstance(each, ast.Compare)]
    sides = [side for each in compared for side in (each.left, *each.comparators)]
    return any(isinstance(side, ast.Constant) and side.value in DEVICES for side in sides)


def find_places(module: str, source: str) -> dict[Place, ast.FunctionDef]:
    tree = ast.parse(source)
    functions = list_functions(tree) if imports_torch(tree) else ()
    return {(module, name): each for name, each in functions if any(map(is_cudas, list_inside(each)))}


def list_statements(function: ast.FunctionDef) -> Iterator[range]:
    """Lines of each statement of a function; of one with others inside, the lines before these."""
    for node in ast.walk(function):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and node is not function and not is_text and not isinstance(node, ast.Try):
            body = getattr(node, "body", None)
            assert node.end_lineno is not None, "it was parsed from a source"
            yield range(node.lineno, body[0].lineno if body and body[0].lineno > node.lineno else node.end_lineno + 1)


def read_table(title: str) -> dict[Place, str]:
    """Module and function of each row below a heading → its last cell."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.*?) \| (.*) \|$", section, re.MULTILINE)
    return {(module, name): last for module, names, last in rows for name in re.findall(r"`([\w.]+)`", names)}


PLACES = {
    place: function
    for path in sorted((ROOT / "dtlayout").rglob("*.py"))
    for place, function in find_places(
        path.relative_to(ROOT / "dtlayout").as_posix(), path.read_text(encoding="utf-8")
    ).items()
}
TESTED, LISTED = read_table("What runs behind a stand-in"), read_table("What needs a GPU")


def test_each_place_that_cuda_takes_is_in_one_of_the_two_tables() -> None:
    assert not TESTED.keys() & LISTED.keys()
    missing, gone = PLACES.keys() - TESTED.keys() - LISTED.keys(), (TESTED.keys() | LISTED.keys()) - PLACES.keys()
    assert not missing, "run it behind tests/support/cuda.py, or say in docs/project/cuda.md why that cannot be"
    assert not gone, "these have no path of CUDA's own any more"


def test_the_tests_that_are_named_reach_every_statement(tmp_path: Path) -> None:
    """So none of it is named for a test that goes round it."""
    tests = sorted({test for said in TESTED.values() for test in re.findall(r"`(tests/[\w/]+\.py::\w+)`", said)})
    assert not [place for place, said in TESTED.items() if "`tests/" not in said]
    files = {module: str(ROOT / "dtlayout" / module) for module, _ in TESTED}
    environment = {
        cuda_lines.WANTED: "\n".join(files.values()),
        cuda_lines.REACHED: str(tmp_path / "reached.json"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
    }
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "cuda_lines", "-p", "no:xdist", "-p", "no:cacheprovider", *tests],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    reached = {name: set(lines) for name, lines in json.loads((tmp_path / "reached.json").read_text()).items()}
    left_out = [
        f"{module}:{lines.start} in {name}"
        for module, name in TESTED
        for lines in list_statements(PLACES[module, name])
        if not reached[files[module]].intersection(lines)
    ]
    assert not left_out


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        ("return torch.cuda.Stream()", True),
        ("return torch.empty_like(x, pin_memory=True)", True),
        ("return x.pin_memory()", True),
        ("return 1 if x.device.type == 'cpu' else 2", True),
        ("if kind != 'cuda':\n        return 1", True),
        ("def inner():\n        torch.cuda.synchronize()\n    return inner", True),
        ("done: torch.cuda.Event | None = None", False),
        ("is_gpu = kind == 'cuda'", False),
    ],
)
def test_a_new_place_is_seen(body: str, is_found: bool) -> None:
    source = f"import torch\nclass A:\n  def run(self, x, kind):\n    {body}\n"
    assert [*find_places("new.py", source)] == [("new.py", "A.run")] * is_found
    assert not find_places("new.py", source.replace("import torch\n", "import other\n"))
