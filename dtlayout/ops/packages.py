"""Packages: what a kernel needs beside PyTorch, whether it is here, and how to get it."""

from dataclasses import dataclass, fields
from importlib.util import find_spec

from dtlayout.errors import InvalidConfig
from dtlayout.kernels import Kernels


@dataclass(frozen=True)
class Package:
    """A package that is installed by choice."""

    module: str
    """What is imported."""
    install: str
    """How to get it."""


PACKAGES = {
    "flash-attn": Package("flash_attn", "pip install 'dtlayout[flash-attn]'"),
    "fa3": Package(
        "flash_attn_interface",
        "python setup.py install, in the folder hopper of https://github.com/Dao-AILab/flash-attention",
    ),
    "liger": Package("liger_kernel", "pip install 'dtlayout[liger]'"),
}
"""Kernel → the package that it comes from."""


def find_installed() -> frozenset[str]:
    """The kernels whose package is here; nothing is imported."""
    return frozenset(kernel for kernel, package in PACKAGES.items() if find_spec(package.module) is not None)


def check_packages(kernels: Kernels) -> None:
    """InvalidConfig with a line for each package that some kernel needs and that is not here."""
    installed = find_installed()
    asked = {f.name: getattr(kernels, f.name) for f in fields(kernels)}
    problems = []
    for kernel, package in PACKAGES.items():
        names = [f"kernels.{name}={kernel}" for name, choice in asked.items() if choice == kernel]
        if names and kernel not in installed:
            problems.append(f"{', '.join(names)}: no package {package.module} here; install it: {package.install}")
    if problems:
        raise InvalidConfig(problems)
