"""Imports point down only, and everything up to the configuration works without torch."""

import ast
import subprocess
import sys
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dtlayout

ROOT = Path(dtlayout.__file__).parent

LAYERS = {  # lowest first; a module may import its own layer and those above it in this table
    "errors": ["errors"],
    "values": [
        "model_shape", "batch", "device", "kernel", "kernels", "precision", "recompute", "context_parallel", "layout",
        "layout_names",
        "toml", "cluster", "signals", "files", "process", "ranges", "optimizers", "text", "trackers",
        "source_names", "interpreter", "terminal",
        "cgroups", "restarts", "lease",
        "pipelining.actions", "pipelining.placement", "pipelining.waves", "pipelining.orders",
        "pipelining.split_orders", "pipelining.record", "pipelining.schedule_file", "pipelining.schedules",
    ],
    "models": [
        "models.presets", "models.description", "models.families", "models.counting", "models.files",
        "models.hf_config", "models.operations", "models.weights", "models.stored", "models.beside", "models.naming",
    ],
    "planning": [
        "mesh.axes", "plans.plan", "pipelining.partition", "pipelining.schedule",
        "pipelining.timing", "pipelining.timeline", "pipelining.drawing",
    ],
    "configuration": ["config", "keys"],
    "cost model": ["costmodel.*"],
    "planner": ["planner.*", "programs.*"],
    "one device": ["ops.*", "models.llama", "measure.*"],
    "many devices": [
        "mesh.build", "plans.apply", "plans.collectives", "plans.context", "plans.context_pieces", "plans.fsdp",
        "plans.init", "plans.offload", "plans.overlap", "plans.styles", "pipelining.stage",
        "pipelining.split_backward", "pipelining.runtime", "pipelining.tied",
    ],
    "training": ["training.*", "data.*", "checkpoint.*"],
    "calibration": ["calibrate.*"],
    "dry run": ["dryrun.*"],
    "sweep": ["sweep.*"],
    "report": ["report.*"],
    "programs": ["commands.*", "cli", "launch"],
}  # fmt: skip
ORDER = list(LAYERS)
WITHOUT_TORCH = ORDER[: ORDER.index("planner") + 1]

STRANGERS = {  # package: what it never sees
    "models": ("mesh", "plans", "pipelining"),
    "ops": ("mesh", "plans", "pipelining"),
    "plans": ("pipelining",),
    "pipelining": ("plans",),
}


def find_modules() -> dict[str, Path]:
    """Every module of the package but the packages themselves: name below dtlayout → file."""
    files = (path for path in ROOT.rglob("*.py") if path.name != "__init__.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(files)}


MODULES = find_modules()


def layer_of(module: str) -> str | None:
    return next((layer for layer, patterns in LAYERS.items() if any(fnmatch(module, p) for p in patterns)), None)


def modules_in(layers: list[str]) -> list[str]:
    return [module for module in MODULES if layer_of(module) in layers]


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
    source = "import dtlayout.layout\ndef f():\n  from dtlayout.plans import plan\n  from dtlayout.batch import Batch\n"
    assert imported_modules(source) == {"layout", "plans.plan", "batch"}
    assert imported_names("if x:\n  import torch.nn as nn") == {"torch.nn"}
    with pytest.raises(AssertionError, match="the module that defines it"):
        imported_modules("from dtlayout import Layout")
    with pytest.raises(AssertionError, match="name the whole path"):
        imported_modules("from .layout import Layout")


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_layer(module):
    assert layer_of(module), (
        f"dtlayout.{module} is in no layer: add it to LAYERS in tests/test_architecture.py, "
        f"in the lowest layer that still lies above all that it imports ({', '.join(sorted(imports_of(module)))})"
    )


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    layer = ORDER.index(layer_of(module) or ORDER[-1])
    upward = [other for other in imports_of(module) if ORDER.index(layer_of(other) or ORDER[-1]) > layer]
    assert not upward, f"{module} ({ORDER[layer]}) imports {', '.join(f'{m} ({layer_of(m)})' for m in upward)}"


def test_no_module_imports_itself_in_a_circle():
    order = list(TopologicalSorter({module: imports_of(module) for module in MODULES}).static_order())
    assert sorted(order) == sorted(MODULES)


@pytest.mark.parametrize("package", STRANGERS)
def test_packages_that_are_strangers_never_meet(package):
    for module in MODULES:
        if module.startswith(f"{package}."):
            for stranger in STRANGERS[package]:
                assert not names_package(imports_of(module), stranger), f"{module} imports from {stranger}"


@pytest.mark.parametrize("module", modules_in(WITHOUT_TORCH))
def test_a_pure_module_never_imports_torch_even_in_a_function(module):
    assert not names_package(imported_names(MODULES[module].read_text()), "torch")


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith(("ops.", "models.", "measure."))])
def test_what_computes_and_measures_on_one_device_knows_no_other(module):
    assert not names_package(imported_names(MODULES[module].read_text()), "torch.distributed")


@pytest.mark.parametrize("path", sorted(ROOT.glob("*/__init__.py")), ids=lambda path: path.parent.name)
def test_importing_a_package_imports_none_of_its_modules(path):
    assert imported_names(path.read_text()) == set()


def test_values_load_neither_torch_nor_numpy():
    values = modules_in(["errors", "values"])
    loaded = loaded_after_importing(["dtlayout", *(f"dtlayout.{module}" for module in values)])
    assert "dtlayout" in loaded
    assert loaded & {"torch", "numpy", "tomli_w"} == set()


def test_planning_configuration_and_commands_start_without_torch():
    modules = modules_in([*WITHOUT_TORCH, "programs"])
    assert "torch" not in loaded_after_importing([f"dtlayout.{module}" for module in modules])


def test_every_public_name_is_where_the_package_says():
    assert dir(dtlayout) == dtlayout.__all__
    for name in dtlayout.__all__:
        assert getattr(dtlayout, name).__module__.startswith("dtlayout."), name


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'dtlayout' has no attribute 'Layuot'"):
        dtlayout.Layuot  # noqa: B018
