"""Imports point down only, and what plans, predicts and refuses works without torch."""

import ast
import re
import subprocess
import sys
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dtlayout

ROOT = Path(dtlayout.__file__).parent

FOLDERS = [  # bottom to top; a module imports from its own folder and from those before it (architecture.md)
    "base", "schedules", "spec", "ops", "models", "tracing", "measure", "mesh", "plans", "pipelining", "costmodel",
    "records", "config", "planner", "programs", "validation", "data", "checkpoint", "training", "dryrun", "sweep",
    "report", "calibrate", "web", "commands", "api",
]  # fmt: skip
TOP = len(FOLDERS)
"""The place of `__main__`, `cli` and `launch`, which lie in no folder."""

WITH_TORCH = [  # modules or folders that may import torch; all others plan, predict and refuse without it
    "ops.*", "models.adapted", "models.llama", "models.feed_forward", "tracing.*", "measure.*", "mesh.build",
    "mesh.opening", "mesh.parts", "plans.apply", "plans.cast_gather", "plans.collectives", "plans.context",
    "plans.attention_tiles",
    "plans.disk", "plans.experts", "plans.fake_quantize", "plans.fsdp", "plans.fsdp_records", "plans.init",
    "plans.offload", "plans.overlap", "plans.quantize", "plans.scale", "plans.styles", "plans.weight_sums",
    "pipelining.stage", "pipelining.split_backward", "pipelining.runtime", "pipelining.tied", "data.*", "checkpoint.*",
    "training.*", "dryrun.*", "sweep.*", "report.*", "calibrate.*", "commands.*", "api.pieces", "api.described",
    "__main__", "cli", "launch",
]  # fmt: skip

STRANGERS = {  # package: what it never sees
    "models": ("mesh", "plans", "pipelining"),
    "ops": ("mesh", "plans", "pipelining"),
    "tracing": ("mesh", "plans", "pipelining"),
    "plans": ("pipelining",),
    "pipelining": ("plans",),
}


def find_modules() -> dict[str, Path]:
    """Every module of the package but the packages themselves: name below dtlayout → file."""
    files = (path for path in ROOT.rglob("*.py") if path.name != "__init__.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(files)}


MODULES = find_modules()


def place_of(module: str) -> int:
    """The place of a module's folder, from bottom to top."""
    folder, _, name = module.partition(".")
    return FOLDERS.index(folder) if name else TOP


def is_pure(module: str) -> bool:
    return not any(fnmatch(module, pattern) for pattern in WITH_TORCH)


def imported_names(source: str) -> set[str]:
    """Full dotted names of everything that a source imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports name the whole path: from dtlayout.package.module import …"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def imported_modules(source: str) -> set[str]:
    """The modules of dtlayout that a source imports, as names below dtlayout."""
    found = set()
    for name in imported_names(source):
        if name.split(".")[0] == "dtlayout":
            parts = name.split(".")[1:]
            known = [".".join(parts[:i]) for i in range(1, len(parts) + 1) if ".".join(parts[:i]) in MODULES]
            assert known, f"inside the package, import {name} from the module that defines it"
            found.add(known[-1])
    return found


def imports_of(module: str) -> set[str]:
    return imported_modules(MODULES[module].read_text())


def names_package(imported: set[str], package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imported)


def loaded_after_importing(modules: list[str]) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter that has imported these."""
    code = "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, cwd=ROOT.parent)
    assert answer.returncode == 0, answer.stderr
    return {name.partition(".")[0] for name in answer.stdout.split()}


def test_imports_are_seen_in_functions_and_under_every_spelling():
    source = (
        "import dtlayout.spec.layout\n"
        "def f():\n  from dtlayout.plans import plan\n  from dtlayout.spec.batch import Batch\n"
    )
    assert imported_modules(source) == {"spec.layout", "plans.plan", "spec.batch"}
    assert imported_names("if x:\n  import torch.nn as nn") == {"torch.nn"}
    with pytest.raises(AssertionError, match="the module that defines it"):
        imported_modules("from dtlayout import Layout")
    with pytest.raises(AssertionError, match="name the whole path"):
        imported_modules("from .layout import Layout")


def test_every_module_lies_in_a_folder_of_the_list_but_those_that_start_everything():
    assert {module for module in MODULES if "." not in module} == {"__main__", "cli", "launch"}
    assert {module.split(".")[0] for module in MODULES if "." in module} == set(FOLDERS)


def test_the_page_about_the_architecture_has_the_same_list_and_a_sentence_for_each():
    page = (ROOT.parent / "docs" / "project" / "architecture.md").read_text()
    assert re.findall(r"^\| `(\w+)/` \| \S.*\S \|$", page, re.M) == FOLDERS


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    upward = [other for other in imports_of(module) if place_of(other) > place_of(module)]
    assert not upward, f"{module} imports {', '.join(upward)}, of folders above its own: {FOLDERS}"


def test_no_module_imports_itself_in_a_circle():
    order = list(TopologicalSorter({module: imports_of(module) for module in MODULES}).static_order())
    assert sorted(order) == sorted(MODULES)


@pytest.mark.parametrize("package", STRANGERS)
def test_packages_that_are_strangers_never_meet(package):
    for module in MODULES:
        if module.startswith(f"{package}."):
            for stranger in STRANGERS[package]:
                assert not names_package(imports_of(module), stranger), f"{module} imports from {stranger}"


@pytest.mark.parametrize("module", list(filter(is_pure, MODULES)))
def test_a_pure_module_never_imports_torch_even_in_a_function(module):
    assert not names_package(imported_names(MODULES[module].read_text()), "torch")


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith(("ops.", "models.", "tracing.", "measure."))])
def test_what_computes_and_measures_on_one_device_knows_no_other(module):
    assert not names_package(imported_names(MODULES[module].read_text()), "torch.distributed")


@pytest.mark.parametrize("path", sorted(ROOT.glob("*/__init__.py")), ids=lambda path: path.parent.name)
def test_importing_a_package_imports_none_of_its_modules(path):
    assert imported_names(path.read_text()) == set()


def test_values_load_neither_torch_nor_numpy():
    values = [module for module in MODULES if module.startswith(("base.", "schedules.", "spec."))]
    loaded = loaded_after_importing(["dtlayout", *(f"dtlayout.{module}" for module in values)])
    assert "dtlayout" in loaded
    assert loaded & {"torch", "numpy", "tomli_w"} == set()


def test_planning_configuration_and_commands_start_without_torch():
    modules = [m for m in MODULES if is_pure(m) or m.startswith("commands.") or m in ("__main__", "cli", "launch")]
    assert "torch" not in loaded_after_importing([f"dtlayout.{module}" for module in modules])


def test_every_public_name_is_where_the_package_says():
    assert dir(dtlayout) == dtlayout.__all__
    for name in dtlayout.__all__:
        assert getattr(dtlayout, name).__module__.startswith("dtlayout."), name


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'dtlayout' has no attribute 'Layuot'"):
        dtlayout.Layuot  # noqa: B018
